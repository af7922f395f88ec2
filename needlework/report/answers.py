"""What was asked before the runs, and the answer that the runs give: one number a run, a margin, a verdict in one word.

    d = better's mean − worse's, signed so that more is for the claim      paired by the trunk, or Welch's between runs

A claim says that d > δ, δ its margin. With the 95 % interval d ± h (Student's t) and p of "d = ± δ, the side it lies beyond":

    not run yet, open            seeds are missing: no run of them is over, or not those that a look needs
    no range                     every run of both sides is within δ of the measure's floor, or of its ceiling
    holds, opposite              d > δ, d < −δ with p < 0.05 after Holm's adjustment
    negligible                   the interval lies inside ± δ
    undecided                    none of these

Two looks are taken: when both sides of the first half of the seeds have run, and when all have. Between them the answer is the half's. At half
p counts 50 times, so a claim holds, or is opposite, with p < 0.001 (Haybittle and Peto), which leaves the level of the last look what it is;
it is open otherwise. What holds at half holds.

Holm's adjustment is over all claims that are judged together. One without a p, not run or without range, keeps its place with p = 1, and p of the
others only falls as its runs come in: what holds stays so.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .asked import Asked as Asked
from .asked import Entry, Packs, Side, passed, side, title
from .asked import Measure as Measure
from .asked import at as at
from .student import holm, inside, quantile
from .sweep import Spread

LEVEL, LOOK = 0.05, 0.001


class Answer(NamedTuple):
    """Of the last look. titles: of better and worse, for reading. better, worse: a number a run. mean ± half: their difference; p: after Holm, at half 50 times itself.

    n: pairs, or the runs of the smaller side, that are scored; looked: the seeds of the look; ran: the seeds of which both sides are over.
    passed: of how many runs with a gate, how many passed it; None where there is no gate.
    """

    asked: Asked
    word: str
    titles: tuple[str, str] = ("", "")
    better: Spread | None = None
    worse: Spread | None = None
    mean: float | None = None
    half: float | None = None
    p: float | None = None
    n: int = 0
    looked: int = 0
    ran: int = 0
    passed: tuple[int, int] | None = None


def answers(asked: Iterable[Asked], packs: Packs) -> list[Answer]:
    """An answer a claim, in their order, judged together."""
    found = [_looked(one, packs.get(one.experiment, [])) for one in asked]
    adjusted = holm([1.0 if answer.p is None else answer.p for answer in found])
    return [
        answer if answer.p is None else answer._replace(p=p, word=_word(answer, p))
        for answer, p in zip(found, adjusted, strict=True)
    ]


def compared(asked: Asked, entries: Sequence[Entry]) -> Answer:
    """The difference in all runs that are over, without a verdict."""
    return _compared(asked, side(asked, asked.better, entries), side(asked, asked.worse, entries), asked.planned)[0]


def _word(answer: Answer, p: float) -> str:
    asked, mean, half = answer.asked, answer.mean, answer.half
    if p < LEVEL:
        assert mean is not None  # p is below 1
        return "holds" if mean > 0 else "opposite"
    if answer.looked < asked.seeds:
        return f"open: {answer.ran} of {asked.seeds} seeds"
    return "negligible" if mean is not None and half is not None and abs(mean) + half < asked.margin else "undecided"


def _looked(asked: Asked, entries: Sequence[Entry]) -> Answer:
    """The last look's answer, its p before Holm and no word; of a claim that needs no test the word, and no p."""
    better, worse = (side(asked, name, entries) for name in (asked.better, asked.worse))
    over = better.keys() & worse.keys()
    titles = title(asked, asked.better, entries), title(asked, asked.worse, entries)
    counted = {"titles": titles, "ran": len(over), "passed": passed(asked, entries)}
    looks = [seeds for seeds in (asked.planned[: asked.seeds // 2], asked.planned) if seeds and over.issuperset(seeds)]
    if not looks:
        return Answer(asked, f"open: {len(over)} of {asked.seeds} seeds" if over else "not run yet", **counted)
    found = [_compared(asked, better, worse, seeds) for seeds in looks]
    last = found[-1][0]._replace(**counted)
    if last.looked == asked.seeds and (end := _no_range(last)):
        return last._replace(word=f"no range: at {end}")
    # what half of the seeds decided stays so
    return last._replace(p=min(p for answer, p in found if _favours(answer) == _favours(last)))


def _favours(answer: Answer) -> bool:
    return answer.mean is not None and answer.mean > 0


def _compared(asked: Asked, better: Side, worse: Side, seeds: Sequence[int]) -> tuple[Answer, float]:
    """The difference over `seeds`, and its p."""
    sides = [{seed: x for seed in seeds if (x := of.get(seed)) is not None} for of in (better, worse)]
    if asked.trunk:
        both = sides[0].keys() & sides[1].keys()
        sides = [{seed: x for seed, x in of.items() if seed in both} for of in sides]
    one, other = (Spread(tuple(of.values())) for of in sides)
    answer = Answer(asked, "", n=min(one.n, other.n), looked=len(seeds))
    if answer.n == 0:
        return answer, 1.0
    mean, error, freedom = (_paired if asked.trunk else _apart)(one, other)
    mean = -mean if asked.measure.lower else mean
    answer = answer._replace(better=one, worse=other, mean=mean)
    if error is None:
        return answer, 1.0
    beyond = abs(mean) - asked.margin
    p = 1.0 if beyond <= 0 else 0.0 if error == 0 else 1 - inside(beyond / error, freedom)
    times = 1.0 if len(seeds) == asked.seeds else LEVEL / LOOK
    return answer._replace(half=quantile(freedom) * error), min(1.0, times * p)


def _paired(better: Spread, worse: Spread) -> tuple[float, float | None, int]:
    """Mean, its standard error (None for one pair) and degrees of freedom."""
    d = [a - b for a, b in zip(better.values, worse.values, strict=True)]
    return statistics.fmean(d), statistics.stdev(d) / math.sqrt(len(d)) if len(d) > 1 else None, len(d) - 1


def _apart(better: Spread, worse: Spread) -> tuple[float, float | None, int]:
    """The same between runs that have nothing in common (Welch's t; degrees of freedom rounded down)."""
    mean = better.mean - worse.mean
    if min(better.n, worse.n) < 2:
        return mean, None, 0
    errors = [statistics.variance(side.values) / side.n for side in (better, worse)]
    total, least = sum(errors), min(better.n, worse.n) - 1
    spent = sum(error**2 / (side.n - 1) for error, side in zip(errors, (better, worse), strict=True))
    return mean, math.sqrt(total), max(least, math.floor(total**2 / spent + 1e-9)) if spent else least


def _no_range(answer: Answer) -> str:
    """Where all values lie: at "chance", at "the ceiling", or elsewhere, ""."""
    measure, margin = answer.asked.measure, answer.asked.margin
    if answer.better is None or answer.worse is None:
        return ""
    sign = -1 if measure.lower else 1  # more is better
    values = [sign * value for value in (*answer.better.values, *answer.worse.values)]
    low = measure.floor is not None and all(value <= sign * measure.floor + margin for value in values)
    high = measure.ceiling is not None and all(value >= sign * measure.ceiling - margin for value in values)
    return "chance" if low else "the ceiling" if high else ""
