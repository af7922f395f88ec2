"""What an answer must match: a JSON schema or a regular expression, as masks of the tokens that may come next.

llguidance compiles a grammar in milliseconds and a mask in tens of microseconds; the largest that it takes, in half a second without the
interpreter's lock. JSON is written as json.dumps writes it, on one line: where any white space is allowed, a model may write white space
for ever. A schema's own "x-guidance" says otherwise.
"""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from needlework.serve.interface import GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from needlework.serve.text import Text

# What bounds the time: llguidance's own limits are of the lexer's size, and these of the text. The largest take half a second.
SCHEMA = 1 << 16  # characters
PATTERNS = 1 << 13  # characters of regular expressions, together; their time grows by the square
STATE = "\n<state>"  # what follows is llguidance's
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def of_schema(schema: dict[str, Any]) -> str:
    """The grammar of the JSON values that a schema describes, as a Request holds it. ValueError for one that is too large."""
    written = json.dumps(schema)
    _sized("a schema", len(written), SCHEMA)
    _sized("regular expressions", _patterns(schema), PATTERNS)
    return _matcher().grammar_from_json_schema(written, defaults=SPACING)


def of_regex(pattern: str) -> str:
    """The grammar of the texts that a regular expression matches whole. ValueError for one that is too large."""
    _sized("a regular expression", len(pattern), PATTERNS)
    return _matcher().grammar_from_regex(pattern)


def _sized(what: str, found: int, most: int) -> None:
    if found > most:
        raise ValueError(f"{what} of {found} characters, expected at most {most}")


def _patterns(schema: Any) -> int:
    """Characters of a schema's regular expressions."""
    if isinstance(schema, list):
        return sum(map(_patterns, schema))
    if not isinstance(schema, dict):
        return 0
    names = schema.get("patternProperties")
    own = [schema.get("pattern"), schema.get("whitespace_pattern"), *(names if isinstance(names, dict) else ())]
    return sum(len(text) for text in own if isinstance(text, str)) + sum(map(_patterns, schema.values()))


def _matcher() -> "type[LLMatcher]":
    try:
        from llguidance import LLMatcher
    except ModuleNotFoundError:
        raise ValueError("grammars need llguidance; pip install 'needlework[serve]'") from None
    return LLMatcher


def maker(text: "Text", vocabulary: int) -> Callable[[str], "Matcher"]:
    """A Grammar. Where there can be none, what refuses each request's with the reason: the others are served all the same."""
    try:
        return Grammar(text, vocabulary)
    except ValueError as error:
        reason = str(error)

    def refuse(grammar: str) -> "Matcher":
        raise GrammarError(f"grammar: {reason}")

    return refuse


class Grammar:
    """Makes the matcher of a request's grammar, over one tokenizer. vocabulary: tokens that the model has logits of.

    Raises ValueError without llguidance, and for a tokenizer that it cannot read.
    """

    def __init__(self, text: "Text", vocabulary: int):
        self._matcher, self._words = _matcher(), -(-vocabulary // 32)
        from llguidance import LLTokenizer

        ends = sorted(text.ends) or None
        try:
            self._tokenizer = LLTokenizer(text.tokenizer_json, n_vocab=vocabulary, eos_token=ends, slices=None)
        except ValueError as error:
            raise ValueError(
                f"llguidance cannot read this model's tokenizer, expected one that decodes by ByteLevel or ByteFallback: {error}"
            ) from error

    def __call__(self, grammar: str) -> "Matcher":
        """GrammarError for a grammar that llguidance does not take, with its reason.

        Its lexer is built by the first mask, and says at the first token whether that was within its limits.
        """
        matcher = self._matcher(self._tokenizer, grammar, log_level=0)
        _check(matcher)
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        trial = matcher.deep_copy()
        trial.consume_token((allowed & -allowed).bit_length() - 1)
        _check(trial)
        return Matcher(matcher, self._words)


def _check(matcher: "LLMatcher") -> None:
    if matcher.is_error():
        raise GrammarError(f"grammar: {matcher.get_error().partition(STATE)[0].strip()}")


class Matcher:
    """A request's way through its grammar. words: ⌈V/32⌉; llguidance's mask has one more where 32 divides V."""

    def __init__(self, matcher: "LLMatcher", words: int):
        self._matcher, self._words = matcher, words

    def copy(self) -> "Matcher":
        """Another request's, from here on."""
        return Matcher(self._matcher.deep_copy(), self._words)

    def bits(self) -> Tensor:
        """[⌈V/32⌉] int32: a bit for each token that may come next; the token that ends a text is one once the grammar is matched."""
        return torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.int32)[: self._words]

    def take(self, token: int) -> bool:
        """Go on by a token; whether nothing can follow it. GrammarError where the grammar is beyond llguidance's limits."""
        self._matcher.consume_token(token)
        _check(self._matcher)
        return self._matcher.is_stopped()
