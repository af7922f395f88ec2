"""What the maps of few rows are given together: their weights, and a row that is still to be normed."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from needlework.ops.common.shapes import width
from needlework.ops.unit.reference import rms_rows


class Maps(NamedTuple):
    """x Wᵀ + b, and where there is `up` what that gates: x Uᵀ + c. weight, up [N D]; bias, up_bias [N]."""

    weight: Tensor
    bias: Tensor | None = None
    up: Tensor | None = None
    up_bias: Tensor | None = None


def added(x: Tensor, more: Tensor | None) -> Tensor:
    """x + more, made in float32 and rounded, as halves are added. Written so, a compiler does not make it part of the product that gave
    `more`, which would copy x first."""
    return x if more is None else (x.to(width(x)) + more).to(x.dtype)


class Normed(NamedTuple):
    """A row as a product may take it: x + more, normed. RMSNorm(x + more) ⊙ norm, x and more [.. D], norm [D]; more None: of x."""

    x: Tensor
    more: Tensor | None
    norm: Tensor
    eps: float

    def whole(self) -> Tensor:
        return added(self.x, self.more)

    def of(self, whole: Tensor) -> Tensor:
        """The norm of the sum, rounded before it meets its weight."""
        return rms_rows(whole, self.eps) * self.norm


GateActivation = Literal["silu", "sigmoid"]
GATES: dict[GateActivation, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


class NormedHeads(NamedTuple):
    """Heads as a product may take them: RMSNorm(x) ⊙ norm ⊙ φ(gate), each head of x [.. H V] by itself, norm [V], gate [.. H·V]; None:
    not."""

    x: Tensor
    norm: Tensor | None
    gate: Tensor | None
    eps: float

    def made(self, activation: GateActivation) -> Tensor:
        """[.. H V], rounded after each factor."""
        normed = rms_rows(self.x, self.eps)
        normed = normed if self.norm is None else normed * self.norm
        # by heads, as the norm is: compiled they are one kernel
        gate = None if self.gate is None else GATES[activation](self.gate).unflatten(-1, self.x.shape[-2:])
        return normed if gate is None else normed * gate
