"""BABILong (arXiv 2406.10149): bAbI's facts in books. A length is that of the data set's texts; 0 is the facts alone, of which there are
20 tasks; the longer texts have the first five."""

from dataclasses import dataclass
from typing import Any

from .harness import Harness
from .subject import Subject
from .suite import Item, Mean, Suite

LENGTHS = {0: "0k"} | {1024 << n: f"{1 << n}k" for n in range(8)}


@dataclass(frozen=True, kw_only=True)
class Babilong(Harness):
    """room: the two examples before the question and the answer; a text of the data set may be a little over its length."""

    metrics: tuple[str, ...] = ("acc",)
    folder: str = "babilong"
    room: int = 1024

    def metadata(self, subject: Subject, length: int) -> dict[str, Any]:
        return {"max_seq_lengths": LENGTHS[length]}


def items() -> tuple[Item, ...]:
    return tuple(Babilong(task=f"babilong_qa{n}", only=tuple(LENGTHS) if n <= 5 else (0,)) for n in range(1, 21))


def mean(n: int) -> Mean:
    return Mean(name=f"mean of {n}", of=tuple((f"babilong_qa{i}", "acc") for i in range(1, n + 1)))


BABILONG = Suite(
    name="babilong", title="facts in books", source="BABILong", items=items(), lengths=(1024, 2048, 4096, 8192), always=(0,),
    length_is="tokens of the text", means=(mean(5), mean(20)),
)  # fmt: skip
