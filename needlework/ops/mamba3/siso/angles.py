"""Sums of angles over tokens: of each tile, then from tile to tile, forward in half-turns and backward for their gradient.

    totals   of a tile: Σ rate Δ                       starts   before every tile, reduced mod 2 half-turns, in radians
    backward the same from the last tile to the first: Σ of what the tiles after it gave

Sums of a sequence are float64: a program walks its tiles, BC at a time, for BS of the angles.
"""

import math

import triton
import triton.language as tl

from needlework.ops.mamba3.siso.tiles import past_the_last, place

PI = tl.constexpr(math.pi)


@triton.jit
def half_turns(p_rate, p_dt, token, j, length, i_h, HV: tl.constexpr, M: tl.constexpr, BM: tl.constexpr):
    """rate Δ [BT BM] of tokens j [BT] of a sequence, 0 past its last."""
    o_m = tl.arange(0, BM)
    at = token + j
    rate = tl.load(p_rate + at[:, None] * M + o_m[None, :], mask=(j < length)[:, None] & (o_m < M)[None, :], other=0.0)
    dt = tl.load(p_dt + at * HV + i_h, mask=j < length, other=0.0)
    return rate * dt[:, None]


@triton.jit
def reduced(turns):
    """Half-turns mod 2, in [−1, 1]."""
    return turns - 2 * tl.floor(turns / 2 + 0.5)


@triton.jit
def cos_sin(turns):
    """Of at most 2²⁹ half-turns. What is left of the nearest quarter-turn is π/4 at most: there so many terms of Taylor's series have all digits
    of the dtype. CUDA's functions are of any angle, and take longer."""
    quarter = tl.floor(2 * turns + 0.5)
    r = (turns - 0.5 * quarter) * PI
    which = quarter.to(tl.int32)
    x = r * r
    s, c = 1 / 362880, 1 / 40320 + x * (-1 / 3628800)
    if turns.dtype == tl.float64:
        s += x * (-1 / 39916800 + x * (1 / 6227020800 + x * (-1 / 1307674368000)))
        c += x * x * (1 / 479001600 + x * (-1 / 87178291200 + x * (1 / 20922789888000)))
    s = r * (1 + x * (-1 / 6 + x * (1 / 120 + x * (-1 / 5040 + x * s))))
    c = 1 + x * (-1 / 2 + x * (1 / 24 + x * (-1 / 720 + x * c)))
    odd = (which & 1) != 0
    cos, sin = tl.where(odd, s, c), tl.where(odd, c, s)
    return tl.where(((which + 1) & 2) != 0, -cos, cos), tl.where((which & 2) != 0, -sin, sin)


