"""Tiles of BT rows that all kernels of Mamba-3 walk: where they lie, and the pairs of channels in them.

A sequence has F rows more than tokens (0 or 1). A batch has tokens [B T ...] and rows [B T+F ...], packed sequences lie one after the
other in both. Row j of a sequence is before its token j.
"""

from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.common.alignment import Alignment
from needlework.ops.common.kernels.chain import chain_at
from needlework.ops.common.remembered import remembered
from needlework.ops.mamba3.edges import Edges, row_ends
from needlework.ops.runtime.launch_configs import Constants, LaunchConfig, launch_config
from needlework.ops.runtime.triton_types import TYPES, accumulator, cdiv, next_power_of_2
from needlework.ops.slots.kernels import power_of

ENGINE = "mamba3/siso"
OF_TILES = {
    "p_cum": "*i32",
    "p_ends": "*i64",
    "T": "i32",
    "N": "i32",
    "NCB": "i32",
}  # arguments of every kernel, and their types

_row_ends = remembered(row_ends)


class Tiles(NamedTuple):
    """The sequences of a call, in tiles; `arguments` are those that every kernel takes last."""

    cum: Tensor  # [N+1] int32: sequence n is tiles cum[n] … cum[n+1) − 1
    cu_seqlens: Tensor | None
    T: int
    N: int
    NCB: int  # tiles of a batch row
    count: int  # tiles in all, of packed sequences at most
    F: int
    config: LaunchConfig

    @classmethod
    def of(cls, v: Tensor, K: int, cu_seqlens: Tensor | None, final: bool) -> "Tiles":
        """Of values v [B T HV V]."""
        B, T, _, V = v.shape
        config = launch_config(ENGINE, v.device, v.dtype, K, V)
        N = B if cu_seqlens is None else len(cu_seqlens) - 1
        count, (_, rows) = cls.sizes(v, K, cu_seqlens, final)
        ends = _row_ends(cu_seqlens) if cu_seqlens is not None and final else cu_seqlens
        at = Alignment.of(ends, B, rows, config.launch["shared"]["BT"], v.device)
        cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
        return cls(at.cum, cu_seqlens, T, N, count // B, count, int(final), config)

    @staticmethod
    def sizes(v: Tensor, K: int, cu_seqlens: Tensor | None, final: bool) -> tuple[int, tuple[int, int]]:
        """`count`, and B and T of the rows."""
        B, T, _, V = v.shape
        BT = launch_config(ENGINE, v.device, v.dtype, K, V).launch["shared"]["BT"]
        N = 1 if cu_seqlens is None else len(cu_seqlens) - 1
        rows = T + N * int(final)
        return B * -(-rows // BT) if cu_seqlens is None else rows // BT + N, (B, rows)

    def rows(self, B: int) -> tuple[int, int]:
        """B and T of the rows."""
        return B, self.T + (1 if self.cu_seqlens is None else self.N) * self.F

    def in_rows(self, x: Tensor) -> Tensor:
        """Tokens [B T ...] at their rows, zeros in rows after the last one."""
        return Edges.of(self.cu_seqlens, self.T).ended(x) if self.F else x.contiguous()

    def ends(self) -> Tensor | None:
        """cu_seqlens of the rows."""
        return self.cu_seqlens if self.cu_seqlens is None or not self.F else _row_ends(self.cu_seqlens)

    def arguments(self) -> tuple[Tensor | int | None, ...]:
        return None if self.cu_seqlens is None else self.cum, self.cu_seqlens, self.T, self.N, self.NCB


def sizes(
    config: LaunchConfig, kernel: str, dtype: torch.dtype, H: int, HV: int, K: int, V: int, m: int, F: int, halves: bool
) -> Constants:
    """Constants of a kernel: those that its signature does not name are dropped by `arguments`."""
    BM, BR = next_power_of_2(m), next_power_of_2(K - 2 * m) if K > 2 * m else 0
    launch = dict(config.launch[kernel])
    if "HB" in launch:  # heads of a program; those whose gradients it adds up have one key
        launch["HB"] = gcd(HV // H if kernel == "rows_bwd" else HV, launch["HB"])
    if "PAIRS" in launch:  # that turn, of a tile's tokens, in a warp
        launch["num_warps"] = cdiv(BM, launch.pop("PAIRS"))
    return dict(
        H=H, HV=HV, K=K, V=V, M=m, F=F, HALVES=int(halves), ACC=TYPES[accumulator(dtype)], BT=config.launch["shared"]["BT"],
        BM=BM, BR=BR, BV=min(next_power_of_2(V), 64), **launch,
    )  # fmt: skip


def arguments(kernel: triton.JITFunction, constants: Constants) -> Constants:
    """The constants that `kernel` takes, and the compiler's options."""
    return {name: x for name, x in constants.items() if name in kernel.arg_names or name.startswith("num_")}


@triton.jit
def place(p_cum, p_ends, i_c, T, N, NCB, BT: tl.constexpr, F: tl.constexpr):
    """Of tile i_c: its sequence, its first row in it, how many tokens the sequence has, its first token and its first row."""
    n = i_c // NCB
    j = (i_c % NCB) * BT
    length = T
    token = tl.cast(n, tl.int64) * T
    if p_cum is not None:
        n = chain_at(p_cum, N, i_c, 1)
        j = (i_c - tl.load(p_cum + n)) * BT
        token = tl.load(p_ends + n).to(tl.int64)
        length = (tl.load(p_ends + n + 1).to(tl.int64) - token).to(tl.int32)
    return n, j, length, token, token + n * F


@triton.jit
def past_the_last(p_cum, i_c, N):
    """Whether there is no tile i_c: of packed sequences the grid has as many as there may be."""
    past = False
    if p_cum is not None:
        past = i_c >= tl.load(p_cum + N)
    return past


@triton.jit
def tile_of_pairs(HV: tl.constexpr, BT: tl.constexpr, R: tl.constexpr):
    """Of a program that has R of a tile's pairs of a token and a head: the tile, and the first of its pairs."""
    PARTS: tl.constexpr = (BT * HV + R - 1) // R
    return tl.program_id(0) // PARTS, tl.program_id(0) % PARTS * R


@triton.jit
def pairs_of(
    p_cum, p_ends, i_c, r, T, N, NCB, HV: tl.constexpr, BT: tl.constexpr, R: tl.constexpr, F: tl.constexpr
):  # fmt: skip
    """R pairs from r on, which lie one after the other: their sequence and how many tokens it has, the tile's first, the pairs' tokens and heads,
    which pairs are the tile's own, and where their numbers lie among tokens and among rows."""
    n, first, length, token, row = place(p_cum, p_ends, i_c, T, N, NCB, BT, F)
    r += tl.arange(0, R)
    j, i_h = first + r // HV, r % HV
    return n, length, first, j, i_h, r < BT * HV, (token + j) * HV + i_h, (row + j) * HV + i_h


@triton.jit
def powers_of(p_power, p_cum, n, N, i_h, HV: tl.constexpr):
    """a, b and c of a sequence and head, and their inverses; p_power [3 B HV], packed sequences are one row of the batch."""
    i_b, B = n, N
    if p_cum is not None:
        i_b, B = 0, 1
    a, a_inverse = power_of(p_power, i_b * HV + i_h)
    b, b_inverse = power_of(p_power, (B + i_b) * HV + i_h)
    c, c_inverse = power_of(p_power, (2 * B + i_b) * HV + i_h)
    return a, b, c, a_inverse, b_inverse, c_inverse


@triton.jit
def load_pairs(p, o_row, real, K: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, HALVES: tl.constexpr):
    """First and second channels [BT BM] of the pairs that turn, of rows that begin at p + o_row [BT]."""
    if HALVES:
        o = tl.arange(0, BM)
        at, mask = o_row[:, None] + o[None, :], real[:, None] & (o < M)[None, :]
        a = tl.load(p + at, mask=mask, other=0.0)
        b = tl.load(p + at + K // 2, mask=mask, other=0.0)
    else:
        o = tl.arange(0, 2 * BM)
        x = tl.load(p + o_row[:, None] + o[None, :], mask=real[:, None] & (o < 2 * M)[None, :], other=0.0)
        a, b = tl.split(tl.reshape(x, [o_row.shape[0], BM, 2]))
    return a, b


@triton.jit
def store_pairs(p, a, b, o_row, real, K: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, HALVES: tl.constexpr):
    """The inverse of `load_pairs`."""
    a, b = a.to(p.dtype.element_ty), b.to(p.dtype.element_ty)
    if HALVES:
        o = tl.arange(0, BM)
        at, mask = o_row[:, None] + o[None, :], real[:, None] & (o < M)[None, :]
        tl.store(p + at, a, mask=mask)
        tl.store(p + at + K // 2, b, mask=mask)
    else:
        o = tl.arange(0, 2 * BM)
        x = tl.reshape(tl.join(a, b), [o_row.shape[0], 2 * BM])
        tl.store(p + o_row[:, None] + o[None, :], x, mask=real[:, None] & (o < 2 * M)[None, :])


@triton.jit
def rest_channels(K: tl.constexpr, M: tl.constexpr, BR: tl.constexpr, HALVES: tl.constexpr):
    """Channels [BR] that do not turn, and which of them there are."""
    o = tl.arange(0, BR)
    channel = o + 2 * M
    if HALVES:
        channel = tl.where(o < K // 2 - M, o + M, channel)
    return channel, o < K - 2 * M
