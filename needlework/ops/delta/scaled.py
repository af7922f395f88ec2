"""Calls of additive rules in bfloat16: an engine's kernels scale rows by powers of two (`powers.py`), states are scaled around them.
`scaling.py` has the reason and the powers."""

from collections.abc import Callable

import torch
from torch import Tensor

from needlework.ops.common.packing import sequences
from needlework.ops.delta.inputs import DeltaInputs, SlotTable
from needlework.ops.delta.scaling import of_states

Engine = Callable[[DeltaInputs, SlotTable | None], tuple[Tensor, Tensor | None]]


def needs_scaling(inputs: DeltaInputs) -> bool:
    v = inputs.v
    return inputs.beta is None and inputs.erase is None and v.dtype == torch.bfloat16 and v.numel() > 0


def scaled(
    engine: Engine, inputs: DeltaInputs, table: SlotTable | None, cu_seqlens: Tensor | None, scale: float, final: bool
) -> tuple[Tensor, Tensor | None]:
    """o and the final state of an engine; without `final` not that state."""
    from needlework.ops.delta.powers import delta_powers

    inputs, N = inputs.contiguous(), sequences(cu_seqlens, len(inputs.v))
    with torch.no_grad():
        start = inputs.initial_state if table is None else _largest(table, cu_seqlens, N)
        least = None if start is None else of_states(start, len(inputs.v))
        powers = delta_powers(inputs.q, inputs.k, inputs.v, least, scale)
    bc = powers[..., 3]
    if inputs.initial_state is not None:
        inputs = inputs._replace(initial_state=inputs.initial_state / bc[..., None, None])
    table = table and table._replace(power=bc.expand(N, -1).contiguous())
    o, state = engine(inputs._replace(powers=powers), table)
    return o, None if state is None or not final else state * bc[..., None, None]


def _largest(table: SlotTable, cu_seqlens: Tensor | None, N: int) -> Tensor:
    """[N HV 1 1]: each sequence's and head's largest |S| at its start."""
    from needlework.ops.slots.kernels import largest_of_slots

    return largest_of_slots(table.state, table.slots, table.fresh, cu_seqlens, N)[..., None, None]
