"""Tasks of lm-evaluation-harness: loaded from its own YAML, run on a model object, their numbers taken document by document.

lm-eval is imported where a task is loaded: it takes seconds. A TaskManager reads one folder of tasks, since all 14,686 take six.
"""

from __future__ import annotations

import json
import logging
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .number import Number, Unavailable, number
from .sources import reachable
from .subject import Subject
from .suite import Cell, Item

OURS = Path(__file__).parent / "tasks"
SEEDS = {"random": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}  # lm-eval's own


@dataclass(frozen=True, kw_only=True)
class Harness(Item):
    """A task of lm-eval. folder: that of its YAML below lm_eval/tasks, or below our tasks/. name: its name, where `task` is another.

    room: tokens beyond the length, for what a prompt has that its length does not count.
    """

    folder: str
    name: str = ""
    room: int = 0

    def metadata(self, subject: Subject, length: int) -> dict[str, Any]:
        """What the task's own loader is handed."""
        return {}

    def changes(self, length: int) -> dict[str, Any]:
        """Fields of the task's config that replace those of its YAML."""
        return {}

    def numbers(self, documents: list[dict[str, Any]], length: int) -> dict[str, Number]:
        """The kept metrics from lm-eval's documents, each of which has its metrics by name."""
        return {metric: of_documents(metric, [document[metric] for document in documents]) for metric in self.metrics}

    def tokens(self, length: int) -> int:
        return length + self.room

    def measure(self, subject: Subject, length: int) -> Cell:
        name = self.name or self.task
        seed()
        with warnings_of("lm_eval") as warned:
            task = self.load(name, subject, length)
            written = (task.get_config("generation_kwargs") or {}).get("max_gen_toks", 0)
            if written >= self.tokens(length):
                raise Unavailable(f"it writes {written:,} tokens, and {self.tokens(length):,} are all that is read and written")
            found = run(subject, name, task, self.tokens(length))
        documents = found.pop("samples")[name]
        if len({document["filter"] for document in documents}) > 1:
            raise ValueError(f"{name}: lm-eval has several filters for its answers, expected one")
        return Cell(metrics=self.numbers(documents, length), lm_eval=found, warnings=warned)

    def load(self, name: str, subject: Subject, length: int) -> Any:
        """lm-eval's task object. Raises Unavailable with the reason where its data or code cannot be had."""
        from lm_eval import tasks as shipped

        ours, theirs = OURS / self.folder, Path(shipped.__file__).parent / self.folder
        where = ours if ours.is_dir() else theirs
        with reachable(subject.data), redirect_stdout(sys.stderr):  # RULER's generators print; standard output is the numbers'
            manager = shipped.TaskManager(
                include_path=[where], include_defaults=False, metadata=self.metadata(subject, length) or None
            )
            if name not in manager.all_subtasks:
                raise Unavailable(f"lm-eval has no task {name} in {self.folder}")
            changed = {"task": name} | self.changes(length)
            task = manager.load([{"group": "needlework", "task": [changed]}])["tasks"][name]
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=SEEDS["fewshot"])
        return task


def run(subject: Subject, name: str, task: Any, max_length: int) -> dict[str, Any]:
    """lm-eval's results of one task, JSON-ready.

    max_length: without it lm-eval takes 2,048 for a model whose config names no limit, and cuts every longer prompt.
    """
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.utils import handle_non_serializable

    batch = subject.at_once(max_length)
    # softmax_dtype: in bfloat16 a log-likelihood of 10 nats would have steps of 0.06
    lm = HFLM(
        pretrained=subject.model, tokenizer=subject.tokenizer, backend="causal", batch_size=batch, max_length=max_length,
        softmax_dtype="float32", mixed_precision_dtype=subject.autocast,
    )  # fmt: skip
    found = evaluate(lm=lm, task_dict={"tasks": {name: task}, "groups": {}}, limit=subject.limit, bootstrap_iters=0)
    assert found is not None  # of the first rank, and there is one
    config = {"max_length": max_length, "batch_size": batch, "limit": subject.limit, "dtype": str(subject.model.dtype)}
    config |= {"autocast": subject.autocast} | {f"{what}_seed": value for what, value in SEEDS.items()}
    return json.loads(json.dumps({"config": config, **found}, default=handle_non_serializable))


def of_documents(metric: str, values: list[Any]) -> Number:
    """What lm-eval keeps of each document under a metric's name -> the number that it makes of them."""
    if metric == "perplexity":  # log-likelihoods of one word each
        return number([-x for x in values], exp=True)
    if metric == "word_perplexity":  # log-likelihood and words of a document
        return number([-x for x, _ in values], [words for _, words in values], exp=True)
    return number(values)


def seed() -> None:
    """As lm-eval's simple_evaluate does before it loads tasks: its synthetic tasks draw from these."""
    import numpy as np
    import torch

    random.seed(SEEDS["random"])
    np.random.seed(SEEDS["numpy"])
    torch.manual_seed(SEEDS["torch"])


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """The warnings that a package logs inside, each once with how often, numbers as N; they are kept off the screen."""
    counted: Counter[str] = Counter()
    found: list[str] = []
    logger = logging.getLogger(name)

    class Counting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            counted[re.sub(r"\d+(\.\d+)?", "N", record.getMessage())[:300]] += 1

    handler, level, propagate = Counting(level=logging.WARNING), logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
        found += [f"{times} ×: {message}" for message, times in counted.items() if CUT.search(message)]


CUT = re.compile("truncat|exceed|[Ss]kipped|not scored", re.IGNORECASE)  # the rest is about arguments, not about documents
