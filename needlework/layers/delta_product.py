"""Gated DeltaProduct, a write rule: several delta rules a token, one after another."""

from dataclasses import dataclass, field

from torch import Tensor

from needlework.fields import Count
from needlework.layers.config import Width
from needlework.layers.gates import GateConfig, ScalarGate
from needlework.layers.norm import Later
from needlework.layers.projection import Map
from needlework.layers.subtokens import SubTokens, later
from needlework.layers.write import Strength, WriteConfig, WriteRule, gates_of


@dataclass(frozen=True, kw_only=True)
class DeltaProduct(WriteConfig):
    """Gated DeltaProduct (arXiv 2502.10297): n delta rules a token, each with its own key, value and strength; the first one decays.

        S_t = (Π_i (I − β_i k_i k_iᵀ)) e^g S_{t-1} + …,    the state after the last of them is read

    gate: the decay g; ScalarGate by default, None: DeltaProduct.
    write_rank: n; the layer's k and v projections make n keys and values a head.
    allow_neg_eigval: β is doubled, so that a factor may be a reflection, as published.

    >>> import torch
    >>> from needlework.layers import DeltaProduct, Recurrent
    >>> mixer = Recurrent(heads=4, key_dim=16, value_dim=16, write=DeltaProduct(write_rank=3)).build(64)
    >>> mixer(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "delta_product"
    gate: GateConfig | None = field(default_factory=ScalarGate)
    write_rank: Count = 2
    allow_neg_eigval: bool = True

    def build(self, width: Width) -> WriteRule:
        return _DeltaProduct(self, width)


class _DeltaProduct(SubTokens[DeltaProduct]):
    def __init__(self, config: DeltaProduct, width: Width):
        super().__init__(config, width)
        self.settings = {"scale": width.scale}
        rows = width._replace(value_heads=width.value_heads * config.write_rank)
        self.beta = Strength(rows, most=2.0 if config.allow_neg_eigval else 1.0)

    def gates(self, x: Tensor | Later, *beside: Map) -> tuple[dict[str, Tensor | None], list[Tensor]]:
        return gates_of(x, *beside, g=self.gate, beta=self.beta)

    def times(self, k, v, *, g, beta):
        """k [.. H n K], v [.. HV n V], beta [.. HV·n]; without the axis n where n is 1."""
        n = self.config.write_rank
        k, v = (x if n > 1 else x.unsqueeze(-2) for x in (k, v))
        each = zip(k.unbind(-2), v.unbind(-2), beta.unflatten(-1, (-1, n)).unbind(-1), strict=True)
        return [{"k": k, "v": v, "g": g if i == 0 else later(g), "beta": beta} for i, (k, v, beta) in enumerate(each)]
