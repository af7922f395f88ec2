"""The solve, superblock by superblock from the first to the last, and its transpose, from the last to the first (REV).

    chain       the blocks of one superblock, one after the other:    Y_i = X_i (V_i − Σ_{older} P_ij Y_j)
                REV: Z_i = X_iᵀ (dY_i − Σ_{later} P_jiᵀ Z_j)
    take_off    of every superblock that is still to come, what this one takes from its right sides:    Σ P Y,    REV: Σ Pᵀ Z
    onwards     its keys as each later superblock meets them, k ← k H²ᵀ;    REV: its queries as each older one does, x ← x H²

take_off has all blocks that are left side by side, each with the M blocks of one superblock. chain alone waits: for a superblock its
programs are sequences, heads and tiles of columns, and M (M + 1) / 2 products of [C C] and [C BV] follow one another. onwards knows
nothing of Y: the walks of several superblocks are one launch. What is taken off is summed apart from V, whose rounding would be its own.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.runs import chain_of, row_pointers, sequence_of
from needlework.ops.common.kernels.tile import load_tile, plus_product, store_tile
from needlework.ops.path.engine.tiles import newest_asking, oldest_seen, product, square_pointers, tile_pointers
from needlework.ops.path.solve.engine.overlaps import exponentials


@triton.jit
def walk_tile(i_bk, first, other, mine, i_block, start, PS, SB, M: tl.constexpr):
    """Where a block of superblock `mine` lies as superblock `other` of its sequence meets it: [B HK SB PS M], from superblock `start` on.

    The last place of a packed sequence may be the first one of the next. Going on a sequence's first superblock meets none, REV its last.
    """
    return (tl.cast(i_bk, tl.int64) * SB + first // M + other) * (PS * M) + (mine - start) * M + (i_block - first - mine * M)


@triton.jit(do_not_specialize=["NR", "N", "W", "start", "PS", "SB"])
def onwards(
    p_from, p_H2, p_cum, p_tiles, NR, N, W, start, PS, SB,
    HK: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, M: tl.constexpr, PACKED: tl.constexpr, WINDOW: tl.constexpr,
    REV: tl.constexpr, APART: tl.constexpr, ACC: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """One block of superblocks start … start + PS. p_from: k², REV x⁰. p_tiles [· C KB] in ST."""
    blocks = NR // C
    i_bk = tl.program_id(0) // blocks
    i_block = tl.program_id(0) % blocks
    _, first, end = sequence_of(p_cum, N, i_bk // HK, i_block, blocks, PACKED)
    mine = (i_block - first) // M
    if (i_block >= end) | (mine < start) | (mine >= start + PS):
        return
    x = tl.load(row_pointers(p_from, i_bk, i_block * C, NR, C, KB)).to(ACC)
    if REV:
        count = mine - (oldest_seen(i_block, first, W, C, WINDOW) - first) // M
    else:
        count = (newest_asking(i_block, end, W, C, WINDOW) - 1 - first) // M - mine
    for n in tl.range(0, count, num_stages=1):
        if REV:
            other = mine - 1 - n
        else:
            other = mine + 1 + n
        at = walk_tile(i_bk, first, other, mine, i_block, start, PS, SB, M)
        tl.store(tile_pointers(p_tiles, at, C, KB), x.to(ST))
        x = product(x, tl.load(square_pointers(p_H2, i_bk, first + other * M, blocks, KB, 0 if REV else 1)), APART)


@triton.jit(do_not_specialize=["T", "NR", "N", "W", "now", "start", "PS", "SB"])
def take_off(
    p_own, p_tiles, p_y, p_cum, p_sum, T, NR, N, W, now, start, PS, SB,
    HK: tl.constexpr, V: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, C: tl.constexpr, M: tl.constexpr, SCALE: tl.constexpr,
    PACKED: tl.constexpr, WINDOW: tl.constexpr, REV: tl.constexpr, ACC: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """Of one block, what superblock `now` of its sequence takes. p_own: x⁰, REV k². p_y: Y or Z. p_sum [B HK NR VB] in ACC is added to."""
    blocks = NR // C
    i_bk = tl.program_id(0) // blocks
    i_b = i_bk // HK
    i_block = tl.program_id(0) % blocks
    _, first, end = sequence_of(p_cum, N, i_b, i_block, blocks, PACKED)
    if i_block >= end:
        return
    mine = (i_block - first) // M
    if REV:
        meets = (mine < now) & ((newest_asking(i_block, end, W, C, WINDOW) - 1 - first) // M >= now)
    else:
        meets = (mine > now) & ((oldest_seen(i_block, first, W, C, WINDOW) - first) // M <= now)
    if meets:
        o = tl.arange(0, C)
        b_own = tl.load(row_pointers(p_own, i_bk, i_block * C, NR, C, KB)).to(ST)
        at_sum = row_pointers(p_sum, i_bk, i_block * C, NR, C, VB)
        acc = tl.load(at_sum)
        for j in tl.range(first + now * M, tl.minimum(first + now * M + M, end), num_stages=1):
            at = walk_tile(i_bk, first, mine, now, j, start, PS, SB, M)
            b_other = tl.load(tile_pointers(p_tiles, at, C, KB))
            a = exponentials(tl.dot(b_own, tl.trans(b_other), input_precision="ieee", out_dtype=ACC), SCALE)
            if WINDOW:
                gap = (i_block - j) * C + (o[:, None] - o[None, :])
                # a tile that no query asked for is not there: whatever lies in its place is hidden
                a = tl.where((-gap if REV else gap) < W, a, 0.0)
            b_y = load_tile(p_y, i_b, j * C, i_bk % HK, 0, T, HK, V, C, VB, 0)
            acc = plus_product(acc, a.to(ST), b_y)
        tl.store(at_sum, acc)


@triton.jit(do_not_specialize=["T", "NR", "W", "now"])
def chain(
    p_P, p_X, p_rhs, p_sum, p_cum, p_given, p_y, T, NR, W, now,
    HK: tl.constexpr, V: tl.constexpr, VB: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, M: tl.constexpr,
    PACKED: tl.constexpr, WINDOW: tl.constexpr, PAGES: tl.constexpr, REV: tl.constexpr, APART: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """BV columns of p_y [B T HK V], Y or Z of superblock `now` of one sequence and head, from its right sides p_rhs less p_sum. PAGES: of
    a sequence's first p_given rows nothing is taken."""
    blocks = NR // C
    i_v = tl.program_id(0) % (VB // BV) * BV
    i_chain = tl.program_id(0) // (VB // BV)
    i_kv = i_chain % HK
    i_b, first, end = chain_of(p_cum, i_chain // HK, blocks, PACKED)
    i_bk = i_b * HK + i_kv
    begin = first + now * M
    last = tl.minimum(begin + M, end)
    o = tl.arange(0, C)
    o_v = i_v + tl.arange(0, BV)
    for n in range(0, last - begin):
        if REV:
            i = last - 1 - n
            lo = i + 1
            hi = tl.minimum(last, newest_asking(i, end, W, C, WINDOW))
        else:
            i = begin + n
            lo = tl.maximum(begin, oldest_seen(i, first, W, C, WINDOW))
            hi = i
        row = tl.cast(i_bk, tl.int64) * NR + i * C
        gone = tl.load(p_sum + row * VB + o[:, None] * VB + o_v[None, :])
        for j in range(lo, hi):
            tile = tl.cast(i_bk, tl.int64) * blocks
            if REV:
                b_P = tl.load(p_P + ((tile + j) * M + i - begin) * (C * C) + o[None, :] * C + o[:, None])
            else:
                b_P = tl.load(p_P + ((tile + i) * M + j - begin) * (C * C) + o[:, None] * C + o[None, :])
            b_y = load_tile(p_y, i_b, j * C, i_kv, i_v, T, HK, V, C, BV, 0)
            gone = plus_product(gone, b_P, b_y)
        if PAGES:
            gone = tl.where(((i - first) * C + o >= tl.load(p_given + i_chain // HK))[:, None], gone, 0.0)
        rest = load_tile(p_rhs, i_b, i * C, i_kv, i_v, T, HK, V, C, BV, 0).to(ACC) - gone
        if REV:
            X = tl.load(p_X + row * C + o[None, :] * C + o[:, None])
        else:
            X = tl.load(p_X + row * C + o[:, None] * C + o[None, :])
        y = product(X, rest, APART)
        store_tile(p_y, y.to(p_y.dtype.element_ty), i_b, i * C, i_kv, i_v, T, HK, V, C, BV, 0)
        tl.debug_barrier()  # what one thread wrote another reads
