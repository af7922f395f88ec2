"""LUCID-PaTH's solve as operators that the compiler does not look into: packing, and the growth of the state. Tensors share one dtype,
float32 or float64; keys are of norm 1 when they come, and the norms that they had are only kept."""

import torch
from torch import Tensor

from needlework.ops.common.growth import came_from, give_back, grow
from needlework.ops.common.packing import unpad
from needlework.ops.path.arguments import PathInputs, check_data
from needlework.ops.path.chunk import History
from needlework.ops.path.custom_op import batch, fake_final, new_tokens
from needlework.ops.path.kept import Moved, after, closing
from needlework.ops.path.solve import chunk
from needlework.ops.runtime.custom_op import backward_operator, differentiable, operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.precision import keep_precision


@operator
def lucid_path_fwd(
    k: Tensor, v: Tensor, beta: Tensor, w: Tensor, norm: Tensor,
    page_k: Tensor, page_norm: Tensor, page_y: Tensor, open_w: Tensor, open_beta: Tensor, length: Tensor, cu_seqlens: Tensor | None,
    window: int | None, chunk_size: int, keep_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y, and the final state's tensors (of no rows without keep_state)."""
    check_data(length, page_k.shape[1], window, cu_seqlens, *k.shape[:2])
    past = History(page_k, page_y, open_w, open_beta, length, window)
    k, v, beta, w, norm = batch(cu_seqlens, k, v, beta, w, norm)
    y = chunk.forward(k, v, beta, w, past, chunk_size=chunk_size)
    found = y if cu_seqlens is None else unpad(y, cu_seqlens)
    if not keep_state:
        return found, *each(lambda x: x[:, :0].clone(), page_k, page_norm, page_y, open_w, open_beta), length.clone()
    new = new_tokens(length, k, cu_seqlens)
    kept = after(past, new, PathInputs(k, k, v, beta, w), chunk_size=chunk_size)
    page_k, page_norm, page_y = grow((kept.page_k, page_norm, page_y), (kept.k, norm, y), length, cu_seqlens, window)
    return found.contiguous(), page_k, page_norm, page_y, kept.w, kept.beta, length + new


@torch.library.register_fake(lucid_path_fwd)
def _(k, v, beta, w, norm, page_k, page_norm, page_y, open_w, open_beta, length, cu_seqlens, window, chunk_size, keep_state):
    T = k.shape[1]
    pages, opened = (page_k, page_norm, page_y), (open_w, open_beta)
    return v.new_empty(v.shape), *fake_final(pages, opened, length, T, cu_seqlens, window, keep_state)


@backward_operator
def lucid_path_bwd(
    dy: Tensor, dpage_k: Tensor, dpage_norm: Tensor, dpage_y: Tensor, dopen_w: Tensor, dopen_beta: Tensor, y: Tensor,
    k: Tensor, v: Tensor, beta: Tensor, w: Tensor, norm: Tensor,
    page_k: Tensor, page_norm: Tensor, page_y: Tensor, open_w: Tensor, open_beta: Tensor, length: Tensor, cu_seqlens: Tensor | None,
    window: int | None, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of lucid_path_fwd's ten floating inputs, in their order."""
    past = History(page_k, page_y, open_w, open_beta, length, window)
    dy, y, k, beta, w, norm = batch(cu_seqlens, dy, y, k, beta, w, norm)
    P, T, new = page_k.shape[1], k.shape[1], new_tokens(length, k, cu_seqlens)
    dkept, dnorm, dpages_norm, dpages_y = None, torch.zeros_like(norm), torch.zeros_like(page_norm), torch.zeros_like(page_y)
    if dpage_k.shape[1]:
        source = came_from(P, T, length, cu_seqlens, window)
        through_k, through_norm, through_y = (give_back(x, source, P + T) for x in (dpage_k, dpage_norm, dpage_y))
        dkept = through_k[:, :P], through_k[:, P:]
        dy = dy + through_y[:, P:]
        dnorm, dpages_norm, dpages_y = through_norm[:, P:], through_norm[:, :P], through_y[:, :P]
    found = chunk.backward(dy, k, y, beta, w, past, dkept, closing(length, new), chunk_size=chunk_size)
    if dopen_w.shape[1]:
        found = found.with_open(Moved.of(length, new), dopen_w, dopen_beta, T)
    own = found.k, found.v, found.beta, found.w, dnorm
    own = own if cu_seqlens is None else each(lambda x: unpad(x, cu_seqlens), *own)
    pages = found.page_k, dpages_norm, found.page_v + dpages_y, found.open_w, found.open_beta
    # copies: an operator's results may not share memory
    return each(lambda x: x.clone(memory_format=torch.contiguous_format), *own, *pages)


@torch.library.register_fake(lucid_path_bwd)
def _(dy, dpage_k, dpage_norm, dpage_y, dopen_w, dopen_beta, y, *inputs_and_settings):
    return tuple(x.new_empty(x.shape) for x in inputs_and_settings[:10])


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.window, ctx.chunk_size, _ = inputs
    ctx.save_for_backward(output[0], *tensors)


def _backward(ctx, dy, dpage_k, dpage_norm, dpage_y, dopen_w, dopen_beta, dlength):
    cotangents = dy, dpage_k, dpage_norm, dpage_y, dopen_w, dopen_beta
    return *lucid_path_bwd(*cotangents, *ctx.saved_tensors, ctx.window, ctx.chunk_size), None, None, None, None, None


differentiable(lucid_path_fwd, _backward, _setup_context)

keep_precision(lucid_path_fwd, lucid_path_bwd)
