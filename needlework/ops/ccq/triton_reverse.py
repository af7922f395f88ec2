"""Backward: the gradient of the covariance after every chunk, from the last to the first, then, all chunks at once, dk.

A mass ω at the point μ + x changes the loss by ω (r − N x) when it moves, and by z + r·x − ½ xᵀN x when it grows. N is symmetric.
Seen from μ₀, with ŷ = y/n and P, P̂ the scores of q and ŷ:

    dk_s = ω_Cs (r − N (k_s − μ₀)) − Σ_t (P̂_ts q_t + P_ts ŷ_t)
    N ← e^{G_C} N + Σ_t e^{G_t} (q ŷᵀ + ŷ qᵀ)         r ← e^{G_C} r + Σ_t e^{G_t} (q_t ŷ·(μ_t−μ₀) + ŷ_t q·(μ_t−μ₀))

and from one chunk's μ₀ to that of the chunk before, δ back, r ← r + N δ and z ← z − δ·(r + ½ N δ) with the old r. N is stored
rounded; r + N μ₀ is stored with it, so that keys need no centring. z of a tile of columns is that tile's share; the first tile's
holds what belongs to none.
"""

import torch
import triton
import triton.language as tl

from needlework.ops.ccq.triton_intra import (
    case,
    decay_of,
    left_of,
    numbers,
    padded,
    real_tokens,
    weights,
    whole_of,
)
from needlework.ops.ccq.triton_scan import load_state, state_columns, store_state
from needlework.ops.common.launch import Case, Plan
from needlework.ops.common.triton_tile import load_tile, store_tile


