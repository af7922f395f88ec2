"""The rows of the values, what a token adds to its own output, and the backward of both: passes over pairs of a token and a head, as they lie.

    u'_t = c_t v_{t-1}    c_t = α_t (λ_{t-1}Δ_{t-1} + (1 − λ_t)Δ_t)    o_t = engine_t + λ_tΔ_t same_t v_t
    dv_t = λΔ same do_t + c_{t+1} du'_{t+1}    dc_{t+1} = du'_{t+1}ᵀv_t    down_t = do_tᵀv_t

Rows are divided by powers of two where there are any. The engine was given do in place of abc do: its du' is ab times too small.
"""

import triton
import triton.language as tl

from needlework.ops.mamba3.siso.tiles import pairs_of, past_the_last, powers_of, tile_of_pairs


@triton.jit
def weights(p_g, p_dt, p_lam, o, j, length, mine, HV: tl.constexpr, ACC: tl.constexpr):
    """Of tokens j: λΔ, c of the row after each, and c of the row before the first one, α_1 (1 − λ_1) Δ_1."""
    real, next_real = mine & (j < length), mine & (j + 1 < length)
    dt = tl.load(p_dt + o, mask=real, other=0.0).to(ACC)
    lam = tl.load(p_lam + o, mask=real, other=0.0).to(ACC)
    g = tl.load(p_g + o, mask=real, other=0.0).to(ACC)
    dt_next = tl.load(p_dt + o + HV, mask=next_real, other=0.0).to(ACC)
    lam_next = tl.load(p_lam + o + HV, mask=next_real, other=0.0).to(ACC)
    g_next = tl.load(p_g + o + HV, mask=next_real, other=0.0).to(ACC)
    return lam * dt, tl.exp(g_next) * (lam * dt + (1 - lam_next) * dt_next), tl.exp(g) * (1 - lam) * dt


