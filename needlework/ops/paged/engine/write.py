"""New keys and values of all heads, and their decays, into their rows of the pages."""

import triton
import triton.language as tl


@triton.jit
def write(
    p_k, p_v, p_k_pages, p_v_pages, p_rows, p_decay, p_held, PG: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr, TK: tl.constexpr, TV: tl.constexpr,
    SK: tl.constexpr, SV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NG: tl.constexpr, SG: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """A token's NK and NV numbers, and NG of p_decay [T NG], if that is not None. TK, TV: from token to token; SK, SV, SG: from page to
    page."""
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
    if p_decay is not None:
        o_g = tl.arange(0, BG)
        b_g = tl.load(p_decay + i_t * NG + o_g, mask=o_g < NG, other=0.0)
        tl.store(p_held + page * SG + row * NG + o_g, b_g, mask=o_g < NG)
