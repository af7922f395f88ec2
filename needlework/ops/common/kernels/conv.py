"""Causal depthwise convolution, and what follows it, in one pass over the tokens; its gradients in another.

    c_t = Σ_l w_l x_{t−l}      dc = dy silu'(c), or dy      dx_t = Σ_l w_l dc_{t+l} (+ dy_t)      dw_l = Σ_t dc_t x_{t−l}

A program walks a run of tokens, four at a time, and keeps, for its channels, the last inputs and the last dc in registers: each
number is read once, but for a few around the run. Lags l = 0 … 3; narrower weights have zeros. A token at position p of its document sees lags up to p.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.runtime.custom_op import backward_operator, differentiable, operator
from needlework.ops.runtime.launch_configs import Case, LaunchConfig, launch_config, split
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import NAMES, TYPES, accumulator, cdiv

ENGINE = "common/conv"


@triton.jit
def _input(p_x, s, T, ROW: tl.constexpr, o_c, real, ACC: tl.constexpr):
    """Row s of a sequence, zeros outside of it."""
    return tl.load(p_x + tl.cast(s, tl.int64) * ROW + o_c, mask=real & (s >= 0) & (s < T), other=0.0).to(ACC)


@triton.jit
def _tap(p_w, lag: tl.constexpr, o_c, real, W: tl.constexpr, ACC: tl.constexpr):
    """The weight [C W] of a lag."""
    return tl.load(p_w + o_c * W + (W - 1 - lag), mask=real & (lag < W), other=0.0).to(ACC)


@triton.jit
def _taps(p_w, o_c, real, W: tl.constexpr, ACC: tl.constexpr):
    w0 = _tap(p_w, 0, o_c, real, W, ACC)
    w1 = _tap(p_w, 1, o_c, real, W, ACC)
    w2 = _tap(p_w, 2, o_c, real, W, ACC)
    w3 = _tap(p_w, 3, o_c, real, W, ACC)
    return w0, w1, w2, w3


@triton.jit
def _rows(p_x, s, T, ROW: tl.constexpr, o_c, real, ACC: tl.constexpr):
    """Rows s to s + 3, ROW numbers apart."""
    x0 = _input(p_x, s, T, ROW, o_c, real, ACC)
    x1 = _input(p_x, s + 1, T, ROW, o_c, real, ACC)
    x2 = _input(p_x, s + 2, T, ROW, o_c, real, ACC)
    x3 = _input(p_x, s + 3, T, ROW, o_c, real, ACC)
    return x0, x1, x2, x3


@triton.jit
def _position(p_position, s, T, PACKED: tl.constexpr):
    if PACKED:
        p = tl.load(p_position + s, mask=s < T, other=0).to(tl.int32)
    else:
        p = s
    return p


@triton.jit
def _sum(p, x0, x1, x2, x3, w0, w1, w2, w3):
    """c at position p, of the inputs 0 to 3 tokens before."""
    return x0 * w0 + tl.where(p >= 1, x1 * w1, 0.0) + tl.where(p >= 2, x2 * w2, 0.0) + tl.where(p >= 3, x3 * w3, 0.0)


@triton.jit
def _fed(p, x0, x1, x2, x3, w0, w1, w2, w3, SILU: tl.constexpr, ADD: tl.constexpr):
    """y at position p, of the inputs 0 to 3 tokens before."""
    c = _sum(p, x0, x1, x2, x3, w0, w1, w2, w3)
    if SILU:
        c = c / (1.0 + tl.exp(-c))
    if ADD:
        c += x0
    return c


@triton.jit(do_not_specialize=["T"])
def conv_forward_kernel(
    p_x, p_w, p_y, p_position, T,
    C: tl.constexpr, ROW: tl.constexpr, W: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr, SILU: tl.constexpr, ADD: tl.constexpr,
    PACKED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """BT tokens of BC of C channels of a row of the batch, four at a time while the next four are on their way. x has the channels of
    other parts beside them, y has not."""
    o_c = tl.program_id(0) * BC + tl.arange(0, BC)
    real = o_c < C
    lo = tl.program_id(1) * BT
    hi = tl.minimum(lo + BT, T)
    base = tl.program_id(2).to(tl.int64) * T
    p_x += base * ROW
    p_y += base * C
    w0, w1, w2, w3 = _taps(p_w, o_c, real, W, ACC)
    _, h3, h2, h1 = _rows(p_x, lo - 4, T, ROW, o_c, real, ACC)  # 3, 2, 1 tokens before x0
    x0, x1, x2, x3 = _rows(p_x, lo, T, ROW, o_c, real, ACC)
    for s in range(lo, hi, 4):
        n0, n1, n2, n3 = _rows(p_x, s + 4, T, ROW, o_c, real, ACC)
        y0 = _fed(_position(p_position, s, T, PACKED), x0, h1, h2, h3, w0, w1, w2, w3, SILU, ADD)
        y1 = _fed(_position(p_position, s + 1, T, PACKED), x1, x0, h1, h2, w0, w1, w2, w3, SILU, ADD)
        y2 = _fed(_position(p_position, s + 2, T, PACKED), x2, x1, x0, h1, w0, w1, w2, w3, SILU, ADD)
        y3 = _fed(_position(p_position, s + 3, T, PACKED), x3, x2, x1, x0, w0, w1, w2, w3, SILU, ADD)
        at = p_y + tl.cast(s, tl.int64) * C + o_c
        tl.store(at, y0.to(p_y.dtype.element_ty), mask=real)
        tl.store(at + C, y1.to(p_y.dtype.element_ty), mask=real & (s + 1 < hi))
        tl.store(at + 2 * C, y2.to(p_y.dtype.element_ty), mask=real & (s + 2 < hi))
        tl.store(at + 3 * C, y3.to(p_y.dtype.element_ty), mask=real & (s + 3 < hi))
        h1, h2, h3 = x3, x2, x1
        x0, x1, x2, x3 = n0, n1, n2, n3


@triton.jit
def _before(p, dy, x0, x1, x2, x3, w0, w1, w2, w3, SILU: tl.constexpr):
    """dc at position p, and what of it goes 1, 2 and 3 tokens back: none past a document's start."""
    dc = dy
    if SILU:
        c = _sum(p, x0, x1, x2, x3, w0, w1, w2, w3)
        share = 1.0 / (1.0 + tl.exp(-c))
        dc = dy * share * (1.0 + c * (1.0 - share))
    return dc, tl.where(p >= 1, dc, 0.0), tl.where(p >= 2, dc, 0.0), tl.where(p >= 3, dc, 0.0)


