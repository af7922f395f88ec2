"""Rows of unit norm and of unit mean square, as they are written; `rows.py` has the first in one pass."""

import torch
from torch import Tensor


def unit_rows(x: Tensor) -> Tensor:
    """x / √(Σx² + 1e-6) over the last axis, computed in float32 or wider, in x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


def unit_heads(x: Tensor, K: int) -> Tensor:
    """x [.. C] with `unit_rows` of each K of its channels in their place; K = 0: x."""
    return unit_rows(x.unflatten(-1, (x.shape[-1] // K, K))).flatten(-2) if K else x


def rms_rows(x: Tensor, eps: float) -> Tensor:
    """x / √(mean x² + eps), likewise."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)
