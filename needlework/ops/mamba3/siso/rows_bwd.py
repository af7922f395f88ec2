"""The backward of `rows.py`, in one pass: gradients of q, k and v, and what the gates' own (`angles.py`) are made of.

    dq_t = R(−Θ_t) dq'_t + w_t (k_t + b_k)    dk_t = R(−Θ_t) dk'_{t+1} + w_t (q_t + b_q)    dv_t = λΔ same do_t + c_{t+1} du'_{t+1}
    w_t = λ_tΔ_t down_t,  down_t = do_tᵀv_t    dc_{t+1} = du'_{t+1}ᵀv_t    dΘ_t = q × R(−Θ)dq' + k × R(−Θ)dk',  the same in either frame

The engine was given do in place of abc do, for rows that were divided by a, b and c: its dq' is bc times too small, dk' ac, du' ab.
"""

import triton
import triton.language as tl

from needlework.ops.mamba3.siso.angles import angles_of
from needlework.ops.mamba3.siso.rows import load_still, load_turning, powers_of, store_still
from needlework.ops.mamba3.siso.tiles import load_pairs, past_the_last, place, rest_channels, store_pairs


@triton.jit
def store_bias(p, a, b, o_row, M: tl.constexpr, BM: tl.constexpr, K: tl.constexpr, HALVES: tl.constexpr):
    """Sums over a tile's tokens, of the channels that turn."""
    one = tl.arange(0, 1)
    store_pairs(p, tl.sum(a, 0)[None, :], tl.sum(b, 0)[None, :], o_row + one, one == 0, K, M, BM, HALVES)


