"""RULER (arXiv 2404.06654), as lm-eval has it: 13 tasks, 500 samples each at every length, 128 new tokens, all strings must match.

A cell is one task at one length, loaded by itself. lm-eval's own process loads all lengths at once and gives −1 for a length that was
not asked, which its group then averages; here there is no such cell.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .harness import Harness, seed
from .number import Number, Unavailable, number
from .sources import reachable
from .subject import Subject
from .suite import Item, Mean, Suite


@dataclass(frozen=True, kw_only=True)
class Ruler(Harness):
    """One of its tasks; `accuracy` is the share of the expected strings that the answer has."""

    metrics: tuple[str, ...] = ("accuracy",)
    folder: str = "ruler"
    room: int = 256  # the prefix of the answer and the new tokens, which a task's length leaves out in part

    def metadata(self, subject: Subject, length: int) -> dict[str, Any]:
        return {"tokenizer": subject.tokenizer_at, "max_seq_lengths": [length]}

    def load(self, name: str, subject: Subject, length: int) -> Any:
        smallest = SMALLEST.get(name)
        with reachable(None):
            needs = 0 if smallest is None else smallest(lambda text: len(subject.tokenizer(text)["input_ids"]), length)
        if needs > length:
            raise Unavailable(f"its smallest text has {needs:,} tokens of this tokenizer, and RULER's generator tries for ever")
        seed()  # as if nothing had been drawn for the smallest text
        return super().load(name, subject, length)

    def numbers(self, documents: list[dict[str, Any]], length: int) -> dict[str, Number]:
        return {"accuracy": number([document[str(length)] for document in documents])}


def smallest_tracing(count: Callable[[str], int], length: int) -> int:
    """Tokens of ruler_vt's smallest text at a length, or of its example, which it draws at 500 tokens, in that measure."""
    from lm_eval.tasks.ruler.vt_utils import generate_input_output

    example, text = count(generate_input_output(5, 1, 4, is_icl=True)[0]) + 30, count(generate_input_output(10, 1, 4)[0]) + 30
    return text + 500 if example <= 450 else length + example  # 450: texts differ, and every one must fit


def smallest_counting(count: Callable[[str], int], length: int) -> int:
    """Tokens of ruler_cwe's smallest text at a length with its example and answer."""
    from lm_eval.tasks.ruler.cwe_utils import generate_input_output

    example, text, answer = generate_input_output(10, length)
    return count("\n".join([example, text, *answer])) + 120 + 20  # 20: the answer's numbers


SMALLEST = {"ruler_vt": smallest_tracing, "ruler_cwe": smallest_counting}
SINGLE = ("niah_single_1", "niah_single_2", "niah_single_3")
TASKS = (
    *SINGLE, "niah_multikey_1", "niah_multikey_2", "niah_multikey_3", "niah_multiquery", "niah_multivalue", "ruler_vt", "ruler_cwe",
    "ruler_fwe", "ruler_qa_squad", "ruler_qa_hotpot",
)  # fmt: skip


def mean(name: str, tasks: tuple[str, ...]) -> Mean:
    return Mean(name=name, of=tuple((task, "accuracy") for task in tasks))


ITEMS: tuple[Item, ...] = tuple(Ruler(task=task) for task in TASKS)
RULER = Suite(
    name="ruler", title="needles, tracing and counting", source="RULER; CCQ, Table 3; CARVE, Table 8; Q-Delta", items=ITEMS, lengths=(4096,),
    length_is="tokens of the task", means=(mean("S-NIAH", SINGLE), mean("mean of 13", TASKS)), needs=("lm_eval", "nltk", "wonderwords"),
)  # fmt: skip
