"""Sequence parallelism: one sequence in contiguous segments over the ranks of a mesh axis, by passing every layer's state on.

    rank r:   state ← rank r−1,   x, state ← block(x, state),   state → rank r+1        layer after layer

No mixer knows of it: the ranks pass on the state that a mixer returns (S, a convolution's last inputs, pages of keys and values),
and its gradient comes back the same way. While rank 1 is in layer 1, rank 0 is in layer 2: the ranks are a wavefront, and a
pass over L layers takes (L + P − 1)/L of what P ranks would take that need not wait.

Order is all that keeps messages apart. Forward, both ends of a link go through the layers upwards. Backward, autograd runs nodes
by falling sequence number: of those that have not run, the one made last feeds none of the others, so it is ready and is taken.
Nodes are made layer by layer, so both ends go through the layers downwards. For that, each layer's two nodes must be in the
graph whenever autograd records: both have an input that requires a gradient (`_anchor`), and what arrived is an input of the
node that `send` makes, whether or not the block has read it.

Attention costs more this way than a recurrence. Its pages are passed on whole, so rank r gets the keys and values of r segments, and
its scores are (r + ½)/(P/2) of the mean: the last rank works up to twice as long. Gathering keys and values on all ranks
instead would send them to the ranks before as well, leave the scores as uneven, and need a form of its own for every attend
rule; LUCID's solved values depend on all values before, so every rank would solve for the whole sequence. With a window the
pages are the window, and nothing of this holds.

Parameters are the same on all ranks of the axis. Do not shard them over it (`fully_shard` along the other axes alone): a gather
that waits for all ranks would end the wavefront, or wait for ever. `sum_gradients` adds the gradients after the backward.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from needlework.layers.state import map_state


class StatePassing:
    """What a model calls around each block (`models/block.py: StatePassing`), on one rank of the axis that splits the sequence.

    One for each model. mesh: that axis alone, e.g. `mesh["sequence"]`; messages are point to point in its group, gloo or NCCL.
    All segments of a sequence are of one length, which `segment` sees to. Raises ValueError for a mesh of several axes.
    """

    def __init__(self, mesh: DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(
                f"sequence parallelism: the mesh has axes {mesh.mesh_dim_names}, expected the one that splits the sequence"
            )
        self.group, self.rank, self.size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self._forms: dict[tuple, _Form] = {}  # of states that arrive and leave, by layer and shape of x
        self._sent: list[tuple[dist.Work | None, Tensor]] = []  # sends that may not be complete
        self._arrived: list[Tensor] = []  # this layer's state, between `receive` and `send`

    def segment(self, x: Tensor) -> Tensor:
        """This rank's columns of x [B T ...]: [B T/P ...]. ValueError if P does not divide T."""
        T = x.shape[1]
        if T % self.size:
            raise ValueError(f"sequence parallelism: {T} tokens do not make {self.size} equal segments")
        return x.tensor_split(self.size, 1)[self.rank]

    def receive(self, layer: int, x: Tensor) -> object:
        """The state of `layer` after the tokens before x [B T/P D], differentiable; None on the first rank."""
        if layer == 0:
            self._settle()
        if self.rank == 0:
            return None
        key = _key("arrives", layer, x)
        if key not in self._forms:
            box: list[Any] = [None]
            dist.recv_object_list(box, group=self.group, group_src=self.rank - 1)
            self._forms[key] = box[0]
        form = self._forms[key]
        if form.x != x.shape:
            raise ValueError(
                f"sequence parallelism: rank {self.rank} holds a segment {list(x.shape)}, the rank before {list(form.x)}: expected equal ones"
            )
        numbers = [self._take(n, dtype, x.device, self.rank - 1) for dtype, n in form.sizes.items()]
        self._arrived = list(_Receive.apply(self, _anchor(), *numbers)) if numbers else []
        return form.unpack(self._arrived, x.device)

    def send(self, layer: int, x: Tensor, state: object) -> Tensor:
        """Passes the state of `layer` after x on to the next rank, if there is one; returns x, tied to the state's gradient."""
        arrived, self._arrived = self._arrived, []
        leaving = []
        if self.rank < self.size - 1:
            form = _Form.of(x, state)
            key = _key("leaves", layer, x)
            if key not in self._forms:
                dist.send_object_list([form], group=self.group, group_dst=self.rank + 1)
                self._forms[key] = form
            if self._forms[key].sizes != form.sizes:
                raise RuntimeError(
                    f"sequence parallelism: layer {layer}'s state is {form.sizes}, was {self._forms[key].sizes} for an x of the same shape"
                )
            leaving = form.pack(state)
        return _Send.apply(self, _anchor(), x, len(leaving), *leaving, *arrived) if leaving or arrived else x

    def sum_gradients(self, parameters: Iterable[Parameter]) -> None:
        """Adds the gradients of all ranks, in place, None as zeros: after a step's last backward, before clipping."""
        self._settle()
        gradients = []
        for p in parameters:
            if p.requires_grad:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                gradients.append(p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad)
        for work in [dist.all_reduce(gradient, group=self.group, async_op=True) for gradient in gradients]:
            if work is not None:
                work.wait()

    def _give(self, numbers: Tensor, to: int) -> None:
        """Does not wait: the other end may not be there yet."""
        numbers = numbers.detach().contiguous()
        self._sent.append((dist.isend(numbers, group=self.group, group_dst=to), numbers))

    def _take(self, n: int, dtype: torch.dtype, device: torch.device, source: int) -> Tensor:
        numbers = torch.empty(n, dtype=dtype, device=device)
        dist.recv(numbers, group=self.group, group_src=source)
        return numbers

    def _settle(self) -> None:
        for work, _ in self._sent:
            if work is not None:
                work.wait()
        self._sent.clear()


