"""The gradients of r, k and g, chunk by chunk, from the states and their gradients that the scans kept: no chain is left.

    M = scale Γ ∘ tril(do vᵀ)      dr = scale e^G ⊙ (do Sᵀ) + M k      dk = e^{G_C − G} ⊙ (v dSᵀ) + Mᵀ r
    dg_j = Σ_{t>=j>s} M_ts r_tᵀk_s + Σ_{t>=j} scale e^{G_t} do_tᵀ(Sᵀr_t) + Σ_{s<j} e^{G_C − G_s} v_sᵀ(dSᵀk_s) + e^{G_C} ⟨S, dS⟩

S at the chunk's start, dS at its end. Terms of dg all hold e^{g_j} (spec: dg without cancellation): of a pair inside the chunk, of what
passes through S, through dS, and through both. The heads that share r and k are summed here, M before its products with them.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.parts import (
    cast,
    inner,
    load_parts,
    plus_products,
    plus_times,
    products,
    scores,
    store_parts,
    zeros,
)
from needlework.ops.common.kernels.tile import load_tile
from needlework.ops.delta.additive.intra import decay_of, factors


@triton.jit
def plus_measure(X, S, dS, NK: tl.constexpr, ACC: tl.constexpr):
    """X [KB] + Σ S ⊙ dS over values and tiles of keys: terms of ⟨S, dS⟩."""
    for n in tl.static_range(NK):
        X += tl.sum(S[n].to(ACC) * dS[n].to(ACC), 0)
    return X


@triton.jit
def through_states(
    x_do, x_v, x_S, x_dS, b_r, b_k, p_factor, scale, i_b, i_t, i_h, i_v, i_state, T, F, dr, dk, read, left, X,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, KB: tl.constexpr, NK: tl.constexpr,
    TMA: tl.constexpr, ACC: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """do vᵀ, dr and dk, and what each token reads and leaves of ⟨S, dS⟩, which is X, BV values more."""
    # each load where it is needed: those of the next step are issued at this one's end, and waited for no earlier
    o_c = tl.arange(0, C)
    b_do = load_tile(x_do, i_b, i_t, i_h, i_v, T, HV, V, C, BV, TMA)
    b_v = load_tile(x_v, i_b, i_t, i_h, i_v, T, HV, V, C, BV, TMA)
    F = tl.dot(b_do, tl.trans(b_v), F, input_precision="ieee", out_dtype=ACC)
    b_S = load_parts(x_S, i_state, i_v, 0, V, 1, K, BV, KB, NK, TMA)
    through = products(b_do, b_S, NK, ACC)
    e_start = tl.load(p_factor + 2 * C + o_c) * scale
    dr = plus_times(dr, through, e_start[:, None], NK)
    if GATE:
        read += inner(cast(b_r, ACC, NK), through, NK) * e_start
    b_dS = load_parts(x_dS, i_state, i_v, 0, V, 1, K, BV, KB, NK, TMA)
    through = products(b_v, b_dS, NK, ACC)
    e_end = tl.load(p_factor + 3 * C + o_c)
    dk = plus_times(dk, through, e_end[:, None], NK)
    if GATE:
        left += inner(cast(b_k, ACC, NK), through, NK) * e_end
        X = plus_measure(X, b_S, b_dS, NK, ACC)
    return F, dr, dk, read, left, X


@triton.jit
def inside(held, C: tl.constexpr, ACC: tl.constexpr, HALF: tl.constexpr):
    """Of Σ_{t>=j>s} held_ts, the share of dg of pairs inside the chunk, held below the diagonal alone: HALF, how much more of it the gate after
    j has [C]; else its sums over t [j s]."""
    if HALF:
        found = tl.sum(held, 0) - tl.sum(held, 1)
    else:
        row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
        found = tl.dot((column >= row).to(ACC), held, input_precision="ieee", out_dtype=ACC)
    return found


@triton.jit
def of_gates(found, read, left, C: tl.constexpr, ACC: tl.constexpr, HALF: tl.constexpr):
    """Σ_{t>=j>s} held_ts + Σ_{t>=j} read_t + Σ_{s<j} left_s; found: `inside` of held."""
    if HALF:
        # from each gate to the next: sums of a chunk in float32 keep far more than the operands hold
        more = left - read + found
        dg = tl.sum(read, 0) + (tl.cumsum(more, 0) - more)
    else:
        # what a strong gate holds is not the difference of what others do
        row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
        dg = tl.sum(tl.where(column < row, found + left[None, :], read[None, :]), 1)
    return dg


@triton.jit(do_not_specialize=["scale", "T", "NR"])
def intra_bwd(
    x_r, x_k, x_do, x_v, x_S, x_dS, p_E, x_dr, x_dk, p_dg, scale, T, NR,
    H: tl.constexpr, HV: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    KB: tl.constexpr, NK: tl.constexpr, NS: tl.constexpr, TMA: tl.constexpr, ACC: tl.constexpr, DT: tl.constexpr,
    ST: tl.constexpr, HALF: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """One chunk of HEADS value heads of one key head; x_dr and x_dk have a sum for each such group: [B T HV/HEADS K]."""
    GROUPS: tl.constexpr = HV // HEADS
    # what is loaded in a step is a tile of values, of which a head has one or several
    ONE: tl.constexpr = V <= BV
    STEPS: tl.constexpr = NS if ONE else 1
    chunks = NR // C
    i_b = tl.program_id(0) // (GROUPS * chunks)
    i_chunk = tl.program_id(0) // GROUPS % chunks
    i_group = tl.program_id(0) % GROUPS
    i_k = i_group // (GROUPS // H)
    i_t = i_chunk * C
    o_c = tl.arange(0, C)
    o_t = i_t + o_c
    b_r = load_parts(x_r, i_b, i_t, i_k, T, H, K, C, KB, NK, TMA)
    b_k = load_parts(x_k, i_b, i_t, i_k, T, H, K, C, KB, NK, TMA)
    coupling = scores(b_r, b_k, NK, ACC)
    M = tl.zeros([C, C], ACC)
    dr = zeros(C, KB, NK, ACC)
    dk = zeros(C, KB, NK, ACC)
    for i in tl.range(0, HEADS, num_stages=STEPS):
        i_h = i_group * HEADS + i
        i_bh = i_b * HV + i_h
        i_state = i_bh * chunks + i_chunk
        p_factor = factors(p_E, i_bh, i_chunk, chunks, C)
        F = tl.zeros([C, C], ACC)
        read = tl.zeros([C], ACC)
        left = tl.zeros([C], ACC)
        X = tl.zeros([KB], ACC)
        if ONE:
            F, dr, dk, read, left, X = through_states(
                x_do, x_v, x_S, x_dS, b_r, b_k, p_factor, scale, i_b, i_t, i_h, 0, i_state, T, F, dr, dk, read, left, X,
                HV, K, V, C, BV, KB, NK, TMA, ACC, GATE,
            )  # fmt: skip
        else:
            for i_v in tl.range(0, V, BV, num_stages=NS):
                F, dr, dk, read, left, X = through_states(
                    x_do, x_v, x_S, x_dS, b_r, b_k, p_factor, scale, i_b, i_t, i_h, i_v, i_state, T, F, dr, dk, read, left, X,
                    HV, K, V, C, BV, KB, NK, TMA, ACC, GATE,
                )  # fmt: skip
        high, low = tl.load(p_factor + o_c), tl.load(p_factor + C + o_c)
        own = F * decay_of(high, low, C, False) * scale
        M += own
        if GATE:
            X_whole = tl.sum(X, 0) * tl.load(p_factor + 3 * C - 1)
            found = inside(tl.where(o_c[:, None] > o_c[None, :], own * coupling, 0.0), C, ACC, HALF)
            dg = of_gates(found, read, left, C, ACC, HALF) + X_whole
            tl.store(p_dg + (tl.cast(i_b, tl.int64) * T + o_t) * HV + i_h, dg, mask=o_t < T)
    b_M = M.to(ST)
    dr = plus_products(dr, b_M, b_k, NK)
    dk = plus_products(dk, tl.trans(b_M), b_r, NK)
    store_parts(x_dr, dr, 1.0, DT, i_b, i_t, i_group, T, GROUPS, K, C, KB, NK, TMA)
    store_parts(x_dk, dk, 1.0, DT, i_b, i_t, i_group, T, GROUPS, K, C, KB, NK, TMA)
