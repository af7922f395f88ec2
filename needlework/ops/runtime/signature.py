"""Functions of NamedTuples of tensors and numbers with the signature that torch.library knows: one parameter or result for each field.

An operator returns no None: a field that is None comes out as an empty vector. Where such a field is given to an operator again, as what
the forward has kept is given to the backward, an empty vector is None. Which fields may be None their annotations say; numbers stay as
they are.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import update_wrapper
from inspect import Parameter, signature
from types import GenericAlias
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from torch import Tensor


class Part(NamedTuple):
    """A parameter or result of a function, as its annotation has it: one value, or the fields of a NamedTuple."""

    kind: type | None  # the NamedTuple; None: one value
    optional: bool  # whether the NamedTuple as a whole may be None
    fields: dict[str, Any]  # their annotations; of one value its own, without a name

    @classmethod
    def of(cls, annotation: Any) -> "Part":
        for kind in (annotation, *get_args(annotation)):
            if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
                return cls(kind, kind is not annotation, get_type_hints(kind))
        return cls(None, False, {"": annotation})

    def named(self, values: Sequence) -> Any:
        """What the function is given; of several fields."""
        assert self.kind is not None
        return None if self.optional and all(x is None for x in values) else self.kind(*values)

    def flat(self, value: Any) -> tuple:
        """The inverse of `named`."""
        if self.kind is None:
            return (value,)
        return (None,) * len(self.fields) if value is None else tuple(value)


class Signature:
    """Of a function, and how its arguments and results are taken apart and put together."""

    def __init__(self, function: Callable):
        own = signature(function)
        self.parameters = {name: Part.of(x.annotation) for name, x in own.parameters.items()}
        self.several = get_origin(own.return_annotation) is tuple
        self.results = [Part.of(x) for x in (get_args(own.return_annotation) if self.several else (own.return_annotation,))]
        names = [field or name for name, part in self.parameters.items() for field in part.fields]
        # by "parameter" or "parameter.field": a field's own name, with the parameter's before it where two have the same
        self.names = {
            f"{name}.{field}" if field else name: f"{name}_{field}" if field and names.count(field) > 1 else field or name
            for name, part in self.parameters.items()
            for field in part.fields
        }
        annotations = (x | None if part.optional else x for part in self.parameters.values() for x in part.fields.values())
        flat = [
            Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=x)
            for name, x in zip(self.names.values(), annotations, strict=True)
        ]
        kinds = [Tensor if part.kind or x == Tensor | None else x for part in self.results for x in part.fields.values()]
        returned = GenericAlias(tuple, tuple(kinds)) if self.several or len(kinds) > 1 else kinds[0]
        self.flat = own.replace(parameters=flat, return_annotation=returned)
        self.plain = self.flat == own
        self._given, self._returned = _places(self.parameters.values()), _places(self.results)
        parts = [(part, x) for part in self.parameters.values() for x in part.fields.values()]
        self._may_be = [i for i, (part, x) in enumerate(parts) if part.kind is not None and x == Tensor | None]

    def named(self, values: Sequence) -> list:
        """A call's arguments as the function takes them; a field that is empty stays so."""
        return _named(self._given, values)

    def named_results(self, values: Sequence) -> list:
        return _named(self._returned, values)

    def flat_results(self, value: Any) -> Any:
        """As an operator returns them: an empty vector, on the device and in the dtype of the first result, for None."""
        if not self.several and self.results[0].kind is None:
            return value
        values = value if self.several else (value,)
        found = [x for (part, _), y in zip(self._returned, values, strict=True) for x in part.flat(y)]
        return tuple(found[0].new_empty(0) if x is None else x for x in found)

    def fields(self, names: Iterable[str]) -> list[str]:
        """The operator's names of parameters, "x", and of fields, "x.y" or all of them, "x"."""
        return [flat for given, flat in self.names.items() if given in names or given.split(".")[0] in names]

    def operator(self, function: Callable) -> Callable:
        """The function as torch.library calls it."""

        def call(*values: Any) -> Any:
            given = list(values)
            for i in self._may_be:
                if given[i] is not None and _absent(given[i]):
                    given[i] = None
            for part, at in self._given:
                if part.optional and all(map(_absent, given[at])):
                    given[at] = part.flat(None)
            return self.flat_results(function(*self.named(given)))

        vars(call)["__signature__"] = self.flat
        return update_wrapper(call, function, ("__module__", "__name__", "__qualname__", "__doc__"), ())

    def fake(self, function: Callable) -> Callable:
        """The same for tensors without numbers, whose sizes are not looked at."""
        return lambda *values: self.flat_results(function(*self.named(values)))


def _named(places: list[tuple[Part, slice]], values: Sequence) -> list:
    """At every call: one value is not worth a call of its own."""
    return [values[at.start] if part.kind is None else part.named(values[at]) for part, at in places]


def _absent(x: Tensor | None) -> bool:
    return x is None or (x.dim() == 1 and not x.numel())


def _places(parts: Iterable[Part]) -> list[tuple[Part, slice]]:
    places, start = [], 0
    for part in parts:
        places.append((part, slice(start, start + len(part.fields))))
        start += len(part.fields)
    return places
