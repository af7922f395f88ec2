"""Longhorn, a write rule: the delta rule whose strength solves each token's regression, with keys of any norm."""

from dataclasses import dataclass

from needlework.layers.config import Width
from needlework.layers.delta import DeltaRule
from needlework.layers.norm import wide
from needlework.layers.write import WriteConfig, WriteRule


@dataclass(frozen=True, kw_only=True)
class Longhorn(WriteConfig):
    """Longhorn (arXiv 2407.14207): the state that comes nearest to v under k without going far from the one before, exactly.

        S_t = argmin_S ‖S − S_{t-1}‖² + β ‖v − Sᵀk‖² = (I − ε k kᵀ) S_{t-1} + ε k vᵀ,    ε = β / (1 + β ‖k‖²),    β = σ(W_β x) a head

    Keys are not normalised: ε ‖k‖² is below 1 whatever they are. (The paper's layers take the diagonal of k kᵀ.)

    >>> import torch
    >>> from needlework.layers import Longhorn, Recurrent
    >>> Recurrent(heads=4, key_dim=16, value_dim=16, write=Longhorn()).build(64)(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "longhorn"
    unit_keys = False

    def build(self, width: Width) -> WriteRule:
        return _Longhorn(self, width)


class _Longhorn(DeltaRule):
    def call(self, op, q, k, v, *, g, beta, q_read):
        norm = wide(k).square().sum(-1).repeat_interleave(self.width.value_heads // k.shape[-2], -1)
        return super().call(op, q, k, v, g=g, beta=beta / (1 + beta * norm), q_read=q_read)
