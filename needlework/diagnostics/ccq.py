"""CCQ, Appendix H: do the keys of needles lie outside the directions that most keys share?"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .listen import heard

RANK = 16  # of the subspace that "most keys share", as in the paper


class CCQLayer(NamedTuple):
    """Shares in 0..1, a mean over heads and rows: of a centred key's energy, what lies in the top 16 eigenvectors of the key covariance.

    gap = needle − distractor; below zero where needles stand out (in both of the paper's models at every layer).
    """

    needle: float
    distractor: float
    gap: float


def ccq(model: nn.Module, input_ids: Tensor, needle: Tensor) -> list[CCQLayer]:
    """One entry for each layer that CCQ reads, from input_ids [B T] and needle [B T], true at the needle's tokens.

    Of the needle's tokens those count whose id occurs at most twice in their row; every token outside the needle is a distractor.
    ValueError for a mask of another shape, or a row without a needle token that counts.
    """
    counted = rare(input_ids, needle)
    found = []
    for k in heard(model, input_ids, "ccq").get("k", []):
        share = energy(k)  # [B T H]
        at = counted.to(share.device)[..., None], (~needle).to(share.device)[..., None]
        inside, outside = ((share * mask).sum(1) / mask.sum(1) for mask in at)  # [B H]
        found.append(CCQLayer(inside.mean().item(), outside.mean().item(), (inside - outside).mean().item()))
    return found


def rare(input_ids: Tensor, needle: Tensor) -> Tensor:
    """[B T] bool: the needle's tokens that count; ValueError as in `ccq`."""
    if needle.shape != input_ids.shape or needle.dtype != torch.bool:
        raise ValueError(f"needle: expected bool {list(input_ids.shape)}, got {needle.dtype} {list(needle.shape)}")
    counted = needle & ((input_ids[:, :, None] == input_ids[:, None, :]).sum(-1) <= 2)
    if not counted.any(1).all():
        raise ValueError("needle: a row has no needle token whose id occurs at most twice")
    return counted


def energy(k: Tensor) -> Tensor:
    """Unit keys k [B T H K] -> [B T H] the share of each centred key's energy in the top eigenvectors of its row's covariance."""
    k = k.transpose(1, 2).double()  # [B H T K]
    centred = k - k.mean(2, keepdim=True)
    _, vectors = torch.linalg.eigh(centred.mT @ centred / k.shape[2])
    inside = (centred @ vectors[..., -RANK:]).square().sum(-1)
    return (inside / centred.square().sum(-1).clamp(min=1e-30)).transpose(1, 2)
