"""What the solve needs of each block before it begins: its own inverse, its overlap with the older blocks of its superblock, and its keys
as queries at the superblock's start.

    invert      own block: Â = stril(e^{√d (Q Kᵀ − L R − 1)}), X = (I + Â)⁻¹    Q = K = k̂,  L = tril(Q Wᵀ)
    overlaps    older ones of its superblock: P = e^{√d (x k¹ᵀ − 1)}, then x ← x H;    x⁰ is x at the superblock's start

All of them in parallel. X and x⁰ stay in the sums' dtype: what is solved with is not rounded.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.runs import row_pointers, sequence_of
from needlework.ops.path.engine.forward import entered, own_scores
from needlework.ops.path.engine.tiles import inverse, oldest_seen, product, square_pointers, superblock, tile_pointers


@triton.jit
def exponentials(s, SCALE: tl.constexpr):
    """P of products of keys; SCALE: √d log2 e."""
    return tl.exp2(s * SCALE - SCALE)


@triton.jit(do_not_specialize=["T", "NR", "N", "W"])
def invert(
    p_k, p_w, p_U, p_R, p_cum, p_given, p_X, p_x0, T, NR, N, W,
    HK: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, SCALE: tl.constexpr,
    PACKED: tl.constexpr, WINDOW: tl.constexpr, PAGES: tl.constexpr, APART: tl.constexpr, ACC: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """One block with itself. p_k: k̂. PAGES: a sequence's first p_given rows are those of the identity. p_X [B HK NR C], and p_x0 [B HK NR
    KB], x at the block's start, in ACC."""
    blocks = NR // C
    i_bk = tl.program_id(0) // blocks
    i_b = i_bk // HK
    i_kv = i_bk % HK
    i_block = tl.program_id(0) % blocks
    i_n, first, end = sequence_of(p_cum, N, i_b, i_block, blocks, PACKED)
    if i_block >= end:
        return
    i_t = i_block * C
    o = tl.arange(0, C)
    b_q, b_L, x = entered(p_k, p_w, p_U, i_b, i_t, i_kv, i_bk, i_kv, T, NR, HK, HK, K, KB, C, C, ACC, ST)
    tl.store(row_pointers(p_x0, i_bk, i_t, NR, C, KB), x)
    s = own_scores(b_q, b_L, p_k, p_R, i_b, i_t, i_bk, i_kv, T, NR, HK, K, KB, C, ACC)
    below = o[:, None] > o[None, :]
    if WINDOW:
        below = below & (o[:, None] - o[None, :] < W)
    if PAGES:
        below = below & ((i_block - first) * C + o >= tl.load(p_given + i_n))[:, None]
    A = tl.where(below, exponentials(s, SCALE), 0.0)
    tl.store(row_pointers(p_X, i_bk, i_t, NR, C, C), inverse(A, C, APART))


@triton.jit(do_not_specialize=["NR", "N", "W"])
def overlaps(
    p_k1, p_H, p_cum, p_P, p_x0, NR, N, W,
    HK: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, M: tl.constexpr, SCALE: tl.constexpr,
    PACKED: tl.constexpr, WINDOW: tl.constexpr, APART: tl.constexpr, ACC: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """One block with the older ones of its superblock. p_P [B HK blocks M C C] in ST; p_x0 is carried from the block's start."""
    blocks = NR // C
    i_bk = tl.program_id(0) // blocks
    i_block = tl.program_id(0) % blocks
    first, end, begin, _ = superblock(p_cum, N, i_bk // HK, i_block, blocks, M, PACKED)
    if i_block >= end:
        return
    o = tl.arange(0, C)
    at = row_pointers(p_x0, i_bk, i_block * C, NR, C, KB)
    x = tl.load(at)
    i_tile = tl.cast(tl.program_id(0), tl.int64) * M
    for n in tl.range(0, i_block - tl.maximum(begin, oldest_seen(i_block, first, W, C, WINDOW)), num_stages=1):
        j = i_block - 1 - n
        b_k = tl.load(row_pointers(p_k1, i_bk, j * C, NR, C, KB))
        a = exponentials(tl.dot(x.to(ST), tl.trans(b_k), input_precision="ieee", out_dtype=ACC), SCALE)
        if WINDOW:
            a = tl.where((i_block - j) * C + (o[:, None] - o[None, :]) < W, a, 0.0)
        tl.store(tile_pointers(p_P, i_tile + j - begin, C, C), a.to(ST))
        x = product(x, tl.load(square_pointers(p_H, i_bk, j, blocks, KB, 0)), APART)
    tl.store(at, x)
