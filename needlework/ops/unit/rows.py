"""Rows of unit norm in one pass: y = r x, r = (Σx² + 1e-6)^-1/2, in float32 or wider inside. Knows no op."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.runtime.custom_op import differentiable
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig, launch_config, misfit, split
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.recorded import recorded_backward_operator, recorded_operator
from needlework.ops.runtime.triton_types import NAMES, TYPES, accumulator, cdiv, next_power_of_2
from needlework.ops.unit.reference import unit_rows

ENGINE = "unit/rows"


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
    """x / √(Σx² + 1e-6) over the last axis, in x's dtype; without the kernel where no launch config may be taken."""
    return unit_rows(x) if misfit(ENGINE, x.device, x.dtype, *x.shape[-1:] * 2) else l2_rows_fwd(x)[0]


@recorded_operator
def l2_rows_fwd(x: Tensor) -> tuple[Tensor, Tensor]:
    """The rows and r."""
    x = x.contiguous()
    y, r = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=_wide(x))
    _launch(l2_forward_kernel, x, x, y, r)
    return y, r


@torch.library.register_fake(l2_rows_fwd)
def _(x):
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=_wide(x))


@recorded_backward_operator
def l2_rows_bwd(dy: Tensor, x: Tensor, r: Tensor) -> Tensor:
    x = x.contiguous()
    dx = torch.empty_like(x)
    _launch(l2_backward_kernel, x, dy.contiguous(), x, r, dx)
    return dx


@torch.library.register_fake(l2_rows_bwd)
def _(dy, x, r):
    return x.new_empty(x.shape)


def _launch(kernel, x: Tensor, *tensors: Tensor) -> None:
    D = x.shape[-1]
    if not x.numel():
        return
    constants, rows = _constants(launch_config(ENGINE, x.device, x.dtype, D, D), x.dtype, D), x.numel() // D
    run(kernel, (cdiv(rows, constants["BR"]),), *tensors, rows, **constants)


def _constants(config: LaunchConfig, dtype: torch.dtype, D: int) -> Constants:
    own = dict(config.launch["rows"])
    BD = next_power_of_2(D)
    BR = max(1, own.pop("BLOCK") // BD)
    return {"D": D, "BD": BD, "BR": BR, "ACC": TYPES[accumulator(dtype)], **own}


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Both kernels on rows of K."""
    own = f"*{NAMES[dtype]}"
    constants, options = split(_constants(config, dtype, K))
    types = dict.fromkeys(("p_x", "p_y", "p_dy", "p_dx"), own) | {"p_r": "*fp32", "rows": "i32"}
    return [
        Case(kernel, {name: types[name] for name in kernel.arg_names if name in types}, constants, options)
        for kernel in (l2_forward_kernel, l2_backward_kernel)
    ]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, dy, _):
    return l2_rows_bwd(dy, *ctx.saved_tensors)


differentiable(l2_rows_fwd, _backward, _save)
