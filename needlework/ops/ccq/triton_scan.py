"""Forward: the covariance before every chunk, then, all chunks at once, what each query reads of it.

    C ← e^{G_C} C + Σ_s ω_Cs (k_s − c) (k_s − c)ᵀ + (n m/(n+m)) d dᵀ,   m = Σ_s ω_Cs,  c = m⁻¹ Σ_s ω_Cs k_s,  d = c − μ,  n decayed
    Σ_t x = n_t⁻¹ [e^{G_t} C₀ x + Σ_s P_ts (k_s − μ₀)],   P_ts = ω_ts (x_t·k_s − x_t·μ_t),   μ_t = n_t⁻¹ (e^{G_t} n₀ μ₀ + Σ_s ω_ts k_s)

The first factor of a product is a key as it is, and the centre times the sum of the second factors, as they were rounded, is
subtracted in float32. A stored state is C/n, which float16 can hold at any length, and P is not divided by n_t, which it could not.
"""

import torch
import triton
import triton.language as tl

from needlework.ops.ccq.triton_intra import (
    case,
    decay_of,
    left_of,
    numbers,
    real_tokens,
    weights,
    whole_of,
)
from needlework.ops.common.launch import Case, Plan
from needlework.ops.common.triton_tile import load_tile, store_tile


