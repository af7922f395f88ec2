"""A recipe, and what is done with it: train, keep, measure; one recipe or several side by side, stopped and resumed.

Knows the order of things and the files of a run's directory. How to train, what a task is and how to measure are other rooms'.

    runs/<name>/config.json           what runs here, exactly
                manifest.json         the text that a comparison read
                results.json          what was measured               report.html       the same, to look at
                <mixer>/manifest.json     the text it read            <mixer>/training/     checkpoints, log.jsonl
                <mixer>/checkpoint/       for AutoModelForCausalLM    <mixer>/result.json   written when the mixer is done
"""

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

from needlework.data import Corpus, CorpusConfig, NeedleMix, byte_tokenizer, load_corpus
from needlework.eval.results import write_whole
from needlework.measure import Evaluation, measure
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM, disable_progress_bar
from needlework.train import Progress, Result, TrainConfig, train


@dataclass(frozen=True, kw_only=True)
class Phase:
    """`steps` optimiser steps on batches of `batch` rows of `length` tokens of a task."""

    steps: int
    batch: int
    length: int
    task: NeedleMix


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that fixes a run: model, text, phases, training, measurement. name is the run's; title and equation are for reading."""

    name: str
    title: str
    equation: str
    model: NeedleworkConfig
    corpus: CorpusConfig
    phases: tuple[Phase, ...]
    train: TrainConfig
    evaluate: Evaluation

    def __post_init__(self):
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
        } | {name: asdict(value) for name, value in fields.items()}

    def batch(self, corpus: Corpus, step: int):
        """The batch of a step: a pure function of the recipe, the corpus and the step."""
        first = 0
        for phase in self.phases:
            if step < first + phase.steps:
                return phase.task.batch(corpus, self.train.seed, step, phase.batch, phase.length)
            first += phase.steps
        raise ValueError(f"step {step}: the recipe has {first}")

    def tokens(self) -> int:
        """Training tokens."""
        return sum(p.steps * p.batch * p.length for p in self.phases)


class RunError(RuntimeError):
    """A run's directory is not what the recipe says; the message names what differs and what to do."""


def build(recipe: Recipe) -> NeedleworkForCausalLM:
    """The model at its start: the same for a seed, whatever ran before."""
    torch.manual_seed(recipe.train.seed)
    return NeedleworkForCausalLM(recipe.model)


def run(
    recipe: Recipe,
    directory: Path,
    *,
    on_step: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Train and measure one recipe in `directory`; what is done already is not done again.

    Returns the mixer's entry of results.json, or None if it was stopped. Training is one thread: small operators gain
    nothing from more, and one thread is bit-reproducible.
    """
    done = directory / "result.json"
    if done.exists():
        return json.loads(done.read_text())
    torch.set_num_threads(1)
    corpus = load_corpus(recipe.corpus, byte_tokenizer())
    directory.mkdir(parents=True, exist_ok=True)
    corpus.write_manifest(directory / "manifest.json")
    model = build(recipe)
    described = recipe.to_dict()
    described.pop("train")  # train() compares its own config
    described.pop("evaluate")
    described["corpus"]["sha256"] = corpus.manifest["sha256"]
    result = train(
        model, lambda step: recipe.batch(corpus, step), recipe.train, directory / "training",
        recipe=described, on_step=on_step, stop=stop,
    )  # fmt: skip
    if result.stopped:
        return None
    disable_progress_bar()  # there is one on the screen already
    model.save_pretrained(directory / "checkpoint")
    corpus.tokenizer.save(str(directory / "checkpoint" / "tokenizer.json"))
    entry = training_entry(recipe, model, result) | measure(model, corpus, recipe.evaluate)
    write_json(done, entry)
    return entry


def training_entry(recipe: Recipe, model: NeedleworkForCausalLM, result: Result) -> dict[str, Any]:
    lengths = recipe.evaluate.lengths
    return {
        "name": recipe.name,
        "title": recipe.title,
        "equation": recipe.equation,
        "parameters": model.num_parameters(),
        "state_bytes": {str(T): state_bytes(model, T) for T in lengths},
        "train": {
            "steps": list(range(1, len(result.losses) + 1)),
            "loss": list(result.losses),
            "tokens": result.tokens,
            "seconds": result.seconds,
            "tokens_per_second": result.tokens / result.seconds,
        },
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
            batch = recipe.batch(corpus, step)
            began = time.perf_counter()
            logits = model(batch.input_ids, use_cache=False).logits
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).backward()
            best = min(best, time.perf_counter() - began)
        seconds += best * phase.steps
        step += phase.steps
    # a token of evaluation costs a forward pass, about a third of a token of training
    e = recipe.evaluate
    measured = sum(e.tokens + 2 * max(e.rows, e.tokens // T) * T for T in e.lengths)
    torch.set_num_threads(threads)
    return seconds * (1 + measured / recipe.tokens() / 3)
