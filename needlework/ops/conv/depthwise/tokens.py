"""One token's part of a causal depthwise convolution: its inputs of x and of a state, their sum, what follows it, and the slopes of that.

Lags l = 0 … 3; narrower weights have zeros. A channel's taps [W] end with its bias b, if there is one. A token at position p of its
document sees lags up to p in x. Without a state there is nothing before; with one, [W−1 C] a sequence, lag l > p is its row W − 1 + p − l.

A tile has BC channels. Where heads get unit norm it has a head in each row of two axes, HEAD of its BH numbers, the rest zeros.
"""

import triton
import triton.language as tl


@triton.jit
def channels(i, C: tl.constexpr, HEAD: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr):
    """Tile i of C channels, and which of its numbers are some: [BC], or [BC/BH BH] of whole heads."""
    if HEAD:
        head = i * (BC // BH) + tl.arange(0, BC // BH)
        lane = tl.arange(0, BH)
        o_c = head[:, None] * HEAD + lane[None, :]
        real = (lane < HEAD)[None, :] & (o_c < C)
    else:
        o_c = i * BC + tl.arange(0, BC)
        real = o_c < C
    return o_c, real


@triton.jit
def _input(p_x, s, T, ROW: tl.constexpr, o_c, real):
    """Row s of a sequence, zeros outside of it."""
    return tl.load(p_x + tl.cast(s, tl.int64) * ROW + o_c, mask=real & (s >= 0) & (s < T), other=0.0)


@triton.jit
def _tap(p_w, lag: tl.constexpr, o_c, real, W: tl.constexpr, BIAS: tl.constexpr, ACC: tl.constexpr):
    """The weight of a lag; lag −1 is the bias."""
    there = (lag < W) & (lag >= -BIAS)
    return tl.load(p_w + o_c * (W + BIAS) + (W - 1 - lag), mask=real & there, other=0.0).to(ACC)


@triton.jit
def taps(p_w, o_c, real, W: tl.constexpr, BIAS: tl.constexpr, ACC: tl.constexpr):
    w0 = _tap(p_w, 0, o_c, real, W, BIAS, ACC)
    w1 = _tap(p_w, 1, o_c, real, W, BIAS, ACC)
    w2 = _tap(p_w, 2, o_c, real, W, BIAS, ACC)
    w3 = _tap(p_w, 3, o_c, real, W, BIAS, ACC)
    wb = _tap(p_w, -1, o_c, real, W, BIAS, ACC)
    return w0, w1, w2, w3, wb


@triton.jit
def four_rows(p_x, s, T, ROW: tl.constexpr, o_c, real):
    """Rows s to s + 3, ROW numbers apart, as they lie there."""
    x0 = _input(p_x, s, T, ROW, o_c, real)
    x1 = _input(p_x, s + 1, T, ROW, o_c, real)
    x2 = _input(p_x, s + 2, T, ROW, o_c, real)
    x3 = _input(p_x, s + 3, T, ROW, o_c, real)
    return x0, x1, x2, x3


@triton.jit
def widened(rows, ACC: tl.constexpr):
    x0, x1, x2, x3 = rows
    return x0.to(ACC), x1.to(ACC), x2.to(ACC), x3.to(ACC)


@triton.jit
def position_of(p_position, s, T, PACKED: tl.constexpr):
    if PACKED:
        p = tl.load(p_position + s, mask=s < T, other=0).to(tl.int32)
    else:
        p = s
    return p


@triton.jit
def slot_of(p_slots, n):
    """The slot of sequence n, −1 for none; its own number where there are no slots."""
    slot = tl.cast(n, tl.int64)
    if p_slots is not None:
        slot = tl.cast(tl.load(p_slots + n), tl.int64)
    return slot


@triton.jit
def source_of(p_slots, p_fresh, n):
    """The slot that sequence n begins with, −1 for zeros."""
    slot = slot_of(p_slots, n)
    if p_fresh is not None:
        slot = tl.where(tl.load(p_fresh + n), -1, slot)
    return slot


@triton.jit
def held(p_state, slot, row, ROW: tl.constexpr, W: tl.constexpr, STRIDE: tl.constexpr, o_c, real):
    """A row of a slot [W−1 C] as it lies there, zeros outside of it and of slot −1."""
    inside = (slot >= 0) & (row >= 0) & (row < W - 1)
    return tl.load(p_state + slot * STRIDE + row * ROW + o_c, mask=real & inside, other=0.0)


@triton.jit
def seen(
    s, p, x1, x2, x3, past, T, o_c, real,
    ROW: tl.constexpr, W: tl.constexpr, STRIDE: tl.constexpr, PACKED: tl.constexpr, KIND: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """How many inputs before token s count, at position p, and those 1, 2 and 3 before: the state's, as x would hold them, where
    the sequence has none yet. All three do but in packed documents: rows before a sequence are zeros."""
    p_state, p_document, p_slots, p_fresh = past
    reach = p if PACKED else 3
    if p_state is not None:
        reach = 3
        if p < 3:
            n = tl.program_id(2)
            if p_document is not None:
                n = tl.load(p_document + s, mask=s < T, other=0).to(tl.int32)
            slot = source_of(p_slots, p_fresh, n)
            h1 = held(p_state, slot, W - 2 + p, ROW, W, STRIDE, o_c, real)
            h2 = held(p_state, slot, W - 3 + p, ROW, W, STRIDE, o_c, real)
            h3 = held(p_state, slot, W - 4 + p, ROW, W, STRIDE, o_c, real)
            x1 = tl.where(p < 1, h1.to(KIND).to(ACC), x1)
            x2 = tl.where(p < 2, h2.to(KIND).to(ACC), x2)
            x3 = h3.to(KIND).to(ACC)
    return reach, x1, x2, x3


@triton.jit
def span_of(p_ends, n, T):
    """The first token of sequence n and how many it has; row n of a batch has T."""
    lo, length = n.to(tl.int64) * T, T
    if p_ends is not None:
        lo = tl.load(p_ends + n).to(tl.int64)
        length = (tl.load(p_ends + n + 1) - lo).to(tl.int32)
    return lo, length


@triton.jit
def weighted(p, x0, x1, x2, x3, w0, w1, w2, w3, wb):
    """c at position p, of the inputs 0 to 3 tokens before."""
    return wb + x0 * w0 + tl.where(p >= 1, x1 * w1, 0.0) + tl.where(p >= 2, x2 * w2, 0.0) + tl.where(p >= 3, x3 * w3, 0.0)


@triton.jit
def sigmoid(c, ASM: tl.constexpr):
    """1/(1 + e^−c). ASM: of float32 without what guards numbers under 2^-126, which are 0 then."""
    if ASM and c.dtype == tl.float32:
        share = tl.inline_asm_elementwise(
            """{ .reg .f32 a;
            mul.ftz.f32 a, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 a, a;
            add.ftz.f32 a, a, 0f3F800000; rcp.approx.ftz.f32 $0, a; }""",
            "=r,r", [c], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        share = 1.0 / (1.0 + tl.exp(-c))
    return share


@triton.jit
def fed(p, x0, x1, x2, x3, w0, w1, w2, w3, wb, SILU: tl.constexpr, ADD: tl.constexpr, ASM: tl.constexpr):
    """y at position p, of the inputs 0 to 3 tokens before: silu(c), x + c or c."""
    y = weighted(p, x0, x1, x2, x3, w0, w1, w2, w3, wb)
    if SILU:
        y *= sigmoid(y, ASM)
    if ADD:
        y += x0
    return y


@triton.jit
def over_norm(y):
    """r of y, for heads of unit norm r y."""
    return tl.rsqrt(tl.sum(y * y, 1, keep_dims=True) + 1e-6)


@triton.jit
def back(dy, c, x0, SILU: tl.constexpr, ADD: tl.constexpr, HEAD: tl.constexpr, ASM: tl.constexpr):
    """dy of what follows c, which is given as it is or as that of unit heads, and dc; the residual apart."""
    share = 1.0
    if SILU:
        share = sigmoid(c, ASM)
    y = c * share
    if HEAD:
        n = y + x0 if ADD else y
        along = tl.sum(n * dy, 1, keep_dims=True)
        r = over_norm(n)
        dy = r * (dy - n * (r * r * along))
    dc = dy
    if SILU:
        dc = dy * (share + (y - y * share))
    return dy, dc
