"""PaTH attention as operators, opaque to torch.compile: the read with its packing, the growth of the state, and what only the values of
integer tensors can show. All floating tensors of a call share one dtype, float32 or float64."""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.attention.growth import came_from, final_rows, give_back, grow
from needlework.ops.common.packing import lengths, pad, unpad
from needlework.ops.path import backward, chunk
from needlework.ops.path.arguments import PathInputs, PathKeys, check_data
from needlework.ops.path.kept import Moved, after, closing, gradients_of_kept
from needlework.ops.path.state import PathState
from needlework.ops.runtime.custom_op import backward_operator, differentiable, fake, operator
from needlework.ops.runtime.each import Ts, each
from needlework.ops.runtime.precision import keep_precision


class StateGradients(NamedTuple):
    """Of a state's floating tensors, those of its pages and of its open block."""

    k: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor
    decay: Tensor | None


@operator
def path_fwd(
    inputs: PathInputs, initial_state: PathState, cu_seqlens: Tensor | None, window: int | None, scale: float, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """o, and lse [B T Hq] for the backward."""
    check_data(initial_state.length, initial_state.k.shape[1], window, cu_seqlens, *inputs.q.shape[:2])
    o, lse = chunk.forward(_batch(inputs, cu_seqlens, scale), _history(initial_state, window), chunk_size=chunk_size)
    return packed(cu_seqlens, o, lse)


@fake(path_fwd)
def _(inputs: PathInputs, *_):
    q, v = inputs.q, inputs.v
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3])


@backward_operator
def path_bwd(
    do: Tensor, o: Tensor, lse: Tensor, inputs: PathInputs, initial_state: PathState, cu_seqlens: Tensor | None,
    window: int | None, scale: float, chunk_size: int,
) -> tuple[PathInputs, StateGradients]:  # fmt: skip
    """Gradients of `inputs` and `initial_state`."""
    do, o, lse = batch(cu_seqlens, do, o, lse)
    past = _history(initial_state, window)
    found = backward.backward(do, o, lse, _batch(inputs, cu_seqlens, scale), past, chunk_size=chunk_size)
    own = packed(cu_seqlens, found.q * scale, found.k, found.v, found.beta, found.w, found.decay)
    before = found.page_k, found.page_v, found.open_w, found.open_beta, found.page_decay
    return PathInputs(*copies(*own)), StateGradients(*copies(*before))


@fake(path_bwd)
def _(do: Tensor, o: Tensor, lse: Tensor, inputs: PathInputs, initial_state: PathState, *_):
    return PathInputs(*like(*inputs)), StateGradients(*like(*initial_state[:4], initial_state.decay))


def _save(ctx, inputs, output) -> None:
    given, initial_state, cu_seqlens, ctx.window, ctx.scale, ctx.chunk_size = inputs
    ctx.save_for_backward(*output, *given, *initial_state, cu_seqlens)


def _backward(ctx, do, dlse):
    found = path_bwd(do, *ctx.saved_tensors, ctx.window, ctx.scale, ctx.chunk_size)
    return *_in_place(ctx, *found), None, None, None, None


