"""All that fixes a training run besides the model and its batches. Plain data: `dataclasses.asdict` is JSON-ready."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from needlework.fields import Count, Positive, Seed, fit

from .guard import Guard
from .optim import AdamW, Muon
from .schedule import Cooldown, Cosine
from .world import Parallel


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, with what, how often to save; and, in the last four fields, on what, which a resumed run may change.

    steps: optimiser steps.
    seed: of PyTorch's generators (dropout and the like) from the first step on; the model is initialised before.
    optim, schedule: which optimisers, and the multiplier of their learning rates by step.
    clip: bound of the gradients' global L2 norm; math.inf only records the norm.
    accumulate: micro-batches per step. Step s reads batch(s * accumulate) … batch(s * accumulate + accumulate - 1).
    autocast: "bf16" runs the model under bfloat16 autocast; None in its own dtype. The loss is float32 or wider.
    guard: which steps are not taken, and whether the run goes on past them.
    checkpoint_every: steps between checkpoints; one more is written at the end, and when stopped.
    keep: how many checkpoints stay on disk.
    log_every: steps between lines of log.jsonl.
    parallel: how the ranks are laid out, where there are several.
    recompute: keep the inputs of blocks alone and compute their activations again in the backward.
    compile: torch.compile, each block; a graph break is an error.
    tensorboard: write the log for TensorBoard too.
    Raises ValueError for a count below 1, a seed that is not of 64 bits, a clip that is not positive, an autocast that is not known.

    >>> from needlework.train import AdamW, Cosine, TrainConfig
    >>> config = TrainConfig(steps=100, seed=0, optim=AdamW(lr=3e-4), schedule=Cosine(warmup=10), checkpoint_every=50)
    >>> config.clip, config.schedule.multiplier(4, config.steps)
    (1.0, 0.5)
    """

    steps: Count
    seed: Seed
    optim: AdamW | Muon
    schedule: Cosine | Cooldown
    clip: Positive | Literal[math.inf] = 1.0  # pyrefly: ignore[invalid-literal] (typing has no literal floats, fields.fit has)
    accumulate: Count = 1
    autocast: Literal["bf16"] | None = None
    guard: Guard = field(default_factory=Guard)
    checkpoint_every: Count
    keep: Count = 2
    log_every: Count = 1
    parallel: Parallel = field(default_factory=Parallel)
    recompute: bool = False
    compile: bool = False
    tensorboard: bool = False

    def __post_init__(self):
        fit("train", self)

    def resume_fingerprint(self) -> dict[str, Any]:
        """The fields that a resumed run must share with the run it resumes."""
        changeable = ("parallel", "recompute", "compile", "tensorboard")
        return {name: value for name, value in asdict(self).items() if name not in changeable}