@triton.jit(do_not_specialize=["T", "N", "NCB"])
def rows_bwd_kernel(
    p_do, p_dq_rows, p_dk_rows, p_du, p_dk_end, p_q, p_k, p_v, p_g, p_dt, p_lam, p_rate, p_q_bias, p_k_bias, p_start, p_v0, p_power,
    p_same, p_dq, p_dk, p_dv, p_dc, p_down, p_dangle, p_dangle_total, p_dq_bias, p_dk_bias, p_dk0, p_dv0, p_cum, p_ends, T, N, NCB,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, F: tl.constexpr, HALVES: tl.constexpr,
    ACC: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One tile and head; dq and dk have HV heads."""
    i_c, i_h = tl.program_id(0) // HV, tl.program_id(0) % HV
    if past_the_last(p_cum, i_c, N):
        return
    n, first, length, token, row = place(p_cum, p_ends, i_c, T, N, NCB, BT, F)
    j, o_m = first + tl.arange(0, BT), tl.arange(0, BM)
    real, is_last = j < length, j + 1 == length
    follows = real & (j + 1 < length + F)
    at = token + j
    o, o_row = at * HV + i_h, (row + j) * HV + i_h
    o_given = tl.cast(n, tl.int64) * HV + i_h
    a, b, c, _, _, _ = powers_of(p_power, p_cum, n, N, i_h, HV)

    dt = tl.load(p_dt + o, mask=real, other=0.0).to(ACC)
    lam = tl.load(p_lam + o, mask=real, other=0.0).to(ACC)
    g = tl.load(p_g + o, mask=real, other=0.0).to(ACC)
    dt_next = tl.load(p_dt + o + HV, mask=j + 1 < length, other=0.0).to(ACC)
    lam_next = tl.load(p_lam + o + HV, mask=j + 1 < length, other=0.0).to(ACC)
    g_next = tl.load(p_g + o + HV, mask=j + 1 < length, other=0.0).to(ACC)
    weight = tl.exp(g_next) * (lam * dt + (1 - lam_next) * dt_next)
    own = lam * dt
    same = tl.load(p_same + o, mask=real, other=0.0)
    down, dc = tl.zeros([BT], ACC), tl.zeros([BT], ACC)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        in_v = (o_v < V)[None, :]
        x = tl.load(p_v + o[:, None] * V + o_v[None, :], mask=real[:, None] & in_v, other=0.0).to(ACC)
        do = tl.load(p_do + o[:, None] * V + o_v[None, :], mask=real[:, None] & in_v, other=0.0).to(ACC)
        du = tl.load(p_du + (o_row + HV)[:, None] * V + o_v[None, :], mask=follows[:, None] & in_v, other=0.0).to(ACC) * (a * b)
        down += tl.sum(do * x, 1)
        dc += tl.sum(du * x, 1)
        dv = (own * same)[:, None] * do + weight[:, None] * du
        tl.store(p_dv + o[:, None] * V + o_v[None, :], dv.to(p_dv.dtype.element_ty), mask=real[:, None] & in_v)
    tl.store(p_down + o, down, mask=real)
    tl.store(p_dc + o_row + HV, dc, mask=follows)
    own *= down

    cos, sin = angles_of(p_start, p_rate, p_dt, i_c, token, j, length, i_h, HV, M, BM, ACC)
    q1, q2 = load_turning(p_q, p_q_bias, at, real, i_h, H, HV, K, M, BM, HALVES, ACC)
    k1, k2 = load_turning(p_k, p_k_bias, at, real, i_h, H, HV, K, M, BM, HALVES, ACC)
    y1, y2 = load_pairs(p_dq_rows, o_row * K, real, K, M, BM, HALVES)
    y1, y2 = y1.to(ACC) * (b * c), y2.to(ACC) * (b * c)
    d1, d2 = cos * y1 + sin * y2, cos * y2 - sin * y1
    dangle = q1 * d2 - q2 * d1
    d1, d2 = d1 + own[:, None] * k1, d2 + own[:, None] * k2
    store_pairs(p_dq, d1, d2, o * K, real, K, M, BM, HALVES)
    o_bias = (tl.cast(i_c, tl.int64) * HV + i_h) * K
    if p_dq_bias is not None:
        store_bias(p_dq_bias, d1, d2, o_bias, M, BM, K, HALVES)
    y1, y2 = load_pairs(p_dk_rows, (o_row + HV) * K, follows, K, M, BM, HALVES)
    y1, y2 = y1.to(ACC) * (a * c), y2.to(ACC) * (a * c)
    if p_dk_end is not None:
        e1, e2 = load_pairs(p_dk_end, o_given * K + 0 * j, is_last, K, M, BM, HALVES)
        y1, y2 = y1 + e1.to(ACC), y2 + e2.to(ACC)
    d1, d2 = cos * y1 + sin * y2, cos * y2 - sin * y1
    dangle += k1 * d2 - k2 * d1
    d1, d2 = d1 + own[:, None] * q1, d2 + own[:, None] * q2
    store_pairs(p_dk, d1, d2, o * K, real, K, M, BM, HALVES)
    if p_dk_bias is not None:
        store_bias(p_dk_bias, d1, d2, o_bias, M, BM, K, HALVES)
    tl.store(p_dangle + o[:, None] * M + o_m[None, :], dangle, mask=real[:, None] & (o_m < M)[None, :])
    o_total = (tl.cast(i_c, tl.int64) * HV + i_h) * M + o_m
    tl.store(p_dangle_total + o_total, tl.sum(dangle.to(tl.float64), 0), mask=o_m < M)

    if BR:
        channel, is_one = rest_channels(K, M, BR, HALVES)
        q = load_still(p_q, p_q_bias, at, real, i_h, H, HV, K, M, BR, HALVES, ACC)
        k = load_still(p_k, p_k_bias, at, real, i_h, H, HV, K, M, BR, HALVES, ACC)
        in_row = real[:, None] & is_one[None, :]
        d = tl.load(p_dq_rows + (o_row * K)[:, None] + channel[None, :], mask=in_row, other=0.0).to(ACC) * (b * c)
        d += own[:, None] * k
        store_still(p_dq, d, o * K, real, K, M, BR, HALVES)
        if p_dq_bias is not None:
            tl.store(p_dq_bias + o_bias + channel, tl.sum(d, 0), mask=is_one)
        in_row = follows[:, None] & is_one[None, :]
        d = tl.load(p_dk_rows + ((o_row + HV) * K)[:, None] + channel[None, :], mask=in_row, other=0.0).to(ACC) * (a * c)
        if p_dk_end is not None:
            in_row = is_last[:, None] & is_one[None, :]
            d += tl.load(p_dk_end + o_given * K + channel[None, :] + 0 * j[:, None], mask=in_row, other=0.0).to(ACC)
        d += own[:, None] * q
        store_still(p_dk, d, o * K, real, K, M, BR, HALVES)
        if p_dk_bias is not None:
            tl.store(p_dk_bias + o_bias + channel, tl.sum(d, 0), mask=is_one)

    if first == 0:  # the row before the first token
        o_first, there = row * HV + i_h, length + F > 0
        w0 = tl.sum(tl.where(j == 0, tl.exp(g) * (1 - lam) * dt, 0.0), 0)
        dc0 = 0.0 * w0
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            du = tl.load(p_du + o_first * V + o_v, mask=(o_v < V) & there, other=0.0).to(ACC) * (a * b)
            if p_v0 is not None:
                dc0 += tl.sum(du * tl.load(p_v0 + o_given * V + o_v, mask=o_v < V, other=0.0).to(ACC), 0)
                tl.store(p_dv0 + o_given * V + o_v, w0 * du, mask=o_v < V)
        tl.store(p_dc + o_first, dc0, mask=there)
        if p_dk0 is not None:
            o_k = tl.arange(0, 2 * BM)
            for i in range(0, K, 2 * BM):
                is_k = i + o_k < K
                dk0 = tl.load(p_dk_rows + o_first * K + i + o_k, mask=is_k & there, other=0.0).to(ACC) * (a * c)
                if p_dk_end is not None:
                    empty = is_k & (length == 0)
                    dk0 += tl.load(p_dk_end + o_given * K + i + o_k, mask=empty, other=0.0).to(ACC)
                tl.store(p_dk0 + o_given * K + i + o_k, dk0, mask=is_k)
