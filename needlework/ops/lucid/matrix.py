"""A, the matrix that LUCID solves with, by block rows: what the forward and the backward of chunk.py both ask for.

    A_ij = e^{√d (k̂_i·k̂_j − 1)}, j < i,   unit diagonal (by definition, not stored)      "key"
    A_ij = e^{s_ij − μ_i}, j <= i,         s = k_i·k_j / √d,  μ_i = max_{j<=i} s_ij       "rowmax"

Columns are the rows of the pages, then the tokens. What a row does not see (the future, an empty row of a page, a key
outside the window) is 0. Batch and heads are one axis here, [BH columns ·], so that every product is one batched one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.attention.pages import positions

TINY = 1e-6  # norms below it do not scale a key to 1


def fold(x: Tensor) -> Tensor:
    """[B S H ·] -> [BH S ·]"""
    return x.transpose(1, 2).flatten(0, 1)


def unfold(x: Tensor, H: int) -> Tensor:
    """[BH S ·] -> [B S H ·]"""
    return x.unflatten(0, (-1, H)).transpose(1, 2)


class BlockRow(NamedTuple):
    rows: slice  # the block's tokens, as columns
    seen: slice  # the columns that A holds: some past, then the block itself
    past: slice  # seen without the block
    A: Tensor  # [BH C seen]
    top: Tensor | None  # [BH C 1] "rowmax": where in `seen` the maximum lies


@dataclass(frozen=True)
class Matrix:
    k: Tensor  # [BH P+T K]
    norm: Tensor  # [BH P+T 1]
    x: Tensor  # [BH P+T K] k̂, or k itself for "rowmax"
    at: Tensor  # [BH P+T] or [1 T] position of each column's token, -1 for none
    P: int
    window: int | None
    rowmax: bool

    @classmethod
    def of(cls, page_k: Tensor, k: Tensor, length: Tensor, window: int | None, rowmax: bool) -> "Matrix":
        P, T, H = page_k.shape[1], k.shape[1], k.shape[2]
        at = torch.arange(T, device=k.device)[None]
        if P:
            at = torch.cat([positions(length, P, window), length[:, None] + at], 1).repeat_interleave(H, 0)
        k = fold(torch.cat([page_k, k], 1))
        norm = k.norm(dim=-1, keepdim=True)
        return cls(k, norm, k if rowmax else k / norm.clamp(min=TINY), at, P, window, rowmax)

    def block_rows(self, size: int, backwards: bool = False) -> Iterator[BlockRow]:
        starts = range(self.P, self.k.shape[1], size)
        for start in reversed(starts) if backwards else starts:
            rows = slice(start, min(start + size, self.k.shape[1]))
            first = 0 if self.window is None else start - self.window + 1  # what lies before it no row of the block sees
            seen = slice(first if first > self.P else 0, rows.stop)  # the pages, a ring, are taken whole
            yield BlockRow(rows, seen, slice(seen.start, start), *self._entries(rows, seen))

    def _entries(self, rows: slice, seen: slice) -> tuple[Tensor, Tensor | None]:
        d = self.x.shape[-1]
        s = self.x[:, rows] @ self.x[:, seen].mT
        top = None
        if self.rowmax:
            s = s.mul_(d**-0.5).masked_fill_(self._hidden(rows, seen), float("-inf"))
            mu, top = s.max(-1, keepdim=True)
            s.sub_(mu)
        else:
            s = s.sub_(1).mul_(d**0.5).masked_fill_(self._hidden(rows, seen), float("-inf"))
        return s.exp_(), top

    def _hidden(self, rows: slice, seen: slice) -> Tensor:
        """[BH or 1, C seen]"""
        j = self.at[:, None, seen]
        gap = self.at[:, rows, None] - j
        hidden = gap < (0 if self.rowmax else 1)
        if self.P:
            hidden |= j < 0
        return hidden if self.window is None else hidden | (gap >= self.window)

    def key_gradient(self, dx: Tensor) -> Tensor:
        """Gradient of k from G x + Gᵀ x, where G is the gradient of the exponents' products."""
        d = self.x.shape[-1]
        if self.rowmax:
            return dx * d**-0.5
        radial = torch.where(self.norm > TINY, (self.x * dx).sum(-1, keepdim=True), 0)
        return (dx - self.x * radial) * (d**0.5 / self.norm.clamp(min=TINY))
