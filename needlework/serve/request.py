"""What a client sends and what it gets: Request, its Sampling, and the Events of its stream."""

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from needlework.fields import Count, Natural, NonNegative, Positive, Range, Seed, Share, fit, fitted

Nucleus = Annotated[float, Range("in (0, 1]", lambda x: 0 < x <= 1)]
Penalty = Annotated[float, Range("in [-2, 2]", lambda x: -2 <= x <= 2)]
# A prompt of 16,384 tokens is checked in half a millisecond by one test of the whole, in 20 by one of each element.
Prompt = Annotated[tuple, Range("of at least one token id >= 0", lambda x: len(x) > 0 and _ids(x))]
Tokens = Annotated[frozenset, Range("of token ids >= 0", lambda x: _ids(x))]
Finish = Literal["stop", "length", "cancelled", "error", "refused"]


def _ids(tokens: tuple | frozenset) -> bool:
    return all(type(token) is int and token >= 0 for token in tokens)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn from the logits: penalties first, then temperature, top_k, top_p and min_p.

    temperature: 0 takes the most likely token. top_k: 0 keeps all. top_p: 1 keeps all. min_p: share of the largest probability that a
    token needs. seed: the same request with the same seed gives the same tokens in any batch; None: the engine draws one. logprobs: so
    many of the most likely tokens come with each; None: no logprobs.
    Raises ValueError for a field that does not have its type and range.

    >>> from needlework.serve import Sampling
    >>> Sampling(temperature=0.7, top_p=0.95, seed=1).top_k
    0
    """

    temperature: NonNegative = 1.0
    top_k: Natural = 0
    top_p: Nucleus = 1.0
    min_p: Share = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Positive = 1.0
    seed: Seed | None = None
    logprobs: Natural | None = None

    def __post_init__(self):
        fit("sampling", self)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to continue by at most max_tokens tokens.

    stop_tokens: each ends the answer. grammar: what the answer must match, as `grammar.py` reads it; None: anything.
    Raises ValueError for a field that does not have its type and range.

    >>> from needlework.serve import Request, Sampling
    >>> Request(id="a", prompt=(5, 7, 11), max_tokens=16, sampling=Sampling(temperature=0.0), stop_tokens=frozenset({2})).prompt
    (5, 7, 11)
    """

    id: str
    prompt: Prompt
    max_tokens: Count
    sampling: Sampling = Sampling()
    stop_tokens: Tokens = frozenset()
    grammar: str | None = None

    def __post_init__(self):
        fit("request", self)


class _Fields(NamedTuple):
    token: int | None
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    finish: Finish | None
    error: str | None


class Event(_Fields):
    """One token of an answer, or its end, or both. top: (token, logprob) of the most likely ones. error: what went wrong, and where
    `finish` is "refused" with its grammar.

    Raises ValueError for another `finish`. The other fields are an engine's own and are not checked: each token is an event, and a check of
    all costs as much as the rest of its way.
    """

    __slots__ = ()

    def __new__(
        cls,
        token: int | None = None,
        logprob: float | None = None,
        top: tuple[tuple[int, float], ...] = (),
        finish: Finish | None = None,
        error: str | None = None,
    ) -> "Event":
        if finish is not None:
            fitted("event", "finish", finish, Finish)
        return super().__new__(cls, token, logprob, top, finish, error)
