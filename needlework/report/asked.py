"""A claim, written before its runs, and the numbers that it takes from them: one a run, of the seeds that were planned.

A run that its guard ended, or that did not pass its gate in time, is over: its seed has run, and is not scored.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Entry = Mapping[str, Any]  # of a run, as a pack has it
Packs = Mapping[str, Sequence[Entry]]  # experiment -> its runs
Side = Mapping[int, float | None]  # seed -> the number of a run that is over; None: it is not scored


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
    """A claim, written before its runs: in `experiment`, `better` beats `worse` by more than `margin`, with the `seeds` seeds from `first` on.

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
    first: int = 0

    @property
    def planned(self) -> range:
        """The numbers of its seeds."""
        return range(self.first, self.first + self.seeds)


def at(*path: str) -> Callable[[Entry], float]:
    """The number at a place of an entry."""

    def of(entry: Entry) -> float:
        value: Any = entry
        for name in path:
            value = value[name]
        return float(value)

    return of


def passes(entry: Entry) -> bool:
    """Whether a run passed its gate by the step that it had to; True where it has none."""
    gate = entry.get("gate")
    return gate is None or (gate["step"] is not None and gate["step"] <= gate["most"])


def side(asked: Asked, name: str, entries: Sequence[Entry]) -> Side:
    """Of the side `name`, the planned seeds whose run is over."""
    found: dict[int, float | None] = {}
    for entry in entries:
        if entry["seed"] in asked.planned and entry["name"] == (asked.trunk or name):
            of = entry.get("branches", {}).get(name) if asked.trunk else entry
            scored = of is not None and "ended" not in of and passes(entry)
            found[entry["seed"]] = asked.measure.of(of) if scored else None
    return found


def title(asked: Asked, name: str, entries: Sequence[Entry]) -> str:
    """What the runs of the side `name` are called, for reading; their name where they say nothing."""
    runs = [entry for entry in entries if entry["name"] == (asked.trunk or name)]
    of = [run.get("branches", {}).get(name, {}) for run in runs] if asked.trunk else runs
    return next((entry["title"] for entry in of if "title" in entry), name)


def passed(asked: Asked, entries: Sequence[Entry]) -> tuple[int, int] | None:
    """Of the claim's runs, how many passed their gate, and how many are over; a run that its guard ended has no word of its gate."""
    names = (asked.trunk,) if asked.trunk else (asked.better, asked.worse)
    runs = [entry for entry in entries if entry["name"] in names and entry["seed"] in asked.planned]
    gated = any("gate" in entry for entry in runs)
    return (sum("gate" in entry and passes(entry) for entry in runs), len(runs)) if gated else None
