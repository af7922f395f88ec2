"""Mamba-3's state, fixed in size, and the op's result."""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.common.shapes import behind, behind_both


class Mamba3State(NamedTuple):
    """What a sequence has after its last token: HV (K V + R K + V + m) numbers, float32 or float64.

    S [N HV K V]: the last token's λΔ part is in it. k [N HV R K]: its B̄, turned, bias included. v [N HV V]: its x. angle [N HV m]: its
    Θ, in [−π, π]. All are zeros before the first token. S and k are turned by the angles of their tokens: they and angle go together.
    """

    S: Tensor
    k: Tensor
    v: Tensor
    angle: Tensor

    def widened(self, K: int, V: int) -> "Mamba3State":
        """With zeros behind the numbers of each head."""
        return Mamba3State(behind_both(self.S, K, V), behind(self.k, K), behind(self.v, V), self.angle)

    def narrowed(self, K: int, V: int) -> "Mamba3State":
        """The first numbers of each head."""
        return Mamba3State(self.S[..., :K, :V], self.k[..., :K], self.v[..., :V], self.angle)


class Mamba3Output(NamedTuple):
    """o [B T HV V], or with R rows [B T HV R V], in q's dtype; state [N ...], or None without output_final_state."""

    o: Tensor
    state: Mamba3State | None


def empty_state(
    N: int, HV: int, K: int, V: int, m: int, R: int = 1, *,
    dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
) -> Mamba3State:  # fmt: skip
    """The state of N sequences (or slots) that have seen nothing.

    >>> from needlework.ops.mamba3 import empty_state
    >>> empty_state(N=2, HV=4, K=16, V=32, m=8).S.shape
    torch.Size([2, 4, 16, 32])
    """
    shapes = (K, V), (R, K), (V,), (m,)
    return Mamba3State(*(torch.zeros(N, HV, *shape, dtype=dtype, device=device) for shape in shapes))
