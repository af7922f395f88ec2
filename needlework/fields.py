"""A config field's type says its range: `heads: Count`, `window: Count | None`, `solve: Literal["window", "global"]`.

Every range of the package is declared here; a frozen dataclass calls `fit` in its __post_init__.

`fitted` returns a value as its field's type has it: a whole number becomes a float where the field is one, a list a tuple. What does
not fit is a ValueError that names the config, the field, the value and the range. Numbers are finite.
"""

import dataclasses
import math
import operator
from collections.abc import Callable
from functools import cache
from numbers import Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints


class Range(NamedTuple):
    """Beside a type in Annotated: the range in words, and whether a value is in it."""

    words: str
    holds: Callable[[Any], bool]


Count = Annotated[int, Range(">= 1", lambda n: n >= 1)]
Natural = Annotated[int, Range(">= 0", lambda n: n >= 0)]
AtLeastTwo = Annotated[int, Range(">= 2", lambda n: n >= 2)]
Seed = Annotated[int, Range(">= 0, of 64 bits", lambda n: 0 <= n < 1 << 64)]  # as PyTorch's generators take them
Positive = Annotated[float, Range("> 0", lambda x: x > 0)]
AboveOne = Annotated[float, Range("> 1", lambda x: x > 1)]
NonNegative = Annotated[float, Range(">= 0", lambda x: x >= 0)]
Share = Annotated[float, Range("in [0, 1)", lambda x: 0 <= x < 1)]
Inside = Annotated[float, Range("in (0, 1)", lambda x: 0 < x < 1)]
Portion = Annotated[float, Range("in [0, 1]", lambda x: 0 <= x <= 1)]

_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a string", NoneType: "None"}


@cache
def types(config: type) -> dict[str, Any]:
    """The type of each field of a config's class, ranges included."""
    return get_type_hints(config, include_extras=True)


def fit(where: str, config: Any) -> None:
    """Every field of a frozen dataclass as its type has it; for its __post_init__. Raises what `fitted` raises."""
    kinds = types(type(config))
    for field in dataclasses.fields(config):
        value = fitted(where, field.name, getattr(config, field.name), kinds[field.name])
        object.__setattr__(config, field.name, value)


def fitted(where: str, name: str, value: Any, kind: Any) -> Any:
    """`value` of field `name` as the type `kind` has it; ValueError "{where}: {name} is …, expected …" if it does not fit."""
    try:
        return _fit(value, kind)
    except (_Misfit, OverflowError):
        raise ValueError(f"{where}: {name} is {value!r}, expected {expected(kind)}") from None


class _Misfit(Exception):
    """A value is not of a type; only `fitted` sees it."""


def _fit(value: Any, kind: Any) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        value = _fit(value, inner[0])
        return _if(inner[1].holds(value), value)
    if origin in (Union, UnionType):
        return _first(value, inner)
    if origin is Literal:
        return _if(value in inner, value)
    if origin is tuple and isinstance(value, (tuple, list)):
        inner = inner[:1] * len(value) if inner[-1] is ... else inner
        return _if(len(value) == len(inner), tuple(map(_fit, value, inner)))
    if kind is int:
        return operator.index(_if(hasattr(value, "__index__") and not isinstance(value, bool), value))
    if kind is float:
        return float(_if(isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value), value))
    return _if(origin is None and isinstance(value, kind), value)


def _if(fits: bool, value: Any) -> Any:
    if not fits:
        raise _Misfit
    return value


def _first(value: Any, kinds: tuple[Any, ...]) -> Any:
    """The value as the first of `kinds` that it fits."""
    for kind in kinds:
        try:
            return _fit(value, kind)
        except _Misfit:
            continue
    raise _Misfit


def expected(kind: Any) -> str:
    """A type in words."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return f"{expected(inner[0])} {inner[1].words}"
    if origin in (Union, UnionType):
        return " or ".join(map(expected, inner))
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is tuple:
        return f"a tuple of ({expected(inner[0])})" if inner[-1] is ... else f"({', '.join(map(expected, inner))})"
    return _WORDS.get(kind) or f"a {kind.__name__}"
