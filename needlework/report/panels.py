"""What the figures of a comparison share: axes with room for their labels, the scales, a mixer's curve and its points."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .drawing import inches, tag
from .palette import MUTED, SURFACE, colour, marker
from .results import Mixer, Results
from .words import multiple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEFT, BOTTOM, TOP = 0.5, 0.68, 0.42  # inches around the axes
WIDTH, HEIGHT = 5.4, 3.9  # inches of a figure of one panel: what a phone shows whole


def panels(results: Results, count: int = 1, *, width: float = WIDTH, height: float = HEIGHT) -> tuple[Figure, list[Axes]]:
    """A figure, and axes side by side, each with room in inches around it: below for ticks, above for the title, right for its labels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    cell = width / count
    across = cell - LEFT - min(label_inches(results), cell / 2)
    down = height - BOTTOM - TOP
    boxes = [((i * cell + LEFT) / width, BOTTOM / height, across / width, down / height) for i in range(count)]
    made = [figure.add_axes(box) for box in boxes]
    for axes in made:
        axes.grid(axis="y")
    return figure, made


def label_inches(results: Results) -> float:
    """The width of the longest title with its leader."""
    return 0.4 + 0.072 * max((len(mixer["title"]) for mixer in results["mixers"]), default=0)


def title(axes: Axes, text: str) -> None:
    """A title that begins where the tick labels do."""
    width, _ = inches(axes)
    axes.set_title(text, x=-LEFT / width, pad=10)


def length_axis(axes: Axes, results: Results) -> None:
    lengths, trained = results["lengths"], results["train_length"]
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{multiple(n, trained)}\n{n:,}" for n in lengths])
    axes.minorticks_off()
    axes.set_xlim(lengths[0] / 1.12, lengths[-1] * 1.12)
    axes.set_xlabel(f"tokens, and multiples of the {trained:,} trained on")


def share_axis(axes: Axes, guess: float) -> None:
    axes.set_ylim(-0.04, 1.04)
    axes.set_yticks([0, guess, 0.25, 0.5, 0.75, 1], ["0 %", "guess", "25 %", "50 %", "75 %", "100 %"])
    axes.axhline(guess, color=MUTED, linewidth=0.8, dashes=(2, 3))


def curve(
    axes: Axes, i: int, mixer: Mixer, results: Results, value: Callable[[int], float], say: Callable[[float], str]
) -> None:
    lengths, trained = results["lengths"], results["train_length"]
    axes.plot(lengths, [value(n) for n in lengths], color=colour(i), **tag(i))
    for n in lengths:
        point(axes, i, n, value(n), f"{mixer['title']} at {multiple(n, trained)}: {say(value(n))}")


def point(axes: Axes, i: int, x: float, y: float, tip: str, points: float = 6) -> None:
    edge: dict[str, Any] = {"markeredgecolor": SURFACE, "markeredgewidth": 0.8}
    axes.plot([x], [y], marker(i), color=colour(i), markersize=points, clip_on=False, zorder=3, **edge, **tag(i, tip))


def bar(axes: Axes, i: int, x: float, ends: tuple[float, float]) -> None:
    """How far a point may be from where it is."""
    axes.plot([x, x], ends, color=colour(i), linewidth=1, alpha=0.5, clip_on=False, **tag(i))
