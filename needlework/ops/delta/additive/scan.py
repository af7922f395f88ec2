"""The chunks of a sequence in order, S kept in registers as Sᵀ [BV K], NK tiles of KB keys; and in reverse, dS instead.

    oᵀ = scale e^G ⊙ Sᵀrᵀ + vᵀ P'ᵀ        Sᵀ ← e^{G_C} Sᵀ + (e^{G_C − G} ⊙ v)ᵀ k        P'_ts = scale Γ_ts r_tᵀ k_s, s <= t
    dvᵀ = e^{G_C − G} ⊙ dSᵀkᵀ + doᵀ P'    dSᵀ ← e^{G_C} dSᵀ + (scale e^G ⊙ do)ᵀ r

The second line is the first one with time reversed: r and k, v and do change places, P' its indices. So both are one kernel, in
whose words rows are what `reads`, and columns what is `written`. Nothing is solved: P' of a chunk is made where it is used, and
never goes through memory. The state that a chunk starts from is kept, as an operand, for the gradients of r and k.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.parts import cast, continued, load_parts, load_transposed, scores, store_transposed, zeros
from needlework.ops.common.kernels.tile import load_tile, store_tile
from needlework.ops.delta.additive.intra import decay_of, factors
from needlework.ops.delta.segments import only_one


@triton.jit(do_not_specialize=["scale", "T", "NR"])
def scan(
    x_reads, x_writes, x_v, p_E, x_o, x_S, p_initial_state, p_final_state, p_M, p_cum, p_of, scale, T, NR,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, KB: tl.constexpr,
    NK: tl.constexpr, NS: tl.constexpr, TMA: tl.constexpr, ACC: tl.constexpr, OT: tl.constexpr, ST: tl.constexpr, INIT: tl.constexpr,
    OUT: tl.constexpr, SAVE: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """One sequence, value head and tile of BV values. x_S [B·HV·chunks V 1 K]. Without OUT nothing but the final state is made, and
    p_M [N HV], the decay of a state by the sequence's gates: of segments, and not of a sequence's only one."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV * BV
    i_nh = tl.program_id(0) // NV
    i_n = i_nh // HV
    i_h = i_nh % HV
    i_k = i_h // (HV // H)
    start = tl.load(p_cum + i_n)
    count = tl.load(p_cum + i_n + 1) - start
    chunks = NR // C
    i_b = start // chunks
    c_row = start - i_b * chunks
    i_bh = i_b * HV + i_h
    o_c = tl.arange(0, C)
    # one 64-bit base and 32-bit offsets: a tile of 64-bit ones does not fit the registers beside S
    o_base = tl.cast(i_nh, tl.int64) * (K * V)
    S = zeros(BV, KB, NK, ACC)
    if INIT:
        S = load_transposed(p_initial_state + o_base, True, i_v, K, V, KB, NK, BV, ACC)
    if not OUT:
        e_all = tl.full([], 1.0, ACC)
        count = tl.where(only_one(p_of, i_n), 0, count)
    # of the tokens that read and that are written: e^G times scale, and e^{G_C − G}, or these the other way round
    READS: tl.constexpr = 3 * C if REVERSE else 2 * C
    WRITES: tl.constexpr = 2 * C if REVERSE else 3 * C
    by_read = 1.0 if REVERSE else scale
    by_write = scale if REVERSE else 1.0
    for i in tl.range(0, count, num_stages=NS):
        i_chunk = c_row + i
        if REVERSE:
            i_chunk = c_row + count - 1 - i
        i_t = i_chunk * C
        # each load where it is needed: those of the next step are issued at this one's end, and waited for no earlier
        b_writes = load_parts(x_writes, i_b, i_t, i_k, T, H, K, C, KB, NK, TMA)
        if OUT:
            b_reads = load_parts(x_reads, i_b, i_t, i_k, T, H, K, C, KB, NK, TMA)
            b_S = cast(S, ST, NK)
            if SAVE:
                for n in tl.static_range(NK):
                    store_tile(x_S, b_S[n], i_bh * chunks + i_chunk, i_v, 0, n * KB, V, 1, K, BV, KB, TMA)
            coupling = scores(b_reads, b_writes, NK, ACC)
            o = scores(b_S, b_reads, NK, ACC)
        p_factor = factors(p_E, i_bh, i_chunk, chunks, C)
        e_writes = tl.load(p_factor + WRITES + o_c) * by_write
        e_whole = tl.load(p_factor + 3 * C - 1)
        if OUT:
            high, low = tl.load(p_factor + o_c), tl.load(p_factor + C + o_c)
            o *= (tl.load(p_factor + READS + o_c) * by_read)[None, :]
            b_P = (coupling * decay_of(high, low, C, REVERSE) * scale).to(ST)
        b_vT = tl.trans(load_tile(x_v, i_b, i_t, i_h, i_v, T, HV, V, C, BV, TMA))
        if OUT:
            o = tl.dot(b_vT, tl.trans(b_P), o, input_precision="ieee", out_dtype=ACC)
        else:
            e_all *= e_whole
        b_left = (b_vT.to(ACC) * e_writes[None, :]).to(ST)
        S = continued(S, e_whole, b_left, b_writes, NK, ACC)
        if OUT:
            # last, while the state's product is under way
            store_tile(x_o, tl.trans(o.to(OT)), i_b, i_t, i_h, i_v, T, HV, V, C, BV, TMA)
    store_transposed(p_final_state + o_base, S, True, i_v, K, V, KB, NK, BV)
    if not OUT:
        tl.store(p_M + i_nh, e_all, mask=i_v == 0)
