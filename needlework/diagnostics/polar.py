"""Polar attention (arXiv 2606.25156): how many keys share a query's weight, and how much of it the null sink has."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from .listen import heard, layers


class PolarLayer(NamedTuple):
    """Means over queries and heads. n_eff: 1/Σŵ², ŵ the weights of the real keys among themselves. null_mass: the sink's weight."""

    n_eff: float
    null_mass: float


def polar(model: nn.Module, input_ids: Tensor) -> list[PolarLayer]:
    """One entry for each Polar layer, from input_ids [B T]; the weights of T² pairs a head are made: keep T near 1,000.

    Windows are not looked at: T at most the window.
    """
    return [_layer(**values) for values in layers(heard(model, input_ids, "polar"))]


def _layer(q: Tensor, k: Tensor, alpha: Tensor, gamma: Tensor, null_base: Tensor) -> PolarLayer:
    real, mass = weights(q, k, alpha, gamma, null_base)
    return PolarLayer((1 / real.square().sum(-1)).mean().item(), mass.mean().item())


def weights(
    q: Tensor, k: Tensor, alpha: Tensor, gamma: Tensor, null_base: Tensor, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """ŵ [B Hq T T], of the real keys among themselves, and the sink's weight [B Hq T].

    q [B T Hq d], k [B T Hkv d]; alpha, gamma, null_base [Hq].
    """
    T, d = q.shape[1], q.shape[-1]
    n = torch.arange(1, T + 1, device=q.device, dtype=q.dtype).clamp(max=window or T)
    temp = 1 + softplus(alpha)[:, None] * n.log()  # [Hq T]
    null = null_base[:, None] + softplus(gamma)[:, None] * (n + 1).log().sqrt()
    q, k = q.transpose(1, 2), k.transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], 1)
    scores = temp[..., None] * (q @ k.mT) / math.sqrt(d)
    hidden = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    if window is not None:
        hidden = hidden | torch.ones_like(hidden).tril(-window)
    scores = scores.masked_fill(hidden, -math.inf)
    sink = (temp * null).expand(scores.shape[:-1])
    return scores.softmax(-1), torch.sigmoid(sink - scores.logsumexp(-1))
