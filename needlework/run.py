"""A recipe, and what is done with it: train, keep, measure; one recipe or several side by side, stopped and resumed.

Knows the order of things and the files of a run's directory. How to train, what a task is and how to measure are other rooms'.

    runs/corpora/<digest>/            texts that are tokenised once, for every run that reads them
    runs/<name>/config.json           what runs here, exactly
                manifest.json         the text that a comparison read
                results.json          what was measured               report.html       the same, to look at
                <mixer>/manifest.json     the text it read            <mixer>/training/     checkpoints, log.jsonl
                <mixer>/checkpoint/       for AutoModelForCausalLM    <mixer>/result.json   written when the mixer is done
"""

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from needlework.data import (
    Batch,
    Corpus,
    CorpusConfig,
    NeedleMix,
    SourceError,
    StoreConfig,
    StoreError,
    Text,
    byte_tokenizer,
    load_corpus,
    prepare,
)
from needlework.eval.results import write_whole
from needlework.layers.objective import Objective
from needlework.measure import Evaluation, measure
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM, disable_progress_bar
from needlework.train import BadStep, CheckpointError, Losses, Piece, Progress, Result, TrainConfig, World, full_state, train


@dataclass(frozen=True, kw_only=True)
class Phase:
    """`steps` optimiser steps on batches of `batch` rows of `length` tokens of a task, in `train.accumulate` equal parts."""

    steps: int
    batch: int
    length: int
    task: NeedleMix | Text


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that fixes a run: model, text, phases, training, measurement. name is the run's; title and equation are for reading.

    start: a checkpoint's folder, whose weights the run starts from; None: the model's own start, from train.seed.
    objective: what is added to the cross entropy. loss: what makes the cross entropy, "torch" or, on CUDA, "liger".
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
    objective: Objective | None = None
    loss: str = "torch"

    def __post_init__(self):
        for phase in self.phases:
            if phase.batch % self.train.accumulate:
                raise ValueError(
                    f"recipe {self.name}: a phase's batch is {phase.batch} rows, expected a multiple of train.accumulate = "
                    f"{self.train.accumulate}"
                )
        steps = sum(phase.steps for phase in self.phases)
        if steps != self.train.steps:
            raise ValueError(f"recipe {self.name}: the phases have {steps} steps, train.steps is {self.train.steps}")

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
            "objective": None if self.objective is None else self.objective.to_dict(),
            "loss": self.loss,
        } | {name: asdict(value) for name, value in fields.items()}

    def lasting(self) -> dict[str, Any]:
        """What a run that goes on must share with the one that it goes on from."""
        return self.to_dict() | {"train": self.train.lasting()}

    def batch(self, corpus: Corpus, index: int) -> Batch:
        """Micro-batch `index` of the run, `train.accumulate` of them a step: a pure function of the recipe, the corpus and it."""
        parts = self.train.accumulate
        step, part = divmod(index, parts)
        first = 0
        for phase in self.phases:
            if step < first + phase.steps:
                rows = range(part * phase.batch // parts, (part + 1) * phase.batch // parts)
                return phase.task.batch(corpus, self.train.seed, step, phase.batch, phase.length, rows)
            first += phase.steps
        raise ValueError(f"step {step}: the recipe has {first}")

    def losses(self, model: NeedleworkForCausalLM, piece: Piece) -> Losses:
        """What a step descends on, of one rank's part of a micro-batch."""
        return model(piece.input_ids, targets=piece.labels, relay=piece.relay, objective=self.objective, loss_impl=self.loss)

    def tokens(self) -> int:
        """Training tokens."""
        return sum(p.steps * p.batch * p.length for p in self.phases)


class RunError(RuntimeError):
    """A run's directory is not what the recipe says; the message names what differs and what to do."""


# what a user did, or the machine: the message alone explains it; anything else is a mistake of ours and keeps its traceback
EXPLAINED = (ValueError, ArithmeticError, OSError, RunError, CheckpointError, StoreError, SourceError)


def build(recipe: Recipe) -> NeedleworkForCausalLM:
    """The model at its start: the same for a seed, whatever ran before; ValueError if `start` has other weights."""
    if recipe.start is not None:
        return started(recipe, Path(recipe.start))
    torch.manual_seed(recipe.train.seed)
    return NeedleworkForCausalLM(recipe.model)


def started(recipe: Recipe, checkpoint: Path) -> NeedleworkForCausalLM:
    """The recipe's model with the weights of a checkpoint's folder."""
    if not (checkpoint / "model.safetensors").is_file() and not (checkpoint / "model.safetensors.index.json").is_file():
        raise ValueError(
            f"recipe {recipe.name}: start is {checkpoint}, expected a folder with config.json and model.safetensors"
        )
    disable_progress_bar()
    model, found = NeedleworkForCausalLM.from_pretrained(
        checkpoint, config=recipe.model, output_loading_info=True, ignore_mismatched_sizes=True
    )
    wrong = {kind: sorted(map(str, names)) for kind, names in found.items() if names}
    if wrong:
        told = "; ".join(f"{kind.replace('_', ' ')}: {', '.join(names[:4])}" for kind, names in wrong.items())
        raise ValueError(f"recipe {recipe.name}: start = {checkpoint} holds another model ({told})")
    return model


def text(config: CorpusConfig | StoreConfig, corpora: Path) -> Corpus:
    """The corpus of a config: read into memory, or prepared once below `corpora` and mapped from there."""
    if isinstance(config, CorpusConfig):
        return load_corpus(config, byte_tokenizer())
    digest = hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode()).hexdigest()[:12]
    return prepare(config, corpora / f"{config.source.kind}-{digest}")


