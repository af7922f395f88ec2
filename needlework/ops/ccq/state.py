"""CCQ's state, fixed in size, and the op's result."""

from typing import NamedTuple

import torch
from torch import Tensor


class CurvatureState(NamedTuple):
    """Centred statistics of the keys seen so far: K² + K + 1 numbers a head, float32 or float64.

    C [N H K K]: Σ_s ω_s (k_s − mean)(k_s − mean)ᵀ, symmetric. mean [N H K]: Σ_s ω_s k_s / n. n [N H]: Σ_s ω_s, the token
    count without decay; 0 before the first token and at least 1 after it. The plain sums are M = C + n mean meanᵀ, s = n mean.
    """

    C: Tensor
    mean: Tensor
    n: Tensor


class CcqOutput(NamedTuple):
    """q [B T HV K]: the cleaned query; state [N ...], or None without output_final_state."""

    q: Tensor
    state: CurvatureState | None


def symmetric(state: CurvatureState) -> CurvatureState:
    """The state with (C + Cᵀ)/2, which is C, to the bit, of any covariance: an op is a function of nothing else of C, and its gradient
    is symmetric whatever form computes it."""
    return state._replace(C=(state.C + state.C.mT) / 2)


def empty_state(
    N: int, H: int, K: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> CurvatureState:
    """The state of N sequences (or slots) that have seen nothing.

    >>> from needlework.ops.ccq import empty_state
    >>> empty_state(N=2, H=4, K=16).C.shape
    torch.Size([2, 4, 16, 16])
    """
    return CurvatureState(
        C=torch.zeros(N, H, K, K, dtype=dtype, device=device),
        mean=torch.zeros(N, H, K, dtype=dtype, device=device),
        n=torch.zeros(N, H, dtype=dtype, device=device),
    )
