"""The rows of `chunk.py` as two operators that the compiler does not look into; what cu_seqlens holds is data and checked here."""

import torch
from torch import Tensor

from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.mamba3 import chunk
from needlework.ops.mamba3.line import Line
from needlework.ops.runtime.custom_op import backward_operator, differentiable, operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.precision import keep_precision


@operator
def mamba3_rows_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, dt: Tensor, lam: Tensor, rate: Tensor,
    k0: Tensor, v0: Tensor, angle0: Tensor, cu_seqlens: Tensor | None, halves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The tensors of `chunk.Rows`."""
    line = _line(cu_seqlens, q)
    return tuple(chunk.forward(q, k, v, g, dt, lam, rate, k0, v0, angle0, line, halves))


@backward_operator
def mamba3_rows_bwd(
    dq: Tensor, dk: Tensor, du: Tensor, down: Tensor, dlater: Tensor, dk_end: Tensor, dangle_end: Tensor,
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, dt: Tensor, lam: Tensor, rate: Tensor,
    k0: Tensor, v0: Tensor, angle0: Tensor, cu_seqlens: Tensor | None, halves: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, g, dt, lam, rate, k0, v0, angle0."""
    d = chunk.Rows(dq, dk, du, down, dlater, dk_end, dangle_end)
    found = chunk.backward(d, q, k, v, g, dt, lam, rate, k0, v0, angle0, _line(cu_seqlens, q), halves)
    return [*each(Tensor.contiguous, *found)]


def _line(cu_seqlens: Tensor | None, q: Tensor) -> Line:
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *q.shape[:2])
    return Line.of(cu_seqlens, q.shape[1])


@torch.library.register_fake(mamba3_rows_fwd)
def _(q, k, v, g, dt, lam, rate, k0, v0, angle0, cu_seqlens, halves):
    (B, T, H, R, K), V = q.shape, v.shape[-1]
    rows = (B, T + (1 if cu_seqlens is None else len(k0)), H, R)
    pairs = q.new_empty(B, T, H, R, R)
    later = q.new_empty(pairs.shape if R > 1 else 0)
    ends = k0.new_empty(k0.shape), angle0.new_empty(angle0.shape)
    return q.new_empty(*rows, K), q.new_empty(*rows, K), q.new_empty(*rows, V), pairs, later, *ends


@torch.library.register_fake(mamba3_rows_bwd)
def _(dq, dk, du, down, dlater, dk_end, dangle_end, *given):
    return [x.new_empty(x.shape) for x in given[:10]]


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.halves = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, *gradients):
    return *mamba3_rows_bwd(*gradients, *ctx.saved_tensors, ctx.halves), None, None


differentiable(mamba3_rows_fwd, _backward, _save)
keep_precision(mamba3_rows_fwd, mamba3_rows_bwd)