@triton.jit(do_not_specialize=["T", "N", "NCB"])
def values_kernel(
    p_v, p_g, p_dt, p_lam, p_v0, p_power, p_u, p_g_rows, p_cum, p_ends, T, N, NCB,
    HV: tl.constexpr, V: tl.constexpr, F: tl.constexpr, ACC: tl.constexpr, BT: tl.constexpr, R: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """R pairs of one tile. p_v0 None: nothing before the first token."""
    i_c, r = tile_of_pairs(HV, BT, R)
    if past_the_last(p_cum, i_c, N):
        return
    n, length, first, j, i_h, mine, o, o_row = pairs_of(p_cum, p_ends, i_c, r, T, N, NCB, HV, BT, R, F)
    real, is_row = mine & (j < length), mine & (j < length + F)
    follows, begins = real & (j + 1 < length + F), is_row & (j == 0)
    _, _, _, _, _, by_v = powers_of(p_power, p_cum, n, N, i_h, HV)
    _, weight, w0 = weights(p_g, p_dt, p_lam, o, j, length, mine, HV, ACC)
    if F:
        tl.store(p_g_rows + o_row, tl.load(p_g + o, mask=real, other=0.0).to(ACC), mask=is_row)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        in_v = (o_v < V)[None, :]
        x = tl.load(p_v + o[:, None] * V + o_v[None, :], mask=real[:, None] & in_v, other=0.0).to(ACC)
        u = ((weight * by_v)[:, None] * x).to(p_u.dtype.element_ty)
        tl.store(p_u + (o_row + HV)[:, None] * V + o_v[None, :], u, mask=follows[:, None] & in_v)
        if first == 0:
            u = tl.zeros([R, BV], p_u.dtype.element_ty)
            if p_v0 is not None:
                o_given = (tl.cast(n, tl.int64) * HV + i_h)[:, None] * V + o_v[None, :]
                x = tl.load(p_v0 + o_given, mask=begins[:, None] & in_v, other=0.0).to(ACC)
                u = ((w0 * by_v)[:, None] * x).to(p_u.dtype.element_ty)
            tl.store(p_u + o_row[:, None] * V + o_v[None, :], u, mask=begins[:, None] & in_v)


@triton.jit(do_not_specialize=["T", "N", "NCB"])
def add_own_kernel(
    p_rows, p_v, p_dt, p_lam, p_same, p_power, p_o, p_cum, p_ends, T, N, NCB,
    HV: tl.constexpr, V: tl.constexpr, F: tl.constexpr, ACC: tl.constexpr, BT: tl.constexpr, R: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """o of R pairs of one tile, from what the engine gave for its rows."""
    i_c, r = tile_of_pairs(HV, BT, R)
    if past_the_last(p_cum, i_c, N):
        return
    n, length, _, j, i_h, mine, o, o_row = pairs_of(p_cum, p_ends, i_c, r, T, N, NCB, HV, BT, R, F)
    real = mine & (j < length)
    a, b, c, _, _, _ = powers_of(p_power, p_cum, n, N, i_h, HV)
    abc = a * b * c + tl.zeros([R], ACC)
    own = tl.load(p_dt + o, mask=real, other=0.0).to(ACC) * tl.load(p_lam + o, mask=real, other=0.0).to(ACC)
    own *= tl.load(p_same + o, mask=real, other=0.0)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        mask = real[:, None] & (o_v < V)[None, :]
        x = tl.load(p_v + o[:, None] * V + o_v[None, :], mask=mask, other=0.0).to(ACC)
        y = tl.load(p_rows + o_row[:, None] * V + o_v[None, :], mask=mask, other=0.0).to(ACC)
        y = y * abc[:, None] + own[:, None] * x
        tl.store(p_o + o[:, None] * V + o_v[None, :], y.to(p_o.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "N", "NCB"])
def values_bwd_kernel(
    p_do, p_du, p_v, p_g, p_dt, p_lam, p_v0, p_power, p_same, p_dv, p_dc, p_down, p_dv0, p_cum, p_ends, T, N, NCB,
    HV: tl.constexpr, V: tl.constexpr, F: tl.constexpr, ACC: tl.constexpr, BT: tl.constexpr, R: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """R pairs of one tile: dv and down of a token, dc of the row after it."""
    i_c, r = tile_of_pairs(HV, BT, R)
    if past_the_last(p_cum, i_c, N):
        return
    n, length, first, j, i_h, mine, o, o_row = pairs_of(p_cum, p_ends, i_c, r, T, N, NCB, HV, BT, R, F)
    real = mine & (j < length)
    follows, begins = real & (j + 1 < length + F), mine & (j == 0) & (j < length + F)
    a, b, _, _, _, _ = powers_of(p_power, p_cum, n, N, i_h, HV)
    ab = a * b + tl.zeros([R], ACC)
    own, weight, w0 = weights(p_g, p_dt, p_lam, o, j, length, mine, HV, ACC)
    own *= tl.load(p_same + o, mask=real, other=0.0)
    down, dc, dc0 = tl.zeros([R], ACC), tl.zeros([R], ACC), tl.zeros([R], ACC)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        in_v = (o_v < V)[None, :]
        x = tl.load(p_v + o[:, None] * V + o_v[None, :], mask=real[:, None] & in_v, other=0.0).to(ACC)
        do = tl.load(p_do + o[:, None] * V + o_v[None, :], mask=real[:, None] & in_v, other=0.0).to(ACC)
        du = tl.load(p_du + (o_row + HV)[:, None] * V + o_v[None, :], mask=follows[:, None] & in_v, other=0.0).to(ACC)
        du *= ab[:, None]
        down += tl.sum(do * x, 1)
        dc += tl.sum(du * x, 1)
        dv = own[:, None] * do + weight[:, None] * du
        tl.store(p_dv + o[:, None] * V + o_v[None, :], dv.to(p_dv.dtype.element_ty), mask=real[:, None] & in_v)
        if p_v0 is not None:
            if first == 0:  # the row before the first token
                there = begins[:, None] & in_v
                o_given = (tl.cast(n, tl.int64) * HV + i_h)[:, None] * V + o_v[None, :]
                du = tl.load(p_du + o_row[:, None] * V + o_v[None, :], mask=there, other=0.0).to(ACC) * ab[:, None]
                dc0 += tl.sum(du * tl.load(p_v0 + o_given, mask=there, other=0.0).to(ACC), 1)
                tl.store(p_dv0 + o_given, w0[:, None] * du, mask=there)
    tl.store(p_down + o, down, mask=real)
    tl.store(p_dc + o_row + HV, dc, mask=follows)
    tl.store(p_dc + o_row, dc0, mask=begins)
