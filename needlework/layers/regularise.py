"""ATMA's regularisers of a block's output x, N tokens of D: its projection on 64 random directions is pushed towards white noise.

    y = x Sᵀ minus its mean over tokens, S [64 D] ~ N(0, 1/D)        a = x A, A [D 64] with columns of unit length

Each is a number per token: twice the tokens of the same kind change it by its estimator's error alone. Norms are Frobenius, not
squared. Float32; S and A are drawn at each call from the device's generator. From the authors' code; the paper's Appendix A names
them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from needlework.layers.config import Config
from needlework.layers.norm import wide

DIRECTIONS = 64


def sketch(x: Tensor) -> Tensor:
    """y [N 64] of x [N D]."""
    D = x.shape[-1]
    S = torch.randn(DIRECTIONS, D, dtype=x.dtype, device=x.device) * D**-0.5
    y = x @ S.T
    return y - y.mean(0)


def whiteness(x: Tensor) -> Tensor:
    """‖yᵀy/(N−1) − I‖."""
    y = sketch(x)
    return (y.T @ y / (len(y) - 1) - torch.eye(DIRECTIONS, dtype=y.dtype, device=y.device)).norm()


class Regulariser(Config):
    """Base: `of(x [N D]) -> number`; calling it takes any leading axes and any precision, also under autocast."""

    def of(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def __call__(self, x: Tensor) -> Tensor:
        """x [.. D], at least two tokens -> the regulariser, float32 (float64 of float64)."""
        x = x.flatten(0, -2)
        if len(x) < 2:
            raise ValueError(f"{self.kind}: a spread over tokens needs at least 2 of them, got {len(x)}")
        with torch.autocast(x.device.type, enabled=False):
            return self.of(wide(x))


@dataclass(frozen=True, kw_only=True)
class Weak(Regulariser):
    """White covariance: x [.. D], N tokens -> one float32.

        ‖yᵀy/(N−1) − I‖,    y [N 64] = x Sᵀ minus its mean over tokens,    S [64 D] ~ N(0, 1/D)

    On white x it is ‖SSᵀ − I‖, about 64/√D, never 0.
    Raises ValueError for fewer than two tokens.

    >>> import torch
    >>> from needlework.layers import Weak
    >>> bool(Weak()(torch.randn(2, 100, 64)) >= 0)
    True
    """

    kind = "weak"

    def of(self, x: Tensor) -> Tensor:
        return whiteness(x)


@dataclass(frozen=True, kw_only=True)
class Discrete(Regulariser):
    """`Weak` of √D x/‖x‖, the directions alone: x [.. D] -> one float32.

    Raises ValueError for fewer than two tokens.

    >>> import torch
    >>> from needlework.layers import Discrete
    >>> bool(Discrete()(torch.randn(2, 100, 64)) >= 0)
    True
    """

    kind = "discrete"

    def of(self, x: Tensor) -> Tensor:
        return whiteness(F.normalize(x, dim=-1) * x.shape[-1] ** 0.5)


@dataclass(frozen=True, kw_only=True)
class Zipfian(Regulariser):
    """White directions, and norms that fall as Zipf's law has it: x [.. D] -> one float32.

        ‖offdiag(uᵀu/(N−1))‖ + ‖ρ/Σρ − (1/rank)/Σ(1/rank)‖,    u_t = y_t/‖y_t‖,    ρ the norms ‖y_t‖ in falling order

    y [N 64] is x on random directions, as in `Weak`.
    Raises ValueError for fewer than two tokens.

    >>> import torch
    >>> from needlework.layers import Zipfian
    >>> bool(Zipfian()(torch.randn(2, 100, 64)) >= 0)
    True
    """

    kind = "zipfian"

    def of(self, x: Tensor) -> Tensor:
        y = sketch(x)
        u = F.normalize(y, dim=-1)
        covariance = u.T @ u / (len(u) - 1)
        norms = y.norm(dim=-1).sort(descending=True).values
        zipf = 1 / torch.arange(1, len(y) + 1, dtype=y.dtype, device=y.device)
        return (covariance - covariance.diag().diag()).norm() + (norms / norms.sum() - zipf / zipf.sum()).norm()


@dataclass(frozen=True, kw_only=True)
class Strong(Regulariser):
    """Each projection is normal: x [.. D] -> one float32.

        ∫ e^{−t²/2} [(mean cos ta − e^{−t²/2})² + (mean sin ta)²] dt, the mean over A's columns,    a = x A,    A [D 64] of unit columns

    The integral is the trapezoid rule on linspace(−5, 5, 17).

    summed: times N, as published, beside a cross entropy that is a sum too.
    Raises ValueError for fewer than two tokens.

    >>> import torch
    >>> from needlework.layers import Strong
    >>> bool(Strong()(torch.randn(2, 100, 64)) >= 0)
    True
    """

    kind = "strong"
    summed: bool = False

    def of(self, x: Tensor) -> Tensor:
        A = F.normalize(torch.randn(x.shape[-1], DIRECTIONS, dtype=x.dtype, device=x.device), dim=0)
        t = torch.linspace(-5, 5, 17, dtype=x.dtype, device=x.device)
        angle = (x @ A)[..., None] * t  # [N 64 17]
        normal = torch.exp(-t.square() / 2)  # the characteristic function of N(0, 1), and the weight
        distance = (angle.cos().mean(0) - normal).square() + angle.sin().mean(0).square()
        loss = torch.trapezoid(normal * distance, t).mean()
        return loss * len(x) if self.summed else loss
