"""Tensors among a call's arguments, which may also be None or numbers."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, TypeVarTuple

from torch import Tensor

Ts = TypeVarTuple("Ts")
X = TypeVar("X")


def each(f: Callable[[Tensor], Tensor], *arguments: *Ts) -> tuple[*Ts]:
    """f of the tensors, the rest as it is: a NamedTuple's fields keep their types in `Fields(*each(f, *fields))`."""
    return tuple(f(x) if isinstance(x, Tensor) else x for x in arguments)  # pyrefly: ignore[bad-return] (one by one)


def every(kind: type[X], x: Any) -> Iterator[X]:
    """All of a kind in x, its lists and tuples."""
    if isinstance(x, kind):
        yield x
    elif isinstance(x, list | tuple):
        for y in x:
            yield from every(kind, y)
