"""CARVE's state, fixed in size, and the op's result."""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.common.shapes import behind, behind_both


class CarveState(NamedTuple):
    """What a sequence carries: it may stop anywhere, inside a content chunk too.

    S [N H K V]: the memory. m [N H V]: mean output of the last whole content chunk. total [N H V]: sum of the outputs of
    the open one. position [N] int64: tokens so far in the open one, 0 <= position < content_chunk.
    """

    S: Tensor
    m: Tensor
    total: Tensor
    position: Tensor

    def widened(self, K: int, V: int) -> "CarveState":
        """With zeros behind the numbers of each head."""
        return CarveState(behind_both(self.S, K, V), behind(self.m, V), behind(self.total, V), self.position)

    def narrowed(self, K: int, V: int) -> "CarveState":
        """The inverse."""
        return CarveState(self.S[..., :K, :V], self.m[..., :V], self.total[..., :V], self.position)


class CarveOutput(NamedTuple):
    """o [B T H V]; state [N ...], or None without output_final_state."""

    o: Tensor
    state: CarveState | None


def empty_state(
    N: int, H: int, K: int, V: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> CarveState:
    """The state of N sequences (or slots) that have seen nothing.

    >>> from needlework.ops.carve import empty_state
    >>> empty_state(N=2, H=4, K=16, V=32).S.shape
    torch.Size([2, 4, 16, 32])
    """
    return CarveState(
        S=torch.zeros(N, H, K, V, dtype=dtype, device=device),
        m=torch.zeros(N, H, V, dtype=dtype, device=device),
        total=torch.zeros(N, H, V, dtype=dtype, device=device),
        position=torch.zeros(N, dtype=torch.int64, device=device),
    )
