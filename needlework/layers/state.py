"""States of layers: NamedTuples of tensors whose first axis is the sequence. Fixed ones keep their size, growing ones are pages.

`Held` says what a layer holds of a sequence, for the owner of the memory.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor


class KVState(NamedTuple):
    """Growing: k [N P Hkv K], v [N P Hkv V], length [N] tokens seen (`ops/attention/pages.py`)."""

    k: Tensor
    v: Tensor
    length: Tensor


class Part(NamedTuple):
    """A tensor of one sequence's state, or of one token's row in it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * size(self.dtype)


Captured = Literal["all", "steps", "none"]


class Held(NamedTuple):
    """What a layer holds of a sequence.

    fixed: tensors by name, the same for any length. rows: what it adds a token, by name. window: of the rows only so many, the
    newest, are read again; None: all. cut: at multiples of so many tokens a prompt is best cut, for the layer's chunks then stay whole.
    counted: the layer counts its tokens, though it has no rows; an engine knows their number. rewritten: rows change when
    later tokens come, so that no two sequences may share a page. captured: what of serving a CUDA graph may hold on a GPU: "all", rows that
    decode ("steps"), or "none"; the rest reads values back to the host.
    """

    fixed: Mapping[str, Part]
    rows: Mapping[str, Part]
    window: int | None = None
    cut: int = 1
    counted: bool = False
    rewritten: bool = False
    captured: Captured = "all"

    def nbytes(self, T: int) -> int:
        """Bytes after T tokens, their count included where the layer has one."""
        kept = T if self.window is None else min(T, self.window)
        grown = kept * sum(part.nbytes for part in self.rows.values()) + 8 * bool(self.rows or self.counted)
        return grown + sum(part.nbytes for part in self.fixed.values())


class Peak(NamedTuple):
    """The largest norm that a state was seen with: of a layer's tensor, after `token` tokens of a row. Not finite counts as largest."""

    layer: str
    tensor: str
    norm: float
    row: int
    token: int


def under(name: str, parts: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a component, under its name in the layer that has it: "S" of "write" is "write.S"."""
    return {f"{name}.{part}": x for part, x in parts.items()}


def of(name: str, tables: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tables of a component, by its own names: what `under` named."""
    return {full.removeprefix(f"{name}."): x for full, x in tables.items() if full.startswith(f"{name}.")}


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


def fixed(dtype: torch.dtype) -> torch.dtype:
    """Of a fixed state: float32, or float64 where the model is float64."""
    return torch.promote_types(dtype, torch.float32)
