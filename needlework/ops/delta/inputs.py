"""The tensors of a call by name, from the op to the launches of its kernels, and the type of the operands that these make of them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from needlework.ops.common.shapes import behind, behind_both
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import widths

if TYPE_CHECKING:  # it needs Triton
    from needlework.ops.common.alignment import Alignment


class DeltaInputs(NamedTuple):
    """Tensors of an engine's call, None for what the rule does not have. Their gradients come back as `DeltaInputs` too.

    The scalar engine takes no erase and no write, the channel engine no lam and no q_read. Powers have no gradient. A step takes
    tensors without T, no initial_state and no powers.
    """

    q: Tensor  # [B T H K]; for the channel engine what reads
    k: Tensor  # [B T H K]
    v: Tensor  # [B T HV V]
    g: Tensor | None = None  # [B T HV], or [B T HV K] for the channel engine
    beta: Tensor | None = None  # [B T HV]
    lam: Tensor | None = None  # [B T HV]
    erase: Tensor | None = None  # [B T HV K]
    write: Tensor | None = None  # [B T HV V]
    q_read: Tensor | None = None  # [B T H K] or [B T HV K]
    initial_state: Tensor | None = None  # [N HV K V]
    powers: Tensor | None = None  # [B HV 4] float32: a, b, c and bc of an additive rule's scaling (`powers.py`)

    def contiguous(self) -> "DeltaInputs":
        return DeltaInputs(*each(Tensor.contiguous, *self))

    def widened(self, K: int, V: int) -> "DeltaInputs":
        """With zeros behind the numbers of each head, which hold, read and write nothing."""
        q, k, erase, q_read = each(lambda x: behind(x, K), self.q, self.k, self.erase, self.q_read)
        v, write = each(lambda x: behind(x, V), self.v, self.write)
        g = self.g if self.g is None or self.g.dim() < 4 else behind(self.g, K)
        state = None if self.initial_state is None else behind_both(self.initial_state, K, V)
        return self._replace(q=q, k=k, v=v, g=g, erase=erase, write=write, q_read=q_read, initial_state=state)

    def aligned(self, alignment: "Alignment") -> "DeltaInputs":
        """Tokens where `alignment` has them; the initial state and powers as they are, contiguous."""
        return DeltaInputs(*alignment.align(*self[:-2]), *each(Tensor.contiguous, *self[-2:]))

    def aligned_with(self, do: Tensor, alignment: "Alignment") -> tuple[Tensor, "DeltaInputs"]:
        """The same, and do [B T HV V] beside them."""
        aligned = alignment.align(do, *self[:-2])
        return aligned[0], DeltaInputs(*aligned[1:], *each(Tensor.contiguous, *self[-2:]))

    def restored(self, alignment: "Alignment") -> "DeltaInputs":
        """The inverse of `aligned`."""
        return DeltaInputs(*alignment.restore(*self[:-2]), *self[-2:])

    def like(self, inputs: "DeltaInputs") -> "DeltaInputs":
        """Gradients in the dtypes of `inputs`, contiguous; None for what was not given."""
        pairs = zip(inputs, self, strict=True)
        found = [None if x is None or dx is None else dx.to(x.dtype).contiguous() for x, dx in pairs]
        q, k, v, *others = found
        assert q is not None and k is not None and v is not None
        return DeltaInputs(q, k, v, *others)


class SlotTable(NamedTuple):
    """Where the sequences of a call find their states and leave them, in place, as an engine's kernels read it."""

    state: Tensor  # [slots HV K V], float32 or float64: the slots may lie apart
    slots: Tensor | None  # [N]: the slot of each sequence, −1: none; None: sequence n owns slot n
    fresh: Tensor | None  # [N]: not 0 where a sequence starts from zeros; None: nowhere
    power: Tensor | None = None  # [N HV] float32, powers of two by which the kernels' states are the table's divided; None: 1

    def arguments(self, of: Tensor | None = None) -> tuple[Tensor | int | None, ...]:
        """Of a kernel: p_slots, p_fresh, p_power, slot_stride, p_of, the sequence of each segment (`Segments.of`), None: these are the
        sequences. Without a table all are None."""
        return *self[1:], self.state.stride(0), of


def in_whole_rows(
    engine: str, inputs: DeltaInputs, call: Callable[[DeltaInputs], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """o and the final state, by kernels that get a head's numbers in rows that their copy engine takes."""
    q, K, V = inputs.q, inputs.k.shape[-1], inputs.v.shape[-1]
    wide = widths(engine, q.device, q.dtype, K, V)
    if wide == (K, V):
        return call(inputs)
    o, state = call(inputs.widened(*wide))
    return o[..., :V], state[..., :K, :V]


OF_TABLE = {"p_slots": "*i64", "p_fresh": "*u8", "p_power": "*fp32", "slot_stride": "i64", "p_of": "*i32"}  # their types
NO_TABLE = (None,) * len(OF_TABLE)


def solve_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of a product's operands, the inverse of a chunk and what it multiplies: bfloat16 would miss the error budget."""
    return torch.float16 if dtype.itemsize == 2 else dtype
