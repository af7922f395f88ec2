"""Edges of tokens: the rows between the tokens of sequences, one more than tokens for every sequence. In plain tensors.

Row t of a sequence is before its token t, the last row after its last token. A batch has tokens [B T ...] and rows [B T+1 ...], packed
sequences [1 T ...] and [1 T+N ...]; what is one of each sequence is [N ...].
"""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.common.packing import document_positions


class Packed(NamedTuple):
    """Where packed sequences lie."""

    cu_seqlens: Tensor  # [N+1]
    ends: Tensor  # [N+1] where their rows begin and end
    document: Tensor  # [T] the sequence of each token
    row: Tensor  # [T] the row before each token


class Edges(NamedTuple):
    """`packed` is None of a batch."""

    packed: Packed | None

    @classmethod
    def of(cls, cu_seqlens: Tensor | None, T: int) -> "Edges":
        if cu_seqlens is None:
            return cls(None)
        document, _ = document_positions(cu_seqlens, T)
        row = torch.arange(T, device=document.device) + document
        return cls(Packed(cu_seqlens, row_ends(cu_seqlens), document, row))

    def shifted(self, first: Tensor, x: Tensor) -> Tensor:
        """Rows that have the token before them: `first` [N ...], then x."""
        if self.packed is None:
            return torch.cat([first[:, None], x], 1)
        rows = x.new_empty(1, x.shape[1] + len(first), *x.shape[2:])
        rows[0, self.packed.ends[:-1]] = first
        rows[0, self.packed.row + 1] = x[0]
        return rows

    def unshifted(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of `shifted`: first and x."""
        if self.packed is None:
            return rows[:, 0], rows[:, 1:]
        return rows[0, self.packed.ends[:-1]], rows[:, self.packed.row + 1]

    def ended(self, x: Tensor) -> Tensor:
        """Rows that have the token after them, and zeros after the last."""
        if self.packed is None:
            return torch.cat([x, x.new_zeros(len(x), 1, *x.shape[2:])], 1)
        rows = x.new_zeros(1, x.shape[1] + len(self.packed.ends) - 1, *x.shape[2:])
        rows[0, self.packed.row] = x[0]
        return rows

    def tokens(self, rows: Tensor) -> Tensor:
        """The inverse of `ended`."""
        return rows[:, :-1] if self.packed is None else rows[:, self.packed.row]

    def last(self, rows: Tensor) -> Tensor:
        """[N ...] the last row of each sequence."""
        return rows[:, -1] if self.packed is None else rows[0, self.packed.ends[1:] - 1]

    def add_last(self, rows: Tensor, x: Tensor) -> None:
        """rows += x [N ...] in the last row of each sequence."""
        if self.packed is None:
            rows[:, -1] += x
        else:
            rows[0, self.packed.ends[1:] - 1] += x

    def sums(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Σ of x over a token and those of its sequence before it, and [N ...] over all of a sequence, in float64."""
        if self.packed is None:
            upto = x.double().cumsum(1)
            return upto, upto[:, -1] if x.shape[1] else x.new_zeros(len(x), *x.shape[2:], dtype=torch.float64)
        cu_seqlens, _, document, _ = self.packed
        upto = torch.cat([x.new_zeros(1, *x.shape[2:], dtype=torch.float64), x[0].double().cumsum(0)])
        before = upto[cu_seqlens[:-1]]
        return (upto[1:] - before[document])[None], upto[cu_seqlens[1:]] - before

    def newest(self, first: Tensor, x: Tensor) -> Tensor:
        """[N ...] the last token of each sequence; of an empty one `first` [N ...]."""
        if self.packed is None or not x.shape[1]:
            return x[:, -1] if x.shape[1] else first
        cu_seqlens = self.packed.cu_seqlens
        empty = (cu_seqlens.diff() == 0).view(-1, *[1] * (first.dim() - 1))
        return torch.where(empty, first, x[0, (cu_seqlens[1:] - 1).clamp(min=0)])

    def spread(self, x: Tensor) -> Tensor:
        """[N ...] -> what broadcasts with tokens."""
        return x[:, None] if self.packed is None else x[None, self.packed.document]


def row_ends(cu_seqlens: Tensor) -> Tensor:
    """[N+1] where the rows of packed sequences begin and end."""
    return cu_seqlens + torch.arange(len(cu_seqlens), device=cu_seqlens.device, dtype=cu_seqlens.dtype)
