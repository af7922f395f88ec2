"""The chunks of a sequence in order, S kept in registers as Sᵀ [BV K]; every product of the chain takes Sᵀ or what follows
from it from registers, so that nothing of the state goes through shared memory.

    Rᵀ = β ⊙ (vᵀ − e^G ⊙ (Sᵀkᵀ + λ Sᵀqᵀ))    Wᵀ = Rᵀ Tᵀ    oᵀ = scale e^G ⊙ Sᵀrᵀ + Wᵀ P'ᵀ    Sᵀ ← e^{G_C} Sᵀ + (e^{G_C − G} ⊙ W)ᵀ k

A chain is one sequence, value head and tile of BV values. Chains are laid end to end and cut into equal runs, one a program
(McNaughton's wrap-around rule): a chain is cut at most once; its first chunks run first in one slot, its last chunks run last
in the slot before. Slots are numbered against program ids, so that a program only waits for one that was started earlier.
r, q, k and W are operands (ST), v and o of the caller's type (OT), T and what it multiplies of a type of their own (TT).

GROWS: the transition is no contraction (x = k + λq), and float16 operands would end at 65,504 where the caller's type does not.
Values do not mix, so each tile of them has a unit u, a power of two that follows its S from chunk to chunk: S = S'u, W = W'u, and
S', W' are what is multiplied. Whatever is contracted over values meets a gradient times u, and knows of no unit.
"""

import triton
import triton.language as tl

from needlework.ops.common.triton_tile import load_tile, plus_product, store_tile
from needlework.ops.delta.triton_intra import ROWS

# numbers that a unit takes where a cut chain is passed on: 16 bytes, as the loads of the state beside it want
UNIT = tl.constexpr(4)


@triton.jit
def factors(p_E, i_chunk, C: tl.constexpr):
    """A chunk's rows of C numbers, as `intra` wrote them: β, −β e^G, λ, scale e^G, −e^G, e^{G_C − G}, e^{G − G_1}, e^g."""
    return p_E + tl.cast(i_chunk, tl.int64) * (ROWS * C)


@triton.jit
def longest_sequence(p_cum, N):
    """Chunks of the longest sequence."""
    longest = 0
    for i in range(0, N, 512):
        n = i + tl.arange(0, 512)
        counts = tl.load(p_cum + n + 1, mask=n < N, other=0) - tl.load(p_cum + n, mask=n < N, other=0)
        longest = tl.maximum(longest, tl.max(counts, 0))
    return longest


@triton.jit
def chain_at(p_cum, N, position, PER: tl.constexpr):
    """Number of the chain that holds a position of the line; PER chains a sequence."""
    i_n = 0
    for i in range(0, N, 512):
        n = i + tl.arange(0, 512)
        ends = PER * tl.load(p_cum + n + 1, mask=n < N, other=0)
        i_n += tl.sum(((n < N) & (ends <= position)).to(tl.int32), 0)
    start = tl.load(p_cum + i_n)
    return i_n * PER + (position - PER * start) // tl.maximum(tl.load(p_cum + i_n + 1) - start, 1)


