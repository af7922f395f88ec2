"""needlework::ccq_fwd and ccq_bwd: chunk.py behind torch.library, with packing and T = 0. All tensors share one wide dtype."""

import torch
from torch import Tensor

from needlework.ops.ccq import chunk
from needlework.ops.ccq.arguments import CcqInputs
from needlework.ops.ccq.state import CurvatureState
from needlework.ops.common.packing import check_cu_seqlens, lengths, pad, unpad
from needlework.ops.runtime.custom_op import backward_operator, differentiable, fake, operator
from needlework.ops.runtime.each import Ts, each
from needlework.ops.runtime.precision import keep_precision


@operator
def ccq_fwd(
    inputs: CcqInputs, initial_state: CurvatureState, cu_seqlens: Tensor | None, chunk_size: int
) -> tuple[Tensor, CurvatureState]:
    """The cleaned query [B T HV K] and the final state."""
    q, k, eta, g = inputs
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *q.shape[:2])
    if q.shape[1] == 0:
        return q.new_empty(*eta.shape, q.shape[-1]), CurvatureState(*each(torch.clone, *initial_state))
    q, k, eta, g, real = _batch(cu_seqlens, q, k, eta, g)
    cleaned, state = chunk.forward(q, k, eta, g, real, initial_state, chunk_size)
    return cleaned if cu_seqlens is None else unpad(cleaned, cu_seqlens), state


@fake(ccq_fwd)
def _(inputs: CcqInputs, initial_state: CurvatureState, *_):
    q, state = inputs.q, CurvatureState(*(x.new_empty(x.shape) for x in initial_state))
    return q.new_empty(*inputs.eta.shape, q.shape[-1]), state


@backward_operator
def ccq_bwd(
    dcleaned: Tensor, dstate: CurvatureState, inputs: CcqInputs, initial_state: CurvatureState, cu_seqlens: Tensor | None,
    chunk_size: int,
) -> tuple[CcqInputs, CurvatureState]:  # fmt: skip
    """Gradients of `inputs` and of the initial state."""
    if inputs.q.shape[1] == 0:
        return CcqInputs(*each(torch.empty_like, *inputs)), CurvatureState(*each(torch.clone, *dstate))
    q, k, eta, g = inputs
    dcleaned, q, k, eta, g, real = _batch(cu_seqlens, dcleaned, q, k, eta, g)
    dq, dk, deta, dg, dstate = chunk.backward(dcleaned, dstate, q, k, eta, g, real, initial_state, chunk_size)
    if cu_seqlens is not None:
        dq, dk, deta, dg = each(lambda x: unpad(x, cu_seqlens), dq, dk, deta, dg)
    return CcqInputs(dq, dk, deta, dg), dstate


@fake(ccq_bwd)
def _(dcleaned, dstate, inputs: CcqInputs, initial_state: CurvatureState, *_):
    state = CurvatureState(*(x.new_empty(x.shape) for x in initial_state))
    return CcqInputs(*each(lambda x: x.new_empty(x.shape), *inputs)), state


def _batch(cu_seqlens: Tensor | None, x: Tensor, *others: *Ts) -> tuple[Tensor, *Ts, Tensor]:
    """The tensors [N T ...], and which of their tokens are real [N or 1, T]."""
    if cu_seqlens is None:
        return x, *others, torch.ones(1, x.shape[1], dtype=torch.bool, device=x.device)
    padded = each(lambda x: pad(x, cu_seqlens), x, *others)
    at = torch.arange(padded[0].shape[1], device=x.device)
    return *padded, at < lengths(cu_seqlens)[:, None]


def _setup_context(ctx, inputs, output) -> None:
    given, state, cu_seqlens, ctx.chunk_size = inputs
    ctx.save_for_backward(*given, *state, cu_seqlens)


def _backward(ctx, dcleaned, dC, dmean, dn):
    found = ccq_bwd(dcleaned, dC, dmean, dn, *ctx.saved_tensors, ctx.chunk_size)
    return *(dx if needed else None for dx, needed in zip(found, ctx.needs_input_grad, strict=False)), None, None


differentiable(ccq_fwd, _backward, _setup_context)
keep_precision(ccq_fwd, ccq_bwd)
