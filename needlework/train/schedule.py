"""Learning-rate schedules: pure functions from the step about to be taken (0 is the first) to a multiplier of the peak.

    warm-up   m(s) = (s + 1) / warmup                    s < warmup
    Cosine    m(s) = floor + (1 - floor) (1 + cos πx)/2  x = (s - warmup) / (steps - warmup)
    Cooldown  m(s) = 1                                   s < flat · steps
              m(s) = 1 - (1 - floor) x                   x = (s - flat · steps) / (steps - flat · steps)

The floor is reached at s = steps, one past the last step: a floor of 0 wastes no step.

`torch.optim.lr_scheduler` keeps state that a checkpoint must hold. A function of the step needs none, so a resumed run has the same rates.
"""

import math
from dataclasses import dataclass
from typing import Literal

from needlework.fields import Natural, Portion, fit


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Linear warm-up over `warmup` steps, then half a cosine down to `floor` × the peak.

    Raises ValueError for a warm-up below 0 steps, a floor that is no share.

    >>> from needlework.train import Cosine
    >>> [round(Cosine(warmup=2, floor=0.1).multiplier(step, 10), 2) for step in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.55, 0.1]
    """

    kind: Literal["cosine"] = "cosine"
    warmup: Natural = 0
    floor: Portion = 0.0

    def __post_init__(self):
        fit("cosine", self)

    def multiplier(self, step: int, steps: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        x = (step - self.warmup) / max(1, steps - self.warmup)
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * x)) / 2


@dataclass(frozen=True, kw_only=True)
class Cooldown:
    """Linear warm-up over `warmup` steps, the peak until the share `flat` of all steps, then linear to `floor` × the peak.

    Raises ValueError for a warm-up below 0 steps, a flat part or a floor that is no share.

    >>> from needlework.train import Cooldown
    >>> [Cooldown(warmup=2, flat=0.5).multiplier(step, 8) for step in (0, 1, 4, 6, 8)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """

    kind: Literal["cooldown"] = "cooldown"
    warmup: Natural = 0
    flat: Portion
    floor: Portion = 0.0

    def __post_init__(self):
        fit("cooldown", self)

    def multiplier(self, step: int, steps: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        # A warm-up longer than the flat share eats into the cooldown; it does not shift it.
        start = self.flat * steps
        return 1.0 if step <= start else 1 - (1 - self.floor) * (step - start) / (steps - start)
