"""Slots of a table of states, as kernels find them: a tensor [slots ...] whose slots may lie apart, each contiguous.

p_slots, p_fresh None: sequence n owns slot n, none is fresh.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.runtime.custom_op import operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import Case, LaunchConfig
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import NAMES, accumulator, cdiv

BLK = 4096  # numbers of a state that a program has at a time


@triton.jit
def slot_of(p_slots, p_fresh, n):
    """Sequence n's slot, −1 for none, and whether the sequence starts from what lies in it."""
    slot = tl.cast(n, tl.int64)
    if p_slots is not None:
        slot = tl.load(p_slots + n).to(tl.int64)
    resumed = slot >= 0
    if p_fresh is not None:
        resumed = resumed & (tl.load(p_fresh + n) == 0)
    return slot, resumed


@triton.jit
def power_of(p_power, i):
    """A power of two and its inverse, 1 without p_power."""
    power = 1.0
    inverse = 1.0
    if p_power is not None:
        power = tl.load(p_power + i)
        inverse = tl.div_rn(1.0, power)
    return power, inverse


def read_by_kernels(*tensors: Tensor | None) -> Iterator[Tensor | None]:
    """slots, fresh, cu_seqlens: contiguous, booleans as bytes."""
    for x in each(Tensor.contiguous, *tensors):
        yield x.view(torch.uint8) if x is not None and x.dtype == torch.bool else x


@triton.jit(do_not_specialize=["slot_stride"])
def clear_kernel(p_state, p_slots, p_fresh, p_cu_seqlens, slot_stride, SIZE: tl.constexpr, BLK: tl.constexpr):
    """One sequence and BLK numbers of its slot."""
    n = tl.program_id(0)
    slot, resumed = slot_of(p_slots, p_fresh, n)
    empty = tl.load(p_cu_seqlens + n) == tl.load(p_cu_seqlens + n + 1)
    if empty & (slot >= 0) & (resumed == 0):
        o = tl.program_id(1) * BLK + tl.arange(0, BLK)
        tl.store(p_state + slot * slot_stride + o, tl.zeros([BLK], p_state.dtype.element_ty), mask=o < SIZE)


def clear(state: Tensor, slots: Tensor | None, fresh: Tensor, cu_seqlens: Tensor) -> None:
    """Zeros in the slots of fresh sequences without a token: the walks of chunks, which write the others' states, have none of theirs.

    slots, fresh and cu_seqlens as kernels read them: contiguous, fresh as bytes.
    """
    size = state[0].numel()
    if size:
        run(
            clear_kernel, (len(fresh), cdiv(size, BLK)),
            state, slots, fresh, cu_seqlens, state.stride(0), SIZE=size, BLK=BLK, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["slot_stride"])
def largest_kernel(
    p_state, p_slots, p_fresh, p_cu_seqlens, p_largest, slot_stride, HV: tl.constexpr, SIZE: tl.constexpr, BLK: tl.constexpr
):  # fmt: skip
    """One sequence and head."""
    n, h = tl.program_id(0), tl.program_id(1)
    slot, wanted = slot_of(p_slots, p_fresh, n)
    if p_cu_seqlens is not None:
        wanted = wanted & (tl.load(p_cu_seqlens + n) < tl.load(p_cu_seqlens + n + 1))
    p_head = p_state + slot * slot_stride + h * SIZE
    largest = tl.zeros([BLK], tl.float32)
    for i in range(0, SIZE, BLK):
        o = i + tl.arange(0, BLK)
        largest = tl.maximum(largest, tl.abs(tl.load(p_head + o, mask=wanted & (o < SIZE), other=0.0)).to(tl.float32))
    tl.store(p_largest + n * HV + h, tl.max(largest, 0))


@operator
def largest_of_slots(
    state: Tensor, slots: Tensor | None, fresh: Tensor | None, cu_seqlens: Tensor | None, N: int
) -> Tensor:  # fmt: skip
    """[N HV] float32: the largest |S| from which each sequence and head of a table [slots HV K V] starts; 0 where it has no token."""
    HV = state.shape[1]
    largest = state.new_zeros(N, HV, dtype=torch.float32)
    size = state[0, 0].numel()
    if largest.numel() and size:
        run(
            largest_kernel, (N, HV),
            state, *read_by_kernels(slots, fresh, cu_seqlens), largest, state.stride(0), HV=HV, SIZE=size, BLK=BLK, num_warps=4,
        )  # fmt: skip
    return largest


@torch.library.register_fake(largest_of_slots)
def _(state, slots, fresh, cu_seqlens, N):
    return state.new_empty(N, state.shape[1], dtype=torch.float32)


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Both kernels on packed sequences, fresh ones among them."""
    table = {"p_state": f"*{NAMES[accumulator(dtype)]}", "p_slots": "*i64", "p_fresh": "*u8", "p_cu_seqlens": "*i64"}
    clearing = table | {"slot_stride": "i64"}
    return [
        Case(clear_kernel, clearing, {"SIZE": 2 * K * V, "BLK": BLK}, {"num_warps": 4}),
        Case(largest_kernel, clearing | {"p_largest": "*fp32"}, {"HV": 2, "SIZE": K * V, "BLK": BLK}, {"num_warps": 4}),
    ]
