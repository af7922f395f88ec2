"""Recipes side by side: two processes of one thread each, live progress, stopped by Ctrl-C and resumed by the same command."""

from pathlib import Path
from typing import Any

from rich.console import Console

from needlework.board import Board
from needlework.crew import work
from needlework.eval import save_results, write_report
from needlework.run import Recipe, claim, results, seconds_needed, text


def compare(
    name: str, recipes: tuple[Recipe, ...], directory: Path, console: Console, workers: int = 2
) -> dict[str, Any] | None:
    """Train and measure every recipe in `directory`, write results.json and report.html.

    Returns the results, or None if it was stopped; then the same call goes on where it stopped.
    """
    claim(directory, {recipe.name: recipe.lasting() for recipe in recipes})
    corpus = text(recipes[0].corpus, directory.parent / "corpora")
    corpus.write_manifest(directory / "manifest.json")
    totals = corpus.manifest["totals"]
    unread = f" ({totals['files_left_unread']} more not needed)" if totals.get("files_left_unread") else ""
    console.print(
        f"{totals['files']} files{unread}, {totals['bytes'] / 2**20:.1f} MiB of text; {len(recipes)} mixers -> {directory}"
    )
    with console.status("timing two steps of each mixer, for the time left"):
        board = Board(
            {recipe.name: recipe for recipe in recipes}, {r.name: seconds_needed(r, corpus) for r in recipes}, workers
        )

    directories = {directory / recipe.name: recipe for recipe in recipes}
    entries = work(directories, board, console, workers)
    measured = [entries[path] for path in directories if path in entries]
    outcome = results(name, recipes, corpus.manifest, measured)
    save_results(outcome, directory / "results.json")
    write_report(outcome, directory / "report.html")
    return outcome
