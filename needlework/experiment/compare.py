"""A comparison: recipes trained side by side, with live progress. Ctrl-C stops it, and the same command resumes it."""

import math
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from needlework.data import Corpus, text_read
from needlework.experiment.claim import claimable, claimed
from needlework.experiment.preflight import check
from needlework.experiment.progress_table import ProgressTable
from needlework.experiment.recipe import Recipe, build, text
from needlework.experiment.workers import work
from needlework.report import save_results, write_report
from needlework.train import Piece


def compare(
    name: str, recipes: tuple[Recipe, ...], directory: Path, console: Console, workers: int = 2
) -> dict[str, Any] | None:
    """Train and measure every recipe in `directory`, write results.json and report.html.

    Everything is read, checked and timed before `directory` is made. Returns the results, or None if a worker was stopped; the same
    call then resumes. Raises InUse or RunError as `claimed` does, ValueError as `check` does.
    """
    config = {recipe.name: recipe.resume_fingerprint() for recipe in recipes}
    claimable(directory, config)
    corpus = text(recipes[0], directory.parent / "corpora")
    for recipe in recipes:
        check(recipe, corpus)
    console.print(f"{text_read(corpus.manifest)}; {len(recipes)} mixers -> {directory}", soft_wrap=True)
    with console.status("timing two steps of each mixer, for the time left"):
        table = ProgressTable(
            {recipe.name: recipe for recipe in recipes}, {r.name: seconds_needed(r, corpus) for r in recipes}, workers
        )

    directories = {directory / recipe.name: recipe for recipe in recipes}
    with claimed(directory, config) as anew:
        if anew:
            console.print(f"no checkpoint had been made: begun anew with another config ({', '.join(anew[:6])})")
        corpus.write_manifest(directory / "manifest.json")
        entries = work(directories, table, console, workers)
        if len(entries) < len(recipes):
            return None
        outcome: Any = results(name, recipes, corpus.manifest, [entries[path] for path in directories])
        save_results(outcome, directory / "results.json")
        write_report(outcome, directory / "report.html")
    return outcome


def results(name: str, recipes: tuple[Recipe, ...], manifest: dict[str, Any], entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of results.json for these entries."""
    first = recipes[0]
    return {
        "name": name,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "train_length": first.phases[-1].length,
        "lengths": list(first.evaluate.lengths),
        "seed": first.train.seed,
        "tasks": list(first.evaluate.tasks),
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
    """Estimated seconds of the whole recipe on one thread: two steps of each phase are timed on a throw-away model, evaluation is counted
    by its tokens."""
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
