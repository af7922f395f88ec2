"""The training loop: steps, a log and checkpoints in a directory, stopped and resumed, on one rank or many.

Knows the order of things: resume, step, log, checkpoint. Leaves to others: what a step does (`step.py`), what the model minimises,
where batches come from, what progress looks like, who asks it to stop.

Everything that a step depends on is the step's number (its batches, its learning rate) or in the checkpoint (weights, optimiser
states, PyTorch's generators). So a resumed run is bit-equal to one that never stopped, wherever the same operations
on the same numbers are: on one CPU thread, for one.

The host waits for the device once a step, for a handful of numbers. By then the next step's batches are there and the optimiser
is launched, which moves no weight unless the loss and the gradient are sound (`update.py`).
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from . import metadata
from .checkpoint import Checkpoints, latest
from .config import TrainConfig
from .feed import feed
from .guard import States, Watch
from .lock import alone
from .log import Log, Silence, peak_memory, summary_writer
from .losses import Batch, Criterion, of_logits
from .sequence_parallel import StatePassing
from .shard import prepare
from .state import Run
from .step import Stepper
from .world import World


@dataclass(frozen=True, kw_only=True)
class Progress:
    """After a step: `step` of `steps` are done. tokens, seconds: of the whole run; tokens_per_second: over the last 20 steps. extra: what
    was logged of it beside these."""

    step: int
    steps: int
    loss: float
    tokens: int
    seconds: float
    tokens_per_second: float
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Result:
    """losses: of every step since the first, resumed or not; skipped: the steps that were not taken (1 is the first).

    tokens, seconds: likewise of the whole run. tokens_per_second: over its last 20 steps, so without what the first ones compile;
    over all of them if none was left to take. stopped: before the last step.
    """

    losses: tuple[float, ...]
    tokens: int
    seconds: float
    tokens_per_second: float
    stopped: bool
    skipped: tuple[int, ...] = ()


def train(
    model: nn.Module,
    batch: Callable[[int], Batch],
    config: TrainConfig,
    directory: str | Path,
    *,
    losses: Criterion = of_logits,
    recipe: Mapping[str, Any] | None = None,
    on_step: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    world: World | None = None,
    states: States | None = None,
) -> Result:
    """Trains `model` in place, from the newest whole checkpoint in `directory` if there is one.

    Step s (0 is the first) descends on the mean cross entropy over all counted labels of its `config.accumulate` batches, and
    on what `losses` adds to it.

    model: the same weights on every rank. On one rank it stays on its device; on several it is moved and sharded.
    batch: a pure function of its number, see `TrainConfig.accumulate`; the whole batch on every rank, which takes its part.
    losses: losses(model, piece) -> `Losses`; the default takes model(input_ids [B T]) -> logits [B T vocabulary].
    directory: takes the checkpoints, log.jsonl (step, loss, lr, grad_norm, tokens, seconds, memory in bytes, what `losses` adds;
        lr is the first group's, the other groups' are proportional) and ran.json. Ranks on several hosts share it. It is made after
        the model and the optimisers, and locked during the training.
    recipe: whatever else fixes the run (the model's config, the data's), JSON-ready; kept in each checkpoint and compared.
    on_step: called after every step. It must leave PyTorch's generators and the model's mode as they were.
    stop: asked before every step; True on any rank ends the run with a checkpoint.
    world: `World.open(config.parallel)`'s; None opens it.
    states: looks at the model's states, as `Guard.state_every` asks, on one rank; the largest is logged, as state and state_of.
    Raises NonFiniteLoss, Spike or GrowingState (see `Guard`); InUse if another process trains there; CheckpointError if a checkpoint cannot
    be written, all are damaged, or the newest one is of another config; ValueError for a step without a single counted label, a batch that
    ranks cannot share, or a directory that they do not.
    """
    world = World.open(config.parallel) if world is None else world
    directory = Path(directory)
    fingerprint = config.resume_fingerprint() | {"recipe": dict(recipe or {})}
    if config.tensorboard:
        summary_writer()  # asked now: what cannot be is refused before anything is written
    prepare(model, config, world)
    run = Run(model, config.optim.build(model.named_parameters()), world)
    run.seed(config.seed)
    state_passing = StatePassing(world.mesh["sequence"]) if world.mesh is not None and world.sequence > 1 else None
    watch = Watch(config.guard)
    read = partial(feed, batch, accumulate=config.accumulate, world=world, state_passing=state_passing, device=run.device)

    world.share(directory)
    background = world.mesh is not None or run.device.type == "cuda"
    with ExitStack() as held, Checkpoints(directory, fingerprint, config.keep, world, background) as checkpoints:
        stepper = Stepper(run, config, losses, watch, state_passing, read, checkpoints.wait, states)
        world.agree(lambda: held.enter_context(alone(directory)))
        last = checkpoints.last = world.agree(lambda: latest(directory, fingerprint))
        same_ranks = True
        if last:
            same_ranks = run.restore(last, checkpoints.group)
            if not same_ranks:
                run.seed(config.seed)
            for step, numbers in enumerate(zip(run.losses, run.norms, strict=True), 1):
                watch.skipped() if step in run.skipped else watch.took(*numbers)
        if world.is_first:
            described = asdict(config) | {"recipe": dict(recipe or {})}
            metadata.write(directory / "ran.json", described, world, run.device, last)
        model.train()
        model.zero_grad()
        recent = deque([(run.tokens, run.seconds)], maxlen=21)
        saved = run.step  # what no step was taken from is no checkpoint

        with Log(directory, run.step, config.tensorboard) if world.is_first else Silence() as log:
            if not same_ranks:
                log.write(step=run.step, note=f"{world.ranks} ranks now: PyTorch's generators start anew")
            while run.step < config.steps and not world.any(stop()):
                began = time.perf_counter()
                step = stepper.take()
                run.losses.append(step.loss)
                run.norms.append(step.norm)
                run.tokens += step.tokens
                run.seconds += time.perf_counter() - began
                recent.append((run.tokens, run.seconds))
                if not step.applied or run.step % config.log_every == 0 or run.step == config.steps:
                    log.write(
                        step=run.step, loss=step.loss, lr=run.groups[0]["lr"], grad_norm=step.norm, tokens=run.tokens,
                        seconds=run.seconds, memory=peak_memory(run.device), **step.extra,
                    )  # fmt: skip
                if run.step % config.checkpoint_every == 0:
                    log.sync()
                    checkpoints.save(run.step, run.state())
                    saved = run.step
                if on_step:
                    on_step(
                        Progress(
                            step=run.step,
                            steps=config.steps,
                            loss=step.loss,
                            tokens=run.tokens,
                            seconds=run.seconds,
                            tokens_per_second=_rate(recent),
                            extra=step.extra,
                        )
                    )
            if saved != run.step:
                log.sync()
                checkpoints.save(run.step, run.state())
    world.barrier()  # the last checkpoint has its name before any rank goes on
    return Result(
        losses=tuple(run.losses),
        tokens=run.tokens,
        seconds=run.seconds,
        tokens_per_second=_rate(recent) if len(recent) > 1 else run.tokens / max(run.seconds, 1e-9),
        stopped=run.step < config.steps,
        skipped=tuple(run.skipped),
    )


def _rate(recent: deque[tuple[int, float]]) -> float:
    (tokens, seconds), (tokens_now, seconds_now) = recent[0], recent[-1]
    return (tokens_now - tokens) / (seconds_now - seconds)
