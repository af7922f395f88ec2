"""What an answer must match: a JSON schema or a regular expression, as masks of the tokens that may come next.

llguidance compiles a grammar in milliseconds and a mask in tens of microseconds. JSON is written as json.dumps writes it, on one line:
where any white space is allowed, a model may write white space for ever. A schema's own "x-guidance" says otherwise.
"""

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from needlework.serve.text import Text

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def of_schema(schema: dict[str, Any]) -> str:
    """The grammar of the JSON values that a schema describes, as a Request holds it."""
    return _matcher().grammar_from_json_schema(json.dumps(schema), defaults=SPACING)


def of_regex(pattern: str) -> str:
    """The grammar of the texts that a regular expression matches whole."""
    return _matcher().grammar_from_regex(pattern)


def _matcher() -> "type[LLMatcher]":
    try:
        from llguidance import LLMatcher
    except ModuleNotFoundError:
        raise ValueError("grammars need llguidance; pip install 'needlework[serve]'") from None
    return LLMatcher


class Grammar:
    """Makes the matcher of a request's grammar, over one tokenizer. vocabulary: tokens that the model has logits of."""

    def __init__(self, text: "Text", vocabulary: int):
        self._matcher = _matcher()
        from llguidance import LLTokenizer

        self._tokenizer = LLTokenizer(text.tokenizer_json, n_vocab=vocabulary, eos_token=sorted(text.ends) or None, slices=None)

    def __call__(self, grammar: str) -> "Matcher":
        """ValueError for a grammar that llguidance does not take, with its reason."""
        matcher = self._matcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"grammar: {matcher.get_error()}")
        return Matcher(matcher)


class Matcher:
    """A request's way through its grammar."""

    def __init__(self, matcher: "LLMatcher"):
        self._matcher = matcher

    def bits(self) -> Tensor:
        """[⌈V/32⌉] int32: a bit for each token that may come next; the token that ends a text is one once the grammar is matched."""
        return torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.int32)

    def take(self, token: int) -> bool:
        """Go on by a token; whether nothing can follow it. ValueError where the grammar is beyond llguidance's limits."""
        self._matcher.consume_token(token)
        if self._matcher.is_error():  # what follows the first line is llguidance's state
            raise ValueError(f"grammar: {self._matcher.get_error().partition(chr(10))[0]}")
        return self._matcher.is_stopped()
