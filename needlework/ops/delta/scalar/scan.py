"""The chunks of a sequence in order, S kept in registers as Sᵀ [BV K]; every product of the chain takes Sᵀ or what follows
from it from registers, so that nothing of the state goes through shared memory.

    Rᵀ = β ⊙ (vᵀ − e^G ⊙ (Sᵀkᵀ + λ Sᵀqᵀ))    Wᵀ = Rᵀ Tᵀ    oᵀ = scale e^G ⊙ Sᵀrᵀ + Wᵀ P'ᵀ    Sᵀ ← e^{G_C} Sᵀ + (e^{G_C − G} ⊙ W)ᵀ k

A chain is one sequence and HEADS value heads of one key head; a team of slots walks it, one for each head and tile of BV values
(`kernels/chain.py`).
r, q, k and W are operands (ST), v and o of the caller's type (OT), T and what it multiplies of a type of their own (TT).

Where x = k + λq the transition is no contraction, and a state may pass what float16 holds. So in half precision the walk, and all
that is left to the backward, is launched twice. FORM 1 has float16 operands and sets the overflow flag, p_overflow, where a number is
not finite. FORM 2 is the bf16 fallback: it returns at once where the flag is 0, and else computes all of it with bfloat16 operands,
whose range is float32's. Tensors of operands are declared float16 for both; the bf16 fallback stores its own bits in those whose
numbers may be large. FORM 0: the rule has no fallback.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.chain import chain_here, slot_here, tell, wait_for
from needlework.ops.common.kernels.parts import cast, continued, load_parts
from needlework.ops.common.kernels.tile import load_tile, plus_product, store_tile
from needlework.ops.delta.powers import divisor_of_v, product
from needlework.ops.delta.scalar.operands import ROWS
from needlework.ops.delta.segments import sequence_of
from needlework.ops.slots.kernels import power_of, slot_of


@triton.jit
def factors(p_E, i_chunk, C: tl.constexpr):
    """A chunk's rows of C numbers, as `intra` wrote them: β, −β e^G, λ, scale e^G, −e^G, e^{G_C − G}, e^{G − G_1}, e^g."""
    return p_E + tl.cast(i_chunk, tl.int64) * (ROWS * C)


@triton.jit
def written_as(b, p_overflow, ST: tl.constexpr):
    """W for the bf16 fallback, from the bits that the forward stored: bfloat16 if its overflow flag is set, else float16."""
    return tl.where(tl.load(p_overflow) != 0, b.to(ST, bitcast=True), b.to(ST))


@triton.jit
def odd_of(S, N: tl.constexpr):
    """Sums of x − x, for `flag_overflow`."""
    odd = tl.sum(S[0] - S[0], 1)
    for n in tl.static_range(1, N):
        odd += tl.sum(S[n] - S[n], 1)
    return odd


@triton.jit
def flag_overflow(p_overflow, odd):
    """Set the overflow flag if a number was not finite. odd: sums of x − x, NaN where x is not finite."""
    if tl.sum(odd, 0) != 0:
        tl.store(p_overflow, 1)


