"""The newest token of a sequence and one of its key-value heads: its rows as they score, what it adds to the sums over earlier keys, and
the row of the pages that takes it.

    y = β (v − Σ_j A_j y_j)        "rowmax": (v − Σ_j A_j y_j) / e^{s − μ}, s its key's score with itself
    o_h = (Σ_j p_j y_j + p y) / (Σ_j p_j + p)

y is rounded before queries read it, as later tokens read it from its page.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.softmax import NONE


@triton.jit
def row_of(p, at, i_h, D: tl.constexpr, BD: tl.constexpr):
    """[BD] of head i_h of a token, whose row begins at `at`; zeros past D."""
    o_d = tl.arange(0, BD)
    return tl.load(p + at + i_h * D + o_d, mask=o_d < D, other=0.0)


@triton.jit
def queries(p, at, i_h, ours, D: tl.constexpr, BD: tl.constexpr):
    """[rows BD] of heads i_h of a token, zeros in rows that are not `ours`."""
    o_d = tl.arange(0, BD)
    return tl.load(p + at + (i_h * D)[:, None] + o_d[None, :], mask=ours[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def finished(
    S, M, L, b_q, sc, solving, b_k, b_v, beta, SOLVE: tl.constexpr, ROWMAX: tl.constexpr, ACC: tl.constexpr, OT: tl.constexpr
):  # fmt: skip
    """o of every row [rows BV] and y [BV], from the sums of earlier keys. M for base 2; SOLVE: what log2 A is multiplied by."""
    past = tl.sum(tl.where(solving[:, None], S, 0.0), 0)
    top = tl.max(tl.where(solving, M, NONE), 0)
    k = b_k.to(ACC)
    v = b_v.to(ACC)
    if ROWMAX:
        own = tl.sum(k * k, 0) * SOLVE
        mu = tl.maximum(top, own)
        y = (v - past * tl.exp2(top - mu)) / tl.exp2(own - mu)
    else:
        y = (v - past * tl.exp2(top - SOLVE)) * beta
    b_y = y.to(OT)
    a = tl.sum(b_q.to(ACC) * k[None, :], 1) * sc
    new = tl.maximum(M, a)
    p = tl.exp2(a - new)
    rescale = tl.exp2(M - new)
    o = (S * rescale[:, None] + p[:, None] * b_y.to(ACC)[None, :]) / (L * rescale + p)[:, None]
    return o, b_y


@triton.jit
def write_row(p_pages, b, row, i_h, apart, PG: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """[BD] of one head into the row, page · PG + row in the page, of pages that lie `apart`; a row below 0 is none."""
    o_d = tl.arange(0, BD)
    at = row // PG * apart + (row % PG * HK + i_h) * D
    tl.store(p_pages + at + o_d, b.to(p_pages.dtype.element_ty), mask=(o_d < D) & (row >= 0))
