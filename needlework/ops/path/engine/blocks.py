"""The rest of the backward, superblock by superblock and block by block: from gradients of k², H², k¹, H to those of K, W and β.

    spread: a k² with gradient d was a key that passed the blocks behind its own: dH += dᵀ k at each, d ← d H, in the end dk¹ += d
            H² = H_last … H_first with gradient d is K queries, the identity's rows: dH += xᵀ d at each, d ← d Hᵀ
    group:  dR = −Σ Lᵀ dA    dU = −Σ Lᵀ dq⁰    dK = Σ dAᵀ Q    dW = Σ dLᵀ Q    dV += Σ Pᵀ dO       over the heads of a group
    unwind: dR −= W dk¹ᵀ    dU −= W dH    dM = dR Nᵀ + dU Wᵀ    Z = Xᵀ dM    dN = stril(Mᵀ dR)    dS = −stril(Diag(β) Z Mᵀ)
            dβ_t = Z_tt − Σ_u Z_tu (S M)_tu    dK += dk¹ + dNᵀ W    dW += dN K − R dk¹ − U dHᵀ + Mᵀ dU + (dS + dSᵀ) W

X, S, M, N are those of tiles.py, made again. What would be a first operand and transposed is formed transposed.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.runs import row_pointers
from needlework.ops.common.kernels.tile import load_tile, store_tile
from needlework.ops.path.engine.tiles import product, solved, square_pointers, superblock


@triton.jit(do_not_specialize=["NR", "N"])
def spread(
    p_k1, p_H, p_cum, p_dk1, p_dk2, p_dH, p_dH2, p_squares, p_rows, NR, N,
    HK: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, M: tl.constexpr, PACKED: tl.constexpr, APART: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One superblock; p_dk1 and p_dH are added to. Scratch: p_squares as p_H, p_rows as p_dk1."""
    blocks = NR // C
    i_bk = tl.program_id(0) // blocks
    i_block = tl.program_id(0) % blocks
    _, end, begin, last = superblock(p_cum, N, i_bk // HK, i_block, blocks, M, PACKED)
    if (begin != i_block) | (i_block >= end):
        return
    # H²: the identity's rows, as they came to each block
    o = tl.arange(0, KB)
    x = tl.where(o[:, None] == o[None, :], 1.0, 0.0).to(ACC)
    for n in range(0, last - begin):
        j = last - 1 - n
        tl.store(square_pointers(p_squares, i_bk, j, blocks, KB, 1), x)
        x = product(x, tl.load(square_pointers(p_H, i_bk, j, blocks, KB, 0)), APART)
    tl.debug_barrier()
    y = tl.load(square_pointers(p_dH2, i_bk, begin, blocks, KB, 0))
    for j in range(begin, last):
        at = square_pointers(p_dH, i_bk, j, blocks, KB, 0)
        x_t = tl.load(square_pointers(p_squares, i_bk, j, blocks, KB, 0))  # it was stored transposed
        tl.store(at, tl.load(at) + product(x_t, y, APART))
        y = product(y, tl.load(square_pointers(p_H, i_bk, j, blocks, KB, 1)), APART)
    tl.debug_barrier()
    for i in range(begin, last):
        key = tl.load(row_pointers(p_k1, i_bk, i * C, NR, C, KB)).to(ACC)
        for j in range(i + 1, last):
            tl.store(row_pointers(p_rows, i_bk, j * C, NR, C, KB), key)
            key = product(key, tl.load(square_pointers(p_H, i_bk, j, blocks, KB, 1)), APART)
        tl.debug_barrier()
        o_d = tl.arange(0, C)
        p_d = p_dk2 + (tl.cast(i_bk, tl.int64) * NR + i * C) * KB
        d_t = tl.load(p_d + o_d[None, :] * KB + o[:, None])  # [KB C]
        for n in range(0, last - 1 - i):
            j = last - 1 - n
            at = square_pointers(p_dH, i_bk, j, blocks, KB, 0)
            key = tl.load(row_pointers(p_rows, i_bk, j * C, NR, C, KB))
            tl.store(at, tl.load(at) + product(d_t, key, APART))
            d_t = product(tl.load(square_pointers(p_H, i_bk, j, blocks, KB, 1)), d_t, APART)
        p_d = p_dk1 + (tl.cast(i_bk, tl.int64) * NR + i * C) * KB
        at = p_d + o_d[None, :] * KB + o[:, None]
        tl.store(at, tl.load(at) + d_t)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["T", "NR", "N", "W"])
