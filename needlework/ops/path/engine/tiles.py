"""What PaTH's kernels share: products of float32 tiles, a block's solve, and where blocks and superblocks begin.

A superblock is M blocks of C tokens of a sequence, counted from its first; the last one of a sequence may have fewer. Derived tensors lie
head by head, [B HK NR ·], so that the rows of a block follow each other; their columns are padded, zeros past K.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.runs import sequence_of
from needlework.ops.common.kernels.tile import load_tile, store_tile

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def product(a, b, APART: tl.constexpr):
    """a b of tiles in the sums' dtype. APART: on tensor cores, of two bfloat16 pieces each: sixteen bits of every number."""
    if APART:
        a_hi = a.to(tl.bfloat16)
        b_hi = b.to(tl.bfloat16)
        acc = tl.dot((a - a_hi.to(tl.float32)).to(tl.bfloat16), b_hi, out_dtype=tl.float32)
        acc = tl.dot(a_hi, (b - b_hi.to(tl.float32)).to(tl.bfloat16), acc, out_dtype=tl.float32)
        acc = tl.dot(a_hi, b_hi, acc, out_dtype=tl.float32)
    else:
        acc = tl.dot(a, b, input_precision="ieee", out_dtype=a.dtype)
    return acc


@triton.jit
def inverse(A, C: tl.constexpr, APART: tl.constexpr):
    """(I + A)⁻¹ of a strictly lower A [C C]: of blocks of 2, 4, …, C from those of their halves, X₂₁ = −X₂₂ A₂₁ X₁₁."""
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    X = tl.where(t == s, 1.0, 0.0).to(A.dtype) - tl.where(t // 2 == s // 2, A, 0.0)
    half = 2  # a loop of the kernel's own: unrolled, it is most of what there is to compile
    while half < C:
        corner = tl.where((t // (2 * half) == s // (2 * half)) & (t // half != s // half), A, 0.0)
        X -= product(X, product(corner, X, APART), APART)
        half *= 2
    return X


@triton.jit
def load_beta(p_beta, i_b, i_t, i_h, T, H: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr):
    o_t = i_t + tl.arange(0, C)
    return tl.load(p_beta + (tl.cast(i_b, tl.int64) * T + o_t) * H + i_h, mask=o_t < T, other=0.0).to(ACC)


@triton.jit
def coupled(b_w, b_k, C: tl.constexpr, ACC: tl.constexpr):
    """N = stril(W Kᵀ) of a block, or S of W and W."""
    o = tl.arange(0, C)
    return tl.where(o[:, None] > o[None, :], tl.dot(b_w, tl.trans(b_k), input_precision="ieee", out_dtype=ACC), 0.0)


@triton.jit
def superblock(p_cum, N, i_b, i_block, blocks, M: tl.constexpr, PACKED: tl.constexpr):
    """Of the sequence that a block is in: its first block, the one after its last, and those of the block's superblock.
    A block of no sequence: the end is not behind it."""
    _, first, end = sequence_of(p_cum, N, i_b, i_block, blocks, PACKED)
    begin = first + (i_block - first) // M * M
    return first, end, begin, tl.minimum(begin + M, end)


@triton.jit
def itself_or_later(query, key, SOFT: tl.constexpr):
    """Whether the score of a block's query and key has a gradient. A softmax's own key has one; not SOFT, it is a 1 by definition."""
    if SOFT:
        seen = query >= key
    else:
        seen = query > key
    return seen


@triton.jit
def newest_asking(i_block, end, W, C: tl.constexpr, WINDOW: tl.constexpr):
    """The block after the last whose queries see a key of this one."""
    last = end
    if WINDOW:
        last = tl.minimum(end, (i_block * C + C - 1 + W - 1) // C + 1)
    return last


@triton.jit
def oldest_seen(i_block, first, W, C: tl.constexpr, WINDOW: tl.constexpr):
    """The oldest block of which a query of this one sees a key."""
    oldest = first
    if WINDOW:
        oldest = tl.maximum(first, tl.maximum(i_block * C - W + 1, 0) // C)
    return oldest


@triton.jit
def square_pointers(p, i_bh, i_block, blocks, D: tl.constexpr, TRANS: tl.constexpr):
    """Of a block's [D D] of p [B·H blocks D D], or of its transpose."""
    o = tl.arange(0, D)
    p += (tl.cast(i_bh, tl.int64) * blocks + i_block) * (D * D)
    if TRANS:
        at = p + o[None, :] * D + o[:, None]
    else:
        at = p + o[:, None] * D + o[None, :]
    return at


@triton.jit
def tile_pointers(p, i, C: tl.constexpr, D: tl.constexpr):
    """Of tile i of p [tiles C D]."""
    return p + tl.cast(i, tl.int64) * (C * D) + tl.arange(0, C)[:, None] * D + tl.arange(0, D)[None, :]


@triton.jit
def head_rows(NR, C: tl.constexpr, R: tl.constexpr):
    """Where rows of R // C heads' blocks lie behind the first one, of a tensor [B H NR]."""
    o = tl.arange(0, R)
    if R > C:
        o = o // C * NR + o % C
    return o


@triton.jit
def load_heads(p, i_b, i_t, i_h, T, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BD: tl.constexpr):
    """[R BD] of p [B T H D], C tokens of one head after the other, zeros past T and D."""
    if R > C:
        at, there = _head_tile(p, i_b, i_t, i_h, T, H, D, C, R, BD)
        b = tl.load(at, mask=there, other=0.0)
    else:
        b = load_tile(p, i_b, i_t, i_h, 0, T, H, D, C, BD, 0)
    return b


@triton.jit
def store_heads(p, b, i_b, i_t, i_h, T, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BD: tl.constexpr):
    """The inverse of `load_heads`."""
    if R > C:
        at, there = _head_tile(p, i_b, i_t, i_h, T, H, D, C, R, BD)
        tl.store(at, b, mask=there)
    else:
        store_tile(p, b, i_b, i_t, i_h, 0, T, H, D, C, BD, 0)


@triton.jit
def _head_tile(p, i_b, i_t, i_h, T, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BD: tl.constexpr):
    o = tl.arange(0, R)
    o_d = tl.arange(0, BD)
    p += ((tl.cast(i_b, tl.int64) * T + i_t) * H + i_h) * D
    at = p + (o % C * H + o // C)[:, None] * D + o_d[None, :]
    return at, (i_t + o % C < T)[:, None] & (o_d < D)[None, :]


@triton.jit
def of_columns(p_pairs, row):
    """Both numbers of each row of p_pairs [· 2], which are columns of a tile. Loaded one by one, each thread would load all that its columns
    want."""
    which = tl.arange(0, 2)[None, :]
    both = tl.load(p_pairs + row[:, None] * 2 + which)
    return tl.sum(tl.where(which == 0, both, 0.0), 1), tl.sum(tl.where(which == 1, both, 0.0), 1)


@triton.jit
def oldest_row(held, block, W, C: tl.constexpr, WINDOW: tl.constexpr):
    """The oldest of `held` tokens in pages that a query of a block sees, which is so many blocks behind them."""
    lo = 0
    if WINDOW:
        lo = tl.minimum(tl.maximum(held + block * C - W + 1, 0), held)
    return lo


@triton.jit
def forgets(p_decay, p_edges, i_bh, NR, i_query, i_key, keys, C: tl.constexpr, RATE: tl.constexpr, ACC: tl.constexpr):
    """What a head's gates add to the scores of a block's queries with `keys`, some of an older block, a number of each; a query has its
    own beside it (`since`). p_decay [B·H NR], the gates' sums; p_edges [B·H NR 2] (forgets.py). Both count through the newest key and the
    oldest query, so that no number is larger than what it says."""
    _, before = of_columns(p_edges, tl.cast(i_bh, tl.int64) * NR + keys)
    p_decay += tl.cast(i_bh, tl.int64) * NR
    return before + over_scale(tl.load(p_decay + i_query * C) - tl.load(p_decay + i_key * C + C - 1), RATE, ACC)


@triton.jit
def since(p_edges, i_bh, NR, queries):
    """What is each query's own, from the oldest one of its block on."""
    found, _ = of_columns(p_edges, tl.cast(i_bh, tl.int64) * NR + queries)
    return found


@triton.jit
def forgets_itself(p_decay, i_bh, NR, rows, RATE: tl.constexpr, ACC: tl.constexpr):
    """The same of a block with itself, [query key]."""
    G = tl.load(p_decay + tl.cast(i_bh, tl.int64) * NR + rows)
    return over_scale(G[:, None] - G[None, :], RATE, ACC)


@triton.jit
def summed(da, AXIS: tl.constexpr, ST: tl.constexpr):
    """Along an axis of a tile; of half inputs, whose products are rounded, in float32."""
    if ST.primitive_bitwidth >= 32:
        da = da.to(tl.float64)
    return tl.sum(da, AXIS).to(tl.float64)


@triton.jit
def over_scale(lost, RATE: tl.constexpr, ACC: tl.constexpr):
    """What the gates have lost, as scores have it before their scale."""
    return lost.to(ACC) * (1.0 / RATE)


@triton.jit
def row_at(p_table, i_n, token, P, PG, NB, page_size, D: tl.constexpr, real):
    """Where the numbers of tokens' rows begin, of a table whose pages lie page_size apart."""
    row = token % P
    page = tl.load(p_table + tl.cast(i_n, tl.int64) * NB + row // PG, mask=real, other=0).to(tl.int64)
    return page * page_size + row % PG * D
