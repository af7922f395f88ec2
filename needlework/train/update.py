"""The end of a step: its loss and norms are copied to the host, and the optimisers step if these are sound.

The device knows when the backward ends whether a step is sound; the host reads it later and needs milliseconds to launch an
optimiser. A fused optimiser decides on the device, so it is launched before the host has read anything.
"""

import math
from typing import Any, NamedTuple

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
        numbers[1:] /= world.tensor  # ranks of one tensor group hold the same tokens
        self.there = world.sum_(numbers)
        cuda = self.there.is_cuda
        self.here = torch.empty(self.there.shape, dtype=self.there.dtype, pin_memory=cuda)
        self.here.copy_(self.there, non_blocking=True)
        self.copied = torch.cuda.current_stream(self.there.device).record_event() if cuda else None

    def read(self) -> Read:
        """Waits for the backward, and not for what was launched since."""
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
        """Launches the fused optimisers. They change no weight if the loss or the norm is over its limit or not finite."""
        if not self.early:
            return
        norm, loss = numbers.there[0].sqrt(), numbers.there[1]
        sound = (loss <= limits.loss) & (norm <= limits.norm)  # a NaN is not
        divisor = ((norm + 1e-6) / self.clip).clamp(min=1).float()
        for optimizer in self.early:
            fused: Any = optimizer  # the base has neither attribute
            fused.grad_scale, fused.found_inf = divisor, (~sound).float()
            optimizer.step()

    def finish(self, norm: float) -> None:
        """Steps the other optimisers, on a gradient that the host knows to be sound."""
        for optimizer in self.late:
            gradient.clip_([p for group in optimizer.param_groups for p in group["params"]], norm, self.clip)
            optimizer.step()
