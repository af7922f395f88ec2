"""The kinds of runs that a sweep can have, and what each needs of it."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from needlework.experiment.capacity import Capacity, run_capacity
from needlework.experiment.fork import Fork, run_fork
from needlework.experiment.recipe import Recipe
from needlework.experiment.runner import ended_entry, run
from needlework.train import BadStep, Progress

Job = Recipe | Fork | Capacity


def run_job(
    job: Job, directory: Path, on_step: Callable[[Progress], None] | None = None, stop: Callable[[], bool] = lambda: False
) -> dict[str, Any] | None:
    """Trains and measures one job in `directory`, from where an earlier call stopped. None if it was stopped."""
    match job:
        case Capacity():
            return run_capacity(job, directory, on_step, stop)
        case Fork():
            return run_fork(job, directory, directory.parents[1] / "corpora", on_step, stop)
        case Recipe():
            return run(job, directory, on_step=on_step, stop=stop)


def recipes_of(jobs: Iterable[Job]) -> list[Recipe]:
    """The recipes that read a text: to be checked, and their texts prepared, before any run begins."""
    found: list[Recipe] = []
    for job in jobs:
        match job:
            case Fork():
                found += job.recipes
            case Recipe():
                found.append(job)
    return found


def ended(job: Job, directory: Path, error: BadStep) -> dict[str, Any]:
    """The entry of an aborted job."""
    match job:
        case Fork():
            return ended_entry(job.trunk, directory / "trunk", error) | {"config": job.to_dict()}
        case Recipe():
            return ended_entry(job, directory, error)
        case Capacity():
            stop = {"step": error.step, "steps": job.train.steps, "why": error.where}
            return {"name": job.name, "seed": job.train.seed, "title": job.title, "ended": stop, "config": job.to_dict()}
