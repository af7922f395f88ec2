"""Many runs of many mixers: what was measured, gathered by mixer over seeds.

A run is one JSON file, `<mixer>-<seed>.json`, as needlework.experiment.runner writes it, or the same compressed, `.json.xz`; an
aborted run has no numbers. What is claimed of them is claims.py's, what the page says sweep_page.py's.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from needlework.eval.retrieval import chance
from needlework.json_file import json_files, read_json

from . import texts

KEYS = ("name", "seed", "title", "lengths", "train_length", "tasks", "corpus", "machine", "versions", "commit")
MEASURED = ("parameters", "state_bytes", "train", "loss")  # and each of its tasks


class Spread(NamedTuple):
    """A number of each of n runs, by seed."""

    values: tuple[float, ...]

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation; None for one value."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def split(self, guess: float) -> bool:
        """Whether the runs lie further apart than half of the range above chance: some learned the task, some did
        not, and a mean says little."""
        return max(self.values) - min(self.values) > (1 - guess) / 2


class Void(NamedTuple):
    """Runs of faulty code, by the commits that they ran from: those whose commit begins with one of `commits`."""

    reason: str
    commits: tuple[str, ...]


def found(run: Mapping[str, Any], tasks: Iterable[str], lengths: Iterable[int]) -> float:
    """The share of the values' tokens that a run finds, a mean over tasks and lengths."""
    return statistics.fmean(run[task][str(T)]["accuracy"] for task in tasks for T in lengths)


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep by mixer, in the order in which the mixers came; `tasks` and `lengths` are those that every run has.

    ended: runs that the guard aborted before the last step; void: mixer -> runs that do not count, with the reasons in `reasons`.
    Neither is in a mean, nor under `runs`.
    corpus: digest of the text. others: digest of a text that differs slightly -> the difference.
    families: panel -> mixers that it compares. glance: the mixers of the first picture.
    """

    runs: dict[str, list[dict[str, Any]]]
    lengths: tuple[int, ...]
    train_length: int
    tasks: tuple[str, ...]
    corpus: str
    ended: tuple[dict[str, Any], ...] = ()
    void: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    families: dict[str, tuple[str, ...]] = field(default_factory=dict)
    glance: tuple[str, ...] = ()

    def title(self, mixer: str) -> str:
        return self.runs[mixer][0]["title"]

    def spread(self, mixer: str, of: Callable[[dict[str, Any]], float]) -> Spread:
        """A number of each of the mixer's runs, over its seeds."""
        return Spread(tuple(of(run) for run in self.runs[mixer]))

    def accuracy(self, mixer: str, task: str, T: int) -> Spread:
        return self.spread(mixer, lambda run: run[task][str(T)]["accuracy"])

    def split(self, mixer: str, tasks: tuple[str, ...], T: int) -> bool:
        """Whether the mixer's runs are split at T, see `Spread.split`."""
        return self.spread(mixer, lambda run: found(run, tasks, [T])).split(statistics.fmean(map(chance, tasks)))


def load_sweep(
    directory: Path,
    order: Iterable[str] = (),
    families: dict[str, tuple[str, ...]] | None = None,
    glance: Iterable[str] = (),
    void: dict[str, Void] | None = None,
) -> Sweep:
    """Every run in `directory` (*.json, *.json.xz); mixers of `order` come first, in its order.

    families: those with fewer than two mixers among the runs are left out; if none is left, one family has all mixers. glance: likewise.
    void: mixer -> which of its runs do not count; a rerun from other code does.

    ValueError if none was measured, if one lacks a key or scores no task, if two are of one mixer and seed, or if two runs were trained
    on another length, or read texts that are apart (`texts.py`).
    """
    paths = json_files(directory)
    runs: dict[str, list[dict[str, Any]]] = {}
    ended: list[dict[str, Any]] = []
    uncounted: dict[str, list[dict[str, Any]]] = {}
    void = void or {}
    first: dict[str, Any] | None = None
    begun = ""
    known, others = texts.manifests(directory), {}
    for path in paths:
        run = read_json(path)
        if not isinstance(run, dict):
            raise ValueError(f"{path}: expected a run's result, an object, got {type(run).__name__}")
        numbers = () if "ended" in run else (*MEASURED, *run.get("tasks", ()))
        missing = [key for key in (*KEYS, *numbers) if key not in run]
        if missing:
            raise ValueError(f"{path}: misses the key {missing[0]!r}")
        if (run["commit"] or "").startswith(void[run["name"]].commits if run["name"] in void else ()):
            uncounted.setdefault(run["name"], []).append(run)
            continue
        if not run["tasks"]:
            raise ValueError(f"{path}: tasks is empty, expected at least one: a sweep compares what is found")
        _check_scores(run, path)
        first, begun = first or run, begun or path.name
        for key in ("lengths", "train_length", "tasks"):
            if run.get(key) != first.get(key):
                raise ValueError(f"{path}: {key} is {run.get(key)}, {begun} has {first.get(key)}: not one sweep")
        one, other = (of["corpus"]["sha256"] for of in (first, run))
        if one != other and (why := texts.apart(known.get(one), known.get(other))):
            raise ValueError(f"{path}: corpus is {other}, {begun} has {one}: not one sweep ({why})")
        if "ended" in run:
            ended.append(run)
            continue
        if any(run["seed"] == other["seed"] for other in runs.get(run["name"], ())):
            raise ValueError(f"{path}: {run['name']} with seed {run['seed']} is there twice")
        for key in ("parameters", "state_bytes"):
            if run[key] != (same := runs.get(run["name"], [run])[0])[key]:
                raise ValueError(f"{path}: {key} is {run[key]}, seed {same['seed']} has {same[key]}: not one model")
        runs.setdefault(run["name"], []).append(run)
        if one != other:
            others[other] = texts.difference(known[one], known[other])
    if first is None or not runs:
        raise ValueError(f"{directory}: no runs there (*.json)" + (" but such as ended early or are void" if paths else ""))
    ordered = [name for name in order if name in runs]
    by_seed = lambda run: run["seed"]
    runs = {name: sorted(runs[name], key=by_seed) for name in [*ordered, *(name for name in runs if name not in ordered)]}
    lengths, tasks = tuple(first["lengths"]), tuple(first["tasks"])
    present = {family: members for family, members in (families or {}).items() if len(runs.keys() & set(members)) > 1}
    seen = tuple(name for name in glance if name in runs)
    return Sweep(
        runs, lengths, first["train_length"], tasks, first["corpus"]["sha256"], tuple(ended),
        uncounted, {name: void[name].reason for name in uncounted}, others, present or {"All": tuple(runs)}, seen or tuple(runs),
    )  # fmt: skip


def _check_scores(run: dict[str, Any], path: Path) -> None:
    """ValueError that names a missing length, or an accuracy outside 0..1."""
    if "ended" in run:
        return
    for key in ("loss", "state_bytes", *run["tasks"]):
        if absent := [T for T in run["lengths"] if str(T) not in run[key]]:
            raise ValueError(f"{path}: {key} misses the length {absent[0]}")
    for task in run["tasks"]:
        for T in run["lengths"]:
            share = run[task][str(T)].get("accuracy")
            if not isinstance(share, int | float) or not 0 <= share <= 1:
                raise ValueError(f"{path}: {task} at {T} has the accuracy {share}, expected a share in 0..1")
