"""How attention cuts tokens into blocks, and which blocks meet. Knows no op.

Query block i meets key block i − offset for offset = 0, 1, …: all the pairs of one offset are one batched product, so a
sequence takes T / C steps of [T C] numbers each. The axis of blocks comes first: a range of blocks is then contiguous.
Offset 0 comes first too: it holds every query's own key, so a running maximum is finite from the first step on.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from needlework.ops.attention.pages import positions


@dataclass(frozen=True)
class Blocks:
    """n blocks of C tokens cover T tokens; H key-value heads, each read by G query heads; window W or None."""

    T: int
    H: int
    window: int | None
    chunk_size: int

    @property
    def C(self) -> int:
        return max(1, min(self.chunk_size, self.T))

    @property
    def n(self) -> int:
        return -(-self.T // self.C)

    def split(self, x: Tensor) -> Tensor:
        """[B T HG ...] -> [n B H G C ...], zeros after T."""
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, self.n * self.C - self.T))
        x = x.unflatten(2, (self.H, -1)).unflatten(1, (self.n, self.C))  # [B n C H G ...]
        return x.movedim((1, 0, 3, 4, 2), (0, 1, 2, 3, 4)).contiguous()

    def join(self, x: Tensor) -> Tensor:
        """[n B H G C ...] -> [B T HG ...]: the inverse of `split`."""
        x = x.movedim((0, 1, 2, 3, 4), (1, 0, 3, 4, 2))
        return x.flatten(3, 4).flatten(1, 2)[:, : self.T].contiguous()

    def positions(self, length: Tensor) -> Tensor:
        """[n B C] position of each query in its own sequence, `length [B]` tokens of which came before."""
        token = torch.arange(self.n * self.C, device=length.device).view(self.n, 1, self.C)
        return length[:, None] + token

    def diagonals(self, device: torch.device) -> Iterator[tuple[int, Tensor | None]]:
        """(offset, [C C] true where the key is hidden, or None), without the offsets that lie outside the window."""
        reach = self.n if self.window is None else min(self.n, 1 + (self.window + self.C - 2) // self.C)
        row = torch.arange(self.C, device=device)
        for offset in range(reach):
            distance = offset * self.C + row[:, None] - row
            hidden = distance < 0
            if self.window is not None:
                hidden |= distance >= self.window
            yield offset, hidden if offset == 0 or hidden.any() else None

    def pages(self, length: Tensor, P: int) -> Iterator[tuple[slice, Tensor]]:
        """(rows, [n B 1 1 C rows] true where the row is empty or outside the window) of pages [B P ...]."""
        at = positions(length, P, self.window)  # [B P]
        here = self.positions(length)  # [n B C]
        for start in range(0, P, self.chunk_size):
            rows = slice(start, min(start + self.chunk_size, P))
            hidden = (at[:, None, rows] < 0).expand(self.n, -1, self.C, -1)
            if self.window is not None:
                hidden = hidden | (here[..., None] - at[:, None, rows] >= self.window)
            yield rows, hidden[:, :, None, None]
