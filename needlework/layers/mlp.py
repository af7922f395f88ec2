"""Channel mixers: SwiGLU and ATMA's gated squared ReLU."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from needlework.fields import Count
from needlework.layers.config import Config
from needlework.layers.norm import Later
from needlework.layers.projection import OutProjection, Projection, gated, glu_of, mapped, one_row, plain


@dataclass(frozen=True, kw_only=True)
class SwiGLU(Config):
    """x [.. D] -> y [.. D].

        y = W_down( silu(W_gate x) ⊙ W_up x )

    hidden: the width of W_gate x and W_up x.
    bias: in every projection.

    >>> import torch
    >>> from needlework.layers import SwiGLU
    >>> SwiGLU(hidden=128).build(64)(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])
    """

    kind = "swiglu"
    hidden: Count
    bias: bool = False

    def build(self, dim: int) -> nn.Module:
        return _SwiGLU(self, dim)


class _SwiGLU(nn.Module):
    def __init__(self, config: SwiGLU, dim: int):
        super().__init__()
        self.gate_proj = Projection(dim, config.hidden, bias=config.bias)
        self.up_proj = Projection(dim, config.hidden, bias=config.bias)
        self.down_proj = OutProjection(config.hidden, dim, bias=config.bias)

    def forward(self, x: Tensor | Later) -> Tensor:
        return self.down_proj(gated(x, self.gate_proj, self.up_proj))


@dataclass(frozen=True, kw_only=True)
class SquaredReLU(Config):
    """ATMA's channel mixer: x [.. D] -> y [.. D].

        (a, b) = W_fc x,    y = W_proj( b ⊙ relu(a)² )

    hidden: the width of a and b.
    bias: in both projections.

    >>> import torch
    >>> from needlework.layers import SquaredReLU
    >>> SquaredReLU(hidden=128).build(64)(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])
    """

    kind = "squared_relu"
    hidden: Count
    bias: bool = True

    def build(self, dim: int) -> nn.Module:
        return _SquaredReLU(self, dim)


class _SquaredReLU(nn.Module):
    def __init__(self, config: SquaredReLU, dim: int):
        super().__init__()
        self.fc = Projection(dim, 2 * config.hidden, bias=config.bias)
        self.proj = OutProjection(config.hidden, dim, bias=config.bias)

    def forward(self, x: Tensor | Later) -> Tensor:
        if one_row(x) and plain(self.fc):
            (a, b), bias = self.fc.weight.chunk(2), (None, None) if self.fc.bias is None else self.fc.bias.chunk(2)
            return self.proj(glu_of(x, (a, bias[0]), (b, bias[1]), "relu2"))
        a, b = mapped(x, self.fc).chunk(2, -1)
        return self.proj(b * F.relu(a).square())
