"""Processes that run recipes: one a worker, longest first, a GPU each where there are GPUs; stopped by Ctrl-C or after some minutes."""

import multiprocessing
import signal
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from needlework.experiment.board import Board
from needlework.experiment.claim import RunError
from needlework.experiment.progress import Lines, animated
from needlework.experiment.recipe import Recipe
from needlework.experiment.runner import EXPLAINED, run
from needlework.train import BadStep, Progress

# which of them it was is not told, and the others end with it
KILLED = "a worker was killed (by the system, where memory ran out); the same command goes on from the last checkpoint"

_news: Any = None
_stop: Any = None
_told: list[int] = []  # the signals that asked this worker to end


def work(
    jobs: dict[Path, Recipe],
    board: Board,
    console: Console,
    workers: int,
    minutes: float | None = None,
    on_done: Callable[[Path, dict[str, Any]], None] = lambda directory, entry: None,
    on_ended: Callable[[Path, BadStep], None] = lambda directory, error: None,
) -> dict[Path, dict[str, Any]]:
    """Run every recipe in its directory; the entries of those that are done, each told to `on_done` when it is, as a run that its
    guard ended is to `on_ended`.

    minutes: after so many every worker saves a checkpoint and ends; the same call goes on. A run that fails says so and the others go
    on; RunError names those that failed, at the end; a mistake of ours keeps its traceback.
    """
    context = multiprocessing.get_context("spawn")  # a forked PyTorch may hang
    news, stop, places = context.Queue(), context.Event(), context.Queue()
    for place in range(workers):
        places.put(place)
    entries: dict[Path, dict[str, Any]] = {}
    failed: dict[str, BaseException] = {}
    ends = time.monotonic() + 60 * minutes if minutes is not None else None
    with ProcessPoolExecutor(workers, context, _start, (news, stop, places)) as pool:
        longest_first = sorted(jobs, key=lambda directory: -board.seconds[directory.name])
        waiting = {pool.submit(_work, jobs[directory], directory): directory for directory in longest_first}
        lines = Lines(console)
        with Live(board, console=console, refresh_per_second=4, transient=not animated(console)):
            try:
                while waiting:
                    done, _ = wait(waiting, timeout=0.25, return_when=FIRST_COMPLETED)
                    board.read(news)
                    lines(board.line)
                    for future in done:
                        directory = waiting.pop(future)
                        if future.cancelled():
                            continue
                        if (error := future.exception()) is not None:
                            if isinstance(error, BrokenProcessPool):
                                error = RunError(KILLED)
                            if isinstance(error, BadStep):
                                on_ended(directory, error)
                            failed[directory.name] = error
                            console.print(f"{directory.name}: {type(error).__name__}: {error}", highlight=False, markup=False)
                        elif (entry := future.result()) is not None:
                            entries[directory] = entry
                            on_done(directory, entry)
                            board.finish(directory.name, entry)
                            if not animated(console):  # nobody watches the board: a line a run
                                seconds = entry["train"]["seconds"]
                                console.print(f"{directory.name}: done in {seconds:.0f} s of training", highlight=False)
                    if ends is not None and time.monotonic() > ends and not stop.is_set():
                        stop.set()
                        for future in waiting:
                            future.cancel()
            except BaseException as error:
                stop.set()  # workers save a checkpoint after the step that they are in
                if isinstance(error, KeyboardInterrupt):
                    console.print("stopping: every run saves after the step, or the rows, that it is in", highlight=False)
                for future in waiting:
                    future.cancel()
                raise
    for error in failed.values():
        if not isinstance(error, EXPLAINED):
            raise error
    if failed:
        told = "\n".join(f"{name}: {error}" for name, error in failed.items())
        raise RunError(told) from next(iter(failed.values()))
    return entries


def _start(news, stop, places) -> None:
    """Ctrl-C reaches every process of the terminal; a worker leaves it to the one that asks it to stop."""
    import torch

    global _news, _stop
    _news, _stop = news, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    place = places.get()
    if torch.cuda.is_available():
        torch.cuda.set_device(place % torch.cuda.device_count())


def _work(recipe: Recipe, directory: Path) -> dict[str, Any] | None:
    def tell(progress: Progress) -> None:
        if progress.step % 5 == 0 or progress.step == progress.steps:
            _news.put((directory.name, progress))

    def stop() -> bool:
        return bool(_told) or _stop.is_set()

    if stop():
        return None
    before = signal.signal(signal.SIGTERM, lambda number, _: _told.append(number))  # a scheduler's end comes to every process
    try:
        return run(recipe, directory, on_step=tell, stop=stop)
    finally:
        signal.signal(signal.SIGTERM, before)
        if _told:  # saved: now what was asked for
            signal.raise_signal(signal.SIGTERM)
