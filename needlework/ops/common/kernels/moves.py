"""Tokens of packed sequences moved to where each sequence begins a chunk, and back: one map of rows, and one kernel that follows it."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import NAMES, accumulator, cdiv, next_power_of_2

ROWS, SEQUENCES = 64, 64  # of a program of `places`
TILE = 4096  # numbers that a program of `move` moves


def places(cu_seqlens: Tensor, T: int, aligned: int, C: int) -> tuple[Tensor, Tensor]:
    """cum [N+1] int32, the first chunk of C of each sequence, and [aligned + T] int32: the token that each aligned row has, then the row
    that each token gets; −1: none."""
    N = len(cu_seqlens) - 1
    cum = torch.empty(N + 1, dtype=torch.int32, device=cu_seqlens.device)
    maps = torch.empty(aligned + T, dtype=torch.int32, device=cu_seqlens.device)
    grid = (max(cdiv(aligned, ROWS), 1),)
    run(places_kernel, grid, cu_seqlens.contiguous(), cum, maps, N, T, aligned, C=C, BLK=ROWS, BN=SEQUENCES, num_warps=4)
    return cum, maps


def moved(x: Tensor, source: Tensor) -> Tensor:
    """x [1 rows ...] -> [1 len(source) ...]: row source[i] at i, zeros where it is −1."""
    out = x.new_empty(1, len(source), *x.shape[2:])
    width = math.prod(x.shape[2:])
    if not out.numel():
        return out
    if x.numel() and not x[0, 0].is_contiguous():
        x = x.contiguous()
    columns, stride = min(next_power_of_2(width), 256), x.stride(1)
    rows = TILE // columns
    unit = math.gcd(stride, 16)
    run(
        move, (cdiv(len(source), rows), cdiv(width, columns)),
        x, out, source, len(source), stride // unit, UNIT=unit, W=width, R=rows, BW=columns, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["N", "T", "aligned"])
def places_kernel(p_cu_seqlens, p_cum, p_maps, N, T, aligned, C: tl.constexpr, BLK: tl.constexpr, BN: tl.constexpr):
    """BLK aligned rows, and as many tokens: there are no fewer rows than tokens. Every program goes over all sequences: of those that end
    at or before a place the last one says where the next one begins."""
    i = tl.program_id(0) * BLK + tl.arange(0, BLK)
    o_n = tl.arange(0, BN)
    start = tl.load(p_cu_seqlens).to(tl.int32)
    # of the sequence of row i and of token i: its first token, the first chunk, and of the row's the first token after it
    row_start = tl.zeros([BLK], tl.int32) + start
    row_chunk = tl.zeros([BLK], tl.int32)
    row_end = tl.full([BLK], 0x7FFFFFFF, tl.int32)
    token_start = row_start
    token_chunk = row_chunk
    chunks = 0
    for n in range(0, N, BN):
        inside = n + o_n < N
        begins = tl.load(p_cu_seqlens + n + o_n, mask=inside, other=0).to(tl.int32)
        ends = tl.load(p_cu_seqlens + n + o_n + 1, mask=inside, other=0).to(tl.int32)
        last = chunks + tl.cumsum((ends - begins + C - 1) // C, 0)  # of a mask's: no chunk more
        if tl.program_id(0) == 0:
            tl.store(p_cum + 1 + n + o_n, last, mask=inside)
        before = (last[None, :] * C <= i[:, None]) & inside[None, :]
        row_start = tl.maximum(row_start, tl.max(tl.where(before, ends[None, :], 0), 1))
        row_chunk = tl.maximum(row_chunk, tl.max(tl.where(before, last[None, :], 0), 1))
        row_end = tl.minimum(row_end, tl.min(tl.where(before | ~inside[None, :], 0x7FFFFFFF, ends[None, :]), 1))
        over = (ends[None, :] <= i[:, None]) & inside[None, :]
        token_start = tl.maximum(token_start, tl.max(tl.where(over, ends[None, :], 0), 1))
        token_chunk = tl.maximum(token_chunk, tl.max(tl.where(over, last[None, :], 0), 1))
        chunks = tl.max(last, 0)
    if tl.program_id(0) == 0:
        tl.store(p_cum, 0)
    token = row_start + i - row_chunk * C
    has = (i < chunks * C) & (token < row_end)
    tl.store(p_maps + i, tl.where(has, token, -1), mask=i < aligned)
    owned = i < tl.load(p_cu_seqlens + N)
    tl.store(p_maps + aligned + i, tl.where(owned, i - token_start + token_chunk * C, -1), mask=i < T)


@triton.jit(do_not_specialize=["rows", "stride"])
def move(
    p_from, p_to, p_source, rows, stride,
    UNIT: tl.constexpr, W: tl.constexpr, R: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """R rows of W numbers, BW of them; rows lie stride · UNIT apart in p_from."""
    i = tl.program_id(0) * R + tl.arange(0, R)
    j = tl.program_id(1) * BW + tl.arange(0, BW)
    source = tl.load(p_source + i, mask=i < rows, other=-1)
    p_row = p_from + tl.cast(source, tl.int64) * stride * UNIT
    columns = (j < W)[None, :]
    b = tl.load(p_row[:, None] + j[None, :], mask=(source >= 0)[:, None] & columns, other=0.0)
    tl.store(p_to + tl.cast(i, tl.int64)[:, None] * W + j[None, :], b, mask=(i < rows)[:, None] & columns)


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """The map, and moves of keys and of numbers."""
    C = config.launch["shared"]["C"]
    types = {"p_cu_seqlens": "*i64", "p_cum": "*i32", "p_maps": "*i32"} | dict.fromkeys(("N", "T", "aligned"), "i32")
    cases = [Case(places_kernel, types, {"C": C, "BLK": ROWS, "BN": SEQUENCES}, {"num_warps": 4})]
    for element, width in ((NAMES[dtype], 2 * K), (NAMES[accumulator(dtype)], 2)):
        columns = min(next_power_of_2(width), 256)
        types = {"p_from": f"*{element}", "p_to": f"*{element}", "p_source": "*i32", "rows": "i32", "stride": "i32"}
        constants: Constants = {"UNIT": math.gcd(width, 16), "W": width, "R": TILE // columns, "BW": columns}
        cases.append(Case(move, types, constants, {"num_warps": 4}))
    return cases
