"""Between what a recurrent layer reads, o [.. HV V], and its last map: a gate by the layer's input."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from needlework.fields import Count
from needlework.layers.config import Config, Width

Activation = Literal["silu", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class OutputGate(Config):
    """An output gate through a bottleneck: x [.. D] -> [.. HV·V].

        gate = σ(W₂ W₁ x + b)    (KDA), or silu of it (GDN-2)

    activation: "sigmoid" or "silu".
    rank: of the bottleneck W₁ [r D], W₂ [HV·V r]; None: V.

    >>> import torch
    >>> from needlework.layers import ChannelGate, Delta, OutputGate, Recurrent
    >>> kda = Recurrent(heads=4, key_dim=16, value_dim=16, write=Delta(gate=ChannelGate()), output_gate=OutputGate()).build(64)
    >>> kda(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "output_gate"
    activation: Activation = "sigmoid"
    rank: Count | None = None

    def build(self, width: Width) -> nn.Module:
        """x [.. D] -> the logit [.. HV·V]."""
        rank = self.rank or width.value_dim
        return nn.Sequential(nn.Linear(width.dim, rank, bias=False), nn.Linear(rank, width.value_heads * width.value_dim))


def activated(activation: Activation, x: Tensor) -> Tensor:
    return F.silu(x) if activation == "silu" else torch.sigmoid(x)
