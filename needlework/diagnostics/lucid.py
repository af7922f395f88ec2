"""LUCID (arXiv 2602.10410): how far from orthogonal the stored keys are, as its preconditioner sees them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from needlework.ops.path.reference import scores

from .rules import Call, calls


class LucidLayer(NamedTuple):
    """A mean over key-value heads and rows of P_ij = e^{√d (s_ij − 1)}, 0 <= i − j < window.

    s_ij is k̂_i·k̂_j; of LUCID-PaTH k̂_iᵀ H_i … H_{j+1} k̂_j, its keys as its reflections have moved them.

    condition: σ_max(P)/σ_min(P), in float64. off_diagonal: the share of ΣP that lies below the diagonal.
    """

    condition: float
    off_diagonal: float


def lucid(model: nn.Module, input_ids: Tensor) -> list[LucidLayer]:
    """One entry for each LUCID and LUCID-PaTH layer, from input_ids [B T]; a matrix of T² numbers a head is decomposed: keep T near 1,000."""
    return [_layer(_matrix(call)) for call in calls(model, input_ids) if call.rule.config.kind in ("lucid", "lucid_path")]


def _matrix(call: Call) -> Tensor:
    """P [B Hkv T T]."""
    rule: Any = call.rule
    x, _, k, _ = call.arguments
    unit = k.double() / k.double().norm(dim=-1, keepdim=True).clamp(min=1e-6)
    if rule.config.kind == "lucid_path":
        with torch.no_grad():
            beta, w, _ = rule.reflect(x, None, None)
        s = scores(unit, unit, beta.double(), w.double(), scale=1.0)
    else:
        s = torch.einsum("bihd,bjhd->bhij", unit, unit)
    P = (k.shape[-1] ** 0.5 * (s - 1)).exp().tril()
    P.diagonal(dim1=-2, dim2=-1).fill_(1.0)  # by definition, not computed
    return P if rule.reach is None else P.triu(1 - rule.reach)


def _layer(P: Tensor) -> LucidLayer:
    singular = torch.linalg.svdvals(P)
    share = 1 - P.shape[-1] / P.sum((-2, -1))
    return LucidLayer((singular[..., 0] / singular[..., -1]).mean().item(), share.mean().item())
