"""Tensor parallelism where heads allow: each rank of a mesh axis has its share of every mixer's heads and every MLP's width.

    y = Σ_ranks worker(x; this rank's slices of the layer's parameters)

A worker is the mixer that the layer's own config builds with heads/n heads (channels/n for a gated convolution, hidden/n for an
MLP). Which axis of a parameter is sliced follows from its shape in the layer and in the worker, so no write rule, gate or attend
rule is known here by name. Three things are: what is several axes in one (q, k and v in a convolution; B, C and x of a gated one;
a and b in SquaredReLU; Mamba-3's rows of groups), that the bias of a map into the residual stream is added once and not by every
rank, and that FixedGate and Alibi tell heads apart by their number.

Parameters keep their names and full shapes, as DTensors: sharded over the ranks where a rank's slice is one block, else copied
(one number a head; several axes in one; what heads share). The gradients of copies and of the input are summed in the backward,
the output in the forward. What is outside mixers and MLPs stays an ordinary tensor, with the same value and gradient on all
ranks. `fully_shard` comes after, along another axis of the mesh.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.func import functional_call

from needlework.layers import Alibi, Attention, Config, FixedGate, GatedConv, Mamba3, Recurrent, SquaredReLU, SwiGLU
from needlework.layers.projection import OutProjection, ZeroProjection


def split_heads(model: nn.Module, mesh: DeviceMesh) -> None:
    """Spreads the mixers and MLPs of `model`, a NeedleworkForCausalLM, over the ranks of `mesh`, in place.

    mesh: one axis, e.g. `mesh["tensor"]`. All its ranks hold the same weights before, and are given the same tokens after.
    States that a mixer returns are those of the rank's own heads. Raises ValueError, before anything has changed, where the
    ranks cannot share heads, key-value heads, value heads, channels or an MLP's width evenly, for mixers without any and for
    heads that are not alike.
    """
    if mesh.ndim != 1:
        raise ValueError(f"tensor: the mesh has axes {mesh.mesh_dim_names}, expected the one that splits heads")
    if mesh.size() == 1:
        return
    splits = []
    config: Any = model.config
    stack: Any = model.model
    for layer, (block, letter) in enumerate(zip(stack.blocks, config.layout, strict=True)):
        splits.append(_Split(block.mixer, config.mixer(letter), mesh, config.hidden_size, layer))
        if block.mlp is not None:
            splits.append(_Split(block.mlp, config.channel_mixer(), mesh, config.hidden_size))
    for split in splits:
        split.install()


class _Piece(NamedTuple):
    """How a parameter is kept, and what the worker takes of what is kept here."""

    placement: Placement
    take: Callable[[Tensor], Tensor]


class _Worker(nn.Module):
    """What `functional_call` calls: any method of the worker."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, method: str, *args, **kwargs) -> Any:
        return getattr(self.module, method)(*args, **kwargs)


