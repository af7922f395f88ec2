"""The rows that the additive engine reads, in one pass over q, k and v; and what is added to what it gives, in another.

    q'_t = R(Θ_t)(q_t + b_q)    k'_t = R(Θ_{t-1})(k_{t-1} + b_k)    u'_t = c_t v_{t-1}    c_t = α_t (λ_{t-1}Δ_{t-1} + (1 − λ_t)Δ_t)
    same_t = (q_t + b_q)ᵀ(k_t + b_k)        o_t = engine_t + λ_tΔ_t same_t v_t

Rows are divided by powers of two where there are any. A tile's program turns the keys of its tokens and writes them one row further.
"""

import triton
import triton.language as tl

from needlework.ops.mamba3.siso.angles import angles_of
from needlework.ops.mamba3.siso.tiles import load_pairs, past_the_last, place, rest_channels, store_pairs
from needlework.ops.slots.kernels import power_of


@triton.jit
def powers_of(p_power, p_cum, n, N, i_h, HV: tl.constexpr):
    """a, b and c of a sequence and head, and their inverses; p_power [3 B HV], packed sequences are one row of the batch."""
    i_b, B = n, N
    if p_cum is not None:
        i_b, B = 0, 1
    a, a_inverse = power_of(p_power, i_b * HV + i_h)
    b, b_inverse = power_of(p_power, (B + i_b) * HV + i_h)
    c, c_inverse = power_of(p_power, (2 * B + i_b) * HV + i_h)
    return a, b, c, a_inverse, b_inverse, c_inverse


