"""Which engine takes a call of the delta family, and what its kernels are given: heads, gates, powers of two."""

import torch
from torch import Tensor

from needlework.ops.common.packing import sequences
from needlework.ops.common.shapes import width
from needlework.ops.delta.arguments import Prediction
from needlework.ops.delta.inputs import DeltaInputs, SlotTable
from needlework.ops.delta.scaling import PowersOfTwo


def by_channel(g: Tensor | None, erase: Tensor | None, prediction: Prediction) -> bool:
    """Whether the rule is one for the engine with a gate per channel. Without decay both predictions are one."""
    return erase is not None or (g is not None and (g.dim() == 4 or prediction == "previous"))


def kernels(
    inputs: DeltaInputs, table: SlotTable | None, cu_seqlens: Tensor | None, scale: float, prediction: Prediction
) -> tuple[Tensor, Tensor | None]:
    """o and the final state, None where a table has it; q is what reads. It may have a head for each value head; k then gets as many."""
    q, k, v, initial_state = inputs.q, inputs.k, inputs.v, inputs.initial_state
    if q.shape[2] != k.shape[2]:
        k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    powers = None
    if inputs.beta is None and inputs.erase is None and v.dtype == torch.bfloat16 and v.numel():
        start, N = initial_state, sequences(cu_seqlens, len(v))
        if table is not None:
            from needlework.ops.slots.kernels import largest_of_slots

            start = largest_of_slots(table.state, table.slots, table.fresh, cu_seqlens, N)[..., None, None]
        powers = PowersOfTwo.of(q, k, v, start, scale)
        q, k, v, initial_state = powers.divide(q, k, v, initial_state)
        table = table and table._replace(power=powers.of_states(N))
    inputs = inputs._replace(q=q, k=k, v=v, initial_state=initial_state)
    o, state = _engine(inputs, table, cu_seqlens, scale, prediction)
    if powers is None:
        return o, state
    return (powers.outputs(o), None) if state is None else powers.multiply(o, state)


def _engine(
    inputs: DeltaInputs, table: SlotTable | None, cu_seqlens: Tensor | None, scale: float, prediction: Prediction
) -> tuple[Tensor, Tensor | None]:
    if by_channel(inputs.g, inputs.erase, prediction):
        from needlework.ops.delta.channel.op import channel, channel_on_table

        inputs = inputs._replace(g=_every_channel(inputs.g, inputs.k, inputs.v)).contiguous()
        if table is not None:
            return channel_on_table(inputs, table, cu_seqlens, scale=scale, prediction=prediction), None
        return channel(inputs, cu_seqlens, scale=scale, prediction=prediction)
    from needlework.ops.delta.scalar.op import scalar, scalar_on_table

    if table is not None:
        return scalar_on_table(inputs.contiguous(), table, cu_seqlens, scale=scale), None
    return scalar(inputs.contiguous(), cu_seqlens, scale=scale)


def _every_channel(g: Tensor | None, k: Tensor, v: Tensor) -> Tensor:
    """g as [B T HV K]."""
    if g is not None and g.dim() == 4:
        return g
    sizes = (*v.shape[:3], k.shape[-1])
    return v.new_zeros(sizes, dtype=width(v)) if g is None else g[..., None].expand(sizes)


def unit(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Rows of unit norm, by a kernel."""
    from needlework.ops.unit.rows import l2_rows

    return tuple(map(l2_rows, tensors))
