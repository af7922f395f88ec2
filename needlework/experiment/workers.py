"""The worker pool: processes that run recipes, longest first, a GPU each where there are GPUs. Ctrl-C or a time limit stops it."""

import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from needlework.experiment.claim import RunError
from needlework.experiment.jobs import Job, run_job
from needlework.experiment.progress import Lines, animated
from needlework.experiment.progress_table import ProgressTable
from needlework.experiment.runner import EXPLAINED
from needlework.train import BadStep, Progress

# the pool does not say which worker died; the others end with it
KILLED = "a worker was killed (by the system, where memory ran out); the same command goes on from the last checkpoint"

_progress: Any = None
_stop: Any = None
_signals: list[int] = []  # the signals that asked this worker to end


def work(
    jobs: Mapping[Path, Job],
    table: ProgressTable,
    console: Console,
    workers: int,
    ends: float = math.inf,
    on_done: Callable[[Path, dict[str, Any]], None] = lambda directory, entry: None,
    on_ended: Callable[[Path, BadStep], None] = lambda directory, error: None,
) -> dict[Path, dict[str, Any]]:
    """Runs every job in its directory and returns the entries of the runs that finished.

    on_done: called for each finished run. on_ended: called for aborted runs.
    ends: at that time of the monotonic clock every worker saves a checkpoint and ends; the same call goes on.
    A run that fails is reported on the console, and the others go on. RunError names the failed runs at the end; a mistake of ours
    keeps its traceback.
    """
    context = multiprocessing.get_context("spawn")  # a forked PyTorch may hang
    progress, stop, places = context.Queue(), context.Event(), context.Queue()
    for place in range(workers):
        places.put(place)
    outcomes = _Outcomes(table, console, on_done, on_ended)
    with ProcessPoolExecutor(workers, context, _start, (progress, stop, places)) as pool:
        longest_first = sorted(jobs, key=lambda directory: -table.seconds[directory.name])
        waiting = {pool.submit(_work, jobs[directory], directory): directory for directory in longest_first}
        with Live(table, console=console, refresh_per_second=4, transient=not animated(console)):
            try:
                _collect(waiting, outcomes, progress, stop, ends)
            except BaseException as error:
                stop.set()  # workers save a checkpoint after the step that they are in
                if isinstance(error, KeyboardInterrupt):
                    console.print("stopping: every run saves after the step, or the rows, that it is in", highlight=False)
                _cancel(waiting)
                raise
    outcomes.raise_failures()
    return outcomes.entries


class _Outcomes:
    """What became of each run: its entry, or its error."""

    def __init__(self, table: ProgressTable, console: Console, on_done: Callable, on_ended: Callable):
        self.table, self.console, self.on_done, self.on_ended = table, console, on_done, on_ended
        self.entries: dict[Path, dict[str, Any]] = {}
        self.failed: dict[str, BaseException] = {}

    def take(self, directory: Path, future: Future) -> None:
        if future.cancelled():
            return
        if (error := future.exception()) is not None:
            self._fail(directory, RunError(KILLED) if isinstance(error, BrokenProcessPool) else error)
        elif (entry := future.result()) is not None:
            self._finish(directory, entry)

    def _fail(self, directory: Path, error: BaseException) -> None:
        if isinstance(error, BadStep):
            self.on_ended(directory, error)
        self.failed[directory.name] = error
        self.console.print(f"{directory.name}: {type(error).__name__}: {error}", highlight=False, markup=False)

    def _finish(self, directory: Path, entry: dict[str, Any]) -> None:
        self.entries[directory] = entry
        self.on_done(directory, entry)
        self.table.finish(directory.name, entry)
        if not animated(self.console):  # the output is no terminal: a line a run
            self.console.print(f"{directory.name}: done in {entry['train']['seconds']:.0f} s of training", highlight=False)

    def raise_failures(self) -> None:
        """The first error that is a mistake of ours as it is; else RunError, which names all."""
        for error in self.failed.values():
            if not isinstance(error, EXPLAINED):
                raise error
        if self.failed:
            messages = "\n".join(f"{name}: {error}" for name, error in self.failed.items())
            raise RunError(messages) from next(iter(self.failed.values()))


def _collect(waiting: dict[Future, Path], outcomes: _Outcomes, progress: Any, stop: Any, ends: float) -> None:
    """Until no run is waited for. After `ends` workers are asked to stop."""
    lines = Lines(outcomes.console)
    while waiting:
        done, _ = wait(waiting, timeout=0.25, return_when=FIRST_COMPLETED)
        outcomes.table.read(progress)
        lines(outcomes.table.line)
        for future in done:
            outcomes.take(waiting.pop(future), future)
        if time.monotonic() > ends and not stop.is_set():
            stop.set()
            _cancel(waiting)


def _cancel(waiting: dict[Future, Path]) -> None:
    for future in waiting:
        future.cancel()


def _start(progress, stop, places) -> None:
    """In each worker, once. A worker ignores Ctrl-C, which reaches every process of the terminal: the pool asks it to stop."""
    import torch

    global _progress, _stop
    _progress, _stop = progress, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    place = places.get()
    if torch.cuda.is_available():
        torch.cuda.set_device(place % torch.cuda.device_count())


def _work(job: Job, directory: Path) -> dict[str, Any] | None:
    def tell(progress: Progress) -> None:
        if progress.step % 5 == 0 or progress.step == progress.steps:
            _progress.put((directory.name, progress))

    def stop() -> bool:
        return bool(_signals) or _stop.is_set()

    if stop():
        return None
    # a scheduler signals every process
    before = signal.signal(signal.SIGTERM, lambda number, _: _signals.append(number))
    try:
        return run_job(job, directory, on_step=tell, stop=stop)
    finally:
        signal.signal(signal.SIGTERM, before)
        if _signals:  # the run is saved
            signal.raise_signal(signal.SIGTERM)