@triton.jit
def _own(s, hi, a, b, c, d):
    """Of tokens s to s + 3, those before `hi`: the ones past the run are another program's part of dw."""
    return tl.where(s < hi, a, 0.0), tl.where(s + 1 < hi, b, 0.0), tl.where(s + 2 < hi, c, 0.0), tl.where(s + 3 < hi, d, 0.0)


@triton.jit(do_not_specialize=["T"])
def conv_backward_kernel(
    p_dy, p_x, p_w, p_dx, p_dw, p_position, T,
    C: tl.constexpr, ROW: tl.constexpr, W: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr, SILU: tl.constexpr, ADD: tl.constexpr,
    PACKED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dx of BT tokens of BC channels, and their part of dw: p_dw [B runs 4 ROW]. Three tokens past the run are walked too.

    Four tokens s … s + 3 a turn, which finish dx of the four from s − 3 on; a, b, c, d are their dc by lag.
    """
    o_c = tl.program_id(0) * BC + tl.arange(0, BC)
    real = o_c < C
    lo = tl.program_id(1) * BT
    hi = tl.minimum(lo + BT, T)
    base = tl.program_id(2).to(tl.int64) * T
    p_dy += base * C
    p_x += base * ROW
    p_dx += base * ROW
    w0, w1, w2, w3 = _taps(p_w, o_c, real, W, ACC)
    _, h3, h2, h1 = _rows(p_x, lo - 4, T, ROW, o_c, real, ACC)
    none = tl.zeros([BC], ACC)
    # what the tokens so far give dx of the last three
    from3, from2, from1 = none, none, none
    g0, g1, g2, g3 = none, none, none, none
    for s in range(lo, hi + 3, 4):
        x0, x1, x2, x3 = _rows(p_x, s, T, ROW, o_c, real, ACC)
        e0, e1, e2, e3 = _rows(p_dy, s, T, C, o_c, real, ACC)
        a0, a1, a2, a3 = _before(_position(p_position, s, T, PACKED), e0, x0, h1, h2, h3, w0, w1, w2, w3, SILU)
        b0, b1, b2, b3 = _before(_position(p_position, s + 1, T, PACKED), e1, x1, x0, h1, h2, w0, w1, w2, w3, SILU)
        c0, c1, c2, c3 = _before(_position(p_position, s + 2, T, PACKED), e2, x2, x1, x0, h1, w0, w1, w2, w3, SILU)
        d0, d1, d2, d3 = _before(_position(p_position, s + 3, T, PACKED), e3, x3, x2, x1, x0, w0, w1, w2, w3, SILU)
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
        a0, b0, c0, d0 = _own(s, hi, a0, b0, c0, d0)
        a1, b1, c1, d1 = _own(s, hi, a1, b1, c1, d1)
        a2, b2, c2, d2 = _own(s, hi, a2, b2, c2, d2)
        a3, b3, c3, d3 = _own(s, hi, a3, b3, c3, d3)
        g0 += a0 * x0 + b0 * x1 + c0 * x2 + d0 * x3
        g1 += a1 * h1 + b1 * x0 + c1 * x1 + d1 * x2
        g2 += a2 * h2 + b2 * h1 + c2 * x0 + d2 * x1
        g3 += a3 * h3 + b3 * h2 + c3 * h1 + d3 * x0
        h1, h2, h3 = x3, x2, x1
    p_dw += (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * (4 * ROW) + o_c
    tl.store(p_dw, g0, mask=real)
    tl.store(p_dw + ROW, g1, mask=real)
    tl.store(p_dw + 2 * ROW, g2, mask=real)
    tl.store(p_dw + 3 * ROW, g3, mask=real)


@operator
def conv_triton(x: Tensor, weight: Tensor, position: Tensor | None, after: str, parts: list[int]) -> list[Tensor]:
    """y of contiguous x [B T C], a tensor for each of `parts`, so many channels; position [T]: of each token in its document."""
    y = _apart(x, weight, position, after, parts)
    if x.numel():
        chosen = launch_config(ENGINE, x.device, x.dtype, *x.shape[2:] * 2)
        for one, w, made in zip(x.split(parts, -1), weight.contiguous().split(parts), y, strict=True):
            _launch(conv_forward_kernel, chosen, x, made, w.shape[1], position, after, one, w, made)
    return y


@torch.library.register_fake(conv_triton)
def _apart(x, weight, position, after, parts):
    return [x.new_empty(*x.shape[:2], channels) for channels in parts]


@backward_operator
def conv_triton_bwd(
    dy: list[Tensor], x: Tensor, weight: Tensor, position: Tensor | None, after: str
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx and dweight; a token's part of dweight is summed with those of its run first: no atomics."""
    dx = torch.empty_like(x)
    (B, T, C), W = x.shape, weight.shape[1]
    if not x.numel():
        return dx, torch.zeros_like(weight)
    chosen = launch_config(ENGINE, x.device, x.dtype, C, C)
    runs = cdiv(T, chosen.launch[conv_backward_kernel.__name__]["BT"])
    dw = x.new_empty(B * runs, 4, C, dtype=accumulator(x.dtype))
    parts = [one.shape[-1] for one in dy]
    wide = (tensor.split(parts, -1) for tensor in (x, dx, dw))
    for one_dy, w, one, one_dx, one_dw in zip(dy, weight.contiguous().split(parts), *wide, strict=True):
        _launch(conv_backward_kernel, chosen, x, one_dy, W, position, after, one_dy, one, w, one_dx, one_dw)
    return dx, dw.sum(0)[:W].flip(0).T.to(weight.dtype).contiguous()


@torch.library.register_fake(conv_triton_bwd)
def _(dy, x, weight, position, after):
    return torch.empty_like(x), weight.new_empty(weight.shape)


def _save(ctx, inputs, output) -> None:
    x, weight, position, ctx.after, _ = inputs
    ctx.save_for_backward(x, weight, position)


def _backward(ctx, dy):
    return *conv_triton_bwd([one.contiguous() for one in dy], *ctx.saved_tensors, ctx.after), None, None, None


differentiable(conv_triton, _backward, _save)


def _launch(
    kernel, config: LaunchConfig, x: Tensor, part: Tensor, W: int, position: Tensor | None, after: str, *given: Tensor
) -> None:
    """`kernel` over the channels of `part`, which x has among others."""
    B, T, C = part.shape
    own = _constants(config, kernel, x.dtype, C, x.shape[-1], W, position, after)
    run(kernel, (cdiv(C, own["BC"]), cdiv(T, own["BT"]), B), *given, x if position is None else position, T, **own)


def _constants(
    config: LaunchConfig, kernel, dtype: torch.dtype, C: int, row: int, W: int, packed: object, after: str
) -> dict[str, object]:  # fmt: skip
    return config.launch[kernel.__name__] | {
        "C": C, "ROW": row, "W": W, "SILU": int(after == "silu"), "ADD": int(after == "add"), "PACKED": int(packed is not None),
        "ACC": TYPES[accumulator(dtype)],
    }  # fmt: skip


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Both kernels on K channels of twice as many, of four taps, with SiLU on packed documents and with the residual."""
    own, wide = NAMES[dtype], NAMES[accumulator(dtype)]
    types = dict.fromkeys(("p_x", "p_y", "p_dy", "p_dx"), f"*{own}") | dict.fromkeys(("p_w", "p_dw"), f"*{wide}")
    cases = []
    for packed, after in ((True, "silu"), (None, "add")):
        for kernel in (conv_forward_kernel, conv_backward_kernel):
            known = _constants(config, kernel, dtype, K, 2 * K, 4, packed, after)
            known, options = split(known)
            of = types | {"p_position": "*i64" if packed else f"*{own}", "T": "i32"}
            cases.append(Case(kernel, {name: of[name] for name in kernel.arg_names if name in of}, known, options))
    return cases
