"""New keys and values of all heads into their rows of the pages."""

import triton
import triton.language as tl


@triton.jit
def write(
    p_k, p_v, p_k_pages, p_v_pages, p_rows, PG: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr, TK: tl.constexpr, TV: tl.constexpr,
    SK: tl.constexpr, SV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A token's NK and NV numbers. TK, TV: from token to token; SK, SV: from page to page."""
    i_t = tl.program_id(0).to(tl.int64)
    row = tl.load(p_rows + i_t)
    if row < 0:
        return
    page = row // PG
    row = row % PG
    o_k = tl.arange(0, BK)
    o_v = tl.arange(0, BV)
    b_k = tl.load(p_k + i_t * TK + o_k, mask=o_k < NK, other=0.0)
    b_v = tl.load(p_v + i_t * TV + o_v, mask=o_v < NV, other=0.0)
    tl.store(p_k_pages + page * SK + row * NK + o_k, b_k.to(p_k_pages.dtype.element_ty), mask=o_k < NK)
    tl.store(p_v_pages + page * SV + row * NV + o_v, b_v.to(p_v_pages.dtype.element_ty), mask=o_v < NV)
