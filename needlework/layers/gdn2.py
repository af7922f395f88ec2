"""GDN-2: the delta rule with an erase gate per key channel and a write gate per value channel."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from needlework.layers.config import Width
from needlework.layers.gates import ChannelGate, GateConfig
from needlework.layers.norm import Later, wide
from needlework.layers.projection import Map, Projection, mapped
from needlework.layers.write import WriteConfig, WriteRule
from needlework.ops.delta import chunk_delta, step_delta


@dataclass(frozen=True, kw_only=True)
class Gdn2(WriteConfig):
    """GDN-2: the delta rule with an erase strength a key channel and a write strength a value channel.

        S_t = (I − k (b ⊙ k)ᵀ) Diag(e^g) S_{t-1} + k (w ⊙ v)ᵀ,    b = σ(W_b x) [K],    w = σ(W_w x) [V],    S [K V] a head, float32

    gate: the decay g; ChannelGate by default.
    allow_neg_eigval: b is doubled, so that a step may turn what it erases around; w is not.

    >>> import torch
    >>> from needlework.layers import Gdn2, Recurrent
    >>> Recurrent(heads=4, key_dim=16, value_dim=16, write=Gdn2()).build(64)(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "gdn2"
    gate: GateConfig = field(default_factory=ChannelGate)
    allow_neg_eigval: bool = False

    def build(self, width: Width) -> WriteRule:
        return _Gdn2(self, width)


class _Gdn2(WriteRule[Gdn2]):
    norms = True
    chunk, step = staticmethod(chunk_delta), staticmethod(step_delta)

    def __init__(self, config: Gdn2, width: Width):
        super().__init__(config, width)
        self.erase = Projection(width.dim, width.value_heads * width.key_dim, bias=width.bias)
        self.write = Projection(width.dim, width.value_heads * width.value_dim, bias=width.bias)

    def gates(self, x: Tensor | Later, *beside: Map) -> tuple[dict[str, Tensor | None], list[Tensor]]:
        found, others = super().gates(x, *beside)
        by_channel = lambda project: torch.sigmoid(wide(mapped(x, project))).unflatten(-1, (self.width.value_heads, -1))
        most = 2.0 if self.config.allow_neg_eigval else 1.0
        return found | {"erase": most * by_channel(self.erase), "write": by_channel(self.write)}, others

    def call(self, op, q, k, v, *, g, erase, write, q_read):
        return op(q, k, v, g, erase=erase, write=write, q_read=q_read, scale=self.width.scale)
