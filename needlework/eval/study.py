"""Many runs of many mixers: what was measured, gathered by mixer over seeds, and the claims held against it.

A run is one JSON file, `<mixer>-<seed>.json`, as needlework.run writes it; one that its guard ended has no numbers. What the page
says with these numbers is study_page.py's.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from . import texts

# Student's t at 97.5 %, by degrees of freedom: three seeds are two
T_QUANTILE = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
KEYS = ("name", "seed", "title", "lengths", "train_length", "tasks", "corpus", "machine", "versions", "commit")
MEASURED = ("parameters", "state_bytes", "train", "loss")  # and each of its tasks


class Spread(NamedTuple):
    """mean and sample standard deviation (None for one value) of n seeds."""

    mean: float
    deviation: float | None
    n: int

    @property
    def interval(self) -> float | None:
        """Half the 95 % interval of the mean (Student's t); None for one value."""
        if self.deviation is None:
            return None
        return T_QUANTILE[min(self.n, len(T_QUANTILE)) - 1] * self.deviation / math.sqrt(self.n)


class Claim(NamedTuple):
    """What a paper says: `better` finds more than `worse`, a mean over `tasks` and the `multiples` of the training length."""

    says: str
    better: str
    worse: str
    tasks: tuple[str, ...]
    multiples: tuple[float, ...]


class Verdict(NamedTuple):
    """difference: mean over paired seeds of (better − worse), in shares. word: "holds", "the opposite", "within the interval", "one seed
    cannot say", "ended early", "not run"."""

    claim: Claim
    word: str
    difference: Spread | None


def found(run: dict[str, Any], tasks: Iterable[str], lengths: Iterable[int]) -> float:
    """The share of the values' tokens that a run finds, a mean over tasks and lengths."""
    return statistics.fmean(run[task][str(T)]["accuracy"] for task in tasks for T in lengths)


@dataclass(frozen=True)
class Study:
    """The runs of a study by mixer, in the order in which the mixers came; `tasks` and `lengths` are those that every run has.

    ended: runs that their guard ended before the last step; in no mean.
    corpus: digest of the text. others: of the runs whose text is not quite that, its digest -> what it has in the place of what.
    families: who is looked at beside whom. glance: whom the one picture for everybody shows.
    """

    runs: dict[str, list[dict[str, Any]]]
    lengths: tuple[int, ...]
    train_length: int
    tasks: tuple[str, ...]
    corpus: str
    ended: tuple[dict[str, Any], ...] = ()
    others: dict[str, str] = field(default_factory=dict)
    families: dict[str, tuple[str, ...]] = field(default_factory=dict)
    glance: tuple[str, ...] = ()

    def title(self, mixer: str) -> str:
        return self.runs[mixer][0]["title"]

    def spread(self, mixer: str, of: Callable[[dict[str, Any]], float]) -> Spread:
        """A number of each of the mixer's runs, over its seeds."""
        values = [of(run) for run in self.runs[mixer]]
        return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))

    def accuracy(self, mixer: str, task: str, T: int) -> Spread:
        return self.spread(mixer, lambda run: run[task][str(T)]["accuracy"])

    def judge(self, claim: Claim) -> Verdict:
        """Runs in pairs of one seed, so of one order of data; a difference counts outside its 95 % interval (Student's t)."""
        by_seed = [{run["seed"]: run for run in self.runs.get(name, ())} for name in (claim.better, claim.worse)]
        seeds = sorted(by_seed[0].keys() & by_seed[1].keys())
        at = [T for T in self.lengths if T / self.train_length in claim.multiples]
        tasks = [task for task in claim.tasks if task in self.tasks]
        if not seeds or not at or not tasks:
            absent = {claim.better, claim.worse} - self.runs.keys()
            ended = bool(absent) and absent <= {run["name"] for run in self.ended}
            return Verdict(claim, "ended early" if ended else "not run", None)
        differences = [found(by_seed[0][seed], tasks, at) - found(by_seed[1][seed], tasks, at) for seed in seeds]
        mean = statistics.fmean(differences)
        if len(differences) == 1:
            return Verdict(claim, "one seed cannot say", Spread(mean, None, 1))
        difference = Spread(mean, statistics.stdev(differences), len(differences))
        sure = abs(mean) > difference.interval
        return Verdict(claim, "within the interval" if not sure else "holds" if mean > 0 else "the opposite", difference)


def load_study(
    directory: Path,
    order: Iterable[str] = (),
    families: dict[str, tuple[str, ...]] | None = None,
    glance: Iterable[str] = (),
) -> Study:
    """Every run in `directory` (*.json); mixers of `order` come first, in its order. A family of which fewer than two were run
    compares nothing and is left out; where none is left, there is one of all, as for a glance of which nobody was run.

    ValueError if none was measured, if one lacks a key, or if two runs were trained on another length, or read texts that are apart
    (`texts.py`).
    """
    paths = sorted(directory.glob("*.json"))
    runs: dict[str, list[dict[str, Any]]] = {}
    ended: list[dict[str, Any]] = []
    first: dict[str, Any] | None = None
    known, others = texts.manifests(directory), {}
    for path in paths:
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        numbers = () if "ended" in run else (*MEASURED, *run.get("tasks", ()))
        missing = [key for key in (*KEYS, *numbers) if key not in run]
        if missing:
            raise ValueError(f"{path}: misses the key {missing[0]!r}")
        first = first or run
        for key in ("lengths", "train_length", "tasks"):
            if run.get(key) != first.get(key):
                raise ValueError(f"{path}: {key} is {run.get(key)}, {paths[0].name} has {first.get(key)}: not one study")
        one, other = (of["corpus"]["sha256"] for of in (first, run))
        if one != other and (why := texts.apart(known.get(one), known.get(other))):
            raise ValueError(f"{path}: corpus is {other}, {paths[0].name} has {one}: not one study ({why})")
        if "ended" in run:
            ended.append(run)
            continue
        runs.setdefault(run["name"], []).append(run)
        if one != other:
            others[other] = texts.told(known[one], known[other])
    if not runs:
        raise ValueError(f"{directory}: no runs there (*.json)" + (" but such as ended early" if ended else ""))
    ordered = [name for name in order if name in runs]
    runs = {name: runs[name] for name in [*ordered, *(name for name in runs if name not in ordered)]}
    lengths, tasks = tuple(first["lengths"]), tuple(first["tasks"])
    present = {family: members for family, members in (families or {}).items() if len(runs.keys() & set(members)) > 1}
    seen = tuple(name for name in glance if name in runs)
    return Study(
        runs, lengths, first["train_length"], tasks, first["corpus"]["sha256"], tuple(ended), others,
        present or {"All": tuple(runs)}, seen or tuple(runs),
    )  # fmt: skip
