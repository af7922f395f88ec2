"""Causal depthwise convolution, and what follows it, in one pass over the tokens; its gradients in another.

    c_t = b + Σ_l w_l x_{t−l}      dc = dy silu'(c), or dy      dx_t = Σ_l w_l dc_{t+l} (+ dy_t)      dw_l = Σ_t dc_t x_{t−l}      db = Σ_t dc_t

Where heads get unit norm, of y that follows c, before it is rounded:

    n_t = r_t y_t      r_t = (Σ y_t² + 1e-6)^-1/2      dy_t = r_t (dn_t − n_t Σ n_t dn_t)      sums over a head

A program walks a run of tokens, four at a time while the next four are on their way, and keeps, for its channels, the last inputs
and the last dc in registers: each number is read once, but for a few around the run. A head's numbers lie in one program: its norm
costs no memory.
"""

import triton
import triton.language as tl

from needlework.ops.conv.depthwise.tokens import (
    back,
    channels,
    fed,
    four_rows,
    held,
    over_norm,
    position_of,
    seen,
    slot_of,
    span_of,
    taps,
    weighted,
    widened,
)


@triton.jit
def _made(
    s, x0, x1, x2, x3, w0, w1, w2, w3, wb, p_position, past, T, o_c, real,
    ROW: tl.constexpr, W: tl.constexpr, STRIDE: tl.constexpr, SILU: tl.constexpr, ADD: tl.constexpr, HEAD: tl.constexpr,
    PACKED: tl.constexpr, ASM: tl.constexpr, KIND: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """y of token s, of the rows of x 0 to 3 before, or the unit heads of it."""
    p = position_of(p_position, s, T, PACKED)
    p, x1, x2, x3 = seen(s, p, x1, x2, x3, past, T, o_c, real, ROW, W, STRIDE, PACKED, KIND, ACC)
    y = fed(p, x0, x1, x2, x3, w0, w1, w2, w3, wb, SILU, ADD, ASM)
    if HEAD:
        y *= over_norm(y)
    return y


@triton.jit(do_not_specialize=["T"])
def conv_forward_kernel(
    p_x, p_w, p_y, p_position, p_state, p_document, p_slots, p_fresh, T,
    C: tl.constexpr, ROW: tl.constexpr, APART: tl.constexpr, W: tl.constexpr, STRIDE: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, ADD: tl.constexpr, HEAD: tl.constexpr, BH: tl.constexpr, PACKED: tl.constexpr,
    ASM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """BT tokens of a tile of C channels of a row of the batch. x and the state have the channels of other parts beside them, ROW in all, y
    has not; rows of x lie APART. Pointers that are None have no part in it."""
    past = p_state, p_document, p_slots, p_fresh
    KIND: tl.constexpr = p_x.dtype.element_ty
    o_c, real = channels(tl.program_id(0), C, HEAD, BH, BC)
    lo = tl.program_id(1) * BT
    hi = tl.minimum(lo + BT, T)
    base = tl.program_id(2).to(tl.int64) * T
    p_x += base * APART
    p_y += base * C
    w0, w1, w2, w3, wb = taps(p_w, o_c, real, W, BIAS, ACC)
    _, h3, h2, h1 = widened(four_rows(p_x, lo - 4, T, APART, o_c, real), ACC)  # 3, 2, 1 tokens before x0
    rows = four_rows(p_x, lo, T, APART, o_c, real)
    for s in range(lo, hi, 4):
        x0, x1, x2, x3 = widened(rows, ACC)
        rows = four_rows(p_x, s + 4, T, APART, o_c, real)
        y0 = _made(
            s, x0, h1, h2, h3, w0, w1, w2, w3, wb, p_position, past, T, o_c, real, ROW, W, STRIDE, SILU, ADD, HEAD, PACKED, ASM, KIND, ACC
        )  # fmt: skip
        y1 = _made(
            s + 1, x1, x0, h1, h2, w0, w1, w2, w3, wb, p_position, past, T, o_c, real, ROW, W, STRIDE, SILU, ADD, HEAD, PACKED, ASM, KIND, ACC
        )  # fmt: skip
        y2 = _made(
            s + 2, x2, x1, x0, h1, w0, w1, w2, w3, wb, p_position, past, T, o_c, real, ROW, W, STRIDE, SILU, ADD, HEAD, PACKED, ASM, KIND, ACC
        )  # fmt: skip
        y3 = _made(
            s + 3, x3, x2, x1, x0, w0, w1, w2, w3, wb, p_position, past, T, o_c, real, ROW, W, STRIDE, SILU, ADD, HEAD, PACKED, ASM, KIND, ACC
        )  # fmt: skip
        at = p_y + tl.cast(s, tl.int64) * C + o_c
        tl.store(at, y0.to(p_y.dtype.element_ty), mask=real)
        tl.store(at + C, y1.to(p_y.dtype.element_ty), mask=real & (s + 1 < hi))
        tl.store(at + 2 * C, y2.to(p_y.dtype.element_ty), mask=real & (s + 2 < hi))
        tl.store(at + 3 * C, y3.to(p_y.dtype.element_ty), mask=real & (s + 3 < hi))
        h1, h2, h3 = x3, x2, x1


@triton.jit
def _before(
    s, dy, x0, x1, x2, x3, w0, w1, w2, w3, wb, p_position, past, T, o_c, real,
    ROW: tl.constexpr, W: tl.constexpr, STRIDE: tl.constexpr, SILU: tl.constexpr, ADD: tl.constexpr, HEAD: tl.constexpr,
    PACKED: tl.constexpr, ASM: tl.constexpr, KIND: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dy of token s before its norm, dc, and what of it goes 1, 2 and 3 tokens back: none past a document's start. Past a
    sequence's there is nothing to write."""
    p = position_of(p_position, s, T, PACKED)
    dc = dy
    if SILU or HEAD:
        reach, x1, x2, x3 = seen(s, p, x1, x2, x3, past, T, o_c, real, ROW, W, STRIDE, PACKED, KIND, ACC)
        c = weighted(reach, x0, x1, x2, x3, w0, w1, w2, w3, wb)
        dy, dc = back(dy, c, x0, SILU, ADD, HEAD, ASM)
    d1, d2, d3 = dc, dc, dc
    if PACKED:
        d1, d2, d3 = tl.where(p >= 1, dc, 0.0), tl.where(p >= 2, dc, 0.0), tl.where(p >= 3, dc, 0.0)
    return dy, dc, d1, d2, d3


@triton.jit(do_not_specialize=["T"])
def conv_backward_kernel(
    p_dy, p_x, p_w, p_dx, p_dw, p_position, p_state, p_document, p_slots, p_fresh, T,
    C: tl.constexpr, ROW: tl.constexpr, W: tl.constexpr, STRIDE: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, ADD: tl.constexpr, HEAD: tl.constexpr, BH: tl.constexpr, PACKED: tl.constexpr,
    ASM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dx of BT tokens of a tile of channels, and their part of dw: p_dw [B runs 4+BIAS ROW]. Three tokens past the run are walked too. What a
    state has of dw is not in it.

    Four tokens s … s + 3 a turn, which finish dx of the four from s − 3 on; a, b, c, d are their dc by lag.
    """
    past = p_state, p_document, p_slots, p_fresh
    KIND: tl.constexpr = p_x.dtype.element_ty
    o_c, real = channels(tl.program_id(0), C, HEAD, BH, BC)
    lo = tl.program_id(1) * BT
    hi = tl.minimum(lo + BT, T)
    base = tl.program_id(2).to(tl.int64) * T
    p_dy += base * C
    p_x += base * ROW
    p_dx += base * ROW
    w0, w1, w2, w3, wb = taps(p_w, o_c, real, W, BIAS, ACC)
    _, h3, h2, h1 = widened(four_rows(p_x, lo - 4, T, ROW, o_c, real), ACC)
    none = tl.zeros(o_c.shape, ACC)
    # what the tokens so far give dx of the last three
    from3, from2, from1 = none, none, none
    g0, g1, g2, g3, gb = none, none, none, none, none
    rows, dy_rows = four_rows(p_x, lo, T, ROW, o_c, real), four_rows(p_dy, lo, T, C, o_c, real)
    for s in range(lo, hi + 3, 4):
        x0, x1, x2, x3 = widened(rows, ACC)
        e0, e1, e2, e3 = widened(dy_rows, ACC)
        rows, dy_rows = four_rows(p_x, s + 4, T, ROW, o_c, real), four_rows(p_dy, s + 4, T, C, o_c, real)
        e0, a0, a1, a2, a3 = _before(
            s, e0, x0, h1, h2, h3, w0, w1, w2, w3, wb, p_position, past, T, o_c, real, ROW, W, STRIDE, SILU, ADD, HEAD, PACKED, ASM, KIND, ACC
        )  # fmt: skip
        e1, b0, b1, b2, b3 = _before(
            s + 1, e1, x1, x0, h1, h2, w0, w1, w2, w3, wb, p_position, past, T, o_c, real, ROW, W, STRIDE, SILU, ADD, HEAD, PACKED, ASM, KIND, ACC
        )  # fmt: skip
        e2, c0, c1, c2, c3 = _before(
            s + 2, e2, x2, x1, x0, h1, w0, w1, w2, w3, wb, p_position, past, T, o_c, real, ROW, W, STRIDE, SILU, ADD, HEAD, PACKED, ASM, KIND, ACC
        )  # fmt: skip
        e3, d0, d1, d2, d3 = _before(
            s + 3, e3, x3, x2, x1, x0, w0, w1, w2, w3, wb, p_position, past, T, o_c, real, ROW, W, STRIDE, SILU, ADD, HEAD, PACKED, ASM, KIND, ACC
        )  # fmt: skip
        dx0 = from3 + a3 * w3
        dx1 = from2 + a2 * w2 + b3 * w3
        dx2 = from1 + a1 * w1 + b2 * w2 + c3 * w3
        dx3 = a0 * w0 + b1 * w1 + c2 * w2 + d3 * w3
        from3 = b0 * w0 + c1 * w1 + d2 * w2
        from2 = c0 * w0 + d1 * w1
        from1 = d0 * w0
        if ADD:
            dx3 += e0
            from3 += e1
            from2 += e2
            from1 += e3
        at = p_dx + tl.cast(s - 3, tl.int64) * ROW + o_c
        tl.store(at, dx0.to(p_dx.dtype.element_ty), mask=real & (s - 3 >= lo) & (s - 3 < hi))
        tl.store(at + ROW, dx1.to(p_dx.dtype.element_ty), mask=real & (s - 2 >= lo) & (s - 2 < hi))
        tl.store(at + 2 * ROW, dx2.to(p_dx.dtype.element_ty), mask=real & (s - 1 >= lo) & (s - 1 < hi))
        tl.store(at + 3 * ROW, dx3.to(p_dx.dtype.element_ty), mask=real & (s < hi))
        if s < hi:  # those past the run are another program's part of dw, and dc is 0 from T on
            g0 += a0 * x0 + b0 * x1 + c0 * x2 + d0 * x3
            g1 += a1 * h1 + b1 * x0 + c1 * x1 + d1 * x2
            g2 += a2 * h2 + b2 * h1 + c2 * x0 + d2 * x1
            g3 += a3 * h3 + b3 * h2 + c3 * h1 + d3 * x0
            if BIAS:
                gb += a0 + b0 + c0 + d0
        h1, h2, h3 = x3, x2, x1
    p_dw += (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * ((4 + BIAS) * ROW) + o_c
    tl.store(p_dw, g0, mask=real)
    tl.store(p_dw + ROW, g1, mask=real)
    tl.store(p_dw + 2 * ROW, g2, mask=real)
    tl.store(p_dw + 3 * ROW, g3, mask=real)
    if BIAS:
        tl.store(p_dw + 4 * ROW, gb, mask=real)


@triton.jit(do_not_specialize=["T"])
def conv_past_backward_kernel(
    p_dy, p_x, p_w, p_state, p_dstate, p_dw, p_ends, T,
    C: tl.constexpr, ROW: tl.constexpr, W: tl.constexpr, STRIDE: tl.constexpr, BC: tl.constexpr, BIAS: tl.constexpr,
    SILU: tl.constexpr, ADD: tl.constexpr, HEAD: tl.constexpr, BH: tl.constexpr, ASM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dstate of a tile of channels of a sequence, and what its state has of dw: p_dw [N 4+BIAS ROW]. The first three tokens alone see it."""
    n = tl.program_id(0)
    o_c, real = channels(tl.program_id(1), C, HEAD, BH, BC)
    lo, length = span_of(p_ends, n, T)
    p_dy += lo * C
    p_x += lo * ROW
    w0, w1, w2, w3, wb = taps(p_w, o_c, real, W, BIAS, ACC)
    slot = slot_of(None, n)
    h1 = held(p_state, slot, W - 2, ROW, W, STRIDE, o_c, real).to(ACC)
    h2 = held(p_state, slot, W - 3, ROW, W, STRIDE, o_c, real).to(ACC)
    h3 = held(p_state, slot, W - 4, ROW, W, STRIDE, o_c, real).to(ACC)
    x0, x1, x2, _ = widened(four_rows(p_x, 0, length, ROW, o_c, real), ACC)
    e0, e1, e2, _ = widened(four_rows(p_dy, 0, length, C, o_c, real), ACC)
    _, a = back(e0, weighted(3, x0, h1, h2, h3, w0, w1, w2, w3, wb), x0, SILU, ADD, HEAD, ASM)
    _, b = back(e1, weighted(3, x1, x0, h1, h2, w0, w1, w2, w3, wb), x1, SILU, ADD, HEAD, ASM)
    _, c = back(e2, weighted(3, x2, x1, x0, h1, w0, w1, w2, w3, wb), x2, SILU, ADD, HEAD, ASM)
    at = p_dstate + slot * STRIDE + o_c
    tl.store(at + (W - 2) * ROW, (a * w1 + b * w2 + c * w3).to(p_dstate.dtype.element_ty), mask=real)
    tl.store(at + (W - 3) * ROW, (a * w2 + b * w3).to(p_dstate.dtype.element_ty), mask=real & (W > 2))
    tl.store(at + (W - 4) * ROW, (a * w3).to(p_dstate.dtype.element_ty), mask=real & (W > 3))
    p_dw += slot * ((4 + BIAS) * ROW) + o_c
    tl.store(p_dw, tl.zeros(o_c.shape, ACC), mask=real)
    tl.store(p_dw + ROW, a * h1, mask=real)
    tl.store(p_dw + 2 * ROW, a * h2 + b * h1, mask=real)
    tl.store(p_dw + 3 * ROW, a * h3 + b * h2 + c * h1, mask=real)
    if BIAS:  # what it has of the bias is every token's, and in their part
        tl.store(p_dw + 4 * ROW, tl.zeros(o_c.shape, ACC), mask=real)
