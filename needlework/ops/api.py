"""All the dispatch there is: `Impl`, `resolve` and `OpSpec`. Knows no op by name."""

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import Tensor

from needlework.ops.runtime.compile_cache import keyed
from needlework.ops.runtime.constant import constant
from needlework.ops.runtime.denylist import DENYLISTED
from needlework.ops.runtime.launch_configs import interpreted

Impl = Literal["auto", "reference", "torch", "triton"]


def resolve(
    op: str, impl: Impl, device: torch.device | None = None, unsupported: Callable[[], str | None] | None = None
) -> Literal["reference", "torch", "triton"]:
    """Which implementation runs: an explicit request is obeyed or raises; "auto" picks.

    "auto" is NEEDLEWORK_IMPL where that is set; else, or where that says "triton", the kernels if they support the call
    and "torch" if not; on a CPU the kernels run in Triton's interpreter and are picked by NEEDLEWORK_IMPL alone.
    unsupported: why the kernels cannot take this call, None if they can. It may import Triton: it is asked last. An op
        that has no kernel has none.
    Raises ValueError for an unknown name, and with the reason for impl="triton" where that cannot be.
    """
    if torch.compiler.is_compiling():
        keyed()
    asked = os.environ.get("NEEDLEWORK_IMPL", "auto") if impl == "auto" else impl
    if asked not in get_args(Impl):
        raise ValueError(f"impl: got {asked!r}, expected one of {', '.join(get_args(Impl))}")
    if asked in ("reference", "torch"):
        return asked
    if asked == "auto" and (device is None or device.type != "cuda"):
        return "torch"
    reason = "yet" if unsupported is None else _homeless(device) or unsupported()
    if reason is None:
        return "triton"
    if impl == "triton":
        what = "yet" if unsupported is None else f"for this call: {reason}"
        raise ValueError(f"impl='triton': {op} has no Triton kernel {what}; use 'torch' or 'auto'")
    if DENYLISTED in reason:
        _warn(op, reason)
    return "torch"


@constant
def _warn(op: str, reason: str) -> None:
    _warn_once(op, reason)


@cache
def _warn_once(op: str, reason: str) -> None:
    warnings.warn(f"{op} runs on torch, which is slower: {reason}", UserWarning, stacklevel=2)


def _homeless(device: torch.device | None) -> str | None:
    """Why no Triton kernel at all can run there."""
    if not _installed():
        return "Triton is not installed"
    if device is not None and device.type == "cuda":
        return None
    return None if interpreted() else "the tensors are on no CUDA device (TRITON_INTERPRET=1 runs kernels on a CPU)"


@constant
def _installed() -> bool:
    return find_spec("triton") is not None


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
    table: (B) -> an empty state table with B slots for `step`, float64. Kernels that are no op of their own have no step and no table:
        None.
    skip: {check: reason} for checks that the definition itself rules out.
    """

    name: str
    chunk: Callable[..., tuple]
    recurrent: Callable[..., tuple]
    literal: Callable[..., tuple]
    step: Callable[..., object] | None
    inputs: Callable[..., dict[str, Tensor]]
    tokens: tuple[str, ...]
    half: tuple[str, ...]
    table: Callable[[int], object] | None
    styles: tuple[str, ...] = ("random",)
    chunk_sizes: tuple[int, ...] = (16, 32, 64)
    limits: tuple[Limit, ...] = ()
    skip: Mapping[str, str] = field(default_factory=dict)
