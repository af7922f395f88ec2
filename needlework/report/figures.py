"""The figures of a comparison: what is plotted against what. How it looks is drawing.py's; matplotlib is imported on use.

Each function returns one matplotlib Figure of one panel; mixer number i of results["mixers"] has colour and marker i everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from needlework.eval.retrieval import chance, interval

from .drawing import axis_of_bytes, label_points, style, svg
from .palette import SURFACE
from .panels import bar, curve, length_axis, panels, point, share_axis, title
from .results import Results, check_results, scores_of
from .words import multiple, percent, size, task_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(figure: Callable[[Results], Figure], results: Results, name: str, description: str) -> str:
    """A figure as an <svg> element, with an accessible name and description."""
    with style():
        return svg(figure(results), name, description)


def retrieval_by_length(results: Results, task: str) -> Figure:
    """Accuracy of a task against length in multiples of the training length."""
    figure, (axes,) = panels(results)
    _retrieval_panel(axes, results, task)
    return figure


def retrieval_by_state(results: Results, task: str) -> Figure:
    """Accuracy of a task at the longest length against the bytes of state a sequence holds there."""
    figure, (axes,) = panels(results)
    _state_panel(axes, results, task)
    return figure


def loss_by_length(results: Results) -> Figure:
    """Loss on plain text against length."""
    figure, (axes,) = panels(results)
    length_axis(axes, results)
    last = results["lengths"][-1]
    for i, mixer in enumerate(results["mixers"]):
        curve(axes, i, mixer, results, lambda n, m=mixer: m["loss"][str(n)], "{:.3f} nats".format)
    axes.margins(y=0.08)
    title(axes, "Loss on held-out text, nats per token")
    label_points(axes, [(i, last, m["loss"][str(last)], m["title"]) for i, m in enumerate(results["mixers"])], at=1.06)
    return figure


def picture(results: Results, path: str | os.PathLike) -> None:
    """Write one wide PNG: retrieval by length for both tasks, and at the longest length against state bytes."""
    check_results(results)
    with style():
        figure, axes = panels(results, 3, width=13, height=3.8)
        _retrieval_panel(axes[0], results, "needle")
        _retrieval_panel(axes[1], results, "needles")
        _state_panel(axes[2], results, "needle")
        figure.savefig(path, dpi=118, facecolor=SURFACE, bbox_inches="tight", pad_inches=0.15, metadata={"Software": None})


def _heading(task: str) -> str:
    name = task_title(task)
    return name[0].upper() + name[1:]


def _retrieval_panel(axes: Axes, results: Results, task: str) -> None:
    share_axis(axes, chance(task))
    length_axis(axes, results)
    last = results["lengths"][-1]
    for i, mixer in enumerate(results["mixers"]):
        scores = scores_of(mixer, task)
        for n in results["lengths"]:
            bar(axes, i, n, interval(scores[str(n)]["accuracy"], scores[str(n)]["values"]))
        curve(axes, i, mixer, results, lambda n, scores=scores: scores[str(n)]["accuracy"], percent)
    title(axes, f"{_heading(task)}: digits found, by length")
    ends = [(i, last, scores_of(m, task)[str(last)]["accuracy"], m["title"]) for i, m in enumerate(results["mixers"])]
    label_points(axes, ends, at=1.06)


def _state_panel(axes: Axes, results: Results, task: str) -> None:
    last, trained = results["lengths"][-1], results["train_length"]
    points = [
        (i, m["state_bytes"][str(last)], scores_of(m, task)[str(last)]["accuracy"], m["title"])
        for i, m in enumerate(results["mixers"])
    ]
    share_axis(axes, chance(task))
    axis_of_bytes(axes, 5)
    axes.set_xlabel(f"bytes of state a sequence of {last:,} tokens holds")
    title(axes, f"{_heading(task)} at {multiple(last, trained)}: digits found, by state size")
    if points:
        axes.set_xlim(min(x for _, x, _, _ in points) / 1.7, max(x for _, x, _, _ in points) * 1.7)
    for i, x, y, name in points:
        bar(axes, i, x, interval(y, scores_of(results["mixers"][i], task)[str(last)]["values"]))
        point(axes, i, x, y, f"{name}: {percent(y)} with {size(x)}", points=9)
    for cluster in _neighbours(points):
        label_points(axes, cluster)


def _neighbours(
    points: Sequence[tuple[int, float, float, str]], ratio: float = 4.0
) -> list[list[tuple[int, float, float, str]]]:
    """Points in groups of state sizes so close that their labels could meet."""
    clusters: list[list[tuple[int, float, float, str]]] = []
    for one in sorted(points, key=lambda one: one[1]):
        if clusters and one[1] < ratio * clusters[-1][-1][1]:
            clusters[-1].append(one)
        else:
            clusters.append([one])
    return clusters
