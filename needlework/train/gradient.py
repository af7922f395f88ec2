"""The gradient as one vector over all ranks: its norm, of the whole or of each parameter, and its scaling.

    ‖g‖² = Σ_ranks Σ_parameters ‖piece held here‖² / (ranks that hold the same piece)

A parameter may be plain or a DTensor on any axes; the sum over ranks is right for all of them, and is one number.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from .world import World


def squared_norm(model: nn.Module, world: World) -> Tensor:
    """This rank's addend of ‖g‖², float64 on the device; summed over ranks it is ‖g‖²."""
    held: dict[int, list[Tensor]] = {}
    for gradient in _gradients(p for p in model.parameters()):
        held.setdefault(_copies(gradient, world), []).append(_local(gradient))
    squares = [get_total_norm(pieces).double().square() / copies for copies, pieces in held.items()]
    return sum(squares, start=torch.zeros((), dtype=torch.float64))


def norms(model: nn.Module, world: World) -> dict[str, float]:
    """Of every parameter that has a gradient; every rank calls it."""
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    squares = [_local(g).detach().double().square().sum() / _copies(g, world) for _, g in named]
    return {name: math.sqrt(x) for (name, _), x in zip(named, world.sum_(torch.stack(squares)).tolist(), strict=True)}


def clip_(parameters: Iterable[nn.Parameter], norm: float, bound: float) -> None:
    """Scales their part of a gradient whose norm is `norm` to `bound` at most, as `torch.nn.utils.clip_grad_norm_` does."""
    factor = bound / (norm + 1e-6)
    if factor < 1:
        torch._foreach_mul_([_local(gradient) for gradient in _gradients(parameters)], factor)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _copies(gradient: Tensor, world: World) -> int:
    """How many ranks hold what this rank holds of it."""
    if not isinstance(gradient, DTensor):
        return world.ranks
    mesh = gradient.device_mesh
    return world.ranks // math.prod(mesh.size(axis) for axis, p in enumerate(gradient.placements) if not p.is_replicate())
