"""New tokens of sequences on pages as a line of whole blocks, each sequence's from the last multiple of 64 on: the tokens of its open block
come again in front of the new ones, so that the pages' keys are as the line's first block sees them. Nothing is read back.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.common.alignment import Alignment
from needlework.ops.common.decay import summed
from needlework.ops.paged.placement import Placement
from needlework.ops.path.state import BLOCK
from needlework.ops.runtime.each import each


class Line(NamedTuple):
    """R places of the line, in blocks of C, for N sequences and T tokens of a call."""

    cum: Tensor  # [N+1] int32 where each sequence's blocks begin
    start: Tensor  # [N] int32 tokens before its open block
    past: Tensor  # [N] int32 tokens before the call
    length: Tensor  # [N] int32; no more than past in a padded row
    sequence: Tensor  # [R] whose a place is
    at: Tensor  # [R] which token of its sequence a row has
    token: Tensor  # [R] which one of the call, 0 where it is none
    new: Tensor  # [R] bool: a token of the call
    held: Tensor  # [R] bool: a token of the open block
    place: Tensor  # [T] where each token of the call is, 0 for a token of no sequence
    real: Tensor  # [T] bool: somebody's

    @classmethod
    def of(cls, where: Placement, T: int, C: int) -> "Line":
        length, ends = where.length, where.ends(T).long()
        N = len(length)
        count, total = ends.diff(), length.long()
        live = (total >= 0) & (count > 0)
        past = torch.where(live, (total - count).clamp(min=0), 0)
        total = torch.where(live, total, past)
        start = past // BLOCK * BLOCK
        cum = torch.zeros(N + 1, dtype=torch.int64, device=length.device)
        cum[1:] = ((torch.where(live, total - start, 0) + C - 1) // C).cumsum(0)
        place = torch.arange((T // C + N * (BLOCK // C + 1)) * C, device=length.device)
        n = torch.searchsorted(cum[1:] * C, place, right=True).clamp(max=N - 1)
        at = start[n] + place - cum[n] * C
        there = (place < cum[-1] * C) & (at < total[n])
        new = there & (at >= past[n])
        of_call = torch.where(new, ends[n] + at - past[n], 0)
        token = torch.arange(T, device=length.device)
        m = torch.searchsorted(ends[1:], token, right=True).clamp(max=N - 1)
        real = (token < ends[-1]) & live[m]
        back = torch.where(real, cum[m] * C + past[m] - start[m] + token - ends[m], 0)
        cum, start, past, total = each(lambda x: x.to(torch.int32), cum, start, past, total)
        return cls(cum, start, past, total, n, at, of_call, new, there & ~new, back, real)

    def align(self, C: int) -> Alignment:
        """As the walks of packed sequences have it; a sequence may fill the line."""
        return Alignment(self.cum, len(self.start), len(self.at), len(self.at) // C, self.place)

    def tokens(self, x: Tensor) -> Tensor:
        """The call's x [T ...] on the line [1 R ...], zeros in the other places."""
        return torch.where(_like(self.new, x), x[self.token], 0)[None]

    def rows(self, x: Tensor, pages: Tensor, table: Tensor, window: int | None) -> Tensor:
        """The same with the open block's rows of pages [n PG ...] in front, as far as the window of the first new token shows them."""
        PG = pages.shape[1]
        seen = self.held if window is None else self.held & (self.at > self.past[self.sequence] - window)
        page = table[self.sequence, torch.where(seen, self.at // PG, 0)].long()
        held = pages[torch.where(seen, page, 0), torch.where(seen, self.at % PG, 0)].to(x.dtype)
        return self.tokens(x) + torch.where(_like(seen, held), held, 0)[None]

    def sums(self, g: Tensor, pages: Tensor, ends: Tensor, table: Tensor, window: int | None) -> Tensor:
        """The sums [T H] of the call's log gates g, from those in pages [n PG H] of the tokens before on. In a window of 1 none counts."""
        PG, last = pages.shape[1], (self.past.long() - 1).clamp(min=0)
        held = (self.past > 0) & (window != 1)
        page = table.gather(1, (last // PG)[:, None])[:, 0].long()
        before = torch.where(held[:, None], pages[torch.where(held, page, 0), last % PG], 0)
        return summed(g[None], before, ends)[0][0]

    def opened(self, x: Tensor, table: Tensor, slots: Tensor) -> Tensor:
        """The same with the open block's rows of a table of slots [slots BLOCK ...] in front."""
        held = table[slots[self.sequence].clamp(min=0), self.at % BLOCK].to(x.dtype)
        return self.tokens(x) + torch.where(_like(self.held, held), held, 0)[None]

    def call(self, x: Tensor) -> Tensor:
        """The call's tokens [T ...] from rows of the line [1 R ...], zeros for tokens of no sequence."""
        found = x[0, self.place]
        return torch.where(_like(self.real, found), found, 0)


def _like(which: Tensor, x: Tensor) -> Tensor:
    """[R] beside x [R ...]."""
    return which.view(-1, *[1] * (x.dim() - 1))