def run(
    recipe: Recipe,
    directory: Path,
    *,
    on_step: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Train and measure one recipe in `directory`, on this rank's part of it; what is done already is not done again.

    On a GPU where there is one. Returns the mixer's entry of results.json; None if it was stopped, and on all ranks but the first,
    which alone measures. On a CPU training is one thread: small operators gain nothing from more, and one is bit-reproducible.
    """
    done = directory / "result.json"
    if done.exists():
        return json.loads(done.read_text())
    torch.set_num_threads(1)
    with World.open(recipe.train.parallel) as world:
        world.share(directory)
        corpora = directory.parents[1] / "corpora"
        if world.ranks > 1:
            world.agree(lambda: bool(text(recipe.corpus, corpora)))  # one rank makes it, the others open it
        corpus = text(recipe.corpus, corpora)
        model = build(recipe)
        if world.mesh is None and torch.cuda.is_available():
            model.cuda()
        if world.is_first:
            corpus.write_manifest(directory / "manifest.json")
        described = recipe.to_dict()
        described.pop("train")  # train() compares its own config
        described.pop("evaluate")
        described["corpus"]["sha256"] = corpus.manifest["sha256"]
        result = train(
            model, lambda index: recipe.batch(corpus, index), recipe.train, directory / "training",
            losses=recipe.losses, recipe=described, on_step=on_step, stop=stop, world=world,
        )  # fmt: skip
        if result.stopped:
            return None
        weights = full_state(model)
        if not world.is_first:
            return None
    disable_progress_bar()  # there is one on the screen already
    model.save_pretrained(directory / "checkpoint", state_dict=weights)
    corpus.tokenizer.save(str(directory / "checkpoint" / "tokenizer.json"))
    device = model.device
    del model, weights  # what is measured is what was kept: whole, and not compiled for the training's shapes
    kept = lambda config: NeedleworkForCausalLM.from_pretrained(directory / "checkpoint", config=config).to(device)
    model = kept(recipe.model)
    entry = training_entry(recipe, model, result) | measure(model, corpus, recipe.evaluate)
    if recipe.evaluate.full_context:
        entry["full_context"] = measure(kept(recipe.model.full_context()), corpus, recipe.evaluate)
    write_json(done, entry | origin(recipe, directory))
    return json.loads(done.read_text())


def training_entry(recipe: Recipe, model: NeedleworkForCausalLM, result: Result) -> dict[str, Any]:
    return named(recipe) | {
        "parameters": model.num_parameters(),
        "state_bytes": {str(T): state_bytes(model, T) for T in recipe.evaluate.lengths},
        "train": {
            "steps": list(range(1, len(result.losses) + 1)),
            "loss": list(result.losses),
            "tokens": result.tokens,
            "seconds": result.seconds,
            "tokens_per_second": result.tokens_per_second,
        },
    }


def ended_entry(recipe: Recipe, directory: Path, error: BadStep) -> dict[str, Any]:
    """What is known of a run that its guard ended: `ended` instead of what was measured."""
    ended = {"step": error.step, "steps": recipe.train.steps, "why": error.where}
    return named(recipe) | {"ended": ended} | origin(recipe, directory)


def named(recipe: Recipe) -> dict[str, Any]:
    return {
        "name": recipe.name,
        "seed": recipe.train.seed,
        "title": recipe.title,
        "equation": recipe.equation,
        "train_length": recipe.phases[-1].length,
        "lengths": list(recipe.evaluate.lengths),
        "tasks": list(recipe.evaluate.tasks),
    }


def origin(recipe: Recipe, directory: Path) -> dict[str, Any]:
    """What the run read, and on what and from which code it was last started."""
    manifest = json.loads((directory / "manifest.json").read_text())
    ran = json.loads((directory / "training" / "ran.json").read_text())[-1]
    return {
        "corpus": {"sha256": manifest["sha256"]},
        "machine": ran["device"],
        "versions": ran["versions"],
        "commit": ran["commit"],
        "config": recipe.to_dict(),
    }


def state_bytes(model: NeedleworkForCausalLM, T: int) -> int:
    """Bytes of one sequence's state over all layers after T tokens, in the model's dtype."""
    return sum(block.mixer.state_size(T, model.dtype) for block in model.model.blocks)


def claim(directory: Path, config: dict[str, Any]) -> None:
    """Make `directory` the run of `config`, or see that it is; RunError names the fields that differ."""
    path = directory / "config.json"
    config = json.loads(json.dumps(config))
    if path.exists():
        there = json.loads(path.read_text())
        different = sorted(differences(there, config))
        if different:
            raise RunError(
                f"{directory} holds a run with another config ({', '.join(different[:6])}); "
                "choose another --name, or remove that directory"
            )
    else:
        directory.mkdir(parents=True, exist_ok=True)
        write_json(path, config)


def differences(a: Any, b: Any, at: str = "") -> list[str]:
    """Paths of the fields in which two JSON values differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = a.keys() | b.keys()
        return [d for key in keys for d in differences(a.get(key), b.get(key), f"{at}.{key}" if at else key)]
    return [] if a == b else [at]


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    write_whole(path, json.dumps(value, indent=1) + "\n")


def results(name: str, recipes: tuple[Recipe, ...], manifest: dict[str, Any], entries: list[dict[str, Any]]) -> dict[str, Any]:
    """results.json of the entries that are there."""
    first = recipes[0]
    return {
        "name": name,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "train_length": first.phases[-1].length,
        "lengths": list(first.evaluate.lengths),
        "seed": first.train.seed,
        "config": {recipe.name: recipe.to_dict() for recipe in recipes},
        "corpus": {
            "files": manifest["totals"]["files"],
            "bytes": manifest["totals"]["bytes"],
            "sha256": manifest["sha256"],
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
        },
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, {platform.system()}",
        "mixers": entries,
    }


def seconds_needed(recipe: Recipe, corpus: Corpus) -> float:
    """An estimate for the whole recipe on one thread: two steps of each phase on a throw-away model, evaluation by its tokens."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = build(recipe)
    seconds, step = 0.0, 0
    for phase in recipe.phases:
        best = math.inf
        for _ in range(2):
            batch = recipe.batch(corpus, step * recipe.train.accumulate)
            began = time.perf_counter()
            recipe.losses(model, Piece(batch.input_ids, batch.labels)).cross_entropy.backward()
            best = min(best, time.perf_counter() - began)
        seconds += best * phase.steps
        step += phase.steps
    # a token of evaluation costs a forward pass, about a third of a token of training
    e = recipe.evaluate
    measured = sum(e.tokens + 2 * max(e.rows, e.tokens // T) * T for T in e.lengths)
    torch.set_num_threads(threads)
    return seconds * (1 + measured / recipe.tokens() / 3)
