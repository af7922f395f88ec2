"""Progress while it is watched, and where nobody watches: a bar on a terminal; in a pipe or a scheduler's log a line now and then."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from needlework.train import Progress

EVERY = 10.0  # seconds from line to line


def animated(console: Console) -> bool:
    """Whether what is shown there can change in place."""
    return console.is_terminal and not console.is_dumb_terminal


class Lines:
    """Prints what it is given where nothing can change in place: the first at once, then one in `EVERY` seconds."""

    def __init__(self, console: Console):
        self.console, self.next = console, 0.0

    def __call__(self, told: Callable[[], str], now: bool = False) -> None:
        """now: print it however soon it comes, as the last of something."""
        if not animated(self.console) and (now or time.monotonic() >= self.next):
            self.next = time.monotonic() + EVERY
            self.console.print(told(), soft_wrap=True)


def time_left(seconds: float) -> str:
    return f"about {seconds / 60:.0f} min left" if seconds > 90 else f"about {seconds:.0f} s left"


@contextmanager
def training(console: Console, title: str, steps: int) -> Iterator[Callable[[Progress], None]]:
    """Gives what is to be called after every step."""
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
        then = "now it is measured" if last else time_left(p.seconds / p.step * (p.steps - p.step))
        speed = f"loss {p.loss:.3f}, {p.tokens_per_second:,.0f} tokens/s"
        lines(lambda: f"{title}: step {p.step} of {p.steps} ({p.step / p.steps:.0%}), {speed}, {then}", now=last)

    return tell
