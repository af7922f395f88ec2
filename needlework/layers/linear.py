"""The additive write: S_t = Diag(e^{g_t}) S_{t-1} + k_t v_tᵀ. Linear attention without a gate, GLA or RetNet with one, Hedgehog by its
feature map.

Channels of an additive rule may be cut over calls, S = [S₁; S₂; …], and the reads summed: o = Σ_i S_iᵀ q_i.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from needlework.layers.config import Width
from needlework.layers.features import FeatureConfig
from needlework.layers.gates import GateConfig
from needlework.layers.norm import wide
from needlework.layers.state import Part, fixed
from needlework.layers.write import WriteConfig, WriteRule
from needlework.ops.delta import chunk_delta, step_delta

WIDEST = 256  # key channels of a call that the kernels take
TINY = 1e-12  # beside a denominator


@dataclass(frozen=True, kw_only=True)
class Linear(WriteConfig):
    """The additive write of linear attention; keys are not normalised.

        S_t = Diag(e^{g_t}) S_{t-1} + k_t v_tᵀ,    o_t = scale · S_tᵀ q_t,    S [K V] a head, float32

    gate: None is linear attention, LowRankGate GLA, FixedGate RetNet (with a `position` in its Recurrent).
    features: a map of q and k, e.g. Hedgehog; scale is then 1. None: as they are.
    normalise: o is divided by Σ_{j≤t} q_t·k_j, with the decays of the state, which one more column of S holds.
    Raises ValueError for normalise without features, of which alone the sum is above 0.

    >>> import torch
    >>> from needlework.layers import Linear, LowRankGate, Recurrent
    >>> mixer = Recurrent(heads=4, key_dim=16, value_dim=32, conv=None, write=Linear(gate=LowRankGate())).build(64)
    >>> mixer.state_size(1000, torch.bfloat16)  # bytes: 4 heads of [16 32] in float32, whatever the length
    8192
    """

    kind = "linear"
    unit_keys = False
    gate: GateConfig | None = None
    features: FeatureConfig | None = None
    normalise: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.normalise and self.features is None:
            raise ValueError("linear: normalise is True, expected False without features, whose sum alone is above 0")

    def build(self, width: Width) -> WriteRule:
        return _Linear(self, width)


class _Linear(WriteRule[Linear]):
    def __init__(self, config: Linear, width: Width):
        super().__init__(config, width)
        self.features = None if config.features is None else config.features.build(width)
        self.key_dim = width.key_dim if self.features is None else self.features.channels
        self.scale = width.scale if self.features is None else 1.0
        self.pieces = [min(WIDEST, self.key_dim - start) for start in range(0, self.key_dim, WIDEST)]

    def mapped(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (q, k) if self.features is None else self.features(q, k)

    def forward(self, op, q, k, v, **gates):
        o, state = super().forward(op, q, k, self._counted(v), **gates)
        return self._divided(o), state

    def serve(self, q, k, v, tables, batch, **gates):
        return self._divided(super().serve(q, k, self._counted(v), tables, batch, **gates))

    def call(self, op, q, k, v, *, g, q_read):
        if g is not None and g.dim() == q.dim():
            g = g.repeat(*[1] * (g.dim() - 1), self.key_dim // g.shape[-1])
        return op(q, k, v, g, q_read=q_read, scale=self.scale)

    def chunk(self, *tensors, **given):
        return self._by_piece(chunk_delta, *tensors, **given)

    def step(self, *tensors, **given):
        return self._by_piece(step_delta, *tensors, **given)

    def _by_piece(self, op, q, k, v, g, *, q_read, **given):
        """One call of the op, or one for each piece of the channels: then a state is a tuple of theirs."""
        if len(self.pieces) == 1:
            return op(q, k, v, g, q_read=q_read, **given)
        name = "state" if "state" in given else "initial_state"
        states = given.pop(name, None) or [None] * len(self.pieces)
        gates = g.split(self.pieces, -1) if g is not None and g.dim() == q.dim() else [g] * len(self.pieces)
        found = [
            op(q_i, k_i, v, g_i, q_read=r_i, **{name: S_i}, **given)
            for q_i, k_i, r_i, g_i, S_i in zip(*(x.split(self.pieces, -1) for x in (q, k, q_read)), gates, states, strict=True)
        ]
        if isinstance(found[0], Tensor):
            return _sum(found)
        states = None if found[0].state is None else tuple(one.state for one in found)
        return _sum([one.o for one in found]), states

    def held(self, dtype: torch.dtype) -> dict[str, Part]:
        HV, V = self.width.value_heads, self.width.value_dim + self.config.normalise
        names = ["S"] if len(self.pieces) == 1 else [f"S{i}" for i in range(len(self.pieces))]
        return {name: Part((HV, size, V), fixed(dtype)) for name, size in zip(names, self.pieces, strict=True)}

    def state(self, tables):
        return tables["S"] if len(self.pieces) == 1 else tuple(tables[f"S{i}"] for i in range(len(self.pieces)))

    def _counted(self, v: Tensor) -> Tensor:
        """[v 1]: the last column of what is read is the denominator."""
        return torch.cat([v, torch.ones_like(v[..., :1])], -1) if self.config.normalise else v

    def _divided(self, o: Tensor) -> Tensor:
        return (wide(o[..., :-1]) / (wide(o[..., -1:]) + TINY)).to(o.dtype) if self.config.normalise else o


def _sum(reads: list[Tensor]) -> Tensor:
    """Rounded once."""
    return torch.stack([wide(o) for o in reads]).sum(0).to(reads[0].dtype)
