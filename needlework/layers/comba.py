"""Comba, a write rule: a delta rule that predicts from the state before its decay, and a query corrected by the key."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from needlework.layers.config import Width
from needlework.layers.gates import GateConfig, ScalarGate
from needlework.layers.norm import Later, wide
from needlework.layers.projection import Map
from needlework.layers.write import Strength, WriteConfig, WriteRule, gates_of
from needlework.ops.delta import chunk_delta, step_delta


@dataclass(frozen=True, kw_only=True)
class Comba(WriteConfig):
    """Comba (arXiv 2506.02475): the state feeds back with a strength of its own, and a token's key corrects its query.

        S_t = (e^g I − β b k kᵀ) S_{t-1} + β k vᵀ,    o_t = scale · S_tᵀ (q − d k),    β = σ(W_β x) a head,    b = σ(b₀),    k of unit norm

    b₀ and d are one number a head, 1 at the start.

    gate: the decay g; ScalarGate by default.

    >>> import torch
    >>> from needlework.layers import Comba, Recurrent
    >>> Recurrent(heads=4, key_dim=16, value_dim=16, write=Comba()).build(64)(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "comba"
    gate: GateConfig = field(default_factory=ScalarGate)

    def build(self, width: Width) -> WriteRule:
        return _Comba(self, width)


class _Comba(WriteRule[Comba]):
    chunk, step = staticmethod(chunk_delta), staticmethod(step_delta)

    def __init__(self, config: Comba, width: Width):
        super().__init__(config, width)
        self.beta = Strength(width)
        self.feedback, self.correction = (nn.Parameter(torch.ones(width.value_heads)) for _ in range(2))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.feedback)
        nn.init.ones_(self.correction)

    def gates(self, x: Tensor | Later, *beside: Map) -> tuple[dict[str, Tensor | None], list[Tensor]]:
        return gates_of(x, *beside, g=self.gate, beta=self.beta)

    def call(self, op, q, k, v, *, g, beta, q_read):
        by_head = lambda x: x.repeat_interleave(self.width.value_heads // x.shape[-2], -2)
        q_read = (by_head(q_read) - wide(self.correction)[:, None] * by_head(k)).to(q.dtype)
        erase = (beta * torch.sigmoid(wide(self.feedback)))[..., None].expand(q_read.shape)
        write = beta[..., None].expand(v.shape)
        return op(q, k, v, g, erase=erase, write=write, prediction="previous", q_read=q_read, scale=self.width.scale)