@triton.jit
def angles_of(
    p_start, p_rate, p_dt, i_c, token, j, length, i_h, HV: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """cos and sin [BT BM] of Θ at tokens j of a tile; p_start has half-turns before each tile. Those of a tile's tokens are few: float32 keeps
    their sums, once each is reduced."""
    o_m = tl.arange(0, BM)
    start = tl.load(p_start + (tl.cast(i_c, tl.int64) * HV + i_h) * M + o_m, mask=o_m < M, other=0.0).to(ACC)
    turns = reduced(half_turns(p_rate, p_dt, token, j, length, i_h, HV, M, BM).to(ACC))
    return cos_sin(start[None, :] + tl.cumsum(turns, 0))


@triton.jit(do_not_specialize=["T", "N", "NCB"])
def totals_kernel(
    p_rate, p_dt, p_total, p_cum, p_ends, T, N, NCB,
    HV: tl.constexpr, HB: tl.constexpr, M: tl.constexpr, F: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """One tile and HB heads."""
    GROUPS: tl.constexpr = HV // HB
    i_c, i_group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    if past_the_last(p_cum, i_c, N):
        return
    _, first, length, token, _ = place(p_cum, p_ends, i_c, T, N, NCB, BT, F)
    j, o_m = first + tl.arange(0, BT), tl.arange(0, BM)
    for i in range(0, HB):
        i_h = i_group * HB + i
        total = tl.sum(half_turns(p_rate, p_dt, token, j, length, i_h, HV, M, BM).to(tl.float64), 0)
        tl.store(p_total + (tl.cast(i_c, tl.int64) * HV + i_h) * M + o_m, total, mask=o_m < M)


@triton.jit(do_not_specialize=["T", "N", "NCB"])
def starts_kernel(
    p_total, p_given, p_start, p_end, p_cum, p_ends, T, N, NCB,
    HV: tl.constexpr, M: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """One sequence, head and BS of the angles: sums before every tile (REVERSE: after it), from `given` [N HV M] on, and over all. Forward `given` and
    the end are radians, the sums in between half-turns."""
    SLICES: tl.constexpr = (M + BS - 1) // BS
    n, i_h = tl.program_id(0) // SLICES // HV, tl.program_id(0) // SLICES % HV
    o_m, o_c = tl.program_id(0) % SLICES * BS + tl.arange(0, BS), tl.arange(0, BC)
    first, count = n * NCB, NCB
    if p_cum is not None:
        first = tl.load(p_cum + n)
        count = tl.load(p_cum + n + 1) - first
    o_given = (tl.cast(n, tl.int64) * HV + i_h) * M + o_m
    carry = tl.zeros([BS], tl.float64)
    if p_given is not None:
        carry = tl.load(p_given + o_given, mask=o_m < M, other=0.0).to(tl.float64)
        if not REVERSE:
            carry = carry / PI
    for i in range(0, count, BC):
        i_c = first + i + o_c
        if REVERSE:
            i_c = first + count - 1 - i - o_c
        at = (i_c.to(tl.int64) * HV + i_h)[:, None] * M + o_m[None, :]
        real = (i + o_c < count)[:, None] & (o_m < M)[None, :]
        total = tl.load(p_total + at, mask=real, other=0.0)
        upto = tl.cumsum(total, 0)
        start = carry[None, :] + upto - total
        if not REVERSE:
            start = reduced(start)
        tl.store(p_start + at, start, mask=real)
        carry += tl.sum(total, 0)
        if not REVERSE:
            carry = reduced(carry)
    if not REVERSE:
        carry = carry * PI
    tl.store(p_end + o_given, carry.to(ACC), mask=o_m < M)


@triton.jit(do_not_specialize=["T", "N", "NCB"])
def angles_bwd_kernel(
    p_dt, p_rate, p_dangle, p_after, p_ddt, p_drate, p_cum, p_ends, T, N, NCB,
    HV: tl.constexpr, HB: tl.constexpr, M: tl.constexpr, F: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One tile and HB heads, over which drate [B T HV/HB M] is summed, for rate is one for all. With D_t = Σ_{s>=t} dΘ_s + dΘ_end:

    drate = π Σ_heads Δ D,   dΔ = π Σ_m rate D, to which the gates add
    """
    GROUPS: tl.constexpr = HV // HB
    i_c, i_group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    if past_the_last(p_cum, i_c, N):
        return
    _, first, length, token, _ = place(p_cum, p_ends, i_c, T, N, NCB, BT, F)
    j, o_m, o_h = first + tl.arange(0, BT), tl.arange(0, BM), i_group * HB + tl.arange(0, HB)
    real, at = j < length, token + j
    in_m = real[:, None] & (o_m < M)[None, :]
    o = (at * HV)[:, None] + o_h[None, :]
    rate = tl.load(p_rate + at[:, None] * M + o_m[None, :], mask=in_m, other=0.0).to(ACC)
    dt = tl.load(p_dt + o, mask=real[:, None], other=0.0).to(ACC)
    dangle = tl.load(p_dangle + o[:, :, None] * M + o_m[None, None, :], mask=in_m[:, None, :], other=0.0)
    o_after = (tl.cast(i_c, tl.int64) * HV + o_h)[:, None] * M + o_m[None, :]
    after = tl.load(p_after + o_after, mask=(o_m < M)[None, :], other=0.0).to(ACC)
    # a reversed cumsum would exchange every number between lanes
    D = ((after + tl.sum(dangle, 0))[None, :, :] - tl.cumsum(dangle, 0) + dangle) * PI
    tl.store(p_ddt + o, tl.sum(rate[:, None, :] * D, 2), mask=real[:, None])
    tl.store(p_drate + (at * GROUPS + i_group)[:, None] * M + o_m[None, :], tl.sum(dt[:, :, None] * D, 1), mask=in_m)