@triton.jit
def load_turning(
    p, p_bias, at, real, i_h, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, M: tl.constexpr, BM: tl.constexpr,
    HALVES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """q or k of tokens `at` with its bias: channels of the pairs that turn, [BT BM] each."""
    a, b = load_pairs(p, (at * H + i_h // (HV // H)) * K, real, K, M, BM, HALVES)
    a, b = a.to(ACC), b.to(ACC)
    if p_bias is not None:
        bias_a, bias_b = load_pairs(p_bias, at * 0 + i_h * K, real, K, M, BM, HALVES)
        a, b = a + bias_a.to(ACC), b + bias_b.to(ACC)
    return a, b


@triton.jit
def load_still(
    p, p_bias, at, real, i_h, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, M: tl.constexpr, BR: tl.constexpr,
    HALVES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The channels [BT BR] that do not turn."""
    channel, is_one = rest_channels(K, M, BR, HALVES)
    mask = real[:, None] & is_one[None, :]
    x = tl.load(p + ((at * H + i_h // (HV // H)) * K)[:, None] + channel[None, :], mask=mask, other=0.0).to(ACC)
    if p_bias is not None:
        x += tl.where(mask, tl.load(p_bias + i_h * K + channel, mask=is_one, other=0.0).to(ACC)[None, :], 0.0)
    return x


@triton.jit
def store_still(p, x, o_row, real, K: tl.constexpr, M: tl.constexpr, BR: tl.constexpr, HALVES: tl.constexpr):
    """The inverse of `load_still` of rows that begin at p + o_row [BT]."""
    channel, is_one = rest_channels(K, M, BR, HALVES)
    tl.store(p + o_row[:, None] + channel[None, :], x.to(p.dtype.element_ty), mask=real[:, None] & is_one[None, :])


@triton.jit(do_not_specialize=["T", "N", "NCB"])
def rows_kernel(
    p_q, p_k, p_v, p_g, p_dt, p_lam, p_rate, p_q_bias, p_k_bias, p_start, p_k0, p_v0, p_power,
    p_q_rows, p_k_rows, p_u, p_g_rows, p_same, p_k_end, p_cum, p_ends, T, N, NCB,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, F: tl.constexpr, HALVES: tl.constexpr,
    ACC: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One tile and head. p_k0, p_v0 None: nothing before the first token. p_k_end [N HV K]: the last token's key, turned."""
    i_c, i_h = tl.program_id(0) // HV, tl.program_id(0) % HV
    if past_the_last(p_cum, i_c, N):
        return
    n, first, length, token, row = place(p_cum, p_ends, i_c, T, N, NCB, BT, F)
    j = first + tl.arange(0, BT)
    real, follows, is_row, is_last = j < length, j + 1 < length + F, j < length + F, j + 1 == length
    at = token + j
    o, o_row = at * HV + i_h, (row + j) * HV + i_h
    _, _, _, by_q, by_k, by_v = powers_of(p_power, p_cum, n, N, i_h, HV)
    o_end = (tl.cast(n, tl.int64) * HV + i_h) * K + 0 * j

    cos, sin = angles_of(p_start, p_rate, p_dt, i_c, token, j, length, i_h, HV, M, BM, ACC)
    q1, q2 = load_turning(p_q, p_q_bias, at, real, i_h, H, HV, K, M, BM, HALVES, ACC)
    k1, k2 = load_turning(p_k, p_k_bias, at, real, i_h, H, HV, K, M, BM, HALVES, ACC)
    same = tl.sum(q1 * k1 + q2 * k2, 1)
    store_pairs(p_q_rows, (cos * q1 - sin * q2) * by_q, (sin * q1 + cos * q2) * by_q, o_row * K, is_row, K, M, BM, HALVES)
    turned1, turned2 = cos * k1 - sin * k2, sin * k1 + cos * k2
    store_pairs(p_k_rows, turned1 * by_k, turned2 * by_k, (o_row + HV) * K, real & follows, K, M, BM, HALVES)
    if F:
        store_pairs(p_k_end, turned1, turned2, o_end, is_last, K, M, BM, HALVES)
    if BR:
        q = load_still(p_q, p_q_bias, at, real, i_h, H, HV, K, M, BR, HALVES, ACC)
        k = load_still(p_k, p_k_bias, at, real, i_h, H, HV, K, M, BR, HALVES, ACC)
        same += tl.sum(q * k, 1)
        store_still(p_q_rows, q * by_q, o_row * K, is_row, K, M, BR, HALVES)
        store_still(p_k_rows, k * by_k, (o_row + HV) * K, real & follows, K, M, BR, HALVES)
        if F:
            store_still(p_k_end, k, o_end, is_last, K, M, BR, HALVES)
    tl.store(p_same + o, same, mask=real)

    dt = tl.load(p_dt + o, mask=real, other=0.0).to(ACC)
    lam = tl.load(p_lam + o, mask=real, other=0.0).to(ACC)
    g = tl.load(p_g + o, mask=real, other=0.0).to(ACC)
    dt_next = tl.load(p_dt + o + HV, mask=j + 1 < length, other=0.0).to(ACC)
    lam_next = tl.load(p_lam + o + HV, mask=j + 1 < length, other=0.0).to(ACC)
    g_next = tl.load(p_g + o + HV, mask=j + 1 < length, other=0.0).to(ACC)
    weight = tl.exp(g_next) * (lam * dt + (1 - lam_next) * dt_next) * by_v
    if F:
        tl.store(p_g_rows + o_row, g, mask=is_row)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        x = tl.load(p_v + o[:, None] * V + o_v[None, :], mask=real[:, None] & (o_v < V)[None, :], other=0.0).to(ACC)
        u = (weight[:, None] * x).to(p_u.dtype.element_ty)
        tl.store(p_u + (o_row + HV)[:, None] * V + o_v[None, :], u, mask=(real & follows)[:, None] & (o_v < V)[None, :])

    if first == 0:  # the row before the first token
        o_first, o_given = row * HV + i_h, tl.cast(n, tl.int64) * HV + i_h
        is_first = j == 0
        w0 = tl.sum(tl.where(is_first, tl.exp(g) * (1 - lam) * dt, 0.0), 0) * by_v
        i_k = tl.arange(0, BM * 2)
        for i in range(0, K, 2 * BM):
            o_k = i + i_k
            k0 = tl.zeros([BM * 2], ACC)
            if p_k0 is not None:
                k0 = tl.load(p_k0 + o_given * K + o_k, mask=o_k < K, other=0.0).to(ACC)
            tl.store(p_k_rows + o_first * K + o_k, (k0 * by_k).to(p_k_rows.dtype.element_ty), mask=(o_k < K) & (length + F > 0))
            if F:
                tl.store(p_k_end + o_given * K + o_k, k0, mask=(o_k < K) & (length == 0))
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            x0 = tl.zeros([BV], ACC)
            if p_v0 is not None:
                x0 = tl.load(p_v0 + o_given * V + o_v, mask=o_v < V, other=0.0).to(ACC)
            tl.store(p_u + o_first * V + o_v, (w0 * x0).to(p_u.dtype.element_ty), mask=(o_v < V) & (length + F > 0))


@triton.jit(do_not_specialize=["T", "N", "NCB"])
def add_own_kernel(
    p_rows, p_v, p_dt, p_lam, p_same, p_power, p_o, p_cum, p_ends, T, N, NCB,
    HV: tl.constexpr, V: tl.constexpr, F: tl.constexpr, ACC: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """o of one tile and head, from what the engine gave for its rows."""
    i_c, i_h = tl.program_id(0) // HV, tl.program_id(0) % HV
    if past_the_last(p_cum, i_c, N):
        return
    n, first, length, token, row = place(p_cum, p_ends, i_c, T, N, NCB, BT, F)
    j = first + tl.arange(0, BT)
    real = j < length
    o, o_row = (token + j) * HV + i_h, (row + j) * HV + i_h
    a, b, c, _, _, _ = powers_of(p_power, p_cum, n, N, i_h, HV)
    own = tl.load(p_dt + o, mask=real, other=0.0).to(ACC) * tl.load(p_lam + o, mask=real, other=0.0).to(ACC)
    own *= tl.load(p_same + o, mask=real, other=0.0)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        mask = real[:, None] & (o_v < V)[None, :]
        x = tl.load(p_v + o[:, None] * V + o_v[None, :], mask=mask, other=0.0).to(ACC)
        y = tl.load(p_rows + o_row[:, None] * V + o_v[None, :], mask=mask, other=0.0).to(ACC)
        y = y * (a * b * c) + own[:, None] * x
        tl.store(p_o + o[:, None] * V + o_v[None, :], y.to(p_o.dtype.element_ty), mask=mask)
