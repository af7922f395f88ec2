"""The backward of one block of queries and HB heads of a group a program: its way back to the oldest keys, and its return with the
carried gradient.

    dA = scale P ∘ (dO Vᵀ − D),  P = 2^{A − lse},  D = rowsum(dO ∘ O)
    out:  x as it comes to each older block of its superblock, and to each older superblock, is kept
    back: y = 0; superblocks from the oldest on: y is kept, y ← y H²ᵀ + dA k²; then the blocks of its own: y ← y Hᵀ + dA k¹
    own:  dL = −tril(dA Rᵀ + y Uᵀ),  dQ = dA K + y + dL W − rowsum(dA) mean(K)
    with a forget gate: Σ_j dA_ij of each query, and Σ_i dA_ij of the block's queries for each of its own keys

What a gate gets is the sum of the pairs that it lies between, of which the others cancel: rows and columns are sums of the same dA, which
keys.py makes again of the same operands, and of float32 inputs they are float64 (forgets.py has the rest).

A row of a softmax's dA sums to 0, but for the rounding of dA as an operand and of O in D. Keys that are alike would add that up to
a dQ along them: it is taken off along the mean of the block's own keys, which is short where they are not.

What is kept lies in tiles [C KB], a group's heads behind each other, of a panel of PB blocks: M a block of queries for its superblock, SB
for superblocks. keys.py reads them. y is the gradient of x as it leaves; of the oldest it is 0.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.runs import row_pointers
from needlework.ops.common.kernels.tile import load_tile, plus_product
from needlework.ops.path.engine.forward import entered, own_scores, passed
from needlework.ops.path.engine.tiles import (
    forgets,
    forgets_itself,
    head_rows,
    itself_or_later,
    load_heads,
    oldest_seen,
    since,
    square_pointers,
    store_heads,
    summed,
    superblock,
    tile_pointers,
)


@triton.jit
def weights(s, b_do, b_v, lse, D, SCALE: tl.constexpr, RATE: tl.constexpr, ACC: tl.constexpr):
    """dA from scores s; where s is −∞ it is 0. RATE: scale, without log2 e; D: times RATE."""
    # in this order: the exponentials are taken while the product is made
    p = tl.exp2(s * SCALE - lse[:, None])
    dp = tl.dot(b_do, tl.trans(b_v), input_precision="ieee", out_dtype=ACC)
    return p * (dp * RATE - D[:, None])


@triton.jit
def as_operand(da, left, SOFT: tl.constexpr, ACC: tl.constexpr, ST: tl.constexpr):
    """dA rounded, and `left` [R 16] with the sum of its rows in every column: a product, for a sum's numbers would be rounded one by one,
    on the unit that has the exponentials."""
    b_da = da.to(ST)
    if SOFT:
        left = plus_product(left, b_da, tl.full([da.shape[1], 16], 1.0, ST))
    return b_da, left


@triton.jit(do_not_specialize=["T", "NR", "N", "M", "W", "start", "PB", "SB"])
def sweep(
    p_q, p_k, p_v, p_w, p_U, p_R, p_k1, p_k2, p_Ho, p_H2o, p_cum, p_o, p_do, p_lse, p_LD, p_x1, p_y1, p_x2, p_y2, p_dq, p_dq0,
    p_decay, p_edges, p_row, p_column, T, NR, N, M, W, start, PB, SB,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, C: tl.constexpr,
    HB: tl.constexpr, BN: tl.constexpr, NS: tl.constexpr, NO: tl.constexpr, LATE: tl.constexpr, SCALE: tl.constexpr,
    RATE: tl.constexpr, PACKED: tl.constexpr, WINDOW: tl.constexpr, SOFT: tl.constexpr, DECAY: tl.constexpr, ACC: tl.constexpr,
    ST: tl.constexpr,
):  # fmt: skip
    """p_LD [B H NR 2], lse and D of each query, D 0 unless SOFT; with a forget gate lse is that of scores without the query's own share.
    p_dq [B T H K]; p_dq0 [B H NR KB], the gradient of x at the block's start, in ST. DECAY: p_row [B H NR] and p_column [B H PB NR] take
    sums of dA's rows and of its columns in the block itself. NO: stages of the way out. LATE: y passes H² behind a superblock's products,
    whose shared memory H² takes: of a head of 128 a multiprocessor then has two programs."""
    blocks = NR // C
    R: tl.constexpr = HB * C
    PER: tl.constexpr = H // HK // HB  # programs of a group
    i_bh = tl.program_id(0) * HB
    i_b = i_bh // H
    i_h = i_bh % H
    i_kv = i_h // (H // HK)
    i_bk = i_b * HK + i_kv
    i_at = tl.num_programs(1) - 1 - tl.program_id(1)
    i_block = start + i_at
    first, end, begin, _ = superblock(p_cum, N, i_b, i_block, blocks, M, PACKED)
    if i_block >= end:
        return
    i_t = i_block * C
    i_tile = tl.cast(i_bk, tl.int64) * PB + i_at
    i_own = i_h % (H // HK) // HB
    o = tl.arange(0, C)
    query = tl.arange(0, R) % C
    own = i_t + query
    row = tl.cast(i_bh, tl.int64) * NR + i_t + head_rows(NR, C, R)
    lse = tl.load(p_lse + row)
    b_do = load_heads(p_do, i_b, i_t, i_h, T, H, V, C, R, VB)
    if SOFT:
        D = tl.sum(load_heads(p_o, i_b, i_t, i_h, T, H, V, C, R, VB).to(ACC) * b_do.to(ACC), 1)
    else:
        D = tl.zeros([R], ACC)
    if DECAY:
        lse -= since(p_edges, i_bh, NR, own) * SCALE
    tl.store(p_LD + 2 * row, lse)
    tl.store(p_LD + 2 * row + 1, D)
    D *= RATE
    _, _, x = entered(p_q, p_w, p_U, i_b, i_t, i_h, i_bk, i_kv, T, NR, H, HK, K, KB, C, R, ACC, ST)

    oldest = oldest_seen(i_block, first, W, C, WINDOW)
    inner = tl.maximum(begin, oldest)
    for n in tl.range(0, i_block - inner, num_stages=NO):
        j = i_block - 1 - n
        tl.store(tile_pointers(p_x1, (i_tile * M + j - begin) * PER + i_own, R, KB), x.to(ST))
        x = passed(x, p_Ho, i_bk, j, blocks, KB, ST, 0)
    supers = (begin - first) // M
    seen_supers = supers - (oldest - first) // M
    for n in tl.range(0, seen_supers, num_stages=NO):
        sup = supers - 1 - n
        tl.store(tile_pointers(p_x2, (i_tile * SB + sup) * PER + i_own, R, KB), x.to(ST))
        x = passed(x, p_H2o, i_bk, first + sup * M, blocks, KB, ST, 0)
    tl.debug_barrier()  # what one thread kept another reads

    y = tl.zeros([R, KB], ACC)
    left = tl.zeros([R, 16], ACC)
    total = tl.zeros([R], tl.float64)
    o_n = tl.arange(0, BN)
    for n in tl.range(0, seen_supers, num_stages=1):
        sup = supers - seen_supers + n
        b_x = tl.load(tile_pointers(p_x2, (i_tile * SB + sup) * PER + i_own, R, KB))
        tl.store(tile_pointers(p_y2, (i_tile * SB + sup) * PER + i_own, R, KB), y.to(ST))
        if LATE:
            y = tl.zeros([R, KB], ACC)
        else:
            y = passed(y, p_H2o, i_bk, first + sup * M, blocks, KB, ST, 1)
        # heads that share tiles leave no memory for a second program: it takes a tile more ahead
        for j in tl.range((first + sup * M) * C, (first + sup * M + M) * C, BN, num_stages=NS + HB - 1):
            b_k = tl.load(row_pointers(p_k2, i_bk, j, NR, BN, KB))
            b_v = load_tile(p_v, i_b, j, i_kv, 0, T, HK, V, BN, VB, 0)
            s = tl.dot(b_x, tl.trans(b_k), input_precision="ieee", out_dtype=ACC)
            if DECAY:
                s += forgets(p_decay, p_edges, i_bh, NR, i_block, j // C, j + o_n, C, RATE, ACC)[None, :]
            if WINDOW:
                s = tl.where(own[:, None] - (j + o_n)[None, :] < W, s, float("-inf"))
            da = weights(s, b_do, b_v, lse, D, SCALE, RATE, ACC)
            if DECAY:
                total += summed(da, 1, ST)
            b_da, left = as_operand(da, left, SOFT, ACC, ST)
            y = plus_product(y, b_da, b_k)
        if LATE:
            # behind the products, whose shared memory these take, and not held through them
            tl.debug_barrier()
            b_y = tl.load(tile_pointers(p_y2, (i_tile * SB + sup) * PER + i_own, R, KB))
            b_H = tl.load(square_pointers(p_H2o, i_bk, first + sup * M, blocks, KB, 1))
            y = plus_product(y, b_y, b_H)
    for j in tl.range(inner, i_block, num_stages=1):
        # all that it loads, before a product waits for any
        b_x = tl.load(tile_pointers(p_x1, (i_tile * M + j - begin) * PER + i_own, R, KB))
        b_H = tl.load(square_pointers(p_Ho, i_bk, j, blocks, KB, 1))
        b_k = tl.load(row_pointers(p_k1, i_bk, j * C, NR, C, KB))
        b_v = load_tile(p_v, i_b, j * C, i_kv, 0, T, HK, V, C, VB, 0)
        b_y = y.to(ST)
        tl.store(tile_pointers(p_y1, (i_tile * M + j - begin) * PER + i_own, R, KB), b_y)
        y = tl.dot(b_y, b_H, input_precision="ieee", out_dtype=ACC)
        s = tl.dot(b_x, tl.trans(b_k), input_precision="ieee", out_dtype=ACC)
        if DECAY:
            s += forgets(p_decay, p_edges, i_bh, NR, i_block, j, j * C + o, C, RATE, ACC)[None, :]
        if WINDOW:
            s = tl.where(own[:, None] - (j * C + o)[None, :] < W, s, float("-inf"))
        da = weights(s, b_do, b_v, lse, D, SCALE, RATE, ACC)
        if DECAY:
            total += summed(da, 1, ST)
        b_da, left = as_operand(da, left, SOFT, ACC, ST)
        y = plus_product(y, b_da, b_k)

    # again: held until now they would cost the loops their registers
    b_q, b_L, _ = entered(p_q, p_w, p_U, i_b, i_t, i_h, i_bk, i_kv, T, NR, H, HK, K, KB, C, R, ACC, ST)
    s = own_scores(b_q, b_L, p_k, p_R, i_b, i_t, i_bk, i_kv, T, NR, HK, K, KB, C, ACC)
    if DECAY:
        s += forgets_itself(p_decay, i_bh, NR, own, RATE, ACC)
        lse = tl.load(p_lse + row)
    seen = itself_or_later(query[:, None], o[None, :], SOFT)
    if WINDOW:
        seen = seen & (query[:, None] - o[None, :] < W)
    s = tl.where(seen, s, float("-inf"))
    b_v = load_tile(p_v, i_b, i_t, i_kv, 0, T, HK, V, C, VB, 0)
    da = weights(s, b_do, b_v, lse, D, SCALE, RATE, ACC)
    b_da, left = as_operand(da, left, SOFT, ACC, ST)
    if DECAY:
        tl.store(p_row + row, total + summed(da, 1, ST))
        p_column += (tl.cast(i_bh, tl.int64) * PB + i_at) * NR
        tl.store(p_column + own, summed(da, 0, ST).to(p_column.dtype.element_ty))
    b_y = y.to(ST)
    b_R = tl.load(row_pointers(p_R, i_bk, i_t, NR, C, C))
    b_U = tl.load(row_pointers(p_U, i_bk, i_t, NR, C, KB))
    dL = tl.dot(b_da, tl.trans(b_R), input_precision="ieee", out_dtype=ACC)
    dL = tl.dot(b_y, tl.trans(b_U), dL, input_precision="ieee", out_dtype=ACC)
    b_dL = tl.where(query[:, None] >= o[None, :], -dL, 0.0).to(ST)
    b_k = load_tile(p_k, i_b, i_t, i_kv, 0, T, HK, K, C, KB, 0)
    b_w = load_tile(p_w, i_b, i_t, i_kv, 0, T, HK, K, C, KB, 0)
    dq = plus_product(y, b_da, b_k)
    dq = tl.dot(b_dL, b_w, dq, input_precision="ieee", out_dtype=ACC)
    if SOFT:
        k = b_k.to(ACC)
        real = tl.sum(tl.where(tl.max(tl.abs(k), 1) > 0, 1.0, 0.0).to(ACC), 0)  # rows behind a sequence's end are zeros
        total_left = tl.sum(tl.where(tl.arange(0, 16)[None, :] == 0, left, 0.0), 1)
        dq -= total_left[:, None] * (tl.sum(k, 0) / tl.maximum(real, 1.0))[None, :]
    store_heads(p_dq, dq.to(p_dq.dtype.element_ty), i_b, i_t, i_h, T, H, K, C, R, KB)
    tl.store(p_dq0 + row[:, None] * KB + tl.arange(0, KB)[None, :], b_y)