@triton.jit
def run_of(p_cum, N, i_slot, slots, PER: tl.constexpr):
    """Positions [lo, hi) of a slot, and its first and last chain."""
    total = PER * tl.load(p_cum + N)
    length = tl.maximum((total + slots - 1) // slots, longest_sequence(p_cum, N))
    lo = tl.minimum(i_slot * length, total)
    hi = tl.minimum(lo + length, total)
    first = 0
    last = -1
    if lo < hi:
        first = chain_at(p_cum, N, lo, PER)
        last = chain_at(p_cum, N, hi - 1, PER)
    return lo, hi, first, last


@triton.jit
def unit_of(largest):
    """1 of a state up to 2⁵, then the power of two that leaves it below: 2¹¹ times that, in two chunks, is in float16's range."""
    return tl.exp2(tl.maximum(tl.ceil(tl.log2(tl.maximum(largest, 1.0))) - 5.0, 0.0))


@triton.jit
def largest_of(S):
    return tl.max(tl.max(tl.abs(S), 1), 0)


@triton.jit
def units(p_U, i_chunk, i_v, there, LEFT: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, UV: tl.constexpr):
    """The units of BV values from i_v on in a chunk, UV sharing one: [1 BV], or one number where all share it; 1 where nothing is
    `there`. LEFT: over the next chunk's, which is what S' is multiplied by between them, and dS' the other way."""
    NU: tl.constexpr = (V + UV - 1) // UV
    p = p_U + (tl.cast(i_chunk, tl.int64) * NU + i_v // UV) * 2 + LEFT
    unit = tl.load(p, mask=there, other=1.0)
    if BV > UV:
        of = (tl.arange(0, BV) // UV)[None, :]
        unit = tl.where(of == 0, unit, 1.0)
        for i in tl.static_range(1, BV // UV):
            unit = tl.where(of == i, tl.load(p + 2 * i, mask=there & (i_v + i * UV < V), other=1.0), unit)
    return unit


@triton.jit
def wait_for(p_flag):
    while tl.atomic_add(p_flag, 0, sem="acquire") == 0:
        pass
    tl.debug_barrier()


@triton.jit
def tell(p_flag):
    tl.debug_barrier()
    tl.atomic_xchg(p_flag, 1, sem="release")


@triton.jit(do_not_specialize=["scale", "T", "NR", "N"])
def scan(
    x_r, x_q, x_k, x_v, x_T, x_P, p_E, p_U, x_o, x_w, p_initial, p_final, p_cum, p_hand, p_flag, scale, T, NR, N,
    H: tl.constexpr, HR: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    KB: tl.constexpr, NK: tl.constexpr, NS: tl.constexpr, TMA: tl.constexpr, ACC: tl.constexpr, OT: tl.constexpr, ST: tl.constexpr, TT: tl.constexpr,
    SOLVE: tl.constexpr, ERASE: tl.constexpr, LAM: tl.constexpr, READ: tl.constexpr, INIT: tl.constexpr, SAVE: tl.constexpr,
    GROWS: tl.constexpr,
):  # fmt: skip
    """One slot. The state's K columns are NK tiles of KB; p_hand [slots BV·NK·KB], the unit behind it, and p_flag pass a cut chain on."""
    NV: tl.constexpr = (V + BV - 1) // BV
    PER: tl.constexpr = HV * NV
    slots = tl.num_programs(0)
    i_slot = slots - 1 - tl.program_id(0)
    lo, hi, first, last = run_of(p_cum, N, i_slot, slots, PER)
    chunks_of_row = NR // C
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, KB)
    o_hand = tl.arange(0, BV)[:, None] * (NK * KB) + o_k[None, :]
    HAND: tl.constexpr = BV * NK * KB + UNIT * GROWS
    for i_chain in range(first, last + 1):
        i_n = i_chain // PER
        i_h = (i_chain % PER) // NV
        i_v = (i_chain % NV) * BV
        i_k = i_h // (HV // H)
        i_r = i_h // (HV // HR)
        start = tl.load(p_cum + i_n)
        count = tl.load(p_cum + i_n + 1) - start
        at = PER * start + (i_chain % PER) * count
        # what of the chain's line lies here; the line's end is where its first chunks run
        begin = tl.maximum(lo - at, 0)
        end = tl.minimum(hi - at, count)
        late = end < count
        c_from = tl.where(late, count - end, 0)
        c_to = tl.where(begin > 0, count - begin, count)
        i_b = start // chunks_of_row
        c_row = start - i_b * chunks_of_row
        i_bh = i_b * HV + i_h

        if late:
            wait_for(p_flag + i_slot)
        o_v = i_v + tl.arange(0, BV)
        o_state = (tl.cast(i_n, tl.int64) * HV + i_h) * (K * V) + o_k[None, :] * V + o_v[:, None]
        inside = (o_v < V)[:, None] & (o_k < K)[None, :]
        p_late = p_hand + tl.cast(i_slot, tl.int64) * HAND + o_hand
        S0 = tl.load(p_late, mask=inside & late, other=0.0)
        if INIT:
            S0 += tl.load(p_initial + o_state, mask=inside & (c_from == 0), other=0.0).to(ACC)
        if NK == 2:
            inside1 = (o_v < V)[:, None] & (o_k + KB < K)[None, :]
            S1 = tl.load(p_late + KB, mask=inside1 & late, other=0.0)
            if INIT:
                S1 += tl.load(p_initial + o_state + KB * V, mask=inside1 & (c_from == 0), other=0.0).to(ACC)

        if GROWS:
            largest = largest_of(S0)
            if NK == 2:
                largest = tl.maximum(largest, largest_of(S1))
            p_unit = p_hand + tl.cast(i_slot, tl.int64) * HAND + BV * NK * KB
            unit = tl.where(late, tl.load(p_unit, mask=late, other=1.0), unit_of(largest))
            divided = tl.where(late, 1.0, 1.0 / unit)
            S0 *= divided
            if NK == 2:
                S1 *= divided

        for i in tl.range(c_from, c_to, num_stages=NS):
            i_t = (c_row + i) * C
            # all loads first: they share barriers
            b_k0 = load_tile(x_k, i_b, i_t, i_k, 0, T, H, K, C, KB, TMA)
            b_r0 = load_tile(x_r, i_b, i_t, i_r, 0, T, HR, K, C, KB, TMA)
            if READ:
                b_q0 = load_tile(x_q, i_b, i_t, i_k, 0, T, H, K, C, KB, TMA)
            if NK == 2:
                b_k1 = load_tile(x_k, i_b, i_t, i_k, KB, T, H, K, C, KB, TMA)
                b_r1 = load_tile(x_r, i_b, i_t, i_r, KB, T, HR, K, C, KB, TMA)
                if READ:
                    b_q1 = load_tile(x_q, i_b, i_t, i_k, KB, T, H, K, C, KB, TMA)
            if ERASE:
                b_T = load_tile(x_T, i_bh, i_t, 0, 0, NR, 1, C, C, C, TMA)
            b_P = load_tile(x_P, i_bh, i_t, 0, 0, NR, 1, C, C, C, TMA)
            b_v = load_tile(x_v, i_b, i_t, i_h, i_v, T, HV, V, C, BV, TMA)

            b_S0 = S0.to(ST)
            if ERASE:
                erased = tl.dot(b_S0, tl.trans(b_k0), input_precision="ieee", out_dtype=ACC)
            read = tl.dot(b_S0, tl.trans(b_r0), input_precision="ieee", out_dtype=ACC)
            if READ:
                asked = tl.dot(b_S0, tl.trans(b_q0), input_precision="ieee", out_dtype=ACC)
            if NK == 2:
                b_S1 = S1.to(ST)
                if ERASE:
                    erased = plus_product(erased, b_S1, tl.trans(b_k1), ST == ACC)
                read = plus_product(read, b_S1, tl.trans(b_r1), ST == ACC)
                if READ:
                    asked = plus_product(asked, b_S1, tl.trans(b_q1), ST == ACC)

            p_factor = factors(p_E, i_bh * chunks_of_row + c_row + i, C)
            w = tl.trans(b_v).to(ACC)
            if GROWS:
                # the next chunk's unit from what this one starts with: beside the products, not between them
                largest = largest_of(S0)
                if NK == 2:
                    largest = tl.maximum(largest, largest_of(S1))
                following = unit_of(largest * unit)
                rest = unit / following
                if SAVE:
                    p_units = p_U + (tl.cast(i_bh * chunks_of_row + c_row + i, tl.int64) * NV + i_v // BV) * 2
                    tl.store(p_units, unit)
                    tl.store(p_units + 1, rest)
                w *= 1.0 / unit
            if ERASE:
                if LAM:
                    lam = tl.load(p_factor + 2 * C + o_c)
                    if READ:
                        erased += lam[None, :] * asked
                    else:
                        erased += lam[None, :] * read
                beta = tl.load(p_factor + o_c)
                e_erased = tl.load(p_factor + C + o_c)
                b_rest = (beta[None, :] * w + e_erased[None, :] * erased).to(TT)
                w = tl.dot(b_rest, tl.trans(b_T), input_precision=SOLVE, out_dtype=ACC)
            b_w = w.to(ST)
            if SAVE:
                store_tile(x_w, tl.trans(b_w), i_b, i_t, i_h, i_v, T, HV, V, C, BV, TMA)
            read *= tl.load(p_factor + 3 * C + o_c)[None, :]
            o = tl.dot(b_w, tl.trans(b_P), read, input_precision="ieee", out_dtype=ACC)
            w *= tl.load(p_factor + 5 * C + o_c)[None, :]
            e_whole = -tl.load(p_factor + 5 * C - 1)
            if GROWS:
                o *= unit
                w *= rest
                e_whole *= rest
                unit = following
            b_left = w.to(ST)
            S0 = tl.dot(b_left, b_k0, S0 * e_whole, input_precision="ieee", out_dtype=ACC)
            if NK == 2:
                S1 = tl.dot(b_left, b_k1, S1 * e_whole, input_precision="ieee", out_dtype=ACC)
            # last, while the state's product is under way
            store_tile(x_o, tl.trans(o.to(OT)), i_b, i_t, i_h, i_v, T, HV, V, C, BV, TMA)

        done = c_to == count
        end0 = S0
        if NK == 2:
            end1 = S1
        if GROWS:
            end0 *= unit
            if NK == 2:
                end1 *= unit
        tl.store(p_final + o_state, end0, mask=inside & done)
        if NK == 2:
            tl.store(p_final + o_state + KB * V, end1, mask=inside1 & done)
        if begin > 0:
            p_early = p_late - HAND
            tl.store(p_early, S0)
            if NK == 2:
                tl.store(p_early + KB, S1)
            if GROWS:
                tl.store(p_unit - HAND, unit)
            tell(p_flag + i_slot - 1)
