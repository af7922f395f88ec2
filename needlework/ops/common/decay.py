"""Sums of log decays inside a chunk, each accurate to its own size, whatever gates are beside it: −10²⁰ or −∞ empties the state and costs
no digit. And sums from a sequence's start, of which attention takes differences.

Knows no op. `kernels/tile.py: capped` has the kernels' way.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from needlework.ops.common.packing import document_positions

# below it e^g is 0 of whatever it decays: e^-1500 times the largest float64 is less than the least
NOTHING = -1500.0


def sums_between(g: Tensor) -> Tensor:
    """g_{s+1} + … + g_t at [... t s] for s <= t, −∞ for s > t, of g [... C]: float64, each a sum of its own gates.

    A difference of prefix sums would hold the digits of all gates before s, and of −∞ none.
    """
    C = g.shape[-1]
    before = torch.ones(C, C, dtype=torch.bool, device=g.device).tril(-1)
    return torch.where(before, g.double()[..., :, None], 0).cumsum(-2).masked_fill_(before.mT, -torch.inf)


def summed(g: Tensor, before: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """G [B T Hq] of log gates g, from `before` [N Hq] on, and what it is after each sequence's last token; float64.

    A gate of NOTHING or below counts as NOTHING: of −∞ a difference would be no number. cu_seqlens may reach past T, where only an operator
    sees it and raises.
    """
    sums = g.masked_fill(g <= NOTHING, NOTHING).double().cumsum(1)
    if cu_seqlens is None:
        decay = before[:, None] + sums
        return decay, torch.cat([before[:, None], decay], 1)[:, -1]
    ends = F.pad(sums[0], (0, 0, 1, 0))[cu_seqlens.clamp(0, g.shape[1])]  # [N+1 Hq] before each sequence's first token
    start = before - ends[:-1]
    document, _ = document_positions(cu_seqlens, g.shape[1])
    return sums + start[document.clamp(max=len(start) - 1)], start + ends[1:]


def retention(heads: int, like: Tensor) -> Tensor:
    """RetNet's log decays log(1 − 2^{−5−h}), h = 0, 1, … [heads]: constants, in float32 (float64 for a float64 `like`)."""
    h = torch.arange(heads, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    return torch.log1p(-(2.0 ** -(5 + h)))
