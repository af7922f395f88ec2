"""Backward: what each chunk needs before the walks (`scan_bwd.py`), all at once, and the gates' gradient behind them."""

import torch
import triton
import triton.language as tl

from needlework.ops.ccq.curvature.intra import (
    add_product,
    case,
    merge_of,
    numbers,
    real_tokens,
    store_pairs,
    tokens,
    weights,
    whole_of,
)
from needlework.ops.common.kernels.tile import load_tile, store_tile
from needlework.ops.runtime.launch_configs import Case, LaunchConfig
from needlework.ops.runtime.triton_types import padded


@triton.jit(do_not_specialize=["T", "NCB"])
def fold(
    p_dout, p_eta, p_Sq, p_fill, p_scale, p_y, p_base, p_deta, T, NCB,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr,
    SCALED: tl.constexpr, ACC: tl.constexpr, OT: tl.constexpr,
):  # fmt: skip
    """Of a chunk y_t = scale Σ_j λ_tj dq̃_tj over the value heads of a key head, and dλ; base_t = Σ_j dq̃_tj where there are several."""
    GROUP: tl.constexpr = HV // H
    i = tl.program_id(0) // H
    i_h = tl.program_id(0) % H
    i_b = i // NCB
    i_t = (i - i_b * NCB) * C
    if real_tokens(p_fill, i, i_t, T, C, PACKED) == 0:
        return  # of no sequence
    o_t = i_t + tl.arange(0, C)
    b_Sq = load_tile(p_Sq, i_b, i_t, i_h, 0, T, H, K, C, BK, 0).to(ACC)
    b_y = tl.zeros([C, BK], ACC)
    b_base = tl.zeros([C, BK], ACC)
    for j in tl.static_range(GROUP):
        o_eta = (tl.cast(i_b, tl.int64) * T + o_t) * HV + i_h * GROUP + j
        b_eta = tl.load(p_eta + o_eta, mask=o_t < T, other=0.0).to(ACC)
        b_do = load_tile(p_dout, i_b, i_t, i_h * GROUP + j, 0, T, HV, K, C, BK, 0).to(ACC)
        b_y += b_eta[:, None] * b_do
        b_base += b_do
        tl.store(p_deta + o_eta, -tl.sum(b_do * b_Sq, 1), mask=o_t < T)
    if SCALED:
        b_y *= tl.load(p_scale)
    store_tile(p_y, b_y.to(OT), i_b, i_t, i_h, 0, T, H, K, C, BK, 0)
    if GROUP > 1:
        store_tile(p_base, b_base, i_b, i_t, i_h, 0, T, H, K, C, BK, 0)


