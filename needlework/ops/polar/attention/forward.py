"""Polar attention over a sequence, one tile of queries a program, key tiles streamed; T × T is never stored.

    M = max a,  L = Σ p,  Q₂ = Σ p²,  S = Σ p v over the keys alone,  p = 2^{a − M},  a = log2(e) temp q·k/√K
    s = f S/L + (1 − f) v_null,   direction = s / max(‖s‖, 1e-6),   magnitude = tanh(softplus(β) ln(1 + f L²/Q₂))

For the backward: lse = M + log2 L, n_eff = L²/Q₂, and the keys' mean S/L, not the direction: where the null dominates, the
direction holds no digit of what the keys gave. The mean is stored in steps of its row's largest number, 16 bits for half inputs:
bfloat16's 8 would cost dα its budget, float16's 11 those of dγ and dnull_base where inputs are float16. Grouped heads read their
key-value head where it lies.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.parts import largest, load_parts, load_row, plus_products, scores, store_parts, times, zeros
from needlework.ops.common.kernels.softmax import NONE, weigh
from needlework.ops.common.kernels.tile import store_tile
from needlework.ops.polar.attention.rows import gains, gains_of, read_out, softplus_of_three, span


@triton.jit
def _over_keys(
    m, l, q2, acc, b_q, x_k, x_v, i_b, i_kv, lo, hi, own, sc, T, W,
    HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    NK: tl.constexpr, NV: tl.constexpr, NS: tl.constexpr, TMA: tl.constexpr, ACC: tl.constexpr, MASK: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Keys lo … hi − 1 in tiles; with MASK each query sees those up to its own, the newest W behind a window."""
    for j in tl.range(lo, hi, BN, num_stages=NS):
        b_k = load_parts(x_k, i_b, j, i_kv, T, HK, K, BN, BK, NK, TMA)
        s = scores(b_q, b_k, NK, ACC)
        if MASK:
            behind = (own - j)[:, None]
            o_n = tl.arange(0, BN)[None, :]
            seen = behind >= o_n
            if WINDOW:
                seen &= behind - W < o_n
            s = tl.where(seen, s, float("-inf"))
        b_v = load_parts(x_v, i_b, j, i_kv, T, HK, V, BN, BV, NV, TMA)
        p, m, l, q2, rescale = weigh(s, sc, m, l, q2, True)
        acc = plus_products(times(acc, rescale[:, None], NV), p.to(b_v[0].dtype), b_v, NV)
    return m, l, q2, acc


@triton.jit(do_not_specialize=["T", "NR", "W"])
def attend(
    x_q, x_k, x_v, x_o, x_mean, p_alpha, p_beta, p_gamma, p_base, p_null, p_mag, p_stats, p_spans, T, NR, W,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr, NS: tl.constexpr, TMA: tl.constexpr, ACC: tl.constexpr,
    OT: tl.constexpr, MT: tl.constexpr, STEPS: tl.constexpr, SCALE: tl.constexpr, PACKED: tl.constexpr, WINDOW: tl.constexpr,
    SAVE: tl.constexpr,
):  # fmt: skip
    """A head's tile of BM queries. p_stats [B H 3 NR]: lse, n_eff, the mean's step. SCALE: 1 / √K."""
    i_bh = tl.program_id(0)
    i_b = i_bh // H
    i_h = i_bh % H
    i_kv = i_h // (H // HK)
    # the longest rows first
    i_t = (tl.num_programs(1) - 1 - tl.program_id(1)) * BM
    first, asks, _ = span(p_spans, i_b, i_t, T, C, PACKED)
    if PACKED:
        if i_t + BM <= asks:
            return
    own = i_t + tl.arange(0, BM)
    n = own - first + 1
    if WINDOW:
        n = tl.minimum(n, W)
    _, _, temp, _, _ = gains(p_alpha, p_gamma, p_base, i_h, n, ACC)
    sc = temp * SCALE

    b_q = load_parts(x_q, i_b, i_t, i_h, T, H, K, BM, BK, NK, TMA)
    m = tl.full([BM], NONE, ACC)
    l = tl.zeros([BM], ACC)
    q2 = tl.zeros([BM], ACC)
    acc = zeros(BM, BV, NV, ACC)
    # below `full` a query of the tile sees not all of a key tile because of its window, from `diagonal` on because of the future
    diagonal = i_t // BN * BN
    full = first
    if WINDOW:
        start = tl.maximum(first, i_t - W + 1) // BN * BN
        full = tl.minimum(tl.cdiv(tl.maximum(first, i_t + BM - W), BN) * BN, diagonal)
        m, l, q2, acc = _over_keys(
            m, l, q2, acc, b_q, x_k, x_v, i_b, i_kv, start, full, own, sc, T, W,
            HK, K, V, BN, BK, BV, NK, NV, NS, TMA, ACC, True, True,
        )  # fmt: skip
    m, l, q2, acc = _over_keys(
        m, l, q2, acc, b_q, x_k, x_v, i_b, i_kv, full, diagonal, own, sc, T, W,
        HK, K, V, BN, BK, BV, NK, NV, NS, TMA, ACC, False, False,
    )  # fmt: skip
    m, l, q2, acc = _over_keys(
        m, l, q2, acc, b_q, x_k, x_v, i_b, i_kv, diagonal, i_t + BM, own, sc, T, W,
        HK, K, V, BN, BK, BV, NK, NV, NS, TMA, ACC, True, WINDOW,
    )  # fmt: skip

    # gains again: held through the loop, float64 would spill
    alpha, gamma, strength = softplus_of_three(p_alpha, p_gamma, p_beta, i_h)
    _, _, temp, _, a_null = gains_of(alpha, gamma, tl.load(p_base + i_h), n, ACC)
    lse = m * sc + tl.log2(l)
    n_eff = l * l / q2
    if SAVE:
        step = tl.maximum(largest(acc, NV), 1e-30) * (1.0 / STEPS)
        for n in tl.static_range(NV):
            b_mean = acc[n] * (1.0 / step)[:, None]
            if STEPS > 1:
                b_mean = tl.floor(b_mean + 0.5)
            store_tile(x_mean, b_mean.to(MT), i_b, i_t, i_h, n * BV, T, H, V, BM, BV, TMA)
        o_stats = p_stats + tl.cast(i_bh, tl.int64) * (3 * NR) + own
        tl.store(o_stats, lse)
        tl.store(o_stats + NR, n_eff)
        tl.store(o_stats + 2 * NR, step / l)
    b_null = load_row(p_null + i_h * V, V, BV, NV)
    b_o, magnitude = read_out(acc, l, lse, n_eff, a_null, b_null, strength.to(ACC), NV)
    store_parts(x_o, b_o, 1.0, OT, i_b, i_t, i_h, T, H, V, BM, BV, NV, TMA)
    tl.store(p_mag + (tl.cast(i_b, tl.int64) * T + own) * H + i_h, magnitude, mask=own < T)