def _in_place(ctx, *found: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of an operator's tensors where these are: the state's length has none, nor have gates that are not there."""
    *others, dpage_decay = found
    return tuple(dx if needed else None for dx, needed in zip((*others, None, dpage_decay), ctx.needs_input_grad, strict=False))


differentiable(path_fwd, _backward, _save)


@operator
def path_grow(
    keys: PathKeys,
    decay: Tensor | None,
    initial_state: PathState,
    cu_seqlens: Tensor | None,
    window: int | None,
    chunk_size: int,
) -> PathState:
    """The state after a call."""
    length = initial_state.length
    check_data(length, initial_state.k.shape[1], window, cu_seqlens, *keys.k.shape[:2])
    new = _new(length, keys.k, cu_seqlens)
    k, v, beta, w, decay = batch(cu_seqlens, *keys, decay)
    kept = after(chunk.History(*initial_state[:5], window), new, k, beta, w, chunk_size=chunk_size)
    more = () if decay is None or initial_state.decay is None else ((initial_state.decay, decay),)
    pages, rows = zip((kept.page_k, kept.k), (initial_state.v, v), *more, strict=True)
    page_k, page_v, *sums = grow(pages, rows, length, cu_seqlens, window)
    return PathState(page_k, page_v, kept.w, kept.beta, length + new, sums[0] if sums else None)


@fake(path_grow)
def _(
    keys: PathKeys,
    decay: Tensor | None,
    initial_state: PathState,
    cu_seqlens: Tensor | None,
    window: int | None,
    chunk_size: int,
):
    if cu_seqlens is None:
        P = final_rows(initial_state.k.shape[1], keys.k.shape[1], window)
    else:
        P = torch.library.get_ctx().new_dynamic_size()
    opened = like(initial_state.w, initial_state.beta)
    page_k, page_v, sums = each(
        lambda x: x.new_empty(len(x), P, *x.shape[2:]), initial_state.k, initial_state.v, initial_state.decay
    )
    return PathState(page_k, page_v, *opened, torch.empty_like(initial_state.length), sums)


@backward_operator
def path_grow_bwd(
    grown: StateGradients, keys: PathKeys, decay: Tensor | None, initial_state: PathState, cu_seqlens: Tensor | None,
    window: int | None, chunk_size: int,
) -> tuple[PathKeys, Tensor | None, StateGradients]:  # fmt: skip
    """Gradients of `keys`, `decay` and `initial_state` from those of the state after the call."""
    length, new = initial_state.length, _new(initial_state.length, keys.k, cu_seqlens)
    k, beta, w = batch(cu_seqlens, keys.k, keys.beta, keys.w)
    P, T = initial_state.k.shape[1], k.shape[1]
    source = came_from(P, T, length, cu_seqlens, window)
    through_k, through_v, through = each(lambda x: give_back(x, source, P + T), grown.k, grown.v, grown.decay)
    past, end = chunk.History(*initial_state[:5], window), closing(length, new)
    found = gradients_of_kept(past, through_k[:, :P], through_k[:, P:], k, beta, w, end, chunk_size=chunk_size)
    moved = Moved.of(length, new)
    (old_w, new_w), (old_beta, new_beta) = moved.back(grown.w, T), moved.back(grown.beta, T)
    own = packed(cu_seqlens, found.k, through_v[:, P:], found.beta + new_beta, found.w + new_w)
    ddecay, dpage_decay = (None, None) if through is None else (*packed(cu_seqlens, through[:, P:]), through[:, :P])
    before = found.page_k, through_v[:, :P], found.open_w + old_w, found.open_beta + old_beta, dpage_decay
    return PathKeys(*copies(*own)), *copies(ddecay), StateGradients(*copies(*before))


@fake(path_grow_bwd)
def _(grown: StateGradients, keys: PathKeys, decay: Tensor | None, initial_state: PathState, *_):
    return PathKeys(*like(*keys)), *like(decay), StateGradients(*like(*initial_state[:4], initial_state.decay))


def _grow_save(ctx, inputs, output) -> None:
    keys, decay, initial_state, cu_seqlens, ctx.window, ctx.chunk_size = inputs
    ctx.save_for_backward(*keys, decay, *initial_state, cu_seqlens)


def _grow_backward(ctx, dk, dv, dw, dbeta, dlength, ddecay):
    found = path_grow_bwd(dk, dv, dw, dbeta, ddecay, *ctx.saved_tensors, ctx.window, ctx.chunk_size)
    return *_in_place(ctx, *found), None, None, None


differentiable(path_grow, _grow_backward, _grow_save)


def _batch(inputs: PathInputs, cu_seqlens: Tensor | None, scale: float) -> PathInputs:
    """Of an operator's inputs; q times the scores' scale."""
    return PathInputs(*batch(cu_seqlens, inputs.q * scale, *inputs[1:]))


def _history(initial_state: PathState, window: int | None) -> chunk.History:
    return chunk.History(*initial_state[:5], window, initial_state.decay)


def batch(cu_seqlens: Tensor | None, *tensors: *Ts) -> tuple[*Ts]:
    """One sequence per row, padded at the tail, where causality keeps the padding from every real token."""
    return tensors if cu_seqlens is None else each(lambda x: pad(x, cu_seqlens), *tensors)


def packed(cu_seqlens: Tensor | None, *tensors: *Ts) -> tuple[*Ts]:
    """The inverse of `batch`."""
    return tensors if cu_seqlens is None else each(lambda x: unpad(x, cu_seqlens), *tensors)


def copies(*tensors: *Ts) -> tuple[*Ts]:
    """Results of an operator, which may not share memory."""
    return each(lambda x: x.clone(memory_format=torch.contiguous_format), *tensors)


def like(*tensors: *Ts) -> tuple[*Ts]:
    """As results of a fake operator."""
    return each(lambda x: x.new_empty(x.shape), *tensors)


def _new(length: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[N] tokens that a call brings each sequence."""
    return torch.full_like(length, k.shape[1]) if cu_seqlens is None else lengths(cu_seqlens).to(length)


keep_precision(path_fwd, path_bwd, path_grow, path_grow_bwd)
