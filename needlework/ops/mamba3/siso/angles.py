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
    """Of half-turns. What is left of the nearest quarter-turn is π/4 at most: there Taylor's polynomials have float64's digits. CUDA's functions
    are of any angle, and take longer."""
    quarter = tl.floor(2 * turns + 0.5)
    r = (turns - 0.5 * quarter) * PI
    which = (quarter - 4 * tl.floor(0.25 * quarter)).to(tl.int32)
    x = r * r
    s = 1 / 6227020800 + x * (-1 / 1307674368000)
    s = r * (1 + x * (-1 / 6 + x * (1 / 120 + x * (-1 / 5040 + x * (1 / 362880 + x * (-1 / 39916800 + x * s))))))
    c = 1 / 479001600 + x * (-1 / 87178291200 + x * (1 / 20922789888000))
    c = 1 + x * (-1 / 2 + x * (1 / 24 + x * (-1 / 720 + x * (1 / 40320 + x * (-1 / 3628800 + x * c)))))
    odd = which % 2 == 1
    cos, sin = tl.where(odd, s, c), tl.where(odd, c, s)
    return tl.where((which == 1) | (which == 2), -cos, cos), tl.where(which >= 2, -sin, sin)


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
def gates_bwd_kernel(
    p_g, p_dt, p_lam, p_rate, p_same, p_dc, p_down, p_dg_rows, p_dangle, p_after, p_dg, p_ddt, p_dlam, p_drate, p_power,
    p_cum, p_ends, T, N, NCB,
    HV: tl.constexpr, HB: tl.constexpr, M: tl.constexpr, F: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One tile and HB heads, over which drate [B T HV/HB M] is summed, for rate is one for all. With D_t = Σ_{s>=t} dΘ_s + dΘ_end:

    drate = π Σ_heads Δ D,   dΔ = π Σ_m rate D + λ w + (1 − λ) z,   dλ = Δ (w − z),   dg = c dc + the engine's
    z_t = α_t dc_t,   w_t = α_{t+1} dc_{t+1} + (q_tᵀk_t) down_t,   c_t = α_t (λ_{t-1}Δ_{t-1} + (1 − λ_t)Δ_t)
    """
    GROUPS: tl.constexpr = HV // HB
    i_c, i_group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    if past_the_last(p_cum, i_c, N):
        return
    n, first, length, token, row = place(p_cum, p_ends, i_c, T, N, NCB, BT, F)
    j, o_m = first + tl.arange(0, BT), tl.arange(0, BM)
    real, follows = j < length, j + 1 < length + F
    in_m = real[:, None] & (o_m < M)[None, :]
    at = token + j
    rate = tl.load(p_rate + at[:, None] * M + o_m[None, :], mask=in_m, other=0.0).to(ACC)
    drate = tl.zeros([BT, BM], ACC)
    for i in range(0, HB):
        i_h = i_group * HB + i
        o, o_row = at * HV + i_h, (row + j) * HV + i_h
        dt = tl.load(p_dt + o, mask=real, other=0.0).to(ACC)
        lam = tl.load(p_lam + o, mask=real, other=0.0).to(ACC)
        before = tl.load(p_dt + o - HV, mask=real & (j > 0), other=0.0).to(ACC)
        before *= tl.load(p_lam + o - HV, mask=real & (j > 0), other=0.0).to(ACC)
        decay = tl.exp(tl.load(p_g + o, mask=real, other=0.0).to(ACC))
        decay_next = tl.exp(tl.load(p_g + o + HV, mask=j + 1 < length, other=0.0).to(ACC))
        dc = tl.load(p_dc + o_row, mask=real, other=0.0)
        dc_next = tl.load(p_dc + o_row + HV, mask=follows, other=0.0)
        down = tl.load(p_down + o, mask=real, other=0.0) * tl.load(p_same + o, mask=real, other=0.0)
        z, w = decay * dc, decay_next * dc_next + down
        factor = 1.0
        if p_power is not None:
            b = n
            if p_cum is not None:
                b = 0
            NB = N
            if p_cum is not None:
                NB = 1
            a_q = tl.load(p_power + b * HV + i_h)
            a_k = tl.load(p_power + (NB + b) * HV + i_h)
            factor = a_q * a_k * tl.load(p_power + (2 * NB + b) * HV + i_h)
        dg = factor * tl.load(p_dg_rows + o_row, mask=real, other=0.0)
        tl.store(p_dg + o, dg + decay * (before + (1 - lam) * dt) * dc, mask=real)
        tl.store(p_dlam + o, dt * (w - z), mask=real)

        dangle = tl.load(p_dangle + o[:, None] * M + o_m[None, :], mask=in_m, other=0.0)
        after = tl.load(p_after + (tl.cast(i_c, tl.int64) * HV + i_h) * M + o_m, mask=o_m < M, other=0.0).to(ACC)
        D = (after[None, :] + tl.cumsum(dangle, 0, reverse=True)) * PI
        drate += dt[:, None] * D
        tl.store(p_ddt + o, tl.sum(rate * D, 1) + lam * w + (1 - lam) * z, mask=real)
    tl.store(p_drate + (at * GROUPS + i_group)[:, None] * M + o_m[None, :], drate, mask=in_m)
