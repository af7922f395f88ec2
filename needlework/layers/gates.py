"""Decay gates: x [B T D] -> log decay g, natural log, <= 0, in float32. A write rule holds one, or none.

A half-life of h tokens is g = −ln 2 / h. Gates that take `half_life` start there, all alike or spread in log over a range; without it
they start as published.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from needlework.fields import Count, Positive
from needlework.layers.config import Config, Width
from needlework.layers.norm import wide
from needlework.layers.projection import Projection
from needlework.ops.common.decay import retention


def inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


def half_lives(low: float, high: float, *shape: int) -> Tensor:
    """Half-lives spaced evenly in log over the last axis: the quantiles of log U(low, high)."""
    quantile = (torch.arange(shape[-1]) + 0.5) / shape[-1]
    return (math.log(low) + (math.log(high) - math.log(low)) * quantile).exp().expand(*shape)


@torch.no_grad()
def start_steps(dt_bias: Tensor) -> None:
    """The published start of Mamba's steps, softplus(dt_bias) log-uniform in [1e-3, 1e-1], which gated delta rules took over."""
    dt_bias.uniform_(math.log(1e-3), math.log(1e-1)).exp_()
    dt_bias.copy_(inverse_softplus(dt_bias))


HalfLife = (
    Positive | tuple[Positive, Positive] | None
)  # where a gate starts: one for all, spread over (low, high), as published


def started(half_life: float | tuple[float, float], *shape: int) -> Tensor:
    """The half-lives at which gates of `shape` start: all alike, or `half_lives` over the range."""
    low, high = half_life if isinstance(half_life, tuple) else (half_life, half_life)
    return half_lives(low, high, *shape)


