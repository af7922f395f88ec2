"""Steps on a table of states: what the kernels ask of the table, and the rows and slots of a step in plain torch."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


def check_contiguous(**table: Tensor) -> None:
    """Raise ValueError unless every tensor of a state table is contiguous: the kernels' steps write slots in place."""
    for name, x in table.items():
        if not x.is_contiguous():
            raise ValueError(f"state.{name}: must be contiguous, got strides {x.stride()}")


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
