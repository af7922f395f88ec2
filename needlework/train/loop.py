"""The training loop: step after step into a directory, stopped and resumed without a trace.

Knows the order of things: batch, loss, check, clip, step, log, checkpoint. Leaves to others: what the model is, where batches
come from, gradient checkpointing (the model's), what progress looks like, who asks it to stop.

Everything that a step depends on is the step's number (its batches, its learning rate) or in the checkpoint (weights, optimiser
states, PyTorch's generators). So a resumed run is bit-equal to one that never stopped, wherever the same operations
on the same numbers are: on one CPU thread, for one.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from . import checkpoint
from .config import TrainConfig
from .log import Log

IGNORE = -100  # a label that is not counted


class Batch(Protocol):
    """input_ids, labels [B T] int64: labels[b, t] is the token to predict after input_ids[b, : t + 1]; -100 where not counted."""

    input_ids: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class Progress:
    """After a step: `step` of `steps` are done. tokens, seconds: of the whole run; tokens_per_second: over the last 20 steps."""

    step: int
    steps: int
    loss: float
    tokens: int
    seconds: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """losses: of every step since the first, resumed or not. tokens, seconds: likewise. stopped: before the last step."""

    losses: tuple[float, ...]
    tokens: int
    seconds: float
    stopped: bool


class NonFiniteLoss(ArithmeticError):
    """The loss or its gradient at `step` (1 is the first) is NaN or infinite; the weights have not been touched by it."""

    def __init__(self, step: int, loss: float, grad_norm: float, last: Path | None):
        self.step, self.loss, self.grad_norm, self.last = step, loss, grad_norm, last
        kept = f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
        super().__init__(f"step {step}: loss {loss}, gradient norm {grad_norm}; stopped before the optimiser's step; {kept}")

    def __reduce__(self):  # so that it crosses from one process to another
        return type(self), (self.step, self.loss, self.grad_norm, self.last)


def train(
    model: nn.Module,
    batch: Callable[[int], Batch],
    config: TrainConfig,
    directory: str | Path,
    *,
    recipe: Mapping[str, Any] | None = None,
    on_step: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Trains `model` in place, from the newest whole checkpoint in `directory` if there is one.

    Step s (0 is the first) descends on the mean cross entropy over all counted labels of its `config.accumulate` batches.

    model: model(input_ids [B T]) -> logits [B T vocabulary], or an object with `.logits`; on the device it shall stay on.
    batch: a pure function of its number, see `TrainConfig.accumulate`.
    directory: takes the checkpoints and log.jsonl (step, loss, lr, grad_norm, tokens, seconds; lr is the first group's, the
        other groups' are proportional).
    recipe: whatever else fixes the run (the model's config, the data's), JSON-ready; kept in each checkpoint and compared.
    on_step: called after every step. It must leave PyTorch's generators and the model's mode as they were.
    stop: asked before every step; True ends the run with a checkpoint.
    Raises NonFiniteLoss; CheckpointError if a checkpoint cannot be written, all are damaged, or the newest one is of another
    config; ValueError for a step without a single counted label.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    described = asdict(config) | {"recipe": dict(recipe or {})}
    torch.manual_seed(config.seed)
    run = _Run(model, config.optim.build(model.named_parameters()))
    peaks = [group["lr"] for group in run.groups]
    last = checkpoint.latest(directory, described)
    if last:
        run.restore(last)
    model.train()
    model.zero_grad()
    recent = deque([(run.tokens, run.seconds)], maxlen=21)
    saved = run.step if last else -1

    with Log(directory / "log.jsonl", run.step) as log:

        def save() -> tuple[int, Path]:
            log.sync()
            return run.step, checkpoint.save(directory, run.step, run.state(), described, config.keep)

        while run.step < config.steps and not stop():
            began = time.perf_counter()
            batches = [batch(run.step * config.accumulate + i) for i in range(config.accumulate)]
            multiplier = config.schedule.multiplier(run.step, config.steps)
            for group, peak in zip(run.groups, peaks, strict=True):
                group["lr"] = peak * multiplier
            loss = _backward(model, batches, config.autocast, run.step)
            norm = clip_grad_norm_(model.parameters(), config.clip).item()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise NonFiniteLoss(run.step + 1, loss, norm, last)
            for optimizer in run.optimizers:
                optimizer.step()
            model.zero_grad()

            run.step += 1
            run.losses.append(loss)
            run.tokens += sum(b.input_ids.numel() for b in batches)
            run.seconds += time.perf_counter() - began
            recent.append((run.tokens, run.seconds))
            if run.step % config.log_every == 0 or run.step == config.steps:
                lr = run.groups[0]["lr"]
                log.write(step=run.step, loss=loss, lr=lr, grad_norm=norm, tokens=run.tokens, seconds=run.seconds)
            if run.step % config.checkpoint_every == 0:
                saved, last = save()
            if on_step:
                on_step(
                    Progress(
                        step=run.step,
                        steps=config.steps,
                        loss=loss,
                        tokens=run.tokens,
                        seconds=run.seconds,
                        tokens_per_second=_rate(recent),
                    )
                )
        if saved != run.step:
            save()
    return Result(losses=tuple(run.losses), tokens=run.tokens, seconds=run.seconds, stopped=run.step < config.steps)


def _backward(model: nn.Module, batches: list[Batch], autocast: str | None, step: int) -> float:
    """Adds the gradient of the mean cross entropy over all counted labels of `batches` to the model's; returns the mean."""
    counted = sum(int((b.labels != IGNORE).sum()) for b in batches)
    if not counted:
        raise ValueError(f"step {step + 1}: labels: all are {IGNORE}, there is nothing to learn from")
    device = next(model.parameters()).device
    losses = []
    for b in batches:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast == "bf16"):
            output = model(b.input_ids.to(device))
        logits = getattr(output, "logits", output).flatten(0, 1)  # [B·T vocabulary]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        labels = b.labels.to(device).flatten()
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum") / counted
        loss.backward()
        losses.append(loss.detach())
    return math.fsum(loss.item() for loss in losses)


def _rate(recent: deque[tuple[int, float]]) -> float:
    (tokens, seconds), (tokens_now, seconds_now) = recent[0], recent[-1]
    return (tokens_now - tokens) / (seconds_now - seconds)


@dataclass
class _Run:
    """All that changes from step to step."""

    model: nn.Module
    optimizers: list[Optimizer]
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)

    @property
    def groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optim": [optimizer.state_dict() for optimizer in self.optimizers],
            "rng": torch.get_rng_state(),
            "rng_cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "losses": torch.tensor(self.losses, dtype=torch.float64),
        }

    def restore(self, path: Path):
        state = checkpoint.load(path)
        try:
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optim"], strict=True):
                optimizer.load_state_dict(saved)
        except (RuntimeError, ValueError) as error:
            raise checkpoint.CheckpointError(f"{path} is of another model: {error}") from error
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.losses = state["losses"].tolist()
        torch.set_rng_state(state["rng"])
        if self.device.type == "cuda" and state["rng_cuda"] is not None:
            torch.cuda.set_rng_state(state["rng_cuda"], self.device)
