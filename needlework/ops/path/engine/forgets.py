"""The gradient of a forget gate's sums beside PaTH's backward: what sweep.py has of each query and key."""

from typing import NamedTuple

import torch
from torch import Tensor


class Forgets(NamedTuple):
    """Of the backward with a forget gate: the gates' sums, and what dA's rows and columns sum to, [B H NR] in float64.

    A score has G_i − G_j behind its scale, so that dG_t = (Σ_j dA_tj − Σ_i dA_it) / scale (path/backward.py derives dg from it).
    """

    decay: Tensor
    row: Tensor
    column: Tensor

    @classmethod
    def of(cls, decay: Tensor) -> "Forgets":
        return cls(decay, torch.empty_like(decay), torch.zeros_like(decay))

    def columns(self, panel: int, dtype: torch.dtype) -> Tensor:
        """[B H panel NR] that the blocks of a panel write, each its own queries' share."""
        B, H, rows = self.decay.shape
        return self.decay.new_zeros(B, H, panel, rows, dtype=torch.float32 if dtype.itemsize == 2 else torch.float64)

    def add(self, columns: Tensor) -> None:
        """What a panel has written; it begins anew."""
        self.column.add_(columns.sum(2, dtype=torch.float64))
        columns.zero_()

    def ddecay(self, scale: float, T: int) -> Tensor:
        """[B T H]"""
        return ((self.row - self.column) / scale)[:, :, :T].transpose(1, 2)
