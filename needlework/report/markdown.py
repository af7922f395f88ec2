"""Numbers and tables as the page of a sweep writes them, in Markdown."""

import math
import statistics
from collections.abc import Iterable, Sequence

from .claims import Difference
from .sweep import Spread


def mean(numbers: Iterable[float], digits: int = 4) -> str:
    """The mean; a dash where a number is not finite, as a rule's missing measure is."""
    found = statistics.fmean(numbers)
    return f"{found:.{digits}g}" if math.isfinite(found) else "–"


def decimal(s: Spread, digits: int) -> str:
    return f"{s.mean:.{digits}f}" + ("" if s.deviation is None else f" ± {s.deviation:.{digits}f}")


def percents(s: Spread, guess: float) -> str:
    """In percent: mean ± standard deviation, or run by run where the runs are split."""
    if s.split(guess):
        return " / ".join(_whole(100 * value) for value in s.values)
    return _whole(100 * s.mean) + ("" if s.deviation is None else f" ± {100 * s.deviation:.0f}")


def _whole(number: float) -> str:
    return f"{round(number)}"  # no "-0"


def points(d: Difference) -> str:
    return f"{100 * d.mean:+.1f}" + ("" if d.half is None else f" ± {100 * d.half:.1f}")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
