"""Recall over real documents (Based, Just Read Twice), each cut to a length: once, as CARVE measures it, and read twice."""

from dataclasses import dataclass
from typing import Any

from .documents import SOURCES
from .harness import Harness
from .subject import Subject
from .suite import Mean, Suite


@dataclass(frozen=True, kw_only=True)
class Recall(Harness):
    """`contains`: whether the answer is among 48 new tokens."""

    metrics: tuple[str, ...] = ("contains",)
    folder: str = "recall"
    times: int = 1

    def metadata(self, subject: Subject, length: int) -> dict[str, Any]:
        return {"tokenizer": subject.tokenizer_at, "max_seq_lengths": [length]}

    def tokens(self, length: int) -> int:
        return self.times * length


def mean(name: str, ending: str) -> Mean:
    return Mean(name=name, of=tuple((f"recall_{source}{ending}", "contains") for source in SOURCES))


RECALL = Suite(
    name="recall", title="answers out of documents", source="CARVE, Table 9; Just Read Twice",
    items=(*(Recall(task=f"recall_{source}") for source in SOURCES), *(Recall(task=f"recall_{source}_twice", times=2) for source in SOURCES)),
    lengths=(2048,), length_is="tokens of a document with its question", means=(mean("mean of 6", ""), mean("mean of 6, twice", "_twice")),
)  # fmt: skip
