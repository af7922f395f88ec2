"""What is measured of a trained model, at which lengths: loss, retrieval by task, loss by position, samples, the papers' diagnoses."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from needlework.data import Corpus, Episodes, RecallMix, held_out_text, long_documents
from needlework.eval import loss, retrieval
from needlework.eval.samples import samples
from needlework.experiment import answers
from needlework.experiment.answers import Context
from needlework.experiment.diagnoses import Once, check_diagnosis, diagnose
from needlework.experiment.reader import asking, at_once, reader
from needlework.experiment.tasks import TASKS
from needlework.fields import AtLeastTwo, Count, Natural, fit
from needlework.models import NeedleworkForCausalLM


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is measured at each of `lengths`: `tokens` tokens of held-out text, and at least `rows` rows of each of `tasks`.

    tasks: names of TASKS. "needles" asks four at once.
    positions: the loss by position in rows of this many tokens of one long held-out document; None for not at all.
    diagnose: the papers' diagnoses, on rows of this many tokens of held-out text; None for none.
    full_context: measure a model trained with windows a second time without them.
    recall: the recall by distance in `rows` rows of this mix at each of lengths. context: what a window's context gives. objective: the
    training objective on `rows` rows of this mix. None of them: not measured.
    side: of the corpus, which text all of this is measured on. sample: a few texts that the model goes on from.
    Raises ValueError for a number out of its range, lengths that do not ascend, a task that is not known.

    >>> from needlework.experiment.evaluate import Evaluation
    >>> Evaluation(lengths=(512, 2048), tasks=("needle",), rows=32).tasks
    ('needle',)
    """

    lengths: tuple[Count, ...] = (256, 512, 1024, 2048)
    tokens: Count = 32_768
    rows: Count = 16
    tasks: tuple[str, ...] = ("needle", "needles")
    positions: Count | None = None
    diagnose: AtLeastTwo | None = None
    full_context: bool = False
    recall: RecallMix | None = None
    context: Context | None = None
    objective: RecallMix | None = None
    side: str = "held_out"
    sample: bool = True
    seed: Natural = 1

    def __post_init__(self):
        fit("evaluate", self)
        for name in self.tasks:
            if name not in TASKS:
                raise ValueError(f"evaluate: unknown task {name!r}; known: {', '.join(TASKS)}")
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(
                f"evaluate: lengths is {self.lengths}, expected at least one number of tokens, each more than the last"
            )


class Stopped(Exception):
    """A measurement was asked to stop before its end."""


def measure(
    model: NeedleworkForCausalLM,
    corpus: Corpus,
    evaluation: Evaluation,
    once: Once = lambda name, make: make(),
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """{"loss": {T: nats}, task: {T: score}, "positions": …, "diagnostics": …} of a model, which this puts in evaluation mode.

    once: keeps pieces, each a number or JSON: every length's loss, every task at every length, … stop: called before each module's
    forward and at every token of a diagnosis; True raises Stopped.
    """
    e, corpus = evaluation, corpus.on(evaluation.side)
    model.eval()
    read = reader(model)
    entry: dict[str, Any] = {"loss": {}} | {task: {} for task in e.tasks}

    def ask(*_: Any) -> None:
        if stop():
            raise Stopped

    with asking(model, ask):
        for T in e.lengths:
            size = at_once(model, T)
            entry["loss"][str(T)] = once(
                f"loss {T}", lambda T=T, size=size: loss(read, running(corpus, e, T), batch_size=size).mean
            )
            for task in e.tasks:
                asked = lambda task=task, T=T, size=size: retrieval(
                    read, questions(corpus, e, task, T), batch_size=size
                )._asdict()
                entry[task][str(T)] = once(f"{task} {T}", asked)
        if e.recall is not None:
            entry["recall"] = {
                str(T): once(
                    f"recall {T}", lambda T=T: answers.recall(read, corpus, e.recall, e.seed, e.rows, T, at_once(model, T))
                )
                for T in e.lengths
            }
        if e.context is not None:
            size = at_once(model, e.context.length)
            entry["context"] = once("context", lambda: answers.context(read, corpus, e.context, e.seed, size))
        if e.objective is not None:
            T = e.lengths[0]
            asked = lambda: answers.objective(read, corpus, e.objective, e.seed, e.rows, T, at_once(model, T))
            entry["objective"] = once("objective", asked)
        if e.sample:
            entry["samples"] = once("samples", lambda: go_on(read, corpus, e))
        if e.positions is not None:
            entry["positions"] = once("positions", lambda: by_position(read, corpus, e, at_once(model, e.positions)))
        if e.diagnose is not None:
            entry["diagnostics"] = diagnose(model, corpus, e.diagnose, e.lengths, e.seed, once, ask)
    return entry


def running(corpus: Corpus, evaluation: Evaluation, T: int) -> Tensor:
    """The held-out text whose loss is measured at T, [n T+1]."""
    return held_out_text(corpus, evaluation.seed, max(1, evaluation.tokens // T), T + 1).input_ids


def questions(corpus: Corpus, evaluation: Evaluation, task: str, T: int) -> Episodes:
    """The episodes of a task at T: as many tokens as the loss reads, at least `rows` rows."""
    return TASKS[task](corpus, evaluation.seed, max(evaluation.rows, evaluation.tokens // T), T)


def documents(corpus: Corpus, evaluation: Evaluation) -> Tensor:
    """The long documents whose loss is measured by position, [rows positions+1]."""
    assert evaluation.positions is not None
    return long_documents(corpus, evaluation.rows, evaluation.positions + 1).input_ids


def check_measurement(mixers: dict[str, dict[str, Any]], corpus: Corpus, evaluation: Evaluation) -> None:
    """Raises the ValueErrors that `measure` would raise for a model with `mixers`: makes every row that it would read."""
    e, corpus = evaluation, corpus.on(evaluation.side)
    answers.check(corpus, (e.recall, e.objective), e.context, e.seed, e.rows, e.lengths)
    for T in e.lengths:
        running(corpus, e, T)
        for task in e.tasks:
            questions(corpus, e, task, T)
    if e.positions is not None:
        documents(corpus, e)
    if e.diagnose is not None:
        check_diagnosis(mixers, corpus, e.diagnose, e.seed)


def go_on(read: Callable, corpus: Corpus, evaluation: Evaluation) -> list[dict[str, str]]:
    """A few samples: 64 tokens of held-out text, and the next 32; of shorter rows two thirds and the rest."""
    n = max(2, min(96, evaluation.lengths[-1]))
    rows = held_out_text(corpus, evaluation.seed, 3, n).input_ids
    return samples(read, rows, 2 * n // 3, partial(corpus.tokenizer.decode, skip_special_tokens=False))


def by_position(read: Callable, corpus: Corpus, evaluation: Evaluation, batch_size: int) -> dict[str, Any]:
    """Nats per token of long documents in stretches that double: {"from": [0, 128, 256, …], "loss": […], "rows": n}."""
    T = evaluation.positions
    assert T is not None
    rows = documents(corpus, evaluation)
    cuts = [1 << n for n in range(7, T.bit_length() - (T & (T - 1) == 0))]
    found = loss(read, rows, batch_size=batch_size, buckets=tuple(cuts))
    return {"from": [0, *cuts], "loss": list(found.by_position), "rows": len(rows)}
