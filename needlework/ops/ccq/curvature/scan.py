"""The chunks of a sequence in order: what each query reads of the covariance, kept in registers as Mᵀ [BV K], M = C.

    Σ_t x = n_t⁻¹ [e^{G_t} C₀ x + Σ_s P_ts k*_s + e^{G_t} n₀ (x·(μ_t − μ₀)) (z − μ₀)],   P_ts = ω_ts x_t·(k_s − μ_t)
    C ← e^{G_C} C + Σ_s ω_Cs k*_s k*_sᵀ,   k*_s = k_s − z

Every product takes Mᵀ or tokens' columns as its first operand and loaded tiles as its second. M's columns are NK tiles of KB; where
they are as wide as BV a program's first tile is of its own rows, so that what it loads of k* and x serves both sides of M. Slots and
chains are those of the delta rules' scan: chains laid end to end, cut into equal runs. Operands are of the caller's type; in float16
what is read is C/n₀, which it can hold at any length.
"""

import torch
import triton
import triton.language as tl

from needlework.ops.ccq.curvature.intra import add_product, case, numbers, tokens, whole_of
from needlework.ops.common.kernels.chain import part_here, run_of, tell, wait_for
from needlework.ops.common.kernels.tile import load_tile, store_tile
from needlework.ops.runtime.launch_configs import Case, LaunchConfig
from needlework.ops.slots.kernels import slot_of
from needlework.ops.slots.rows import OF_TABLE


@triton.jit
def load_block(x, i, i_h, i_r, i_c, H: tl.constexpr, M: tl.constexpr, R: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr):
    """[R D] from row i_r and column i_c of chunk i's matrix, of x [chunks H M M]."""
    if TMA:
        b = tl.reshape(x.load([i, i_h, i_r, i_c]), [R, D])
    else:
        o_r, o_d = i_r + tl.arange(0, R), i_c + tl.arange(0, D)
        o = (tl.cast(i, tl.int64) * H + i_h) * (M * M) + o_r[:, None] * M + o_d[None, :]
        b = tl.load(x + o, mask=(o_r < M)[:, None] & (o_d < M)[None, :], other=0.0)
    return b


@triton.jit
def store_block(x, b, i, i_h, i_r, i_c, H: tl.constexpr, M: tl.constexpr, R: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr):
    """The inverse of `load_block`."""
    if TMA:
        x.store([i, i_h, i_r, i_c], tl.reshape(b, [1, 1, R, D]))
    else:
        o_r, o_d = i_r + tl.arange(0, R), i_c + tl.arange(0, D)
        o = (tl.cast(i, tl.int64) * H + i_h) * (M * M) + o_r[:, None] * M + o_d[None, :]
        tl.store(x + o, b, mask=(o_r < M)[:, None] & (o_d < M)[None, :])


@triton.jit
def columns(i_v, KB: tl.constexpr, NK: tl.constexpr, OWN: tl.constexpr):
    """Where the tiles of M's columns start: the program's own rows' first, if one tile is as wide."""
    first = 0
    second = KB
    if OWN and NK == 2:
        first = i_v
        second = KB - i_v
    return first, second


