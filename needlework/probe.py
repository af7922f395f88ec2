"""Probes: identity functions with a name. `needlework.diagnostics` records the values that pass through them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

_listeners: list[Callable[[str, Tensor], None]] = []


def probe(name: str, x: Tensor) -> Tensor:
    """Return x itself; tell every listener that `name` had this value."""
    for listener in _listeners:
        listener(name, x)
    return x


@contextmanager
def listen(listener: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `listener(name, x)` at every probe inside the `with` block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
