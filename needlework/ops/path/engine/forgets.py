"""A forget gate's sums beside PaTH's kernels, and their gradient: what sweep.py and keys.py have of each query and key."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.path.engine.tiles import over_scale
from needlework.ops.path.engine.walk import Walk


@triton.jit(do_not_specialize=["T", "NR"])
def by_head(
    p_sums, p_decay, p_edges, T, NR, H: tl.constexpr, C: tl.constexpr, RATE: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """`Decays` of a block of a head; p_sums [B T H]."""
    i_bh = tl.program_id(0)
    first = tl.program_id(1) * C
    o = first + tl.arange(0, C)
    p_sums += tl.cast(i_bh // H, tl.int64) * T * H + i_bh % H
    G = tl.load(p_sums + tl.cast(o, tl.int64) * H, mask=o < T, other=0.0)
    oldest = tl.load(p_sums + tl.cast(first, tl.int64) * H)
    newest = tl.load(p_sums + tl.cast(first + C - 1, tl.int64) * H, mask=first + C <= T, other=0.0)
    row = tl.cast(i_bh, tl.int64) * NR + o
    tl.store(p_decay + row, G)
    tl.store(p_edges + 2 * row, over_scale(G - oldest, RATE, ACC))
    tl.store(p_edges + 2 * row + 1, over_scale(newest - G, RATE, ACC))


class Decays(NamedTuple):
    """Of a call with a forget gate, over its rows, zeros after T; edges are in the sums' dtype, as scores have them before their scale."""

    sums: Tensor  # [B H NR] of log gates, float64
    edges: Tensor  # [B H NR 2]: what is lost since the oldest token of its block, and from then to the newest

    @classmethod
    def of(cls, walk: Walk, sums: Tensor | None) -> "Decays | None":
        """Of sums [B T H]; None: there is no gate."""
        if sums is None:
            return None
        size = walk.B, walk.H, walk.rows
        found = cls(sums.new_empty(size), walk.number(sums, *size, 2))
        if sums.numel():
            walk.launch(by_head, (walk.B * walk.H, walk.blocks), sums.contiguous(), *found, walk.T, walk.rows)
        return found


NO_GATE = None, None  # in the place of `Decays` among a launch's arguments


class Forgets(NamedTuple):
    """Of the backward with a forget gate: the gates' sums, and what dA's rows and columns sum to, [B H NR] in float64.

    A score has G_i − G_j behind its scale, so that dG_t = (Σ_j dA_tj − Σ_i dA_it) / scale (path/backward.py derives dg from it).
    """

    decays: Decays
    row: Tensor
    column: Tensor

    @classmethod
    def of(cls, decays: Decays) -> "Forgets":
        return cls(decays, torch.empty_like(decays.sums), torch.zeros_like(decays.sums))

    def columns(self, panel: int, dtype: torch.dtype) -> Tensor:
        """[B H panel NR] that the blocks of a panel write, each its own queries' share."""
        B, H, rows = self.column.shape
        return self.column.new_zeros(B, H, panel, rows, dtype=torch.float32 if dtype.itemsize == 2 else torch.float64)

    def add(self, columns: Tensor) -> None:
        """What a panel has written; it begins anew."""
        self.column.add_(columns.sum(2, dtype=torch.float64))
        columns.zero_()

    def ddecay(self, scale: float, T: int) -> Tensor:
        """[B T H]"""
        return ((self.row - self.column) / scale)[:, :, :T].transpose(1, 2)