class GateConfig(Config):
    """Base of the gates' configs: `build(width)` makes the module, x [B T D] -> g [B T HV] or [B T HV K], float32."""

    def build(self, width: Width) -> nn.Module:
        """x [B T D] -> g [B T HV] or [B T HV K]."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ScalarGate(GateConfig):
    """One decay a head (Gated DeltaNet, Q-Delta): x [B T D] -> g [B T HV].

        g = −e^{A_log} softplus(W_a x + dt_bias)

    half_life: where every head starts, in tokens, or the range over which the heads' starts are spread in log; None: Gated DeltaNet's
        published start, a median of 11 tokens.

    >>> import torch
    >>> from needlework.layers import Delta, Recurrent, ScalarGate
    >>> mixer = Recurrent(heads=4, key_dim=16, value_dim=16, write=Delta(gate=ScalarGate(half_life=64.0))).build(64)
    >>> mixer(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "scalar_gate"
    half_life: HalfLife = None

    def build(self, width: Width) -> nn.Module:
        return _SoftplusGate(self, Projection(width.dim, width.value_heads, bias=width.bias), width.value_heads)


@dataclass(frozen=True, kw_only=True)
class ChannelGate(GateConfig):
    """One decay a key channel (KDA): x [B T D] -> g [B T HV K].

        g = −e^{A_log} softplus(W₂ W₁ x + dt_bias),    A_log a head

    rank: of the bottleneck W₁ [r D], W₂ [HV·K r]; None: V.
    half_life: where every channel starts, in tokens, or the range over which a head's channels' starts are spread in log; None: KDA's
        and GDN-2's published start, a median of 10 tokens.

    >>> import torch
    >>> from needlework.layers import Delta, Recurrent, ChannelGate
    >>> mixer = Recurrent(heads=4, key_dim=16, value_dim=16, write=Delta(gate=ChannelGate())).build(64)
    >>> mixer(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "channel_gate"
    rank: Count | None = None
    half_life: HalfLife = None

    def build(self, width: Width) -> nn.Module:
        rank = self.rank or width.value_dim
        project = nn.Sequential(
            Projection(width.dim, rank, bias=False), Projection(rank, width.value_heads * width.key_dim, bias=False)
        )
        return _SoftplusGate(self, project, width.value_heads, width.key_dim)


class _SoftplusGate(nn.Module):
    def __init__(self, config: ScalarGate | ChannelGate, project: nn.Module, *shape: int):
        super().__init__()
        self.config, self.shape = config, shape  # (HV,) or (HV, K)
        self.project = project
        self.A_log = nn.Parameter(torch.empty(shape[0]))
        self.dt_bias = nn.Parameter(torch.empty(math.prod(shape)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            if self.config.half_life is None:  # as published: Gated DeltaNet begins at 0, KDA and GDN-2 at 1
                self.A_log.uniform_(len(self.shape) - 1, 16).clamp_(min=1e-4).log_()
                start_steps(self.dt_bias)
            else:
                self.A_log.zero_()
                h = started(self.config.half_life, *self.shape).flatten()
                self.dt_bias.copy_(inverse_softplus(math.log(2) / h))

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.project(x))

    def of(self, logit: Tensor) -> Tensor:
        g = F.softplus(wide(logit) + self.dt_bias).unflatten(-1, self.shape)  # [B T HV] or [B T HV K]
        return -g * self.A_log.exp().view(-1, *[1] * (len(self.shape) - 1))


@dataclass(frozen=True, kw_only=True)
class LowRankGate(GateConfig):
    """One decay a key channel, as GLA has it: x [B T D] -> g [B T HV K].

        g = logsigmoid(W₂ W₁ x + b) / temperature

    rank: of the bottleneck W₁ [r D], W₂ [HV·K r].
    temperature: what divides the log decay; 16 makes a half-life of 16 tokens at a logit of 0.

    >>> import torch
    >>> from needlework.layers import Delta, Recurrent, LowRankGate
    >>> mixer = Recurrent(heads=4, key_dim=16, value_dim=16, write=Delta(gate=LowRankGate())).build(64)
    >>> mixer(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "low_rank_gate"
    rank: Count = 16
    temperature: Positive = 16.0

    def build(self, width: Width) -> nn.Module:
        return _LowRankGate(self, width)


class _LowRankGate(nn.Module):
    def __init__(self, config: LowRankGate, width: Width):
        super().__init__()
        self.config, self.width = config, width
        self.project = nn.Sequential(
            Projection(width.dim, config.rank, bias=False), Projection(config.rank, width.value_heads * width.key_dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.project(x))

    def of(self, logit: Tensor) -> Tensor:
        return F.logsigmoid(wide(logit).unflatten(-1, (self.width.value_heads, -1))) / self.config.temperature


@dataclass(frozen=True, kw_only=True)
class RetentionGate(GateConfig):
    """One decay a head, as ATMA's memory has it: x [B T D] -> g [B T HV].

        g = min( logsigmoid(W_γ x + offset), −ln 2/bound )

    offset: 3.9 makes a half-life of 35 tokens at a logit of 0.
    half_life: where every head starts instead, in tokens, or the range over which the heads' starts are spread in log.
    bound: the longest half-life that a head may take, in tokens: one for all heads, or a tuple with one a head, None where it is free.
        It is no parameter: a trained model takes another bound in its config.
    Raises ValueError where the layer is built with a tuple of another length than its heads.

    >>> import torch
    >>> from needlework.layers import Delta, Recurrent, RetentionGate
    >>> mixer = Recurrent(heads=4, key_dim=16, value_dim=16, write=Delta(gate=RetentionGate(bound=128.0))).build(64)
    >>> mixer(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "retention_gate"
    offset: float = 3.9
    half_life: HalfLife = None
    bound: Positive | tuple[Positive | None, ...] | None = None

    def build(self, width: Width) -> nn.Module:
        return _RetentionGate(self, width)


class _RetentionGate(nn.Module):
    def __init__(self, config: RetentionGate, width: Width):
        super().__init__()
        bounds = config.bound if isinstance(config.bound, tuple) else (config.bound,)
        if len(bounds) not in (1, width.value_heads):
            raise ValueError(
                f"retention_gate: bound has {len(bounds)} half-lives, expected 1 or one a head = {width.value_heads}"
            )
        self.config = config
        if config.half_life is not None:
            self.register_buffer("offset", torch.empty(width.value_heads), persistent=False)
            self.reset_parameters()
        self.limits = [None if h is None else -math.log(2) / h for h in bounds]
        self.project = Projection(width.dim, width.value_heads, bias=width.bias)

    def reset_parameters(self) -> None:
        if self.config.half_life is not None:
            h = started(self.config.half_life, *self.offset.shape)
            self.offset.copy_(-torch.expm1(math.log(2) / h).log())  # σ(offset) = 2^{−1/h}

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.project(x))

    def of(self, logit: Tensor) -> Tensor:
        g = F.logsigmoid(wide(logit) + (self.config.offset if self.config.half_life is None else self.offset))
        if len(self.limits) == 1:
            return _below(g, self.limits[0])
        return torch.stack([_below(g_h, limit) for g_h, limit in zip(g.unbind(-1), self.limits, strict=True)], -1)


def _below(g: Tensor, limit: float | None) -> Tensor:
    return g if limit is None else g.clamp(max=limit)


@dataclass(frozen=True, kw_only=True)
class FixedGate(GateConfig):
    """RetNet's decay, one a head h = 0, 1, …, without parameters: x [B T D] -> g [B T HV].

        g_h = log(1 − 2^{−5−h})

    >>> import torch
    >>> from needlework.layers import Delta, Recurrent, FixedGate
    >>> mixer = Recurrent(heads=4, key_dim=16, value_dim=16, write=Delta(gate=FixedGate())).build(64)
    >>> mixer(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "fixed_gate"

    def build(self, width: Width) -> nn.Module:
        return _FixedGate(width)


class _FixedGate(nn.Module):
    def __init__(self, width: Width):
        super().__init__()
        self.heads = width.value_heads

    def forward(self, x: Tensor) -> Tensor:
        return retention(self.heads, x).expand(*x.shape[:-1], self.heads)
