"""Feature maps of q and k before an additive write, and what distils them from softmax attention.

y = W x + b with W = I, b = 0 at the start, one map for q and one for k; φ(y) [2K] > 0. Where φ(q)·φ(k) are the weights, a denominator
makes them sum to 1: a linear state that imitates softmax attention.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from needlework.layers.config import Config, Width
from needlework.layers.norm import wide

LEAST = 1e-12  # of a feature: products of disjoint halves would reach 1e-58 at logits of 50


class FeatureConfig(Config):
    """Base of the feature maps' configs: `build(width)` makes the module: q, k [.. H K] -> φ(q), φ(k) [.. H `channels`]."""

    def build(self, width: Width) -> "FeatureMap":
        raise NotImplementedError


class FeatureMap(nn.Module):
    """Base of the feature maps. channels: of φ, a multiple of K; a channel's gate is shared by φ_c, φ_{K+c}, ….

    The features are above 0 where a write rule normalises by their sum.
    """

    channels: int


@dataclass(frozen=True, kw_only=True)
class Hedgehog(FeatureConfig):
    """Hedgehog (arXiv 2402.04347), a feature map that is trained: q or k [.. H K] -> φ [.. H 2K].

        "halves"    φ = [softmax(y), softmax(−y)]    (the authors' code)         y = W x + b
        "joint"     φ = softmax([2y, −2y])           (flash-linear-attention's)

    They are different functions. Features are at least 1e-12, in float32.

    map: "halves" or "joint".
    heads: "own": W [H K K] a head, without b (the authors'); "shared": one W [K K] and b [K] for all heads.

    >>> import torch
    >>> from needlework.layers import Hedgehog, Linear, Recurrent
    >>> write = Linear(features=Hedgehog(), normalise=True)  # in place of softmax attention
    >>> mixer = Recurrent(heads=4, key_dim=16, value_dim=16, conv=None, write=write).build(64)
    >>> mixer.state_size(1000, torch.bfloat16)  # bytes: 4 heads of [32 17] in float32
    8704
    """

    kind = "hedgehog"
    map: Literal["halves", "joint"] = "halves"
    heads: Literal["own", "shared"] = "own"

    def build(self, width: Width) -> FeatureMap:
        return _Hedgehog(self, width)


class _Hedgehog(FeatureMap):
    def __init__(self, config: Hedgehog, width: Width):
        super().__init__()
        self.joint, self.channels = config.map == "joint", 2 * width.key_dim
        heads = width.heads if config.heads == "own" else None
        self.q, self.k = (_Map(width.key_dim, heads) for _ in range(2))

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self._features(self.q(q)), self._features(self.k(k))

    def _features(self, y: Tensor) -> Tensor:
        w = wide(y)
        if self.joint:
            phi = torch.cat([2 * w, -2 * w], -1).softmax(-1)
        else:
            phi = torch.cat([w.softmax(-1), (-w).softmax(-1)], -1)
        return phi.clamp(min=LEAST).to(y.dtype)


class _Map(nn.Module):
    """y = W x + b, the identity at the start: W of each head, or one with b for all."""

    def __init__(self, size: int, heads: int | None):
        super().__init__()
        shape = (size, size) if heads is None else (heads, size, size)
        self.weight = nn.Parameter(torch.empty(shape))
        self.register_parameter("bias", nn.Parameter(torch.empty(size)) if heads is None else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.eye(self.weight.shape[-1]))
            if self.bias is not None:
                self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            return nn.functional.linear(x, self.weight, self.bias)
        return torch.einsum("...hk,hjk->...hj", x, self.weight)


def distillation(features: FeatureMap, q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """How far the weights of a feature map are from those of softmax attention, both causal: a number.

        mean over sequences, heads and rows i of −Σ_j p_ij ln a_ij,    p_i = softmax_j(scale · q_i·k_j),
        a_ij = a'_ij / Σ_m a'_im,    a'_ij = φ(q_i)·φ(k_j)

    q, k [B T H K]: of a trained softmax layer, frozen: p has no gradient. scale: of the scores; None: K^-1/2. Computed in float32
    (float64 of float64). It holds T² numbers a head, so it is for sequences of a few thousand tokens.

    The gradient, with a' as above: dφ(q_i) = Σ_j (1/Σ_m a'_im − p_ij/a'_ij) φ(k_j) / (B H T), and so for φ(k_j).

    >>> import torch
    >>> from needlework.layers import Hedgehog, distillation
    >>> from needlework.layers.config import Width
    >>> features = Hedgehog().build(Width(dim=64, heads=4, value_heads=4, key_dim=16, value_dim=16))
    >>> loss = distillation(features, torch.randn(2, 100, 4, 16), torch.randn(2, 100, 4, 16))
    >>> loss.backward()
    >>> features.q.weight.grad.shape
    torch.Size([4, 16, 16])
    """
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with torch.no_grad():
        scores = scale * torch.einsum("bihk,bjhk->bhij", wide(q), wide(k))
        p = scores.masked_fill(future, -torch.inf).softmax(-1)
    a = torch.einsum("bihc,bjhc->bhij", *map(wide, features(q, k)))
    a = a.masked_fill(future, 0)
    logs = torch.where(future, 0, a.masked_fill(future, 1).log() - a.sum(-1, keepdim=True).log())
    return -(p * logs).sum(-1).mean()
