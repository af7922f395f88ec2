"""Backward, in one launch: the walk of dq, which is the forward's on dq̃, and the walk of dk, the gradient of the covariance from the last
chunk to the first. Neither waits for the other, and together they fill the machine.

A mass ω at the point μ + x changes the loss by ω (r − N x) when it moves, and by z + r·x − ½ xᵀN x when it grows. N is symmetric.
With ŷ = y/n, P and P̂ the scores of q and ŷ, and the chunk's keys k* = k − z* seen from z*,

    dk_s = ω_Cs (r − N k*_s) − Σ_t (P̂_ts q_t + P_ts ŷ_t)
    N ← e^{G_C} N + Σ_t e^{G_t} (q ŷᵀ + ŷ qᵀ)         r ← e^{G_C} r + Σ_t e^{G_t} (q_t ŷ·(μ_t−μ₀) + ŷ_t q·(μ_t−μ₀)), from μ₀

Means move along d = c − μ₀, and N d = (β m)⁻¹ Σ_s ω_Cs N k*_s is a sum of what dk needs anyway: no product is made for it. Going
back by δ, r ← r + N δ and z ← z − δ·(r + ½ N δ) with the old r. z of a tile of columns is that tile's share; the first tile's
holds what belongs to none.
"""

from itertools import product

import torch
import triton
import triton.language as tl

from needlework.ops.ccq.curvature.intra import add_product, case, merge_of, numbers, tokens, whole_of
from needlework.ops.ccq.curvature.scan import columns, load_block, read_chains, store_block
from needlework.ops.common.kernels.chain import part_here, run_of, tell, wait_for
from needlework.ops.common.kernels.tile import load_tile, store_tile
from needlework.ops.runtime.launch_configs import Case, LaunchConfig


