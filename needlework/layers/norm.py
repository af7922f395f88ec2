"""Norms over the last axis: eps 1e-6 where nothing else is said, computed in float32 (float64 of float64), rounded to the input's dtype.

`RMSNorm` rounds before it multiplies by the weight. torch.nn.RMSNorm gives the same bits in float32 and float64, but rounds after the
weight in bfloat16, and under autocast returns bfloat16 where this one returns the weight's float32.
"""

import torch
from torch import Tensor, nn

from needlework.ops.linear import Normed, glu, linear, normed_glu, normed_linear
from needlework.ops.linear.arguments import added
from needlework.ops.linear.op import Activation, few
from needlework.ops.unit.reference import rms_rows, unit_rows

EPS = 1e-6


def wide(x: Tensor) -> Tensor:
    """x in at least float32: where norms, gates and write strengths are computed."""
    return x if x.dtype == torch.float64 else x.float()


def l2(x: Tensor) -> Tensor:
    """x / √(Σx² + 1e-6) over the last axis."""
    return unit_rows(x)


def rms(x: Tensor, eps: float = EPS) -> Tensor:
    """x / √(mean x² + eps) over the last axis, without weight."""
    return rms_rows(x, eps)


def published_rms(x: Tensor) -> Tensor:
    """rms with the epsilon of x's own dtype, as ATMA's models were trained: 2^-23 in float32, 2^-7 in bfloat16."""
    return rms(x, torch.finfo(x.dtype).eps)


class RMSNorm(nn.Module):
    """y = x / √(mean x² + eps) ⊙ weight, x and y [.. size]; weight [size] starts at 1.

    y has the wider dtype of x and weight.
    """

    def __init__(self, size: int, eps: float = EPS):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        """Of x + more."""
        return rms(added(x, more), self.eps) * self.weight

    def later(self, x: Tensor, more: Tensor | None) -> "Later":
        """Of x + more, when it is read."""
        return Later(Normed(x, more, self.weight, self.eps))


class Later:
    """The norm of a sum, made when it is read. A product of one row, its first reader, makes both itself. Without gradients.

    whole, tensor: the sum and its norm, [.. D].
    """

    def __init__(self, normed: Normed):
        self._normed = normed
        self._whole: Tensor | None = None
        self._tensor: Tensor | None = None
        self.shape, self.dtype, self.few = normed.x.shape, normed.x.dtype, few(normed.x)

    @property
    def whole(self) -> Tensor:
        if self._whole is None:
            self._whole = self._normed.whole()
        return self._whole

    @property
    def tensor(self) -> Tensor:
        if self._tensor is None:
            self._tensor = self._normed.of(self.whole)
        return self._tensor

    def linear(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x Wᵀ + b of the norm x."""
        if not self.few or self._tensor is not None:
            return linear(self.tensor, weight, bias)
        y, self._whole = normed_linear(self._normed, weight, bias)
        return y

    def glu(
        self, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None, activation: Activation = "silu"
    ) -> Tensor:
        """φ(x Gᵀ + b) ⊙ (x Uᵀ + c) of the norm x."""
        if not self.few or self._tensor is not None:
            return glu(self.tensor, gate, up, gate_bias, up_bias, activation=activation)
        y, self._whole = normed_glu(self._normed, gate, up, gate_bias, up_bias, activation=activation)
        return y


def now(x: "Tensor | Later") -> Tensor:
    """x, made if it was not."""
    return x.tensor if isinstance(x, Later) else x
