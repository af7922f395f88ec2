"""needlework::ccq_fwd and ccq_bwd: chunk.py behind torch.library, with packing and T = 0. All tensors share one wide dtype."""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.ccq import chunk
from needlework.ops.ccq.state import CurvatureState
from needlework.ops.common.packing import check_cu_seqlens, lengths, pad, unpad
from needlework.ops.runtime.custom_op import backward_operator, differentiable, operator
from needlework.ops.runtime.each import Ts, each
from needlework.ops.runtime.precision import keep_precision


class Saved(NamedTuple):
    """What the backward is given beside the cotangents, in the order of its operator's arguments."""

    q: Tensor
    k: Tensor
    eta: Tensor
    g: Tensor | None
    C: Tensor
    mean: Tensor
    n: Tensor
    cu_seqlens: Tensor | None


@operator
def ccq_fwd(
    q: Tensor,
    k: Tensor,
    eta: Tensor,
    g: Tensor | None,
    C: Tensor,
    mean: Tensor,
    n: Tensor,
    cu_seqlens: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The cleaned query [B T HV K] and the final C, mean, n."""
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *q.shape[:2])
    if q.shape[1] == 0:
        return q.new_empty(*eta.shape, q.shape[-1]), C.clone(), mean.clone(), n.clone()
    q, k, eta, g, real = _batch(cu_seqlens, q, k, eta, g)
    cleaned, state = chunk.forward(q, k, eta, g, real, CurvatureState(C, mean, n), chunk_size)
    return cleaned if cu_seqlens is None else unpad(cleaned, cu_seqlens), state.C, state.mean, state.n


@torch.library.register_fake(ccq_fwd)
def _(q, k, eta, g, C, mean, n, cu_seqlens, chunk_size):
    return q.new_empty(*eta.shape, q.shape[-1]), *(x.new_empty(x.shape) for x in (C, mean, n))


@backward_operator
def ccq_bwd(
    dcleaned: Tensor,
    dC: Tensor,
    dmean: Tensor,
    dn: Tensor,
    q: Tensor,
    k: Tensor,
    eta: Tensor,
    g: Tensor | None,
    C: Tensor,
    mean: Tensor,
    n: Tensor,
    cu_seqlens: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, eta, g (empty without g), C, mean, n."""
    if q.shape[1] == 0:
        empty = each(torch.empty_like, q, k, eta, q.new_empty(0) if g is None else g)
        return *empty, dC.clone(), dmean.clone(), dn.clone()
    dcleaned, q, k, eta, g, real = _batch(cu_seqlens, dcleaned, q, k, eta, g)
    dstate = CurvatureState(dC, dmean, dn)
    state = CurvatureState(C, mean, n)
    dq, dk, deta, dg, dstate = chunk.backward(dcleaned, dstate, q, k, eta, g, real, state, chunk_size)
    if cu_seqlens is not None:
        dq, dk, deta, dg = each(lambda x: unpad(x, cu_seqlens), dq, dk, deta, dg)
    return dq, dk, deta, q.new_empty(0) if dg is None else dg, dstate.C, dstate.mean, dstate.n


@torch.library.register_fake(ccq_bwd)
def _(dcleaned, dC, dmean, dn, q, k, eta, g, C, mean, n, cu_seqlens, chunk_size):
    dg = q.new_empty(0) if g is None else g.new_empty(g.shape)
    return *(x.new_empty(x.shape) for x in (q, k, eta)), dg, *(x.new_empty(x.shape) for x in (C, mean, n))


def _batch(cu_seqlens: Tensor | None, x: Tensor, *others: *Ts) -> tuple[Tensor, *Ts, Tensor]:
    """The tensors [N T ...], and which of their tokens are real [N or 1, T]."""
    if cu_seqlens is None:
        return x, *others, torch.ones(1, x.shape[1], dtype=torch.bool, device=x.device)
    padded = each(lambda x: pad(x, cu_seqlens), x, *others)
    at = torch.arange(padded[0].shape[1], device=x.device)
    return *padded, at < lengths(cu_seqlens)[:, None]


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.chunk_size = inputs
    ctx.save_for_backward(*Saved(*tensors))


def _backward(ctx, dcleaned, dC, dmean, dn):
    dq, dk, deta, dg, *dstate = ccq_bwd(dcleaned, dC, dmean, dn, *Saved(*ctx.saved_tensors), ctx.chunk_size)
    return dq, dk, deta, dg if ctx.needs_input_grad[3] else None, *dstate, None, None


differentiable(ccq_fwd, _backward, _setup_context)
keep_precision(ccq_fwd, ccq_bwd)
