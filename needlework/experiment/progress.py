"""Progress: a bar on a terminal, a line every ten seconds in a pipe or a scheduler's log."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from needlework.train import Progress

EVERY = 10.0  # seconds from line to line


def animated(console: Console) -> bool:
    """Whether the console can redraw a line."""
    return console.is_terminal and not console.is_dumb_terminal


class Lines:
    """Prints lines where the console cannot redraw: the first at once, then at most one in `EVERY` seconds."""

    def __init__(self, console: Console):
        self.console, self.next = console, 0.0

    def __call__(self, line: Callable[[], str], now: bool = False) -> None:
        """now: print it whatever the time, e.g. the last line."""
        if not animated(self.console) and (now or time.monotonic() >= self.next):
            self.next = time.monotonic() + EVERY
            self.console.print(line(), soft_wrap=True)


def time_left(seconds: float) -> str:
    return f"about {seconds / 60:.0f} min left" if seconds > 90 else f"about {seconds:.0f} s left"


@contextmanager
def training(console: Console, title: str, steps: int) -> Iterator[Callable[[Progress], None]]:
    """Yields a function to call after every step."""
    if not animated(console):
        yield _in_lines(console, title)
        return
    now = TextColumn("{task.fields[now]}")
    with Bar(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), now, console=console
    ) as bar:
        task = bar.add_task(title, total=steps, now="")
        yield lambda p: bar.update(task, completed=p.step, now=f"loss {p.loss:.3f}, {p.tokens_per_second:,.0f} tokens/s")


def _in_lines(console: Console, title: str) -> Callable[[Progress], None]:
    lines = Lines(console)

    def tell(p: Progress) -> None:
        last = p.step == p.steps
        then = "measuring now" if last else time_left(p.seconds / p.step * (p.steps - p.step))
        speed = f"loss {p.loss:.3f}, {p.tokens_per_second:,.0f} tokens/s"
        lines(lambda: f"{title}: step {p.step} of {p.steps} ({p.step / p.steps:.0%}), {speed}, {then}", now=last)

    return tell
