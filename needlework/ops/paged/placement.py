"""Pages that many sequences share, as serving has them: which rows are whose. What the tables hold is data, checked apart."""

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.common.packing import sequences
from needlework.ops.common.shapes import check


class Placement(NamedTuple):
    """Which rows of the pages are whose: token t of sequence n lies in row t mod PG of page block_table[n, t // PG]."""

    block_table: Tensor  # [N NB] int32
    length: Tensor  # [N] tokens of each sequence, the new ones included; −1: a padded row
    rows: Tensor  # [T] int64: where each new token goes, page · PG + its row there; −1: nowhere
    cu_seqlens: Tensor | None  # [N+1]; None: one new token a sequence

    def ends(self, T: int) -> Tensor:
        """[N+1] where each sequence's new tokens begin and end."""
        return torch.arange(T + 1, device=self.length.device) if self.cu_seqlens is None else self.cu_seqlens


def check_placement(where: Placement, T: int, pages: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the tables fit T tokens, and pages by name [n PG ...] are whole ones of the same rows."""
    (first, *_), (rows, *_) = zip(*((name, x.shape[1]) for name, x in pages.items()), strict=True)
    if rows == 0 or rows % 16:
        raise ValueError(f"{first}: axis 1 (PG) has size {rows}, expected a multiple of 16")
    for name, x in pages.items():
        if not x[:1].is_contiguous():
            raise ValueError(f"{name}: expected each page contiguous, got strides {x.stride()}")
    check("block_table", where.block_table, "N NB")
    N = len(where.block_table)
    check("length", where.length, "N", N=N)
    check("rows", where.rows, "T", T=T)
    integers = torch.int32, torch.int64
    for name, x, allowed in (
        ("block_table", where.block_table, integers[:1]),
        ("length", where.length, integers),
        ("rows", where.rows, integers[1:]),
    ):
        if x.dtype not in allowed:
            raise ValueError(f"{name}: expected {' or '.join(str(dtype) for dtype in allowed)}, got {x.dtype}")
    if where.cu_seqlens is None:
        if T != N:
            raise ValueError(f"k: axis 0 (T) has size {T}, expected one token for each of {N} sequences; more take cu_seqlens")
    elif sequences(where.cu_seqlens, 1) != N:
        raise ValueError(
            f"cu_seqlens: axis 0 (N+1) has size {len(where.cu_seqlens)}, expected {N + 1} for {N} rows of block_table"
        )


def check_placement_data(where: Placement, T: int, n: int, PG: int) -> None:
    """What only the values of the tables show."""
    ends, capacity = where.ends(T).tolist(), where.block_table.shape[1] * PG
    if ends[0] != 0 or ends[-1] > T or any(a > b for a, b in pairwise(ends)):
        raise ValueError(f"cu_seqlens: expected to rise from 0 to at most T = {T}, got {ends}")
    for total, (a, b) in zip(where.length.tolist(), pairwise(ends), strict=True):
        if total >= 0 and not b - a <= total <= capacity:
            raise ValueError(
                f"length: got {total}, expected at least the {b - a} new tokens and at most the {capacity} rows of the block table"
            )
    if len(where.rows) and not -1 <= int(where.rows.min()) <= int(where.rows.max()) < n * PG:
        raise ValueError(
            f"rows: expected from -1 to below n · PG = {n * PG}, got {int(where.rows.min())} to {int(where.rows.max())}"
        )
