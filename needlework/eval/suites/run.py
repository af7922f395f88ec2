"""A suite measured cell by cell: what cannot be had is named and skipped, and what is done is kept."""

from collections.abc import Callable, Iterable
from importlib.util import find_spec

from .number import Unavailable
from .subject import Subject
from .suite import Cell, Item, Suite, key

Once = Callable[[str, Callable[[], Cell]], Cell]
INSTALL = "pip install 'lm-eval[ruler,longbench]>=0.4.13'"


def check(suite: Suite) -> None:
    """ValueError if a package that the suite needs is not installed; it says what to install."""
    if missing := [module for module in suite.needs if find_spec(module) is None]:
        raise ValueError(f"suite {suite.name} needs {', '.join(missing)}: {INSTALL}")


def measure(
    suite: Suite,
    subject: Subject,
    lengths: Iterable[int] = (),
    tasks: Iterable[str] = (),
    once: Once = lambda name, make: make(),
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Cell]:
    """Every cell of the suite by its key, or those asked for: measured, or with the reason why it is not.

    once: keeps cells by their key, so that a measurement that was stopped goes on. say: is called for each cell before it is measured and
    for each that is skipped.
    """
    cells: dict[str, Cell] = {}
    asked = suite.cells(lengths, tasks)
    for i, (item, length) in enumerate(asked, 1):
        name = key(item.task, length)
        say(f"{suite.name} {i}/{len(asked)}: {name}")
        try:
            cells[name] = once(name, lambda item=item, length=length: _cell(item, subject, length))
        except Unavailable as reason:
            cells[name] = Cell(skipped=str(reason))
            say(f"{name} is skipped: {reason}")
    return cells


def _cell(item: Item, subject: Subject, length: int) -> Cell:
    if subject.positions is not None and item.tokens(length) > subject.positions:
        raise Unavailable(
            f"the model has {subject.positions:,} positions, and this takes {item.tokens(length):,}; see --length"
        )
    return item.measure(subject, length)
