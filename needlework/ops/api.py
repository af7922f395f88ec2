"""All the dispatch there is: `Impl`, `resolve` and `OpSpec`. Knows no op by name."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

Impl = Literal["auto", "reference", "torch", "triton"]


def resolve(op: str, impl: Impl) -> Literal["reference", "torch"]:
    """Which implementation runs: "auto" reads NEEDLEWORK_IMPL, then takes the fast path; an explicit request is obeyed or raises.

    Raises ValueError for an unknown name and for "triton", which no op has yet.
    """
    if impl == "auto":
        impl = os.environ.get("NEEDLEWORK_IMPL", "torch")
    if impl not in get_args(Impl):
        raise ValueError(f"impl: got {impl!r}, expected one of {', '.join(get_args(Impl))}")
    if impl == "triton":
        raise ValueError(f"impl='triton': {op} has no Triton kernel yet; use 'torch' or 'auto'")
    return "torch" if impl == "auto" else impl


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A special case that must hold: `left(**inputs)` and `right(**inputs)` return equal tensors (bit-equal if `exact`)."""

    name: str
    left: Callable[..., object]
    right: Callable[..., object]
    exact: bool = False


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """Everything that checks, benchmarks, docs and doctor need to know of one op in one setting.

    chunk, recurrent, literal, step: the op's four forms, settings already bound (`functools.partial`).
        chunk(**inputs, initial_state=, output_final_state=, cu_seqlens=, chunk_size=, impl=) -> NamedTuple whose last field is `state`
        recurrent: the definition, token by token: the same arguments without chunk_size and impl, plus `operand`
        literal: the chunk (or blocked) form as spec/ prints it: recurrent's arguments plus chunk_size
        step(**one token of each input [B ...], state=, slots=) -> chunk's outputs without T and without state; the table changes in place
        `operand(x)` is applied to every operand of a matrix or outer product (after its gate factor); the identity by default
    inputs: (generator, B, T, style) -> {argument: float64 tensor}
    tokens: names of the inputs laid out [B T H ...]; the others are parameters of the layer.
    half: names of the inputs that a half-precision model stores in half; the others stay float32.
    styles: the styles of `inputs` under which the error budget is checked.
    table: (B) -> an empty state table with B slots for `step`, float64.
    skip: {check: reason} for checks that the definition itself rules out.
    """

    name: str
    chunk: Callable[..., tuple]
    recurrent: Callable[..., tuple]
    literal: Callable[..., tuple]
    step: Callable[..., object]
    inputs: Callable[[torch.Generator, int, int, str], dict[str, Tensor]]
    tokens: tuple[str, ...]
    half: tuple[str, ...]
    table: Callable[[int], object]
    styles: tuple[str, ...] = ("random",)
    chunk_sizes: tuple[int, ...] = (16, 32, 64)
    limits: tuple[Limit, ...] = ()
    skip: Mapping[str, str] = field(default_factory=dict)
