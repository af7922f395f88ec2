"""An engine's call on a slot table, for both engines: what its walks of chunks leave out."""

from collections.abc import Callable

import torch
from torch import Tensor

from needlework.ops.delta.inputs import DeltaInputs, SlotTable
from needlework.ops.slots.kernels import clear, read_by_kernels
from needlework.ops.slots.table import Sequences


def on_table(
    inputs: DeltaInputs, table: SlotTable, cu_seqlens: Tensor | None, walk: Callable[[SlotTable], Tensor]
) -> Tensor:  # fmt: skip
    """o of `walk`, which writes the slots of sequences with tokens; the slots of fresh ones without are zeros. fresh is boolean here."""
    state, slots, fresh, power = table
    v = inputs.v
    if not v.numel():
        N = len(v) if cu_seqlens is None else len(cu_seqlens) - 1
        nothing = state.new_zeros(1, *state.shape[1:]).expand(N, *state.shape[1:])
        Sequences.of(slots, fresh, N, 0, None, v.device).write(state, nothing)
        return torch.empty_like(v)
    slots, fresh, cu_seqlens = read_by_kernels(slots, fresh, cu_seqlens)
    o = walk(SlotTable(state, slots, fresh, power))
    if cu_seqlens is not None and fresh is not None:
        clear(state, slots, fresh, cu_seqlens)
    return o