@triton.jit(do_not_specialize=["slot_stride", "scale", "T", "NR", "N"])
def scan(
    x_r, x_q, x_k, x_v, x_T, x_P, p_E, x_o, x_w, p_initial_state, p_final_state, p_cum, p_hand, p_flag, p_overflow,
    p_abc, p_slots, p_fresh, p_power, slot_stride, p_of, scale, T, NR, N,
    H: tl.constexpr, HR: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    KB: tl.constexpr, NK: tl.constexpr, NS: tl.constexpr, TMA: tl.constexpr, ACC: tl.constexpr, OT: tl.constexpr, ST: tl.constexpr, TT: tl.constexpr,
    BT: tl.constexpr, SOLVE: tl.constexpr, ERASE: tl.constexpr, LAM: tl.constexpr, READ: tl.constexpr, INIT: tl.constexpr,
    SAVE: tl.constexpr, FORM: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One slot. The state's K columns are NK tiles of KB; p_hand [slots BV NK·KB] and p_flag pass a cut chain on.

    With slot_stride p_final_state is a slot table (`SlotTable`); of the segments of a sequence, p_of, the last one leaves the state. INIT 1: start from p_initial_state [N HV K V]; 2: from the table, and keep that start in p_initial_state, where
    there is one, for the bf16 fallback. The program with a sequence's first chunks reads a slot, the one with its last chunks writes
    it, and has waited for the state that the first one handed on: a slot is never written before it has been read.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    PER: tl.constexpr = HV // HEADS
    TEAM: tl.constexpr = HEADS * NV
    if FORM == 2:
        if tl.load(p_overflow) == 0:
            return
    i_slot, i_own, lo, hi, first, last = slot_here(p_cum, N, PER, TEAM)
    i_v = (i_own % NV) * BV
    chunks_of_row = NR // C
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, KB)
    o_hand = tl.arange(0, BV)[:, None] * (NK * KB) + o_k[None, :]
    for i_chain in range(first, last + 1):
        i_h = (i_chain % PER) * HEADS + i_own // NV
        i_k = i_h // (HV // H)
        i_r = i_h // (HV // HR)
        i_n, i_b, c_row, _, count, begin, late, c_from, c_to = chain_here(p_cum, i_chain, lo, hi, chunks_of_row, PER)
        i_bh = i_b * HV + i_h
        if p_abc is not None:
            # a segment without chunks may lie past the last row
            by_v = divisor_of_v(p_abc, i_bh, count > 0)
            by_o = product(p_abc, i_bh, count > 0)

        if late:
            wait_for(p_flag + i_slot, FORM)
        if slot_stride is not None:
            i_s, ends = sequence_of(p_of, i_n)
            slot, resumed = slot_of(p_slots, p_fresh, i_s)
            power, inverse = power_of(p_power, i_s * HV + i_h)
            p_slot = p_final_state + slot * slot_stride + i_h * (K * V)
        starts = c_from == 0
        # one 64-bit base and 32-bit offsets: a tile of 64-bit ones does not fit the registers beside S
        o_base = (tl.cast(i_n, tl.int64) * HV + i_h) * (K * V)
        o_v = i_v + tl.arange(0, BV)
        o_state = o_k[None, :] * V + o_v[:, None]
        p_late = p_hand + tl.cast(i_slot, tl.int64) * (BV * NK * KB) + o_hand
        S = ()
        for n in tl.static_range(NK):
            inside = (o_v < V)[:, None] & (o_k + n * KB < K)[None, :]
            part = tl.load(p_late + n * KB, mask=inside & late, other=0.0)
            if INIT == 1:
                part += tl.load(p_initial_state + o_base + o_state + n * KB * V, mask=inside & starts, other=0.0).to(ACC)
            if INIT == 2:
                part += tl.load(p_slot + o_state + n * KB * V, mask=inside & starts & resumed, other=0.0).to(ACC) * inverse
            if INIT == 2 and p_initial_state is not None:
                tl.store(p_initial_state + o_base + o_state + n * KB * V, part, mask=inside & starts)
            S += (part,)

        for i in tl.range(c_from, c_to, num_stages=NS):
            i_t = (c_row + i) * C
            # all loads first: they share barriers
            b_k = cast(load_parts(x_k, i_b, i_t, i_k, T, H, K, C, KB, NK, TMA), ST, NK)
            b_r = cast(load_parts(x_r, i_b, i_t, i_r, T, HR, K, C, KB, NK, TMA), ST, NK)
            if READ:
                b_q = cast(load_parts(x_q, i_b, i_t, i_k, T, H, K, C, KB, NK, TMA), ST, NK)
            if ERASE:
                b_T = load_tile(x_T, i_bh, i_t, 0, 0, NR, 1, C, C, C, TMA).to(TT)
            b_P = load_tile(x_P, i_bh, i_t, 0, 0, NR, 1, C, C, C, TMA).to(ST)
            b_v = load_tile(x_v, i_b, i_t, i_h, i_v, T, HV, V, C, BV, TMA)

            # all of one tile's products before the next one's: two tiles as operands do not fit the registers
            erased = tl.zeros([BV, C], ACC)
            read = tl.zeros([BV, C], ACC)
            asked = tl.zeros([BV, C], ACC)
            for n in tl.static_range(NK):
                b_S = S[n].to(ST)
                if ERASE:
                    erased = plus_product(erased, b_S, tl.trans(b_k[n]))
                read = plus_product(read, b_S, tl.trans(b_r[n]))
                if READ:
                    asked = plus_product(asked, b_S, tl.trans(b_q[n]))

            p_factor = factors(p_E, i_bh * chunks_of_row + c_row + i, C)
            w = tl.trans(b_v).to(ACC)
            if p_abc is not None:
                w *= by_v[None, :]
            if ERASE:
                if LAM:
                    lam = tl.load(p_factor + 2 * C + o_c)
                if LAM and READ:
                    erased += lam[None, :] * asked
                elif LAM:
                    erased += lam[None, :] * read
                beta = tl.load(p_factor + o_c)
                e_erased = tl.load(p_factor + C + o_c)
                b_rest = (beta[None, :] * w + e_erased[None, :] * erased).to(TT)
                w = tl.dot(b_rest, tl.trans(b_T), input_precision=SOLVE, out_dtype=ACC)
            b_w = w.to(ST)
            if SAVE:
                store_tile(x_w, tl.trans(b_w).to(BT, bitcast=True), i_b, i_t, i_h, i_v, T, HV, V, C, BV, TMA)
            read *= tl.load(p_factor + 3 * C + o_c)[None, :]
            o = tl.dot(b_w, tl.trans(b_P), read, input_precision="ieee", out_dtype=ACC)
            if p_abc is not None:
                o *= by_o
            b_o = o.to(OT)
            if FORM == 1:
                # a W that float16 does not hold has to show in the state that is left, however small what is left of it
                w = b_w.to(ACC)
            b_left = (w * tl.load(p_factor + 5 * C + o_c)[None, :]).to(ST)
            e_whole = -tl.load(p_factor + 5 * C - 1)
            S = continued(S, e_whole, b_left, b_k, NK, ACC)
            # last, while the state's product is under way
            store_tile(x_o, tl.trans(b_o), i_b, i_t, i_h, i_v, T, HV, V, C, BV, TMA)

        done = c_to == count
        if FORM == 1:
            flag_overflow(p_overflow, odd_of(S, NK))
        leaves = done
        if slot_stride is not None:
            leaves = done & ends & (slot >= 0) & (count > 0)
            # a number that two threads hold is read by both before one of them writes it
            tl.debug_barrier()
        for n in tl.static_range(NK):
            inside = (o_v < V)[:, None] & (o_k + n * KB < K)[None, :]
            if slot_stride is None:
                tl.store(p_final_state + o_base + o_state + n * KB * V, S[n], mask=inside & leaves)
            else:
                tl.store(p_slot + o_state + n * KB * V, S[n] * power, mask=inside & leaves)
        if begin > 0:
            for n in tl.static_range(NK):
                tl.store(p_late - TEAM * BV * NK * KB + n * KB, S[n])
            tell(p_flag + i_slot - TEAM, FORM)
