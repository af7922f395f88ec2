"""PaTH attention as operators, opaque to torch.compile: packing, the growth of the state, and what only the values of integer tensors
can show. All floating tensors of a call share one dtype, float32 or float64."""

import torch
from torch import Tensor

from needlework.ops.common.growth import came_from, final_rows, give_back, grow
from needlework.ops.common.packing import lengths, pad, unpad
from needlework.ops.path import backward, chunk
from needlework.ops.path.arguments import PathInputs, check_data
from needlework.ops.path.kept import Moved, after, closing
from needlework.ops.path.state import BLOCK
from needlework.ops.runtime.custom_op import backward_operator, differentiable, operator
from needlework.ops.runtime.each import Ts, each
from needlework.ops.runtime.precision import keep_precision


@operator
def path_fwd(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, w: Tensor,
    page_k: Tensor, page_v: Tensor, open_w: Tensor, open_beta: Tensor, length: Tensor, cu_seqlens: Tensor | None,
    window: int | None, scale: float, chunk_size: int, keep_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """o, lse [B T Hq] for the backward, and the final state's tensors (of no rows without keep_state)."""
    check_data(length, page_k.shape[1], window, cu_seqlens, *q.shape[:2])
    past = chunk.History(page_k, page_v, open_w, open_beta, length, window)
    inputs = PathInputs(*batch(cu_seqlens, q * scale, k, v, beta, w))
    o, lse = chunk.forward(inputs, past, chunk_size=chunk_size)
    found = (o, lse) if cu_seqlens is None else each(lambda x: unpad(x, cu_seqlens), o, lse)
    if not keep_state:
        return *found, *each(lambda x: x[:, :0].clone(), page_k, page_v, open_w, open_beta), length.clone()
    return *found, *_final(past, inputs, cu_seqlens, chunk_size)


@torch.library.register_fake(path_fwd)
def _(q, k, v, beta, w, page_k, page_v, open_w, open_beta, length, cu_seqlens, window, scale, chunk_size, keep_state):
    B, T, Hq, _ = q.shape
    found = q.new_empty(B, T, Hq, v.shape[-1]), q.new_empty(B, T, Hq)
    return *found, *fake_final((page_k, page_v), (open_w, open_beta), length, T, cu_seqlens, window, keep_state)


def fake_final(
    pages: tuple[Tensor, ...], opened: tuple[Tensor, ...], length: Tensor, T: int, cu_seqlens: Tensor | None, window: int | None,
    keep_state: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Tensors like those of the state after a call."""
    if not keep_state:
        P = 0
    elif cu_seqlens is None:
        P = final_rows(pages[0].shape[1], T, window)
    else:
        P = torch.library.get_ctx().new_dynamic_size()
    grown = (x.new_empty(len(x), P, *x.shape[2:]) for x in pages)
    again = (x.new_empty(len(x), BLOCK if keep_state else 0, *x.shape[2:]) for x in opened)
    return *grown, *again, torch.empty_like(length)


@backward_operator
def path_bwd(
    do: Tensor, dpage_k: Tensor, dpage_v: Tensor, dopen_w: Tensor, dopen_beta: Tensor, o: Tensor, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, w: Tensor,
    page_k: Tensor, page_v: Tensor, open_w: Tensor, open_beta: Tensor, length: Tensor, cu_seqlens: Tensor | None,
    window: int | None, scale: float, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of path_fwd's nine floating inputs, in their order."""
    past = chunk.History(page_k, page_v, open_w, open_beta, length, window)
    do, o, lse = batch(cu_seqlens, do, o, lse)
    inputs = PathInputs(*batch(cu_seqlens, q * scale, k, v, beta, w))
    P, T, new = page_k.shape[1], inputs.q.shape[1], new_tokens(length, q, cu_seqlens)
    dkept, through_v = None, None
    if dpage_k.shape[1]:
        source = came_from(P, T, length, cu_seqlens, window)
        through_k, through_v = (give_back(x, source, P + T) for x in (dpage_k, dpage_v))
        dkept = through_k[:, :P], through_k[:, P:]
    found = backward.backward(
        do, o, lse, inputs, past, dkept, closing(length, new), chunk_size=chunk_size
    )  # fmt: skip
    found = found._replace(q=found.q * scale)
    if through_v is not None:
        found = found._replace(page_v=found.page_v + through_v[:, :P], v=found.v + through_v[:, P:])
    if dopen_w.shape[1]:
        found = found.with_open(Moved.of(length, new), dopen_w, dopen_beta, T)
    own = found[:5] if cu_seqlens is None else each(lambda x: unpad(x, cu_seqlens), *found[:5])
    # copies: an operator's results may not share memory
    return each(lambda x: x.clone(memory_format=torch.contiguous_format), *own, *found[5:])


@torch.library.register_fake(path_bwd)
def _(do, dpage_k, dpage_v, dopen_w, dopen_beta, o, lse, *inputs_and_settings):
    return tuple(x.new_empty(x.shape) for x in inputs_and_settings[:9])


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.window, ctx.scale, ctx.chunk_size, _ = inputs
    ctx.save_for_backward(output[0], output[1], *tensors)


def _backward(ctx, do, dlse, dpage_k, dpage_v, dopen_w, dopen_beta, dlength):
    settings = ctx.window, ctx.scale, ctx.chunk_size
    found = path_bwd(do, dpage_k, dpage_v, dopen_w, dopen_beta, *ctx.saved_tensors, *settings)
    return *found, None, None, None, None, None, None


differentiable(path_fwd, _backward, _setup_context)


def _final(
    past: chunk.History, x: PathInputs, cu_seqlens: Tensor | None, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The state's tensors after a call."""
    new = new_tokens(past.length, x.q, cu_seqlens)
    kept = after(past, new, x, chunk_size=chunk_size)
    page_k, page_v = grow((kept.page_k, past.page_v), (kept.k, x.v), past.length, cu_seqlens, past.window)
    return page_k, page_v, kept.w, kept.beta, past.length + new


def new_tokens(length: Tensor, q: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[N] tokens that a call brings each sequence."""
    return torch.full_like(length, q.shape[1]) if cu_seqlens is None else lengths(cu_seqlens).to(length)


def batch(cu_seqlens: Tensor | None, *tensors: *Ts) -> tuple[*Ts]:
    """One sequence per row, padded at the tail, where causality keeps the padding from every real token."""
    return tensors if cu_seqlens is None else each(lambda x: pad(x, cu_seqlens), *tensors)


keep_precision(path_fwd, path_bwd)
