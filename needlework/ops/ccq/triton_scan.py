"""The chunks of a sequence in order, with BV rows of the centred second moment C in registers. C is symmetric, so its rows are
the state's transpose, and enter every product as the first operand, from registers:

    (Σx)ᵀ = n⁻¹ (e^G ⊙ C xᵀ + k'ᵀ Pᵀ)      C ← e^{G_C} C + (ω_C (k' − δ))ᵀ k'

δ moves the centre from μ₀ to the mean at the chunk's end. One program a sequence, key head and tile of BV rows.
"""

import torch
import triton
import triton.language as tl

from needlework.ops.ccq.triton_intra import case, load_tile, store_tile
from needlework.ops.common.launch import Case, Plan


@triton.jit
def state_tile(i_nh, i_v, K: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr):
    """Offsets of BV rows from i_v in a state [... K K], and which exist."""
    o_v = i_v + tl.arange(0, BV)
    o_k = tl.arange(0, BK)
    return tl.cast(i_nh, tl.int64) * (K * K) + o_v[:, None] * K + o_k[None, :], (o_v < K)[:, None] & (o_k < K)[None, :]


@triton.jit(do_not_specialize=["T", "NCB"])
def scan(
    x_x, x_kc, x_kcv, x_kd, x_xv, x_out, x_Sx, p_eta, p_P, p_decay, p_inv, p_C_in, p_C_out, p_cum, p_scale, T, NCB,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NS: tl.constexpr,
    TMA: tl.constexpr, GATED: tl.constexpr, BACKWARD: tl.constexpr, SAVE: tl.constexpr, ACC: tl.constexpr, OT: tl.constexpr,
):  # fmt: skip
    """Forward: x = q, x_xv its tiles; out = q̃, with SAVE also Σq. BACKWARD: x = y/n, x_xv the tiles of dq̃, out = dq."""
    GROUP: tl.constexpr = HV // H
    NV: tl.constexpr = (K + BV - 1) // BV
    pid = tl.program_id(0)
    i_v = (pid % NV) * BV
    i_h = (pid // NV) % H
    i_n = pid // (NV * H)
    o_c = tl.arange(0, C)
    o_state, inside = state_tile(i_n * H + i_h, i_v, K, BV, BK)
    M = tl.load(p_C_in + o_state, mask=inside, other=0.0).to(ACC)
    if BACKWARD:
        unscale = 1.0 / tl.load(p_scale)

    start, end = tl.load(p_cum + i_n), tl.load(p_cum + i_n + 1)
    for i in tl.range(start, end, num_stages=NS):
        o_ih = tl.cast(i, tl.int64) * H + i_h
        b_x = load_tile(x_x, i, i_h, 0, T, NCB, H, K, C, BK, TMA)
        b_kc = load_tile(x_kc, i, i_h, 0, T, NCB, H, K, C, BK, TMA)
        b_kv = load_tile(x_kcv, i, i_h, i_v, T, NCB, H, K, C, BV, TMA)
        b_P = tl.load(p_P + o_ih * (C * C) + o_c[:, None] * C + o_c[None, :])
        b_out = tl.dot(M.to(OT), tl.trans(b_x), input_precision="ieee", out_dtype=ACC)
        if GATED:
            b_decay = tl.load(p_decay + o_ih * C + o_c)
            b_out *= b_decay[None, :]
        b_out = tl.dot(tl.trans(b_kv), tl.trans(b_P), b_out, input_precision="ieee", out_dtype=ACC)

        b_kd = load_tile(x_kd, i, i_h, i_v, T, NCB, H, K, C, BV, TMA)
        if GATED:
            M *= tl.load(p_decay + o_ih * C + C - 1)
        M = tl.dot(tl.trans(b_kd), b_kc, M, input_precision="ieee", out_dtype=ACC)

        i_b = i // NCB
        o_t = (i - i_b * NCB) * C + o_c
        if BACKWARD:
            b_out = -unscale * b_out
            for j in tl.static_range(GROUP):
                b_do = load_tile(x_xv, i, i_h * GROUP + j, i_v, T, NCB, HV, K, C, BV, TMA)
                b_out += tl.trans(b_do).to(ACC)
            store_tile(x_out, tl.trans(b_out).to(OT), i, i_h, i_v, T, NCB, H, K, C, BV, TMA)
        else:
            b_out *= tl.load(p_inv + o_ih * C + o_c)[None, :]
            b_Sx = tl.trans(b_out)
            if SAVE:
                store_tile(x_Sx, b_Sx.to(OT), i, i_h, i_v, T, NCB, H, K, C, BV, TMA)
            b_xv = load_tile(x_xv, i, i_h, i_v, T, NCB, H, K, C, BV, TMA).to(ACC)
            for j in tl.static_range(GROUP):
                o_eta = (tl.cast(i_b, tl.int64) * T + o_t) * HV + i_h * GROUP + j
                b_eta = tl.load(p_eta + o_eta, mask=o_t < T, other=0.0).to(ACC)
                b_clean = b_xv - b_eta[:, None] * b_Sx
                store_tile(x_out, b_clean.to(OT), i, i_h * GROUP + j, i_v, T, NCB, HV, K, C, BV, TMA)
    if not BACKWARD:
        # + 0, read again: the compiler would otherwise keep the offsets in registers through the loop
        i_v += tl.load(p_cum + i_n, volatile=True) - start
        o_state, inside = state_tile(i_n * H + i_h, i_v, K, BV, BK)
        tl.store(p_C_out + o_state, M, mask=inside)


def compile_cases(plan: Plan, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    flags = [{"BACKWARD": False, "SAVE": False}, {"BACKWARD": False, "SAVE": True}, {"BACKWARD": True, "SAVE": False}]
    return [case(scan, "scan", plan, dtype, K, GATED=gated, **flag) for gated in (False, True) for flag in flags]
