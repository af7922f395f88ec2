"""What LUCID-PaTH's solve returns, and what it carries from one call to the next."""

from typing import NamedTuple

from torch import Tensor

from needlework.ops.path.state import PathState


class LucidPathState(NamedTuple):
    """`PathState` with the *solved* values, and the norm that each key came with: a carried key is shorter."""

    k: Tensor  # [N P Hkv K] float32, or float64
    norm: Tensor  # [N P Hkv] float32, or float64
    y: Tensor  # [N P Hkv V]
    w: Tensor  # [N BLOCK Hkv K]
    beta: Tensor  # [N BLOCK Hkv] float32, or float64
    length: Tensor  # [N] int64

    @property
    def read(self) -> PathState:
        """As the attention that reads y has it."""
        return PathState(self.k, self.y, self.w, self.beta, self.length)


class LucidPathOutput(NamedTuple):
    y: Tensor  # [B T Hkv V]
    state: LucidPathState | None
