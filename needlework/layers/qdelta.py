"""Q-Delta: the query takes part in the delta rule's write."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from needlework.fields import NonNegative, Portion
from needlework.layers.config import Width
from needlework.layers.gates import GateConfig, ScalarGate
from needlework.layers.norm import Later
from needlework.layers.projection import Map
from needlework.layers.write import Strength, WriteConfig, WriteRule, gates_of
from needlework.ops.qdelta import chunk_qdelta, step_qdelta
from needlework.ops.qdelta.arguments import Coupling
from needlework.probe import probe


@dataclass(frozen=True, kw_only=True)
class QDelta(WriteConfig):
    """Q-Delta: the delta rule whose write also erases what the query would read.

        S_t = e^g (I − β k (k + λq)ᵀ) S_{t-1} + β k vᵀ,    β = σ(W_β x),    λ = σ(W_λ x − 0.9) a head,    S [K V] a head, float32

    gate: the decay g; ScalarGate by default, None: no decay.
    lam: fixes λ, as the paper's ablation does; 0 is Gated DeltaNet. None: λ is computed from x.
    coupling: "transposed" is what the authors' released kernels compute, for their checkpoints (`ops/qdelta`).
    allow_neg_eigval: β and λ are doubled, which leaves the range in which a step contracts.
    factor: λ is multiplied by a number a head that is learned in [0, 1] and starts here; 0 starts as Gated DeltaNet. None: it is not.
    Raises ValueError for a lam that is negative or above 1 (2 with allow_neg_eigval), and for a factor of a fixed lam.

    >>> import torch
    >>> from needlework.layers import QDelta, Recurrent
    >>> mixer = Recurrent(heads=4, key_dim=16, value_dim=16, write=QDelta()).build(64)
    >>> mixer(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "qdelta"
    gate: GateConfig | None = field(default_factory=ScalarGate)
    lam: NonNegative | None = None
    coupling: Coupling = "recurrent"
    allow_neg_eigval: bool = False
    factor: Portion | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.factor is not None and self.lam is not None:
            raise ValueError(
                f"qdelta: factor is {self.factor} and lam is {self.lam}, expected None for one of them: λ is fixed by lam"
            )
        if self.lam is not None and self.lam > self.most:
            raise ValueError(f"qdelta: lam is {self.lam}, expected a number in [0, {self.most}]")

    @property
    def most(self) -> float:
        """Of β and λ."""
        return 2.0 if self.allow_neg_eigval else 1.0

    def build(self, width: Width) -> WriteRule:
        return _QDelta(self, width)


class _QDelta(WriteRule[QDelta]):
    norms = True
    chunk, step = staticmethod(chunk_qdelta), staticmethod(step_qdelta)

    def __init__(self, config: QDelta, width: Width):
        super().__init__(config, width)
        most = config.most
        self.beta = Strength(width, most=most)
        self.lam = Strength(width, offset=-0.9, most=most, factor=config.factor) if config.lam is None else None

    def gates(self, x: Tensor | Later, *beside: Map) -> tuple[dict[str, Tensor | None], list[Tensor]]:
        found, others = gates_of(x, *beside, g=self.gate, beta=self.beta, lam=self.lam)
        if self.config.lam is not None and (beta := found["beta"]) is not None:
            found["lam"] = torch.full_like(beta, self.config.lam)
        return found, others

    def call(self, op, q, k, v, *, g, beta, lam, q_read):
        for name, value in {"q": q, "k": k, "v": v, "g": g, "beta": beta, "lam": lam}.items():
            probe(f"qdelta.{name}", value)
        return op(q, k, v, g, beta, lam, coupling=self.config.coupling, q_read=q_read, scale=self.width.scale)
