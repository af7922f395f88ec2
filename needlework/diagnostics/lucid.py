"""LUCID (arXiv 2602.10410): how far from orthogonal the stored keys are, as its preconditioner sees them."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .listen import heard


class LucidLayer(NamedTuple):
    """A mean over key-value heads and rows of P_ij = e^{√d (k̂_i·k̂_j − 1)}, j <= i.

    condition: σ_max(P)/σ_min(P), in float64. off_diagonal: the share of ΣP that lies below the diagonal.
    """

    condition: float
    off_diagonal: float


def lucid(model: nn.Module, input_ids: Tensor) -> list[LucidLayer]:
    """One entry for each LUCID layer, from input_ids [B T]; a matrix of T² numbers a head is decomposed: keep T near 1,000."""
    return [_layer(k) for k in heard(model, input_ids, "lucid").get("k", [])]


def _layer(k: Tensor) -> LucidLayer:
    k = k.double().transpose(1, 2)  # [B Hkv T d]
    unit = k / k.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    P = (k.shape[-1] ** 0.5 * (unit @ unit.mT - 1)).exp().tril()
    P.diagonal(dim1=-2, dim2=-1).fill_(1.0)  # by definition, not computed
    singular = torch.linalg.svdvals(P)
    share = 1 - P.shape[-1] / P.sum((-2, -1))
    return LucidLayer((singular[..., 0] / singular[..., -1]).mean().item(), share.mean().item())
