"""Causal depthwise convolution on a table of slots: the new last inputs of every sequence, and one token of a row, in place."""

import triton
import triton.language as tl

from needlework.ops.conv.depthwise.tokens import fed, held, slot_of, source_of, span_of, taps


@triton.jit
def _new(
    p_x, p_state, source, length, row, C: tl.constexpr, APART: tl.constexpr, W: tl.constexpr, STRIDE: tl.constexpr, o_c, real
):
    """A row of a slot after `length` more tokens: of x, or of what the slot has kept."""
    s = length - (W - 1) + row
    x = tl.load(p_x + tl.cast(s, tl.int64) * APART + o_c, mask=real & (s >= 0) & (row >= 0), other=0.0)
    return tl.where(s >= 0, x.to(p_state.dtype.element_ty), held(p_state, source, length + row, C, W, STRIDE, o_c, real))


@triton.jit
def _keep(p_state, slot, h1, h2, h3, C: tl.constexpr, W: tl.constexpr, STRIDE: tl.constexpr, o_c, real):
    """The last inputs into a slot, h1 the last. A program owns its slot and channels: that all of its warps have read them is enough."""
    tl.debug_barrier()
    at = p_state + slot * STRIDE + o_c
    tl.store(at + (W - 2) * C, h1, mask=real)
    tl.store(at + (W - 3) * C, h2, mask=real & (W > 2))
    tl.store(at + (W - 4) * C, h3, mask=real & (W > 3))


@triton.jit(do_not_specialize=["T"])
def conv_keep_kernel(
    p_x, p_state, p_ends, p_slots, p_fresh, T,
    C: tl.constexpr, APART: tl.constexpr, W: tl.constexpr, STRIDE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The last W − 1 inputs of a sequence, of BC channels, into its slot; with fewer new tokens some of what lies there moves up.

    A launch of its own, after those of `conv_forward_kernel`: a sequence's first tokens read the slot that its last ones replace, and
    both may be in several programs (of other runs, or parts), which nothing but the end of a launch orders.
    """
    n = tl.program_id(0)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    real = o_c < C
    slot, source = slot_of(p_slots, n), source_of(p_slots, p_fresh, n)
    lo, length = span_of(p_ends, n, T)
    # no token and not fresh: what lies in the slot stays
    if (slot >= 0) & ((length > 0) | (source < 0)):
        p_x += tl.cast(lo, tl.int64) * APART
        h1 = _new(p_x, p_state, source, length, W - 2, C, APART, W, STRIDE, o_c, real)
        h2 = _new(p_x, p_state, source, length, W - 3, C, APART, W, STRIDE, o_c, real)
        h3 = _new(p_x, p_state, source, length, W - 4, C, APART, W, STRIDE, o_c, real)
        _keep(p_state, slot, h1, h2, h3, C, W, STRIDE, o_c, real)


@triton.jit
def conv_step_kernel(
    p_x, p_w, p_y, p_state, p_slots,
    C: tl.constexpr, APART: tl.constexpr, PARTS: tl.constexpr, W: tl.constexpr, STRIDE: tl.constexpr, BC: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, ADD: tl.constexpr, ASM: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token of a row, of BC channels of one of the PARTS, and their slot in place. y has a matrix [rows ·] for each part, one after
    the other."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    i = tl.program_id(1)
    # the part that block i of channels is in: its first block, first channel and width
    block, first, width = 0, 0, PARTS[0]
    blocks, channels = 0, 0
    for j in tl.static_range(len(PARTS)):
        block = tl.where(i >= blocks, blocks, block)
        first = tl.where(i >= blocks, channels, first)
        width = tl.where(i >= blocks, PARTS[j], width)
        blocks += (PARTS[j] + BC - 1) // BC
        channels += PARTS[j]
    o_p = (i - block) * BC + tl.arange(0, BC)
    o_c = first + o_p
    real = o_p < width
    slot = slot_of(p_slots, row)
    live = real & (slot >= 0)

    x = tl.load(p_x + row.to(tl.int64) * APART + o_c, mask=live, other=0.0)
    h1 = held(p_state, slot, W - 2, C, W, STRIDE, o_c, real)
    h2 = held(p_state, slot, W - 3, C, W, STRIDE, o_c, real)
    h3 = held(p_state, slot, W - 4, C, W, STRIDE, o_c, real)
    w0, w1, w2, w3, wb = taps(p_w, o_c, live, W, BIAS, ACC)
    x1, x2, x3 = h1.to(x.dtype).to(ACC), h2.to(x.dtype).to(ACC), h3.to(x.dtype).to(ACC)
    y = fed(3, x.to(ACC), x1, x2, x3, w0, w1, w2, w3, wb, SILU, ADD, ASM)
    p_y += tl.cast(first, tl.int64) * tl.num_programs(0) + row.to(tl.int64) * width + o_p
    tl.store(p_y, y.to(p_y.dtype.element_ty), mask=real)
    _keep(p_state, slot, x.to(p_state.dtype.element_ty), h1, h2, C, W, STRIDE, o_c, live)
