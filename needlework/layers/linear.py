"""The additive write: S_t = Diag(e^{g_t}) S_{t-1} + k_t v_tᵀ. Linear attention without a gate, GLA or RetNet with one."""

from dataclasses import dataclass

from needlework.layers.config import Width
from needlework.layers.gates import GateConfig
from needlework.layers.write import WriteConfig, WriteRule
from needlework.ops.delta import chunk_delta, step_delta


@dataclass(frozen=True, kw_only=True)
class Linear(WriteConfig):
    """The additive write of linear attention; keys are not normalised.

        S_t = Diag(e^{g_t}) S_{t-1} + k_t v_tᵀ,    o_t = scale · S_tᵀ q_t,    S [K V] a head, float32

    gate: None is linear attention, LowRankGate GLA, FixedGate RetNet (with a `position` in its Recurrent).

    >>> import torch
    >>> from needlework.layers import Linear, LowRankGate, Recurrent
    >>> mixer = Recurrent(heads=4, key_dim=16, value_dim=32, conv=None, write=Linear(gate=LowRankGate())).build(64)
    >>> mixer.state_size(1000, torch.bfloat16)  # bytes: 4 heads of [16 32] in float32, whatever the length
    8192
    """

    kind = "linear"
    unit_keys = False
    gate: GateConfig | None = None

    def build(self, width: Width) -> WriteRule:
        return _Linear(self, width)


class _Linear(WriteRule[Linear]):
    chunk, step = staticmethod(chunk_delta), staticmethod(step_delta)

    def call(self, op, q, k, v, *, g, q_read, **carry):
        return op(q, k, v, g, q_read=q_read, scale=self.width.scale, **carry)