@triton.jit
def read_chains(
    i_slot, slots,
    x_x_k, x_kc_k, x_kc_v, x_base_v, x_q_v, x_P_c, x_out_v, x_Sx_v, x_C0_kv, p_E, p_eta_chunks, p_G, p_n, p_step, p_reach, p_scale,
    p_initial_C, p_final_C, p_slots, p_fresh, p_cum, p_hand, p_flag, T, NCB, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, KB: tl.constexpr, NK: tl.constexpr,
    NS: tl.constexpr, TMA: tl.constexpr, GATED: tl.constexpr, INIT: tl.constexpr, BACKWARD: tl.constexpr, SAVE: tl.constexpr,
    SCALED: tl.constexpr, STRIDE: tl.constexpr, ACC: tl.constexpr, OT: tl.constexpr,
):  # fmt: skip
    """One slot. Forward: x = base = q, out = q̃ and the final C, with SAVE also Σq. BACKWARD: x = y, base = dq̃ summed over a group's heads
    (`fold`), out = dq.

    Gated, BACKWARD: x_C0 gets C₀ (SCALED: C₀/n₀), and p_reach [chunks H NV C] this tile's share of e^{G_t} ŷ_tᵀ C₀ q_t.

    STRIDE: p_initial_C and p_final_C are one table, with so many numbers from slot to slot. A chain reads and writes its own rows of C in
    place, and no others. Where it is cut, one program reads them and another writes them, after it has waited for the state that the
    first made of what it read.
    """
    NV: tl.constexpr = (K + BV - 1) // BV
    PER: tl.constexpr = H * NV
    GROUP: tl.constexpr = HV // H
    OWN: tl.constexpr = BV == KB
    APART: tl.constexpr = OT == ACC
    lo, hi, first, last = run_of(p_cum, N, i_slot, slots, PER)
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, KB)
    o_hand = tl.arange(0, BV)[:, None] * (NK * KB) + o_k[None, :]
    unscale = 1.0
    if BACKWARD and SCALED:
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
        o_base = (tl.cast(i_n, tl.int64) * H + i_h) * (K * K)
        if STRIDE is not None:
            slot, resumed = slot_of(p_slots, p_fresh, i_n)
            o_base = slot * STRIDE + i_h * (K * K)
        i_k0, i_k1 = columns(i_v, KB, NK, OWN)
        o_state = o_v[:, None] * K + (i_k0 + o_k)[None, :]
        inside = (o_v < K)[:, None] & (i_k0 + o_k < K)[None, :]
        p_late = p_hand + tl.cast(i_slot, tl.int64) * (BV * NK * KB)
        M0 = tl.load(p_late + o_hand, mask=inside & late, other=0.0)
        if INIT:
            known = c_from == 0
            if STRIDE is not None:
                known &= resumed
            M0 += tl.load(p_initial_C + o_base + o_state, mask=inside & known, other=0.0).to(ACC)
        if NK == 2:
            o_state1 = o_v[:, None] * K + (i_k1 + o_k)[None, :]
            inside1 = (o_v < K)[:, None] & (i_k1 + o_k < K)[None, :]
            M1 = tl.load(p_late + KB + o_hand, mask=inside1 & late, other=0.0)
            if INIT:
                M1 += tl.load(p_initial_C + o_base + o_state1, mask=inside1 & known, other=0.0).to(ACC)

        for i_c in tl.range(c_from, c_to, num_stages=NS):
            i = start + i_c
            i_t = (i - i_b * NCB) * C
            o_ih = tl.cast(i, tl.int64) * H + i_h
            # all loads first: they share barriers
            b_x0 = load_tile(x_x_k, i_b, i_t, i_h, i_k0, T, H, K, C, KB, TMA)
            b_k0 = load_tile(x_kc_k, i_b, i_t, i_h, i_k0, T, H, K, C, KB, TMA)
            if NK == 2:
                b_x1 = load_tile(x_x_k, i_b, i_t, i_h, i_k1, T, H, K, C, KB, TMA)
                b_k1 = load_tile(x_kc_k, i_b, i_t, i_h, i_k1, T, H, K, C, KB, TMA)
            b_P = load_block(x_P_c, i, i_h, 0, 0, H, C, C, C, TMA)
            if OWN:
                b_kv = b_k0
            else:
                b_kv = load_tile(x_kc_v, i_b, i_t, i_h, i_v, T, H, K, C, BV, TMA)
            if OWN and (not BACKWARD or (GROUP == 1 and not SCALED)):
                b_base = b_x0
            else:
                b_base = load_tile(x_base_v, i_b, i_t, i_h, i_v, T, H, K, C, BV, TMA)
            if BACKWARD and GATED:
                b_qv = load_tile(x_q_v, i_b, i_t, i_h, i_v, T, H, K, C, BV, TMA)

            if SCALED:
                per_n = 1.0 / tl.maximum(tl.load(p_n + o_ih), 1.0)
                b_M0 = (M0 * per_n).to(OT)
            else:
                b_M0 = M0.to(OT)
            read = tl.dot(b_M0, tl.trans(b_x0), input_precision="ieee", out_dtype=ACC)
            if BACKWARD and GATED:
                store_block(x_C0_kv, b_M0, i, i_h, i_v, i_k0, H, K, BV, KB, TMA)
            if NK == 2:
                if SCALED:
                    b_M1 = (M1 * per_n).to(OT)
                else:
                    b_M1 = M1.to(OT)
                read = add_product(read, b_M1, tl.trans(b_x1), ACC, APART)
                if BACKWARD and GATED:
                    store_block(x_C0_kv, b_M1, i, i_h, i_v, i_k1, H, K, BV, KB, TMA)

            read *= tl.load(tokens(p_E, o_ih, 0, C))[None, :]
            if BACKWARD and GATED:
                b_reach = tl.sum(read * tl.trans(b_qv).to(ACC), 0)
                tl.store(p_reach + (o_ih * NV + i_v // BV) * C + o_c, b_reach)
            b_d = numbers(p_step, o_ih, i_v, K, BV)
            read += b_d[:, None] * tl.load(tokens(p_E, o_ih, 2, C))[None, :]
            out = add_product(read, tl.trans(b_kv), tl.trans(b_P), ACC, APART)

            b_left = tl.trans(b_kv)
            if GATED:
                b_left = (b_left.to(ACC) * tl.load(tokens(p_E, o_ih, 5, C))[None, :]).to(OT)
                a = whole_of(p_G, o_ih, C, GATED)
                M0 *= a
            M0 = add_product(M0, b_left, b_k0, ACC, APART)
            if NK == 2:
                if GATED:
                    M1 *= a
                M1 = add_product(M1, b_left, b_k1, ACC, APART)

            # last, while the state's product is under way
            if BACKWARD:
                b_out = tl.trans(b_base).to(ACC) - unscale * out
                store_tile(x_out_v, tl.trans(b_out.to(OT)), i_b, i_t, i_h, i_v, T, H, K, C, BV, TMA)
            else:
                out *= tl.load(tokens(p_E, o_ih, 1, C))[None, :]
                if SAVE:
                    store_tile(x_Sx_v, tl.trans(out.to(OT)), i_b, i_t, i_h, i_v, T, H, K, C, BV, TMA)
                b_q = tl.trans(b_base).to(ACC)
                for j in tl.static_range(GROUP):
                    b_eta = tl.load(p_eta_chunks + (o_ih * GROUP + j) * C + o_c)
                    b_clean = (b_q - b_eta[None, :] * out).to(OT)
                    store_tile(x_out_v, tl.trans(b_clean), i_b, i_t, i_h * GROUP + j, i_v, T, HV, K, C, BV, TMA)

        done = c_to == count
        if STRIDE is not None:
            slot, resumed = slot_of(p_slots, p_fresh, i_n)  # again: as below
            o_base = slot * STRIDE + i_h * (K * K)
            done &= slot >= 0
            tl.debug_barrier()  # a number that two threads hold is read by both before one of them writes it
        if not BACKWARD:
            # + 0, read again: the compiler would otherwise keep the offsets in registers through the loop
            o_v = i_v + tl.load(p_cum + i_n, volatile=True) - start + tl.arange(0, BV)
            o_final = o_v[:, None] * K + o_k[None, :]
            tl.store(p_final_C + o_base + i_k0 + o_final, M0, mask=(o_v < K)[:, None] & (i_k0 + o_k < K)[None, :] & done)
            if NK == 2:
                tl.store(p_final_C + o_base + i_k1 + o_final, M1, mask=(o_v < K)[:, None] & (i_k1 + o_k < K)[None, :] & done)
        if begin > 0:
            p_early = p_late - BV * NK * KB
            tl.store(p_early + o_hand, M0)
            if NK == 2:
                tl.store(p_early + KB + o_hand, M1)
            tell(p_flag + i_slot - 1)


@triton.jit(do_not_specialize=["T", "NCB", "N"])
def walk(
    x_q_k, x_kc_k, x_kc_v, x_q_v, x_P_c, x_out_v, x_Sq_v, p_E, p_eta_chunks, p_G, p_n, p_step, p_initial_C, p_final_C, p_slots, p_fresh, p_cum,
    p_hand, p_flag, T, NCB, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, KB: tl.constexpr, NK: tl.constexpr,
    NS: tl.constexpr, TMA: tl.constexpr, GATED: tl.constexpr, INIT: tl.constexpr, SAVE: tl.constexpr, SCALED: tl.constexpr,
    STRIDE: tl.constexpr, ACC: tl.constexpr, OT: tl.constexpr,
):  # fmt: skip
    """q̃, the final C, with SAVE also Σq. Slots are numbered against program ids: a program only waits for one started earlier."""
    slots = tl.num_programs(0)
    read_chains(
        slots - 1 - tl.program_id(0), slots,
        x_q_k, x_kc_k, x_kc_v, x_q_v, x_q_v, x_P_c, x_out_v, x_Sq_v, None, p_E, p_eta_chunks, p_G, p_n, p_step, None, None,
        p_initial_C, p_final_C, p_slots, p_fresh, p_cum, p_hand, p_flag, T, NCB, N,
        H, HV, K, C, BV, KB, NK, NS, TMA, GATED, INIT, False, SAVE, SCALED, STRIDE, ACC, OT,
    )  # fmt: skip


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    cases = []
    for gated in (False, True):
        given = {"GATED": gated, "INIT": True}
        cases.append(case(walk, "walk", config, dtype, K, **given, SAVE=False, STRIDE=2 * K * K))
        cases.append(case(walk, "walk", config, dtype, K, none=tuple(OF_TABLE), **given, SAVE=True, STRIDE=None))
    return cases
