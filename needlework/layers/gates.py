"""Decay gates: x [B T D] -> log decay g, natural log, <= 0, in float32. A write rule holds one, or none.

A half-life of h tokens is g = −ln 2 / h. Gates that take `half_life` start there; without it they start as published.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from needlework.fields import Count, Positive
from needlework.layers.config import Config, Width
from needlework.layers.norm import wide
from needlework.ops.common.decay import retention


def inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


def half_lives(low: float, high: float, *shape: int) -> Tensor:
    """Half-lives spaced evenly in log over the last axis: the quantiles of log U(low, high)."""
    quantile = (torch.arange(shape[-1]) + 0.5) / shape[-1]
    return (math.log(low) + (math.log(high) - math.log(low)) * quantile).exp().expand(*shape)


class GateConfig(Config):
    """Base of the gates' configs."""


@dataclass(frozen=True, kw_only=True)
class ScalarGate(GateConfig):
    """g = −e^{A_log} softplus(W_a x + dt_bias), one a head (Gated DeltaNet, Q-Delta)."""

    kind = "scalar_gate"
    half_life: Positive | None = None

    def build(self, width: Width) -> nn.Module:
        return _SoftplusGate(self, nn.Linear(width.dim, width.value_heads, bias=width.bias), width.value_heads)


@dataclass(frozen=True, kw_only=True)
class ChannelGate(GateConfig):
    """g = −e^{A_log} softplus(W₂ W₁ x + dt_bias), one a key channel through a bottleneck of `rank` (KDA); rank None: V."""

    kind = "channel_gate"
    rank: Count | None = None
    half_life: Positive | None = None

    def build(self, width: Width) -> nn.Module:
        rank = self.rank or width.value_dim
        project = nn.Sequential(
            nn.Linear(width.dim, rank, bias=False), nn.Linear(rank, width.value_heads * width.key_dim, bias=False)
        )
        return _SoftplusGate(self, project, width.value_heads, width.key_dim)


class _SoftplusGate(nn.Module):
    def __init__(self, config: Config, project: nn.Module, *shape: int):
        super().__init__()
        self.config, self.shape = config, shape  # (HV,) or (HV, K)
        self.project = project
        self.A_log = nn.Parameter(torch.empty(shape[0]))
        self.dt_bias = nn.Parameter(torch.empty(math.prod(shape)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            if self.config.half_life is None:  # Gated DeltaNet's published start: a median half-life of 11 tokens
                self.A_log.uniform_(0, 16).clamp_(min=1e-4).log_()
                self.dt_bias.uniform_(math.log(1e-3), math.log(1e-1)).exp_()
            else:
                self.A_log.zero_()
                self.dt_bias.fill_(math.log(2) / self.config.half_life)
            self.dt_bias.copy_(inverse_softplus(self.dt_bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.project(x))

    def of(self, logit: Tensor) -> Tensor:
        g = F.softplus(wide(logit) + self.dt_bias).unflatten(-1, self.shape)  # [B T HV] or [B T HV K]
        return -g * self.A_log.exp().view(-1, *[1] * (len(self.shape) - 1))


@dataclass(frozen=True, kw_only=True)
class LowRankGate(GateConfig):
    """g = logsigmoid(W₂ W₁ x + b) / temperature, one a key channel (GLA: rank 16, temperature 16)."""

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
            nn.Linear(width.dim, config.rank, bias=False), nn.Linear(config.rank, width.value_heads * width.key_dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.project(x))

    def of(self, logit: Tensor) -> Tensor:
        return F.logsigmoid(wide(logit).unflatten(-1, (self.width.value_heads, -1))) / self.config.temperature


@dataclass(frozen=True, kw_only=True)
class RetentionGate(GateConfig):
    """g = logsigmoid(W_γ x + offset), one a head (ATMA's memory: offset 3.9, a half-life of 35 tokens).

    bound: the longest half-life a head may take, in tokens: g ← min(g, −ln 2/bound). One for all heads, or a tuple with one a head,
    None where it is free. No parameter: a trained model takes another bound in its config.
    """

    kind = "retention_gate"
    offset: float = 3.9
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
        self.offset = config.offset
        self.limits = [None if h is None else -math.log(2) / h for h in bounds]
        self.project = nn.Linear(width.dim, width.value_heads, bias=width.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.project(x))

    def of(self, logit: Tensor) -> Tensor:
        g = F.logsigmoid(wide(logit) + self.offset)
        if len(self.limits) == 1:
            return _below(g, self.limits[0])
        return torch.stack([_below(g_h, limit) for g_h, limit in zip(g.unbind(-1), self.limits, strict=True)], -1)


def _below(g: Tensor, limit: float | None) -> Tensor:
    return g if limit is None else g.clamp(max=limit)


@dataclass(frozen=True, kw_only=True)
class FixedGate(GateConfig):
    """g_h = log(1 − 2^{−5−h}), no input (RetNet)."""

    kind = "fixed_gate"

    def build(self, width: Width) -> nn.Module:
        return _FixedGate(width)


class _FixedGate(nn.Module):
    def __init__(self, width: Width):
        super().__init__()
        self.heads = width.value_heads

    def forward(self, x: Tensor) -> Tensor:
        return retention(self.heads, x).expand(*x.shape[:2], self.heads)
