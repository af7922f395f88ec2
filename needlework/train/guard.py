"""The guard: finds steps whose loss or gradient is not finite, or leaps, before the optimiser applies them, and their cause; and states
that grow, before a loss shows it."""

import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from needlework.fields import AboveOne, Count, Natural, Positive, fit
from needlework.layers.state import Peak

from . import gradient
from .world import World


@dataclass(frozen=True, kw_only=True)
class Guard:
    """What counts as a bad step, and how many in a row are passed over.

    A loss or gradient norm that is not finite is always bad.
    spike: so is one over `spike` × its running median; None: never.
    window: how many steps the median is over, the last that were taken; no step is a spike before there are so many.
    skip: up to so many bad steps in a row leave the weights as they are and are logged; one more ends the run.
    state: the largest norm that a layer's state may have; one over it ends the run. None: it is not bounded.
    state_every: steps from one look at the states to the next, which are logged; None: only after a bad step.
    Raises ValueError for a spike not above 1, a window below 1, a skip below 0, a state without state_every.

    >>> from needlework.train import Guard
    >>> guard = Guard(spike=4.0, skip=3, state=100.0, state_every=50)
    >>> guard.looks(0), guard.looks(20)
    (True, False)
    """

    spike: AboveOne | None = None
    window: Count = 64
    skip: Natural = 0
    state: Positive | None = None
    state_every: Count | None = None

    def __post_init__(self):
        fit("guard", self)
        if self.state is not None and self.state_every is None:
            raise ValueError(
                f"guard: state is {self.state:g} and state_every is None, expected a number of steps: the states are not looked at"
            )

    def looks(self, step: int) -> bool:
        """Whether the states are looked at before `step`, 0 is the first."""
        return self.state_every is not None and step % self.state_every == 0


class BadStep(ArithmeticError):
    """The loss or the gradient of `step` (1 is the first) is not to be followed; the weights have not been touched by it."""

    def __init__(self, step: int, loss: float, grad_norm: float, where: str, last: Path | None):
        self.step, self.loss, self.grad_norm, self.where, self.last = step, loss, grad_norm, where, last
        kept = (
            f"the last good checkpoint is {last}"
            if last
            else "there is no checkpoint yet: the run may begin anew with another config"
        )
        super().__init__(f"step {step}: {self.measured}{where}; stopped before the optimiser's step; {kept}")

    @property
    def measured(self) -> str:
        return f"loss {self.loss:.6g}, gradient norm {self.grad_norm:.6g}: "

    def __reduce__(self):  # so that it crosses from one process to another
        return type(self), (self.step, self.loss, self.grad_norm, self.where, self.last)


class NonFiniteLoss(BadStep):
    """NaN or infinite."""


class Spike(BadStep):
    """Over `Guard.spike` × the running median."""


class GrowingState(BadStep):
    """Over `Guard.state`. It is seen before the step has a loss."""

    measured = ""


States = Callable[[nn.Module, Tensor], list[Peak]]  # the model, input_ids [B T] -> of each layer with a state its peak


def largest(peaks: list[Peak]) -> Peak | None:
    return max(peaks, key=lambda peak: peak.norm, default=None)


def described(peak: Peak) -> str:
    return f"the state {peak.tensor} of {peak.layer} has the norm {peak.norm:.4g} after {peak.token:,} tokens of row {peak.row}"


def look(model: nn.Module, states: States, input_ids: Tensor) -> Peak | None:
    """The largest state on these rows; uncompiled, and with PyTorch's generators left as they were."""
    with torch.random.fork_rng([input_ids.device] if input_ids.is_cuda else []), torch.compiler.set_stance("force_eager"):
        return largest(states(model, input_ids))


class Limits(NamedTuple):
    """The largest loss and gradient norm that are followed."""

    loss: float
    norm: float


FINITE = Limits(sys.float_info.max, sys.float_info.max)


class Watch:
    """The running medians, and the verdict on a step."""

    def __init__(self, guard: Guard):
        self.guard = guard
        self.taken: deque[tuple[float, float]] = deque(maxlen=guard.window)
        self.in_a_row = 0

    def limits(self) -> Limits:
        """Of the next step."""
        spike = self.guard.spike
        if spike is None or len(self.taken) < self.guard.window:
            return FINITE
        loss, norm = (spike * median(before) for before in zip(*self.taken, strict=True))
        return Limits(loss, norm)

    def verdict(self, loss: float, norm: float) -> tuple[type[BadStep], str] | None:
        """Why a step of this loss and gradient norm is bad; None if it is not, and it then counts as taken."""
        named = ("loss", loss), ("gradient norm", norm)
        for name, value in named:
            if not math.isfinite(value):
                self.skipped()
                return NonFiniteLoss, f"the {name} is {value}"
        for (name, value), limit in zip(named, self.limits(), strict=True):
            if self.guard.spike is not None and value > limit:
                self.skipped()
                usual = limit / self.guard.spike
                return Spike, f"the {name} is {value / usual:.3g} × its running median {usual:.4g}"
        self.took(loss, norm)
        return None

    def took(self, loss: float, norm: float) -> None:
        self.taken.append((loss, norm))
        self.in_a_row = 0

    def skipped(self) -> None:
        self.in_a_row += 1

    def over(self) -> bool:
        """Whether more bad steps have come in a row than may be skipped."""
        return self.in_a_row > self.guard.skip


def blame(model: nn.Module, passes: Mapping[int, Callable[[], object]], losses: list[float], world: World) -> str:
    """Where a bad step comes from: the batch, and the first module whose output is not finite, or the parameter's gradient.

    passes: a forward pass over each micro-batch, by batch number, run again here with every module watched (dropout's masks are
    new ones). losses: theirs. Every rank calls it with the gradients of the step still there.
    """
    causes = []
    worst = max(range(len(losses)), key=lambda i: losses[i] if math.isfinite(losses[i]) else math.inf)
    causes.append(f"batch {list(passes)[worst]} has the {'largest ' * math.isfinite(losses[worst])}loss {losses[worst]:.4g}")
    for index, run in passes.items():
        found = [name for name in world.gather(_first_not_finite(model, run)) if name is not None]
        if found:
            causes.append(f"the first output that is not finite, on batch {index}, is that of {found[0] or 'the model'}")
            break
    sizes = gradient.norms(model, world)
    largest = max(sizes, key=lambda name: sizes[name] if math.isfinite(sizes[name]) else math.inf)
    causes.append(
        f"{'the largest' if math.isfinite(sizes[largest]) else 'not finite'}: the gradient of {largest}, {sizes[largest]:.4g}"
    )
    return ", ".join(causes)


def _first_not_finite(model: nn.Module, run: Callable[[], object]) -> str | None:
    """The name of the first module, inner before outer, whose output holds a NaN or an infinity."""
    found: list[str] = []

    def watch(name: str):
        def hook(module, inputs, output):
            if not found and any(not x.isfinite().all() for x in _tensors(output)):
                found.append(name)

        return hook

    hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    device = next(model.parameters()).device
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.compiler.set_stance("force_eager"),
        ):
            run()
    finally:
        for hook in hooks:
            hook.remove()
        if isinstance(model, FSDPModule):
            model.reshard()  # no backward does, and the next step would run with these weights
    return found[0] if found else None


def _tensors(output: object) -> list[Tensor]:
    """The floating tensors in tuples, lists and dictionaries."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return [x for part in parts for x in _tensors(part)]
