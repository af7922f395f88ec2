"""One query a sequence on pages of keys and values: the keys split over programs, and merged.

Token t of sequence n lies in row t mod PG of page table[n, t // PG]. A split keeps M, L, Q₂ and S of its keys; they merge exactly:

    M = max M_s,  L = Σ 2^{M_s − M} L_s,  S = Σ 2^{M_s − M} S_s,  Q₂ = Σ 4^{M_s − M} Q₂_s

The null enters once, after the merge. Grids follow from shapes alone and loops end with the live length, which is read where the
kernels run: a captured graph serves any lengths. A program has all query heads of a group, so keys and values are read once.
"""

import triton
import triton.language as tl

from needlework.ops.polar.attention.rows import NONE, clamped, gains, log1p, shares, soften, softplus, tanh


@triton.jit
def paged_rows(
    p_x, p_table, o_t, live, i_kv, PG: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ST: tl.constexpr
):  # fmt: skip
    """Tokens o_t of a sequence [rows BD], zeros past `live` and D; p_table: its row of the block table."""
    inside = o_t < live
    page = tl.load(p_table + o_t // PG, mask=inside, other=0).to(tl.int64)
    o_d = tl.arange(0, BD)
    at = ((page * PG + o_t % PG) * HK + i_kv)[:, None] * D + o_d[None, :]
    return tl.load(p_x + at, mask=inside[:, None] & (o_d < D)[None, :], other=0.0).to(ST)


@triton.jit
def scores(b_q, b_k, ACC: tl.constexpr):
    """q kᵀ [BG BN]. In float32 by runs of 64 numbers, as products of one query are summed elsewhere: one chain of 256 errs more."""
    n: tl.constexpr = b_q.shape[1] // 64
    if b_q.dtype == ACC and n > 1:
        b_q = tl.permute(tl.reshape(b_q, [b_q.shape[0], n, 64]), (1, 0, 2))
        b_k = tl.permute(tl.reshape(b_k, [b_k.shape[0], n, 64]), (1, 2, 0))
        s = tl.sum(tl.dot(b_q, b_k, input_precision="ieee", out_dtype=ACC), 0)
    else:
        s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee", out_dtype=ACC)
    return s


@triton.jit(do_not_specialize=["NB", "W"])
def decode(
    p_q, p_k, p_v, p_table, p_length, p_alpha, p_gamma, p_base, p_stats, p_S, NB, W,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PG: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, NS: tl.constexpr, ACC: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """One split of one sequence and key-value head. p_stats [B H splits 3]: M, L, Q₂; p_S [B H splits V]."""
    G: tl.constexpr = H // HK
    i_s = tl.program_id(0)
    i_kv = tl.program_id(1)
    i_b = tl.program_id(2)
    live = tl.load(p_length + i_b).to(tl.int32)
    first = tl.maximum(live - W, 0)
    each = tl.cdiv(tl.cdiv(live - first, BN), tl.num_programs(0)) * BN
    lo = first + i_s * each
    hi = tl.minimum(lo + each, live)
    o_g = tl.arange(0, BG)
    o_k = tl.arange(0, BK)
    i_h = i_kv * G + o_g % G
    b_q = tl.load(
        p_q + (tl.cast(i_b, tl.int64) * H + i_h)[:, None] * K + o_k[None, :],
        mask=(o_g < G)[:, None] & (o_k < K)[None, :], other=0.0,
    )  # fmt: skip
    _, _, temp, _, _ = gains(p_alpha, p_gamma, p_base, i_h, live - first, ACC)
    sc = temp * SCALE
    m = tl.full([BG], NONE, ACC)
    l = tl.zeros([BG], ACC)
    q2 = tl.zeros([BG], ACC)
    acc = tl.zeros([BG, BV], ACC)
    p_table += tl.cast(i_b, tl.int64) * NB
    for j in tl.range(lo, hi, BN, num_stages=NS):
        o_t = j + tl.arange(0, BN)
        b_k = paged_rows(p_k, p_table, o_t, hi, i_kv, PG, HK, K, BK, b_q.dtype)
        b_v = paged_rows(p_v, p_table, o_t, hi, i_kv, PG, HK, V, BV, b_q.dtype)
        s = scores(b_q, b_k, ACC)
        s = tl.where((o_t < hi)[None, :], s, float("-inf"))
        p, m, l, q2, acc = soften(s, sc, m, l, q2, acc)
        acc = tl.dot(p.to(b_v.dtype), b_v, acc, input_precision="ieee", out_dtype=ACC)
    row = (tl.cast(i_b, tl.int64) * H + i_h) * tl.num_programs(0) + i_s
    ours = o_g < G
    tl.store(p_stats + row * 3, m * sc, mask=ours)
    tl.store(p_stats + row * 3 + 1, l, mask=ours)
    tl.store(p_stats + row * 3 + 2, q2, mask=ours)
    o_v = tl.arange(0, BV)
    tl.store(p_S + row[:, None] * V + o_v[None, :], acc, mask=ours[:, None] & (o_v < V)[None, :])


@triton.jit(do_not_specialize=["splits", "W"])
def merge(
    p_stats, p_S, p_length, p_alpha, p_beta, p_gamma, p_base, p_null, p_o, p_mag, splits, W,
    H: tl.constexpr, V: tl.constexpr, BS: tl.constexpr, BV: tl.constexpr, ACC: tl.constexpr, OT: tl.constexpr,
):  # fmt: skip
    """A row and head. No key: the null alone. Length −1, a padded row: zeros."""
    i_bh = tl.program_id(0).to(tl.int64)
    i_h = i_bh % H
    live = tl.load(p_length + i_bh // H).to(tl.int32)
    o_v = tl.arange(0, BV)
    M = tl.full([BS], NONE, ACC)
    for i in range(0, splits, BS):
        o_s = i + tl.arange(0, BS)
        M = tl.maximum(M, tl.load(p_stats + (i_bh * splits + o_s) * 3, mask=o_s < splits, other=NONE))
    top = tl.max(M, 0)
    L = tl.zeros([BS], ACC)
    Q2 = tl.zeros([BS], ACC)
    S = tl.zeros([BS, BV], ACC)
    for i in range(0, splits, BS):
        o_s = i + tl.arange(0, BS)
        inside = o_s < splits
        o_row = p_stats + (i_bh * splits + o_s) * 3
        share = tl.exp2(tl.load(o_row, mask=inside, other=NONE) - top)
        L += share * tl.load(o_row + 1, mask=inside, other=0.0)
        Q2 += share * share * tl.load(o_row + 2, mask=inside, other=0.0)
        at = (i_bh * splits + o_s)[:, None] * V + o_v[None, :]
        S += share[:, None] * tl.load(p_S + at, mask=inside[:, None] & (o_v < V)[None, :], other=0.0)
    some = live > 0
    l = tl.where(some, tl.sum(L, 0), 1.0)
    n_eff = tl.where(some, l * l / tl.where(some, tl.sum(Q2, 0), 1.0), 0.0)
    _, _, _, _, a_null = gains(p_alpha, p_gamma, p_base, i_h, tl.minimum(live, W), ACC)
    f, missed = shares(top + tl.log2(l), a_null)
    f = tl.where(some, f, 0.0)
    missed = tl.where(some, missed, 1.0)
    b_null = tl.load(p_null + i_h * V + o_v, mask=o_v < V, other=0.0)
    s = tl.sum(S, 0) * (f / l) + missed * b_null
    s *= 1.0 / clamped(tl.sqrt(tl.sum(s * s, 0)))
    magnitude = tanh(softplus(tl.load(p_beta + i_h)).to(ACC) * log1p(n_eff * f))
    real = live >= 0
    tl.store(p_o + i_bh * V + o_v, tl.where(real, s, 0.0).to(OT), mask=o_v < V)
    tl.store(p_mag + i_bh, tl.where(real, magnitude, 0.0))


@triton.jit(do_not_specialize=["P", "stride_k", "stride_v"])
def append(
    p_new_k, p_new_v, p_k, p_v, p_slots, p_length, p_live, P, stride_k, stride_v,
    NK: tl.constexpr, NV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A token's keys [NK] and values [NV] of all heads at row length mod P of its slot, which then holds one token more.

    p_live [B]: rows of the slot that hold a token; −1 for a padded row.
    """
    i_b = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_slots + i_b)
    if slot < 0:
        tl.store(p_live + i_b, -1)
        return
    length = tl.load(p_length + slot)
    row = length % P
    o_k = tl.arange(0, BK)
    o_v = tl.arange(0, BV)
    b_k = tl.load(p_new_k + i_b * NK + o_k, mask=o_k < NK, other=0.0)
    b_v = tl.load(p_new_v + i_b * NV + o_v, mask=o_v < NV, other=0.0)
    tl.store(p_k + slot * stride_k + row * NK + o_k, b_k.to(p_k.dtype.element_ty), mask=o_k < NK)
    tl.store(p_v + slot * stride_v + row * NV + o_v, b_v.to(p_v.dtype.element_ty), mask=o_v < NV)
    tl.debug_barrier()  # every warp has read length
    tl.store(p_length + slot, length + 1)
    tl.store(p_live + i_b, tl.minimum(length + 1, P))
