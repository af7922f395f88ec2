"""RWKV-7's write rule: a decay a channel, and an erase along one direction that is written back along another."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from needlework.fields import Count
from needlework.layers.config import Width
from needlework.layers.norm import Later, l2, wide
from needlework.layers.projection import Map, Projection, side_by_side
from needlework.layers.subtokens import SubTokens, later
from needlework.layers.write import WriteConfig, WriteRule

DEEPEST = math.exp(-0.5)  # of a token's log decay


@dataclass(frozen=True, kw_only=True)
class Rwkv7(WriteConfig):
    """RWKV-7's rule (arXiv 2503.14456): what the state holds along κ̂ is taken out along a ⊙ κ̂, and v is written under a key of its own.

        S_t = Diag(e^g) S_{t-1} − (a ⊙ κ̂) (S_{t-1}ᵀ κ̂)ᵀ + k̃ vᵀ,    o = Sᵀ q,    S [K V] a head, float32
        g = −e^{−1/2} σ(w₀ + W₂ tanh(W₁ x)),    a = σ(a₀ + A₂ A₁ x),    κ̂ = ξ ⊙ k / ‖ξ ⊙ k‖,    k̃ = k ⊙ (1 + (a − 1) ⊙ α)

    The write rule alone: RWKV-7's token shift, its value residual across layers and its bonus of the own token are not here.

    rank: of W₁ [r D], W₂ [H·K r] and of A₁, A₂; None: K.
    Raises ValueError where the layer is built with value_heads other than heads.

    >>> import torch
    >>> from needlework.layers import Recurrent, Rwkv7
    >>> Recurrent(heads=4, key_dim=16, value_dim=16, write=Rwkv7(), conv=None).build(64)(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "rwkv7"
    unit_keys = False
    rank: Count | None = None

    def build(self, width: Width) -> WriteRule:
        if width.value_heads != width.heads:
            raise ValueError(
                f"rwkv7: value_heads is {width.value_heads}, expected heads = {width.heads}: no values are grouped"
            )
        return _Rwkv7(self, width)


class _Rwkv7(SubTokens[Rwkv7]):
    """Two rows a token: (a ⊙ κ̂, 0) erases along κ̂ after the decay's state was read, (k̃, v) is added."""

    def __init__(self, config: Rwkv7, width: Width):
        super().__init__(config, width)
        self.settings = {"prediction": "given", "scale": 1.0}
        D, H, K, rank = width.dim, width.heads, width.key_dim, config.rank or width.key_dim
        self.decay = nn.Sequential(Projection(D, rank, bias=False), nn.Tanh(), Projection(rank, H * K))
        self.share = nn.Sequential(Projection(D, rank, bias=False), Projection(rank, H * K))
        self.xi, self.alpha = (nn.Parameter(torch.ones(H, K)) for _ in range(2))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.xi)
        nn.init.ones_(self.alpha)

    def gates(self, x: Tensor | Later, *beside: Map) -> tuple[dict[str, Tensor | None], list[Tensor]]:
        *others, decay, share = side_by_side(x, *beside, self.decay, self.share)
        by_channel = lambda logit: torch.sigmoid(wide(logit)).unflatten(-1, (self.width.heads, -1))
        return {"g": -DEEPEST * by_channel(decay), "share": by_channel(share)}, others

    def times(self, k, v, *, g, share):
        direction = l2(self.xi * wide(k))
        key = wide(k) * (1 + (share - 1) * self.alpha)
        erase = {"k": (share * direction).to(k.dtype), "v": torch.zeros_like(v), "g": g, "erase": direction.to(k.dtype)}
        add = {"k": key.to(k.dtype), "v": v, "g": later(g), "erase": torch.zeros_like(k)}
        return [one | {"write": torch.ones_like(v)} for one in (erase, add)]