def group(
    p_q, p_k, p_v, p_w, p_U, p_R, p_cum, p_do, p_lse, p_D, p_dq0, p_sum_k, p_sum_w, p_sum_v, p_dR, p_dU, p_dv, T, NR, N, W,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, C: tl.constexpr,
    M: tl.constexpr, SCALE: tl.constexpr, RATE: tl.constexpr, PACKED: tl.constexpr, WINDOW: tl.constexpr, ACC: tl.constexpr,
    ST: tl.constexpr,
):  # fmt: skip
    """One block with itself. p_sum_k, p_sum_w [B HK NR KB], p_dR [B HK NR C], p_dU [B HK NR KB] in ACC; p_dv [B T HK V]: all of dV,
    p_sum_v [B HK NR VB] being that of later queries."""
    G: tl.constexpr = H // HK
    blocks = NR // C
    i_bk = tl.program_id(0) // blocks
    i_b = i_bk // HK
    i_kv = i_bk % HK
    i_block = tl.program_id(0) % blocks
    _, end, _, _ = superblock(p_cum, N, i_b, i_block, blocks, M, PACKED)
    if i_block >= end:
        return
    i_t = i_block * C
    o = tl.arange(0, C)
    b_k = load_tile(p_k, i_b, i_t, i_kv, 0, T, HK, K, C, KB, 0)
    b_w = load_tile(p_w, i_b, i_t, i_kv, 0, T, HK, K, C, KB, 0)
    b_v = load_tile(p_v, i_b, i_t, i_kv, 0, T, HK, V, C, VB, 0)
    b_R = tl.load(row_pointers(p_R, i_bk, i_t, NR, C, C))
    b_U = tl.load(row_pointers(p_U, i_bk, i_t, NR, C, KB))
    dk = tl.zeros([C, KB], ACC)
    dw = tl.zeros([C, KB], ACC)
    dU = tl.zeros([C, KB], ACC)
    dR = tl.zeros([C, C], ACC)
    dv = tl.load(row_pointers(p_sum_v, i_bk, i_t, NR, C, VB))
    later = o[None, :] >= o[:, None]  # [key query]
    seen = later
    if WINDOW:
        seen = seen & (o[None, :] - o[:, None] < W)
    for g in range(0, G):
        i_h = i_kv * G + g
        i_bh = i_b * H + i_h
        b_q = load_tile(p_q, i_b, i_t, i_h, 0, T, H, K, C, KB, 0)
        b_do = load_tile(p_do, i_b, i_t, i_h, 0, T, H, V, C, VB, 0)
        row = tl.cast(i_bh, tl.int64) * NR + i_t + o
        lse = tl.load(p_lse + row)
        D = tl.load(p_D + row)
        b_y = tl.load(row_pointers(p_dq0, i_bh, i_t, NR, C, KB))
        # Lᵀ and Pᵀ, dAᵀ, dLᵀ, all [key or token, query]
        L = tl.dot(b_w, tl.trans(b_q), input_precision="ieee", out_dtype=ACC)
        b_L = tl.where(later, L, 0.0).to(ST)
        s = tl.dot(b_k, tl.trans(b_q), input_precision="ieee", out_dtype=ACC)
        s -= tl.dot(tl.trans(b_R), b_L, input_precision="ieee", out_dtype=ACC)
        p = tl.where(seen, tl.exp2(s * SCALE - lse[None, :]), 0.0)
        dp = tl.dot(b_v, tl.trans(b_do), input_precision="ieee", out_dtype=ACC)
        dv = tl.dot(p.to(b_do.dtype), b_do, dv, input_precision="ieee", out_dtype=ACC)
        b_da = (p * (dp - D[None, :]) * RATE).to(ST)
        dk = tl.dot(b_da, b_q, dk, input_precision="ieee", out_dtype=ACC)
        dR -= tl.dot(b_L, tl.trans(b_da), input_precision="ieee", out_dtype=ACC)
        dU -= tl.dot(b_L, b_y, input_precision="ieee", out_dtype=ACC)
        dL = tl.dot(b_R, b_da, input_precision="ieee", out_dtype=ACC)
        dL = tl.dot(b_U, tl.trans(b_y), dL, input_precision="ieee", out_dtype=ACC)
        b_dL = tl.where(later, -dL, 0.0).to(ST)
        dw = tl.dot(b_dL, b_q, dw, input_precision="ieee", out_dtype=ACC)
    tl.store(row_pointers(p_sum_k, i_bk, i_t, NR, C, KB), dk)
    tl.store(row_pointers(p_sum_w, i_bk, i_t, NR, C, KB), dw)
    tl.store(row_pointers(p_dU, i_bk, i_t, NR, C, KB), dU)
    tl.store(row_pointers(p_dR, i_bk, i_t, NR, C, C), dR)
    store_tile(p_dv, dv.to(p_dv.dtype.element_ty), i_b, i_t, i_kv, 0, T, HK, V, C, VB, 0)


