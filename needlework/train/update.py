"""A step's end: its numbers, on their way to the host, and the optimisers that they let move.

Whether a step is to be taken is known on the device when its backward ends; the host hears of it later, and launching an optimiser
takes it milliseconds more. So what can decide on the device is launched before the host has read anything.
"""

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from . import gradient
from .guard import Limits
from .losses import Addends
from .world import World


class Read(NamedTuple):
    """A step's numbers on the host. losses: each micro-batch's part of the loss."""

    norm: float
    loss: float
    parts: dict[str, float]
    losses: list[float]


class Numbers:
    """‖g‖², the loss, the parts that are logged and each micro-batch's part of the loss: of all ranks, in float64 on the device."""

    def __init__(self, model: nn.Module, found: Addends, world: World):
        self.names = list(found.parts)
        means = torch.stack([gradient.squared_norm(model, world), found.cross_entropy.sum(), *found.parts.values()])
        numbers = torch.cat([means, found.cross_entropy])
        numbers[1:] /= world.tensor  # whose ranks hold the same tokens
        self.there = world.sum_(numbers)
        cuda = self.there.is_cuda
        self.here = torch.empty(self.there.shape, dtype=self.there.dtype, pin_memory=cuda)
        self.here.copy_(self.there, non_blocking=True)
        self.copied = torch.cuda.current_stream(self.there.device).record_event() if cuda else None

    def read(self) -> Read:
        """The host waits here, for the backward and not for what was launched since."""
        if self.copied is not None:
            self.copied.synchronize()
        square, loss, *rest = self.here.tolist()
        count = len(self.names)
        return Read(math.sqrt(square), loss, dict(zip(self.names, rest[:count], strict=True)), rest[count:])


class Update:
    """The optimisers' steps on the gradient clipped to `clip`, or none of them.

    A fused optimiser takes what `torch.amp.GradScaler` gives it: a number to divide the gradient by, and one that is 1 where the
    step is not to be taken. It is launched by `begin`; the others wait for `finish`.
    """

    def __init__(self, optimizers: list[Optimizer], clip: float):
        takes = lambda optimizer: getattr(optimizer, "_step_supports_amp_scaling", False)
        self.early = [optimizer for optimizer in optimizers if takes(optimizer)]
        self.late = [optimizer for optimizer in optimizers if not takes(optimizer)]
        self.clip = clip

    def begin(self, numbers: Numbers, limits: Limits) -> None:
        """Launch what decides on the device: moves nothing where the loss or the norm is over its limit, or not finite."""
        if not self.early:
            return
        norm, loss = numbers.there[0].sqrt(), numbers.there[1]
        sound = (loss <= limits.loss) & (norm <= limits.norm)  # a NaN is not
        divisor = ((norm + 1e-6) / self.clip).clamp(min=1).float()
        for optimizer in self.early:
            optimizer.grad_scale, optimizer.found_inf = divisor, (~sound).float()
            optimizer.step()

    def finish(self, norm: float) -> None:
        """The others' steps, of a gradient that the host knows to be sound."""
        for optimizer in self.late:
            gradient.clip_([p for group in optimizer.param_groups for p in group["params"]], norm, self.clip)
            optimizer.step()
