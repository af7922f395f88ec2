"""Gradients that pass through the state, without storing a state a chunk: once W and du are known nothing couples rows of S,
so that a program replays a slice of keys, forward with S and backward with dS, and contracts over V itself.

    forward   dr = scale e^G ⊙ (do Sᵀ)   dx/βe^g = −e^{G−g} ⊙ (du Sᵀ)    S ← e^{G_C} S + (e^{G_C − G} ⊙ k)ᵀ W
    reverse   dk = e^{G_C − G} ⊙ (W dSᵀ)                           dS ← e^{G_C} dS + (scale e^G ⊙ r)ᵀ do − (e^G ⊙ βx)ᵀ du

The gradient of the gates wants X = e^{G_C} ⟨S, dS⟩ of each chunk, S at its start and dS at its end. The forward pass stores S
every EVERY chunks, counted from a sequence's end, and the reverse pass measures X there; between, X follows from the tokens.
Slots and chains are `scan.py`'s; of a team each has a value head, a slice of KS keys and a slice of NT·VB values.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.chain import chain_here, slot_here, tell, wait_for
from needlework.ops.common.kernels.tile import load_tile, store_tile
from needlework.ops.delta.gradient_scaling import gradient_factor
from needlework.ops.delta.scalar.scan import factors, written_as


@triton.jit(do_not_specialize=["scale", "T", "NR", "N", "B"])
def replay_forward(
    x_k, x_do, x_du, x_w, p_E, x_dr, x_dx, p_initial_state, p_anchor, p_cum, p_hand, p_flag, p_overflow, p_overflow_bwd, scale, T, NR, N, B,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KS: tl.constexpr, VB: tl.constexpr,
    NT: tl.constexpr, NS: tl.constexpr, EVERY: tl.constexpr, TMA: tl.constexpr,
    ACC: tl.constexpr, ST: tl.constexpr, BT: tl.constexpr, GATE: tl.constexpr, ERASE: tl.constexpr, INIT: tl.constexpr,
    FORM: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One slot. In half precision do and du hold the same factor."""
    VS: tl.constexpr = VB * NT
    NKS: tl.constexpr = (K + KS - 1) // KS
    NVS: tl.constexpr = (V + VS - 1) // VS
    TILES: tl.constexpr = NKS * NVS
    PER: tl.constexpr = HV // HEADS
    TEAM: tl.constexpr = HEADS * TILES
    if FORM == 2:
        if tl.load(p_overflow_bwd) == 0:
            return
    i_slot, i_own, lo, hi, first, last = slot_here(p_cum, N, PER, TEAM)
    i_k = (i_own % TILES // NVS) * KS
    i_s = i_own % NVS
    i_v = i_s * VS
    chunks_of_row = NR // C
    o_c = tl.arange(0, C)
    o_hand = tl.arange(0, KS)[:, None] * VS + tl.arange(0, VB)[None, :]
    for i_chain in range(first, last + 1):
        i_h = (i_chain % PER) * HEADS + i_own // TILES
        i_n, i_b, c_row, start, count, begin, late, c_from, c_to = chain_here(p_cum, i_chain, lo, hi, chunks_of_row, PER)
        i_bh = i_b * HV + i_h

        if late:
            wait_for(p_flag + i_slot, FORM)
        o_k = i_k + tl.arange(0, KS)
        o_v = i_v + tl.arange(0, VB)
        o_in_state = o_k[:, None] * V + o_v[None, :]
        inside = (o_k < K)[:, None] & (o_v < V)[None, :]
        p_late = p_hand + tl.cast(i_slot, tl.int64) * (KS * VS)
        S0 = tl.load(p_late + o_hand, mask=inside & late, other=0.0)
        if INIT:
            # one 64-bit base and 32-bit offsets: a tile of 64-bit ones does not fit the registers beside S
            p_start = p_initial_state + (tl.cast(i_n, tl.int64) * HV + i_h) * (K * V) + o_in_state
            S0 += tl.load(p_start, mask=inside & (c_from == 0), other=0.0).to(ACC)
        if NT == 2:
            inside1 = (o_k < K)[:, None] & (o_v + VB < V)[None, :]
            S1 = tl.load(p_late + VB + o_hand, mask=inside1 & late, other=0.0)
            if INIT:
                S1 += tl.load(p_start + VB, mask=inside1 & (c_from == 0), other=0.0).to(ACC)

        # the pipelined loop holds no anchor: it would not fit the registers
        phase = (count - 1) % EVERY - EVERY
        for i_anchor in range((c_from - phase) // EVERY, (c_to - 1 - phase) // EVERY + 1):
            c_anchor = phase + i_anchor * EVERY
            if GATE and c_anchor >= c_from:
                place = start // EVERY + i_n + (count - 1 - c_anchor) // EVERY
                p_here = p_anchor + (tl.cast(place, tl.int64) * HV + i_h) * (K * V) + o_in_state
                tl.store(p_here, S0.to(ST).to(BT, bitcast=True), mask=inside)
                if NT == 2:
                    tl.store(p_here + VB, S1.to(ST).to(BT, bitcast=True), mask=inside1)
            for i in tl.range(tl.maximum(c_anchor, c_from), tl.minimum(c_anchor + EVERY, c_to), num_stages=NS):
                i_t = (c_row + i) * C
                # all loads first: they share barriers
                b_do0 = load_tile(x_do, i_b, i_t, i_h, i_v, T, HV, V, C, VB, TMA).to(ST, bitcast=True)
                if ERASE:
                    b_du0 = load_tile(x_du, i_b, i_t, i_h, i_v, T, HV, V, C, VB, TMA).to(ST, bitcast=True)
                b_w0 = load_tile(x_w, i_b, i_t, i_h, i_v, T, HV, V, C, VB, TMA)
                if FORM == 2:
                    b_w0 = written_as(b_w0, p_overflow, ST)
                if NT == 2:
                    b_do1 = load_tile(x_do, i_b, i_t, i_h, i_v + VB, T, HV, V, C, VB, TMA).to(ST, bitcast=True)
                if NT == 2 and ERASE:
                    b_du1 = load_tile(x_du, i_b, i_t, i_h, i_v + VB, T, HV, V, C, VB, TMA).to(ST, bitcast=True)
                if NT == 2:
                    b_w1 = load_tile(x_w, i_b, i_t, i_h, i_v + VB, T, HV, V, C, VB, TMA)
                if NT == 2 and FORM == 2:
                    b_w1 = written_as(b_w1, p_overflow, ST)
                b_k = load_tile(x_k, i_b, i_t, i_h // (HV // H), i_k, T, H, K, C, KS, TMA).to(ST)

                b_S0 = S0.to(ST)
                dr = tl.dot(b_S0, tl.trans(b_do0), input_precision="ieee", out_dtype=ACC)
                if ERASE:
                    dx = tl.dot(b_S0, tl.trans(b_du0), input_precision="ieee", out_dtype=ACC)
                if NT == 2:
                    b_S1 = S1.to(ST)
                    dr = tl.dot(b_S1, tl.trans(b_do1), dr, input_precision="ieee", out_dtype=ACC)
                if NT == 2 and ERASE:
                    dx = tl.dot(b_S1, tl.trans(b_du1), dx, input_precision="ieee", out_dtype=ACC)

                p_factor = factors(p_E, i_bh * chunks_of_row + c_row + i, C)
                b_dr = (dr * tl.load(p_factor + 3 * C + o_c)[None, :]).to(ST)
                store_tile(x_dr, tl.trans(b_dr).to(BT, bitcast=True), i_s * B + i_b, i_t, i_h, i_k, T, HV, K, C, KS, TMA)
                if ERASE:
                    # up to the token before: a strong gate of its own would leave nothing in half precision
                    e_before = tl.load(p_factor + 4 * C + o_c - 1, mask=o_c > 0, other=-1.0)
                    b_dx = (dx * e_before[None, :]).to(ST)
                b_left = (tl.trans(b_k).to(ACC) * tl.load(p_factor + 5 * C + o_c)[None, :]).to(ST)
                e_whole = -tl.load(p_factor + 5 * C - 1)
                S0 = tl.dot(b_left, b_w0, S0 * e_whole, input_precision="ieee", out_dtype=ACC)
                if NT == 2:
                    S1 = tl.dot(b_left, b_w1, S1 * e_whole, input_precision="ieee", out_dtype=ACC)
                # last, while the state's product is under way
                if ERASE:
                    store_tile(x_dx, tl.trans(b_dx).to(BT, bitcast=True), i_s * B + i_b, i_t, i_h, i_k, T, HV, K, C, KS, TMA)

        if begin > 0:
            p_early = p_late - TEAM * KS * VS
            tl.store(p_early + o_hand, S0)
            if NT == 2:
                tl.store(p_early + VB + o_hand, S1)
            tell(p_flag + i_slot - TEAM, FORM)


@triton.jit
def erased_along(b_k, b_q, r, p_lam, LAM: tl.constexpr, READ: tl.constexpr, ACC: tl.constexpr):
    """xᵀ = (k + λq)ᵀ [KS C]; r is qᵀ where no other query reads."""
    x = tl.trans(b_k).to(ACC)
    if LAM:
        lam = tl.load(p_lam)
        if READ:
            x += tl.trans(b_q).to(ACC) * lam[None, :]
        else:
            x += r * lam[None, :]
    return x


@triton.jit(do_not_specialize=["scale", "T", "NR", "N", "B"])
def replay_reverse(
    x_r, x_q, x_k, x_do, x_du, x_w, p_G, p_E, x_dk, p_dstate, p_anchor, p_X, p_cum, p_hand, p_flag, p_overflow, p_overflow_bwd, p_max,
    scale, T, NR, N, B,
    H: tl.constexpr, HR: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KS: tl.constexpr,
    VB: tl.constexpr, NT: tl.constexpr, NS: tl.constexpr, NM: tl.constexpr, EVERY: tl.constexpr, TMA: tl.constexpr,
    HALF: tl.constexpr, ACC: tl.constexpr, ST: tl.constexpr, BT: tl.constexpr,
    GATE: tl.constexpr, ERASE: tl.constexpr, LAM: tl.constexpr, READ: tl.constexpr, END: tl.constexpr, FORM: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """One slot, chunks from last to first. END: the final state has a gradient."""
    VS: tl.constexpr = VB * NT
    NKS: tl.constexpr = (K + KS - 1) // KS
    NVS: tl.constexpr = (V + VS - 1) // VS
    TILES: tl.constexpr = NKS * NVS
    PER: tl.constexpr = HV // HEADS
    TEAM: tl.constexpr = HEADS * TILES
    if FORM == 2:
        if tl.load(p_overflow_bwd) == 0:
            return
    i_slot, i_own, lo, hi, first, last = slot_here(p_cum, N, PER, TEAM)
    i_k = (i_own % TILES // NVS) * KS
    i_s = i_own % NVS
    i_v = i_s * VS
    chunks_of_row = NR // C
    o_c = tl.arange(0, C)
    o_hand = tl.arange(0, KS)[:, None] * VS + tl.arange(0, VB)[None, :]
    for i_chain in range(first, last + 1):
        i_h = (i_chain % PER) * HEADS + i_own // TILES
        i_n, i_b, c_row, start, count, begin, late, c_from, c_to = chain_here(p_cum, i_chain, lo, hi, chunks_of_row, PER)
        i_bh = i_b * HV + i_h

        if late:
            wait_for(p_flag + i_slot, FORM)
        o_k = i_k + tl.arange(0, KS)
        o_v = i_v + tl.arange(0, VB)
        o_in_state = o_k[:, None] * V + o_v[None, :]
        inside = (o_k < K)[:, None] & (o_v < V)[None, :]
        inside1 = (o_k < K)[:, None] & (o_v + VB < V)[None, :]
        p_late = p_hand + tl.cast(i_slot, tl.int64) * (KS * VS)
        S0 = tl.load(p_late + o_hand, mask=inside & late, other=0.0)
        if NT == 2:
            S1 = tl.load(p_late + VB + o_hand, mask=inside1 & late, other=0.0)
        if END:
            factor = gradient_factor(p_max, NM, HALF)
            p_end = p_dstate + (tl.cast(i_n, tl.int64) * HV + i_h) * (K * V) + o_in_state
            S0 += tl.load(p_end, mask=inside & (c_from == 0), other=0.0).to(ACC) * factor
            if NT == 2:
                S1 += tl.load(p_end + VB, mask=inside1 & (c_from == 0), other=0.0).to(ACC) * factor

        for i_anchor in range(c_from // EVERY, (c_to + EVERY - 1) // EVERY):
            c_anchor = i_anchor * EVERY
            if GATE and c_anchor >= c_from:
                place = (tl.cast(start // EVERY + i_n + i_anchor, tl.int64)) * HV + i_h
                p_here = p_anchor + place * (K * V) + o_in_state
                alike = tl.sum(tl.sum(S0 * tl.load(p_here, mask=inside, other=0.0).to(ST, bitcast=True).to(ACC), 1), 0)
                if NT == 2:
                    b_anchor1 = tl.load(p_here + VB, mask=inside1, other=0.0).to(ST, bitcast=True).to(ACC)
                    alike += tl.sum(tl.sum(S1 * b_anchor1, 1), 0)
                p_last = p_G + tl.cast(i_bh, tl.int64) * NR + (c_row + count - c_anchor) * C - 1
                tl.store(p_X + place * TILES + i_own % TILES, alike * tl.exp2(tl.load(p_last)))
            for i in tl.range(tl.maximum(c_anchor, c_from), tl.minimum(c_anchor + EVERY, c_to), num_stages=NS):
                i_chunk = c_row + count - 1 - i
                i_t = i_chunk * C
                # all loads first: they share barriers
                b_w0 = load_tile(x_w, i_b, i_t, i_h, i_v, T, HV, V, C, VB, TMA)
                if FORM == 2:
                    b_w0 = written_as(b_w0, p_overflow, ST)
                b_do0 = load_tile(x_do, i_b, i_t, i_h, i_v, T, HV, V, C, VB, TMA).to(ST, bitcast=True)
                if ERASE:
                    b_du0 = load_tile(x_du, i_b, i_t, i_h, i_v, T, HV, V, C, VB, TMA).to(ST, bitcast=True)
                if NT == 2:
                    b_w1 = load_tile(x_w, i_b, i_t, i_h, i_v + VB, T, HV, V, C, VB, TMA)
                if NT == 2 and FORM == 2:
                    b_w1 = written_as(b_w1, p_overflow, ST)
                if NT == 2:
                    b_do1 = load_tile(x_do, i_b, i_t, i_h, i_v + VB, T, HV, V, C, VB, TMA).to(ST, bitcast=True)
                if NT == 2 and ERASE:
                    b_du1 = load_tile(x_du, i_b, i_t, i_h, i_v + VB, T, HV, V, C, VB, TMA).to(ST, bitcast=True)
                b_r = load_tile(x_r, i_b, i_t, i_h // (HV // HR), i_k, T, HR, K, C, KS, TMA).to(ST)
                if ERASE:
                    b_x = load_tile(x_k, i_b, i_t, i_h // (HV // H), i_k, T, H, K, C, KS, TMA).to(ST)
                    b_q = b_x
                if ERASE and LAM and READ:
                    b_q = load_tile(x_q, i_b, i_t, i_h // (HV // H), i_k, T, H, K, C, KS, TMA).to(ST)

                dk = tl.dot(S0.to(ST), tl.trans(b_w0), input_precision="ieee", out_dtype=ACC)
                if NT == 2:
                    dk = tl.dot(S1.to(ST), tl.trans(b_w1), dk, input_precision="ieee", out_dtype=ACC)

                p_factor = factors(p_E, i_bh * chunks_of_row + i_chunk, C)
                b_dk = (dk * tl.load(p_factor + 5 * C + o_c)[None, :]).to(ST)
                e_whole = -tl.load(p_factor + 5 * C - 1)
                r = tl.trans(b_r).to(ACC)
                b_by_do = (r * tl.load(p_factor + 3 * C + o_c)[None, :]).to(ST)
                S0 = tl.dot(b_by_do, b_do0, S0 * e_whole, input_precision="ieee", out_dtype=ACC)
                if ERASE:
                    x = erased_along(b_x, b_q, r, p_factor + 2 * C + o_c, LAM, READ, ACC)
                    b_by_du = (x * tl.load(p_factor + C + o_c)[None, :]).to(ST)
                    S0 = tl.dot(b_by_du, b_du0, S0, input_precision="ieee", out_dtype=ACC)
                if NT == 2:
                    S1 = tl.dot(b_by_do, b_do1, S1 * e_whole, input_precision="ieee", out_dtype=ACC)
                if NT == 2 and ERASE:
                    S1 = tl.dot(b_by_du, b_du1, S1, input_precision="ieee", out_dtype=ACC)
                # last, while the state's product is under way
                store_tile(x_dk, tl.trans(b_dk).to(BT, bitcast=True), i_s * B + i_b, i_t, i_h, i_k, T, HV, K, C, KS, TMA)

        if begin > 0:
            p_early = p_late - TEAM * KS * VS
            tl.store(p_early + o_hand, S0)
            if NT == 2:
                tl.store(p_early + VB + o_hand, S1)
            tell(p_flag + i_slot - TEAM, FORM)
