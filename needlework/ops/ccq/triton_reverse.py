"""The chunks of a sequence from the last to the first: dk, and the gradient of the state between them.

A mass ω at the point μ + x changes the loss by ω (r − N x) when it moves, and by z + r·x − ½ xᵀN x when it grows. N is symmetric;
its rows enter products as the first operand, from registers. Seen from μ₀, with ŷ = y/n and P, P̂ the scores of q and ŷ:

    dk_s = ω_Cs (r₀ − N k'_s) − Σ_t (P̂_ts q_t + P_ts ŷ_t)           r₀ = r + n_C⁻¹ Σ_s ω_Cs N k'_s
    N ← e^{G_C} N + Σ_t e^{G_t} (q ŷᵀ + ŷ qᵀ)                       r ← e^{G_C} r₀ + Σ_t e^{G_t} (q_t ŷ̄_t + ŷ_t q̄_t)

z of a tile of rows is that tile's share; the first tile's holds what belongs to none.
"""

import torch
import triton
import triton.language as tl

from needlework.ops.ccq.triton_intra import case, load_tile, store_tile
from needlework.ops.ccq.triton_scan import state_tile
from needlework.ops.common.launch import Case, Plan


@triton.jit(do_not_specialize=["T", "NCB", "chunks"])
def reverse(
    x_q, x_y, x_yd, x_kc, x_qv, x_yv, x_ydv, x_kcv, x_dk, p_Pq, p_Py, p_qbar, p_ybar, p_ysq, p_decay, p_left, p_inv, p_d,
    p_N_in, p_r_in, p_z_in, p_N_out, p_r_out, p_z_out, p_mass, p_cum, p_scale, T, NCB, chunks,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NS: tl.constexpr,
    TMA: tl.constexpr, GATED: tl.constexpr, SEED: tl.constexpr, ACC: tl.constexpr, OT: tl.constexpr,
):  # fmt: skip
    """SEED: the final state has a gradient. With gates p_mass [NV chunks H C] gets what a key's mass changes after its chunk."""
    NV: tl.constexpr = (K + BV - 1) // BV
    pid = tl.program_id(0)
    i_v = (pid % NV) * BV
    i_h = (pid // NV) % H
    i_n = pid // (NV * H)
    o_nh = tl.cast(i_n, tl.int64) * H + i_h
    o_c = tl.arange(0, C)
    o_v = i_v + tl.arange(0, BV)
    N = tl.zeros([BV, BK], ACC)
    b_r = tl.zeros([BV], ACC)
    z = 0.0 * tl.load(p_scale).to(ACC)
    if SEED:
        o_state, inside = state_tile(o_nh, i_v, K, BV, BK)
        N += tl.load(p_N_in + o_state, mask=inside, other=0.0)
        b_r += tl.load(p_r_in + o_nh * K + o_v, mask=o_v < K, other=0.0)
        z += tl.where(i_v == 0, tl.load(p_z_in + o_nh), 0.0)
    unscale = 1.0 / tl.load(p_scale)

    start, end = tl.load(p_cum + i_n), tl.load(p_cum + i_n + 1)
    for step in tl.range(0, end - start, num_stages=NS):
        i = end - 1 - step
        o_ih = tl.cast(i, tl.int64) * H + i_h
        b_kc = load_tile(x_kc, i, i_h, 0, T, NCB, H, K, C, BK, TMA)
        b_q = load_tile(x_q, i, i_h, 0, T, NCB, H, K, C, BK, TMA)
        b_y = load_tile(x_yd, i, i_h, 0, T, NCB, H, K, C, BK, TMA)
        b_qv = load_tile(x_qv, i, i_h, i_v, T, NCB, H, K, C, BV, TMA)
        b_yv = load_tile(x_yv, i, i_h, i_v, T, NCB, H, K, C, BV, TMA)
        o_pair = o_ih * (C * C) + o_c[:, None] * C + o_c[None, :]
        b_Pq = tl.load(p_Pq + o_pair)
        b_Py = tl.load(p_Py + o_pair)
        b_left = tl.load(p_left + o_ih * C + o_c)
        b_decay = tl.load(p_decay + o_ih * C + o_c)
        n_inv = tl.load(p_inv + o_ih * C + C - 1)
        a = tl.load(p_decay + o_ih * C + C - 1)

        b_kN = tl.dot(N.to(OT), tl.trans(b_kc), input_precision="ieee", out_dtype=ACC)
        b_Nd = n_inv * tl.sum(b_left[None, :] * b_kN, 1)
        b_d = tl.load(p_d + o_ih * K + o_v, mask=o_v < K, other=0.0)
        z -= tl.sum(b_d * (b_r + 0.5 * b_Nd), 0)
        b_r += b_Nd
        b_within = tl.dot(tl.trans(b_qv), b_Py, input_precision="ieee", out_dtype=ACC)
        b_within = tl.dot(tl.trans(b_yv), b_Pq, b_within, input_precision="ieee", out_dtype=ACC)
        b_dk = b_left[None, :] * (b_r[:, None] - b_kN) - b_within
        store_tile(x_dk, tl.trans(unscale * b_dk).to(OT), i, i_h, i_v, T, NCB, H, K, C, BV, TMA)

        b_qbar = tl.load(p_qbar + o_ih * C + o_c)
        b_ybar = tl.load(p_ybar + o_ih * C + o_c)
        if GATED:
            b_kv = load_tile(x_kcv, i, i_h, i_v, T, NCB, H, K, C, BV, TMA)
            b_mass = z + tl.sum(tl.trans(b_kv).to(ACC) * (b_r[:, None] - 0.5 * b_kN), 0)
            tl.store(p_mass + ((i_v // BV) * chunks * H + o_ih) * C + o_c, b_mass)
            N *= a
            b_r *= a
            z *= a
        seen = b_qv.to(ACC) * (b_decay * b_ybar)[:, None] + b_yv.to(ACC) * (b_decay * b_qbar)[:, None]
        b_r += tl.sum(seen, 0)
        b_ysq = tl.load(p_ysq + o_ih * C + o_c)
        z += tl.where(i_v == 0, tl.sum(b_decay * (b_ysq - b_qbar * b_ybar), 0), 0.0)
        if GATED:
            b_yv = load_tile(x_ydv, i, i_h, i_v, T, NCB, H, K, C, BV, TMA)
        N = tl.dot(tl.trans(b_qv), b_y, N, input_precision="ieee", out_dtype=ACC)
        N = tl.dot(tl.trans(b_yv), b_q, N, input_precision="ieee", out_dtype=ACC)
    # + 0, read again: the compiler would otherwise keep the offsets in registers through the loop
    i_row = i_v + tl.load(p_cum + i_n, volatile=True) - start
    o_state, inside = state_tile(o_nh, i_row, K, BV, BK)
    tl.store(p_N_out + o_state, N, mask=inside)
    tl.store(p_r_out + o_nh * K + o_v, b_r, mask=o_v < K)
    tl.store(p_z_out + o_nh * NV + i_v // BV, z)


def compile_cases(plan: Plan, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    return [
        case(reverse, "reverse", plan, dtype, K, GATED=gated, SEED=seed) for gated in (False, True) for seed in (False, True)
    ]
