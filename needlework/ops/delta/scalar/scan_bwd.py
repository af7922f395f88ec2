"""The adjoint of the scan: chunks from last to first, dS kept in registers as dSᵀ [BV K]. It gives what was written its
gradient, and the initial state's; every other gradient follows from du without another chain over V.

    dWᵀ = doᵀ P' + e^{G_C − G} ⊙ (dSᵀkᵀ)    duᵀ = dWᵀ T    dv = β du
    dSᵀ ← e^{G_C} dSᵀ + (scale e^G ⊙ do)ᵀ r − (e^G ⊙ dv)ᵀ (k + λq)

dS is kept without the gate of the first token of the chunk walked last, which may leave less than half precision holds.
T = Γ∘(I + A)⁻¹ without β, P' = scale Γ∘tril(r kᵀ); r reads. Additive rules: du = dW and no last term. Slots and chains are
`scan.py`'s, run backwards. Half precision: gradients are multiplied by a power of two near 1/max|do|, so that float16
holds them, and du stays so. With powers do is abc do, du of v/c.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.chain import chain_here, slot_here, tell, wait_for
from needlework.ops.common.kernels.parts import cast, load_parts
from needlework.ops.common.kernels.tile import load_tile, store_tile
from needlework.ops.delta.gradient_scaling import gradient_factor
from needlework.ops.delta.powers import product
from needlework.ops.delta.scalar.operands import ROWS
from needlework.ops.delta.scalar.scan import factors, flag_overflow, odd_of


@triton.jit(do_not_specialize=["scale", "T", "NR", "N"])
def adjoint(
    x_r, x_q, x_k, x_do, x_T, x_P, p_E, x_du, p_dstate, p_dinitial_state, p_cum, p_hand, p_flag, p_overflow_bwd, p_max, p_abc,
    scale, T, NR, N,
    H: tl.constexpr, HR: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    KB: tl.constexpr, NK: tl.constexpr, NS: tl.constexpr, NM: tl.constexpr, TMA: tl.constexpr, HALF: tl.constexpr,
    ACC: tl.constexpr, ST: tl.constexpr, BT: tl.constexpr, TT: tl.constexpr, SOLVE: tl.constexpr, FORM: tl.constexpr,
    ERASE: tl.constexpr, LAM: tl.constexpr, READ: tl.constexpr, END: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One slot; the arguments are `scan`'s. END: the final state has a gradient."""
    NV: tl.constexpr = (V + BV - 1) // BV
    PER: tl.constexpr = HV // HEADS
    TEAM: tl.constexpr = HEADS * NV
    if FORM == 2:
        if tl.load(p_overflow_bwd) == 0:
            return
    i_slot, i_own, lo, hi, first, last = slot_here(p_cum, N, PER, TEAM)
    i_v = (i_own % NV) * BV
    chunks_of_row = NR // C
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, KB)
    o_hand = tl.arange(0, BV)[:, None] * (NK * KB) + o_k[None, :]
    factor = gradient_factor(p_max, NM, HALF)
    for i_chain in range(first, last + 1):
        i_h = (i_chain % PER) * HEADS + i_own // NV
        i_k = i_h // (HV // H)
        i_r = i_h // (HV // HR)
        i_n, i_b, c_row, _, count, begin, late, c_from, c_to = chain_here(p_cum, i_chain, lo, hi, chunks_of_row, PER)
        i_bh = i_b * HV + i_h
        if p_abc is not None:
            # a segment without chunks may lie past the last row
            by_o = product(p_abc, i_bh, count > 0)

        if late:
            wait_for(p_flag + i_slot, FORM)
        o_v = i_v + tl.arange(0, BV)
        # one 64-bit base and 32-bit offsets: a tile of 64-bit ones does not fit the registers beside S
        o_base = (tl.cast(i_n, tl.int64) * HV + i_h) * (K * V)
        o_state = o_k[None, :] * V + o_v[:, None]
        p_late = p_hand + tl.cast(i_slot, tl.int64) * (BV * NK * KB) + o_hand
        S = ()
        for n in tl.static_range(NK):
            inside = (o_v < V)[:, None] & (o_k + n * KB < K)[None, :]
            part = tl.load(p_late + n * KB, mask=inside & late, other=0.0)
            if END:
                part += (
                    tl.load(p_dstate + o_base + o_state + n * KB * V, mask=inside & (c_from == 0), other=0.0).to(ACC) * factor
                )
            S += (part,)

        for i in tl.range(c_from, c_to, num_stages=NS):
            i_chunk = c_row + count - 1 - i
            i_t = i_chunk * C
            # all loads first: they share barriers
            b_k = cast(load_parts(x_k, i_b, i_t, i_k, T, H, K, C, KB, NK, TMA), ST, NK)
            b_r = cast(load_parts(x_r, i_b, i_t, i_r, T, HR, K, C, KB, NK, TMA), ST, NK)
            if READ and LAM:
                b_q = cast(load_parts(x_q, i_b, i_t, i_k, T, H, K, C, KB, NK, TMA), ST, NK)
            b_P = load_tile(x_P, i_bh, i_t, 0, 0, NR, 1, C, C, C, TMA).to(ST)
            if ERASE:
                b_T = load_tile(x_T, i_bh, i_t, 0, 0, NR, 1, C, C, C, TMA).to(TT)
            b_do = load_tile(x_do, i_b, i_t, i_h, i_v, T, HV, V, C, BV, TMA)

            left = tl.zeros([BV, C], ACC)
            for n in tl.static_range(NK):
                left = tl.dot(S[n].to(ST), tl.trans(b_k[n]), left, input_precision="ieee", out_dtype=ACC)

            p_factor = factors(p_E, i_bh * chunks_of_row + i_chunk, C)
            do = tl.trans(b_do).to(ACC)
            if p_abc is not None:
                do *= by_o
            do *= factor
            e_later = -tl.load(p_factor + (ROWS + 4) * C, mask=i > 0, other=-1.0)
            left *= (tl.load(p_factor + 5 * C + o_c) * e_later)[None, :]
            du = tl.dot(do.to(ST), b_P, left, input_precision="ieee", out_dtype=ACC)
            if ERASE:
                du = tl.dot(du.to(TT), b_T, input_precision=SOLVE, out_dtype=ACC)
            b_du = du.to(ST)

            e_since = tl.load(p_factor + 6 * C + o_c)
            by_r = do * (e_since * scale)[None, :]
            if ERASE:
                by_k = du * (-e_since * tl.load(p_factor + o_c))[None, :]
                if LAM:
                    lam = tl.load(p_factor + 2 * C + o_c)
                if LAM and READ:
                    b_by_q = (by_k * lam[None, :]).to(ST)
                elif LAM:
                    by_r += by_k * lam[None, :]
                b_by_k = by_k.to(ST)
            b_by_r = by_r.to(ST)
            e_whole = e_later * tl.load(p_factor + 7 * C - 1)
            earlier = ()
            for n in tl.static_range(NK):
                part = tl.dot(b_by_r, b_r[n], S[n] * e_whole, input_precision="ieee", out_dtype=ACC)
                if ERASE:
                    part = tl.dot(b_by_k, b_k[n], part, input_precision="ieee", out_dtype=ACC)
                if ERASE and LAM and READ:
                    part = tl.dot(b_by_q, b_q[n], part, input_precision="ieee", out_dtype=ACC)
                earlier += (part,)
            S = earlier
            # last, while the state's product is under way
            store_tile(x_du, tl.trans(b_du).to(BT, bitcast=True), i_b, i_t, i_h, i_v, T, HV, V, C, BV, TMA)

        if FORM == 1:
            flag_overflow(p_overflow_bwd, odd_of(S, NK))
        done = c_to == count
        # an empty sequence has no first gate
        e_first = -tl.load(factors(p_E, i_bh * chunks_of_row + c_row, C) + 4 * C, mask=count > 0, other=-1.0)
        rest = e_first / factor
        for n in tl.static_range(NK):
            inside = (o_v < V)[:, None] & (o_k + n * KB < K)[None, :]
            tl.store(p_dinitial_state + o_base + o_state + n * KB * V, S[n] * rest, mask=inside & done)
        if begin > 0:
            for n in tl.static_range(NK):
                tl.store(p_late - TEAM * BV * NK * KB + n * KB, S[n])
            tell(p_flag + i_slot - TEAM, FORM)
