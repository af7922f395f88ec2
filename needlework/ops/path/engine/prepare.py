"""What the walks need of each block before they begin, and of each superblock: all of them in parallel.

    U = M W    R = M N    k¹ = K − Rᵀ W    H = I − Wᵀ U            M = (I + Diag(β) S)⁻¹ Diag(β)
    k²: the keys carried to their superblock's end, k ← k Hᵀ        H² = H_last … H_first

A query then passes a block, or a superblock, by one product of [C K] and [K K], and meets all of its keys as one vector.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.runs import row_pointers
from needlework.ops.common.kernels.tile import load_tile
from needlework.ops.path.engine.tiles import coupled, inverse, load_beta, product, square_pointers, superblock


@triton.jit(do_not_specialize=["T", "NR"])
def prepare(
    p_k, p_w, p_beta, p_U, p_R, p_k1, p_H, p_Ho, p_X, T, NR,
    HK: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, KEEP: tl.constexpr, APART: tl.constexpr, ACC: tl.constexpr,
    ST: tl.constexpr,
):  # fmt: skip
    """One block and key-value head. p_U, p_k1 [B HK NR KB], p_R [B HK NR C] in ST, p_H [B HK blocks KB KB] in ACC, and p_Ho in ST. Where a
    state is to keep k¹, it is in ACC too. KEEP: p_X [B HK NR C] in ACC, (I + Diag(β) S)⁻¹ for the backward."""
    blocks = NR // C
    i_bh = tl.program_id(0) // blocks
    i_block = tl.program_id(0) % blocks
    i_t = i_block * C
    i_b = i_bh // HK
    i_h = i_bh % HK
    b_w = load_tile(p_w, i_b, i_t, i_h, 0, T, HK, K, C, KB, 0)
    beta = load_beta(p_beta, i_b, i_t, i_h, T, HK, C, ACC)
    X = inverse(coupled(b_w, b_w, C, ACC) * beta[:, None], C, APART)
    if KEEP:
        tl.store(row_pointers(p_X, i_bh, i_t, NR, C, C), X)
    b_k = load_tile(p_k, i_b, i_t, i_h, 0, T, HK, K, C, KB, 0)
    M = X * beta[None, :]
    U = product(M, b_w.to(ACC), APART)
    R = product(M, coupled(b_w, b_k, C, ACC), APART)
    tl.store(row_pointers(p_U, i_bh, i_t, NR, C, KB), U.to(ST))
    tl.store(row_pointers(p_R, i_bh, i_t, NR, C, C), R.to(ST))
    w_t = tl.trans(b_w).to(ACC)
    k1 = tl.trans(b_k).to(ACC) - product(w_t, R, APART)  # transposed, so that R is no first operand
    o_k = tl.arange(0, KB)
    at = p_k1 + (tl.cast(i_bh, tl.int64) * NR + i_t) * KB + tl.arange(0, C)[None, :] * KB + o_k[:, None]
    tl.store(at, k1.to(p_k1.dtype.element_ty))
    H = tl.where(o_k[:, None] == o_k[None, :], 1.0, 0.0).to(ACC) - product(w_t, U, APART)
    tl.store(square_pointers(p_H, i_bh, i_block, blocks, KB, 0), H)
    tl.store(square_pointers(p_Ho, i_bh, i_block, blocks, KB, 0), H.to(ST))


@triton.jit(do_not_specialize=["NR", "N", "M"])
def compose(
    p_k1, p_H, p_k2, p_H2, p_H2o, p_cum, NR, N, M,
    HK: tl.constexpr, KB: tl.constexpr, RB: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, APART: tl.constexpr,
    ACC: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """RB rows of H² of the superblock that a block begins, in that block's place, and as many columns of its keys' k²; nothing for the
    other blocks."""
    blocks = NR // C
    i_row = tl.program_id(0) % (KB // RB) * RB
    i_bh = tl.program_id(0) // (KB // RB) // blocks
    i_block = tl.program_id(0) // (KB // RB) % blocks
    _, end, begin, last = superblock(p_cum, N, i_bh // HK, i_block, blocks, M, PACKED)
    if (begin != i_block) | (i_block >= end):
        return
    o = i_row + tl.arange(0, RB)
    o_k = tl.arange(0, KB)
    X = tl.where(o[:, None] == o_k[None, :], 1.0, 0.0).to(ACC)  # H_last … H_{j+1}
    for n in tl.range(0, last - begin, num_stages=1):
        j = last - 1 - n
        k_t = tl.trans(tl.load(row_pointers(p_k1, i_bh, j * C, NR, C, KB))).to(ACC)
        H = tl.load(square_pointers(p_H, i_bh, j, blocks, KB, 0))
        at = p_k2 + (tl.cast(i_bh, tl.int64) * NR + j * C) * KB + tl.arange(0, C)[None, :] * KB + o[:, None]
        tl.store(at, product(X, k_t, APART).to(ST))
        X = product(X, H, APART)
    at = (tl.cast(i_bh, tl.int64) * blocks + begin) * (KB * KB) + o[:, None] * KB + o_k[None, :]
    tl.store(p_H2 + at, X)
    tl.store(p_H2o + at, X.to(ST))
