"""Tables of states, one slot a sequence: what a call on a table accepts, and its slots in plain torch.

A table is a tensor [slots ...] or a NamedTuple of them. Steps take a row a token (`Live`), chunk forms a sequence (`Sequences`).
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from needlework.ops.common.packing import lengths, sequences
from needlework.ops.common.shapes import check, check_slots, check_tensor

Table = TypeVar("Table", bound=Tensor | tuple)


def check_contiguous(state: tuple) -> None:
    """Raise ValueError unless the slots of every tensor of a state table are contiguous, each by itself: kernels write them in place."""
    for name, x in _columns(state):
        _check_slot(name, x)


def _check_slot(name: str, x: Tensor) -> None:
    if not x[:1].is_contiguous():
        raise ValueError(f"{name}: a slot must be contiguous, got strides {x.stride()}")


def check_table(
    state: Tensor | tuple | None, slots: Tensor | None, fresh: Tensor | None, N: int, *,
    dtype: torch.dtype, initial_state: object, output_final_state: bool, inputs: Iterable[Tensor | None],
) -> None:  # fmt: skip
    """Raise ValueError unless a call of N sequences may be made on this table, or has none.

    dtype: of the table's floating tensors. inputs: the call's other tensors. Sizes past the slot axis are the op's to check.
    """
    if state is None:
        for name, x in (("slots", slots), ("fresh", fresh)):
            if x is not None:
                raise ValueError(f"{name}: given without state, the table that it is about")
        return
    for name, given in (("initial_state", initial_state is not None), ("output_final_state", output_final_state)):
        if given:
            raise ValueError(f"{name}: state is given, which takes its place: a table is read and written in place")
    check_slots(slots, N, "N")
    if fresh is not None:
        check("fresh", fresh, "N", N=N)
        if fresh.dtype != torch.bool:
            raise ValueError(f"fresh: expected bool, got {fresh.dtype}")
    fewest = N if slots is None else 1
    for name, x in _columns(state):
        check_tensor(name, x, "slots …")
        if not x.dim() or len(x) < fewest:
            raise ValueError(f"{name}: expected at least {fewest} slots, got shape {list(x.shape)}")
        _check_slot(name, x)
        if x.is_floating_point() and x.dtype != dtype:
            raise ValueError(f"{name}: expected {dtype}, got {x.dtype}")
    tensors = (*(x for _, x in _columns(state)), *inputs)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError("state: no gradient flows through a table that is written in place; call under torch.no_grad()")


def _columns(table: Any) -> list[tuple[str, Any]]:
    """The tensors of a table, by name."""
    fields = getattr(table, "_fields", None)
    return [("state", table)] if fields is None else [(f"state.{name}", x) for name, x in zip(fields, table, strict=True)]


class Live(NamedTuple):
    """The rows of a batch that own a slot; a padded row (slot −1) is left out."""

    rows: Tensor  # [B] bool
    slots: Tensor  # [live] int64: the slot of each

    @classmethod
    def of(cls, slots: Tensor | None, B: int, device: torch.device) -> "Live":
        """slots [B]; None: row b owns slot b."""
        slots = torch.arange(B, device=device) if slots is None else slots
        rows = slots >= 0
        return cls(rows, slots[rows])

    def write(self, table: Iterable[Tensor], new: Iterable[Tensor]) -> None:
        """`new` [live ...] into the slots of every tensor of a table [slots ...], in place and in its dtype."""
        for column, x in zip(table, new, strict=True):
            column[self.slots] = x.to(column.dtype)

    def spread(self, x: Tensor) -> Tensor:
        """[live ...] -> [B ...], zeros in padded rows."""
        out = x.new_zeros(len(self.rows), *x.shape[1:])
        out[self.rows] = x
        return out


class Sequences(NamedTuple):
    """The sequences of a call on a table: where each finds its state and leaves it. Nothing is read back to the host."""

    slots: Tensor  # [N] int64; −1: none is read or written
    resumed: Tensor  # [N] bool: starts from what lies in its slot; the others from zeros

    @classmethod
    def of(
        cls, slots: Tensor | None, fresh: Tensor | None, N: int, T: int, cu_seqlens: Tensor | None, device: torch.device
    ) -> "Sequences":
        """slots [N]; None: sequence n owns slot n. An empty sequence leaves its slot as it is, unless it is fresh."""
        slots = torch.arange(N, device=device) if slots is None else slots.long()
        fresh = torch.zeros_like(slots, dtype=torch.bool) if fresh is None else fresh
        empty = torch.full_like(fresh, T == 0) if cu_seqlens is None else lengths(cu_seqlens) == 0
        slots = torch.where(empty & ~fresh, -1, slots)
        return cls(slots, (slots >= 0) & ~fresh)

    def read(self, table: Table) -> Table:
        """The states [N ...] from which the sequences start, as the table has them: a tensor, or a NamedTuple of them."""
        rows = self.slots.clamp(min=0)
        return _each(lambda column: _where(self.resumed, column[rows], torch.zeros_like(column[:1])), table)

    def write(self, table: Table, new: Table) -> None:
        """The states [N ...] that the sequences leave, into their slots, in the table's dtype."""
        if len(self.slots):
            _each(self._write, table, new)

    def _write(self, column: Tensor, new: Tensor) -> None:
        """How many sequences have a slot is not known to the host: one without writes again what the first one with a slot does."""
        live, new = self.slots >= 0, new.to(column.dtype)
        first = live.int().argmax(0, keepdim=True)  # the first of all where none has a slot: that slot's own state is written
        row = torch.where(live, self.slots, self.slots[first].clamp(min=0))
        again = _where(live[first], new[first], column[row[first]])
        column[row] = _where(live, new, again)


def start_anew(table: Table, slots: Tensor | None, fresh: Tensor | None, cu_seqlens: Tensor | None, q: Tensor) -> None:
    """What a call without a token does: zeros in the slots of fresh sequences."""
    found = Sequences.of(slots, fresh, sequences(cu_seqlens, len(q)), 0, None, q.device)
    found.write(table, found.read(table))


def _each(function: Callable, table: Any, *others: Any) -> Any:
    """`function` of a table's tensor, or of each tensor of its NamedTuple; with it those of tables of the same kind."""
    if isinstance(table, Tensor):
        return function(table, *others)
    return type(table)(*map(function, table, *others))


def _where(rows: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Row by row."""
    return torch.where(rows.view(-1, *[1] * (a.dim() - 1)), a, b)
