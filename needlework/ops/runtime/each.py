"""A function of every tensor among a call's arguments, which may also be None or numbers."""

from collections.abc import Callable
from typing import TypeVarTuple

from torch import Tensor

Ts = TypeVarTuple("Ts")


def each(f: Callable[[Tensor], Tensor], *arguments: *Ts) -> tuple[*Ts]:
    """f of the tensors, the rest as it is: a NamedTuple's fields keep their types in `Fields(*each(f, *fields))`."""
    return tuple(f(x) if isinstance(x, Tensor) else x for x in arguments)  # pyrefly: ignore[bad-return] (one by one)
