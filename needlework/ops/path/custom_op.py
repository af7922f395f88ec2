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
from needlework.ops.runtime.custom_op import backward_operator, differentiable, fake, operator
from needlework.ops.runtime.each import Ts, each
from needlework.ops.runtime.precision import keep_precision


@operator
def path_fwd(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, w: Tensor, decay: Tensor | None,
    page_k: Tensor, page_v: Tensor, open_w: Tensor, open_beta: Tensor, length: Tensor, page_decay: Tensor | None,
    cu_seqlens: Tensor | None, window: int | None, scale: float, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o, and lse [B T Hq] for the backward."""
    check_data(length, page_k.shape[1], window, cu_seqlens, *q.shape[:2])
    past = chunk.History(page_k, page_v, open_w, open_beta, length, window, page_decay)
    inputs = PathInputs(*batch(cu_seqlens, q * scale, k, v, beta, w, decay))
    o, lse = chunk.forward(inputs, past, chunk_size=chunk_size)
    return packed(cu_seqlens, o, lse)


@torch.library.register_fake(path_fwd)
def _(q, k, v, *_):
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3])


@backward_operator
def path_bwd(
    do: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, w: Tensor, decay: Tensor | None,
    page_k: Tensor, page_v: Tensor, open_w: Tensor, open_beta: Tensor, length: Tensor, page_decay: Tensor | None,
    cu_seqlens: Tensor | None, window: int | None, scale: float, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of path_fwd's floating inputs, in their order but for those of the gates' sums, which come last."""
    past = chunk.History(page_k, page_v, open_w, open_beta, length, window, page_decay)
    do, o, lse = batch(cu_seqlens, do, o, lse)
    inputs = PathInputs(*batch(cu_seqlens, q * scale, k, v, beta, w, decay))
    found = backward.backward(do, o, lse, inputs, past, chunk_size=chunk_size)
    own = packed(cu_seqlens, found.q * scale, found.k, found.v, found.beta, found.w)
    (ddecay,) = packed(cu_seqlens, found.decay)
    return copies(*own, found.page_k, found.page_v, found.open_w, found.open_beta, ddecay, found.page_decay)


@fake(path_bwd)
def _(do, o, lse, q, k, v, beta, w, decay, page_k, page_v, open_w, open_beta, length, page_decay, *_):
    return each(torch.empty_like, q, k, v, beta, w, page_k, page_v, open_w, open_beta, decay, page_decay)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.window, ctx.scale, ctx.chunk_size = inputs
    ctx.save_for_backward(*output, *tensors)


def _backward(ctx, do, dlse):
    found = path_bwd(do, *ctx.saved_tensors, ctx.window, ctx.scale, ctx.chunk_size)
    return *in_place(found, ctx.saved_tensors[7]), None, None, None, None


def in_place(found: tuple[Tensor, ...], decay: Tensor | None, own: int = 5) -> tuple[Tensor | None, ...]:
    """Gradients as `path_bwd` and `path_grow_bwd` return them, `own` of them of a call's tokens without gates, in their inputs' places."""
    ddecay, dpage_decay = found[-2:] if decay is not None else (None, None)
    return *found[:own], ddecay, *found[own:-2], None, dpage_decay


differentiable(path_fwd, _backward, _save)


@operator
def path_grow(
    k: Tensor, v: Tensor, beta: Tensor, w: Tensor, decay: Tensor | None,
    page_k: Tensor, page_v: Tensor, open_w: Tensor, open_beta: Tensor, length: Tensor, page_decay: Tensor | None,
    cu_seqlens: Tensor | None, window: int | None, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The state's tensors after a call."""
    check_data(length, page_k.shape[1], window, cu_seqlens, *k.shape[:2])
    past, new = chunk.History(page_k, page_v, open_w, open_beta, length, window), _new(length, k, cu_seqlens)
    k, v, beta, w, decay = batch(cu_seqlens, k, v, beta, w, decay)
    kept = after(past, new, k, beta, w, chunk_size=chunk_size)
    more = () if decay is None or page_decay is None else ((page_decay, decay),)
    pages, rows = zip((kept.page_k, kept.k), (page_v, v), *more, strict=True)
    page_k, page_v, *sums = grow(pages, rows, length, cu_seqlens, window)
    return page_k, page_v, kept.w, kept.beta, length + new, sums[0] if sums else None


@fake(path_grow)
def _(k, v, beta, w, decay, page_k, page_v, open_w, open_beta, length, page_decay, cu_seqlens, window, chunk_size):
    if cu_seqlens is None:
        P = final_rows(page_k.shape[1], k.shape[1], window)
    else:
        P = torch.library.get_ctx().new_dynamic_size()
    sized = lambda x, rows: x.new_empty(len(x), rows, *x.shape[2:])
    opened = sized(open_w, BLOCK), sized(open_beta, BLOCK)
    sums = None if page_decay is None else sized(page_decay, P)
    return sized(page_k, P), sized(page_v, P), *opened, torch.empty_like(length), sums


@backward_operator
def path_grow_bwd(
    dpage_k: Tensor, dpage_v: Tensor, dopen_w: Tensor, dopen_beta: Tensor, dpage_decay: Tensor,
    k: Tensor, v: Tensor, beta: Tensor, w: Tensor, decay: Tensor | None,
    page_k: Tensor, page_v: Tensor, open_w: Tensor, open_beta: Tensor, length: Tensor, page_decay: Tensor | None,
    cu_seqlens: Tensor | None, window: int | None, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of path_grow's floating inputs, in their order but for those of the gates' sums, which come last. dpage_decay: anything
    where there are none."""
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
    before = found.page_k, through_v[:, :P], found.open_w + old_w, found.open_beta + old_beta
    if decay is None:
        return *copies(*own, *before), None, None
    through = give_back(dpage_decay, source, P + T)
    return copies(*own, *before, *packed(cu_seqlens, through[:, P:]), through[:, :P])


@fake(path_grow_bwd)
def _(
    dpage_k, dpage_v, dopen_w, dopen_beta, dpage_decay, k, v, beta, w, decay, page_k, page_v, open_w, open_beta, length, page_decay,
    *_,
):  # fmt: skip
    return each(torch.empty_like, k, v, beta, w, page_k, page_v, open_w, open_beta, decay, page_decay)


def _grow_save(ctx, inputs, output) -> None:
    *tensors, ctx.window, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors)


def _grow_backward(ctx, dpage_k, dpage_v, dopen_w, dopen_beta, dlength, dpage_decay):
    found = path_grow_bwd(dpage_k, dpage_v, dopen_w, dopen_beta, dpage_decay, *ctx.saved_tensors, ctx.window, ctx.chunk_size)
    return *in_place(found, ctx.saved_tensors[4], 4), None, None, None


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
