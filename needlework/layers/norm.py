"""Norms over the last axis: eps 1e-6 where nothing else is said, computed in float32 (float64 of float64), rounded to the input's dtype.

`RMSNorm` rounds before it multiplies by the weight. torch.nn.RMSNorm gives the same bits in float32 and float64, but rounds after the
weight in bfloat16, and under autocast returns bfloat16 where this one returns the weight's float32.
"""

import torch
from torch import Tensor, nn

EPS = 1e-6


def wide(x: Tensor) -> Tensor:
    """x in at least float32: where norms, gates and write strengths are computed."""
    return x if x.dtype == torch.float64 else x.float()


def l2(x: Tensor) -> Tensor:
    """x / √(Σx² + 1e-6) over the last axis."""
    w = wide(x)
    return (w * torch.rsqrt(w.square().sum(-1, keepdim=True) + EPS)).to(x.dtype)


def rms(x: Tensor, eps: float = EPS) -> Tensor:
    """x / √(mean x² + eps) over the last axis, without weight."""
    w = wide(x)
    return (w * torch.rsqrt(w.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def published_rms(x: Tensor) -> Tensor:
    """rms with the epsilon of x's own dtype, as ATMA's models were trained: 2^-23 in float32, 2^-7 in bfloat16."""
    return rms(x, torch.finfo(x.dtype).eps)


class RMSNorm(nn.Module):
    """y = x / √(mean x² + eps) ⊙ weight, x and y [.. size]; weight [size] starts at 1.

    y has the wider dtype of x and weight.
    """

    def __init__(self, size: int, eps: float = EPS):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, self.eps) * self.weight
