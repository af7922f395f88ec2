"""The rows of queries and keys that the additive engine reads.

    q'_t = R(Θ_t)(q_t + b_q)    k'_t = R(Θ_{t-1})(k_{t-1} + b_k)    same_t = (q_t + b_q)ᵀ(k_t + b_k)

Rows are divided by powers of two where there are any. A tile's program turns the keys of its tokens and writes them one row further.
"""

import triton
import triton.language as tl

from needlework.ops.mamba3.siso.angles import angles_of
from needlework.ops.mamba3.siso.tiles import load_pairs, past_the_last, place, powers_of, rest_channels, store_pairs


@triton.jit
def load_turning(
    p, p_bias, at, real, i_h, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, M: tl.constexpr, BM: tl.constexpr,
    HALVES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """q or k of tokens `at` with its bias: channels of the pairs that turn, [BT BM] each. What is not a token's is the bias."""
    a, b = load_pairs(p, (at * H + i_h // (HV // H)) * K, real, K, M, BM, HALVES)
    a, b = a.to(ACC), b.to(ACC)
    if p_bias is not None:
        one = tl.arange(0, 1)
        bias_a, bias_b = load_pairs(p_bias, i_h * K + one, one == 0, K, M, BM, HALVES)
        a, b = a + bias_a.to(ACC), b + bias_b.to(ACC)
    return a, b


@triton.jit
def load_still(
    p, p_bias, at, real, i_h, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, M: tl.constexpr, BR: tl.constexpr,
    HALVES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The channels [BT BR] that do not turn, likewise."""
    channel, is_one = rest_channels(K, M, BR, HALVES)
    mask = real[:, None] & is_one[None, :]
    x = tl.load(p + ((at * H + i_h // (HV // H)) * K)[:, None] + channel[None, :], mask=mask, other=0.0).to(ACC)
    if p_bias is not None:
        x += tl.load(p_bias + i_h * K + channel, mask=is_one, other=0.0).to(ACC)[None, :]
    return x


@triton.jit
def store_still(p, x, o_row, real, K: tl.constexpr, M: tl.constexpr, BR: tl.constexpr, HALVES: tl.constexpr):
    """The inverse of `load_still` of rows that begin at p + o_row [BT]."""
    channel, is_one = rest_channels(K, M, BR, HALVES)
    tl.store(p + o_row[:, None] + channel[None, :], x.to(p.dtype.element_ty), mask=real[:, None] & is_one[None, :])


@triton.jit(do_not_specialize=["T", "N", "NCB"])
def rows_kernel(
    p_q, p_k, p_dt, p_rate, p_q_bias, p_k_bias, p_start, p_k0, p_power, p_q_rows, p_k_rows, p_same, p_k_end, p_cum, p_ends, T, N, NCB,
    H: tl.constexpr, HV: tl.constexpr, HB: tl.constexpr, K: tl.constexpr, M: tl.constexpr, F: tl.constexpr, HALVES: tl.constexpr,
    ACC: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """One tile and HB heads. p_k0 None: nothing before the first token. p_k_end [N HV K]: the last token's key, turned."""
    GROUPS: tl.constexpr = HV // HB
    i_c, i_group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    if past_the_last(p_cum, i_c, N):
        return
    n, first, length, token, row = place(p_cum, p_ends, i_c, T, N, NCB, BT, F)
    j = first + tl.arange(0, BT)
    real, is_row, is_last = j < length, j < length + F, j + 1 == length
    follows = real & (j + 1 < length + F)
    at = token + j
    for i in range(0, HB):
        i_h = i_group * HB + i
        o, o_row = at * HV + i_h, (row + j) * HV + i_h
        _, _, _, by_q, by_k, _ = powers_of(p_power, p_cum, n, N, i_h, HV)
        o_end = (tl.cast(n, tl.int64) * HV + i_h) * K + 0 * j
        cos, sin = angles_of(p_start, p_rate, p_dt, i_c, token, j, length, i_h, HV, M, BM, ACC)
        q1, q2 = load_turning(p_q, p_q_bias, at, real, i_h, H, HV, K, M, BM, HALVES, ACC)
        k1, k2 = load_turning(p_k, p_k_bias, at, real, i_h, H, HV, K, M, BM, HALVES, ACC)
        same = tl.sum(q1 * k1 + q2 * k2, 1)
        store_pairs(p_q_rows, (cos * q1 - sin * q2) * by_q, (sin * q1 + cos * q2) * by_q, o_row * K, is_row, K, M, BM, HALVES)
        turned1, turned2 = cos * k1 - sin * k2, sin * k1 + cos * k2
        store_pairs(p_k_rows, turned1 * by_k, turned2 * by_k, (o_row + HV) * K, follows, K, M, BM, HALVES)
        if F:
            store_pairs(p_k_end, turned1, turned2, o_end, is_last, K, M, BM, HALVES)
        if BR:
            q = load_still(p_q, p_q_bias, at, real, i_h, H, HV, K, M, BR, HALVES, ACC)
            k = load_still(p_k, p_k_bias, at, real, i_h, H, HV, K, M, BR, HALVES, ACC)
            same += tl.sum(q * k, 1)
            store_still(p_q_rows, q * by_q, o_row * K, is_row, K, M, BR, HALVES)
            store_still(p_k_rows, k * by_k, (o_row + HV) * K, follows, K, M, BR, HALVES)
            if F:
                store_still(p_k_end, k, o_end, is_last, K, M, BR, HALVES)
        tl.store(p_same + o, same, mask=real)
        if first == 0:  # the row before the first token
            o_first, o_given, i_k = row * HV + i_h, tl.cast(n, tl.int64) * HV + i_h, tl.arange(0, BM * 2)
            for i in range(0, K, 2 * BM):
                o_k = i + i_k
                k0 = tl.zeros([BM * 2], ACC)
                if p_k0 is not None:
                    k0 = tl.load(p_k0 + o_given * K + o_k, mask=o_k < K, other=0.0).to(ACC)
                k0_row = (k0 * by_k).to(p_k_rows.dtype.element_ty)
                tl.store(p_k_rows + o_first * K + o_k, k0_row, mask=(o_k < K) & (length + F > 0))
                if F:
                    tl.store(p_k_end + o_given * K + o_k, k0, mask=(o_k < K) & (length == 0))
