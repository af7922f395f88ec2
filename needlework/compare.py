"""Recipes side by side: two processes of one thread each, live progress, stopped by Ctrl-C and resumed by the same command."""

import multiprocessing
import queue
import signal
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from needlework.data import byte_tokenizer, load_corpus
from needlework.eval import save_results, write_report
from needlework.run import Recipe, RunError, claim, results, run, seconds_needed
from needlework.train import Progress


def compare(
    name: str, recipes: tuple[Recipe, ...], directory: Path, console: Console, workers: int = 2
) -> dict[str, Any] | None:
    """Train and measure every recipe in `directory`, write results.json and report.html.

    Returns the results, or None if it was stopped; then the same call goes on where it stopped.
    """
    claim(directory, {recipe.name: recipe.to_dict() for recipe in recipes})
    corpus = load_corpus(recipes[0].corpus, byte_tokenizer())
    corpus.write_manifest(directory / "manifest.json")
    totals = corpus.manifest["totals"]
    unread = f" ({totals['files_left_unread']} more not needed)" if totals["files_left_unread"] else ""
    console.print(
        f"{totals['files']} files{unread}, {totals['bytes'] / 2**20:.1f} MiB of text; {len(recipes)} mixers -> {directory}"
    )
    with console.status("timing two steps of each mixer, for the time left"):
        board = Board(
            {recipe.name: recipe for recipe in recipes}, {r.name: seconds_needed(r, corpus) for r in recipes}, workers
        )

    context = multiprocessing.get_context("spawn")  # a forked PyTorch may hang
    news, stop = context.Queue(), context.Event()
    entries: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(workers, context, _start_worker, (news, stop)) as pool:
        longest_first = sorted(recipes, key=lambda recipe: -board.seconds[recipe.name])
        waiting = {pool.submit(_work, recipe, directory / recipe.name): recipe.name for recipe in longest_first}
        with Live(board, console=console, refresh_per_second=4, transient=not console.is_terminal):
            try:
                while waiting:
                    done, _ = wait(waiting, timeout=0.25, return_when=FIRST_COMPLETED)
                    board.read(news)
                    for future in done:
                        finished = waiting.pop(future)
                        try:
                            entry = future.result()
                        except Exception as error:
                            raise RunError(f"{finished}: {error}") from error
                        if entry is not None:
                            entries[finished] = entry
                            board.finish(finished, entry)
                            if not console.is_terminal:  # nobody watches the board: a line a mixer
                                console.print(f"{entry['title']}: done in {entry['train']['seconds']:.0f} s of training")
            except BaseException:
                stop.set()  # workers save a checkpoint after the step that they are in
                for future in waiting:
                    future.cancel()
                raise
    measured = [entries[recipe.name] for recipe in recipes if recipe.name in entries]
    outcome = results(name, recipes, corpus.manifest, measured)
    save_results(outcome, directory / "results.json")
    write_report(outcome, directory / "report.html")
    return outcome


_news: Any = None
_stop: Any = None


def _start_worker(news, stop) -> None:
    """Ctrl-C reaches every process of the terminal; a worker leaves it to the one that asks it to stop."""
    global _news, _stop
    _news, _stop = news, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _work(recipe: Recipe, directory: Path) -> dict[str, Any] | None:
    def tell(progress: Progress) -> None:
        if progress.step % 5 == 0 or progress.step == progress.steps:
            _news.put((recipe.name, progress))

    return run(recipe, directory, on_step=tell, stop=_stop.is_set)


class Board:
    """What is shown while it runs. The time left is the estimate of each mixer, corrected by how those that ran went."""

    def __init__(self, recipes: dict[str, Recipe], seconds: dict[str, float], workers: int):
        self.recipes, self.seconds, self.workers = recipes, seconds, workers
        self.progress: dict[str, Progress] = {}
        self.started: dict[str, tuple[float, int]] = {}  # when a mixer was first heard of in this session, and at which step
        self.done: dict[str, dict[str, Any]] = {}

    def read(self, news) -> None:
        while True:
            try:
                name, progress = news.get_nowait()
            except queue.Empty:
                return
            self.progress[name] = progress
            self.started.setdefault(name, (time.monotonic(), progress.step))

    def finish(self, name: str, entry: dict[str, Any]) -> None:
        self.done[name] = entry

    def remaining(self) -> float:
        """Seconds: the work that is left, at the pace seen so far, shared by the workers; never below the longest single part."""
        spent = expected = 0.0
        left = []
        for name, total in self.seconds.items():
            share = 0.0
            if name in self.progress:
                progress = self.progress[name]
                began, first = self.started[name]
                share = progress.step / progress.steps
                spent += time.monotonic() - began if name not in self.done else 0.0
                expected += total * (progress.step - first) / progress.steps if name not in self.done else 0.0
            if name not in self.done:
                left.append(total * (1 - share))
        pace = spent / expected if expected > 1 else 1.0
        return max(sum(left) / self.workers, max(left, default=0.0)) * pace

    def __rich__(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for heading in ("mixer", "", "loss", "tokens/s", "one needle", "several"):
            table.add_column(heading, justify="left" if heading in ("mixer", "") else "right")
        for name, recipe in self.recipes.items():
            progress, entry = self.progress.get(name), self.done.get(name)
            share = 1.0 if entry else progress.step / progress.steps if progress else 0.0
            bar = "━" * round(24 * share) + "╺" * (24 - round(24 * share))
            state = Text(f"{bar} {share:4.0%}", style="green" if entry else "cyan" if progress else "dim")
            numbers = ["", "", "", ""]
            if progress:
                numbers[:2] = f"{progress.loss:.3f}", f"{progress.tokens_per_second:,.0f}"
            if entry:
                T = str(recipe.phases[-1].length)
                numbers = [
                    f"{entry['loss'][T]:.3f}", f"{entry['train']['tokens_per_second']:,.0f}",
                    f"{entry['needle'][T]['accuracy']:.0%}", f"{entry['needles'][T]['accuracy']:.0%}",
                ]  # fmt: skip
            table.add_row(recipe.title, state, *numbers)
        left = self.remaining()
        note = f"about {left / 60:.0f} min left" if left > 90 else f"about {left:.0f} s left"
        return Group(table, Text(f"{note} · Ctrl-C saves; the same command goes on", style="dim"))
