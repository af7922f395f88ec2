"""The pictures of a study's answers: the runs of both sides and their difference beside its margin; accuracy against bytes."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

from .answers import Answer
from .asked import Entry
from .drawing import axis_of_bytes, label_points, style
from .palette import GRID, INK, MUTED, SURFACE, colour, marker


def answer(answer: Answer, path: Path) -> None:
    """Every run as a point, the sides' means as lines; right of them the difference with its 95 % interval, over ± the margin."""
    from matplotlib.figure import Figure

    asked, times = answer.asked, answer.asked.measure.times
    assert answer.better is not None and answer.worse is not None and answer.mean is not None
    with style():
        figure = Figure(figsize=(7.2, 2.3))
        runs = figure.add_axes((0.2, 0.2, 0.4, 0.66))
        runs.grid(axis="x")
        runs.locator_params(axis="x", nbins=5)  # more labels would touch
        for i, spread in enumerate((answer.better, answer.worse)):
            shown = [times * value for value in spread.values]
            runs.plot(shown, [1 - i] * len(shown), marker(i), color=colour(i), alpha=0.7)
            runs.plot([times * spread.mean] * 2, [0.75 - i, 1.25 - i], color=colour(i))
        runs.set_yticks([1, 0], ["\n".join(wrap(title, 20)) for title in answer.titles])
        runs.set_ylim(-0.6, 1.6)
        runs.set_xlabel(asked.measure.unit + (", less is better" if asked.measure.lower else ""))
        runs.set_title(f"{asked.about}: {answer.word}")
        apart = figure.add_axes((0.7, 0.2, 0.27, 0.66))
        apart.axvspan(-times * asked.margin, times * asked.margin, color=GRID, alpha=0.6, linewidth=0)
        apart.axvline(0, color=MUTED, linewidth=0.8)
        half = None if answer.half is None else times * answer.half
        apart.errorbar(times * answer.mean, 0, xerr=half, fmt="o", color=INK, capsize=3)
        apart.set_yticks([])
        apart.set_ylim(-1, 1)
        apart.set_xlabel("difference, for the claim to the right")
        _save(figure, path)


class Point(NamedTuple):
    """Runs of one mixer with one state: its title, the bytes, a share a run."""

    mixer: str
    title: str
    bytes: int
    shares: tuple[float, ...]


def points(entries: Sequence[Entry], names: Iterable[str]) -> list[Point]:
    """Of each of `names`, and of those with a size after a dash, the runs that there are, by bytes."""
    found: list[Point] = []
    for name in names:
        runs: dict[int, list[Entry]] = {}
        for entry in entries:
            stem, _, end = entry["name"].rpartition("-")
            if "ended" not in entry and name in (entry["name"], stem if end.isdigit() else ""):
                runs.setdefault(next(iter(entry["state_bytes"].values())), []).append(entry)
        found += [
            Point(name, of[0]["title"], b, tuple(e["capacity"]["accuracy"] for e in of)) for b, of in sorted(runs.items())
        ]
    return found


def by_bytes(found: list[Point], path: Path) -> None:
    """A line a mixer, its mean and every run, against the bytes that one sequence's state takes."""
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(7.2, 3.6))
        axes = figure.add_axes((0.08, 0.14, 0.56, 0.76))
        axes.grid(axis="y")
        axis_of_bytes(axes, 8)
        axes.set_ylim(-0.03, 1.03)
        axes.set_yticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
        axes.set_xlabel("bytes of a sequence's state")
        axes.set_title("Values recalled, a mean over the loads")
        ends = []
        for i, mixer in enumerate(dict.fromkeys(point.mixer for point in found)):
            of = [point for point in found if point.mixer == mixer]
            means = [statistics.fmean(point.shares) for point in of]
            axes.plot([point.bytes for point in of], means, color=colour(i))
            for point in of:
                axes.plot([point.bytes] * len(point.shares), point.shares, marker(i), color=colour(i), alpha=0.6)
            ends.append((i, of[-1].bytes, means[-1], of[-1].title))
        label_points(axes, ends, at=1.04)
        _save(figure, path)


def _save(figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, facecolor=SURFACE, metadata={"Software": None})
