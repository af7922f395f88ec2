"""The delta rule: what is already stored under k is erased before v is written. DeltaNet, Gated DeltaNet and KDA by the gate."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from needlework.layers.config import Width
from needlework.layers.gates import GateConfig
from needlework.layers.norm import Later
from needlework.layers.projection import Map
from needlework.layers.write import Strength, WriteConfig, WriteRule, gates_of
from needlework.ops.delta import chunk_delta, step_delta


@dataclass(frozen=True, kw_only=True)
class Delta(WriteConfig):
    """The delta rule: what the state holds under k is erased before v is written.

        S_t = (I − β k kᵀ) Diag(e^g) S_{t-1} + β k vᵀ,    β = σ(W_β x) a head,    k of unit norm,    S [K V] a head, float32

    gate: None is DeltaNet, ScalarGate Gated DeltaNet, ChannelGate KDA.
    allow_neg_eigval: β is doubled, so that a step may turn what it erases around.

    >>> import torch
    >>> from needlework.layers import Delta, Recurrent, ScalarGate
    >>> mixer = Recurrent(heads=4, key_dim=16, value_dim=16, write=Delta(gate=ScalarGate(half_life=64.0))).build(64)
    >>> mixer(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "delta"
    gate: GateConfig | None = None
    allow_neg_eigval: bool = False

    def build(self, width: Width) -> WriteRule:
        return DeltaRule(self, width, most=2.0 if self.allow_neg_eigval else 1.0)


class DeltaRule(WriteRule):
    norms = True
    chunk, step = staticmethod(chunk_delta), staticmethod(step_delta)

    def __init__(self, config: WriteConfig, width: Width, most: float = 1.0):
        super().__init__(config, width)
        self.beta = Strength(width, most=most)

    def gates(self, x: Tensor | Later, *beside: Map) -> tuple[dict[str, Tensor | None], list[Tensor]]:
        return gates_of(x, *beside, g=self.gate, beta=self.beta)

    def call(
        self, op: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *, g: Tensor | None, beta: Tensor, q_read: Tensor
    ) -> Any:
        return op(q, k, v, g, beta, q_read=q_read, scale=self.width.scale)
