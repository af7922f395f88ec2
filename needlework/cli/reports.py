"""The command that makes a page of results, a sweep's or suites': report."""

import shlex
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from .app import app, console
from .recipes import load_module

NAMES = (
    "MIXERS",
    "FAMILIES",
    "GLANCE",
    "CLAIMS",
    "LIMITS",
)  # of a module: which mixers are compared, and what is claimed of them


@app.command()
def report(
    results: Annotated[
        Path, typer.Argument(help="The folder of a sweep's results, RUNS/NAME/results, or of suites', runs/eval.")
    ],
    of: Annotated[
        str, typer.Option(help="The recipes' module, which names the mixers to compare and the claims.")
    ] = "comparison",
    to: Annotated[Path | None, typer.Option(help="Where the page goes; default: beside the results.")] = None,
) -> None:
    """Make the page of a sweep from its results: tables with mean ± spread, curves, claims, limits.

    Of suites' results: each suite's numbers beside one another and beside the papers'.
    With --of study.page, of the second study from its packs: its claims, each with its verdict and picture.
    """
    from needlework.report import evaluations
    from needlework.report.sweep_page import write_page

    if evaluations.is_evaluation(results):
        page = evaluations.write_page(evaluations.load_evaluations(results), to or results)
        console.print(f"page: {page}", soft_wrap=True)
        return
    if hasattr(module := load_module(of), "PAGE"):
        console.print(f"page: {_answers(module, results, to or results)}", soft_wrap=True)
        return
    module, sweep = _read(results, of)
    page = write_page(sweep, to or results, module.CLAIMS, module.LIMITS, getattr(module, "EFFECTS", ()))
    console.print(f"page: {page}", soft_wrap=True)


def _answers(module: ModuleType, packs: Path, to: Path) -> Path:
    """The page of a study that asked before it ran, from the packs in a folder, <experiment>.jsonl.xz."""
    from needlework.experiment.pack import read_pack
    from needlework.recipes.study import EXPERIMENTS
    from needlework.report.answers_page import write_answers

    if not packs.is_dir():
        raise ValueError(f"{packs}: there is no such folder of packs")
    found = {name: list(read_pack(packs / f"{name}.jsonl.xz").values()) for name in EXPERIMENTS}
    return write_answers(module.PAGE, found, to)


def page_of(results: Path, of: str) -> str:
    """The command that makes the page, or the reason why it cannot be made."""
    try:
        _read(results, of)
    except ValueError as error:
        return f"results: {results} (no page of them: {error})"
    return shlex.join(["needlework", "report", str(results), "--of", of])


def _read(results: Path, of: str):
    """The module and the sweep; ValueError for a module without all of NAMES, or results that are no sweep."""
    from needlework.report.sweep import load_sweep

    module: ModuleType = load_module(of)
    if missing := [name for name in NAMES if not hasattr(module, name)]:
        raise ValueError(f"{of} has no {', '.join(missing)}, which a page is made of")
    return module, load_sweep(results, module.MIXERS, module.FAMILIES, module.GLANCE, getattr(module, "VOID", {}))
