"""States of layers: NamedTuples of tensors whose first axis is the sequence. Fixed ones keep their size, growing ones are pages."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class KVState(NamedTuple):
    """Growing: k [N P Hkv K], v [N P Hkv V], length [N] tokens seen (`ops/common/pages.py`)."""

    k: Tensor
    v: Tensor
    length: Tensor


def map_state(state: object, f: Callable[[Tensor], object]) -> Any:
    """The state with f applied to each of its tensors."""
    if isinstance(state, Tensor):
        return f(state)
    if isinstance(state, tuple):
        parts = [map_state(part, f) for part in state]
        kind: Any = type(state)
        return kind(*parts) if hasattr(state, "_fields") else tuple(parts)
    return state


def nbytes(state: object) -> int:
    """Bytes that a state's tensors hold."""
    total = 0

    def add(x: Tensor) -> Tensor:
        nonlocal total
        total += x.numel() * x.element_size()
        return x

    map_state(state, add)
    return total


def size(dtype: torch.dtype) -> int:
    """Bytes of one number."""
    return torch.empty((), dtype=dtype, device="meta").element_size()


def fixed_size(dtype: torch.dtype) -> int:
    """Bytes of one number in a fixed state: float32, or float64 where the model is float64."""
    return 8 if dtype == torch.float64 else 4
