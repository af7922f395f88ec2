"""Sequences as runs of whole chunks: what kernels walk, for a batch and for packed sequences alike.

Packed sequences are moved apart so that each starts at a multiple of the chunk; the gaps are zeros, which write nothing and,
with g = 0, decay nothing. Sizes are bounds that the host knows: the values of cu_seqlens are never read back.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.common.kernels.moves import moved, places
from needlework.ops.common.remembered import known, remember, remembered, standing
from needlework.ops.runtime.each import Ts, each
from needlework.ops.runtime.precompile import precompiling


class Alignment(NamedTuple):
    """cum [N+1] int32: sequence n is chunks cum[n] … cum[n+1) − 1; chunk c of batch row b has number b·⌈T/C⌉ + c."""

    cum: Tensor
    N: int
    T: int  # aligned tokens of a batch row
    longest: int  # chunks of a sequence at most
    maps: Tensor | None  # [T + given] int32: the token of each row, then the row of each token, −1: none; None: nothing moved

    @property
    def spans(self) -> Tensor:
        """[N 2] int32: the first chunk of each sequence, and the one after its last."""
        return _spans(self.cum)

    @staticmethod
    def sizes(cu_seqlens: Tensor | None, B: int, T: int, C: int) -> tuple[int, int]:
        """N, and T of the aligned rows: what a result's shape takes of `of`."""
        if cu_seqlens is None:
            return B, T
        N = len(cu_seqlens) - 1
        return N, (T // C + N) * C

    @classmethod
    def of(cls, cu_seqlens: Tensor | None, B: int, T: int, C: int, device: torch.device) -> "Alignment":
        chunks = -(-T // C)
        if cu_seqlens is None:
            return cls(_even(device, B, chunks), B, T, chunks, None)
        N, aligned = cls.sizes(cu_seqlens, B, T, C)
        cu_seqlens = cu_seqlens.to(device)
        # what is noted for a compilation has not run: nothing to keep
        cum, maps = (places if precompiling() else _places)(cu_seqlens, T, aligned, C)
        if known(cu_seqlens):
            remember(cum)
        return cls(cum, N, aligned, chunks, maps)

    def align(self, *tensors: *Ts) -> tuple[*Ts]:
        """Each [1 T ...] -> [1 aligned ...], zeros in the gaps; a batch as it is, contiguous. What is no tensor stays."""
        return each(Tensor.contiguous, *tensors) if self.maps is None else moved(self.maps[: self.T], *tensors)

    def restore(self, *tensors: *Ts) -> tuple[*Ts]:
        """The inverse of `align`, contiguous; zeros for tokens of no sequence."""
        return each(Tensor.contiguous, *tensors) if self.maps is None else moved(self.maps[self.T :], *tensors)


_places = remembered(places)


@remembered
def _spans(cum: Tensor) -> Tensor:
    return torch.stack((cum[:-1], cum[1:]), 1)


@standing
def _even(device: torch.device, B: int, chunks: int) -> Tensor:
    """[B+1] int32, multiples of chunks."""
    return torch.arange(B + 1, dtype=torch.int32, device=device) * chunks
