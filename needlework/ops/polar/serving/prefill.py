"""Queries of many sequences, packed, on pages that already hold their keys: prefill over a block table, no gradient.

The forward of `attention/forward.py`; keys come through the table instead of from a tensor of their own.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.tile import load_tile, store_tile
from needlework.ops.polar.attention.rows import NONE, gains_of, read_out, soften, softplus_of_three
from needlework.ops.polar.serving.decode import paged_rows


@triton.jit
def _over_pages(
    m, l, q2, acc, b_q, p_k, p_v, p_table, i_kv, lo, hi, own, live, sc, W,
    HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PG: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    NS: tl.constexpr, ACC: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    for j in tl.range(lo, hi, BN, num_stages=NS):
        o_t = j + tl.arange(0, BN)
        b_k = paged_rows(p_k, p_table, o_t, live, i_kv, PG, HK, K, BK, b_q.dtype)
        b_v = paged_rows(p_v, p_table, o_t, live, i_kv, PG, HK, V, BV, b_q.dtype)
        s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee", out_dtype=ACC)
        if MASK:
            behind = own[:, None] - o_t[None, :]
            s = tl.where((behind >= 0) & (behind < W), s, float("-inf"))
        p, m, l, q2, acc = soften(s, sc, m, l, q2, acc)
        acc = tl.dot(p.to(b_v.dtype), b_v, acc, input_precision="ieee", out_dtype=ACC)
    return m, l, q2, acc


@triton.jit(do_not_specialize=["T", "NB", "W"])
def prefill(
    x_q, x_o, p_k, p_v, p_table, p_length, p_chunks, p_alpha, p_beta, p_gamma, p_base, p_null, p_mag, T, NB, W,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PG: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, NS: tl.constexpr, TMA: tl.constexpr, ACC: tl.constexpr, OT: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """A head's chunk of BM queries. p_chunks [chunks 2]: the chunk's sequence, −1 for none, and its first query's position."""
    i_h = tl.program_id(0)
    i_kv = i_h // (H // HK)
    i_c = tl.num_programs(1) - 1 - tl.program_id(1)
    i_n = tl.load(p_chunks + 2 * i_c)
    if i_n < 0:
        return
    start = tl.load(p_chunks + 2 * i_c + 1)
    live = tl.load(p_length + i_n).to(tl.int32)
    p_table += tl.cast(i_n, tl.int64) * NB
    own = start + tl.arange(0, BM)
    alpha, gamma, strength = softplus_of_three(p_alpha, p_gamma, p_beta, i_h)
    _, _, temp, _, a_null = gains_of(alpha, gamma, tl.load(p_base + i_h), tl.minimum(own + 1, W), ACC)
    sc = temp * SCALE
    b_q = load_tile(x_q, 0, i_c * BM, i_h, 0, T, H, K, BM, BK, TMA)
    m = tl.full([BM], NONE, ACC)
    l = tl.zeros([BM], ACC)
    q2 = tl.zeros([BM], ACC)
    acc = tl.zeros([BM, BV], ACC)
    first = tl.maximum(start - W + 1, 0) // BN * BN
    diagonal = tl.maximum((start + 1) // BN * BN, first)
    full = tl.minimum(tl.cdiv(tl.maximum(start + BM - W, 0), BN) * BN, diagonal)
    m, l, q2, acc = _over_pages(
        m, l, q2, acc, b_q, p_k, p_v, p_table, i_kv, first, full, own, live, sc, W,
        HK, K, V, PG, BN, BK, BV, NS, ACC, True,
    )  # fmt: skip
    m, l, q2, acc = _over_pages(
        m, l, q2, acc, b_q, p_k, p_v, p_table, i_kv, tl.maximum(full, first), diagonal, own, live, sc, W,
        HK, K, V, PG, BN, BK, BV, NS, ACC, False,
    )  # fmt: skip
    m, l, q2, acc = _over_pages(
        m, l, q2, acc, b_q, p_k, p_v, p_table, i_kv, diagonal, tl.minimum(start + BM, live), own, live, sc, W,
        HK, K, V, PG, BN, BK, BV, NS, ACC, True,
    )  # fmt: skip
    o_v = tl.arange(0, BV)
    b_null = tl.load(p_null + i_h * V + o_v, mask=o_v < V, other=0.0)[None, :]
    # a query past its sequence's end may have seen no key
    l = tl.maximum(l, 1e-30)
    b_o, magnitude = read_out(acc, l, m * sc + tl.log2(l), l * l / tl.maximum(q2, 1e-37), a_null, b_null, strength.to(ACC))
    store_tile(x_o, b_o.to(OT), 0, i_c * BM, i_h, 0, T, H, V, BM, BV, TMA)
    o_t = i_c * BM + tl.arange(0, BM)
    tl.store(p_mag + o_t * H + i_h, magnitude, mask=o_t < T)