class _Form(NamedTuple):
    """How a state looks: the same, of meta tensors, for an x of this shape."""

    x: torch.Size
    state: object

    @staticmethod
    def of(x: Tensor, state: object) -> "_Form":
        return _Form(x.shape, map_state(state, lambda part: torch.empty(part.shape, dtype=part.dtype, device="meta")))

    @property
    def sizes(self) -> dict[torch.dtype, int]:
        """How many numbers of each dtype; one message each."""
        total: dict[torch.dtype, int] = {}
        for part in _parts(self.state):
            total[part.dtype] = total.get(part.dtype, 0) + part.numel()
        return {dtype: n for dtype, n in total.items() if n}

    def pack(self, state: object) -> list[Tensor]:
        """One flat tensor for each of `sizes`."""
        parts = _parts(state)
        return [torch.cat([part.flatten() for part in parts if part.dtype == dtype]) for dtype in self.sizes]

    def unpack(self, numbers: list[Tensor], device: torch.device) -> object:
        """The state that was packed."""
        parts = _parts(self.state)
        pieces = {n.dtype: iter(n.split([part.numel() for part in parts if part.dtype == n.dtype])) for n in numbers}

        def filled(part: Tensor) -> Tensor:
            if part.dtype not in pieces:  # only empty tensors have it
                return torch.empty(part.shape, dtype=part.dtype, device=device)
            return next(pieces[part.dtype]).view(part.shape)

        return map_state(self.state, filled)


def _key(end: str, layer: int, x: Tensor) -> tuple:
    """What a state's form depends on: both ends of a link see the same."""
    return end, layer, x.shape, x.dtype, torch.is_autocast_enabled(x.device.type)


def _parts(state: object) -> list[Tensor]:
    parts = []
    map_state(state, parts.append)
    return parts


def _anchor() -> Tensor:
    return torch.zeros((), requires_grad=True)


class _Receive(Function):
    """What arrived; its gradient goes back to the rank before. Lengths and positions have none."""

    @staticmethod
    def forward(ctx, state_passing: StatePassing, anchor: Tensor, *numbers: Tensor):
        numbers = tuple(n.view_as(n) for n in numbers)
        ctx.state_passing, ctx.floating = state_passing, [n.is_floating_point() for n in numbers]
        ctx.mark_non_differentiable(*(n for n in numbers if not n.is_floating_point()))
        return numbers

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        for gradient, floating in zip(gradients, ctx.floating, strict=True):
            if floating:
                ctx.state_passing._give(gradient, ctx.state_passing.rank - 1)
        return None, None, *[None] * len(gradients)


class _Send(Function):
    """x, once the first `count` of `numbers` are on their way; their gradient comes from the next rank."""

    @staticmethod
    def forward(ctx, state_passing: StatePassing, anchor: Tensor, x: Tensor, count: int, *numbers: Tensor):
        ctx.state_passing = state_passing
        ctx.numbers = [(n.numel(), n.dtype, n.device) if n.is_floating_point() else None for n in numbers[:count]]
        ctx.numbers += [None] * (len(numbers) - count)
        for n in numbers[:count]:
            state_passing._give(n, state_passing.rank + 1)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # pyrefly: ignore[bad-override] (torch passes as many as outputs)
        back = [None if form is None else ctx.state_passing._take(*form, ctx.state_passing.rank + 1) for form in ctx.numbers]
        return None, None, gradient, None, *back
