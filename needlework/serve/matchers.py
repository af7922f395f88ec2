"""The grammars of the requests that have one: each request's matcher, from where it is compiled to the end of its answer."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from needlework.serve.interface import GrammarError
from needlework.serve.request import Request
from needlework.serve.step import Step


class Matcher(Protocol):
    """A request's way through its grammar."""

    def copy(self) -> "Matcher":
        """Another request's, from here on."""

    def bits(self) -> Tensor:
        """[⌈V/32⌉] int32: a bit for each token that may come next."""

    def take(self, token: int) -> bool:
        """Go on by a token; whether the grammar is then at its end. GrammarError where it cannot go on."""


class Matchers:
    """By request. make: compiles a grammar; None: a grammar is refused."""

    def __init__(self, make: Callable[[str], Matcher] | None):
        self._make = make
        self._own: dict[str, Matcher] = {}

    def compiled(self, requests: Sequence[Request]) -> dict[str, Matcher]:
        """Those of requests that are to come. A grammar of several is compiled once, in the thread that asks. Raises GrammarError."""
        made: dict[str, Matcher] = {}
        for grammar in {one.grammar for one in requests} - {None}:
            if self._make is None or grammar is None:
                raise GrammarError("grammar: this engine was made without one")
            made[grammar] = self._make(grammar)
        return {one.id: made[one.grammar].copy() for one in requests if one.grammar is not None}

    def add(self, matchers: dict[str, Matcher]) -> None:
        self._own |= matchers

    def drop(self, id: str) -> None:
        self._own.pop(id, None)

    def bits(self, step: Step) -> dict[str, Tensor]:
        """What those may say next that the step samples and that have a grammar."""
        return {one.id: self._own[one.id].bits() for one in step.sampled if one.id in self._own} if self._own else {}

    def bind(self, step: Step) -> bool:
        """Whether one that it samples has a grammar."""
        return bool(self._own) and any(one.id in self._own for one in step.sampled)

    def take(self, id: str, token: int) -> bool:
        """Whether the answer is at the end of its grammar, if it has one. Raises GrammarError."""
        return id in self._own and self._own[id].take(token)
