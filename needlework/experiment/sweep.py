"""A sweep: many recipes and seeds, each a run of its own, in as many calls as it takes. Results of several machines share a folder.

runs/<name>/<mixer>-<seed>/        a run (runner.py)
            results/<mixer>-<seed>.json    its measurements and its config, for `needlework report`. Of an aborted run:
                                           where and why, for it would end there again
                    corpora/<sha256>.json  the manifest of a text that the runs read
"""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from needlework.experiment.claim import RunError, differences, has_work, plain, write_json
from needlework.experiment.jobs import Job, ended, recipes_of
from needlework.experiment.pack import read_pack, write_pack
from needlework.experiment.preflight import check
from needlework.experiment.progress_table import ProgressTable
from needlework.experiment.recipe import Recipe, text
from needlework.experiment.workers import work
from needlework.json_file import read_json
from needlework.train import BadStep

TOKENS_PER_SECOND = (
    500_000  # of a small model on one GPU: the first guess of the time left, before any run has reported its pace
)


def sweep(
    recipes: tuple[Job, ...],
    directory: Path,
    console: Console,
    workers: int,
    minutes: float | None = None,
    pack: Path | None = None,
) -> list[Path]:
    """Runs every recipe that has no result yet. Returns the paths of the results that are still missing.

    workers: runs at a time, a GPU each where there are GPUs. minutes: stop after so many, text preparation included, every run with a
    checkpoint; the same call resumes. pack: a file with results of earlier calls, perhaps on other machines, which takes this call's too.
    ValueError for two runs of one name and seed, and what `check` raises, before anything is written. RunError for a result of another
    config, and, when all others are done, for the runs that failed.
    """
    ends = math.inf if minutes is None else time.monotonic() + 60 * minutes
    packed = {} if pack is None else read_pack(pack)
    wanted = {directory / "results" / f"{name_of(recipe)}.json": recipe for recipe in recipes}
    if len(wanted) < len(recipes):
        raise ValueError(f"sweep: {len(recipes)} recipes have {len(wanted)} names with seeds; each needs its own")
    runs = {path: directory / path.stem for path in wanted}
    for path in wanted:
        if path.stem in packed and not path.exists():
            write_json(path, packed[path.stem])
    jobs = {runs[path]: recipe for path, recipe in wanted.items() if not finished(path, recipe, runs[path])}
    readers = {recipe.corpus: recipe for recipe in recipes_of(jobs.values())}
    texts = {corpus: text(recipe, directory.parent / "corpora") for corpus, recipe in readers.items()}
    for recipe in _apart(
        recipes_of(jobs.values())
    ):  # before anything is written, and before the workers ask for the texts all at once
        check(recipe, texts[recipe.corpus])
    for made in texts.values():
        manifests = directory / "results" / "corpora"
        manifests.mkdir(parents=True, exist_ok=True)
        made.write_manifest(manifests / f"{made.manifest['sha256'][:16]}.json")
    for path, run in runs.items():
        if run in jobs:
            path.unlink(missing_ok=True)  # where another config ended before its first checkpoint
    pace = TOKENS_PER_SECOND if torch.cuda.is_available() else TOKENS_PER_SECOND / 50
    table = ProgressTable(
        {path.name: recipe for path, recipe in jobs.items()},
        {path.name: recipe.tokens() / pace for path, recipe in jobs.items()},
        workers,
    )
    console.print(f"{len(wanted) - len(jobs)} of {len(wanted)} runs are done -> {directory / 'results'}", highlight=False)

    def keep(run: Path, entry: dict[str, Any]) -> None:
        write_json(directory / "results" / f"{run.name}.json", entry)

    def keep_ended(run: Path, error: BadStep) -> None:
        keep(run, ended(jobs[run], run, error))

    del texts
    try:
        work(jobs, table, console, workers, ends, keep, keep_ended)
    finally:
        if pack is not None:
            write_pack(pack, packed | {path.stem: read_json(path) for path in wanted if path.exists()})
    return [path for path in wanted if not path.exists()]


def _apart(recipes: list[Recipe]) -> list[Recipe]:
    """One of those that differ in nothing but their seeds."""
    seedless = lambda recipe: replace(recipe, train=replace(recipe.train, seed=0)).to_dict()
    return list({json.dumps(seedless(recipe), sort_keys=True): recipe for recipe in recipes}.values())


def name_of(recipe: Job) -> str:
    return f"{recipe.name}-{recipe.train.seed}"


def finished(result: Path, recipe: Job, run: Path) -> bool:
    """Whether `result` is there and of this recipe. A run that ended before its first checkpoint may begin anew with another config.

    RunError, with the fields that differ, for a result of another config.
    """
    if not result.exists():
        return False
    there, here = read_json(result), plain(recipe.resume_fingerprint())
    different = sorted(differences(_fingerprint(there["config"], here), here))
    if different and not ("ended" in there and not has_work(run)):
        raise RunError(f"{result} is of another config ({', '.join(different[:6])}); choose another --name, or remove it")
    return not different


def _fingerprint(config: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """The config with those fields of training alone that `like` has; a fork has training in each of its parts."""

    def part(name: str, value: Any) -> Any:
        if name == "train":
            return {field: value.get(field) for field in like[name]}
        return _fingerprint(value, like[name]) if isinstance(value, dict) and isinstance(like.get(name), dict) else value

    return {name: part(name, value) for name, value in config.items()}
