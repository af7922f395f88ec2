"""Text in, tokens out, and back: prompts, conversations, the text of an answer as its tokens come, and the strings that end it.

A character may be spread over tokens, and a stop string too: what is not whole yet is held back.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from needlework.data.tokenizer import byte_alphabet
from needlework.models.tokenizer import Messages, Vocabulary, load_vocabulary

TORN = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet
MISSING = 3  # at most so many of them may still become a character: UTF-8 has four bytes at most
CONTEXT = 8  # tokens in front of an answer that its first is decoded behind
LONG = 64  # tokens that are kept for a character that does not come


class Piece(NamedTuple):
    """A token by itself. bytes: None where the tokenizer does not tell them."""

    text: str
    bytes: tuple[int, ...] | None


class Text:
    """A checkpoint's vocabulary, for many answers at once and from any thread."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary, self._tokenizer = vocabulary, vocabulary.tokenizer
        self._bytes = {character: byte for byte, character in enumerate(byte_alphabet())}

    @classmethod
    def load(cls, folder: Path) -> "Text":
        return cls(load_vocabulary(folder))

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a text."""
        return self._vocabulary.ends

    @property
    def size(self) -> int:
        """Tokens that it has."""
        return self._tokenizer.get_vocab_size()

    @property
    def tokenizer_json(self) -> str:
        return self._tokenizer.to_str()

    def encode(self, text: str) -> tuple[int, ...]:
        """A prompt's tokens; of an empty one, that which begins a text, if there is one."""
        ids = tuple(self._tokenizer.encode(text).ids)
        begin = self._vocabulary.begin
        return ids or (() if begin is None else (begin,))

    def conversation(self, messages: Messages) -> tuple[int, ...]:
        """ValueError where there is no chat template, or it refuses the messages."""
        if self._vocabulary.chat is None:
            raise ValueError("this checkpoint has no chat template, so it answers completions alone (/v1/completions)")
        return tuple(self._tokenizer.encode(self._vocabulary.chat(messages), add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def piece(self, token: int) -> Piece:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        if TORN not in text:
            return Piece(text, tuple(text.encode()))
        written = self._tokenizer.id_to_token(token) or ""
        known = all(character in self._bytes for character in written)
        return Piece(text, tuple(self._bytes[character] for character in written) if known else None)

    def after(self, prompt: Sequence[int]) -> "Incremental":
        """The text of an answer to that prompt, as its tokens come."""
        return Incremental(self.decode, prompt[-CONTEXT:])


class Incremental:
    """The text of tokens as they come, in whole characters. What `push` and `rest` give is, joined, the text of all tokens.

    Tokens are decoded behind some that were, because a decoder may strip or add a space at the front. Some decoders take back a
    character when bytes follow it that are none yet, and give it again with the next one: until then nothing is given.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()):
        self._decode = decode
        self._tokens = list(context)
        self._known = len(self._tokens)  # of them: those whose characters were whole when they came
        self._given = _whole(decode(self._tokens))  # of the tokens' text

    def push(self, tokens: Sequence[int]) -> str:
        self._tokens += tokens
        text = self._decode(self._tokens)
        if not text.startswith(self._given):
            if len(self._tokens) <= LONG:
                return ""
            text = self._apart()
        whole = _whole(text)
        new = self._give(whole)
        if whole == text:
            self._forget(self._known, text)
        elif len(self._tokens) > LONG:
            self._forget(len(self._tokens) - CONTEXT, text)
        return new

    def rest(self) -> str:
        """What was held back, now that no token comes."""
        text = self._decode(self._tokens)
        return self._give(text if text.startswith(self._given) else self._apart())

    def _give(self, text: str) -> str:
        new = text[len(self._given) :]
        self._given += new
        return new

    def _apart(self) -> str:
        """The text of the tokens that made no character, by itself: the character that was taken back stays given."""
        self._tokens, self._known, self._given = self._tokens[self._known :], 0, ""
        return self._decode(self._tokens)

    def _forget(self, count: int, text: str) -> None:
        """Drops the first `count` tokens, if the text of the others is the same without them."""
        kept = self._decode(self._tokens[count:])
        held = len(text) - len(self._given)
        if kept and held <= len(kept) and text.endswith(kept):
            self._tokens, self._given = self._tokens[count:], kept[: len(kept) - held]
        self._known = len(self._tokens)


def _whole(text: str) -> str:
    """Without what may still become a character."""
    torn = len(text) - len(text.rstrip(TORN))
    return text[: len(text) - min(torn, MISSING)]


class Stops:
    """Text up to the first of some strings that is complete. found: whether one was."""

    def __init__(self, stops: Sequence[str]):
        self._stops, self._longest = tuple(stops), max(map(len, stops), default=0)
        self._held, self.found = "", False

    def push(self, text: str) -> str:
        """What of the text is in front of a stop string, and cannot be the beginning of one."""
        if not self._stops:
            return text
        held = self._held + text
        complete = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if complete:
            self.found, self._held = True, ""
            return held[: min(complete)[1]]
        begins = range(max(0, len(held) - self._longest + 1), len(held))
        cut = next((i for i in begins if any(stop.startswith(held[i:]) for stop in self._stops)), len(held))
        self._held = held[cut:]
        return held[:cut]

    def rest(self) -> str:
        """What was held back, now that no text comes."""
        held, self._held = self._held, ""
        return held
