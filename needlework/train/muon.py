"""Muon on matrices that are spread over ranks: each matrix is orthogonalised by one owner, not by all together.

    M ← μ M + (1 − μ) G            U = (1 − μ) G + μ M        elementwise, on each rank's piece, which stays there
    pieces of U  →  owner          X = NewtonSchulz(U)        owner  →  pieces of X
    W ← (1 − lr decay) W − lr adjusted X                      on each rank's piece

`torch.optim.Muon` takes DTensors too, but then every Newton–Schulz step of every matrix communicates, two or three times. Here
`world` matrices travel together, one to each owner, by one all-to-all there and one back, in bfloat16, which is what the
products are made in.
"""

import itertools
import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


class Muon(torch.optim.Muon):
    """`torch.optim.Muon`: its arguments, its state (`momentum_buffer`, placed as the parameter is), its numbers.

    Parameters that are DTensors may be sharded or replicated along any axis of their mesh, with rows that do not divide; where
    none is one, this is `torch.optim.Muon` itself. The ranks of a mesh step together, with gradients of the same parameters.
    Raises ValueError for a parameter that is a sum still Partial.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if not any(isinstance(p, DTensor) for group in self.param_groups for p in group["params"]):
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            settings = {"coefficients": group["ns_coefficients"], "steps": group["ns_steps"], "eps": group["eps"]}
            params = [p for p in group["params"] if p.grad is not None]
            updates = [self._update(p, group) for p in params]
            for mesh in dict.fromkeys(p.device_mesh for p in params if isinstance(p, DTensor)):
                here = [i for i, p in enumerate(params) if isinstance(p, DTensor) and p.device_mesh == mesh]
                pieces = _by_owners([params[i] for i in here], [updates[i] for i in here], mesh, settings)
                for i, piece in zip(here, pieces, strict=True):
                    updates[i] = piece
            for p, update in zip(params, updates, strict=True):
                if not isinstance(p, DTensor):
                    update = orthogonal(update, **settings)
                piece = _local(p)
                piece.mul_(1 - group["lr"] * group["weight_decay"])
                piece.add_(update, alpha=-group["lr"] * _adjustment(p.shape, group["adjust_lr_fn"]))
        return loss

    def _update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """This rank's piece of U, in bfloat16."""
        assert p.grad is not None, "a parameter without a gradient is not updated"
        state, gradient = self.state[p], _local(p.grad)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p.grad)
        momentum = _local(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - group["momentum"])
        return (gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum).bfloat16()


def orthogonal(u: Tensor, *, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """X ← a X + b (X Xᵀ) X + c (X Xᵀ)² X, `steps` times from u/‖u‖, in bfloat16: u with its singular values brought near 1."""
    a, b, c = coefficients
    x = u.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _by_owners(params: list[DTensor], pieces: list[Tensor], mesh: DeviceMesh, settings: dict[str, Any]) -> list[Tensor]:
    """This rank's pieces of the updates -> its pieces of the orthogonalised ones."""
    group = mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()
    world, me = mesh.size(), dist.get_rank(group)
    blocks = [_blocks(p.shape, mesh.shape, p.placements) for p in params]
    assert all(piece.shape == block[me].shape for piece, block in zip(pieces, blocks, strict=True))
    done = list(pieces)
    for owners in _rounds([p.shape for p in params], world):  # owner -> matrix
        here = [pieces[owners[o]] if o in owners and blocks[owners[o]][me].sends else pieces[0][:0] for o in range(world)]
        mine = owners.get(me)
        there = [b.shape.numel() if b.sends else 0 for b in blocks[mine]] if mine is not None else [0] * world
        arrived = _all_to_all(here, there, group)
        back = [pieces[0][:0]] * world
        if mine is not None:
            whole = pieces[mine].new_empty(params[mine].shape)
            for block, numbers in zip(blocks[mine], arrived, strict=True):
                if block.sends:
                    whole[block.rows, block.columns] = numbers.view(block.shape)
            x = orthogonal(whole, **settings)
            back = [x[block.rows, block.columns] for block in blocks[mine]]
        arrived = _all_to_all(back, [pieces[owners[o]].numel() if o in owners else 0 for o in range(world)], group)
        for o, i in owners.items():
            done[i] = arrived[o].view(pieces[i].shape)
    return done


def _rounds(shapes: list[torch.Size], world: int) -> list[dict[int, int]]:
    """{owner: matrix} for each round, one a rank: matrices of like cost together, the most expensive to the rank with the least so far."""
    cost = [max(shape) * min(shape) ** 2 for shape in shapes]
    falling = sorted(range(len(shapes)), key=lambda i: -cost[i])
    load, rounds = [0] * world, []
    for start in range(0, len(falling), world):
        free = sorted(range(world), key=lambda o: load[o])
        rounds.append(dict(zip(free, falling[start : start + world], strict=False)))
        for o, i in rounds[-1].items():
            load[o] += cost[i]
    return rounds


def _all_to_all(parts: list[Tensor], sizes: list[int], group: ProcessGroup) -> list[Tensor]:
    """parts[r] goes to rank r; what comes from each rank, of `sizes` numbers."""
    out = parts[0].new_empty(sum(sizes))
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_to_all_single(out, flat, sizes, [part.numel() for part in parts], group=group)
    return list(out.split(sizes))


class _Block(NamedTuple):
    """The rectangle of a matrix that one rank holds. sends: it is the first of those that hold the same."""

    rows: slice
    columns: slice
    sends: bool

    @property
    def shape(self) -> torch.Size:
        return torch.Size(axis.stop - axis.start for axis in (self.rows, self.columns))


@cache
def _blocks(shape: torch.Size, sizes: tuple[int, ...], placements: tuple[Placement, ...]) -> list[_Block]:
    """What each rank of a mesh of these sizes holds of a matrix, in the mesh's order."""
    # FSDP2 shards what tensor parallelism has sharded already; the mesh names FSDP's axis first, and the placement says so
    order = sorted(range(len(sizes)), key=lambda axis: hasattr(placements[axis], "split_factor"))
    blocks = []
    for coordinate in itertools.product(*map(range, sizes)):
        bounds, sends = [(0, length) for length in shape], True
        for axis in order:
            placement = placements[axis]
            if placement.is_replicate():
                sends = sends and coordinate[axis] == 0
                continue
            if placement.is_partial():
                raise ValueError(f"muon: a matrix {list(shape)} is placed {placements}, expected Shard or Replicate")
            axis_of: Any = placement  # Shard and the strided one of FSDP2 have a `dim`, their base has none
            low, high = bounds[axis_of.dim]
            step = -(-(high - low) // sizes[axis])  # as torch.chunk
            low = min(low + coordinate[axis] * step, high)
            bounds[axis_of.dim] = low, min(low + step, high)
        blocks.append(_Block(slice(*bounds[0]), slice(*bounds[1]), sends))
    return blocks


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _adjustment(shape: torch.Size, kind: str | None) -> float:
    """What torch.optim.Muon multiplies the learning rate with."""
    rows, columns = shape
    if kind in (None, "original"):
        return math.sqrt(max(1, rows / columns))
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    raise ValueError(f"muon: adjust_lr_fn is {kind!r}, expected None, 'original' or 'match_rms_adamw'")
