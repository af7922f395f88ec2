"""Polar attention as operators, opaque to torch.compile: packing, the growth of pages, and what only the values
of integer tensors can show. All floating tensors of a call share one dtype, float32 or float64."""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.attention.growth import came_from, final_rows, give_back, grow
from needlework.ops.common.packing import lengths, pad, unpad
from needlework.ops.polar import chunk
from needlework.ops.polar.arguments import Parameters, Tokens, check_data
from needlework.ops.runtime.custom_op import backward_operator, differentiable, fake, operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.precision import keep_precision


@operator
def polar_checked(length: Tensor, P: int, cu_seqlens: Tensor | None, window: int | None, B: int, T: int) -> Tensor:
    """length, once `check_data` has seen it."""
    check_data(length, P, window, cu_seqlens, B, T)
    return length.clone()


@torch.library.register_fake(polar_checked)
def _(length, *_):
    return torch.empty_like(length)


class Saved(NamedTuple):
    """What the forward keeps for the backward."""

    direction: Tensor
    stats: Tensor  # [B T Hq 4] M, L, Q₂ and ‖s‖ of chunk.py


@operator
def polar_fwd(
    tokens: Tokens, parameters: Parameters, page_k: Tensor, page_v: Tensor, length: Tensor, cu_seqlens: Tensor | None,
    window: int | None, chunk_size: int, keep_pages: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """direction, magnitude, `Saved.stats`, and the final pages and length (no rows without keep_pages)."""
    q, k, v = tokens
    check_data(length, page_k.shape[1], window, cu_seqlens, *q.shape[:2])
    if cu_seqlens is not None:
        q, k, v = (pad(x, cu_seqlens) for x in (q, k, v))
    found = chunk.forward(q, k, v, *parameters, page_k, page_v, length, window=window, chunk_size=chunk_size)
    if cu_seqlens is not None:
        found = each(lambda x: unpad(x, cu_seqlens), *found)
    if not keep_pages:
        return *found, page_k[:, :0].clone(), page_v[:, :0].clone(), length.clone()
    n_new = q.shape[1] if cu_seqlens is None else lengths(cu_seqlens)
    page_k, page_v = grow((page_k, page_v), (k, v), length, cu_seqlens, window)
    return *found, page_k, page_v, length + n_new


@fake(polar_fwd)
def _(tokens: Tokens, parameters: Parameters, page_k, page_v, length, cu_seqlens, window, chunk_size, keep_pages):
    q, (B, T, Hq, _) = tokens.q, tokens.q.shape
    if not keep_pages:
        P = 0
    elif cu_seqlens is None:
        P = final_rows(page_k.shape[1], T, window)
    else:
        P = torch.library.get_ctx().new_dynamic_size()
    return (
        q.new_empty(B, T, *parameters.v_null.shape),
        q.new_empty(B, T, Hq),
        q.new_empty(B, T, Hq, 4),
        page_k.new_empty(len(page_k), P, *page_k.shape[2:]),
        page_v.new_empty(len(page_v), P, *page_v.shape[2:]),
        torch.empty_like(length),
    )


@operator
def polar_grow(
    page_k: Tensor, page_v: Tensor, length: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The final pages and length alone, for kernels that leave them to torch."""
    check_data(length, page_k.shape[1], window, cu_seqlens, *k.shape[:2])
    if cu_seqlens is not None:
        k, v = (pad(x, cu_seqlens) for x in (k, v))
    n_new = k.shape[1] if cu_seqlens is None else lengths(cu_seqlens)
    page_k, page_v = grow((page_k, page_v), (k, v), length, cu_seqlens, window)
    return page_k, page_v, length + n_new


@torch.library.register_fake(polar_grow)
def _(page_k, page_v, length, k, v, cu_seqlens, window):
    if cu_seqlens is None:
        P = final_rows(page_k.shape[1], k.shape[1], window)
    else:
        P = torch.library.get_ctx().new_dynamic_size()
    pages = [x.new_empty(len(x), P, *x.shape[2:]) for x in (page_k, page_v)]
    return *pages, torch.empty_like(length)


@backward_operator
def polar_grow_bwd(
    dpage_k: Tensor, dpage_v: Tensor, length: Tensor, cu_seqlens: Tensor | None, P: int, T: int, window: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of polar_grow's pages [N P ...] and tokens, k and v [B T ...]."""
    longest = T if cu_seqlens is None else int(lengths(cu_seqlens).max())
    source = came_from(P, longest, length, cu_seqlens, window)
    dk, dv = (give_back(dfinal, source, P + longest) for dfinal in (dpage_k, dpage_v))
    tokens = dk[:, P:], dv[:, P:]
    if cu_seqlens is not None:
        tokens = each(lambda x: unpad(x, cu_seqlens), *tokens)
    # copies: an operator's results may not share memory
    return each(lambda x: x.clone(memory_format=torch.contiguous_format), dk[:, :P], dv[:, :P], *tokens)


@torch.library.register_fake(polar_grow_bwd)
def _(dpage_k, dpage_v, length, cu_seqlens, P, T, window):
    B = len(length) if cu_seqlens is None else 1
    sizes = (len(length), P), (B, T)
    return tuple(x.new_empty(*size, *x.shape[2:]) for size in sizes for x in (dpage_k, dpage_v))


def _grow_setup(ctx, inputs, output) -> None:
    page_k, _, length, k, _, cu_seqlens, ctx.window = inputs
    ctx.save_for_backward(length, cu_seqlens)
    ctx.sizes = page_k.shape[1], k.shape[1]


def _grow_backward(ctx, dpage_k, dpage_v, dlength):
    length, cu_seqlens = ctx.saved_tensors
    dpages_k, dpages_v, dk, dv = polar_grow_bwd(dpage_k, dpage_v, length, cu_seqlens, *ctx.sizes, ctx.window)
    return dpages_k, dpages_v, None, dk, dv, None, None


differentiable(polar_grow, _grow_backward, _grow_setup)


@backward_operator
def polar_bwd(
    ddirection: Tensor, dmagnitude: Tensor, dpage_k: Tensor, dpage_v: Tensor, saved: Saved, tokens: Tokens,
    parameters: Parameters, page_k: Tensor, page_v: Tensor, length: Tensor, cu_seqlens: Tensor | None, window: int | None,
    chunk_size: int,
) -> tuple[Tokens, Parameters, Tensor, Tensor]:  # fmt: skip
    """Gradients of polar_fwd's floating inputs."""
    if cu_seqlens is not None:
        padded = lambda x: pad(x, cu_seqlens)
        ddirection, dmagnitude = padded(ddirection), padded(dmagnitude)
        saved, tokens = Saved(*each(padded, *saved)), Tokens(*each(padded, *tokens))
    dq, dk, dv, dparameters, dinitial_k, dinitial_v = chunk.backward(
        ddirection, dmagnitude, *saved, *tokens, *parameters, page_k, page_v, length, window=window, chunk_size=chunk_size
    )
    if dpage_k.shape[1]:
        P, T = page_k.shape[1], dk.shape[1]
        source = came_from(P, T, length, cu_seqlens, window)
        for dfinal, dpage, dnew in ((dpage_k, dinitial_k, dk), (dpage_v, dinitial_v, dv)):
            x = give_back(dfinal, source, P + T)
            dpage += x[:, :P]
            dnew += x[:, P:]
    if cu_seqlens is not None:
        dq, dk, dv = (unpad(x, cu_seqlens) for x in (dq, dk, dv))
    return Tokens(dq, dk, dv), Parameters(*dparameters), dinitial_k, dinitial_v


@fake(polar_bwd)
def _(ddirection, dmagnitude, dpage_k, dpage_v, saved: Saved, tokens: Tokens, parameters: Parameters, page_k, page_v, *_):
    like = lambda x: x.new_empty(x.shape)
    return Tokens(*map(like, tokens)), parameters.map(like), like(page_k), like(page_v)


def _setup_context(ctx, inputs, output) -> None:
    tokens, parameters, *others, ctx.window, ctx.chunk_size, _ = inputs
    ctx.save_for_backward(output[0], output[2], *tokens, *parameters, *others)


def _backward(ctx, ddirection, dmagnitude, dstats, dpage_k, dpage_v, dlength):
    gradients = polar_bwd(ddirection, dmagnitude, dpage_k, dpage_v, *ctx.saved_tensors, ctx.window, ctx.chunk_size)
    return *gradients, None, None, None, None, None


differentiable(polar_fwd, _backward, _setup_context)

keep_precision(polar_fwd, polar_bwd)
