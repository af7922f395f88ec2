"""What a suite is: items that are measured at lengths, and means over them.

An item measured at a length is a cell, `task@length`. What a length is, the suite says: the tokens of a generated task, the distance of
a needle, or the window, which is how many tokens of a prompt or a text the model is given at once.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from needlework.layers.config import nearest

from .number import Number
from .subject import Subject


class Cell(TypedDict, total=False):
    """What was measured of one item at one length, JSON-ready; or, alone, `skipped`: why nothing was.

    metrics: by name. lm_eval: its own results, without the documents. warnings: what it said of cut or left out documents.
    """

    metrics: dict[str, Number]
    lm_eval: dict[str, Any]
    warnings: list[str]
    skipped: str


class Value(TypedDict):
    """A mean, or None and the cells that it lacks. of: its tasks and the metric of each."""

    value: float | None
    missing: list[str]
    of: list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Item(ABC):
    """A task and the metrics that are kept of it. only: the lengths at which there is such a task; () for any length."""

    task: str
    metrics: tuple[str, ...]
    only: tuple[int, ...] = ()

    @abstractmethod
    def measure(self, subject: Subject, length: int) -> Cell:
        """The item at a length. Raises Unavailable where it cannot be had."""

    def tokens(self, length: int) -> int:
        """The most tokens that the model reads and writes at once at a length."""
        return length


@dataclass(frozen=True, kw_only=True)
class Mean:
    """The plain mean of a metric of each of several tasks, at one length."""

    name: str
    of: tuple[tuple[str, str], ...]

    def at(self, cells: Mapping[str, Cell], length: int) -> Value:
        """Never over fewer tasks than `of`: without all of them there is no mean."""
        missing = [key(task, length) for task, _ in self.of if "metrics" not in cells.get(key(task, length), ())]
        values = (cells[key(task, length)].get("metrics", {})[metric]["value"] for task, metric in self.of)
        return Value(value=None if missing else statistics.fmean(values), missing=missing, of=list(self.of))


@dataclass(frozen=True, kw_only=True)
class Suite:
    """name, title, source: what it is called, what it measures, and whose measurement it is.

    items: in the order in which they are measured and shown. lengths: those measured if none are asked for; always: measured whatever is
    asked for. length_is: what a length is. means: given where none of their tasks is missing. needs: modules beside needlework's own.
    own_text: whether its tasks are made of the user's text.
    """

    name: str
    title: str
    source: str
    items: tuple[Item, ...]
    lengths: tuple[int, ...]
    length_is: str = "window"
    always: tuple[int, ...] = ()
    means: tuple[Mean, ...] = ()
    needs: tuple[str, ...] = ("lm_eval",)
    own_text: bool = False

    def cells(self, lengths: Iterable[int] = (), tasks: Iterable[str] = ()) -> list[tuple[Item, int]]:
        """What is measured: each item, or only those of `tasks`, at each length, or at those of `lengths`.

        ValueError for a task that the suite does not have, and for a length at which it has no task.
        """
        chosen, known = tuple(tasks), [item.task for item in self.items]
        for task in chosen:
            if task not in known:
                raise ValueError(f"suite {self.name}: unknown task {task!r}{nearest(task, known)}; known: {', '.join(known)}")
        items = [item for item in self.items if not chosen or item.task in chosen]
        at = tuple(dict.fromkeys(self.always + (tuple(lengths) or self.lengths)))
        for length in at:
            if length not in self.always and not any(not item.only or length in item.only for item in items):
                there = sorted({n for item in items for n in item.only})
                raise ValueError(f"suite {self.name}: length is {length}, expected one of {', '.join(map(str, there))}")
        return [(item, length) for item in items for length in at if not item.only or length in item.only]

    def averages(self, cells: Mapping[str, Cell]) -> dict[str, Value]:
        """Each mean by its key, `name@length`, at the lengths of the cells at which it has all of its tasks, and some were asked for."""
        at = dict.fromkeys(int(name.rpartition("@")[2]) for name in cells)
        only = {item.task: item.only for item in self.items}
        found = {}
        for mean in self.means:
            for length in at:
                tasks = [task for task, _ in mean.of]
                there = all(not only[task] or length in only[task] for task in tasks)
                if there and any(key(task, length) in cells for task in tasks):
                    found[key(mean.name, length)] = mean.at(cells, length)
        return found


def key(task: str, length: int) -> str:
    """The name of a cell."""
    return f"{task}@{length}"
