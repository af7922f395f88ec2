"""What was asked before the runs, and the answer that the runs give: one number a run, a margin, a verdict in one word.

    d = better's mean − worse's, signed so that more is for the claim      paired by the trunk, or Welch's between runs

A claim says that d > δ, δ its margin. With the 95 % interval d ± h (Student's t) and p of "d = ± δ, the side it lies beyond":

    not run yet, open            too few seeds: none, or fewer than half of those that were fixed
    no range                     every run of both sides is within δ of the measure's floor, or of its ceiling
    negligible                   the interval lies inside ± δ
    holds, opposite              d > δ, d < −δ with p < 0.05 after Holm's adjustment over the claims that are judged together
    undecided                    none of these

One look is taken at half of the seeds: there a claim holds, or is opposite, with p < 0.001 only (Haybittle and Peto), which leaves the
level of the last look what it is, and is open otherwise.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .student import holm, inside, quantile
from .sweep import Spread

LEVEL, LOOK = 0.05, 0.001
Entry = Mapping[str, Any]  # of a run, as a pack has it
Packs = Mapping[str, Sequence[Entry]]  # experiment -> its runs


class Measure(NamedTuple):
    """of(entry): a run's number. lower: less is better. times: what it is shown in multiples of, 100 for points. floor, ceiling: its ends,
    chance and the best there is; None where it has none."""

    of: Callable[[Entry], float]
    unit: str
    lower: bool = False
    times: float = 1.0
    floor: float | None = None
    ceiling: float | None = None


class Asked(NamedTuple):
    """A claim, written before its runs: in `experiment`, `better` beats `worse` by more than `margin`, with so many seeds.

    trunk: the fork's name, whose branches the two are; "": they are runs of their own.
    """

    about: str
    says: str
    experiment: str
    trunk: str
    better: str
    worse: str
    measure: Measure
    margin: float
    seeds: int


class Answer(NamedTuple):
    """better, worse: a number a run. mean ± half: their difference; p after Holm; n: pairs, or the runs of the smaller side. passed: of
    how many runs with a gate, how many passed it; None where there is no gate."""

    asked: Asked
    word: str
    better: Spread | None = None
    worse: Spread | None = None
    mean: float | None = None
    half: float | None = None
    p: float | None = None
    n: int = 0
    passed: tuple[int, int] | None = None


def at(*path: str) -> Callable[[Entry], float]:
    """The number at a place of an entry."""

    def of(entry: Entry) -> float:
        value: Any = entry
        for name in path:
            value = value[name]
        return float(value)

    return of


def answers(asked: Iterable[Asked], packs: Packs) -> list[Answer]:
    """An answer a claim, in their order; Holm's adjustment is over those that have a p."""
    found = [_measured(one, packs.get(one.experiment, [])) for one in asked]
    tested = [i for i, answer in enumerate(found) if answer.p is not None and not answer.word]
    for i, p in zip(tested, holm([p for j in tested if (p := found[j].p) is not None]), strict=True):
        found[i] = found[i]._replace(p=p, word=_word(found[i], p))
    return found


def _word(answer: Answer, p: float) -> str:
    asked, mean, half = answer.asked, answer.mean, answer.half
    assert mean is not None and half is not None
    whole = answer.n >= asked.seeds
    if p < (LEVEL if whole else LOOK):
        return "holds" if mean > 0 else "opposite"
    if not whole:
        return f"open: {answer.n} of {asked.seeds} seeds"
    return "negligible" if abs(mean) + half < asked.margin else "undecided"


def _measured(asked: Asked, entries: Sequence[Entry]) -> Answer:
    """The answer that needs no test; of another all but p's adjustment and the word, which is empty."""
    better, worse = (_values(asked, name, entries) for name in (asked.better, asked.worse))
    passed = _passed(asked, entries)
    if asked.trunk:
        both = better.keys() & worse.keys()
        better, worse = ({seed: side[seed] for seed in sorted(both)} for side in (better, worse))
    n = min(len(better), len(worse))
    if n == 0:
        return Answer(asked, "not run yet", passed=passed)
    one, other = (Spread(tuple(side[seed] for seed in sorted(side))) for side in (better, worse))
    answer = Answer(asked, "", one, other, n=n, passed=passed)
    mean, error, freedom = (_paired if asked.trunk else _apart)(one, other)
    mean = -mean if asked.measure.lower else mean
    answer = answer._replace(mean=mean)
    if n < max(2, asked.seeds // 2) or error is None:
        return answer._replace(word=f"open: {n} of {asked.seeds} seeds")
    answer = answer._replace(half=quantile(freedom) * error)
    if (end := _no_range(asked, [*one.values, *other.values])) and n >= asked.seeds:
        return answer._replace(word=f"no range: at {end}")
    beyond = abs(mean) - asked.margin
    p = 1.0 if beyond <= 0 else 0.0 if error == 0 else 1 - inside(beyond / error, freedom)
    return answer._replace(p=p)


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


def _values(asked: Asked, name: str, entries: Sequence[Entry]) -> dict[int, float]:
    """seed -> a run's number, of the side `name`; aborted runs, and those that did not pass their gate, have none."""
    found = {}
    for entry in entries:
        of: Entry | None = entry
        if asked.trunk:
            of = entry.get("branches", {}).get(name) if entry["name"] == asked.trunk else None
        elif entry["name"] != name:
            of = None
        if of is not None and "ended" not in of and _passes(entry):
            found[entry["seed"]] = asked.measure.of(of)
    return found


def _passes(entry: Entry) -> bool:
    return "gate" not in entry or entry["gate"]["step"] is not None


def _passed(asked: Asked, entries: Sequence[Entry]) -> tuple[int, int] | None:
    """Of the claim's runs that have a gate, how many passed it, and how many there are."""
    names = (asked.trunk,) if asked.trunk else (asked.better, asked.worse)
    gated = [entry for entry in entries if entry["name"] in names and "gate" in entry]
    return (sum(map(_passes, gated)), len(gated)) if gated else None


def _no_range(asked: Asked, values: list[float]) -> str:
    """Where all values lie: at "chance", at "the ceiling", or elsewhere, ""."""
    measure, margin = asked.measure, asked.margin
    low = measure.floor is not None and all(value <= measure.floor + margin for value in values)
    high = measure.ceiling is not None and all(value >= measure.ceiling - margin for value in values)
    return "chance" if low else "the ceiling" if high else ""
