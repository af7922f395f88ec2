"""The backward of one block of keys and key-value head a program, over a panel of queries of all heads of its group: no atomics.

    dk² = Σ dAᵀ x of queries of later superblocks, dk¹ = Σ dAᵀ x of later blocks of its own, dV = Σ Pᵀ dO of both
    dH² = Σ xᵀ y, dH = Σ xᵀ y                                                      (x and y as sweep.py has kept them)

Tiles are transposed, keys by queries, so that what is summed over queries is a first operand as it comes. Panels add to what the panels
before have left, in their order.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.runs import row_pointers
from needlework.ops.common.kernels.tile import load_tile
from needlework.ops.path.engine.tiles import forgets, newest_asking, square_pointers, superblock, tile_pointers


@triton.jit
def met(
    dk, dv, b_k, b_v, p_x, i_x, p_do, p_lse, p_D, p_decay, i_b, i_h, i, key, i_block, T, NR, W,
    H: tl.constexpr, V: tl.constexpr, VB: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, SCALE: tl.constexpr, RATE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT: tl.constexpr, DECAY: tl.constexpr, ACC: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """dk and dv with what queries of block i bring, whose x is tile i_x."""
    b_x = tl.load(tile_pointers(p_x, i_x, C, KB))
    b_do = load_tile(p_do, i_b, i * C, i_h, 0, T, H, V, C, VB, 0)
    own = i * C + tl.arange(0, C)
    row = (tl.cast(i_b, tl.int64) * H + i_h) * NR + own
    lse = tl.load(p_lse + row)
    D = tl.load(p_D + row)
    s = tl.dot(b_k, tl.trans(b_x), input_precision="ieee", out_dtype=ACC)
    if DECAY:
        since, before = forgets(p_decay, i_b * H + i_h, NR, own, key, i_block * C + C - 1, RATE, ACC)
        s += before[:, None] + since[None, :]
    p = tl.exp2(s * SCALE - lse[None, :])
    if WINDOW:
        p = tl.where(own[None, :] - key[:, None] < W, p, 0.0)
    dp = tl.dot(b_v, tl.trans(b_do), input_precision="ieee", out_dtype=ACC)
    if SOFT:
        dv = tl.dot(p.to(b_do.dtype), b_do, dv, input_precision="ieee", out_dtype=ACC)
    da = p * (dp - D[None, :]) * RATE
    dk = tl.dot(da.to(ST), b_x, dk, input_precision="ieee", out_dtype=ACC)
    return dk, dv


@triton.jit(do_not_specialize=["T", "NR", "N", "W", "start", "PB", "SB"])
def keys(
    p_v, p_k1, p_k2, p_cum, p_do, p_lse, p_D, p_x1, p_x2, p_dk1, p_dk2, p_dv, p_decay, T, NR, N, W, start, PB, SB,
    H: tl.constexpr, HK: tl.constexpr, V: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, C: tl.constexpr, M: tl.constexpr,
    NS: tl.constexpr, SCALE: tl.constexpr, RATE: tl.constexpr, PACKED: tl.constexpr, WINDOW: tl.constexpr,
    SOFT: tl.constexpr, DECAY: tl.constexpr, ACC: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """p_dk1, p_dk2 [B HK NR KB], p_dv [B HK NR VB] in ACC are added to. Not SOFT: there is no dV."""
    G: tl.constexpr = H // HK
    blocks = NR // C
    i_bk = tl.program_id(0) // blocks
    i_b = i_bk // HK
    i_kv = i_bk % HK
    i_block = tl.program_id(0) % blocks
    first, end, begin, last = superblock(p_cum, N, i_b, i_block, blocks, M, PACKED)
    if i_block >= end:
        return
    stop = tl.minimum(newest_asking(i_block, end, W, C, WINDOW), start + PB)
    key = i_block * C + tl.arange(0, C)
    b_v = load_tile(p_v, i_b, i_block * C, i_kv, 0, T, HK, V, C, VB, 0)
    dv = tl.zeros([C, VB], ACC)
    if SOFT:
        dv = tl.load(row_pointers(p_dv, i_bk, i_block * C, NR, C, VB))

    at = row_pointers(p_dk2, i_bk, i_block * C, NR, C, KB)
    dk = tl.load(at)
    b_k = tl.load(row_pointers(p_k2, i_bk, i_block * C, NR, C, KB))
    lo = tl.maximum(last, start)
    for n in tl.range(0, tl.maximum(stop - lo, 0) * G, num_stages=NS):
        i = lo + n // G
        i_h = i_kv * G + n % G
        i_x = ((tl.cast(i_b, tl.int64) * H + i_h) * PB + i - start) * SB + (begin - first) // M
        dk, dv = met(
            dk, dv, b_k, b_v, p_x2, i_x, p_do, p_lse, p_D, p_decay, i_b, i_h, i, key, i_block, T, NR, W,
            H, V, VB, KB, C, SCALE, RATE, WINDOW, SOFT, DECAY, ACC, ST,
        )  # fmt: skip
    tl.store(at, dk)

    at = row_pointers(p_dk1, i_bk, i_block * C, NR, C, KB)
    dk = tl.load(at)
    b_k = tl.load(row_pointers(p_k1, i_bk, i_block * C, NR, C, KB))
    lo = tl.maximum(i_block + 1, start)
    for n in tl.range(0, tl.maximum(tl.minimum(stop, last) - lo, 0) * G, num_stages=1):
        i = lo + n // G
        i_h = i_kv * G + n % G
        i_x = ((tl.cast(i_b, tl.int64) * H + i_h) * PB + i - start) * M + i_block - begin
        dk, dv = met(
            dk, dv, b_k, b_v, p_x1, i_x, p_do, p_lse, p_D, p_decay, i_b, i_h, i, key, i_block, T, NR, W,
            H, V, VB, KB, C, SCALE, RATE, WINDOW, SOFT, DECAY, ACC, ST,
        )  # fmt: skip
    tl.store(at, dk)
    if SOFT:
        tl.store(row_pointers(p_dv, i_bk, i_block * C, NR, C, VB), dv)


@triton.jit(do_not_specialize=["NR", "N", "W", "start", "PB", "SB"])
def transfers(
    p_cum, p_x1, p_y1, p_x2, p_y2, p_dH, p_dH2, NR, N, W, start, PB, SB,
    H: tl.constexpr, HK: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, M: tl.constexpr, PACKED: tl.constexpr,
    WINDOW: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dH of a block, and dH² of the superblock that it begins: p_dH, p_dH2 [B HK blocks KB KB] in ACC are added to."""
    G: tl.constexpr = H // HK
    blocks = NR // C
    i_bk = tl.program_id(0) // blocks
    i_b = i_bk // HK
    i_kv = i_bk % HK
    i_block = tl.program_id(0) % blocks
    first, end, begin, last = superblock(p_cum, N, i_b, i_block, blocks, M, PACKED)
    if i_block >= end:
        return
    at = square_pointers(p_dH, i_bk, i_block, blocks, KB, 0)
    dH = tl.load(at)
    lo = tl.maximum(i_block + 1, start)
    stop = tl.minimum(tl.minimum(newest_asking(i_block, end, W, C, WINDOW), last), start + PB)
    for n in range(0, tl.maximum(stop - lo, 0) * G):
        tile = ((tl.cast(i_b, tl.int64) * H + i_kv * G + n % G) * PB + lo + n // G - start) * M + i_block - begin
        b_x = tl.load(tile_pointers(p_x1, tile, C, KB))
        b_y = tl.load(tile_pointers(p_y1, tile, C, KB))
        dH = tl.dot(tl.trans(b_x), b_y, dH, input_precision="ieee", out_dtype=ACC)
    tl.store(at, dH)
    if begin == i_block:
        at = square_pointers(p_dH2, i_bk, i_block, blocks, KB, 0)
        dH = tl.load(at)
        lo = tl.maximum(last, start)
        # of a superblock whose last block is seen
        stop = tl.minimum(newest_asking(last - 1, end, W, C, WINDOW), start + PB)
        for n in range(0, tl.maximum(stop - lo, 0) * G):
            tile = ((tl.cast(i_b, tl.int64) * H + i_kv * G + n % G) * PB + lo + n // G - start) * SB + (begin - first) // M
            b_x = tl.load(tile_pointers(p_x2, tile, C, KB))
            b_y = tl.load(tile_pointers(p_y2, tile, C, KB))
            dH = tl.dot(tl.trans(b_x), b_y, dH, input_precision="ieee", out_dtype=ACC)
        tl.store(at, dH)