@triton.jit
def state_columns(i_nh, i_v, K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Offsets of BV columns from i_v in a state [... K K], and which exist."""
    o_k = tl.arange(0, BK)
    o_v = i_v + tl.arange(0, BV)
    return tl.cast(i_nh, tl.int64) * (K * K) + o_k[:, None] * K + o_v[None, :], (o_k < K)[:, None] & (o_v < K)[None, :]


@triton.jit
def load_state(x, i, i_h, i_v, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TMA: tl.constexpr):
    """[BK BV] of chunk i of x [chunks H K K]: BV columns."""
    if TMA:
        b = tl.reshape(x.load([i, i_h, 0, i_v]), [BK, BV])
    else:
        o, inside = state_columns(tl.cast(i, tl.int64) * H + i_h, i_v, K, BK, BV)
        b = tl.load(x + o, mask=inside, other=0.0)
    return b


@triton.jit
def store_state(x, b, i, i_h, i_v, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TMA: tl.constexpr):
    """The inverse of `load_state`."""
    if TMA:
        x.store([i, i_h, 0, i_v], tl.reshape(b, [1, 1, BK, BV]))
    else:
        o, inside = state_columns(tl.cast(i, tl.int64) * H + i_h, i_v, K, BK, BV)
        tl.store(x + o, b, mask=inside)


@triton.jit(do_not_specialize=["T", "NCB"])
def states(
    x_k_kt, x_k_vt, p_k, x_C0_vs, p_G, p_fill, p_sum, p_mass, p_C_in, p_mean_in, p_n_in, p_C_out, p_mean_out, p_n_out, p_mean, p_n, p_cum,
    T, NCB,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, NS: tl.constexpr,
    TMA: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, INIT: tl.constexpr, ACC: tl.constexpr, OT: tl.constexpr,
):  # fmt: skip
    """C/n, μ and n before each chunk, C, μ and n after the last: one program a sequence, key head and BV columns of C."""
    NV: tl.constexpr = (K + BV - 1) // BV
    i_v = (tl.program_id(0) % NV) * BV
    i_h = (tl.program_id(0) // NV) % H
    i_n = tl.program_id(0) // (NV * H)
    o_nh = tl.cast(i_n, tl.int64) * H + i_h
    o_k = tl.arange(0, BK)
    start, end = tl.load(p_cum + i_n), tl.load(p_cum + i_n + 1)
    i_b = start // NCB
    M = tl.zeros([BK, BV], ACC)
    b_mean = tl.zeros([BK], ACC)
    b_mean_v = tl.zeros([BV], ACC)
    n = tl.sum(tl.zeros([BV], ACC), 0)
    if INIT:
        o_state, inside = state_columns(o_nh, i_v, K, BK, BV)
        M += tl.load(p_C_in + o_state, mask=inside, other=0.0).to(ACC)
        b_mean += numbers(p_mean_in, o_nh, 0, K, BK).to(ACC)
        b_mean_v += numbers(p_mean_in, o_nh, i_v, K, BV).to(ACC)
        n += tl.load(p_n_in + o_nh).to(ACC)
    # Σωk by itself: the mean that is handed over is not rounded once a chunk
    b_total = b_mean * n
    if (start < end) & (n == 0):
        # before the first token the mean has no mass: the first key is a better place to centre at
        o_first = (tl.cast(i_b, tl.int64) * T + (start - i_b * NCB) * C) * H + i_h
        b_mean = numbers(p_k, o_first, 0, K, BK).to(ACC)
        b_mean_v = numbers(p_k, o_first, i_v, K, BV).to(ACC)

    for i in range(start, end):
        o_ih = tl.cast(i, tl.int64) * H + i_h
        store_state(x_C0_vs, (M * (1.0 / tl.maximum(n, 1.0))).to(OT), i, i_h, i_v, H, K, BK, BV, TMA)
        if i_v == 0:
            tl.store(p_mean + o_ih * K + o_k, b_mean, mask=o_k < K)
            tl.store(p_n + o_ih, n)
        a = whole_of(p_G, o_ih, C, GATED)
        fill = real_tokens(p_fill, i, (i - i_b * NCB) * C, T, C, PACKED)
        if GATED:
            M *= a
        m = tl.load(p_mass + o_ih)
        per_m = 1.0 / tl.maximum(m, 1.0)
        b_cv = numbers(p_sum, o_ih, i_v, K, BV) * per_m
        b_sum = tl.zeros([BV], ACC)
        for j in tl.range(0, C, BT, num_stages=NS):
            i_t = (i - i_b * NCB) * C + j
            b_k = load_tile(x_k_kt, i_b, i_t, i_h, 0, T, H, K, BT, BK, TMA)
            b_kv = load_tile(x_k_vt, i_b, i_t, i_h, i_v, T, H, K, BT, BV, TMA)
            o_c = j + tl.arange(0, BT)
            b_left = tl.where(o_c < fill, left_of(p_G, o_ih, o_c, C, GATED, ACC), 0.0)
            b_kv = ((b_kv.to(ACC) - b_cv[None, :]) * b_left[:, None]).to(OT)
            b_sum += tl.sum(b_kv.to(ACC), 0)
            # what was rounded is the second operand: it comes from shared memory, as the keys do
            M = tl.dot(tl.trans(b_k), b_kv, M, input_precision="ieee", out_dtype=ACC)
        b_new = numbers(p_sum, o_ih, 0, K, BK)
        b_total = b_total * a + b_new
        b_c = b_new * per_m
        n_before = n * a
        n = n_before + m
        share = m / tl.maximum(n, 1.0)
        M += (n_before * share) * ((b_c - b_mean)[:, None] * (b_cv - b_mean_v)[None, :]) - b_c[:, None] * b_sum[None, :]
        b_mean += share * (b_c - b_mean)
        b_mean_v += share * (b_cv - b_mean_v)

    # + 0, read again: the compiler would otherwise keep the offsets in registers through the loop
    i_row = i_v + tl.load(p_cum + i_n, volatile=True) - start
    o_state, inside = state_columns(o_nh, i_row, K, BK, BV)
    tl.store(p_C_out + o_state, M, mask=inside)
    if i_v == 0:
        b_mean = tl.where(start < end, b_total / tl.maximum(n, 1.0), b_mean)
        tl.store(p_mean_out + o_nh * K + o_k, b_mean, mask=o_k < K)
        tl.store(p_n_out + o_nh, n)


@triton.jit(do_not_specialize=["T", "NCB"])
def read(
    x_x_d, x_k_d, x_q_d, x_x_k, x_k_v, x_q_v, x_do_v, x_out_v, x_Sx_v, x_C0_vs, p_eta, p_G, p_fill, p_mean, p_n, p_bar, p_rel, p_inv,
    p_qbar, p_qrel, p_ysq, p_dG, p_scale, T, NCB,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    NS: tl.constexpr, TMA: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, BACKWARD: tl.constexpr, SAVE: tl.constexpr,
    HALF: tl.constexpr, ACC: tl.constexpr, OT: tl.constexpr,
):  # fmt: skip
    """One chunk and key head. Forward: x = q, out = q̃, with SAVE also Σq. BACKWARD: x = ŷ = y/n, out = dq = Σ_j dq̃_j − Σy.

    p_bar, p_rel, p_inv get x·μ_t, x·(μ_t − μ₀) and 1/n_t. Gated, BACKWARD: p_dG gets what g_t of the chunk's tokens changes
    through readers and keys of the chunk, and through its readers of C₀: with ŝ, s the centred scores of ŷ and q,

        Σ_{r≥t} e^{G_r} (n₀ (ŷ·Σq − ŷ·(μ_r−μ₀) q·(μ_r−μ₀)) − ŷᵀC₀q) + Σ_{r≥t>s} ω_rs (ŷ·Σq − ŝ_rs s_rs)
    """
    GROUP: tl.constexpr = HV // H
    i = tl.program_id(0) // H
    i_h = tl.program_id(0) % H
    o_ih = tl.cast(i, tl.int64) * H + i_h
    i_b = i // NCB
    i_t = (i - i_b * NCB) * C
    o_c = tl.arange(0, C)
    o_t = i_t + o_c
    S = tl.zeros([C, C], ACC)
    b_at0 = tl.zeros([C], ACC)
    if GATED and BACKWARD:
        Sq = tl.zeros([C, C], ACC)
    for i_d in tl.range(0, K, BD, num_stages=NS):
        b_x = load_tile(x_x_d, i_b, i_t, i_h, i_d, T, H, K, C, BD, TMA)
        b_k = load_tile(x_k_d, i_b, i_t, i_h, i_d, T, H, K, C, BD, TMA)
        S = tl.dot(b_x, tl.trans(b_k), S, input_precision="ieee", out_dtype=ACC)
        b_at0 += tl.sum(b_x.to(ACC) * numbers(p_mean, o_ih, i_d, K, BD)[None, :], 1)
        if GATED and BACKWARD:
            b_q = load_tile(x_q_d, i_b, i_t, i_h, i_d, T, H, K, C, BD, TMA)
            Sq = tl.dot(b_q, tl.trans(b_k), Sq, input_precision="ieee", out_dtype=ACC)

    n = tl.load(p_n + o_ih)
    b_decay = decay_of(p_G, o_ih, o_c, C, GATED, ACC)
    b_w = weights(p_G, o_ih, real_tokens(p_fill, i, i_t, T, C, PACKED), C, GATED, False, ACC)
    b_inv = 1.0 / tl.maximum(b_decay * n + tl.sum(b_w, 1), 1.0)
    b_bar = (b_decay * n * b_at0 + tl.sum(b_w * S, 1)) * b_inv
    b_rel = b_bar - b_at0
    S = S - b_bar[:, None]
    b_P = (b_w * S).to(OT)
    b_rest = tl.sum(b_P.to(ACC), 1)
    if SAVE or BACKWARD:
        tl.store(p_bar + o_ih * C + o_c, b_bar)
        tl.store(p_rel + o_ih * C + o_c, b_rel)
    if SAVE:
        tl.store(p_inv + o_ih * C + o_c, b_inv)
    if BACKWARD:
        unscale = 1.0 / tl.load(p_scale)
    if GATED and BACKWARD:
        b_ysq = tl.load(p_ysq + o_ih * C + o_c)
        Sq = Sq - tl.load(p_qbar + o_ih * C + o_c)[:, None]
        b_pairs = tl.where(o_c[:, None] > o_c[None, :], b_w * (b_ysq[:, None] - S * Sq), 0.0)
        # no difference of sums: in half the tensor cores' float32 is far more than the operands hold
        precision: tl.constexpr = "tf32" if HALF else "ieee"
        upper = (o_c[:, None] <= o_c[None, :]).to(ACC)
        b_later = tl.dot(upper, b_pairs, input_precision=precision, out_dtype=ACC)
        b_dG = tl.sum(tl.where(o_c[:, None] > o_c[None, :], b_later, 0.0), 1)
        b_reach = b_decay * n * (b_ysq - b_rel * tl.load(p_qrel + o_ih * C + o_c))

    b_x = load_tile(x_x_k, i_b, i_t, i_h, 0, T, H, K, C, BK, TMA)
    b_carry = b_decay * tl.maximum(n, 1.0)
    for i_v in tl.range(0, K, BV, num_stages=NS):
        b_C = load_state(x_C0_vs, i, i_h, i_v, H, K, BK, BV, TMA)
        b_k = load_tile(x_k_v, i_b, i_t, i_h, i_v, T, H, K, C, BV, TMA)
        b_out = tl.dot(b_x, b_C, input_precision="ieee", out_dtype=ACC) * b_carry[:, None]
        if GATED and BACKWARD:
            b_qv = load_tile(x_q_v, i_b, i_t, i_h, i_v, T, H, K, C, BV, TMA).to(ACC)
            b_reach -= tl.sum(b_out * b_qv, 1)
        b_out = tl.dot(b_P, b_k, b_out, input_precision="ieee", out_dtype=ACC)
        b_out -= b_rest[:, None] * numbers(p_mean, o_ih, i_v, K, BV)[None, :]
        if BACKWARD:
            b_out *= -unscale
            for j in tl.static_range(GROUP):
                b_out += load_tile(x_do_v, i_b, i_t, i_h * GROUP + j, i_v, T, HV, K, C, BV, TMA).to(ACC)
            store_tile(x_out_v, b_out.to(OT), i_b, i_t, i_h, i_v, T, H, K, C, BV, TMA)
        else:
            b_out *= b_inv[:, None]
            if SAVE:
                store_tile(x_Sx_v, b_out.to(OT), i_b, i_t, i_h, i_v, T, H, K, C, BV, TMA)
            b_xv = load_tile(x_q_v, i_b, i_t, i_h, i_v, T, H, K, C, BV, TMA).to(ACC)
            for j in tl.static_range(GROUP):
                o_eta = (tl.cast(i_b, tl.int64) * T + o_t) * HV + i_h * GROUP + j
                b_eta = tl.load(p_eta + o_eta, mask=o_t < T, other=0.0).to(ACC)
                b_clean = b_xv - b_eta[:, None] * b_out
                store_tile(x_out_v, b_clean.to(OT), i_b, i_t, i_h * GROUP + j, i_v, T, HV, K, C, BV, TMA)
    if GATED and BACKWARD:
        b_dG += tl.sum(tl.where(o_c[:, None] <= o_c[None, :], b_reach[None, :], 0.0), 1)
        tl.store(p_dG + o_ih * C + o_c, b_dG)


def compile_cases(plan: Plan, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    half = dtype.itemsize == 2
    cases = []
    for gated in (False, True):
        cases.append(case(states, "states", plan, dtype, K, GATED=gated, PACKED=False, INIT=True))
        for backward in (False, True):
            flags = {"GATED": gated, "PACKED": False, "BACKWARD": backward, "SAVE": not backward, "HALF": half}
            cases.append(case(read, "read", plan, dtype, K, **flags))
    return cases
