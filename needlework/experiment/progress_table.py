"""The table that shows the progress of many runs, and an estimate of the time left."""

import queue
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from needlework.experiment.jobs import Job
from needlework.experiment.progress import time_left
from needlework.report.sweep import found
from needlework.train import Progress

FEW = 12  # of more runs only those at work are shown


class ProgressTable:
    """The progress of every run: drawn in place on a terminal, one line in a log. The time left is corrected by the pace seen so far."""

    def __init__(self, recipes: Mapping[str, Job], seconds: dict[str, float], workers: int):
        self.recipes, self.seconds, self.workers = recipes, seconds, workers
        self.progress: dict[str, Progress] = {}
        self.started: dict[str, tuple[float, int]] = {}  # name -> time and step of its first report in this session
        self.done: dict[str, dict[str, Any]] = {}

    def read(self, reports: Any) -> None:
        """Takes the (name, Progress) pairs that the workers have put into the queue since."""
        while True:
            try:
                name, progress = reports.get_nowait()
            except queue.Empty:
                return
            self.progress[name] = progress
            self.started.setdefault(name, (time.monotonic(), progress.step))

    def finish(self, name: str, entry: dict[str, Any]) -> None:
        self.done[name] = entry

    def remaining(self) -> float:
        """Seconds left: the remaining work at the pace seen so far, shared by the workers, at least that of the longest run."""
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

    def line(self) -> str:
        """One line for a log: how many runs are done, how far the others are, the time left."""
        parts = [f"{len(self.done)} of {len(self.recipes)} done"]
        for name in self.running():
            p = self.progress[name]
            parts.append(
                f"{name} step {p.step} of {p.steps} ({p.step / p.steps:.0%}), loss {p.loss:.3f}, {p.tokens_per_second:,.0f} tokens/s"
            )
        return "; ".join([*parts, time_left(self.remaining())])

    def running(self) -> list[str]:
        return [name for name in self.progress if name not in self.done]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        full, empty = "#-" if options.ascii_only else "━╺"
        table = Table(box=None, pad_edge=False)
        for heading in ("mixer", "", "loss", "tokens/s", "found"):
            table.add_column(heading, justify="left" if heading in ("mixer", "") else "right")
        for name in self.recipes if len(self.recipes) <= FEW else self.running():
            recipe = self.recipes[name]
            progress, entry = self.progress.get(name), self.done.get(name)
            share = 1.0 if entry else progress.step / progress.steps if progress else 0.0
            bar = full * round(24 * share) + empty * (24 - round(24 * share))
            state = Text(f"{bar} {share:4.0%}", style="green" if entry else "cyan" if progress else "dim")
            numbers = ["", "", ""]
            if progress:
                numbers[:2] = f"{progress.loss:.3f}", f"{progress.tokens_per_second:,.0f}"
            if entry:
                shortest, tasks = entry["lengths"][0], entry["tasks"]
                numbers[0] = f"{entry['loss'][str(shortest)]:.3f}"
                numbers[1] = f"{entry['train']['tokens_per_second']:,.0f}"
                numbers[2] = f"{found(entry, tasks, [shortest]):.0%}" if tasks else ""
            table.add_row(recipe.title, state, *numbers)
        note = time_left(self.remaining())
        done = "" if len(self.recipes) <= FEW else f"{len(self.done)} of {len(self.recipes)} done; "
        yield table
        yield Text(f"{done}{note}; Ctrl-C saves; the same command goes on", style="dim")
