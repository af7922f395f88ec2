"""The backward of one block of keys and key-value head a program, over a panel of queries of all heads of its group: no atomics.

    dk² = Σ dAᵀ x of queries of later superblocks, dk¹ = Σ dAᵀ x of later blocks of its own, dV = Σ Pᵀ dO of both
    dH² = Σ xᵀ y, dH = Σ xᵀ y                                                      (x and y as sweep.py has kept them)
    with a forget gate: Σ dA of each key and of a block's queries, as sweep.py has of the block itself

`keys` has the first sum: one x of a query meets all of a superblock. `near` has the second: each block has an x of its own. Tiles are
transposed, keys by queries, so that what is summed over queries is a first operand as it comes. Panels add to what the panels before have
left, in their order; a program whose keys no query of the panel sees leaves it as it is.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.runs import row_pointers
from needlework.ops.common.kernels.tile import load_tile, plus_product
from needlework.ops.path.engine.tiles import (
    forgets,
    newest_asking,
    of_columns,
    square_pointers,
    summed,
    superblock,
    tile_pointers,
)


@triton.jit
def met(
    dk, dv, b_k, b_v, p_x, i_x, p_do, p_LD, p_decay, p_edges, p_column, i_b, i_h, i, key, i_block, T, NR, W,
    H: tl.constexpr, V: tl.constexpr, VB: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, SCALE: tl.constexpr, RATE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT: tl.constexpr, DECAY: tl.constexpr, ACC: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """dk and dv with what queries of block i bring, whose x is tile i_x. key: those of block i_block. p_column: of these queries and
    all keys."""
    b_x = tl.load(tile_pointers(p_x, i_x, C, KB))
    b_do = load_tile(p_do, i_b, i * C, i_h, 0, T, H, V, C, VB, 0)
    own = i * C + tl.arange(0, C)
    row = (tl.cast(i_b, tl.int64) * H + i_h) * NR + own
    # before lse and D, whose numbers would be held through the product
    s = tl.dot(b_k, tl.trans(b_x), input_precision="ieee", out_dtype=ACC)
    lse, D = of_columns(p_LD, row)
    lse = lse[None, :]
    D = (D * RATE)[None, :]
    dp = tl.dot(b_v, tl.trans(b_do), input_precision="ieee", out_dtype=ACC)
    if DECAY:
        s += forgets(p_decay, p_edges, i_b * H + i_h, NR, i, i_block, key, C, RATE, ACC)[:, None]
    p = tl.exp2(s * SCALE - lse)
    if WINDOW:
        p = tl.where(own[None, :] - key[:, None] < W, p, 0.0)
    if SOFT:
        dv = plus_product(dv, p.to(b_do.dtype), b_do)
    da = p * (dp * RATE - D)
    if DECAY:
        tl.store(p_column + key, summed(da, 1, ST).to(p_column.dtype.element_ty))
    dk = plus_product(dk, da.to(ST), b_x)
    return dk, dv


@triton.jit
def gathered(
    p_v, p_k, p_do, p_LD, p_x, p_dk, p_dv, p_decay, p_edges, p_column, i_bk, i_block, lo, stop, slots, slot, T, NR, W, start, PB,
    H: tl.constexpr, HK: tl.constexpr, V: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, C: tl.constexpr,
    NS: tl.constexpr, SCALE: tl.constexpr, RATE: tl.constexpr, WINDOW: tl.constexpr, SOFT: tl.constexpr, DECAY: tl.constexpr,
    ACC: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """p_dk and p_dv of a block's keys, with what queries of blocks lo to stop bring. Of the `slots` tiles x of a block of
    queries theirs is number `slot`."""
    G: tl.constexpr = H // HK
    i_b = i_bk // HK
    i_kv = i_bk % HK
    i_t = i_block * C
    key = i_t + tl.arange(0, C)
    b_v = load_tile(p_v, i_b, i_t, i_kv, 0, T, HK, V, C, VB, 0)
    b_k = tl.load(row_pointers(p_k, i_bk, i_t, NR, C, KB))
    dv = tl.zeros([C, VB], ACC)
    if SOFT:
        dv = tl.load(row_pointers(p_dv, i_bk, i_t, NR, C, VB))
    dk = tl.load(row_pointers(p_dk, i_bk, i_t, NR, C, KB))
    for n in tl.range(0, (stop - lo) * G, num_stages=NS):
        i = lo + n // G
        i_x = ((tl.cast(i_bk, tl.int64) * PB + i - start) * slots + slot) * G + n % G
        i_h = i_kv * G + n % G
        p_of = p_column
        if DECAY:
            p_of += ((tl.cast(i_b, tl.int64) * H + i_h) * PB + i - start) * NR
        dk, dv = met(
            dk, dv, b_k, b_v, p_x, i_x, p_do, p_LD, p_decay, p_edges, p_of, i_b, i_h, i, key, i_block, T, NR, W,
            H, V, VB, KB, C, SCALE, RATE, WINDOW, SOFT, DECAY, ACC, ST,
        )  # fmt: skip
    tl.store(row_pointers(p_dk, i_bk, i_t, NR, C, KB), dk)
    if SOFT:
        tl.store(row_pointers(p_dv, i_bk, i_t, NR, C, VB), dv)


@triton.jit(do_not_specialize=["T", "NR", "N", "M", "W", "start", "PB", "SB"])
def keys(
    p_v, p_k2, p_cum, p_do, p_LD, p_x2, p_dk2, p_dv, p_decay, p_edges, p_column, T, NR, N, M, W, start, PB, SB,
    H: tl.constexpr, HK: tl.constexpr, V: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, C: tl.constexpr,
    NS: tl.constexpr, SCALE: tl.constexpr, RATE: tl.constexpr, PACKED: tl.constexpr, WINDOW: tl.constexpr,
    SOFT: tl.constexpr, DECAY: tl.constexpr, ACC: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """p_dk2 [B HK NR KB], p_dv [B HK NR VB] in ACC are added to. Not SOFT: there is no dV."""
    blocks = NR // C
    i_bk = tl.program_id(0) // blocks
    i_block = tl.program_id(0) % blocks
    first, end, begin, last = superblock(p_cum, N, i_bk // HK, i_block, blocks, M, PACKED)
    lo = tl.maximum(last, start)
    stop = tl.minimum(newest_asking(i_block, end, W, C, WINDOW), start + PB)
    if (i_block >= end) | (lo >= stop):
        return
    gathered(
        p_v, p_k2, p_do, p_LD, p_x2, p_dk2, p_dv, p_decay, p_edges, p_column, i_bk, i_block, lo, stop, SB, (begin - first) // M, T, NR, W,
        start, PB, H, HK, V, KB, VB, C, NS, SCALE, RATE, WINDOW, SOFT, DECAY, ACC, ST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "NR", "N", "M", "W", "start", "PB"])
def near(
    p_v, p_k1, p_cum, p_do, p_LD, p_x1, p_dk1, p_dv, p_decay, p_edges, p_column, T, NR, N, M, W, start, PB,
    H: tl.constexpr, HK: tl.constexpr, V: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, C: tl.constexpr,
    NS: tl.constexpr, SCALE: tl.constexpr, RATE: tl.constexpr, PACKED: tl.constexpr, WINDOW: tl.constexpr,
    SOFT: tl.constexpr, DECAY: tl.constexpr, ACC: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """The same of p_dk1."""
    blocks = NR // C
    i_bk = tl.program_id(0) // blocks
    i_block = tl.program_id(0) % blocks
    _, end, begin, last = superblock(p_cum, N, i_bk // HK, i_block, blocks, M, PACKED)
    lo = tl.maximum(i_block + 1, start)
    stop = tl.minimum(tl.minimum(newest_asking(i_block, end, W, C, WINDOW), last), start + PB)
    if (i_block >= end) | (lo >= stop):
        return
    gathered(
        p_v, p_k1, p_do, p_LD, p_x1, p_dk1, p_dv, p_decay, p_edges, p_column, i_bk, i_block, lo, stop, M, i_block - begin, T, NR, W,
        start, PB, H, HK, V, KB, VB, C, NS, SCALE, RATE, WINDOW, SOFT, DECAY, ACC, ST,
    )  # fmt: skip


@triton.jit
def transferred(
    p_dH, p_x, p_y, i_bk, i_block, lo, stop, slots, slot, blocks, start, PB,
    G: tl.constexpr, KB: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """p_dH of a block, with what queries of blocks lo to stop bring; slots as in `gathered`."""
    if lo < stop:
        at = square_pointers(p_dH, i_bk, i_block, blocks, KB, 0)
        dH = tl.load(at)
        for n in range(0, (stop - lo) * G):
            tile = ((tl.cast(i_bk, tl.int64) * PB + lo + n // G - start) * slots + slot) * G + n % G
            b_x = tl.load(tile_pointers(p_x, tile, C, KB))
            b_y = tl.load(tile_pointers(p_y, tile, C, KB))
            dH = plus_product(dH, tl.trans(b_x), b_y)
        tl.store(at, dH)


@triton.jit(do_not_specialize=["NR", "N", "M", "W", "start", "PB", "SB"])
def transfers(
    p_cum, p_x1, p_y1, p_x2, p_y2, p_dH, p_dH2, NR, N, M, W, start, PB, SB,
    H: tl.constexpr, HK: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """dH of a block, and dH² of the superblock that it begins: p_dH, p_dH2 [B HK blocks KB KB] in ACC are added to."""
    blocks = NR // C
    i_bk = tl.program_id(0) // blocks
    i_block = tl.program_id(0) % blocks
    first, end, begin, last = superblock(p_cum, N, i_bk // HK, i_block, blocks, M, PACKED)
    if i_block >= end:
        return
    lo = tl.maximum(i_block + 1, start)
    stop = tl.minimum(tl.minimum(newest_asking(i_block, end, W, C, WINDOW), last), start + PB)
    transferred(p_dH, p_x1, p_y1, i_bk, i_block, lo, stop, M, i_block - begin, blocks, start, PB, H // HK, KB, C)
    if begin == i_block:
        # of a superblock whose last block is seen
        lo = tl.maximum(last, start)
        stop = tl.minimum(newest_asking(last - 1, end, W, C, WINDOW), start + PB)
        transferred(p_dH2, p_x2, p_y2, i_bk, i_block, lo, stop, SB, (begin - first) // M, blocks, start, PB, H // HK, KB, C)
