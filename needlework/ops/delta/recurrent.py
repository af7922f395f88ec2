"""The delta family's definition as a public op: arguments in, the loop of reference.py, `chunk_delta`'s results out."""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.common.operands import Operand, identity
from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.delta import reference
from needlework.ops.delta.arguments import Prediction, checked, checked_state
from needlework.ops.delta.inputs import DeltaInputs


class DeltaOutput(NamedTuple):
    """o [B T HV V] in q's dtype; state [N HV K V], float32 or wider, or None unless asked for."""

    o: Tensor
    state: Tensor | None


def recurrent_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    prediction: Prediction = "decayed",
    q_read: Tensor | None = None,
    scale: float | None = None,
    l2norm: bool = False,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    operand: Operand = identity,
) -> DeltaOutput:
    """The definition, token by token, under autograd: `chunk_delta`'s equation, arguments, contract and errors.

    operand: applied to every operand of a matrix or outer product, to emulate a narrower precision.

    >>> import torch
    >>> from torch.nn.functional import normalize
    >>> from needlework.ops.delta import chunk_delta, recurrent_delta
    >>> q, k = normalize(torch.randn(2, 1, 100, 4, 32), dim=-1)  # [B T H K] = [1 100 4 32]
    >>> v, g, beta = torch.randn(1, 100, 4, 64), -torch.rand(1, 100, 4), torch.rand(1, 100, 4)
    >>> torch.allclose(recurrent_delta(q, k, v, g, beta).o, chunk_delta(q, k, v, g, beta).o, atol=1e-5)
    True
    """
    inputs = DeltaInputs(q, k, v, g, beta, erase=erase, write=write, q_read=q_read)
    rule = checked(inputs, prediction, l2norm)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *q.shape[:2])
    initial_state = checked_state(initial_state, rule.k, rule.v, cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(q.device.type, enabled=False):
        o, state = reference.recurrent(
            *rule, prediction=prediction, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, operand=operand
        )
    return DeltaOutput(o.to(q.dtype), state if output_final_state else None)
