"""One number of a suite, and each document's part in it, so that an interval can be drawn later, without the model.

value = f(sum_i a_i / sum_i w_i)        a_i, w_i of document i; w_i = 1 where no weights are held
f(x) = x for a mean, f(x) = e^x for a perplexity, whose a_i are nats and w_i the words or tokens that they are of
"""

import math
from collections.abc import Sequence
from typing import NotRequired, TypedDict

AS_IT_IS = frozenset(
    {"word_perplexity", "perplexity", "nats", "absent_nats"}
)  # lower is better; every other metric is a share in 0..1


class Unavailable(Exception):
    """A task that cannot be had or measured; the message is the reason."""


class Number(TypedDict):
    """value, and what it was taken over: `documents` are the a_i; weights the w_i; exp: whether f is e^x."""

    value: float
    documents: list[float]
    weights: NotRequired[list[float]]
    exp: NotRequired[bool]


def number(documents: Sequence[float], weights: Sequence[float] | None = None, *, exp: bool = False) -> Number:
    """The Number of these documents. Unavailable if there is none, or if its value is not finite."""
    if not documents:
        raise Unavailable("it has no document")
    total = sum(weights) if weights is not None else len(documents)
    ratio = sum(documents) / total
    value = ratio if not exp else math.exp(ratio) if ratio < 709 else math.inf  # e^709 is the largest in float64
    if not math.isfinite(value):
        raise Unavailable(f"its value is {'e^' * exp}{ratio:g}, which is no finite number")
    found = Number(value=value, documents=list(documents))
    if weights is not None:
        found["weights"] = list(weights)
    if exp:
        found["exp"] = True
    return found
