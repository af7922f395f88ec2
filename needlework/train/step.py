"""One optimiser step: batch, gradient, verdict, update. The weights move only if the loss and the gradient are sound.

The next step's batches are read while the device works on this one.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from needlework.layers.state import Peak

from .config import TrainConfig
from .feed import Feed
from .guard import GrowingState, States, Watch, blame, described, largest, look
from .losses import Criterion, backward, losses_of
from .sequence_parallel import StatePassing
from .state import Run
from .update import Numbers, Update
from .world import World


class Done(NamedTuple):
    """A step that is over. tokens: its training tokens. extra: what is logged beside the rest. applied: the optimisers took it."""

    loss: float
    norm: float
    tokens: int
    extra: dict[str, Any]
    applied: bool


class Stepper:
    """Takes the steps of `run`. It counts the step and notes one that is not applied; the loop keeps the rest of the history.

    read: read(step) gives the step's `Feed`. last_checkpoint: the checkpoint from which an aborted run is resumed. states: looks at a
    model's states, where the guard asks for it; None where the model has none to look at.
    """

    def __init__(
        self,
        run: Run,
        config: TrainConfig,
        losses: Criterion,
        watch: Watch,
        state_passing: StatePassing | None,
        read: Callable[[int], Feed],
        last_checkpoint: Callable[[], Path | None],
        states: States | None = None,
    ):
        self.run, self.config, self.losses, self.watch, self.state_passing = run, config, losses, watch, state_passing
        self.read, self.last_checkpoint, self.states = read, last_checkpoint, states
        self.peaks = [group["lr"] for group in run.groups]
        self.update = Update(run.optimizers, config.clip)
        self.ready: Feed | None = None

    def take(self) -> Done:
        """The next step. Raises NonFiniteLoss or Spike if it is bad and no more steps may be skipped, GrowingState for a state over the
        guard's bound."""
        run, config, model, world = self.run, self.config, self.run.model, self.run.world
        feed = self.ready or self.read(run.step)
        seen = self._look(feed) if config.guard.looks(run.step) else {}
        for group, peak in zip(run.groups, self.peaks, strict=True):
            group["lr"] = peak * config.schedule.multiplier(run.step, config.steps)
        found = backward(model, self.losses, feed.pieces, feed.counted, world.parts, config.autocast)
        if self.state_passing is not None:
            self.state_passing.sum_gradients(model.parameters())
        numbers = Numbers(model, found, world)
        self.update.begin(numbers, self.watch.limits())
        self.ready = self.read(run.step + 1) if run.step + 1 < config.steps else None
        norm, loss, extra, entropies = numbers.read()

        run.step += 1
        bad = self.watch.verdict(loss, norm)
        if bad is None:
            self.update.finish(norm)
        else:
            kind, why = bad
            where = f"{why}; {_blame(model, self.losses, config, feed, entropies, world)}{self._grown(feed)}"
            if self.watch.over():
                raise kind(run.step, loss, norm, where, self.last_checkpoint())
            run.skipped.append(run.step)
            extra |= {"skipped": where}
        model.zero_grad()
        return Done(loss, norm, feed.tokens, extra | seen, bad is None)

    def _look(self, feed: Feed) -> dict[str, Any]:
        """What is logged of the states on the step's first rows. Raises GrowingState for one over the guard's bound."""
        peak = self._peak(feed, 0)
        if peak is None:
            return {}
        if self.config.guard.state is not None and not peak.norm <= self.config.guard.state:
            where = f"{described(peak)}, more than {self.config.guard.state:g}, on batch {feed.numbers[0]}"
            raise GrowingState(self.run.step + 1, math.nan, math.nan, where, self.last_checkpoint())
        return {"state": peak.norm, "state_of": peak.layer}

    def _grown(self, feed: Feed) -> str:
        """After a bad step: the largest state on any of its rows, in words."""
        peaks = [peak for i in range(len(feed.pieces)) if (peak := self._peak(feed, i)) is not None]
        return "".join(f", {described(peak)}" for peak in [largest(peaks)] if peak is not None)

    def _peak(self, feed: Feed, part: int) -> Peak | None:
        """On one part of the step's rows; None where the model is spread over ranks or has no states to look at."""
        if self.states is None or self.run.world.mesh is not None:
            return None
        ids = feed.pieces[part].input_ids
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.config.autocast == "bf16"):
            return look(self.run.model, self.states, ids)


def _blame(model: nn.Module, losses: Criterion, config: TrainConfig, feed: Feed, entropies: list[float], world: World) -> str:
    again = partial(losses_of, model, losses, autocast=config.autocast)
    passes = {n: partial(again, piece) for n, piece in zip(feed.numbers, feed.pieces, strict=True)}
    return blame(model, passes, entropies, world)
