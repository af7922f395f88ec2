"""Tokens of packed sequences moved to where each sequence begins a chunk, and back: one map of rows, and one kernel that follows it.

One launch moves all tensors of a call. A launch costs the host as much as a small tensor's move takes, and a call has up to nine tensors.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.runtime.each import Ts, each
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import NAMES, accumulator, cdiv, next_power_of_2

ROWS, SEQUENCES = 64, 64  # of a program of `places`
TILE, COLUMNS = 4096, 256  # numbers that a program of `move` moves, and of a row at most
TENSORS = 8  # of a launch of `move`
# those that a kernel reads; and the constants of a tensor, by their names and of one that is not there
IN_TILE, IN_ROW = tl.constexpr(TILE), tl.constexpr(COLUMNS)
UNITS, WIDTHS = (tuple(f"{name}{n}" for n in range(TENSORS)) for name in ("UNIT", "W"))
NONE = dict.fromkeys((*UNITS, *WIDTHS), 0)


def places(cu_seqlens: Tensor, T: int, aligned: int, C: int) -> tuple[Tensor, Tensor]:
    """cum [N+1] int32, the first chunk of C of each sequence, and [aligned + T] int32: the token that each aligned row has, then the row
    that each token gets; −1: none."""
    N = len(cu_seqlens) - 1
    cum = torch.empty(N + 1, dtype=torch.int32, device=cu_seqlens.device)
    maps = torch.empty(aligned + T, dtype=torch.int32, device=cu_seqlens.device)
    grid = (max(cdiv(aligned, ROWS), 1),)
    run(places_kernel, grid, cu_seqlens.contiguous(), cum, maps, N, T, aligned, C=C, BLK=ROWS, BN=SEQUENCES, num_warps=4)
    return cum, maps


def moved(source: Tensor, *tensors: *Ts, fill: float = 0.0) -> tuple[*Ts]:
    """Each [1 rows ...] -> [1 len(source) ...]: row source[i] at i, `fill` where it is −1. One launch moves up to TENSORS; what is no
    tensor stays."""
    found = each(lambda x: x.new_empty(1, len(source), *x.shape[2:]), *tensors)
    both = zip(tensors, found, strict=True)
    pairs = [(x, out) for x, out in both if isinstance(x, Tensor) and isinstance(out, Tensor) and out.numel()]
    for first in range(0, len(pairs), TENSORS):
        own = pairs[first : first + TENSORS]
        arguments, constants, programs = [], NONE | {"FILL": fill}, 0
        for (x, out), unit, width in zip(own, UNITS, WIDTHS, strict=False):
            if not (x.is_contiguous() or x[0, 0].is_contiguous()):
                x = x.contiguous()
            numbers, stride = math.prod(x.shape[2:]), x.stride(1)
            constants[width], constants[unit] = numbers, math.gcd(stride, 16)
            arguments += x, out, stride // constants[unit]
            columns = min(next_power_of_2(numbers), COLUMNS)
            programs += cdiv(len(source), TILE // columns) * cdiv(numbers, columns)
        arguments += (None,) * 3 * (TENSORS - len(own))
        run(move, (programs,), *arguments, source, len(source), **constants, num_warps=4)
    return found


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


@triton.jit
def part(i, p_from, p_to, stride, UNIT: tl.constexpr, W: tl.constexpr, FILL: tl.constexpr, p_source, rows):
    """Tile i of a tensor, where it has so many; the number of the tile in the next one. Rows of W numbers lie stride · UNIT apart in p_from."""
    if W > 0:
        BW: tl.constexpr = min(triton.next_power_of_2(W), IN_ROW)
        R: tl.constexpr = IN_TILE // BW
        ACROSS: tl.constexpr = triton.cdiv(W, BW)
        tiles = tl.cdiv(rows, R) * ACROSS
        if (i >= 0) & (i < tiles):
            o = i // ACROSS * R + tl.arange(0, R)
            j = i % ACROSS * BW + tl.arange(0, BW)
            source = tl.load(p_source + o, mask=o < rows, other=-1)
            p_row = p_from + tl.cast(source, tl.int64) * stride * UNIT
            columns = (j < W)[None, :]
            b = tl.load(p_row[:, None] + j[None, :], mask=(source >= 0)[:, None] & columns, other=FILL)
            tl.store(p_to + tl.cast(o, tl.int64)[:, None] * W + j[None, :], b, mask=(o < rows)[:, None] & columns)
        i -= tiles
    return i


@triton.jit(do_not_specialize=["rows", *(f"stride{n}" for n in range(TENSORS))])
def move(
    p_from0, p_to0, stride0, p_from1, p_to1, stride1, p_from2, p_to2, stride2, p_from3, p_to3, stride3,
    p_from4, p_to4, stride4, p_from5, p_to5, stride5, p_from6, p_to6, stride6, p_from7, p_to7, stride7, p_source, rows,
    UNIT0: tl.constexpr, UNIT1: tl.constexpr, UNIT2: tl.constexpr, UNIT3: tl.constexpr,
    UNIT4: tl.constexpr, UNIT5: tl.constexpr, UNIT6: tl.constexpr, UNIT7: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
    W4: tl.constexpr, W5: tl.constexpr, W6: tl.constexpr, W7: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """A tile a program, of one tensor behind the other. Of a tensor that is not there W is 0."""
    i = tl.program_id(0)
    i = part(i, p_from0, p_to0, stride0, UNIT0, W0, FILL, p_source, rows)
    i = part(i, p_from1, p_to1, stride1, UNIT1, W1, FILL, p_source, rows)
    i = part(i, p_from2, p_to2, stride2, UNIT2, W2, FILL, p_source, rows)
    i = part(i, p_from3, p_to3, stride3, UNIT3, W3, FILL, p_source, rows)
    i = part(i, p_from4, p_to4, stride4, UNIT4, W4, FILL, p_source, rows)
    i = part(i, p_from5, p_to5, stride5, UNIT5, W5, FILL, p_source, rows)
    i = part(i, p_from6, p_to6, stride6, UNIT6, W6, FILL, p_source, rows)
    i = part(i, p_from7, p_to7, stride7, UNIT7, W7, FILL, p_source, rows)


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """The map, and a move of keys and of numbers."""
    C = config.launch["shared"]["C"]
    types = {"p_cu_seqlens": "*i64", "p_cum": "*i32", "p_maps": "*i32"} | dict.fromkeys(("N", "T", "aligned"), "i32")
    signature, constants = {"p_source": "*i32", "rows": "i32"}, Constants(FILL=0.0)
    for n in range(TENSORS):
        width = (2 * K, 2)[n] if n < 2 else 0
        element = NAMES[dtype if n == 0 else accumulator(dtype)]
        if width:
            signature |= {f"p_from{n}": f"*{element}", f"p_to{n}": f"*{element}", f"stride{n}": "i32"}
        else:
            constants |= dict.fromkeys((f"p_from{n}", f"p_to{n}", f"stride{n}"))
        constants |= {f"UNIT{n}": math.gcd(width, 16), f"W{n}": width}
    return [
        Case(places_kernel, types, {"C": C, "BLK": ROWS, "BN": SEQUENCES}, {"num_warps": 4}),
        Case(move, signature, constants, {"num_warps": 4}),
    ]
