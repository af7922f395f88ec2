"""What is read out of the sums of a row, M = max a, L = Σ p, Q₂ = Σ p², S = Σ p v with p = 2^{a − M}. READ chooses at compile time.

softmax       o = S / L
differential  o = S₁ / L₁ − λ S₂ / L₂         a query is two rows, in the first and in the second half of the tile's
polar         the null joins, the direction and the magnitude: ops/polar/attention/rows.py
"""

import triton
import triton.language as tl

from needlework.ops.polar.attention.rows import gains, softplus
from needlework.ops.polar.attention.rows import read_out as read_polar

SOFTMAX, DIFFERENTIAL, POLAR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def gain_of(p_alpha, p_gamma, p_base, i_h, seen, SCALE: tl.constexpr, READ: tl.constexpr, ACC: tl.constexpr):
    """What scores of rows that see so many keys are multiplied by, for base 2."""
    if READ == POLAR:
        _, _, temp, _, _ = gains(p_alpha, p_gamma, p_base, i_h, seen, ACC)
        sc = temp * SCALE
    else:
        sc = tl.zeros([i_h.shape[0]], ACC) + SCALE * LOG2E
    return sc


@triton.jit
def read_out(
    acc, m, l, q2, i_h, second, seen, p_alpha, p_beta, p_gamma, p_base, p_null, p_lam,
    V: tl.constexpr, BV: tl.constexpr, LAM: tl.constexpr, READ: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Outputs [queries BV] and magnitudes [rows], Polar's alone, of rows of heads i_h; m: M for base 2; rows that see no key have l = 0.
    second: the rows of second vectors. LAM: from a head's λ to the next one's."""
    l = tl.maximum(l, 1e-30)
    magnitude = l
    if READ == SOFTMAX:
        o = acc / l[:, None]
    elif READ == DIFFERENTIAL:
        share = tl.where(second, -tl.load(p_lam + i_h * LAM).to(ACC), 1.0)
        o = tl.sum(tl.reshape(acc * (share / l)[:, None], [2, acc.shape[0] // 2, BV]), 0)
    else:
        _, _, _, _, a_null = gains(p_alpha, p_gamma, p_base, i_h, seen, ACC)
        o_v = tl.arange(0, BV)
        b_null = tl.load(p_null + (i_h * V)[:, None] + o_v[None, :], mask=(o_v < V)[None, :], other=0.0)
        strength = softplus(tl.load(p_beta + i_h)).to(ACC)
        n_eff = l * l / tl.maximum(q2, 1e-37)
        parts, magnitude = read_polar((acc,), l, m + tl.log2(l), n_eff, a_null, (b_null,), strength, 1)
        o = parts[0]
    return o, magnitude
