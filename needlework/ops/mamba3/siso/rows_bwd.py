"""The backward of `rows.py`: gradients of q and k, and of every token's angle.

    dq_t = R(−Θ_t) dq'_t + w_t (k_t + b_k)    dk_t = R(−Θ_t) dk'_{t+1} + w_t (q_t + b_q)    w_t = λ_tΔ_t do_tᵀv_t
    dΘ_t = q × R(−Θ)dq' + k × R(−Θ)dk',  the same in either frame

The engine was given do in place of abc do, for rows that were divided by a, b and c: its dq' is bc times too small, dk' ac.
"""

import triton
import triton.language as tl

from needlework.ops.mamba3.siso.angles import angles_of
from needlework.ops.mamba3.siso.rows import load_still, load_turning, store_still
from needlework.ops.mamba3.siso.tiles import load_pairs, past_the_last, place, powers_of, rest_channels, store_pairs


@triton.jit
def store_bias(p, a, b, o_row, M: tl.constexpr, BM: tl.constexpr, K: tl.constexpr, HALVES: tl.constexpr):
    """Sums over a tile's tokens, of the channels that turn."""
    one = tl.arange(0, 1)
    store_pairs(p, tl.sum(a, 0)[None, :], tl.sum(b, 0)[None, :], o_row + one, one == 0, K, M, BM, HALVES)


@triton.jit
def of_head(p_down, p_dt, p_lam, p_power, p_cum, i_c, n, N, i_h, o, real, HV: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr):
    """Of tokens whose numbers are at o: w, by what dq' and dk' are too small, and where the head's rows of K lie among tiles and
    among sequences."""
    own = tl.load(p_down + o, mask=real, other=0.0) * tl.load(p_dt + o, mask=real, other=0.0).to(ACC)
    own *= tl.load(p_lam + o, mask=real, other=0.0).to(ACC)
    a, b, c, _, _, _ = powers_of(p_power, p_cum, n, N, i_h, HV)
    return own, b * c, a * c, (tl.cast(i_c, tl.int64) * HV + i_h) * K, (tl.cast(n, tl.int64) * HV + i_h) * K


