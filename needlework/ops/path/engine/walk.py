"""A call of PaTH's kernels as every launch of it sees it: sizes, launch config, and sequences as runs of whole blocks."""

from itertools import pairwise
from math import e, gcd, log2
from typing import NamedTuple

import torch
from torch import Tensor
from triton import JITFunction

from needlework.ops.common.alignment import Alignment
from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.path.arguments import PathInputs
from needlework.ops.path.state import BLOCK
from needlework.ops.runtime.launch_configs import Constants, LaunchConfig, interpreted, launch_config
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import TYPES, accumulator, cdiv, next_power_of_2, one_layout

ENGINE = "path/engine"
LOG2E = log2(e)


class Walk(NamedTuple):
    """What every launch is given: sizes, the config, and the sequences as runs of whole blocks."""

    config: LaunchConfig
    dtype: torch.dtype
    B: int
    T: int
    H: int
    HK: int
    K: int
    V: int
    window: int | None
    scale: float
    align: Alignment
    soft: bool = True  # weights are a softmax's; else the solve's exponentials, of queries that are keys
    pages: bool = False  # the sequences go on from pages
    decay: bool = False  # a forget gate is added to the scores
    typical: int = 1  # blocks of the sequence that a query is in, on average over queries

    @classmethod
    def of(cls, x: PathInputs, cu_seqlens: Tensor | None, window: int | None, scale: float) -> "Walk":
        """Of a call's tokens, before they are aligned. Raises ValueError for cu_seqlens that do not fit."""
        (B, T, H, K), (HK, V) = x.q.shape, x.v.shape[2:]
        chosen = launch_config(ENGINE, x.q.device, x.q.dtype, K, V)
        C = chosen.launch["shared"]["C"]
        ends = None if cu_seqlens is None else check_cu_seqlens(cu_seqlens, B, T)
        align = Alignment.of(cu_seqlens, B, T, C, x.q.device)
        typical = align.longest
        if ends is not None:
            # as they have been read: the alignment's bound is one sequence of all tokens
            blocks = [cdiv(b - a, C) for a, b in pairwise(ends)]
            align = align._replace(longest=max(blocks))
            typical = sum(n * n for n in blocks) // max(sum(blocks), 1)
        return cls(
            chosen, x.q.dtype, B, align.T, H, HK, K, V, window, scale, align, decay=x.decay is not None, typical=max(typical, 1)
        )

    @property
    def C(self) -> int:
        return self.config.launch["shared"]["C"]

    @property
    def M(self) -> int:
        """Blocks of a superblock. A query of a sequence of n blocks passes n / 2M superblocks and M / 2 blocks of its own: fewest where
        M² = n, so that M is the largest power of two whose square is at most 4n / 3. The config's, at least, and where it is part of what
        is kept: of pages and of the solve."""
        least = self.config.launch["shared"]["M"]
        if self.pages or not self.soft:
            return least
        return max(least, 1 << ((self.typical * 4 // 3).bit_length() - 1) // 2)

    @property
    def blocks(self) -> int:
        return cdiv(self.T, self.C)

    @property
    def rows(self) -> int:
        return self.blocks * self.C

    @property
    def packed(self) -> bool:
        return self.align.maps is not None

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of tiles of keys and of values."""
        return one_layout(self.K, self.dtype), one_layout(self.V, self.dtype)

    def launch(self, kernel: JITFunction, grid: tuple[int, ...], *arguments: object, **flags: int) -> None:
        run(kernel, grid, *arguments, **self.constants(kernel), **flags)

    def constants(self, kernel: JITFunction) -> Constants:
        return constants(
            self.config, kernel, self.dtype, self.H, self.HK, self.K, self.V, self.scale, self.packed, self.window is not None,
            self.soft, self.pages, self.decay,
        )  # fmt: skip

    def programs(self, kernel: JITFunction) -> int:
        """Of a kernel whose heads share one, for each block of queries."""
        return self.B * self.H // heads(self.config.launch[kernel.__name__]["HB"], self.H, self.HK, self.decay or self.pages)

    def number(self, like: Tensor, *sizes: int, zeros: bool = False) -> Tensor:
        """In the sums' dtype."""
        make = like.new_zeros if zeros else like.new_empty
        return make(*sizes, dtype=accumulator(self.dtype))


def heads(most: int, H: int, HK: int, alone: bool) -> int:
    """That share a program: of one group. One alone where each has gates of its own, and where pages follow, whose tiles take
    the shared memory that a second head's would."""
    return 1 if alone else gcd(most, H // HK)


def constants(
    config: LaunchConfig, kernel: JITFunction, dtype: torch.dtype, H: int, HK: int, K: int, V: int, scale: float, packed: bool,
    window: bool, soft: bool = True, pages: bool = False, decay: bool = False,
) -> Constants:  # fmt: skip
    """All that a kernel is compiled for; what it does not take is left out."""
    shared = config.launch["shared"]
    KB, VB = one_layout(K, dtype), one_layout(V, dtype)
    known = dict(
        H=H, HK=HK, K=K, V=V, KB=KB, VB=VB, RB=min(KB, 64), C=shared["C"], M=shared["M"], BLOCK=BLOCK,
        SCALE=scale * LOG2E, RATE=scale if soft else -scale, SOFT=int(soft), PAGES=int(pages), PACKED=int(packed), WINDOW=int(window),
        DECAY=int(decay), GB=next_power_of_2(H // HK),
        APART=int(dtype.itemsize == 2 and not interpreted()), ACC=TYPES[accumulator(dtype)], ST=TYPES[dtype],
    )  # fmt: skip
    own = {name: x for name, x in config.launch[kernel.__name__].items() if name != "NP"}  # programs are the host's
    if "HB" in own:  # warps are of HB heads
        have = heads(own["HB"], H, HK, decay or pages)
        own |= {"HB": have, "num_warps": own["num_warps"] * have // own["HB"]}
    # constants are what has an annotation: of most kernels M is a number of the call
    return {name: x for name, x in known.items() if name in kernel.fn.__annotations__} | own
