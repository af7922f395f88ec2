"""The gate of a dense warm-up: it ends when the model recalls the pairs of its row, and not after a count of steps.

    excess of a step = Σ over the answers' tokens of its dense rows of −log p(token | the row before it) / how many there are

In a dense row a digit of a value that came earlier in the row (a *paired* digit) has one possible value given the row, so the best
predictor's loss on it is 0 nats, and a model's loss is all excess. At chance it is ln 10 = 2.30. Where a digit's argmax is wrong its
probability is at most 1/2 and its loss at least ln 2, so by Markov's inequality

    share of paired digits that are not found <= excess / ln 2            0.1 nats: at most 14.4 %

The rows are those of the step itself, fresh, and read before the step moves a weight: the excess is of text that was not trained on.

    <run>/gate.json     {"step": the first step after which the mean excess of the last `window` steps was below `excess`}

A run passes if that step is one of the steps that its warm-up may have, `most` of its result. One that passes later has its step noted, and did
not pass. The batch of the next step is read ahead, so the warm-up has one step more. A run that is resumed keeps what gate.json says.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from needlework.data import ASKED, PAIRED
from needlework.experiment.claim import write_json
from needlework.fields import Count, Positive, fit
from needlework.json_file import read_json
from needlework.train import Progress, logged

PARTS = {"paired": PAIRED, "asked": ASKED}


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Passed when the mean excess of `window` steps in a row is below `excess` nats.

    >>> from needlework.data import RecallMix
    >>> from needlework.experiment.gate import Gate
    >>> from needlework.experiment.recipe import Phase
    >>> Phase(steps=400, batch=8, length=256, task=RecallMix(dense=1.0, sparse=0.0), until=Gate(window=8)).until.excess
    0.1
    """

    excess: Positive = 0.1
    window: Count = 4

    def __post_init__(self):
        fit("gate", self)


def answer_nats(nats: Tensor, answers: Tensor) -> dict[str, Tensor]:
    """What is logged of the answers of a batch: {"paired_nats": their sum, "paired": how many, and of those asked in text likewise}."""
    found: dict[str, Tensor] = {}
    for name, kind in PARTS.items():
        of = answers == kind
        found |= {f"{name}_nats": torch.where(of, nats, 0).sum(), name: of.sum()}
    return found


def excess(extra: Mapping[str, Any]) -> float | None:
    """Nats a paired digit of a step; None of a step without any, or whose sum was not finite."""
    nats, many = extra.get("paired_nats"), extra.get("paired")
    return nats / many if many and nats is not None else None


class Gatekeeper:
    """Notes every step of a run and says when it passed its gate. directory: the run's."""

    def __init__(self, gate: Gate | None, directory: Path):
        self.gate, self.path = gate, directory / "gate.json"
        self.passed: int | None = read_json(self.path)["step"] if self.path.exists() else None
        self.seen: dict[int, float | None] = {}
        if gate is not None and self.passed is None:  # of a run that goes on; what it does again is noted again
            self.seen = {line["step"]: excess(line) for line in logged(directory / "training")}

    def note(self, progress: Progress) -> None:
        """After a step."""
        if self.gate is None or self.passed is not None:
            return
        self.seen[progress.step] = excess(progress.extra)
        last = [self.seen.get(step) for step in range(progress.step - self.gate.window + 1, progress.step + 1)]
        known = [x for x in last if x is not None]
        if len(known) == len(last) and fmean(known) < self.gate.excess:
            self.passed = progress.step
            write_json(self.path, {"step": self.passed})

    def noting(self, on_step: Callable[[Progress], None] | None) -> Callable[[Progress], None]:
        """on_step, after the step is noted."""

        def after(progress: Progress) -> None:
            self.note(progress)
            if on_step is not None:
                on_step(progress)

        return after
