"""`intra_bwd` of one value head, where a key has no second one that a program could sum: dk is done before dr begins.

A program holds one gradient at a time, and loads values and states again for the second: on Hopper four warps spill nothing.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.parts import cast, inner, load_parts, plus_products, scores, store_parts, times, zeros
from needlework.ops.common.kernels.tile import load_tile
from needlework.ops.delta.additive.intra import decay_of, factors
from needlework.ops.delta.additive.intra_bwd import inside, of_gates, plus_measure


@triton.jit(do_not_specialize=["scale", "T", "NR"])
def alone(
    x_r, x_k, x_do, x_v, x_S, x_dS, p_E, x_dr, x_dk, p_dg, scale, T, NR,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, KB: tl.constexpr,
    NK: tl.constexpr, NS: tl.constexpr, TMA: tl.constexpr, ACC: tl.constexpr, DT: tl.constexpr, ST: tl.constexpr,
    HALF: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head; x_dr and x_dk [B T HV K]."""
    chunks = NR // C
    i_bh = tl.program_id(0) // HV // chunks * HV + tl.program_id(0) % HV
    i_b, i_h = i_bh // HV, i_bh % HV
    i_k = i_h // (HV // H)
    i_chunk = tl.program_id(0) // HV % chunks
    i_t, i_state = i_chunk * C, i_bh * chunks + i_chunk
    o_c = tl.arange(0, C)
    p_factor = factors(p_E, i_bh, i_chunk, chunks, C)
    F = tl.zeros([C, C], ACC)
    found, left, X = tl.zeros([C], ACC), tl.zeros([C], ACC), tl.zeros([KB], ACC)
    for i_v in tl.range(0, V, BV, num_stages=NS):
        b_do = load_tile(x_do, i_b, i_t, i_h, i_v, T, HV, V, C, BV, TMA)
        b_v = load_tile(x_v, i_b, i_t, i_h, i_v, T, HV, V, C, BV, TMA)
        F = tl.dot(b_do, tl.trans(b_v), F, input_precision="ieee", out_dtype=ACC)
    high, low = tl.load(p_factor + o_c), tl.load(p_factor + C + o_c)
    own = F * decay_of(high, low, C, False) * scale
    b_M = own.to(ST)
    b_r = load_parts(x_r, i_b, i_t, i_k, T, H, K, C, KB, NK, TMA)
    b_k = load_parts(x_k, i_b, i_t, i_k, T, H, K, C, KB, NK, TMA)
    if GATE:
        coupling = scores(b_r, b_k, NK, ACC)
        found = inside(tl.where(o_c[:, None] > o_c[None, :], own * coupling, 0.0), C, ACC, HALF)

    d = zeros(C, KB, NK, ACC)
    for i_v in tl.range(0, V, BV, num_stages=NS):
        b_dS = load_parts(x_dS, i_state, i_v, 0, V, 1, K, BV, KB, NK, TMA)
        if GATE:
            X = plus_measure(X, load_parts(x_S, i_state, i_v, 0, V, 1, K, BV, KB, NK, TMA), b_dS, NK, ACC)
        b_v = load_tile(x_v, i_b, i_t, i_h, i_v, T, HV, V, C, BV, TMA)
        d = plus_products(d, b_v, b_dS, NK)
    d = times(d, tl.load(p_factor + 3 * C + o_c)[:, None], NK)
    if GATE:
        left = inner(cast(b_k, ACC, NK), d, NK)
    d = plus_products(d, tl.trans(b_M), b_r, NK)
    store_parts(x_dk, d, 1.0, DT, i_b, i_t, i_h, T, HV, K, C, KB, NK, TMA)

    d = zeros(C, KB, NK, ACC)
    for i_v in tl.range(0, V, BV, num_stages=NS):
        b_S = load_parts(x_S, i_state, i_v, 0, V, 1, K, BV, KB, NK, TMA)
        b_do = load_tile(x_do, i_b, i_t, i_h, i_v, T, HV, V, C, BV, TMA)
        d = plus_products(d, b_do, b_S, NK)
    d = times(d, (tl.load(p_factor + 2 * C + o_c) * scale)[:, None], NK)
    if GATE:
        read = inner(cast(b_r, ACC, NK), d, NK)
        dg = of_gates(found, read, left, C, ACC, HALF) + tl.sum(X, 0) * tl.load(p_factor + 3 * C - 1)
        o_t = i_t + o_c
        tl.store(p_dg + (tl.cast(i_b, tl.int64) * T + o_t) * HV + i_h, dg, mask=o_t < T)
    d = plus_products(d, b_M, b_k, NK)
    store_parts(x_dr, d, 1.0, DT, i_b, i_t, i_h, T, HV, K, C, KB, NK, TMA)
