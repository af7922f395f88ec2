"""ATMA's induction needle (arXiv 2606.25156) at a distance: the cue and five digits, `distance` tokens of one document, the cue again.

Teacher-forced: `accuracy` of the digits, `exact` values, `nats` a digit. Free: the model's own digits one after the other,
`free_accuracy` and `free_exact`. `absent_nats`: a digit without the needle, what is left is guessing (ln 10 at best).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from needlework.data import Episodes, induction_needle

from .number import number
from .sources import reachable
from .subject import SEED, Subject
from .suite import Cell, Item, Suite

METRICS = ("accuracy", "exact", "free_accuracy", "free_exact", "nats", "absent_nats")
AROUND = 128  # tokens of two cues and values, in any tokenizer


class Digits(NamedTuple):
    """Of each trial and digit: whether it was right, and its nats, [trials 5]."""

    right: Tensor
    nats: Tensor


@dataclass(frozen=True, kw_only=True)
class Induction(Item):
    task: str = "induction"
    metrics: tuple[str, ...] = METRICS
    trials: int = 16

    def tokens(self, length: int) -> int:
        return length + AROUND

    def measure(self, subject: Subject, length: int) -> Cell:
        trials = min(self.trials, subject.limit or self.trials)
        with reachable(None):  # no document is long enough, or the tokenizer has no token for a digit
            corpus = subject.corpus()
            present, absent = (induction_needle(corpus, SEED, trials, length, present=there) for there in (True, False))
        forced, guessed = teacher_forced(subject, present), teacher_forced(subject, absent)
        free = free_running(subject, present)
        shares = (by_trial(forced.right), exact(forced.right), by_trial(free), exact(free))
        values = (*shares, by_trial(forced.nats), by_trial(guessed.nats))
        return Cell(metrics={name: number(value) for name, value in zip(METRICS, values, strict=True)})


def teacher_forced(subject: Subject, episodes: Episodes) -> Digits:
    """The digits after the true ones before them."""
    columns = places(episodes)
    keep = episodes.input_ids.shape[1] - int(columns[0])
    right, nats = [], []
    for ids, targets in batches(subject, episodes):
        scores = subject.read(ids, keep).float().cpu()[:, columns - columns[0]]  # [b 5 V]
        wanted = targets[:, columns]
        right.append(scores.argmax(-1) == wanted)
        nats.append(F.cross_entropy(scores.transpose(1, 2), wanted, reduction="none"))
    return Digits(torch.cat(right), torch.cat(nats))


def free_running(subject: Subject, episodes: Episodes) -> Tensor:
    """Whether each digit is right where the model goes on from its own, [trials 5]."""
    columns = places(episodes)
    each = int(columns[1] - columns[0])  # tokens of " 7", of which the last is scored
    right = []
    for ids, targets in batches(subject, episodes):
        ids = ids[:, : int(columns[0]) + 2 - each]
        start = ids.shape[1]
        for _ in range(each * len(columns)):
            ids = torch.cat([ids, subject.read(ids, 1)[:, -1:].argmax(-1).to(ids)], 1)
        right.append(ids[:, start + each - 1 :: each] == targets[:, columns])
    return torch.cat(right)


def places(episodes: Episodes) -> Tensor:
    """The columns of the targets that are scored; the same in every row."""
    return (episodes.targets[0] >= 0).nonzero().flatten()


def batches(subject: Subject, episodes: Episodes) -> list[tuple[Tensor, Tensor]]:
    rows = subject.at_once(episodes.input_ids.shape[1])
    return list(zip(episodes.input_ids.split(rows), episodes.targets.split(rows), strict=True))


def by_trial(digits: Tensor) -> list[float]:
    """The mean over a trial's digits."""
    return digits.double().mean(1).tolist()


def exact(right: Tensor) -> list[float]:
    return right.all(1).double().tolist()


INDUCTION = Suite(
    name="induction", title="the induction needle", source="ATMA, Figure 1 and Table 6", items=(Induction(),),
    lengths=tuple(2048 << n for n in range(6)), length_is="tokens between the two cues", needs=(), own_text=True,
)  # fmt: skip