@triton.jit(do_not_specialize=["T", "NR", "N"])
def unwind(
    p_k, p_w, p_beta, p_cum, p_dk1, p_dH, p_dR, p_dU, p_sum_k, p_sum_w, p_dk, p_dw, p_dbeta, T, NR, N,
    HK: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, M: tl.constexpr, PACKED: tl.constexpr,
    APART: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """p_dk, p_dw [B T HK K], p_dbeta [B T HK] of one block. p_dR and p_dU change."""
    blocks = NR // C
    i_bk = tl.program_id(0) // blocks
    i_b = i_bk // HK
    i_kv = i_bk % HK
    i_block = tl.program_id(0) % blocks
    _, end, _, _ = superblock(p_cum, N, i_b, i_block, blocks, M, PACKED)
    if i_block >= end:
        return
    i_t = i_block * C
    o = tl.arange(0, C)
    o_k = tl.arange(0, KB)
    b_w, b_k, beta, S, X, Nn = solved(p_k, p_w, p_beta, i_b, i_t, i_kv, T, HK, K, KB, C, ACC, APART)
    Mm = X * beta[None, :]
    w = b_w.to(ACC)
    at_k = row_pointers(p_dk1, i_bk, i_t, NR, C, KB)
    p_rows = (tl.cast(i_bk, tl.int64) * NR + i_t) * KB
    dk1_t = tl.load(p_dk1 + p_rows + o[None, :] * KB + o_k[:, None])  # [KB C]
    at_R = row_pointers(p_dR, i_bk, i_t, NR, C, C)
    at_U = row_pointers(p_dU, i_bk, i_t, NR, C, KB)
    dH = tl.load(square_pointers(p_dH, i_bk, i_block, blocks, KB, 0))
    tl.store(at_R, tl.load(at_R) - product(w, dk1_t, APART))
    tl.store(at_U, tl.load(at_U) - product(w, dH, APART))
    tl.debug_barrier()  # read again, transposed
    p_T = p_dR + (tl.cast(i_bk, tl.int64) * NR + i_t) * C
    dR_t = tl.load(p_T + o[None, :] * C + o[:, None])
    dU_t = tl.load(p_dU + p_rows + o[None, :] * KB + o_k[:, None])  # [KB C]
    # transposed: dMᵀ = N dRᵀ + W dUᵀ, Zᵀ = dMᵀ X, dSᵀ, dNᵀ, dWᵀ
    Z_t = product(product(Nn, dR_t, APART) + product(w, dU_t, APART), X, APART)  # [u t]
    SM_t = tl.trans(product(S, Mm, APART))
    own = o[:, None] == o[None, :]
    dbeta = tl.sum(tl.where(own, Z_t, 0.0) - Z_t * SM_t, 0)
    dS_t = tl.where(o[:, None] < o[None, :], -product(Mm, Z_t, APART) * beta[None, :], 0.0)
    dN_t = tl.where(o[:, None] < o[None, :], product(dR_t, Mm, APART), 0.0)
    dw_t = product(dU_t, Mm, APART) + product(tl.trans(b_k).to(ACC), dN_t, APART)
    dw_t += product(tl.trans(b_w).to(ACC), dS_t + tl.trans(dS_t), APART)
    R = product(Mm, Nn, APART)
    U = product(Mm, w, APART)
    dw_t -= product(dk1_t, tl.trans(R), APART) + product(dH, tl.trans(U), APART)
    dw_t += tl.load(p_sum_w + p_rows + o[None, :] * KB + o_k[:, None])
    dk = tl.load(at_k) + tl.load(row_pointers(p_sum_k, i_bk, i_t, NR, C, KB)) + product(dN_t, w, APART)
    store_tile(p_dk, dk.to(p_dk.dtype.element_ty), i_b, i_t, i_kv, 0, T, HK, K, C, KB, 0)
    store_tile(p_dw, tl.trans(dw_t).to(p_dw.dtype.element_ty), i_b, i_t, i_kv, 0, T, HK, K, C, KB, 0)
    tl.store(p_dbeta + (tl.cast(i_b, tl.int64) * T + i_t + o) * HK + i_kv, dbeta, mask=i_t + o < T)