@triton.jit
def store_first(
    p_dk0, p_dk_rows, p_dk_end, o_given, o_row, length, by_k, F: tl.constexpr, K: tl.constexpr, BLK: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """One head's gradient of the key before the first token: without tokens it is the final key too."""
    for i in range(0, K, BLK):
        o_k = i + tl.arange(0, BLK)
        dk0 = tl.load(p_dk_rows + o_row + o_k, mask=(o_k < K) & (length + F > 0), other=0.0).to(ACC) * by_k
        if p_dk_end is not None:
            dk0 += tl.load(p_dk_end + o_given + o_k, mask=(o_k < K) & (length == 0), other=0.0).to(ACC)
        tl.store(p_dk0 + o_given + o_k, dk0, mask=o_k < K)


@triton.jit(do_not_specialize=["T", "N", "NCB"])
def rows_bwd_kernel(
    p_dq_rows, p_dk_rows, p_dk_end, p_q, p_k, p_dt, p_lam, p_rate, p_q_bias, p_k_bias, p_start, p_power, p_down,
    p_dq, p_dk, p_dangle, p_dangle_total, p_dq_bias, p_dk_bias, p_dk0, p_cum, p_ends, T, N, NCB,
    H: tl.constexpr, HV: tl.constexpr, HB: tl.constexpr, K: tl.constexpr, M: tl.constexpr, F: tl.constexpr, HALVES: tl.constexpr,
    ACC: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, NS: tl.constexpr,
):  # fmt: skip
    """One tile and HB heads of one key head: dq and dk [B T HV/HB K] are their sums. Channels that turn first, for what they need fills the
    registers; then those that do not."""
    GROUPS: tl.constexpr = HV // HB
    i_c, i_group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    if past_the_last(p_cum, i_c, N):
        return
    n, first, length, token, row = place(p_cum, p_ends, i_c, T, N, NCB, BT, F)
    j, o_m = first + tl.arange(0, BT), tl.arange(0, BM)
    real, is_last = j < length, j + 1 == length
    follows = real & (j + 1 < length + F)
    at = token + j
    o_group = (at * GROUPS + i_group) * K

    dq1, dq2 = tl.zeros([BT, BM], ACC), tl.zeros([BT, BM], ACC)
    dk1, dk2 = tl.zeros([BT, BM], ACC), tl.zeros([BT, BM], ACC)
    for i in tl.range(0, HB, num_stages=NS):
        i_h = i_group * HB + i
        o, o_row = at * HV + i_h, (row + j) * HV + i_h
        own, by_q, by_k, o_bias, o_given = of_head(p_down, p_dt, p_lam, p_power, p_cum, i_c, n, N, i_h, o, real, HV, K, ACC)
        cos, sin = angles_of(p_start, p_rate, p_dt, i_c, token, j, length, i_h, HV, M, BM, ACC)
        q1, q2 = load_turning(p_q, p_q_bias, at, real, i_h, H, HV, K, M, BM, HALVES, ACC)
        k1, k2 = load_turning(p_k, p_k_bias, at, real, i_h, H, HV, K, M, BM, HALVES, ACC)
        y1, y2 = load_pairs(p_dq_rows, o_row * K, real, K, M, BM, HALVES)
        y1, y2 = y1.to(ACC) * by_q, y2.to(ACC) * by_q
        d1, d2 = cos * y1 + sin * y2, cos * y2 - sin * y1
        dangle = q1 * d2 - q2 * d1
        d1, d2 = d1 + own[:, None] * k1, d2 + own[:, None] * k2
        dq1, dq2 = dq1 + d1, dq2 + d2
        if p_dq_bias is not None:
            store_bias(p_dq_bias, d1, d2, o_bias, M, BM, K, HALVES)
        y1, y2 = load_pairs(p_dk_rows, (o_row + HV) * K, follows, K, M, BM, HALVES)
        y1, y2 = y1.to(ACC) * by_k, y2.to(ACC) * by_k
        if p_dk_end is not None:
            e1, e2 = load_pairs(p_dk_end, o_given + 0 * j, is_last, K, M, BM, HALVES)
            y1, y2 = y1 + e1.to(ACC), y2 + e2.to(ACC)
        d1, d2 = cos * y1 + sin * y2, cos * y2 - sin * y1
        dangle += k1 * d2 - k2 * d1
        d1, d2 = d1 + own[:, None] * q1, d2 + own[:, None] * q2
        dk1, dk2 = dk1 + d1, dk2 + d2
        if p_dk_bias is not None:
            store_bias(p_dk_bias, d1, d2, o_bias, M, BM, K, HALVES)
        tl.store(p_dangle + o[:, None] * M + o_m[None, :], dangle, mask=real[:, None] & (o_m < M)[None, :])
        o_total = (tl.cast(i_c, tl.int64) * HV + i_h) * M + o_m
        tl.store(p_dangle_total + o_total, tl.sum(dangle, 0).to(tl.float64), mask=o_m < M)
    store_pairs(p_dq, dq1, dq2, o_group, real, K, M, BM, HALVES)
    store_pairs(p_dk, dk1, dk2, o_group, real, K, M, BM, HALVES)

    if BR:
        channel, is_one = rest_channels(K, M, BR, HALVES)
        dq, dk = tl.zeros([BT, BR], ACC), tl.zeros([BT, BR], ACC)
        for i in tl.range(0, HB, num_stages=NS):
            i_h = i_group * HB + i
            o, o_row = at * HV + i_h, (row + j) * HV + i_h
            own, by_q, by_k, o_bias, o_given = of_head(p_down, p_dt, p_lam, p_power, p_cum, i_c, n, N, i_h, o, real, HV, K, ACC)
            q = load_still(p_q, p_q_bias, at, real, i_h, H, HV, K, M, BR, HALVES, ACC)
            k = load_still(p_k, p_k_bias, at, real, i_h, H, HV, K, M, BR, HALVES, ACC)
            in_row = real[:, None] & is_one[None, :]
            d = tl.load(p_dq_rows + (o_row * K)[:, None] + channel[None, :], mask=in_row, other=0.0).to(ACC) * by_q
            d += own[:, None] * k
            dq += d
            if p_dq_bias is not None:
                tl.store(p_dq_bias + o_bias + channel, tl.sum(d, 0), mask=is_one)
            in_row = follows[:, None] & is_one[None, :]
            d = tl.load(p_dk_rows + ((o_row + HV) * K)[:, None] + channel[None, :], mask=in_row, other=0.0).to(ACC) * by_k
            if p_dk_end is not None:
                in_row = is_last[:, None] & is_one[None, :]
                d += tl.load(p_dk_end + o_given + channel[None, :] + 0 * j[:, None], mask=in_row, other=0.0).to(ACC)
            d += own[:, None] * q
            dk += d
            if p_dk_bias is not None:
                tl.store(p_dk_bias + o_bias + channel, tl.sum(d, 0), mask=is_one)
        store_still(p_dq, dq, o_group, real, K, M, BR, HALVES)
        store_still(p_dk, dk, o_group, real, K, M, BR, HALVES)

    if p_dk0 is not None:
        if first == 0:
            for i in range(0, HB):
                i_h = i_group * HB + i
                a, _, c, _, _, _ = powers_of(p_power, p_cum, n, N, i_h, HV)
                o_given = (tl.cast(n, tl.int64) * HV + i_h) * K
                store_first(p_dk0, p_dk_rows, p_dk_end, o_given, (row * HV + i_h) * K, length, a * c, F, K, 2 * BM, ACC)
