"""Sums of log decays inside a chunk, each accurate to its own size, whatever gates are beside it: −10²⁰ or −∞ empties the state and costs no digit.

Knows no op. `kernels/tile.py: capped` has the kernels' way.
"""

import torch
from torch import Tensor

# below it e^g is 0 of whatever it decays: e^-1500 times the largest float64 is less than the least
NOTHING = -1500.0


def sums_between(g: Tensor) -> Tensor:
    """g_{s+1} + … + g_t at [... t s] for s <= t, −∞ for s > t, of g [... C]: float64, each a sum of its own gates.

    A difference of prefix sums would hold the digits of all gates before s, and of −∞ none.
    """
    C = g.shape[-1]
    before = torch.ones(C, C, dtype=torch.bool, device=g.device).tril(-1)
    return torch.where(before, g.double()[..., :, None], 0).cumsum(-2).masked_fill_(before.mT, -torch.inf)


def retention(heads: int, like: Tensor) -> Tensor:
    """RetNet's log decays log(1 − 2^{−5−h}), h = 0, 1, … [heads]: constants, in float32 (float64 for a float64 `like`)."""
    h = torch.arange(heads, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    return torch.log1p(-(2.0 ** -(5 + h)))
