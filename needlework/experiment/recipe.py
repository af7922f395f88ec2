"""A recipe: all that fixes a run; its model at its start, and its text.

`runner.py` trains and measures it.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from needlework.data import (
    Answered,
    Batch,
    Corpus,
    CorpusConfig,
    Files,
    NeedleMix,
    RecallMix,
    StoreConfig,
    Text,
    byte_tokenizer,
    load_corpus,
    prepare,
)
from needlework.experiment.evaluate import Evaluation
from needlework.experiment.gate import Gate, answer_nats
from needlework.experiment.pretrained import grown, load_model
from needlework.fields import Count, fit
from needlework.layers.objective import Objective
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM
from needlework.train import Losses, Piece, TrainConfig


@dataclass(frozen=True, kw_only=True)
class Phase:
    """`steps` optimiser steps on batches of `batch` rows of `length` tokens of a task, in `train.accumulate` equal parts.

    until: a gate that ends the phase before, with the steps that it has left then going to the last phase; its task marks answers.
    Raises ValueError for a gate on a task without marked answers.

    >>> from needlework.data import Text
    >>> from needlework.experiment.recipe import Phase
    >>> Phase(steps=100, batch=8, length=256, task=Text()).until is None
    True
    """

    steps: Count
    batch: Count
    length: Count
    task: NeedleMix | Text
    until: Gate | None = None

    def __post_init__(self):
        fit("phase", self)
        if self.until is not None and not (isinstance(self.task, RecallMix) and self.task.dense > 0):
            raise ValueError(f"phase: until is a gate on dense rows with marked answers, got the task {self.task}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that fixes a run: model, text, phases, training, measurement. name is the run's; title and equation are for reading.

    start: a checkpoint's folder, whose weights the run starts from; None: the model's own start, from train.seed.
    grows: the model has weights that `start` lacks, which start as the model starts them.
    objective: what is added to the cross entropy. loss: what makes the cross entropy, "torch" or, on CUDA, "liger".

    >>> from needlework.data import CorpusConfig, Text
    >>> from needlework.experiment.evaluate import Evaluation
    >>> from needlework.experiment.recipe import Phase, Recipe
    >>> from needlework.layers import QDelta, Recurrent
    >>> from needlework.models import NeedleworkConfig
    >>> from needlework.train import AdamW, Cosine, TrainConfig
    >>> mixers = {"Q": Recurrent(heads=4, key_dim=16, value_dim=16, write=QDelta())}
    >>> recipe = Recipe(
    ...     name="mine",
    ...     title="Q-Delta on Python",
    ...     equation="S ← eᵍ (I − β k (k + λq)ᵀ) S + β k vᵀ",
    ...     model=NeedleworkConfig(vocab_size=257, hidden_size=64, layout="QQ", mixers=mixers),
    ...     corpus=CorpusConfig(),
    ...     phases=(Phase(steps=100, batch=8, length=256, task=Text()),),
    ...     train=TrainConfig(steps=100, seed=0, optim=AdamW(lr=1e-3), schedule=Cosine(warmup=10), checkpoint_every=50),
    ...     evaluate=Evaluation(lengths=(256,)),
    ... )
    >>> recipe.tokens()
    204800
    """

    name: str
    title: str
    equation: str
    model: NeedleworkConfig
    corpus: CorpusConfig | StoreConfig
    phases: tuple[Phase, ...]
    train: TrainConfig
    evaluate: Evaluation
    start: str | None = None
    grows: bool = False
    objective: Objective | None = None
    loss: str = "torch"

    def __post_init__(self):
        if not is_folder(self.name):
            raise ValueError(
                f"recipe {self.name!r}: expected the name of a folder, without separators: what it makes lies there"
            )
        for phase in self.phases:
            if phase.batch % self.train.accumulate:
                raise ValueError(
                    f"recipe {self.name}: a phase's batch is {phase.batch} rows, expected a multiple of train.accumulate = "
                    f"{self.train.accumulate}"
                )
        steps = sum(phase.steps for phase in self.phases)
        if steps != self.train.steps:
            raise ValueError(f"recipe {self.name}: the phases have {steps} steps, train.steps is {self.train.steps}")
        if any(phase.until is not None for phase in self.phases[1:]) or (len(self.phases) == 1 and self.gate is not None):
            raise ValueError(f"recipe {self.name}: a gate ends the first of several phases, and no other")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, complete: a run's config.json."""
        fields = {name: getattr(self, name) for name in ("corpus", "train", "evaluate")}
        return {
            "name": self.name,
            "title": self.title,
            "equation": self.equation,
            "model": self.model.to_diff_dict(),
            "phases": [asdict(phase) for phase in self.phases],
            "start": self.start,
            "grows": self.grows,
            "objective": None if self.objective is None else self.objective.to_dict(),
            "loss": self.loss,
        } | {name: asdict(value) for name, value in fields.items()}

    def resume_fingerprint(self) -> dict[str, Any]:
        """The fields that a resumed run must share with the run it resumes."""
        return self.to_dict() | {"train": self.train.resume_fingerprint()}

    @property
    def gate(self) -> Gate | None:
        """Of the first phase."""
        return self.phases[0].until

    def batch(self, corpus: Corpus, index: int, passed: int | None = None) -> Batch | Answered:
        """Micro-batch `index` of the run, `train.accumulate` of them a step: a pure function of the recipe, the corpus and these numbers.

        passed: the step after which the gate was passed; the batch of the step after it had been made.
        """
        parts = self.train.accumulate
        step, part = divmod(index, parts)
        if step >= self.train.steps:
            raise ValueError(f"step {step}: the recipe has {self.train.steps}")
        phase = self.phase(step, passed)
        rows = range(part * phase.batch // parts, (part + 1) * phase.batch // parts)
        return phase.task.batch(corpus, self.train.seed, step, phase.batch, phase.length, rows)

    def phase(self, step: int, passed: int | None = None) -> Phase:
        """The phase of `step`, 0 is the first."""
        first = 0
        for phase in self.phases[:-1]:
            ends = phase.steps if phase.until is None or passed is None else min(phase.steps, passed + 1)
            if step < first + ends:
                return phase
            first += ends
        return self.phases[-1]

    def losses(self, model: torch.nn.Module, piece: Piece) -> Losses:
        """The loss terms of one rank's part of a micro-batch; where a task marks answers, their nats and their number are logged."""
        found = model(
            piece.input_ids,
            targets=piece.labels,
            state_passing=piece.state_passing,
            objective=self.objective,
            loss_impl=self.loss,
            **({} if piece.emphasis is None else {"emphasis": piece.emphasis}),
        )
        if piece.answers is None or found.nats is None:
            return found
        return found._replace(parts=found.parts | answer_nats(found.nats, piece.answers))

    def tokens(self) -> int:
        """Training tokens."""
        return sum(p.steps * p.batch * p.length for p in self.phases)


def is_folder(name: str) -> bool:
    """Whether `name` can be that of a folder, on any system."""
    return name not in ("", ".", "..") and name.isprintable() and not any(separator in name for separator in "/\\")


def build(recipe: Recipe) -> NeedleworkForCausalLM:
    """The model before its first step, a function of the recipe alone. ValueError if `start` has other weights."""
    torch.manual_seed(recipe.train.seed)
    if recipe.start is None:
        return NeedleworkForCausalLM(recipe.model)
    try:
        begin = grown if recipe.grows else load_model
        return begin(Path(recipe.start), recipe.model).float()  # it may be stored in half precision
    except ValueError as error:
        raise ValueError(f"recipe {recipe.name}: start: {error}") from None


OWN_TEXT = 1 << 28  # bytes of one's own text that are read into memory, where the recipe reads it there


def with_corpus(recipe: Recipe, paths: Iterable[str | Path]) -> Recipe:
    """The recipe on the text of `paths` and with the tokenizer that it had: a store stays one, of the same vocabulary; bytes stay bytes."""
    names = tuple(map(str, paths))
    if isinstance(recipe.corpus, StoreConfig):
        return replace(recipe, corpus=replace(recipe.corpus, source=Files(paths=names)))
    return replace(recipe, corpus=replace(recipe.corpus, kind="files", paths=names, max_bytes=OWN_TEXT))


def text(recipe: Recipe, corpora: Path) -> Corpus:
    """The recipe's corpus: read into memory, or prepared once below `corpora` and mapped from there.

    ValueError if its tokenizer has more tokens than the model's vocabulary.
    """
    config = recipe.corpus
    if isinstance(config, CorpusConfig):
        corpus = load_corpus(config, byte_tokenizer())
    else:
        identity = json.dumps(asdict(config) | {"source": config.source.identity()}, sort_keys=True)
        corpus = prepare(config, corpora / f"{config.source.kind}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}")
    tokens = corpus.tokenizer.get_vocab_size()
    if tokens > recipe.model.vocab_size:
        raise ValueError(
            f"recipe {recipe.name}: the tokenizer has {tokens:,} tokens, more than the model's vocabulary of {recipe.model.vocab_size:,}"
        )
    return corpus
