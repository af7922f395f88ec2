"""Linear maps: several of one input as one product, and those with a role, so that initialisation can tell them apart.

One product reads x once and gives one gradient of x where several write one each, to be added. Its own gradient is that of its parts,
one beside the other: free where a kernel writes it whole (a convolution of q, k and v) or where parts are narrow. Not where a wide
part's gradient is computed element by element, as a gate's or a rotated query's is: torch.compile then computes every part's formula
at every column and keeps one. SwiGLU, output gates and attention's q, k and v are therefore products of their own.
"""

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ALIGNED = 8  # columns: 16 bytes of a half-precision row, without which products take slower kernels


def side_by_side(x: Tensor, *maps: nn.Module) -> list[Tensor]:
    """Each map of x [… D]: an nn.Linear, or an nn.Sequential that begins with one; those are one product. Any other
    module is called."""
    first = [m[0] if isinstance(m, nn.Sequential) else m for m in maps]
    if not _together(first, x):
        return [m(x) for m in maps]
    y, sizes = _product(x, first), [m.out_features for m in first]
    columns = y.split([*sizes, y.shape[-1] - sum(sizes)], -1)
    return [m[1:](part) if isinstance(m, nn.Sequential) else part for m, part in zip(maps, columns, strict=False)]


def product(x: Tensor, *maps: nn.Linear) -> Tensor:
    """The maps of x [… D], one beside the other, [… Σ]."""
    if not _together(maps, x):
        return torch.cat([m(x) for m in maps], -1)
    y, columns = _product(x, maps), sum(m.out_features for m in maps)
    return y if y.shape[-1] == columns else y[..., :columns]


def _together(maps: Sequence[nn.Module], x: Tensor) -> TypeGuard[Sequence[nn.Linear]]:
    """Whether one product is worth its copy of the weights.

    Without gradients it is where x is more than the weights; with them whatever x is, so that ranks with fewer tokens round as one
    does.
    """
    linear = [m for m in maps if _plain(m)]
    if len(maps) < 2 or len(linear) < len(maps):
        return False
    return torch.is_grad_enabled() or x.numel() >= sum(m.weight.numel() for m in linear)


def _plain(m: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether m(x) is x Wᵀ + b and nothing else: no adapter, no quantised weight, no hook."""
    return (
        type(m) is nn.Linear and type(m.weight) in (Tensor, nn.Parameter) and not m._forward_hooks and not m._forward_pre_hooks
    )


def _product(x: Tensor, maps: Sequence[nn.Linear]) -> Tensor:
    """`product`, with as many columns more as make rows aligned."""
    weight, bias = torch.cat([m.weight for m in maps]), None
    if any(m.bias is not None for m in maps):
        bias = torch.cat([m.weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in maps])
    more = -len(weight) % ALIGNED
    if more:
        weight, bias = F.pad(weight, (0, 0, 0, more)), bias if bias is None else F.pad(bias, (0, more))
    return F.linear(x, weight, bias)


class OutProjection(nn.Linear):
    """The map back into the residual stream. A model may start all of these at zero."""


class ZeroProjection(nn.Linear):
    """A map that always starts at zero, weight and bias: its branch is a no-op at first."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