class _Split:
    """A layer whose methods run on this rank's share of it. place: of a mixer, which of the model's layers it is."""

    def __init__(self, layer: Any, config: Config, mesh: DeviceMesh, dim: int, *place: int):
        self.layer, self.mesh, self.group, self.n = layer, mesh, mesh.get_group(), mesh.size()
        share, self.heads, self.joined = _share(config, dim, self.n)
        with torch.device("meta"):  # only its methods and shapes are used
            self.worker = _Worker(share.build(dim, *place))
        slim = _tensors(self.worker.module)
        self.pieces = {name: self._piece(name, whole, slim[name]) for name, whole in _tensors(layer).items()}
        self.copies = [name for name, _ in layer.named_parameters() if self.pieces[name].placement.is_replicate()]

    def install(self) -> None:
        for name, p in list(self.layer.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            # the same values are here already: nothing is sent
            spread = distribute_tensor(p.detach(), self.mesh, [self.pieces[name].placement], src_data_rank=None)
            setattr(self.layer.get_submodule(owner), leaf, nn.Parameter(spread, p.requires_grad))
        self.layer.forward = self._forward
        if hasattr(self.layer, "distraction"):
            self.layer.distraction = self._mean_over_heads

    def _forward(self, x: Tensor, *args, **kwargs) -> Any:
        """The layer's forward: y, or y and a state."""
        out = self._run("forward", x, *args, **kwargs)
        return (_Sum.apply(self.group, out[0]), *out[1:]) if isinstance(out, tuple) else _Sum.apply(self.group, out)

    def _mean_over_heads(self, x: Tensor, *args, **kwargs) -> Tensor:
        return _Sum.apply(self.group, self._run("distraction", x, *args, **kwargs) / self.n)

    def _run(self, method: str, x: Tensor, *args, **kwargs) -> Any:
        held = {name: p.to_local() for name, p in self.layer.named_parameters()}
        x, *copies = _Shared.apply(self.group, x, *(held[name] for name in self.copies))
        held |= dict(zip(self.copies, copies, strict=True)) | dict(self.layer.named_buffers())
        slices = {f"module.{name}": piece.take(held[name]) for name, piece in self.pieces.items()}
        return functional_call(self.worker, slices, (method, x, *args), kwargs)

    def _piece(self, name: str, whole: Tensor, slim: Tensor) -> _Piece:
        axes = [axis for axis, (a, b) in enumerate(zip(whole.shape, slim.shape, strict=True)) if a != b]
        owner, _, leaf = name.rpartition(".")
        if not axes:
            added = leaf == "bias" and isinstance(self.layer.get_submodule(owner), OutProjection | ZeroProjection)
            return _Piece(Replicate(), (lambda p: p / self.n) if added else (lambda p: p))
        (axis,) = axes
        parts = self.joined.get(name, [whole.shape[axis]])
        if len(parts) == 1 and parts[0] > self.heads and isinstance(whole, nn.Parameter):
            return _Piece(Shard(axis), lambda p: p)
        rank = self.mesh.get_local_rank()
        own = lambda p: torch.cat([part.chunk(self.n, axis)[rank] for part in p.split(parts, axis)], axis)
        return _Piece(Replicate(), own)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _share(config: Config, dim: int, n: int) -> tuple[Any, int, dict[str, list[int]]]:
    """The config of a worker; the most heads of any kind; the parameters that are several axes in one, with their sizes."""
    for part in _parts(config):
        if isinstance(part, FixedGate | Alibi):
            raise ValueError(
                f"tensor: {config.kind} has a part {part.kind}, whose heads differ by their number: {n} ranks cannot share them"
            )
    match config:
        case Recurrent():
            H, HV, R = config.heads, config.value_heads or config.heads, config.write.write_rank
            parts = [H * config.key_dim, H * R * config.key_dim, HV * R * config.value_dim]
            joined = {f"conv.{name}": parts for name in ("weight", "bias")}
            return _divided(config, n, heads=H, value_heads=HV), max(H, HV), joined
        case Attention():
            Hq, Hkv, d = config.heads, config.kv_heads or config.heads, config.head_dim
            joined = {f"conv.{name}": [Hq * d, Hkv * d, Hkv * d] for name in ("weight", "bias")}
            return _divided(config, n, heads=Hq, kv_heads=Hkv), Hq, joined
        case GatedConv():
            C = config.channels or dim
            return _divided(config, n, channels=C), 0, {f"in_proj.{name}": [C, C, C] for name in ("weight", "bias")}
        case Mamba3():
            H, G, R, N = config.heads, config.groups, config.rank, config.key_dim
            if G == 1:  # shared by the heads of all ranks
                return _divided(config, n, heads=H), H, {}
            rows = {f"{name}_proj.weight": [G * N] * R for name in "bc"}
            return _divided(config, n, heads=H, groups=G), H, rows
        case SwiGLU():
            return _divided(config, n, hidden=config.hidden), 0, {}
        case SquaredReLU():
            halves = [config.hidden, config.hidden]
            return _divided(config, n, hidden=config.hidden), 0, {"fc.weight": halves, "fc.bias": halves}
    raise ValueError(f"tensor: {config.kind} has no heads that {n} ranks could share")


def _divided(config: Config, n: int, **counts: int) -> Config:
    for name, count in counts.items():
        if count % n:
            raise ValueError(f"tensor: {config.kind} has {name} = {count}, which {n} ranks cannot share evenly")
    return dataclasses.replace(config, **{name: count // n for name, count in counts.items()})


def _parts(config: Config) -> Iterator[Config]:
    """The config and all inside it."""
    yield config
    for field in dataclasses.fields(config):
        if isinstance(inner := getattr(config, field.name), Config):
            yield from _parts(inner)


class _Shared(Function):
    """What all ranks read alike: the identity; gradients are summed over ranks, those of one dtype (but x's) in one message."""

    @staticmethod
    def forward(ctx, group: ProcessGroup, x: Tensor, *copies: Tensor):
        ctx.group = group
        return x.view_as(x), *(p.view_as(p) for p in copies)

    @staticmethod
    def backward(ctx, dx: Tensor, *gradients: Tensor):  # pyrefly: ignore[bad-override] (torch passes as many as outputs)
        if ctx.needs_input_grad[1]:
            dx = _summed(dx, ctx.group)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in gradients:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        flat = {dtype: _summed(torch.cat([g.flatten() for g in some]), ctx.group) for dtype, some in by_dtype.items()}
        pieces = {dtype: iter(flat[dtype].split([g.numel() for g in some])) for dtype, some in by_dtype.items()}
        return None, dx, *(next(pieces[g.dtype]).view(g.shape) for g in gradients)


class _Sum(Function):
    """The sum over ranks; every rank has its gradient."""

    @staticmethod
    def forward(ctx, group: ProcessGroup, y: Tensor):
        return _summed(y, group)

    @staticmethod
    def backward(ctx, dy: Tensor):  # pyrefly: ignore[bad-override] (torch passes as many as outputs)
        return None, dy


def _summed(x: Tensor, group: ProcessGroup) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x
