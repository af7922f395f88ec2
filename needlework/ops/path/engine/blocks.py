"""The rest of the backward, superblock by superblock and block by block: from gradients of k², H², k¹, H to those of K, W and β.

    spread: k²_i = k¹_i S_iᵀ,  S_i = H_last … H_{i+1},  H² = S_{first−1}: from the first block on, y being S_{i−1}'s gradient, which begins as dH²,
            dH_i += S_iᵀ y    dk¹_i += dk²_i S_i    y ← y H_iᵀ + dk²_iᵀ k¹_i
    group:  dR = −Σ Lᵀ dA    dU = −Σ Lᵀ dq⁰    dK = Σ dAᵀ Q    dW = Σ dLᵀ Q    dV += Σ Pᵀ dO       over the heads of a group
    turn:   dR −= W dk¹ᵀ    dU −= W dH    dK += dk¹    dW −= R dk¹ + U dHᵀ
    unwind: dM = dR Nᵀ + dU Wᵀ    Z = Xᵀ dM    dN = stril(Mᵀ dR)    dS = −stril(Diag(β) Z Mᵀ)    dβ_t = Z_tt − Σ_u (Z Mᵀ)_tu S_tu
    release: dK += dNᵀ W    dW += dN K + Mᵀ dU + (dS + dSᵀ) W                                    in one kernel the two would spill

X, S, M, N are those of prepare.py. What would be a first operand and transposed is formed transposed.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.runs import row_pointers, sequence_of
from needlework.ops.common.kernels.tile import load_tile, plus_product, store_tile
from needlework.ops.path.engine.forward import passed
from needlework.ops.path.engine.tiles import (
    coupled,
    forgets_itself,
    itself_or_later,
    load_beta,
    of_columns,
    product,
    square_pointers,
    superblock,
)


@triton.jit(do_not_specialize=["NR", "N", "M"])
def spread(
    p_k1, p_Ho, p_cum, p_dk1, p_dk2, p_dH, p_dH2, p_S, NR, N, M,
    HK: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, ACC: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """One superblock; p_dk1 and p_dH are added to. Scratch: p_S as p_Ho."""
    blocks = NR // C
    i_bk = tl.program_id(0) // blocks
    i_block = tl.program_id(0) % blocks
    _, end, begin, last = superblock(p_cum, N, i_bk // HK, i_block, blocks, M, PACKED)
    if (begin != i_block) | (last >= end):  # the last superblock is passed by nobody
        return
    o = tl.arange(0, KB)
    x = tl.where(o[:, None] == o[None, :], 1.0, 0.0).to(ACC)
    for n in tl.range(0, last - begin, num_stages=1):
        j = last - 1 - n
        tl.store(square_pointers(p_S, i_bk, j, blocks, KB, 0), x.to(ST))
        x = passed(x, p_Ho, i_bk, j, blocks, KB, ST, 0)
    tl.debug_barrier()
    y = tl.load(square_pointers(p_dH2, i_bk, begin, blocks, KB, 0))
    for j in tl.range(begin, last, num_stages=1):
        b_S = tl.load(square_pointers(p_S, i_bk, j, blocks, KB, 0))
        at = square_pointers(p_dH, i_bk, j, blocks, KB, 0)
        tl.store(at, tl.load(at) + tl.dot(tl.trans(b_S), y.to(ST), input_precision="ieee", out_dtype=ACC))
        b_d = tl.load(row_pointers(p_dk2, i_bk, j * C, NR, C, KB)).to(ST)
        at = row_pointers(p_dk1, i_bk, j * C, NR, C, KB)
        tl.store(at, tl.load(at) + tl.dot(b_d, b_S, input_precision="ieee", out_dtype=ACC))
        y = passed(y, p_Ho, i_bk, j, blocks, KB, ST, 1)
        y = tl.dot(tl.trans(b_d), tl.load(row_pointers(p_k1, i_bk, j * C, NR, C, KB)), y, input_precision="ieee", out_dtype=ACC)


@triton.jit(do_not_specialize=["T", "NR", "N", "W"])
def group(
    p_q, p_k, p_v, p_w, p_U, p_R, p_cum, p_do, p_LD, p_dq0, p_sum_k, p_sum_w, p_sum_v, p_dR, p_dU, p_dv,
    p_L, p_dA, p_decay, p_lse, T, NR, N, W,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, C: tl.constexpr,
    NS: tl.constexpr, SCALE: tl.constexpr, RATE: tl.constexpr, PACKED: tl.constexpr, WINDOW: tl.constexpr,
    SOFT: tl.constexpr, DECAY: tl.constexpr, ACC: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """One block with itself. p_sum_k, p_sum_w [B HK NR KB], p_dR [B HK NR C], p_dU [B HK NR KB] in ACC; p_dv [B T HK V]: all of dV,
    p_sum_v [B HK NR VB] being that of later queries. Not SOFT: there is no dV. Scratch: p_L, p_dA [B H NR C] in ST. DECAY:
    p_lse [B H NR], of all scores."""
    G: tl.constexpr = H // HK
    blocks = NR // C
    i_bk = tl.program_id(0) // blocks
    i_b = i_bk // HK
    i_kv = i_bk % HK
    i_block = tl.program_id(0) % blocks
    _, _, end = sequence_of(p_cum, N, i_b, i_block, blocks, PACKED)
    if i_block >= end:
        return
    i_t = i_block * C
    o = tl.arange(0, C)
    b_k = load_tile(p_k, i_b, i_t, i_kv, 0, T, HK, K, C, KB, 0)
    b_w = load_tile(p_w, i_b, i_t, i_kv, 0, T, HK, K, C, KB, 0)
    b_v = load_tile(p_v, i_b, i_t, i_kv, 0, T, HK, V, C, VB, 0)
    b_R = tl.load(row_pointers(p_R, i_bk, i_t, NR, C, C))
    dk = tl.zeros([C, KB], ACC)
    dR = tl.zeros([C, C], ACC)
    dv = tl.zeros([C, VB], ACC)
    if SOFT:
        dv = tl.load(row_pointers(p_sum_v, i_bk, i_t, NR, C, VB))
    later = o[None, :] >= o[:, None]  # [key query]
    seen = itself_or_later(o[None, :], o[:, None], SOFT)
    if WINDOW:
        seen = seen & (o[None, :] - o[:, None] < W)
    # two walks over the heads: in one the sums would have no registers
    for g in tl.range(0, G, num_stages=NS):
        i_h = i_kv * G + g
        i_bh = i_b * H + i_h
        b_q = load_tile(p_q, i_b, i_t, i_h, 0, T, H, K, C, KB, 0)
        b_do = load_tile(p_do, i_b, i_t, i_h, 0, T, H, V, C, VB, 0)
        lse, D = of_columns(p_LD, tl.cast(i_bh, tl.int64) * NR + i_t + o)
        if DECAY:
            lse = tl.load(p_lse + tl.cast(i_bh, tl.int64) * NR + i_t + o)
        lse = lse[None, :]
        D = D[None, :]
        # Lᵀ and Pᵀ, dAᵀ, dLᵀ, all [key or token, query]
        L = tl.dot(b_w, tl.trans(b_q), input_precision="ieee", out_dtype=ACC)
        b_L = tl.where(later, L, 0.0).to(ST)
        tl.store(row_pointers(p_L, i_bh, i_t, NR, C, C), b_L)
        s = tl.dot(b_k, tl.trans(b_q), input_precision="ieee", out_dtype=ACC)
        s -= tl.dot(tl.trans(b_R), b_L, input_precision="ieee", out_dtype=ACC)
        dp = tl.dot(b_v, tl.trans(b_do), input_precision="ieee", out_dtype=ACC)
        if DECAY:
            s -= forgets_itself(p_decay, i_bh, NR, i_t + o, RATE, ACC)
        p = tl.where(seen, tl.exp2(s * SCALE - lse), 0.0)
        if SOFT:
            dv = plus_product(dv, p.to(b_do.dtype), b_do)
        b_da = (p * (dp - D) * RATE).to(ST)
        tl.store(row_pointers(p_dA, i_bh, i_t, NR, C, C), b_da)
        dk = plus_product(dk, b_da, b_q)
        dR -= tl.dot(b_L, tl.trans(b_da), input_precision="ieee", out_dtype=ACC)
    tl.store(row_pointers(p_sum_k, i_bk, i_t, NR, C, KB), dk)
    tl.store(row_pointers(p_dR, i_bk, i_t, NR, C, C), dR)
    if SOFT:
        store_tile(p_dv, dv.to(p_dv.dtype.element_ty), i_b, i_t, i_kv, 0, T, HK, V, C, VB, 0)
    tl.debug_barrier()
    b_U = tl.load(row_pointers(p_U, i_bk, i_t, NR, C, KB))
    dw = tl.zeros([C, KB], ACC)
    dU = tl.zeros([C, KB], ACC)
    for g in tl.range(0, G, num_stages=NS):
        i_h = i_kv * G + g
        i_bh = i_b * H + i_h
        b_q = load_tile(p_q, i_b, i_t, i_h, 0, T, H, K, C, KB, 0)
        b_y = tl.load(row_pointers(p_dq0, i_bh, i_t, NR, C, KB))
        b_L = tl.load(row_pointers(p_L, i_bh, i_t, NR, C, C))
        b_da = tl.load(row_pointers(p_dA, i_bh, i_t, NR, C, C))
        dU -= tl.dot(b_L, b_y, input_precision="ieee", out_dtype=ACC)
        dL = tl.dot(b_R, b_da, input_precision="ieee", out_dtype=ACC)
        dL = tl.dot(b_U, tl.trans(b_y), dL, input_precision="ieee", out_dtype=ACC)
        b_dL = tl.where(later, -dL, 0.0).to(ST)
        dw = tl.dot(b_dL, b_q, dw, input_precision="ieee", out_dtype=ACC)
    tl.store(row_pointers(p_sum_w, i_bk, i_t, NR, C, KB), dw)
    tl.store(row_pointers(p_dU, i_bk, i_t, NR, C, KB), dU)


@triton.jit(do_not_specialize=["T", "NR"])
def turn(
    p_w, p_U, p_R, p_dk1, p_dH, p_dR, p_dU, p_sum_k, p_sum_w, T, NR,
    HK: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, APART: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """What a block's k¹ and H give: dR −= W dk¹ᵀ, dU −= W dH, dW −= R dk¹ + U dHᵀ, dK += dk¹. p_dR, p_dU and the sums are added to."""
    blocks = NR // C
    i_bk = tl.program_id(0) // blocks
    i_block = tl.program_id(0) % blocks
    i_t = i_block * C
    w = load_tile(p_w, i_bk // HK, i_t, i_bk % HK, 0, T, HK, K, C, KB, 0).to(ACC)
    dk1 = tl.load(row_pointers(p_dk1, i_bk, i_t, NR, C, KB))
    at = row_pointers(p_dR, i_bk, i_t, NR, C, C)
    tl.store(at, tl.load(at) - product(w, tl.trans(dk1), APART))
    at = row_pointers(p_sum_k, i_bk, i_t, NR, C, KB)
    tl.store(at, tl.load(at) + dk1)
    R = tl.load(row_pointers(p_R, i_bk, i_t, NR, C, C)).to(ACC)
    dw = product(R, dk1, APART)
    at = row_pointers(p_dU, i_bk, i_t, NR, C, KB)
    tl.store(at, tl.load(at) - product(w, tl.load(square_pointers(p_dH, i_bk, i_block, blocks, KB, 0)), APART))
    U = tl.load(row_pointers(p_U, i_bk, i_t, NR, C, KB)).to(ACC)
    dw += product(U, tl.load(square_pointers(p_dH, i_bk, i_block, blocks, KB, 1)), APART)
    at = row_pointers(p_sum_w, i_bk, i_t, NR, C, KB)
    tl.store(at, tl.load(at) - dw)


@triton.jit(do_not_specialize=["T", "NR", "N"])
def unwind(
    p_k, p_w, p_beta, p_X, p_cum, p_dR, p_dU, p_solve, p_dS, p_dN, p_dbeta, T, NR, N,
    HK: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    APART: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """p_dbeta [B T HK] of one block, and M, dS + dSᵀ and dNᵀ [B HK NR C] in ACC, from all that R and U were given."""
    blocks = NR // C
    i_bk = tl.program_id(0) // blocks
    i_b = i_bk // HK
    i_kv = i_bk % HK
    i_block = tl.program_id(0) % blocks
    _, _, end = sequence_of(p_cum, N, i_b, i_block, blocks, PACKED)
    if i_block >= end:
        return
    i_t = i_block * C
    o = tl.arange(0, C)
    o_k = tl.arange(0, KB)
    beta = load_beta(p_beta, i_b, i_t, i_kv, T, HK, C, ACC)
    before = o[:, None] < o[None, :]
    p_block = tl.cast(i_bk, tl.int64) * NR + i_t
    # transposed: dNᵀ, dMᵀ = N dRᵀ + W dUᵀ, Zᵀ = dMᵀ X, dSᵀ. What is loaded again would be held through products that have no room for it
    dR_t = tl.load(p_dR + p_block * C + o[None, :] * C + o[:, None])
    solve = tl.load(row_pointers(p_X, i_bk, i_t, NR, C, C)) * beta[None, :]  # M of the equations
    tl.store(row_pointers(p_solve, i_bk, i_t, NR, C, C), solve)
    tl.store(row_pointers(p_dN, i_bk, i_t, NR, C, C), tl.where(before, product(dR_t, solve, APART), 0.0))
    b_w = load_tile(p_w, i_b, i_t, i_kv, 0, T, HK, K, C, KB, 0)
    b_k = load_tile(p_k, i_b, i_t, i_kv, 0, T, HK, K, C, KB, 0)
    dM_t = product(coupled(b_w, b_k, C, ACC), dR_t, APART)
    dM_t += product(b_w.to(ACC), tl.load(p_dU + p_block * KB + o[None, :] * KB + o_k[:, None]), APART)
    Z_t = product(dM_t, tl.load(row_pointers(p_X, i_bk, i_t, NR, C, C)), APART)  # [u t]
    dbeta = tl.sum(tl.where(o[:, None] == o[None, :], Z_t, 0.0), 0)
    passed_t = product(tl.load(row_pointers(p_X, i_bk, i_t, NR, C, C)) * beta[None, :], Z_t, APART)  # (Z Mᵀ)ᵀ
    dS_t = tl.where(before, -passed_t * beta[None, :], 0.0)
    tl.store(row_pointers(p_dS, i_bk, i_t, NR, C, C), dS_t + tl.trans(dS_t))
    b_w = load_tile(p_w, i_b, i_t, i_kv, 0, T, HK, K, C, KB, 0)
    dbeta -= tl.sum(passed_t * tl.trans(coupled(b_w, b_w, C, ACC)), 0)
    tl.store(p_dbeta + (tl.cast(i_b, tl.int64) * T + i_t + o) * HK + i_kv, dbeta, mask=i_t + o < T)


@triton.jit(do_not_specialize=["T", "NR", "N"])
def release(
    p_k, p_w, p_cum, p_dU, p_solve, p_dS, p_dN, p_sum_k, p_sum_w, p_dk, p_dw, T, NR, N,
    HK: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    APART: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """p_dk, p_dw [B T HK K] of one block, from what `unwind` has left and all that K and W were given."""
    blocks = NR // C
    i_bk = tl.program_id(0) // blocks
    i_b = i_bk // HK
    i_kv = i_bk % HK
    i_block = tl.program_id(0) % blocks
    _, _, end = sequence_of(p_cum, N, i_b, i_block, blocks, PACKED)
    if i_block >= end:
        return
    i_t = i_block * C
    o = tl.arange(0, C)
    o_k = tl.arange(0, KB)
    columns = (tl.cast(i_bk, tl.int64) * NR + i_t) * KB + o[None, :] * KB + o_k[:, None]  # [KB C]
    b_w = load_tile(p_w, i_b, i_t, i_kv, 0, T, HK, K, C, KB, 0)
    dN_t = tl.load(row_pointers(p_dN, i_bk, i_t, NR, C, C))
    dk = tl.load(row_pointers(p_sum_k, i_bk, i_t, NR, C, KB)) + product(dN_t, b_w.to(ACC), APART)
    store_tile(p_dk, dk.to(p_dk.dtype.element_ty), i_b, i_t, i_kv, 0, T, HK, K, C, KB, 0)
    b_k = load_tile(p_k, i_b, i_t, i_kv, 0, T, HK, K, C, KB, 0)
    dw_t = tl.load(p_sum_w + columns) + product(tl.trans(b_k).to(ACC), dN_t, APART)
    dw_t += product(tl.trans(b_w).to(ACC), tl.load(row_pointers(p_dS, i_bk, i_t, NR, C, C)), APART)
    dw_t += product(tl.load(p_dU + columns), tl.load(row_pointers(p_solve, i_bk, i_t, NR, C, C)), APART)
    store_tile(p_dw, tl.trans(dw_t).to(p_dw.dtype.element_ty), i_b, i_t, i_kv, 0, T, HK, K, C, KB, 0)
