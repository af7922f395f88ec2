"""Gradients of the gates, from those of the weights of the writes: a pass over pairs of a token and a head, as they lie.

dg = c dc + the engine's    dλ = Δ (w − z)    dΔ = λ w + (1 − λ) z + the angles'
z_t = α_t dc_t    w_t = α_{t+1} dc_{t+1} + (q_tᵀk_t) down_t    c_t = α_t (λ_{t-1}Δ_{t-1} + (1 − λ_t)Δ_t)
"""

import triton
import triton.language as tl

from needlework.ops.mamba3.siso.tiles import pairs_of, past_the_last, powers_of, tile_of_pairs


@triton.jit(do_not_specialize=["T", "N", "NCB"])
def gates_bwd_kernel(
    p_g, p_dt, p_lam, p_same, p_dc, p_down, p_dg_rows, p_power, p_dg, p_ddt, p_dlam, p_cum, p_ends, T, N, NCB,
    HV: tl.constexpr, F: tl.constexpr, BT: tl.constexpr, R: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """R pairs of one tile. p_ddt has what the angles give, and gets all."""
    i_c, r = tile_of_pairs(HV, BT, R)
    if past_the_last(p_cum, i_c, N):
        return
    n, length, _, j, i_h, mine, o, o_row = pairs_of(p_cum, p_ends, i_c, r, T, N, NCB, HV, BT, R, F)
    real, next_real = mine & (j < length), mine & (j + 1 < length)
    dt = tl.load(p_dt + o, mask=real, other=0.0).to(ACC)
    lam = tl.load(p_lam + o, mask=real, other=0.0).to(ACC)
    before = tl.load(p_dt + o - HV, mask=real & (j > 0), other=0.0).to(ACC)
    before *= tl.load(p_lam + o - HV, mask=real & (j > 0), other=0.0).to(ACC)
    decay = tl.exp(tl.load(p_g + o, mask=real, other=0.0).to(ACC))
    decay_next = tl.exp(tl.load(p_g + o + HV, mask=next_real, other=0.0).to(ACC))
    dc = tl.load(p_dc + o_row, mask=real, other=0.0)
    dc_next = tl.load(p_dc + o_row + HV, mask=real & (j + 1 < length + F), other=0.0)
    own = tl.load(p_down + o, mask=real, other=0.0) * tl.load(p_same + o, mask=real, other=0.0)
    z, w = decay * dc, decay_next * dc_next + own
    a, b, c, _, _, _ = powers_of(p_power, p_cum, n, N, i_h, HV)
    dg = (a * b * c) * tl.load(p_dg_rows + o_row, mask=real, other=0.0)
    tl.store(p_dg + o, dg + decay * (before + (1 - lam) * dt) * dc, mask=real)
    tl.store(p_dlam + o, dt * (w - z), mask=real)
    tl.store(p_ddt + o, tl.load(p_ddt + o, mask=real, other=0.0) + lam * w + (1 - lam) * z, mask=real)
