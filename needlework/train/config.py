"""All that fixes a training run besides the model and its batches. Plain data: `dataclasses.asdict` is JSON-ready."""

from dataclasses import dataclass
from typing import Literal

from .optim import AdamW, Muon
from .schedule import Cooldown, Cosine


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, with what, and how often to save.

    steps: optimiser steps.
    seed: of PyTorch's generator (dropout and the like) from the first step on; the model is initialised before.
    optim, schedule: which optimisers, and the multiplier of their learning rates by step.
    clip: bound of the gradients' global L2 norm; math.inf only records the norm.
    accumulate: micro-batches per step. Step s reads batch(s * accumulate) … batch(s * accumulate + accumulate - 1).
    autocast: "bf16" runs the model under bfloat16 autocast; None in its own dtype. The loss is float32 or wider.
    checkpoint_every: steps between checkpoints; one more is written at the end, and when stopped.
    keep: how many checkpoints stay on disk.
    log_every: steps between lines of log.jsonl.
    Raises ValueError for a count below 1, a clip that is not positive, an autocast that is not known.
    """

    steps: int
    seed: int
    optim: AdamW | Muon
    schedule: Cosine | Cooldown
    clip: float = 1.0
    accumulate: int = 1
    autocast: Literal["bf16"] | None = None
    checkpoint_every: int
    keep: int = 2
    log_every: int = 1

    def __post_init__(self):
        for name in ("steps", "accumulate", "checkpoint_every", "keep", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least 1")
        if not self.clip > 0:
            raise ValueError(f"clip: got {self.clip}, expected a positive norm (math.inf for none)")
        if self.autocast not in (None, "bf16"):
            raise ValueError(f'autocast: got {self.autocast!r}, expected "bf16" or None')
