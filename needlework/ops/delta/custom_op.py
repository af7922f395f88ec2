"""The delta engine as two operators that the compiler does not look into; packing is done inside them.

Tensors as `chunk.py` takes them, of one dtype, checked by the rule that calls; the values of cu_seqlens are data and are
checked here.
"""

from typing import NamedTuple

from torch import Tensor

from needlework.ops.common.packing import check_cu_seqlens, pad, unpad
from needlework.ops.delta import chunk
from needlework.ops.runtime.custom_op import backward_operator, differentiable, fake, operator
from needlework.ops.runtime.each import Ts, each
from needlework.ops.runtime.precision import keep_precision


class Inputs(NamedTuple):
    """What `chunk.py` takes; its gradients come back as `Inputs` too."""

    q: Tensor
    k: Tensor
    u: Tensor
    e: Tensor | None
    g: Tensor
    initial_state: Tensor


@operator
def delta_fwd(
    inputs: Inputs, cu_seqlens: Tensor | None, scale: float, prediction: str, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """o [B T H V], final state [N H K V]."""
    q, k, u, e, g, initial_state = inputs
    q, k, u, e, g = _batch(cu_seqlens, q, k, u, e, g)
    o, state = chunk.forward(q, k, u, e, g, initial_state, scale=scale, prediction=prediction, chunk_size=chunk_size)
    return _given(cu_seqlens, o), _fresh(state, initial_state)


@backward_operator
def delta_bwd(
    do: Tensor, dstate: Tensor, inputs: Inputs, cu_seqlens: Tensor | None, scale: float, prediction: str, chunk_size: int
) -> Inputs:
    """Gradients of `inputs`."""
    q, k, u, e, g, initial_state = inputs
    do, q, k, u, e, g = _batch(cu_seqlens, do, q, k, u, e, g)
    dq, dk, du, de, dg, dinitial = chunk.backward(
        do, dstate, q, k, u, e, g, initial_state, scale=scale, prediction=prediction, chunk_size=chunk_size
    )
    dq, dk, du, de, dg = each(lambda dx: _given(cu_seqlens, dx), dq, dk, du, de, dg)
    return Inputs(dq, dk, du, de, dg, _fresh(dinitial, dstate))


def _batch(cu_seqlens: Tensor | None, x: Tensor, *others: *Ts) -> tuple[Tensor, *Ts]:
    if cu_seqlens is None:
        return x, *others
    check_cu_seqlens(cu_seqlens, *x.shape[:2])
    return each(lambda x: pad(x, cu_seqlens), x, *others)


def _given(cu_seqlens: Tensor | None, x: Tensor) -> Tensor:
    return (x if cu_seqlens is None else unpad(x, cu_seqlens)).contiguous()


def _fresh(x: Tensor, source: Tensor) -> Tensor:
    """x, or a copy where no token has changed `source`: an operator may not return its input."""
    return x.clone() if x is source else x


@fake(delta_fwd)
def _(inputs: Inputs, *_):
    q, initial_state = inputs.q, inputs.initial_state
    return q.new_empty(*q.shape[:3], inputs.u.shape[-1]), initial_state.new_empty(initial_state.shape)


@fake(delta_bwd)
def _(do, dstate, inputs: Inputs, *_):
    return Inputs(*each(lambda x: x.new_empty(x.shape), *inputs))


def _save(ctx, inputs, output) -> None:
    given, cu_seqlens, *ctx.settings = inputs
    ctx.save_for_backward(*given, cu_seqlens)


def _backward(ctx, do, dstate):
    found = delta_bwd(do, dstate, *ctx.saved_tensors, *ctx.settings)
    return *(dx if needed else None for dx, needed in zip(found, ctx.needs_input_grad, strict=False)), *[None] * 4


differentiable(delta_fwd, _backward, _save)
keep_precision(delta_fwd, delta_bwd)
