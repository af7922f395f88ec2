"""LongBench's 14 English tasks (arXiv 2308.14508), each with its official metric, and CCQ's mean of them.

A length is the window: a longer prompt is cut on the left. The benchmark's own code cuts it in the middle.
"""

from dataclasses import dataclass

from .harness import Harness
from .suite import Item, Mean, Suite

TASKS = (
    "narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum", "multi_news", "trec",
    "triviaqa", "samsum", "lcc", "repobench-p",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LongBench(Harness):
    metrics: tuple[str, ...] = ("score",)
    folder: str = "longbench"


ITEMS: tuple[Item, ...] = tuple(LongBench(task=f"longbench_{task}") for task in TASKS)
LONGBENCH = Suite(
    name="longbench", title="questions, summaries and code over long texts", source="LongBench; CCQ, Table 4", items=ITEMS,
    lengths=(32_768,), means=(Mean(name="mean of 14", of=tuple((item.task, "score") for item in ITEMS)),),
    needs=("lm_eval", "jieba", "fuzzywuzzy", "rouge"),
)  # fmt: skip
