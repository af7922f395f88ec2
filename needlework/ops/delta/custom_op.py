"""The delta engine as two operators that the compiler does not look into; packing is done inside them.

Tensors as `chunk.py` takes them, of one dtype, checked by the rule that calls; the values of cu_seqlens are data and are
checked here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.common.packing import check_cu_seqlens, pad, unpad
from needlework.ops.delta import chunk
from needlework.ops.runtime.custom_op import backward_operator, differentiable, operator
from needlework.ops.runtime.each import Ts, each
from needlework.ops.runtime.precision import keep_precision


class Saved(NamedTuple):
    """What the backward is given beside the cotangents, in the order of its operator's arguments."""

    q: Tensor
    k: Tensor
    u: Tensor
    e: Tensor | None
    g: Tensor
    initial_state: Tensor
    cu_seqlens: Tensor | None


@operator
def delta_fwd(
    q: Tensor, k: Tensor, u: Tensor, e: Tensor | None, g: Tensor, initial_state: Tensor, cu_seqlens: Tensor | None,
    scale: float, prediction: str, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o [B T H V], final state [N H K V]."""
    q, k, u, e, g = _batch(cu_seqlens, q, k, u, e, g)
    o, state = chunk.forward(q, k, u, e, g, initial_state, scale=scale, prediction=prediction, chunk_size=chunk_size)
    return _given(cu_seqlens, o), _fresh(state, initial_state)


@backward_operator
def delta_bwd(
    do: Tensor, dstate: Tensor,
    q: Tensor, k: Tensor, u: Tensor, e: Tensor | None, g: Tensor, initial_state: Tensor, cu_seqlens: Tensor | None,
    scale: float, prediction: str, chunk_size: int,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, u, e, g and the initial state; without e, its place holds an empty tensor."""
    do, q, k, u, e, g = _batch(cu_seqlens, do, q, k, u, e, g)
    *dtokens, dinitial = chunk.backward(
        do, dstate, q, k, u, e, g, initial_state, scale=scale, prediction=prediction, chunk_size=chunk_size
    )
    dtokens = [q.new_empty(0) if dx is None else _given(cu_seqlens, dx) for dx in dtokens]
    return [*dtokens, _fresh(dinitial, dstate)]


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


@torch.library.register_fake(delta_fwd)
def _(q, k, u, e, g, initial_state, cu_seqlens, scale, prediction, chunk_size):
    return q.new_empty(*q.shape[:3], u.shape[-1]), initial_state.new_empty(initial_state.shape)


@torch.library.register_fake(delta_bwd)
def _(do, dstate, q, k, u, e, g, initial_state, *_):
    return [q.new_empty(0 if x is None else x.shape) for x in (q, k, u, e, g, initial_state)]


def _save(ctx, inputs, output) -> None:
    *tensors, scale, prediction, chunk_size = inputs
    ctx.save_for_backward(*Saved(*tensors))
    ctx.settings = scale, prediction, chunk_size


def _backward(ctx, do, dstate):
    dq, dk, du, de, dg, dinitial = delta_bwd(do, dstate, *Saved(*ctx.saved_tensors), *ctx.settings)
    return dq, dk, du, de if ctx.needs_input_grad[3] else None, dg, dinitial, None, None, None, None


differentiable(delta_fwd, _backward, _save)
keep_precision(delta_fwd, delta_bwd)
