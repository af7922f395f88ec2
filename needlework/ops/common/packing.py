"""Packed sequences as a padded batch and back. The padding is at the tail, so that causal code needs no mask."""

from itertools import pairwise

import torch
from torch import Tensor

from needlework.ops.common.remembered import remember, remembered
from needlework.ops.common.shapes import given


def sequences(cu_seqlens: Tensor | None, B: int) -> int:
    """How many sequences a call has: B, or as many as are packed. ValueError unless cu_seqlens is then [N+1] integers, and B is 1.

    What the integers are is data, which torch.compile does not look at: `check_cu_seqlens` does, inside an operator.
    """
    if cu_seqlens is None:
        return B
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"cu_seqlens: expected a tensor [N+1] of int32 or int64, got {given(cu_seqlens)}")
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or len(cu_seqlens) < 2:
        raise ValueError(
            f"cu_seqlens: expected [N+1] integers (int32 or int64), N >= 1, got {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        )
    if B != 1:
        raise ValueError(f"cu_seqlens packs sequences along T: expected B = 1, got B = {B}")
    return len(cu_seqlens) - 1


def check_cu_seqlens(cu_seqlens: Tensor, B: int, T: int, *, padded: bool = False) -> list[int]:
    """What cu_seqlens holds. ValueError unless it is [N+1], integer, from 0 to T, non-decreasing, and B is 1. padded: to at most T."""
    sequences(cu_seqlens, B)
    remember(cu_seqlens)
    return _rising(cu_seqlens, T, padded)


@remembered
def _rising(cu_seqlens: Tensor, T: int, padded: bool) -> list[int]:
    ends = cu_seqlens.tolist()
    whole = ends[-1] <= T if padded else ends[-1] == T
    if ends[0] != 0 or not whole or any(a > b for a, b in pairwise(ends)):
        raise ValueError(f"cu_seqlens: expected to rise from 0 to {'at most ' if padded else ''}T = {T}, got {ends}")
    return ends


def lengths(cu_seqlens: Tensor) -> Tensor:
    """[N] tokens of each sequence."""
    return cu_seqlens[1:] - cu_seqlens[:-1]


def document_positions(cu_seqlens: Tensor, T: int) -> tuple[Tensor, Tensor]:
    """[T] the document of each packed token, [T] its position in it."""
    t = torch.arange(T, device=cu_seqlens.device)
    # not in cu_seqlens[1:]: Inductor of torch 2.11 compiles searchsorted for GPUs without the offset of such a view
    document = torch.searchsorted(cu_seqlens, t, right=True) - 1
    return document, t - cu_seqlens[document]


def token_positions(x: Tensor, seen: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """[B T] or [1 T]: the position of each token of x [B T …] in its own sequence, of which `seen` [N] tokens came before; None: none."""
    if cu_seqlens is None:
        at = torch.arange(x.shape[1], device=x.device)[None]
        return at if seen is None else at + seen[:, None]
    document, at = document_positions(cu_seqlens, x.shape[1])
    return (at if seen is None else at + seen[document])[None]


def _rows(cu_seqlens: Tensor) -> tuple[Tensor, int]:
    n = lengths(cu_seqlens)
    longest = int(n.max())
    return torch.arange(longest, device=n.device) < n[:, None], longest  # [N Tmax]


def pad(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[1 T ...] packed -> [N Tmax ...], zeros after each sequence's end."""
    real, longest = _rows(cu_seqlens)
    out = x.new_zeros(len(real), longest, *x.shape[2:])
    out[real] = x[0]
    return out


def unpad(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N Tmax ...] -> [1 T ...]: the inverse of `pad`."""
    real, _ = _rows(cu_seqlens)
    return x[real][None]
