"""InfiniteBench (arXiv 2402.13718): eleven tasks over texts of 100K tokens and more. A length is the window.

lm-eval 0.4.13 cannot load its data: it hands `datasets` the fields as plain dicts, and asks for splits `…_en` of a data set whose splits
are called `…_eng`. Both are put right here.
"""

from dataclasses import dataclass
from typing import Any

from .harness import Harness
from .suite import Item, Mean, Suite

TASKS = (
    "passkey", "kv_retrieval", "number_string", "code_run", "code_debug", "math_find", "longdialogue_qa_en", "longbook_qa_en",
    "longbook_sum_en", "longbook_choice_en", "longbook_qa_chn",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class InfiniteBench(Harness):
    metrics: tuple[str, ...] = ("score",)
    folder: str = "infinitebench"

    def changes(self, length: int) -> dict[str, Any]:
        from datasets import Features, List, Value

        text = Value("string")
        features = {"id": Value("int64"), "context": text, "input": text, "answer": List(text), "options": List(text)}
        split = self.task.removeprefix("infinitebench_")
        return {
            "dataset_kwargs": {"features": Features(features)},
            "test_split": f"{split}g" if split.endswith("_en") else split,
        }


ITEMS: tuple[Item, ...] = tuple(InfiniteBench(task=f"infinitebench_{task}") for task in TASKS)
INFINITEBENCH = Suite(
    name="infinitebench", title="texts of 100K tokens", source="InfiniteBench", items=ITEMS, lengths=(131_072,),
    means=(Mean(name="mean of 11", of=tuple((item.task, "score") for item in ITEMS)),),
)  # fmt: skip
