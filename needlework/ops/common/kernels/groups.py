"""Gradients of what a group of heads shares: their sums, from what is not yet rounded, in one pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.runtime.launch_configs import Case, LaunchConfig
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import NAMES, accumulator, cdiv, next_power_of_2

TILE = 2048  # numbers of a program


def of_groups(x: Tensor, H: int, dtype: torch.dtype) -> Tensor:
    """[B T H K] in dtype: the sums of x [B T HV K], contiguous, over the heads of each of H groups."""
    B, T, HV, K = x.shape
    if H == HV:
        return x.to(dtype)
    out = x.new_empty(B, T, H, K, dtype=dtype)
    BK = next_power_of_2(K)
    R = max(TILE // BK, 1)
    programs = cdiv(B * T * H, R)
    if programs:
        run(sums, (programs,), x, out, B * T * H, G=HV // H, K=K, BK=BK, R=R, num_warps=4)
    return out


@triton.jit(do_not_specialize=["rows"])
def sums(p_x, p_out, rows, G: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, R: tl.constexpr):
    """R of `rows` rows, each of G rows of p_x that follow one another."""
    o_r, o_k = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, BK)
    inside = (o_r < rows)[:, None] & (o_k < K)[None, :]
    p_row = p_x + tl.cast(o_r, tl.int64)[:, None] * (G * K) + o_k[None, :]
    total = tl.load(p_row, mask=inside, other=0.0)
    for g in tl.static_range(1, G):
        total += tl.load(p_row + g * K, mask=inside, other=0.0)
    o_out = tl.cast(o_r, tl.int64)[:, None] * K + o_k[None, :]
    tl.store(p_out + o_out, total.to(p_out.dtype.element_ty), mask=inside)


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Of groups of two."""
    BK = next_power_of_2(K)
    signature = {"p_x": f"*{NAMES[accumulator(dtype)]}", "p_out": f"*{NAMES[dtype]}", "rows": "i32"}
    return [Case(sums, signature, {"G": 2, "K": K, "BK": BK, "R": max(TILE // BK, 1)}, {"num_warps": 4})]
