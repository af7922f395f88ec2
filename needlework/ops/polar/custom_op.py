"""Polar attention as operators, opaque to torch.compile: packing, the growth of pages, and what only the values
of integer tensors can show. All floating tensors of a call share one dtype, float32 or float64."""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.attention.growth import came_from, final_rows, give_back, grow
from needlework.ops.common.packing import lengths, pad, unpad
from needlework.ops.polar import chunk
from needlework.ops.polar.arguments import Parameters, Tokens, check_data
from needlework.ops.polar.state import PolarState
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
    tokens: Tokens, parameters: Parameters, initial_state: PolarState, cu_seqlens: Tensor | None,
    window: int | None, chunk_size: int, keep_pages: bool,
) -> tuple[Tensor, Tensor, Tensor, PolarState]:  # fmt: skip
    """direction, magnitude, `Saved.stats`, and the final pages and length (no rows without keep_pages)."""
    check_data(initial_state.length, initial_state.k.shape[1], window, cu_seqlens, *tokens.q.shape[:2])
    if cu_seqlens is not None:
        tokens = Tokens(*each(lambda x: pad(x, cu_seqlens), *tokens))
    found = chunk.forward(tokens, parameters, initial_state, window=window, chunk_size=chunk_size)
    if cu_seqlens is not None:
        found = each(lambda x: unpad(x, cu_seqlens), *found)
    if not keep_pages:
        return *found, PolarState(initial_state.k[:, :0].clone(), initial_state.v[:, :0].clone(), initial_state.length.clone())
    return *found, _grown(initial_state, tokens.k, tokens.v, cu_seqlens, window)


@fake(polar_fwd)
def _(tokens: Tokens, parameters: Parameters, initial_state: PolarState, cu_seqlens, window, chunk_size, keep_pages):
    q, (B, T, Hq, _) = tokens.q, tokens.q.shape
    final = _of_rows(0, initial_state) if not keep_pages else _fake_grown(initial_state, T, cu_seqlens, window)
    return q.new_empty(B, T, *parameters.v_null.shape), q.new_empty(B, T, Hq), q.new_empty(B, T, Hq, 4), final


@operator
def polar_grow(
    initial_state: PolarState, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window: int | None
) -> PolarState:  # fmt: skip
    """The final pages and length alone, for kernels that leave them to torch."""
    check_data(initial_state.length, initial_state.k.shape[1], window, cu_seqlens, *k.shape[:2])
    if cu_seqlens is not None:
        k, v = (pad(x, cu_seqlens) for x in (k, v))
    return _grown(initial_state, k, v, cu_seqlens, window)


@fake(polar_grow)
def _(initial_state: PolarState, k, v, cu_seqlens, window):
    return _fake_grown(initial_state, k.shape[1], cu_seqlens, window)


def _grown(initial_state: PolarState, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window: int | None) -> PolarState:
    """After k and v [N T ...] of new tokens."""
    page_k, page_v = grow((initial_state.k, initial_state.v), (k, v), initial_state.length, cu_seqlens, window)
    return PolarState(page_k, page_v, initial_state.length + (k.shape[1] if cu_seqlens is None else lengths(cu_seqlens)))


def _fake_grown(initial_state: PolarState, T: int, cu_seqlens: Tensor | None, window: int | None) -> PolarState:
    if cu_seqlens is None:
        return _of_rows(final_rows(initial_state.k.shape[1], T, window), initial_state)
    return _of_rows(torch.library.get_ctx().new_dynamic_size(), initial_state)


def _of_rows(P: int | torch.SymInt, initial_state: PolarState) -> PolarState:
    k, v = (x.new_empty(len(x), P, *x.shape[2:]) for x in (initial_state.k, initial_state.v))
    return PolarState(k, v, torch.empty_like(initial_state.length))


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
    initial_state, k, _, cu_seqlens, ctx.window = inputs
    ctx.save_for_backward(initial_state.length, cu_seqlens)
    ctx.sizes = initial_state.k.shape[1], k.shape[1]


def _grow_backward(ctx, dpage_k, dpage_v, dlength):
    length, cu_seqlens = ctx.saved_tensors
    dpages_k, dpages_v, dk, dv = polar_grow_bwd(dpage_k, dpage_v, length, cu_seqlens, *ctx.sizes, ctx.window)
    return dpages_k, dpages_v, None, dk, dv, None, None


differentiable(polar_grow, _grow_backward, _grow_setup)


@backward_operator
def polar_bwd(
    ddirection: Tensor, dmagnitude: Tensor, dpage_k: Tensor, dpage_v: Tensor, saved: Saved, tokens: Tokens,
    parameters: Parameters, initial_state: PolarState, cu_seqlens: Tensor | None, window: int | None, chunk_size: int,
) -> tuple[Tokens, Parameters, Tensor, Tensor]:  # fmt: skip
    """Gradients of polar_fwd's floating inputs."""
    if cu_seqlens is not None:
        padded = lambda x: pad(x, cu_seqlens)
        ddirection, dmagnitude = padded(ddirection), padded(dmagnitude)
        saved, tokens = Saved(*each(padded, *saved)), Tokens(*each(padded, *tokens))
    dtokens, dparameters, dinitial_k, dinitial_v = chunk.backward(
        ddirection, dmagnitude, *saved, tokens, parameters, initial_state, window=window, chunk_size=chunk_size
    )
    if dpage_k.shape[1]:
        P, T = initial_state.k.shape[1], dtokens.k.shape[1]
        source = came_from(P, T, initial_state.length, cu_seqlens, window)
        for dfinal, dpage, dnew in ((dpage_k, dinitial_k, dtokens.k), (dpage_v, dinitial_v, dtokens.v)):
            x = give_back(dfinal, source, P + T)
            dpage += x[:, :P]
            dnew += x[:, P:]
    if cu_seqlens is not None:
        dtokens = Tokens(*each(lambda x: unpad(x, cu_seqlens), *dtokens))
    return dtokens, dparameters, dinitial_k, dinitial_v


@fake(polar_bwd)
def _(
    ddirection,
    dmagnitude,
    dpage_k,
    dpage_v,
    saved: Saved,
    tokens: Tokens,
    parameters: Parameters,
    initial_state: PolarState,
    *_,
):
    like = lambda x: x.new_empty(x.shape)
    return Tokens(*map(like, tokens)), parameters.map(like), like(initial_state.k), like(initial_state.v)


def _setup_context(ctx, inputs, output) -> None:
    tokens, parameters, initial_state, cu_seqlens, ctx.window, ctx.chunk_size, _ = inputs
    direction, _, stats, _ = output
    ctx.save_for_backward(*Saved(direction, stats), *tokens, *parameters, *initial_state, cu_seqlens)


def _backward(ctx, ddirection, dmagnitude, dstats, dpage_k, dpage_v, dlength):
    gradients = polar_bwd(ddirection, dmagnitude, dpage_k, dpage_v, *ctx.saved_tensors, ctx.window, ctx.chunk_size)
    return *gradients, None, None, None, None, None


differentiable(polar_fwd, _backward, _setup_context)

keep_precision(polar_fwd, polar_bwd)