@triton.jit(do_not_specialize=["T", "NCB"])
def reverse(
    x_q_kt, x_yd_kt, x_q_vt, x_yd_vt, x_N_vs, p_G, p_qrel, p_yrel, p_ysq, p_mean, p_mean_end, p_N_in, p_r_in, p_z_in,
    p_r, p_far, p_z, p_N_out, p_r_out, p_z_out, p_cum, T, NCB,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, NS: tl.constexpr,
    TMA: tl.constexpr, GATED: tl.constexpr, SEED: tl.constexpr, INIT: tl.constexpr, ACC: tl.constexpr, OT: tl.constexpr,
):  # fmt: skip
    """N, r, r + N μ₀ and z after each chunk, seen from its μ₀. x_yd: e^{G_t} ŷ_t.

    SEED: the final state has a gradient; INIT: the first wants one.
    """
    NV: tl.constexpr = (K + BV - 1) // BV
    i_v = (tl.program_id(0) % NV) * BV
    i_h = (tl.program_id(0) // NV) % H
    i_n = tl.program_id(0) // (NV * H)
    o_nh = tl.cast(i_n, tl.int64) * H + i_h
    o_v = i_v + tl.arange(0, BV)
    start, end = tl.load(p_cum + i_n), tl.load(p_cum + i_n + 1)
    i_b = start // NCB
    N = tl.zeros([BK, BV], ACC)
    b_r = tl.zeros([BV], ACC)
    z = tl.sum(b_r, 0)
    if SEED:
        o_state, inside = state_columns(o_nh, i_v, K, BK, BV)
        N += tl.load(p_N_in + o_state, mask=inside, other=0.0)
        b_r += numbers(p_r_in, o_nh, i_v, K, BV)
        z += tl.where(i_v == 0, tl.load(p_z_in + o_nh), 0.0)
    b_next = numbers(p_mean_end, o_nh, 0, K, BK)
    b_next_v = numbers(p_mean_end, o_nh, i_v, K, BV)

    for step in range(0, end - start):
        i = end - 1 - step
        o_ih = tl.cast(i, tl.int64) * H + i_h
        b_mean = numbers(p_mean, o_ih, 0, K, BK)
        b_mean_v = numbers(p_mean, o_ih, i_v, K, BV)
        b_Nd = tl.sum(N * (b_next - b_mean)[:, None], 0)
        z -= tl.sum((b_next_v - b_mean_v) * (b_r + 0.5 * b_Nd), 0)
        b_r += b_Nd
        b_next = b_mean
        b_next_v = b_mean_v
        b_N = N.to(OT)
        store_state(x_N_vs, b_N, i, i_h, i_v, H, K, BK, BV, TMA)
        tl.store(p_r + o_ih * K + o_v, b_r, mask=o_v < K)
        tl.store(p_far + o_ih * K + o_v, b_r + tl.sum(b_N.to(ACC) * b_mean[:, None], 0), mask=o_v < K)
        tl.store(p_z + o_ih * NV + i_v // BV, z)

        if GATED:
            a = whole_of(p_G, o_ih, C, GATED)
            N *= a
            b_r *= a
            z *= a
        for j in tl.range(0, C, BT, num_stages=NS):
            i_t = (i - i_b * NCB) * C + j
            o_c = j + tl.arange(0, BT)
            b_q = load_tile(x_q_kt, i_b, i_t, i_h, 0, T, H, K, BT, BK, TMA)
            b_y = load_tile(x_yd_kt, i_b, i_t, i_h, 0, T, H, K, BT, BK, TMA)
            b_qv = load_tile(x_q_vt, i_b, i_t, i_h, i_v, T, H, K, BT, BV, TMA)
            b_yv = load_tile(x_yd_vt, i_b, i_t, i_h, i_v, T, H, K, BT, BV, TMA)
            b_yrel = decay_of(p_G, o_ih, o_c, C, GATED, ACC) * tl.load(p_yrel + o_ih * C + o_c)
            b_qrel = tl.load(p_qrel + o_ih * C + o_c)
            b_r += tl.sum(b_qv.to(ACC) * b_yrel[:, None] + b_yv.to(ACC) * b_qrel[:, None], 0)
            N = tl.dot(tl.trans(b_q), b_yv, N, input_precision="ieee", out_dtype=ACC)
            N = tl.dot(tl.trans(b_y), b_qv, N, input_precision="ieee", out_dtype=ACC)
        o_c = tl.arange(0, C)
        b_spread = tl.load(p_ysq + o_ih * C + o_c) - tl.load(p_yrel + o_ih * C + o_c) * tl.load(p_qrel + o_ih * C + o_c)
        z += tl.where(i_v == 0, tl.sum(decay_of(p_G, o_ih, o_c, C, GATED, ACC) * b_spread, 0), 0.0)

    if INIT:
        # + 0, read again: the compiler would otherwise keep the offsets in registers through the loop
        i_row = i_v + tl.load(p_cum + i_n, volatile=True) - start
        o_state, inside = state_columns(o_nh, i_row, K, BK, BV)
        tl.store(p_N_out + o_state, N, mask=inside)
        tl.store(p_r_out + o_nh * K + o_v, b_r, mask=o_v < K)
        tl.store(p_z_out + o_nh * NV + i_v // BV, z)


@triton.jit(do_not_specialize=["T", "NCB"])
def keys(
    x_q_d, x_y_d, x_k_d, x_k_k, x_k_v, x_q_v, x_y_v, x_dk_v, x_N_vs, x_C0_vs, p_G, p_fill, p_mean, p_n, p_qbar, p_ybar, p_r, p_far,
    p_z, p_dG, p_dg, p_scale, T, NCB,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, NS: tl.constexpr,
    NZ: tl.constexpr, TMA: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, ACC: tl.constexpr, OT: tl.constexpr,
):  # fmt: skip
    """dk of one chunk and key head. Gated, also dg: p_dG of `read`, and what its keys and C₀ bring to the chunk's end,

    e^{G_C} (n₀ z − ½⟨N, C₀⟩) + Σ_{s<t} ω_Cs (z + r·x_s − ½ x_sᵀN x_s),   x_s = k_s − μ₀;   z lies in NZ parts
    """
    i = tl.program_id(0) // H
    i_h = tl.program_id(0) % H
    o_ih = tl.cast(i, tl.int64) * H + i_h
    i_b = i // NCB
    i_t = (i - i_b * NCB) * C
    o_c = tl.arange(0, C)
    Pq = tl.zeros([C, C], ACC)
    Py = tl.zeros([C, C], ACC)
    for i_d in tl.range(0, K, BD, num_stages=NS):
        b_k = load_tile(x_k_d, i_b, i_t, i_h, i_d, T, H, K, C, BD, TMA)
        b_q = load_tile(x_q_d, i_b, i_t, i_h, i_d, T, H, K, C, BD, TMA)
        b_y = load_tile(x_y_d, i_b, i_t, i_h, i_d, T, H, K, C, BD, TMA)
        # [s t]: the transposed products, for none of them may be transposed in registers
        Pq = tl.dot(b_k, tl.trans(b_q), Pq, input_precision="ieee", out_dtype=ACC)
        Py = tl.dot(b_k, tl.trans(b_y), Py, input_precision="ieee", out_dtype=ACC)
    fill = real_tokens(p_fill, i, i_t, T, C, PACKED)
    b_w = weights(p_G, o_ih, fill, C, GATED, True, ACC)
    b_Pq = (b_w * (Pq - tl.load(p_qbar + o_ih * C + o_c)[None, :])).to(OT)
    b_Py = (b_w * (Py - tl.load(p_ybar + o_ih * C + o_c)[None, :])).to(OT)
    b_left = tl.where(o_c < fill, left_of(p_G, o_ih, o_c, C, GATED, ACC), 0.0)
    unscale = 1.0 / tl.load(p_scale)
    if GATED:
        b_mass = tl.zeros([C], ACC)
        b_alike = tl.zeros([BV], ACC)

    b_k = load_tile(x_k_k, i_b, i_t, i_h, 0, T, H, K, C, BK, TMA)
    for i_v in tl.range(0, K, BV, num_stages=NS):
        b_N = load_state(x_N_vs, i, i_h, i_v, H, K, BK, BV, TMA)
        b_qv = load_tile(x_q_v, i_b, i_t, i_h, i_v, T, H, K, C, BV, TMA)
        b_yv = load_tile(x_y_v, i_b, i_t, i_h, i_v, T, H, K, C, BV, TMA)
        b_far = numbers(p_far, o_ih, i_v, K, BV)
        b_moved = b_far[None, :] - tl.dot(b_k, b_N, input_precision="ieee", out_dtype=ACC)
        if GATED:
            b_kv = (
                load_tile(x_k_v, i_b, i_t, i_h, i_v, T, H, K, C, BV, TMA).to(ACC) - numbers(p_mean, o_ih, i_v, K, BV)[None, :]
            )
            b_mass += 0.5 * tl.sum(b_kv * (numbers(p_r, o_ih, i_v, K, BV)[None, :] + b_moved), 1)
            b_C = load_state(x_C0_vs, i, i_h, i_v, H, K, BK, BV, TMA)
            b_alike += tl.sum(b_N.to(ACC) * b_C.to(ACC), 0)
        b_dk = -b_left[:, None] * b_moved
        b_dk = tl.dot(b_Py, b_qv, b_dk, input_precision="ieee", out_dtype=ACC)
        b_dk = tl.dot(b_Pq, b_yv, b_dk, input_precision="ieee", out_dtype=ACC)
        store_tile(x_dk_v, (-unscale * b_dk).to(OT), i_b, i_t, i_h, i_v, T, H, K, C, BV, TMA)
    if GATED:
        z = tl.load(p_z + o_ih * NZ)
        for j in tl.static_range(1, NZ):
            z += tl.load(p_z + o_ih * NZ + j)
        b_mass = b_left * (b_mass + z)
        n = tl.load(p_n + o_ih)
        b_dg = tl.load(p_dG + o_ih * C + o_c)
        b_dg += whole_of(p_G, o_ih, C, GATED) * (n * z - 0.5 * tl.maximum(n, 1.0) * tl.sum(b_alike, 0))
        b_dg += tl.sum(tl.where(o_c[:, None] > o_c[None, :], b_mass[None, :], 0.0), 1)
        o_t = i_t + o_c
        tl.store(p_dg + (tl.cast(i_b, tl.int64) * T + o_t) * H + i_h, b_dg * unscale, mask=o_t < T)


def compile_cases(plan: Plan, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    NZ = -(-K // min(plan.launch["reverse"]["BV"], padded(K)))
    cases = []
    for gated in (False, True):
        cases += [case(reverse, "reverse", plan, dtype, K, GATED=gated, SEED=seed, INIT=seed) for seed in (False, True)]
        cases.append(case(keys, "keys", plan, dtype, K, GATED=gated, PACKED=False, NZ=NZ))
    return cases
