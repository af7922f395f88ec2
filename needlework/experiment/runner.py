"""A run: one recipe trained, saved and measured in its directory, stopped and resumed.

Knows the order of these and the files of the directory. `train`, `data` and `evaluate.py` know how.

    runs/corpora/<digest>/            texts, tokenised once for every run that reads them
    runs/<name>/config.json           the resume fingerprint of every recipe that runs here
                manifest.json         the text that a comparison read
                results.json          a comparison's measurements     report.html       its page
                <mixer>/manifest.json     the text it read            <mixer>/training/     checkpoints, log.jsonl
                <mixer>/checkpoint/       for AutoModelForCausalLM    <mixer>/result.json   written when the mixer is done,
                                                                      and the checkpoint's card after it
                <mixer>/measuring-….json  its measurements so far     lock, <mixer>/lock    held by the process at work
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from needlework.data import Corpus, SourceError, StoreError, eot_id
from needlework.diagnostics import state_peaks
from needlework.experiment.claim import RunError, write_json
from needlework.experiment.evaluate import Evaluation as Evaluation
from needlework.experiment.evaluate import Stopped, measure
from needlework.experiment.gate import Gatekeeper
from needlework.experiment.pieces import Pieces, measurement
from needlework.experiment.preflight import check
from needlework.experiment.pretrained import load_model
from needlework.experiment.recipe import Phase as Phase
from needlework.experiment.recipe import Recipe as Recipe
from needlework.experiment.recipe import build, text
from needlework.explained import PYTHONS
from needlework.json_file import read_json
from needlework.models import NeedleworkForCausalLM, disable_progress_bar, save_checkpoint
from needlework.report.card import write_card
from needlework.report.curves import curves
from needlework.train import BadStep, CheckpointError, InUse, Progress, Result, World, alone, full_state, train

# errors of the user or the machine, shown as one line; any other is a mistake of ours and keeps its traceback
EXPLAINED = (*PYTHONS, torch.OutOfMemoryError, RunError, InUse, CheckpointError, StoreError, SourceError)


def run(
    recipe: Recipe,
    directory: Path,
    *,
    begin: Callable[[], None] = lambda: None,
    on_step: Callable[[Progress], None] | None = None,
    on_text: Callable[[Corpus], None] = lambda corpus: None,
    stop: Callable[[], bool] = lambda: False,
    corpora: Path | None = None,
) -> dict[str, Any] | None:
    """Trains and measures one recipe in `directory`, on this rank's part of it, from where an earlier call stopped.

    On a GPU where there is one. Returns the run's entry of results.json; None if it was stopped, and on all ranks but the first,
    which alone measures. On a CPU training is one thread: small operators gain nothing from more, and one is bit-reproducible.

    begin: called on the first rank when the text is read, the recipe checked and the model built; what it raises ends the run.
    Before it nothing is written but the text below runs/corpora. on_text: called after it, with the text.
    stop: asked before every step, and throughout the measurement. corpora: where texts are prepared; None: beside the runs.
    Raises InUse if another process runs in `directory`.
    """
    done = directory / "result.json"
    if done.exists():
        return read_json(done)
    torch.set_num_threads(1)
    with ExitStack() as held:
        with World.open(recipe.train.parallel) as world:
            corpora = corpora or directory.parents[1] / "corpora"
            if world.ranks > 1:
                world.share(corpora)
                world.agree(lambda: bool(text(recipe, corpora)))  # one rank makes it, the others open it
            corpus = text(recipe, corpora)
            check(recipe, corpus, world)
            model = build(recipe)

            def take() -> None:
                begin()
                held.enter_context(alone(directory))
                corpus.write_manifest(directory / "manifest.json")
                on_text(corpus)

            world.agree(take)
            if world.mesh is None and torch.cuda.is_available():
                model.cuda()
            described = recipe.to_dict()
            described.pop("train")  # train() compares its own config
            described.pop("evaluate")
            described["corpus"]["sha256"] = corpus.manifest["sha256"]
            keeper = Gatekeeper(recipe.gate, directory)
            result = train(
                model, lambda index: recipe.batch(corpus, index, keeper.passed), recipe.train, directory / "training",
                losses=recipe.losses, recipe=described, on_step=keeper.noting(on_step), stop=stop, world=world, states=state_peaks,
            )  # fmt: skip
            if result.stopped:
                return None
            weights = full_state(model)
            if not world.is_first:
                return None
        disable_progress_bar()  # there is one on the screen already
        save_checkpoint(model, corpus.tokenizer, eot_id(corpus.tokenizer), directory / "checkpoint", weights)
        device = model.device
        del model, weights  # what is measured is what was kept: whole, and not compiled for the training's shapes
        try:
            finish(recipe, corpus, result, directory, device, stop)
        except Stopped:
            return None
    return read_json(done)


def finish(
    recipe: Recipe, corpus: Corpus, result: Result, directory: Path, device: torch.device, stop: Callable[[], bool]
) -> None:
    """Measures the saved checkpoint and writes result.json. Raises Stopped if `stop` says so; the next call resumes."""
    checkpoint = directory / "checkpoint"
    pieces = Pieces(directory, measurement(checkpoint, corpus, recipe.evaluate, device))
    # transformers wraps `to` as a function, and the checker takes its first argument for the model
    kept = lambda config: load_model(checkpoint, config).to(device)  # pyrefly: ignore[bad-argument-type]
    model = kept(recipe.model)
    # the call that trained comes here first: a call that resumes a measurement has timed no steps
    log = curves(directory / "training" / "log.jsonl")
    entry = pieces.once("training", partial(training_entry, recipe, model, result, log))
    entry = entry | measure(model, corpus, recipe.evaluate, pieces.once, stop)
    if recipe.evaluate.full_context:
        once = lambda name, make: pieces.once(f"full context: {name}", make)
        entry["full_context"] = measure(kept(recipe.model.full_context()), corpus, recipe.evaluate, once, stop)
    if recipe.gate is not None:
        entry["gate"] = {"step": Gatekeeper(recipe.gate, directory).passed, "most": recipe.phases[0].steps}
    write_json(directory / "result.json", entry | origin(recipe, directory))
    write_card(checkpoint)
    pieces.forget()


def training_entry(
    recipe: Recipe, model: NeedleworkForCausalLM, result: Result, log: dict[str, list[float]] | None = None
) -> dict[str, Any]:
    served = torch.bfloat16 if recipe.train.autocast == "bf16" else model.dtype  # what its products had in training
    return named(recipe) | {
        "parameters": model.num_parameters(),
        "state_bytes": {str(T): state_bytes(model, T, served) for T in recipe.evaluate.lengths},
        "train": {
            "steps": list(range(1, len(result.losses) + 1)),
            "loss": list(result.losses),
            "tokens": result.tokens,
            "seconds": result.seconds,
            "tokens_per_second": result.tokens_per_second,
        }
        | ({} if log is None else {"log": log}),
    }


def ended_entry(recipe: Recipe, directory: Path, error: BadStep) -> dict[str, Any]:
    """The entry of an aborted run: `ended` instead of measurements."""
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
    """The text, the machine and the code of the run's last start."""
    manifest = read_json(directory / "manifest.json")
    start = read_json(directory / "training" / "ran.json")[-1]
    return {
        "corpus": {"sha256": manifest["sha256"]},
        "machine": start["device"],
        "versions": start["versions"],
        "commit": start["commit"],
        "config": recipe.to_dict(),
    }


def state_bytes(model: NeedleworkForCausalLM, T: int, dtype: torch.dtype | None = None) -> int:
    """Bytes of one sequence's state over all layers after T tokens, the model in `dtype` (None: its own); fixed states are float32."""
    return sum(block.mixer.state_size(T, dtype or model.dtype) for block in model.model.blocks)
