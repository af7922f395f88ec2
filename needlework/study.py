"""A study: many recipes and seeds, each a run of its own, in as many pieces as it takes; results of any machine lie side by side.

runs/<name>/<mixer>-<seed>/        a run (run.py)
            results/<mixer>-<seed>.json    what it measured, with its config: what `needlework report` reads. Of a run that its
                                           guard ended, where and why: it would end there again
                    corpora/<sha256>.json  the manifest of a text that they read: what it was made of
"""

from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from needlework.board import Board
from needlework.crew import work
from needlework.run import Recipe, ended_entry, text, write_json
from needlework.train import BadStep

TOKENS_PER_SECOND = (
    500_000  # of a small model on one GPU: where the time left is guessed from before any run has shown its pace
)


def study(
    recipes: tuple[Recipe, ...], directory: Path, console: Console, workers: int, minutes: float | None = None
) -> list[Path]:
    """Run what has no result yet; returns the results that are missing still.

    minutes: stop after so many, every run with a checkpoint; the same call goes on. One run a worker, a GPU each where there are.
    ValueError for two runs of one name and seed; RunError names the runs that failed, when all others are done.
    """
    wanted = {directory / "results" / f"{name_of(recipe)}.json": recipe for recipe in recipes}
    if len(wanted) < len(recipes):
        raise ValueError(f"study: {len(recipes)} recipes have {len(wanted)} names with seeds; each needs its own")
    jobs = {directory / path.stem: recipe for path, recipe in wanted.items() if not path.exists()}
    manifests = directory / "results" / "corpora"
    manifests.mkdir(parents=True, exist_ok=True)
    for corpus in {recipe.corpus for recipe in jobs.values()}:  # before the workers ask for it all at once
        made = text(corpus, directory.parent / "corpora")
        made.write_manifest(manifests / f"{made.manifest['sha256'][:16]}.json")
    pace = TOKENS_PER_SECOND if torch.cuda.is_available() else TOKENS_PER_SECOND / 50
    board = Board(
        {path.name: recipe for path, recipe in jobs.items()},
        {path.name: recipe.tokens() / pace for path, recipe in jobs.items()},
        workers,
    )
    console.print(f"{len(wanted) - len(jobs)} of {len(wanted)} runs are done -> {directory / 'results'}", highlight=False)

    def keep(run: Path, entry: dict[str, Any]) -> None:
        write_json(directory / "results" / f"{run.name}.json", entry)

    def keep_ended(run: Path, error: BadStep) -> None:
        keep(run, ended_entry(jobs[run], run, error))

    work(jobs, board, console, workers, minutes, keep, keep_ended)
    return [path for path in wanted if not path.exists()]


def name_of(recipe: Recipe) -> str:
    return f"{recipe.name}-{recipe.train.seed}"
