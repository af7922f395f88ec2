"""Between what a recurrent layer reads, o [.. HV V], and its last map: a norm, and a gate by the layer's input."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from needlework.fields import Count, Positive
from needlework.layers.config import Config, Width
from needlework.layers.norm import EPS, rms, wide
from needlework.layers.projection import Projection, of_one_row_of_heads, read_by_maps
from needlework.ops.linear.arguments import GATES, GateActivation, NormedHeads


class OutputNorm(nn.Module):
    """Base of the norms: o [.. HV V], the gate's logit [.. HV·V] or None, and its activation -> [.. n HV·V/n], each row normed by itself."""

    def mapped(
        self, m: nn.Module, o: Tensor, gate: Tensor | None, activation: GateActivation, dtype: torch.dtype
    ) -> Tensor:  # fmt: skip
        """m of the result in `dtype`."""
        # rounded by rows, as the norm is: compiled they are one kernel
        return m(read_by_maps(self(o, gate, activation).to(dtype)).flatten(-2))


class NormConfig(Config):
    """Base of the norms' configs: `build(width)` makes the module."""

    def build(self, width: Width) -> OutputNorm:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class HeadNorm(NormConfig):
    """Every head is normed by itself, then gated: o [.. HV V] -> [.. HV V].

        RMSNorm(o) ⊙ gate

    weight: with a weight [V], shared by the heads; RetNet's authors have none.

    >>> from needlework.layers import Delta, HeadNorm, Recurrent
    >>> Recurrent(heads=4, key_dim=16, value_dim=16, write=Delta()).norm == HeadNorm()
    True
    """

    kind = "head_norm"
    weight: bool = True

    def build(self, width: Width) -> OutputNorm:
        return _HeadNorm(width.value_dim, self.weight)


class _HeadNorm(OutputNorm):
    def __init__(self, size: int, weight: bool):
        super().__init__()
        self.register_parameter("weight", nn.Parameter(torch.ones(size)) if weight else None)

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, o: Tensor, gate: Tensor | None, activation: GateActivation) -> Tensor:
        return self.heads(o, gate).made(activation)

    def heads(self, o: Tensor, gate: Tensor | None) -> NormedHeads:
        return NormedHeads(o, self.weight, gate, EPS)

    def mapped(
        self, m: nn.Module, o: Tensor, gate: Tensor | None, activation: GateActivation, dtype: torch.dtype
    ) -> Tensor:  # fmt: skip
        y = of_one_row_of_heads(m, self.heads(o, gate), activation, dtype)
        return super().mapped(m, o, gate, activation, dtype) if y is None else y


@dataclass(frozen=True, kw_only=True)
class GatedNorm(NormConfig):
    """The gate first, then one norm over the value heads of each key head, as Mamba-2 has it: o [.. HV V] -> [.. H HV·V/H].

        RMSNorm(o ⊙ gate) ⊙ weight,    weight [HV·V],    the mean over HV·V/H channels

    eps: of the norm.

    >>> import torch
    >>> from needlework.layers import GatedNorm, Mamba2, Recurrent
    >>> mixer = Recurrent(heads=1, value_heads=8, key_dim=32, value_dim=16, write=Mamba2(), norm=GatedNorm()).build(64)
    >>> mixer.norm.weight.shape, mixer(torch.randn(1, 100, 64))[0].shape
    (torch.Size([128]), torch.Size([1, 100, 64]))
    """

    kind = "gated_norm"
    eps: Positive = 1e-5

    def build(self, width: Width) -> OutputNorm:
        return _GatedNorm(self, width)


class _GatedNorm(OutputNorm):
    def __init__(self, config: GatedNorm, width: Width):
        super().__init__()
        self.eps, self.groups = config.eps, width.heads
        self.weight = nn.Parameter(torch.ones(width.value_heads * width.value_dim))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, o: Tensor, gate: Tensor | None, activation: GateActivation) -> Tensor:
        o = wide(o).flatten(-2)
        o = o if gate is None else o * GATES[activation](gate)
        return rms(o.unflatten(-1, (self.groups, -1)), self.eps) * self.weight.unflatten(-1, (self.groups, -1))


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
    activation: GateActivation = "sigmoid"
    rank: Count | None = None

    def build(self, width: Width) -> nn.Module:
        """x [.. D] -> the logit [.. HV·V]."""
        rank = self.rank or width.value_dim
        return nn.Sequential(Projection(width.dim, rank, bias=False), Projection(rank, width.value_heads * width.value_dim))
