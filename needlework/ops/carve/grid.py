"""Sequences of any length and position as one batch whose content chunks coincide. Knows no mixer.

Row n starts with position[n] virtual tokens and ends with as many as the longest row asks for. A virtual token holds a
fill value that leaves the caller's recurrence as it is.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """real [N T']: which tokens of the aligned batch are real. ends [N]: the position after each row's last real token."""

    real: Tensor
    ends: Tensor

    @classmethod
    def of(cls, position: Tensor, lengths: Tensor) -> "Grid":
        ends = position + lengths
        t = torch.arange(int(ends.max()), device=ends.device)
        return cls((t >= position[:, None]) & (t < ends[:, None]), ends)

    def align(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """[B T ...], or packed [1 T ...] -> [N T' ...]."""
        return scatter(x.flatten(0, 1), self.real, fill)

    def restore(self, x: Tensor, like: Tensor) -> Tensor:
        """[N T' ...] -> the layout of `like`: the inverse of `align`."""
        return gather(x, self.real).view(*like.shape[:2], *x.shape[2:])

    def chunks(self, size: int) -> Tensor:
        """[N C] which chunks of `size` hold a real token of row n, or virtual ones before it."""
        first = torch.arange(0, self.real.shape[1], size, device=self.ends.device)
        return first < self.ends[:, None]


def scatter(rows: Tensor, where: Tensor, fill: float = 0.0) -> Tensor:
    """Row i of `rows [M ...]` at the i-th true place of `where [N T]`, `fill` elsewhere; a view where all places are true."""
    shape = (*where.shape, *rows.shape[1:])
    if len(rows) == where.numel():
        return rows.view(shape)
    out = rows.new_full(shape, fill)
    out[where] = rows
    return out


def gather(x: Tensor, where: Tensor) -> Tensor:
    """The rows of x [N T ...] where `where [N T]` is true: the inverse of `scatter`."""
    return x.flatten(0, 1) if where.all() else x[where]
