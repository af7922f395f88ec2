"""A softmax over keys that come a tile at a time: the running maximum, and the sums that a larger one rescales."""

import triton
import triton.language as tl

NONE = tl.constexpr(-1e30)  # a maximum over nothing: finite, so that hidden scores give 0 and not NaN


@triton.jit
def soften(s, sc, m, l, q2, acc, SQUARES: tl.constexpr):
    """As `weigh`, and S of S + p v before the product."""
    p, m, l, q2, rescale = weigh(s, sc, m, l, q2, SQUARES)
    return p, m, l, q2, acc * rescale[:, None]


@triton.jit
def weigh(s, sc, m, l, q2, SQUARES: tl.constexpr):
    """One tile of scores s more: p = 2^{s sc − M}, the running maximum, L = Σ p and Q₂ = Σ p², and what S = Σ p v is to be rescaled by.

    SQUARES: whether Q₂ is summed.
    """
    new = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s * sc[:, None] - (new * sc)[:, None])
    # exactly 1 where the maximum stays. Of m sc − new sc the compiler rounds one product alone: what is left is that rounding, 1e22
    # while no key was seen, and the same way at every tile
    rescale = tl.exp2((m - new) * sc)
    l = l * rescale + tl.sum(p, 1)
    if SQUARES:
        q2 = q2 * (rescale * rescale) + tl.sum(p * p, 1)
    return p, new, l, q2, rescale
