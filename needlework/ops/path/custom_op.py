"""PaTH attention as operators, opaque to torch.compile: the read with its packing, the growth of the state, and what only the values of
integer tensors can show. All floating tensors of a call share one dtype, float32 or float64."""

import torch
from torch import Tensor

from needlework.ops.attention.growth import came_from, final_rows, give_back, grow
from needlework.ops.common.packing import lengths, pad, unpad
from needlework.ops.path import backward, chunk
from needlework.ops.path.arguments import PathInputs, check_data
from needlework.ops.path.kept import Moved, after, closing, gradients_of_kept
from needlework.ops.path.state import BLOCK
from needlework.ops.runtime.custom_op import backward_operator, differentiable, operator
from needlework.ops.runtime.each import Ts, each
from needlework.ops.runtime.precision import keep_precision


@operator
def path_fwd(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, w: Tensor,
    page_k: Tensor, page_v: Tensor, open_w: Tensor, open_beta: Tensor, length: Tensor, cu_seqlens: Tensor | None,
    window: int | None, scale: float, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o, and lse [B T Hq] for the backward."""
    check_data(length, page_k.shape[1], window, cu_seqlens, *q.shape[:2])
    past = chunk.History(page_k, page_v, open_w, open_beta, length, window)
    inputs = PathInputs(*batch(cu_seqlens, q * scale, k, v, beta, w))
    o, lse = chunk.forward(inputs, past, chunk_size=chunk_size)
    return packed(cu_seqlens, o, lse)


@torch.library.register_fake(path_fwd)
def _(q, k, v, *_):
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3])


@backward_operator
def path_bwd(
    do: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, w: Tensor,
    page_k: Tensor, page_v: Tensor, open_w: Tensor, open_beta: Tensor, length: Tensor, cu_seqlens: Tensor | None,
    window: int | None, scale: float, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of path_fwd's nine floating inputs, in their order."""
    past = chunk.History(page_k, page_v, open_w, open_beta, length, window)
    do, o, lse = batch(cu_seqlens, do, o, lse)
    inputs = PathInputs(*batch(cu_seqlens, q * scale, k, v, beta, w))
    found = backward.backward(do, o, lse, inputs, past, chunk_size=chunk_size)
    dq, dk, dv, dbeta, dw = packed(cu_seqlens, found.q * scale, found.k, found.v, found.beta, found.w)
    return copies(dq, dk, dv, dbeta, dw, found.page_k, found.page_v, found.open_w, found.open_beta)


@torch.library.register_fake(path_bwd)
def _(do, o, lse, *inputs_and_settings):
    return tuple(x.new_empty(x.shape) for x in inputs_and_settings[:9])


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.window, ctx.scale, ctx.chunk_size = inputs
    ctx.save_for_backward(*output, *tensors)


def _backward(ctx, do, dlse):
    return *path_bwd(do, *ctx.saved_tensors, ctx.window, ctx.scale, ctx.chunk_size), None, None, None, None, None


differentiable(path_fwd, _backward, _save)


@operator
def path_grow(
    k: Tensor, v: Tensor, beta: Tensor, w: Tensor,
    page_k: Tensor, page_v: Tensor, open_w: Tensor, open_beta: Tensor, length: Tensor, cu_seqlens: Tensor | None,
    window: int | None, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The state's tensors after a call."""
    check_data(length, page_k.shape[1], window, cu_seqlens, *k.shape[:2])
    past, new = chunk.History(page_k, page_v, open_w, open_beta, length, window), _new(length, k, cu_seqlens)
    k, v, beta, w = batch(cu_seqlens, k, v, beta, w)
    kept = after(past, new, k, beta, w, chunk_size=chunk_size)
    page_k, page_v = grow((kept.page_k, page_v), (kept.k, v), length, cu_seqlens, window)
    return page_k, page_v, kept.w, kept.beta, length + new


@torch.library.register_fake(path_grow)
def _(k, v, beta, w, page_k, page_v, open_w, open_beta, length, cu_seqlens, window, chunk_size):
    if cu_seqlens is None:
        P = final_rows(page_k.shape[1], k.shape[1], window)
    else:
        P = torch.library.get_ctx().new_dynamic_size()
    sizes = (page_k, P), (page_v, P), (open_w, BLOCK), (open_beta, BLOCK)
    return *(x.new_empty(len(x), rows, *x.shape[2:]) for x, rows in sizes), torch.empty_like(length)


@backward_operator
def path_grow_bwd(
    dpage_k: Tensor, dpage_v: Tensor, dopen_w: Tensor, dopen_beta: Tensor, k: Tensor, v: Tensor, beta: Tensor, w: Tensor,
    page_k: Tensor, page_v: Tensor, open_w: Tensor, open_beta: Tensor, length: Tensor, cu_seqlens: Tensor | None,
    window: int | None, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of path_grow's eight floating inputs, in their order."""
    past, new = chunk.History(page_k, page_v, open_w, open_beta, length, window), _new(length, k, cu_seqlens)
    k, beta, w = batch(cu_seqlens, k, beta, w)
    P, T = page_k.shape[1], k.shape[1]
    source = came_from(P, T, length, cu_seqlens, window)
    through_k, through_v = (give_back(x, source, P + T) for x in (dpage_k, dpage_v))
    found = gradients_of_kept(
        past, through_k[:, :P], through_k[:, P:], k, beta, w, closing(length, new), chunk_size=chunk_size
    )  # fmt: skip
    moved = Moved.of(length, new)
    (old_w, new_w), (old_beta, new_beta) = moved.back(dopen_w, T), moved.back(dopen_beta, T)
    own = packed(cu_seqlens, found.k, through_v[:, P:], found.beta + new_beta, found.w + new_w)
    return copies(*own, found.page_k, through_v[:, :P], found.open_w + old_w, found.open_beta + old_beta)


@torch.library.register_fake(path_grow_bwd)
def _(dpage_k, dpage_v, dopen_w, dopen_beta, *inputs_and_settings):
    return tuple(x.new_empty(x.shape) for x in inputs_and_settings[:8])


def _grow_save(ctx, inputs, output) -> None:
    *tensors, ctx.window, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors)


def _grow_backward(ctx, dpage_k, dpage_v, dopen_w, dopen_beta, dlength):
    found = path_grow_bwd(dpage_k, dpage_v, dopen_w, dopen_beta, *ctx.saved_tensors, ctx.window, ctx.chunk_size)
    return *found, None, None, None, None


differentiable(path_grow, _grow_backward, _grow_save)


def batch(cu_seqlens: Tensor | None, *tensors: *Ts) -> tuple[*Ts]:
    """One sequence per row, padded at the tail, where causality keeps the padding from every real token."""
    return tensors if cu_seqlens is None else each(lambda x: pad(x, cu_seqlens), *tensors)


def packed(cu_seqlens: Tensor | None, *tensors: *Ts) -> tuple[*Ts]:
    """The inverse of `batch`."""
    return tensors if cu_seqlens is None else each(lambda x: unpad(x, cu_seqlens), *tensors)


def copies(*tensors: *Ts) -> tuple[*Ts]:
    """Results of an operator, which may not share memory."""
    return each(lambda x: x.clone(memory_format=torch.contiguous_format), *tensors)


def _new(length: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[N] tokens that a call brings each sequence."""
    return torch.full_like(length, k.shape[1]) if cu_seqlens is None else lengths(cu_seqlens).to(length)


keep_precision(path_fwd, path_bwd, path_grow, path_grow_bwd)
