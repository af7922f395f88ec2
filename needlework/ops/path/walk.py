"""One query block after the other, back to the oldest key: what it meets on its way, and as what it comes there.

Other than chunk.py, which takes all blocks at once, this is for work whose blocks wait for one another, and for the way back.
"""

from typing import NamedTuple

from torch import Tensor

from needlework.ops.attention.blocks import Blocks
from needlework.ops.path.chunk import History, InBlocks, hides, reached
from needlework.ops.path.transition import Transition

OPEN = "open"
Place = int | str | slice  # a block of the call, the open block, or rows of the pages


class Met(NamedTuple):
    """Keys that a query block meets."""

    x: Tensor  # [B H GC K] the queries as they come there
    k: Tensor  # [B H columns K] the keys as they are read
    hidden: Tensor | None  # [.. G C columns]
    form: Transition | None  # what lies between them and older keys; None: they are the oldest
    place: Place
    decay: Tensor | None  # [B H G columns] of the keys


class Walk:
    """Of one call, whose queries have the scores' scale. values: of the call's tokens [n B H C V], which may still be made."""

    def __init__(self, blocks: Blocks, tokens: InBlocks, past: History, chunk_size: int):
        self.blocks, self.tokens, self.past, self.size = blocks, tokens, past, chunk_size
        self.block, self.values, self.decay = tokens.block, tokens.v, tokens.decay
        self.L, self.q0 = tokens.entered()
        self.hidden = dict(blocks.diagonals(tokens.v.device))
        self.opened = None if past.empty else past.open_block()

    def own(self) -> Tensor:
        """The scores of every block with itself, [n B H G C C]; above the diagonal anything."""
        return self.tokens.q @ self.block.K.mT[:, :, :, None] - self.L @ self.block.R[:, :, :, None]

    def back(self, i: int) -> list[Met]:
        """What query block i meets, the newest first."""
        x, met = self.q0[i].flatten(2, 3), []
        for j in range(i - 1, max(0, i + 1 - len(self.hidden)) - 1, -1):
            form = self.block.at(j)
            met.append(Met(x, form.k1, self.hidden[i - j], form, j, None if self.decay is None else self.decay[j]))
            x = form.back(x)
        if self.opened is not None and i < reached(self.blocks):
            here, (form, _, at, _, decay) = self.blocks.positions(self.past.length)[i : i + 1], self.opened
            met.append(Met(x, form.k1, hides(self.blocks, here, at)[0], form, OPEN, decay))
            x, row = form.back(x), 0
            for at, page_k, _, decay in self.past.pages(self.size):
                rows = slice(row, row := row + at.shape[1])
                met.append(Met(x, page_k, hides(self.blocks, here, at)[0], None, rows, decay))
        return met

    def v(self, place: Place) -> Tensor:
        """[B H columns V]"""
        if isinstance(place, int):
            return self.values[place]
        if isinstance(place, slice):
            return self.past.page_v.transpose(1, 2)[:, :, place]
        assert self.opened is not None
        return self.opened.v