@triton.jit
def reverse_chains(
    i_slot, slots,
    x_q_k, x_y_k, x_kc_k, x_q_v, x_y_v, x_kc_v, x_P_c, x_Py_c, x_dk_v, x_N_kv, p_Ey, p_G, p_n, p_mass, p_step, p_rsum, p_zsum,
    p_scale, p_N_in, p_r_in, p_z_in, p_grown, p_z, p_N_out, p_r_out, p_z_out, p_cum, p_hand, p_flag, T, NCB, N,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, KB: tl.constexpr, NK: tl.constexpr, NS: tl.constexpr,
    TMA: tl.constexpr, GATED: tl.constexpr, SEED: tl.constexpr, INIT: tl.constexpr, SCALED: tl.constexpr, ACC: tl.constexpr,
    OT: tl.constexpr,
):  # fmt: skip
    """One slot: dk, by chains as `read_chains`, run backwards; N is kept as Nᵀ [BV K]. SEED: the final state has a gradient; INIT: the
    first wants one, seen from its μ₀.

    Gated: after each chunk x_N gets N, p_grown [chunks H NV C] this tile's share of what a token's mass changes, p_z [chunks H NV]
    that of z seen from μ₀.
    """
    NV: tl.constexpr = (K + BV - 1) // BV
    PER: tl.constexpr = H * NV
    OWN: tl.constexpr = BV == KB
    APART: tl.constexpr = OT == ACC
    lo, hi, first, last = run_of(p_cum, N, i_slot, slots, PER)
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, KB)
    o_hand = tl.arange(0, BV)[:, None] * (NK * KB) + o_k[None, :]
    unscale = 1.0
    if SCALED:
        unscale = 1.0 / tl.load(p_scale)
    for i_chain in range(first, last + 1):
        i_n = i_chain // PER
        i_h = (i_chain % PER) // NV
        i_v = (i_chain % NV) * BV
        start, count, begin, late, c_from, c_to = part_here(p_cum, i_n, i_chain % PER, lo, hi, PER)
        i_b = start // NCB

        if late:
            wait_for(p_flag + i_slot)
        o_v = i_v + tl.arange(0, BV)
        o_nh = tl.cast(i_n, tl.int64) * H + i_h
        o_base = o_nh * (K * K)
        i_k0, i_k1 = columns(i_v, KB, NK, OWN)
        o_state = o_v[:, None] * K + (i_k0 + o_k)[None, :]
        inside = (o_v < K)[:, None] & (i_k0 + o_k < K)[None, :]
        # of a slot: N [BV NK·KB], then r and z [BV] each
        p_late = p_hand + tl.cast(i_slot, tl.int64) * (BV * (NK * KB + 2))
        o_side = BV * NK * KB + tl.arange(0, BV)
        N0 = tl.load(p_late + o_hand, mask=inside & late, other=0.0)
        b_r = tl.load(p_late + o_side, mask=(o_v < K) & late, other=0.0)
        z = tl.sum(tl.load(p_late + BV + o_side, mask=(o_v < K) & late, other=0.0), 0)
        if SEED:
            ends = c_from == 0
            N0 += tl.load(p_N_in + o_base + o_state, mask=inside & ends, other=0.0)
            b_r += tl.load(p_r_in + o_nh * K + o_v, mask=(o_v < K) & ends, other=0.0)
            z += tl.where((i_v == 0) & ends, tl.load(p_z_in + o_nh), 0.0)
        if NK == 2:
            o_state1 = o_v[:, None] * K + (i_k1 + o_k)[None, :]
            inside1 = (o_v < K)[:, None] & (i_k1 + o_k < K)[None, :]
            N1 = tl.load(p_late + KB + o_hand, mask=inside1 & late, other=0.0)
            if SEED:
                N1 += tl.load(p_N_in + o_base + o_state1, mask=inside1 & ends, other=0.0)

        for i_c in tl.range(c_from, c_to, num_stages=NS):
            i = start + count - 1 - i_c
            i_t = (i - i_b * NCB) * C
            o_ih = tl.cast(i, tl.int64) * H + i_h
            # all loads first: they share barriers
            b_k0 = load_tile(x_kc_k, i_b, i_t, i_h, i_k0, T, H, K, C, KB, TMA)
            b_q0 = load_tile(x_q_k, i_b, i_t, i_h, i_k0, T, H, K, C, KB, TMA)
            b_y0 = load_tile(x_y_k, i_b, i_t, i_h, i_k0, T, H, K, C, KB, TMA)
            if NK == 2:
                b_k1 = load_tile(x_kc_k, i_b, i_t, i_h, i_k1, T, H, K, C, KB, TMA)
                b_q1 = load_tile(x_q_k, i_b, i_t, i_h, i_k1, T, H, K, C, KB, TMA)
                b_y1 = load_tile(x_y_k, i_b, i_t, i_h, i_k1, T, H, K, C, KB, TMA)
            if OWN:
                b_qv, b_yv, b_kv = b_q0, b_y0, b_k0
            else:
                b_qv = load_tile(x_q_v, i_b, i_t, i_h, i_v, T, H, K, C, BV, TMA)
                b_yv = load_tile(x_y_v, i_b, i_t, i_h, i_v, T, H, K, C, BV, TMA)
                if GATED:
                    b_kv = load_tile(x_kc_v, i_b, i_t, i_h, i_v, T, H, K, C, BV, TMA)
            b_P = load_block(x_P_c, i, i_h, 0, 0, H, C, C, C, TMA)
            b_Py = load_block(x_Py_c, i, i_h, 0, 0, H, C, C, C, TMA)

            b_N0 = N0.to(OT)
            moved = tl.dot(b_N0, tl.trans(b_k0), input_precision="ieee", out_dtype=ACC)
            if GATED:
                store_block(x_N_kv, b_N0, i, i_h, i_v, i_k0, H, K, BV, KB, TMA)
            if NK == 2:
                b_N1 = N1.to(OT)
                moved = add_product(moved, b_N1, tl.trans(b_k1), ACC, APART)
                if GATED:
                    store_block(x_N_kv, b_N1, i, i_h, i_v, i_k1, H, K, BV, KB, TMA)

            b_factor = tl.load(tokens(p_Ey, o_ih, 1, C))[None, :]
            by_y = tl.trans(b_yv).to(ACC) * b_factor
            b_yf = by_y.to(OT)
            pairs = tl.dot(tl.trans(b_qv), b_Py, input_precision="ieee", out_dtype=ACC)
            pairs = add_product(pairs, b_yf, b_P, ACC, APART)

            a = whole_of(p_G, o_ih, C, GATED)
            beta, near, share = merge_of(p_n, p_mass, o_ih, a)
            per_m = 1.0 / tl.maximum(tl.load(p_mass + o_ih), 1.0)
            if GATED:
                b_left = tl.load(tokens(p_Ey, o_ih, 5, C))[None, :]
                b_sum = tl.sum(moved * b_left, 1) * per_m
            else:
                # k* is 0 where there is no token
                b_sum = tl.sum(moved, 1) * per_m
            # from the mean after the chunk to z*, and to μ₀
            to_centre = near * b_sum
            to_mean = tl.where(beta > 0, share / tl.maximum(beta, 1e-30), 0.0) * b_sum
            b_here = numbers(p_rsum, o_ih, i_v, K, BV)
            if GATED or INIT:
                b_d = numbers(p_step, o_ih, i_v, K, BV)
                z_centre = z - beta * near * tl.sum(b_d * (b_r + 0.5 * to_centre), 0)
                z -= share * tl.sum(b_d * (b_r + 0.5 * to_mean), 0)
            b_seen = b_r + to_centre
            moved = b_seen[:, None] - moved
            b_r = a * (b_r + to_mean) + b_here
            if GATED:
                b_grown = 0.5 * tl.sum(tl.trans(b_kv).to(ACC) * (b_seen[:, None] + moved), 0) + z_centre
                tl.store(p_grown + (o_ih * NV + i_v // BV) * C + o_c, b_grown)
                tl.store(p_z + o_ih * NV + i_v // BV, z)
                moved *= b_left
                b_decay = tl.load(tokens(p_Ey, o_ih, 6, C))[None, :]
                b_yf = (by_y * b_decay).to(OT)
                b_factor *= b_decay
                N0 *= a
            if GATED or INIT:
                z = a * z + tl.where(i_v == 0, tl.load(p_zsum + o_ih), 0.0)
            b_dk = ((moved - pairs) * unscale).to(OT)

            b_qf = (tl.trans(b_qv).to(ACC) * b_factor).to(OT)
            N0 = add_product(N0, b_qf, b_y0, ACC, APART)
            N0 = add_product(N0, b_yf, b_q0, ACC, APART)
            if NK == 2:
                if GATED:
                    N1 *= a
                N1 = add_product(N1, b_qf, b_y1, ACC, APART)
                N1 = add_product(N1, b_yf, b_q1, ACC, APART)
            # last, while the state's product is under way
            store_tile(x_dk_v, tl.trans(b_dk), i_b, i_t, i_h, i_v, T, H, K, C, BV, TMA)

        if INIT:
            done = c_to == count
            # + 0, read again: the compiler would otherwise keep the offsets in registers through the loop
            o_v = i_v + tl.load(p_cum + i_n, volatile=True) - start + tl.arange(0, BV)
            o_first = o_v[:, None] * K + o_k[None, :]
            tl.store(p_N_out + o_base + i_k0 + o_first, N0, mask=(o_v < K)[:, None] & (i_k0 + o_k < K)[None, :] & done)
            if NK == 2:
                tl.store(p_N_out + o_base + i_k1 + o_first, N1, mask=(o_v < K)[:, None] & (i_k1 + o_k < K)[None, :] & done)
            tl.store(p_r_out + o_nh * K + o_v, b_r, mask=(o_v < K) & done)
            tl.store(p_z_out + o_nh * NV + i_v // BV, z, mask=done)
        if begin > 0:
            p_early = p_late - BV * (NK * KB + 2)
            tl.store(p_early + o_hand, N0)
            if NK == 2:
                tl.store(p_early + KB + o_hand, N1)
            tl.store(p_early + o_side, b_r)
            tl.store(p_early + BV + o_side, tl.where(o_v == i_v, z, 0.0))
            tell(p_flag + i_slot - 1)


@triton.jit(do_not_specialize=["T", "NCB", "N", "NR"])
def backward(
    x_q_k, x_y_k, x_kc_k, x_q_v, x_y_v, x_kc_v, x_base_v, x_P_c, x_Py_c, x_dq_v, x_dk_v, x_C0_kv, x_N_kv,
    p_Ey, p_G, p_n, p_mass, p_step, p_rsum, p_zsum, p_scale, p_initial_C, p_reach, p_N_in, p_r_in, p_z_in, p_grown, p_z,
    p_N_out, p_r_out, p_z_out, p_cum, p_hand, p_flag, T, NCB, N, NR,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, KB: tl.constexpr, NK: tl.constexpr,
    NS: tl.constexpr, TMA: tl.constexpr, GATED: tl.constexpr, SEED: tl.constexpr, INIT: tl.constexpr, SCALED: tl.constexpr,
    ACC: tl.constexpr, OT: tl.constexpr,
):  # fmt: skip
    """The first NR programs are the slots of dk, the others those of dq; slots are numbered against program ids."""
    if tl.program_id(0) < NR:
        reverse_chains(
            NR - 1 - tl.program_id(0), NR,
            x_q_k, x_y_k, x_kc_k, x_q_v, x_y_v, x_kc_v, x_P_c, x_Py_c, x_dk_v, x_N_kv, p_Ey, p_G, p_n, p_mass, p_step, p_rsum, p_zsum,
            p_scale, p_N_in, p_r_in, p_z_in, p_grown, p_z, p_N_out, p_r_out, p_z_out, p_cum, p_hand, p_flag, T, NCB, N,
            H, K, C, BV, KB, NK, NS, TMA, GATED, SEED, INIT, SCALED, ACC, OT,
        )  # fmt: skip
    else:
        read_chains(
            tl.num_programs(0) - 1 - tl.program_id(0), tl.num_programs(0) - NR,
            x_y_k, x_kc_k, x_kc_v, x_base_v, x_q_v, x_Py_c, x_dq_v, None, x_C0_kv, p_Ey, None, p_G, p_n, p_step, p_reach, p_scale,
            p_initial_C, None, None, None, p_cum, p_hand + tl.cast(NR, tl.int64) * (BV * (NK * KB + 2)), p_flag + NR, T, NCB, N,
            H, HV, K, C, BV, KB, NK, NS, TMA, GATED, INIT, True, False, SCALED, None, ACC, OT,
        )  # fmt: skip


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    kinds = product((False, True), (False, True), (1, 2))
    return [case(backward, "backward", config, dtype, K, GATED=gated, SEED=seed, INIT=seed, HV=HV) for gated, seed, HV in kinds]