@triton.jit(do_not_specialize=["T", "NCB"])
def adjoint(
    p_q, p_kc, p_y, p_Sq, p_eta, p_E, p_G, p_fill, p_step, p_n, p_mass, p_Py, p_Ey, p_deta, p_rsum, p_zsum, T, NCB,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, GATED: tl.constexpr,
    PACKED: tl.constexpr, HALF: tl.constexpr, SCALED: tl.constexpr, ACC: tl.constexpr, OT: tl.constexpr,
):  # fmt: skip
    """P̂ of a chunk and key head, the backward's rows of `tokens`, what its queries bring to r and z before it. Where y is not
    folded it is dq̃: λ is in its factor, and dλ is made here.

    Gated: what g_t of the chunk's tokens changes through readers and keys of the chunk is row 4; summed over r ≥ t, row 3 less
    e^{G_r} ŷ_rᵀ C₀ q_r is what it changes through its readers of C₀. With ŝ, s the centred scores of ŷ and q,

        row 4: Σ_{r≥t>s} ω_rs (ŷ·Σq − ŝ_rs s_rs)         row 3: e^{G_r} n₀ (ŷ·Σq − ŷ·(μ_r−μ₀) q·(μ_r−μ₀))
    """
    i = tl.program_id(0) // H
    i_h = tl.program_id(0) % H
    o_ih = tl.cast(i, tl.int64) * H + i_h
    i_b = i // NCB
    i_t = (i - i_b * NCB) * C
    o_c = tl.arange(0, C)
    fill = real_tokens(p_fill, i, i_t, T, C, PACKED)
    if fill == 0:
        return  # of no sequence
    a = whole_of(p_G, o_ih, C, GATED)
    _, near, _ = merge_of(p_n, p_mass, o_ih, a)
    Y = tl.zeros([C, C], ACC)
    b_at0 = tl.zeros([C], ACC)
    b_ysq = tl.zeros([C], ACC)
    if GATED:
        Q = tl.zeros([C, C], ACC)
    for i_d in range(0, K, BD):
        b_y = load_tile(p_y, i_b, i_t, i_h, i_d, T, H, K, C, BD, 0)
        b_kc = load_tile(p_kc, i_b, i_t, i_h, i_d, T, H, K, C, BD, 0)
        b_Sq = load_tile(p_Sq, i_b, i_t, i_h, i_d, T, H, K, C, BD, 0)
        Y = add_product(Y, b_y, tl.trans(b_kc), ACC, OT == ACC)
        b_at0 -= tl.sum(b_y.to(ACC) * (near * numbers(p_step, o_ih, i_d, K, BD))[None, :], 1)
        b_ysq += tl.sum(b_y.to(ACC) * b_Sq.to(ACC), 1)
        if GATED:
            b_q = load_tile(p_q, i_b, i_t, i_h, i_d, T, H, K, C, BD, 0)
            Q = add_product(Q, b_q, tl.trans(b_kc), ACC, OT == ACC)

    n = tl.load(p_n + o_ih)
    b_decay = tl.full([C], 1.0, ACC)
    if GATED:
        b_decay = tl.load(tokens(p_E, o_ih, 6, C))
        tl.store(tokens(p_Ey, o_ih, 5, C), tl.load(tokens(p_E, o_ih, 5, C)))
        tl.store(tokens(p_Ey, o_ih, 6, C), b_decay)
    b_inv = tl.load(tokens(p_E, o_ih, 1, C))
    b_qrel = tl.load(tokens(p_E, o_ih, 3, C))
    b_factor = b_inv
    if HV == H and not SCALED:
        o_t = i_t + o_c
        o_eta = (tl.cast(i_b, tl.int64) * T + o_t) * H + i_h
        b_factor *= tl.load(p_eta + o_eta, mask=o_t < T, other=0.0).to(ACC)
        tl.store(p_deta + o_eta, -b_ysq, mask=o_t < T)
    b_w = weights(p_G, o_ih, fill, C, GATED, ACC)
    b_bar = (b_decay * n * b_at0 + tl.sum(b_w * Y, 1)) * b_inv
    Y = (Y - b_bar[:, None]) * b_factor[:, None]
    store_pairs(p_Py, (b_w * Y).to(OT), o_ih, C)
    b_yrel = (b_bar - b_at0) * b_factor
    b_ysq *= b_factor
    b_spread = b_decay * (b_ysq - b_yrel * b_qrel)
    tl.store(p_zsum + o_ih, tl.sum(b_spread, 0))
    tl.store(tokens(p_Ey, o_ih, 0, C), b_factor * tl.load(tokens(p_E, o_ih, 0, C)))
    tl.store(tokens(p_Ey, o_ih, 1, C), b_factor)
    tl.store(tokens(p_Ey, o_ih, 2, C), b_decay * n * b_yrel * near)
    if GATED:
        Q = Q - tl.load(tokens(p_E, o_ih, 4, C))[:, None]
        later_than = o_c[:, None] > o_c[None, :]
        b_pairs = tl.where(later_than, b_w * (b_ysq[:, None] - Y * Q), 0.0)
        # no difference of sums: in half the tensor cores' float32 is far more than the operands hold
        precision: tl.constexpr = "tf32" if HALF else "ieee"
        upper = (o_c[:, None] <= o_c[None, :]).to(ACC)
        b_later = tl.dot(upper, b_pairs, input_precision=precision, out_dtype=ACC)
        tl.store(tokens(p_Ey, o_ih, 3, C), n * b_spread)
        tl.store(tokens(p_Ey, o_ih, 4, C), tl.sum(tl.where(later_than, b_later, 0.0), 1))

    b_by_q = b_decay * b_yrel
    b_by_y = b_decay * b_qrel * b_factor
    for i_d in range(0, K, BD):
        b_q = load_tile(p_q, i_b, i_t, i_h, i_d, T, H, K, C, BD, 0).to(ACC)
        b_y = load_tile(p_y, i_b, i_t, i_h, i_d, T, H, K, C, BD, 0).to(ACC)
        o_d = i_d + tl.arange(0, BD)
        b_r = tl.sum(b_q * b_by_q[:, None] + b_y * b_by_y[:, None], 0)
        tl.store(p_rsum + o_ih * K + o_d, b_r, mask=o_d < K)


