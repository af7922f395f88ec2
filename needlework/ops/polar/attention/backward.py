"""The backward of Polar attention: rows, then queries and keys apart, so that no sum needs an atomic; two products a tile twice.

    ds = (dc − c (c·dc)) / r, δ = 0   where r = ‖s‖ > 1e-6;    ds = dc / 1e-6, δ = c·dc   under the clamp;    e = f ds
    h = dmag softplus(β) (1 − mag²) m_eff / (1 + m_eff)
    da_ij = ŵ_ij (e_i·v_j + A_i + B_i ŵ_ij),   A = h (3 − f) − f δ,   B = −2 h n_eff          ŵ = 2^{a − lse}
    dq = Σ_j temp da k / √K,   dk = Σ_i temp da q / √K,   dv = Σ_i ŵ e       dk and dv over the query heads of their group
    dtemp = q·dq / temp + null da_N = q·dq / temp − c Σ_j da_ij + (null − c) da_N  for any c,   dnull = temp da_N

da_N = (1 − f)(ds·v_null − δ − h) and −Σ_j da_ij are equal; in float32 the first is noise where the null dominates, the second
where it does not: their mean with weights f and 1 − f is taken. Σ_j da_ij = f (ds·mean − δ) + h (1 − f) needs no pass over the keys,
since the forward left the keys' mean. A is what makes the sum that the kernels will form equal to −da_N, with e as it is rounded:
A = −da_N − e·mean + 2h, which without rounding is the above.

c: rounded operands leave Σ_j da_ij off from −da_N, and q·dq off by as much of a query's mean score σ̄, many times what dα may be off.
The sum as it came out, times a c near σ̄, takes that out: temp c = lse − ln n_eff (exact where all weights are equal). Its products
with ones are exact and nearly free.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.parts import inner, load_parts, plus_products, scores, store_parts, times, zeros
from needlework.ops.common.kernels.tile import load_tile, store_tile
from needlework.ops.polar.attention.rows import CLAMP, LN2, clamped, gains_of, log1p, shares, softplus_of_three, span, tanh

ONES = tl.constexpr(16)  # columns of the product that sums rows: the fewest that a tensor core takes


@triton.jit(do_not_specialize=["T", "NR", "W"])
def prepare(
    x_mean, x_dc, x_e, p_alpha, p_beta, p_gamma, p_base, p_null, p_dmag, p_stats, p_rows, p_power, p_sums, p_dnull, p_spans,
    T, NR, W,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr, TMA: tl.constexpr, ACC: tl.constexpr,
    ST: tl.constexpr, SCALE: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """e, and a row's numbers in pairs: p_rows [B H 2 NR 2]: sc = log2(e) temp / √K and lse, sc A and sc B. SCALED: e, A and B are in
    divided by a power of two, p_power [B H NR].

    A tile's part of the parameters' gradients: p_sums [H 4 tiles]: dα without q·dq, dβ, dγ, dnull_base, all without the factor that
    a head has; p_dnull [H tiles V].
    """
    i_bh = tl.program_id(0)
    i_b = i_bh // H
    i_h = i_bh % H
    i_t = tl.program_id(1) * BM
    first, asks, _ = span(p_spans, i_b, i_t, T, C, PACKED)
    tiles = tl.num_programs(0) // H * tl.num_programs(1)
    i_tile = i_b * tl.num_programs(1) + tl.program_id(1)
    o_sums = p_sums + i_h * (4 * tiles) + i_tile
    o_v = tl.arange(0, BV)
    o_dnull = p_dnull + (tl.cast(i_h, tl.int64) * tiles + i_tile) * V + o_v
    if PACKED:
        if i_t + BM <= asks:
            tl.store(o_sums + tl.arange(0, 4) * tiles, tl.zeros([4], ACC))
            tl.store(o_dnull, tl.zeros([BV], ACC), mask=o_v < V)
            if SCALED:  # the largest power is looked for among all rows
                tl.store(p_power + tl.cast(i_bh, tl.int64) * NR + i_t + tl.arange(0, BM), tl.zeros([BM], ACC))
            return
    o_t = i_t + tl.arange(0, BM)
    n = o_t - first + 1
    if WINDOW:
        n = tl.minimum(n, W)
    alpha, gamma, strength = softplus_of_three(p_alpha, p_gamma, p_beta, i_h)
    strength = strength.to(ACC)
    log_n, root, temp, null, a_null = gains_of(alpha, gamma, tl.load(p_base + i_h), n, ACC)
    o_stats = p_stats + tl.cast(i_bh, tl.int64) * (3 * NR) + o_t
    lse = tl.load(o_stats)
    n_eff = tl.load(o_stats + NR)
    f, missed = shares(lse, a_null)

    b_null = tl.load(p_null + i_h * V + o_v, mask=o_v < V, other=0.0)[None, :]
    b_dc = load_tile(x_dc, i_b, i_t, i_h, 0, T, H, V, BM, BV, TMA).to(ACC)
    b_mean = load_tile(x_mean, i_b, i_t, i_h, 0, T, H, V, BM, BV, TMA).to(ACC) * tl.load(o_stats + 2 * NR)[:, None]
    b_s = f[:, None] * b_mean + missed[:, None] * b_null
    r = tl.sqrt(tl.sum(b_s * b_s, 1))
    free = r > CLAMP
    inverse = 1.0 / clamped(r)
    radial = tl.sum(b_s * b_dc, 1) * inverse
    b_ds = (b_dc - b_s * (tl.where(free, radial, 0.0) * inverse)[:, None]) * inverse[:, None]
    delta = tl.where(free, 0.0, radial)

    dmag = tl.load(p_dmag + (tl.cast(i_b, tl.int64) * T + o_t) * H + i_h, mask=o_t < T, other=0.0)
    m_eff = n_eff * f
    log_m = log1p(m_eff)
    magnitude = tanh(strength * log_m)
    dlog = dmag * (1.0 - magnitude) * (1.0 + magnitude)
    h = dlog * strength * m_eff / (1.0 + m_eff)
    of_keys = f * (tl.sum(b_ds * b_mean, 1) - delta) + h * (1.0 - f)
    da_null = missed * (f * (tl.sum(b_ds * b_null, 1) - delta - h) - of_keys)
    b_e = b_ds * f[:, None]
    B = -2.0 * h * n_eff
    power = 1.0
    if SCALED:
        # a power of two that brings e, A and B to at most about 1, whatever ‖s‖ was; the square of f ds would underflow
        size = tl.maximum(f * tl.sqrt(tl.sum(b_ds * b_ds, 1)), tl.maximum(tl.abs(h), tl.abs(B)))
        power = tl.exp2(tl.ceil(tl.log2(tl.maximum(size, 1e-30))))
        b_e *= (1.0 / power)[:, None]
    b_e = b_e.to(ST)
    store_tile(x_e, b_e, i_b, i_t, i_h, 0, T, H, V, BM, BV, TMA)
    A = (2.0 * h - da_null) / power - tl.sum(b_e.to(ACC) * b_mean, 1)
    sc = temp * SCALE
    o_rows = p_rows + tl.cast(i_bh, tl.int64) * (4 * NR) + 2 * o_t
    tl.store(o_rows, sc)
    tl.store(o_rows + 1, lse)
    tl.store(o_rows + 2 * NR, A * sc)
    tl.store(o_rows + 2 * NR + 1, B / power * sc)
    if SCALED:
        tl.store(p_power + tl.cast(i_bh, tl.int64) * NR + o_t, power)

    dnull = temp * LN2 * da_null
    tl.store(o_sums, tl.sum((null - (lse - tl.log2(n_eff)) / temp) * da_null * log_n, 0))
    tl.store(o_sums + tiles, tl.sum(dlog * log_m, 0))
    tl.store(o_sums + 2 * tiles, tl.sum(dnull * root, 0))
    tl.store(o_sums + 3 * tiles, tl.sum(dnull, 0))
    tl.store(o_dnull, tl.sum(b_ds * missed[:, None], 0), mask=o_v < V)


@triton.jit
def _dq_over_keys(
    acc, total, b_q, b_e, sc, lse, A, B, x_k, x_v, i_b, i_kv, lo, hi, own, T, W,
    HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    NK: tl.constexpr, NV: tl.constexpr, NS: tl.constexpr, TMA: tl.constexpr, ACC: tl.constexpr, MASK: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    for j in tl.range(lo, hi, BN, num_stages=NS):
        b_k = load_parts(x_k, i_b, j, i_kv, T, HK, K, BN, BK, NK, TMA)
        b_v = load_parts(x_v, i_b, j, i_kv, T, HK, V, BN, BV, NV, TMA)
        s = scores(b_q, b_k, NK, ACC)
        ev = scores(b_e, b_v, NV, ACC)
        p = tl.exp2(s * sc[:, None] - lse[:, None])
        if MASK:
            behind = own[:, None] - (j + tl.arange(0, BN))[None, :]
            seen = behind >= 0
            if WINDOW:
                seen &= behind < W
            p = tl.where(seen, p, 0.0)
        da = p * (ev * sc[:, None] + (p * B[:, None] + A[:, None]))
        b_da = da.to(b_k[0].dtype)
        acc = plus_products(acc, b_da, b_k, NK)
        total = tl.dot(b_da, tl.full([BN, ONES], 1.0, tl.float32).to(b_da.dtype), total, input_precision="ieee", out_dtype=ACC)
    return acc, total


@triton.jit(do_not_specialize=["one", "T", "NR", "W"])
def queries(
    x_q, x_k, x_v, x_e, x_dq, p_stats, p_rows, p_power, p_dtemp, p_spans, one, T, NR, W,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr, NS: tl.constexpr, REG: tl.constexpr, TMA: tl.constexpr,
    ACC: tl.constexpr, OT: tl.constexpr, SCALE: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """dq of a head's tile of BM queries, and p_dtemp [H tiles]: its Σ ln n (q·dq / temp − c Σ_j da)."""
    i_bh = tl.program_id(0)
    i_b = i_bh // H
    i_h = i_bh % H
    i_kv = i_h // (H // HK)
    i_m = tl.num_programs(1) - 1 - tl.program_id(1)
    i_t = i_m * BM
    first, asks, _ = span(p_spans, i_b, i_t, T, C, PACKED)
    o_dtemp = i_h * (tl.num_programs(0) // H * tl.num_programs(1)) + i_b * tl.num_programs(1) + i_m
    if PACKED:
        if i_t + BM <= asks:
            tl.store(p_dtemp + o_dtemp, tl.zeros([], ACC))
            return
    own = i_t + tl.arange(0, BM)
    o_rows = p_rows + tl.cast(i_bh, tl.int64) * (4 * NR) + 2 * own
    sc = tl.load(o_rows)
    lse = tl.load(o_rows + 1)
    A = tl.load(o_rows + 2 * NR)
    B = tl.load(o_rows + 2 * NR + 1)
    b_q = load_parts(x_q, i_b, i_t, i_h, T, H, K, BM, BK, NK, TMA)
    b_e = load_parts(x_e, i_b, i_t, i_h, T, H, V, BM, BV, NV, TMA)
    if REG:
        # times a 1 that the compiler does not know: both stay in registers, and shared memory is read for k and v alone
        b_q = times(b_q, one, NK)
        b_e = times(b_e, one, NV)

    acc = zeros(BM, BK, NK, ACC)
    total = tl.zeros([BM, ONES], ACC)
    diagonal = i_t // BN * BN
    full = first
    if WINDOW:
        start = tl.maximum(first, i_t - W + 1) // BN * BN
        full = tl.minimum(tl.cdiv(tl.maximum(first, i_t + BM - W), BN) * BN, diagonal)
        acc, total = _dq_over_keys(
            acc, total, b_q, b_e, sc, lse, A, B, x_k, x_v, i_b, i_kv, start, full, own, T, W,
            HK, K, V, BN, BK, BV, NK, NV, NS, TMA, ACC, True, True,
        )  # fmt: skip
    acc, total = _dq_over_keys(
        acc, total, b_q, b_e, sc, lse, A, B, x_k, x_v, i_b, i_kv, full, diagonal, own, T, W,
        HK, K, V, BN, BK, BV, NK, NV, NS, TMA, ACC, False, False,
    )  # fmt: skip
    acc, total = _dq_over_keys(
        acc, total, b_q, b_e, sc, lse, A, B, x_k, x_v, i_b, i_kv, diagonal, i_t + BM, own, T, W,
        HK, K, V, BN, BK, BV, NK, NV, NS, TMA, ACC, True, WINDOW,
    )  # fmt: skip

    da_sum = tl.sum(total, 1) * (1.0 / ONES)
    if SCALED:
        power = tl.load(p_power + tl.cast(i_bh, tl.int64) * NR + own)
        acc = times(acc, power[:, None], NK)
        da_sum *= power
    n = own - first + 1
    if WINDOW:
        n = tl.minimum(n, W)
    asked = load_parts(x_q, i_b, i_t, i_h, T, H, K, BM, BK, NK, TMA)
    # acc = log2(e) dq, da_sum = sc Σ_j da, temp = ln 2 sc / SCALE, c = (lse − log2 n_eff) SCALE / sc
    score = lse - tl.log2(tl.load(p_stats + tl.cast(i_bh, tl.int64) * (3 * NR) + NR + own))
    dtemp = (inner(asked, acc, NK) - score * da_sum / sc) * SCALE / sc
    log_n = tl.log(tl.maximum(n, 1).to(ACC))
    tl.store(p_dtemp + o_dtemp, tl.sum(tl.where(own < T, dtemp * log_n, 0.0), 0))
    store_parts(x_dq, acc, LN2, OT, i_b, i_t, i_h, T, H, K, BM, BK, NK, TMA)


@triton.jit
def _over_queries(
    dk, dv, b_k, b_v, x_q, x_e, p_rows, p_power, i_b, i_kv, key, lo, hi, ref, T, NR, W,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    NK: tl.constexpr, NV: tl.constexpr, NS: tl.constexpr, TMA: tl.constexpr, ACC: tl.constexpr, SCALED: tl.constexpr,
    MASK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Queries lo … hi − 1, in tiles, of every head of the group: transposed tiles, so that their products enter from registers."""
    G: tl.constexpr = H // HK
    # at least 1: loads ahead of the loop divide by it where the loop has no turn, too
    count = tl.maximum(tl.cdiv(hi - lo, BM), 1)
    for i in tl.range(0, tl.where(hi > lo, G * count, 0), num_stages=NS):
        i_g = i // count
        i_h = i_kv * G + i_g
        i_t = lo + (i - i_g * count) * BM
        b_q = load_parts(x_q, i_b, i_t, i_h, T, H, K, BM, BK, NK, TMA)
        b_e = load_parts(x_e, i_b, i_t, i_h, T, H, V, BM, BV, NV, TMA)
        i_row = (tl.cast(i_b, tl.int64) * H + i_h) * NR
        # a pair a load: less to copy ahead than two numbers by themselves
        o_pair = (i_t + tl.arange(0, BM))[:, None] * 2 + tl.arange(0, 2)[None, :]
        sc, lse = tl.split(tl.load(p_rows + 4 * i_row + o_pair))
        if SCALED:
            part = tl.maximum(tl.load(p_power + i_row + i_t + tl.arange(0, BM)) / ref, 1e-30)
            lse -= tl.log2(part)
        s = scores(b_k, b_q, NK, ACC)
        p = tl.exp2(s * sc[None, :] - lse[None, :])
        if MASK:
            behind = (i_t + tl.arange(0, BM))[None, :] - key[:, None]
            seen = behind >= 0
            if WINDOW:
                seen &= behind < W
            p = tl.where(seen, p, 0.0)
        ev = scores(b_v, b_e, NV, ACC)
        dv = plus_products(dv, p.to(b_e[0].dtype), b_e, NV)
        # late: two numbers a query fewer to hold meanwhile
        A, B = tl.split(tl.load(p_rows + 4 * i_row + 2 * NR + o_pair))
        if SCALED:
            B /= part
        da = p * (ev * sc[None, :] + (p * B[None, :] + A[None, :]))
        dk = plus_products(dk, da.to(b_q[0].dtype), b_q, NK)
    return dk, dv


@triton.jit(do_not_specialize=["T", "NR", "W"])
def keys(
    x_q, x_k, x_v, x_e, x_dk, x_dv, p_rows, p_power, p_ref, p_spans, T, NR, W,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr, NS: tl.constexpr, TMA: tl.constexpr, ACC: tl.constexpr,
    OT: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """dk and dv of a key-value head's tile of BN keys. p_ref [1]: the largest power of e (SCALED)."""
    i_bh = tl.program_id(0)
    i_b = i_bh // HK
    i_kv = i_bh % HK
    i_s = tl.program_id(1) * BN
    _, asks, last = span(p_spans, i_b, i_s, T, C, PACKED)
    key = i_s + tl.arange(0, BN)
    b_k = load_parts(x_k, i_b, i_s, i_kv, T, HK, K, BN, BK, NK, TMA)
    b_v = load_parts(x_v, i_b, i_s, i_kv, T, HK, V, BN, BV, NV, TMA)
    ref = 1.0
    if SCALED:
        ref = tl.load(p_ref)
    dk = zeros(BN, BK, NK, ACC)
    dv = zeros(BN, BV, NV, ACC)
    # from `full` on a query of a tile sees all the keys, from `edge` on its window leaves some out
    begin = tl.maximum(i_s, asks) // BM * BM
    full = tl.maximum(tl.minimum(tl.cdiv(i_s + BN - 1, BM) * BM, last), begin)
    edge = last
    if WINDOW:
        edge = tl.maximum(tl.minimum((i_s + W) // BM * BM, last), full)
        dk, dv = _over_queries(
            dk, dv, b_k, b_v, x_q, x_e, p_rows, p_power, i_b, i_kv, key, edge, tl.minimum(i_s + BN - 1 + W, last), ref, T, NR, W,
            H, HK, K, V, BM, BK, BV, NK, NV, NS, TMA, ACC, SCALED, True, True,
        )  # fmt: skip
    dk, dv = _over_queries(
        dk, dv, b_k, b_v, x_q, x_e, p_rows, p_power, i_b, i_kv, key, full, edge, ref, T, NR, W,
        H, HK, K, V, BM, BK, BV, NK, NV, NS, TMA, ACC, SCALED, False, False,
    )  # fmt: skip
    dk, dv = _over_queries(
        dk, dv, b_k, b_v, x_q, x_e, p_rows, p_power, i_b, i_kv, key, begin, full, ref, T, NR, W,
        H, HK, K, V, BM, BK, BV, NK, NV, NS, TMA, ACC, SCALED, True, WINDOW,
    )  # fmt: skip
    if SCALED:
        dk = times(dk, ref, NK)
        dv = times(dv, ref, NV)
    store_parts(x_dk, dk, LN2, OT, i_b, i_s, i_kv, T, HK, K, BN, BK, NK, TMA)
    store_parts(x_dv, dv, 1.0, OT, i_b, i_s, i_kv, T, HK, V, BN, BV, NV, TMA)


@triton.jit
def _total(p_x, count, BLK: tl.constexpr, ACC: tl.constexpr):
    """Σ of `count` numbers."""
    total = tl.zeros([BLK], ACC)
    for i in range(0, count, BLK):
        at = i + tl.arange(0, BLK)
        total += tl.load(p_x + at, mask=at < count, other=0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["tiles", "tiles_q"])
def totals(
    p_alpha, p_beta, p_gamma, p_sums, p_dtemp, p_dnull, p_dalpha, p_dbeta, p_dgamma, p_dbase, p_dv_null, tiles, tiles_q,
    V: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, BLK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A head's parameters' gradients, from those of all tiles, in one order."""
    i_h = tl.program_id(0)
    p_sums += i_h * (4 * tiles)
    dtemp = _total(p_sums, tiles, BLK, ACC) + _total(p_dtemp + i_h * tiles_q, tiles_q, BLK, ACC)
    # sigmoid
    tl.store(p_dalpha + i_h, dtemp / (1.0 + tl.exp(-tl.load(p_alpha + i_h))))
    tl.store(p_dbeta + i_h, _total(p_sums + tiles, tiles, BLK, ACC) / (1.0 + tl.exp(-tl.load(p_beta + i_h))))
    tl.store(p_dgamma + i_h, _total(p_sums + 2 * tiles, tiles, BLK, ACC) / (1.0 + tl.exp(-tl.load(p_gamma + i_h))))
    tl.store(p_dbase + i_h, _total(p_sums + 3 * tiles, tiles, BLK, ACC))
    o_v = tl.arange(0, BV)
    dv_null = tl.zeros([BT, BV], ACC)
    for i in range(0, tiles, BT):
        at = i + tl.arange(0, BT)
        inside = (at < tiles)[:, None] & (o_v < V)[None, :]
        row = tl.cast(i_h, tl.int64) * tiles + at
        dv_null += tl.load(p_dnull + row[:, None] * V + o_v[None, :], mask=inside, other=0.0)
    tl.store(p_dv_null + i_h * V + o_v, tl.sum(dv_null, 0), mask=o_v < V)
