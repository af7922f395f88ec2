"""LUCID-PaTH's solve as an operator that the compiler does not look into; `path_grow` makes its state. Tensors share one dtype, float32 or
float64; keys are of norm 1 when they come."""

import torch
from torch import Tensor

from needlework.ops.path.arguments import check_data
from needlework.ops.path.chunk import History
from needlework.ops.path.custom_op import batch, copies, packed
from needlework.ops.path.solve import chunk
from needlework.ops.runtime.custom_op import backward_operator, differentiable, operator
from needlework.ops.runtime.precision import keep_precision


@operator
def lucid_path_fwd(
    k: Tensor, v: Tensor, beta: Tensor, w: Tensor,
    page_k: Tensor, page_y: Tensor, open_w: Tensor, open_beta: Tensor, length: Tensor, cu_seqlens: Tensor | None,
    window: int | None, chunk_size: int,
) -> Tensor:  # fmt: skip
    """y"""
    check_data(length, page_k.shape[1], window, cu_seqlens, *k.shape[:2])
    past = History(page_k, page_y, open_w, open_beta, length, window)
    y = chunk.forward(*batch(cu_seqlens, k, v, beta, w), past, chunk_size=chunk_size)
    (y,) = packed(cu_seqlens, y)
    return y


@torch.library.register_fake(lucid_path_fwd)
def _(k, v, *_):
    return v.new_empty(v.shape)


@backward_operator
def lucid_path_bwd(
    dy: Tensor, y: Tensor, k: Tensor, v: Tensor, beta: Tensor, w: Tensor,
    page_k: Tensor, page_y: Tensor, open_w: Tensor, open_beta: Tensor, length: Tensor, cu_seqlens: Tensor | None,
    window: int | None, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of lucid_path_fwd's eight floating inputs, in their order."""
    past = History(page_k, page_y, open_w, open_beta, length, window)
    dy, k, y, beta, w = batch(cu_seqlens, dy, k, y, beta, w)
    found = chunk.backward(dy, k, y, beta, w, past, chunk_size=chunk_size)
    own = packed(cu_seqlens, found.k, found.v, found.beta, found.w)
    return copies(*own, found.page_k, found.page_v, found.open_w, found.open_beta)


@torch.library.register_fake(lucid_path_bwd)
def _(dy, y, *inputs_and_settings):
    return tuple(x.new_empty(x.shape) for x in inputs_and_settings[:8])


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.window, ctx.chunk_size = inputs
    ctx.save_for_backward(output, *tensors)


def _backward(ctx, dy):
    return *lucid_path_bwd(dy, *ctx.saved_tensors, ctx.window, ctx.chunk_size), None, None, None, None


differentiable(lucid_path_fwd, _backward, _save)

keep_precision(lucid_path_fwd, lucid_path_bwd)
