"""PaTH attention of one block of queries and HB heads of a group a program, keys from the newest to the oldest; T × T is never stored.

    own block: scores Q Kᵀ − L R,  x = Q − L U,  L = tril(Q Wᵀ)
    older blocks of its superblock: scores x k¹ᵀ, then x ← x H;    older superblocks: scores x k²ᵀ of all their keys, then x ← x H²

x stays in the sums' dtype and is rounded where it enters a product. A superblock costs one product of [C K] and [K K] beside those of
softmax attention.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.runs import row_pointers, sequence_of
from needlework.ops.common.kernels.softmax import NONE, soften
from needlework.ops.common.kernels.tile import load_tile, plus_product
from needlework.ops.path.engine.tiles import (
    forgets,
    forgets_itself,
    head_rows,
    load_heads,
    oldest_row,
    oldest_seen,
    over_scale,
    row_at,
    since,
    square_pointers,
    store_heads,
    superblock,
)


@triton.jit
def entered(p_q, p_w, p_U, i_b, i_t, i_h, i_bk, i_kv, T, NR, H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, R: tl.constexpr, ACC: tl.constexpr, ST: tl.constexpr):  # fmt: skip
    """A block's q as an operand, L as an operand, and x at the block's start; of R // C heads, from i_h on."""
    b_q = load_heads(p_q, i_b, i_t, i_h, T, H, K, C, R, KB)
    b_w = load_tile(p_w, i_b, i_t, i_kv, 0, T, HK, K, C, KB, 0)
    L = tl.dot(b_q, tl.trans(b_w), input_precision="ieee", out_dtype=ACC)
    b_L = tl.where((tl.arange(0, R) % C)[:, None] >= tl.arange(0, C)[None, :], L, 0.0).to(ST)
    b_U = tl.load(row_pointers(p_U, i_bk, i_t, NR, C, KB))
    x = b_q.to(ACC) - tl.dot(b_L, b_U, input_precision="ieee", out_dtype=ACC)
    return b_q, b_L, x