@triton.jit(do_not_specialize=["T", "NCB"])
def gate(
    p_Ey, p_G, p_fill, p_n, p_reach, p_grown, p_z, p_C0, p_N0, p_scale, p_dg, T, NCB,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, NZ: tl.constexpr, PACKED: tl.constexpr,
    SCALED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dg of a chunk and key head: `adjoint`'s rows, and what its keys and C₀ bring to the chunk's end,

    e^{G_C} (n₀ z − ½⟨N, C₀⟩) + Σ_{s<t} ω_Cs (z + r·x_s − ½ x_sᵀN x_s),   x_s = k_s − μ₀;   parts of NZ tiles
    """
    i = tl.program_id(0) // H
    i_h = tl.program_id(0) % H
    o_ih = tl.cast(i, tl.int64) * H + i_h
    i_b = i // NCB
    i_t = (i - i_b * NCB) * C
    o_c = tl.arange(0, C)
    if real_tokens(p_fill, i, i_t, T, C, PACKED) == 0:
        return  # of no sequence
    b_alike = tl.zeros([BD], ACC)
    for j in range(0, K * K, BD):
        o = j + tl.arange(0, BD)
        b_C = tl.load(p_C0 + o_ih * (K * K) + o, mask=o < K * K, other=0.0)
        b_N = tl.load(p_N0 + o_ih * (K * K) + o, mask=o < K * K, other=0.0)
        b_alike += b_C.to(ACC) * b_N.to(ACC)
    alike = tl.sum(b_alike, 0)
    n = tl.load(p_n + o_ih)
    unscale = 1.0
    if SCALED:
        alike *= tl.maximum(n, 1.0)
        unscale = 1.0 / tl.load(p_scale)
    z = tl.load(p_z + o_ih * NZ)
    b_reach = tl.load(tokens(p_Ey, o_ih, 3, C))
    b_grown = tl.zeros([C], ACC)
    for j in tl.static_range(NZ):
        if j > 0:
            z += tl.load(p_z + o_ih * NZ + j)
        b_reach -= tl.load(p_reach + (o_ih * NZ + j) * C + o_c)
        b_grown += tl.load(p_grown + (o_ih * NZ + j) * C + o_c)
    b_grown *= tl.load(tokens(p_Ey, o_ih, 5, C))
    b_dg = tl.load(tokens(p_Ey, o_ih, 4, C))
    b_dg += tl.sum(tl.where(o_c[:, None] <= o_c[None, :], b_reach[None, :], 0.0), 1)
    b_dg += whole_of(p_G, o_ih, C, True) * (n * z - 0.5 * alike)
    b_dg += tl.sum(tl.where(o_c[:, None] > o_c[None, :], b_grown[None, :], 0.0), 1)
    o_t = i_t + o_c
    tl.store(p_dg + (tl.cast(i_b, tl.int64) * T + o_t) * H + i_h, b_dg * unscale, mask=o_t < T)


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    NZ = -(-K // min(config.launch["backward"]["BV"], padded(K)))
    cases = [case(gate, "gate", config, dtype, K, NZ=NZ, PACKED=False)]
    cases += [case(fold, "fold", config, dtype, K, none=none, HV=HV, PACKED=False) for HV, none in ((1, ("p_base",)), (2, ()))]
    return cases + [case(adjoint, "adjoint", config, dtype, K, GATED=gated, PACKED=False) for gated in (False, True)]
