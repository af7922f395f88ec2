"""Rows of unit norm in one pass: y = r x, r = (Σx² + 1e-6)^-1/2, in float32 or wider inside. Knows no op."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # numbers a program holds: eight rows of 512 and more of shorter ones


@triton.jit(do_not_specialize=["rows"])
def l2_forward_kernel(p_x, p_y, p_r, rows, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, ACC: tl.constexpr):
    i_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    i_d = tl.arange(0, BD)
    real = (i_r < rows)[:, None] & (i_d < D)[None, :]
    at = i_r[:, None] * D + i_d[None, :]
    b_x = tl.load(p_x + at, mask=real, other=0).to(ACC)
    b_r = 1 / tl.sqrt(tl.sum(b_x * b_x, 1) + 1e-6)
    tl.store(p_y + at, (b_x * b_r[:, None]).to(p_y.dtype.element_ty), mask=real)
    tl.store(p_r + i_r, b_r, mask=i_r < rows)


@triton.jit(do_not_specialize=["rows"])
def l2_backward_kernel(p_dy, p_x, p_r, p_dx, rows, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, ACC: tl.constexpr):
    """dx = r (dy − y (y · dy)), y made again from x: the stored one is rounded."""
    i_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    i_d = tl.arange(0, BD)
    real = (i_r < rows)[:, None] & (i_d < D)[None, :]
    at = i_r[:, None] * D + i_d[None, :]
    b_r = tl.load(p_r + i_r, mask=i_r < rows, other=0)[:, None]
    b_y = tl.load(p_x + at, mask=real, other=0).to(ACC) * b_r
    b_dy = tl.load(p_dy + at, mask=real, other=0).to(ACC)
    b_dx = b_r * (b_dy - b_y * tl.sum(b_y * b_dy, 1)[:, None])
    tl.store(p_dx + at, b_dx.to(p_dx.dtype.element_ty), mask=real)


def l2_rows(x: Tensor) -> Tensor:
    """x / √(Σx² + 1e-6) over the last axis, in x's dtype."""
    return _l2_rows(x)[0]


@torch.library.custom_op("needlework::l2_rows", mutates_args=())
def _l2_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """The rows and r."""
    x = x.contiguous()
    y, r = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=_wide(x))
    _launch(l2_forward_kernel, x, x, y, r)
    return y, r


@_l2_rows.register_fake
def _(x):
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=_wide(x))


@torch.library.custom_op("needlework::l2_rows_bwd", mutates_args=())
def _l2_rows_bwd(dy: Tensor, x: Tensor, r: Tensor) -> Tensor:
    x = x.contiguous()
    dx = torch.empty_like(x)
    _launch(l2_backward_kernel, x, dy.contiguous(), x, r, dx)
    return dx


@_l2_rows_bwd.register_fake
def _(dy, x, r):
    return x.new_empty(x.shape)


def _launch(kernel, x: Tensor, *tensors: Tensor) -> None:
    D = x.shape[-1]
    if not x.numel():
        return
    rows, BD = x.numel() // D, triton.next_power_of_2(D)
    BR = max(1, BLOCK // BD)
    ACC = tl.float64 if x.dtype == torch.float64 else tl.float32
    kernel[triton.cdiv(rows, BR),](*tensors, rows, D=D, BD=BD, BR=BR, ACC=ACC, num_warps=8)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, dy, _):
    return _l2_rows_bwd(dy, *ctx.saved_tensors)


_l2_rows.register_autograd(_backward, setup_context=_save)