@triton.jit
def own_scores(b_q, b_L, p_k, p_R, i_b, i_t, i_bk, i_kv, T, NR, HK: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """Q Kᵀ − L R of a block with itself; above the diagonal anything."""
    b_k = load_tile(p_k, i_b, i_t, i_kv, 0, T, HK, K, C, KB, 0)
    s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee", out_dtype=ACC)
    return s - tl.dot(b_L, tl.load(row_pointers(p_R, i_bk, i_t, NR, C, C)), input_precision="ieee", out_dtype=ACC)


@triton.jit
def passed(x, p_H, i_bk, i_block, blocks, KB: tl.constexpr, ST: tl.constexpr, TRANS: tl.constexpr):
    """x H of queries, or x Hᵀ, of a block or a superblock; H as an operand."""
    b_H = tl.load(square_pointers(p_H, i_bk, i_block, blocks, KB, TRANS))
    return tl.dot(x.to(ST), b_H, input_precision="ieee", out_dtype=x.dtype)


@triton.jit(do_not_specialize=["T", "NR", "N", "M", "W", "PG", "NB", "page_k", "page_v", "page_decay"])
def attend(
    p_q, p_k, p_v, p_w, p_decay, p_edges, p_U, p_R, p_k1, p_k2, p_Ho, p_H2o, p_cum, p_o, p_lse, p_start, p_table, p_page_k, p_page_v,
    p_page_decay, T, NR, N, M, W, PG, NB, page_k, page_v, page_decay,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, C: tl.constexpr,
    HB: tl.constexpr, BN: tl.constexpr, NS: tl.constexpr, NI: tl.constexpr, SCALE: tl.constexpr,
    RATE: tl.constexpr, PACKED: tl.constexpr, WINDOW: tl.constexpr, DECAY: tl.constexpr, PAGES: tl.constexpr, ACC: tl.constexpr,
    ST: tl.constexpr,
):  # fmt: skip
    """p_o [B T H V]; p_lse [B H NR], the denominator's logarithm in base 2. SCALE: of the scores, times log2 e. PAGES: a sequence's first
    p_start tokens lie in pages, their keys as its first block sees them. DECAY: p_decay [B H NR] float64, sums of log gates, and
    p_edges (forgets.py)."""
    blocks = NR // C
    R: tl.constexpr = HB * C
    i_bh = tl.program_id(0) * HB
    i_b = i_bh // H
    i_h = i_bh % H
    i_kv = i_h // (H // HK)
    i_bk = i_b * HK + i_kv
    i_block = blocks - 1 - tl.program_id(1)  # the longest rows first
    first, end, begin, _ = superblock(p_cum, N, i_b, i_block, blocks, M, PACKED)
    if i_block >= end:
        return
    i_t = i_block * C
    o = tl.arange(0, C)
    query = tl.arange(0, R) % C
    own = i_t + query
    sc = tl.full([R], SCALE, ACC)
    b_q, b_L, x = entered(p_q, p_w, p_U, i_b, i_t, i_h, i_bk, i_kv, T, NR, H, HK, K, KB, C, R, ACC, ST)
    s = own_scores(b_q, b_L, p_k, p_R, i_b, i_t, i_bk, i_kv, T, NR, HK, K, KB, C, ACC)
    own_share = tl.zeros([R], ACC)
    if DECAY:
        s += forgets_itself(p_decay, i_bh, NR, own, RATE, ACC)
        own_share = since(p_edges, i_bh, NR, own)
    seen = query[:, None] >= o[None, :]
    if WINDOW:
        seen = seen & (query[:, None] - o[None, :] < W)
    s = tl.where(seen, s, float("-inf"))
    m = tl.full([R], NONE, ACC)
    l = tl.zeros([R], ACC)
    acc = tl.zeros([R, VB], ACC)
    b_v = load_tile(p_v, i_b, i_t, i_kv, 0, T, HK, V, C, VB, 0)
    p, m, l, _, acc = soften(s, sc, m, l, l, acc, False)
    acc = plus_product(acc, p.to(b_v.dtype), b_v)

    oldest = oldest_seen(i_block, first, W, C, WINDOW)
    for n in tl.range(0, i_block - tl.maximum(begin, oldest), num_stages=NI):
        j = i_block - 1 - n
        b_k = tl.load(row_pointers(p_k1, i_bk, j * C, NR, C, KB)).to(ST)
        s = tl.dot(x.to(ST), tl.trans(b_k), input_precision="ieee", out_dtype=ACC)
        if DECAY:
            s += forgets(p_decay, p_edges, i_bh, NR, i_block, j, j * C + o, C, RATE, ACC)[None, :] + own_share[:, None]
        if WINDOW:
            s = tl.where(own[:, None] - (j * C + o)[None, :] < W, s, float("-inf"))
        b_v = load_tile(p_v, i_b, j * C, i_kv, 0, T, HK, V, C, VB, 0)
        p, m, l, _, acc = soften(s, sc, m, l, l, acc, False)
        acc = plus_product(acc, p.to(b_v.dtype), b_v)
        x = passed(x, p_Ho, i_bk, j, blocks, KB, ST, 0)
    supers = (begin - first) // M
    o_n = tl.arange(0, BN)
    for n in tl.range(0, supers - (oldest - first) // M, num_stages=1):
        sup = begin - (n + 1) * M
        b_x = x.to(ST)
        for j in tl.range(sup * C, (sup + M) * C, BN, num_stages=NS):
            b_k2 = tl.load(row_pointers(p_k2, i_bk, j, NR, BN, KB))
            s2 = tl.dot(b_x, tl.trans(b_k2), input_precision="ieee", out_dtype=ACC)
            if DECAY:
                s2 += forgets(p_decay, p_edges, i_bh, NR, i_block, j // C, j + o_n, C, RATE, ACC)[None, :] + own_share[:, None]
            if WINDOW:
                s2 = tl.where(own[:, None] - (j + o_n)[None, :] < W, s2, float("-inf"))
            b_v2 = load_tile(p_v, i_b, j, i_kv, 0, T, HK, V, BN, VB, 0)
            p2, m, l, _, acc = soften(s2, sc, m, l, l, acc, False)
            acc = plus_product(acc, p2.to(b_v2.dtype), b_v2)
        x = passed(x, p_H2o, i_bk, sup, blocks, KB, ST, 0)
    if PAGES:
        i_n, first, end = sequence_of(p_cum, N, i_b, i_block, blocks, PACKED)
        held = tl.load(p_start + i_n)
        total = tl.zeros([R], tl.float64)
        if DECAY:
            total = tl.load(p_decay + tl.cast(i_bh, tl.int64) * NR + own)
        own = held + (i_block - first) * C + query
        b_x = x.to(ST)
        o_k = tl.arange(0, KB)
        o_v = tl.arange(0, VB)
        for j in tl.range(oldest_row(held, i_block - first, W, C, WINDOW), held, BN, num_stages=1):
            token = j + o_n
            real = token < held
            at = row_at(p_table, i_n, token, NB * PG, PG, NB, page_k, HK * K, real) + i_kv * K
            b_k = tl.load(p_page_k + at[:, None] + o_k[None, :], mask=real[:, None] & (o_k < K)[None, :], other=0.0).to(ST)
            at = row_at(p_table, i_n, token, NB * PG, PG, NB, page_v, HK * V, real) + i_kv * V
            b_v = tl.load(p_page_v + at[:, None] + o_v[None, :], mask=real[:, None] & (o_v < V)[None, :], other=0.0)
            s = tl.dot(b_x, tl.trans(b_k), input_precision="ieee", out_dtype=ACC)
            if DECAY:
                at = row_at(p_table, i_n, token, NB * PG, PG, NB, page_decay, H, real) + i_h
                lost = tl.load(p_page_decay + at, mask=real, other=float("inf"))
                newest = tl.min(lost, 0)
                s += over_scale(total - newest, RATE, ACC)[:, None] + over_scale(newest - lost, RATE, ACC)[None, :]
            s = tl.where(real[None, :], s, float("-inf"))
            if WINDOW:
                s = tl.where(own[:, None] - token[None, :] < W, s, float("-inf"))
            p, m, l, _, acc = soften(s, sc, m, l, l, acc, False)
            acc = plus_product(acc, p.to(b_v.dtype), b_v)
    store_heads(p_o, (acc / l[:, None]).to(p_o.dtype.element_ty), i_b, i_t, i_h, T, H, V, C, R, VB)
    tl.store(p_lse + tl.cast(i_bh, tl.int64) * NR + i_t + head_rows(NR, C, R), m * SCALE + tl.log2(l))
