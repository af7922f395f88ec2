"""The figures of a comparison: what is plotted against what. How it looks is drawing.py's; matplotlib is imported on use.

Each function returns one matplotlib Figure; mixer number i of results["mixers"] has colour and marker i everywhere.
"""

import os
from collections.abc import Callable

from .drawing import label_points, style, svg, tag
from .palette import MUTED, SURFACE, colour, marker
from .results import Mixer, Results, check_results
from .words import multiple, percent, size

TASKS = {"needle": "Single needle", "needles": "Several needles"}
GUESS = 0.1  # one digit in ten

LEFT, BOTTOM, TOP = 0.5, 0.68, 0.42  # inches around the axes


def draw(figure: Callable, results: Results) -> str:
    """One of this file's figures as an <svg> element."""
    with style():
        return svg(figure(results))


def retrieval_by_length(results: Results):
    """Accuracy against length in multiples of the training length: one needle, and several at once."""
    figure, panels = _panels(results, 2, width=11, height=3.9)
    for axes, task in zip(panels, TASKS, strict=True):
        _retrieval_panel(axes, results, task)
    return figure


def retrieval_by_state(results: Results):
    """Accuracy at the longest length against the bytes of state a sequence holds there."""
    figure, panels = _panels(results, 2, width=11, height=3.9)
    for axes, task in zip(panels, TASKS, strict=True):
        _state_panel(axes, results, task)
    return figure


def loss_by_step(results: Results):
    """Training loss: smoothed, with the recorded values faint behind."""
    figure, (axes,) = _panels(results, 1, width=5.4, height=3.9)
    ends, shown = [], []
    for i, mixer in enumerate(results["mixers"]):
        steps, raw = _thin(mixer["train"]["steps"]), _thin(mixer["train"]["loss"])
        if not steps:
            continue
        smooth = _smooth(raw)
        axes.plot(steps, raw, color=colour(i), linewidth=0.7, alpha=0.16, **tag(i))
        axes.plot(steps, smooth, color=colour(i), **tag(i, f"{mixer['title']}: {smooth[-1]:.3f} nats at step {steps[-1]:,}"))
        ends.append((i, steps[-1], smooth[-1], mixer["title"]))
        # The first few steps fall from log(vocabulary); to show them would flatten everything that differs.
        shown += smooth[len(smooth) // 6 :]
    if ends:
        margin = 0.12 * (max(shown) - min(shown)) or 0.1
        axes.set_ylim(min(shown) - margin, max(shown))
        axes.set_xlim(0, max(x for _, x, _, _ in ends) or 1)
    axes.set_xlabel("training step")
    _title(axes, "Training loss, nats per token")
    label_points(axes, ends, at=1.06)
    return figure


def loss_by_length(results: Results):
    """Loss on plain text against length."""
    figure, (axes,) = _panels(results, 1, width=5.4, height=3.9)
    _length_axis(axes, results)
    last = results["lengths"][-1]
    for i, mixer in enumerate(results["mixers"]):
        _curve(axes, i, mixer, results, lambda n, m=mixer: m["loss"][str(n)], "{:.3f} nats".format)
    axes.margins(y=0.08)
    _title(axes, "Loss on held-out text, nats per token")
    label_points(axes, [(i, last, m["loss"][str(last)], m["title"]) for i, m in enumerate(results["mixers"])], at=1.06)
    return figure


def training_speed(results: Results):
    """Tokens per second in training, fastest first."""
    from matplotlib.figure import Figure

    mixers = sorted(enumerate(results["mixers"]), key=lambda pair: -pair[1]["train"]["tokens_per_second"])
    width, rows, names = 11, 0.28 * len(mixers), _label_inches(results)
    figure = Figure(figsize=(width, rows + TOP))
    axes = figure.add_axes((names / width, 0, 1 - (names + 0.7) / width, rows / (rows + TOP)))
    axes.spines["bottom"].set_visible(False)
    axes.set(xticks=[], yticks=[], ylim=(len(mixers) - 0.5, -0.5))
    axes.set_xlim(0, max((mixer["train"]["tokens_per_second"] for _, mixer in mixers), default=1))
    axes.set_title("Tokens per second in training", x=-names / (width - names - 0.7), pad=10)
    for row, (i, mixer) in enumerate(mixers):
        speed = mixer["train"]["tokens_per_second"]
        axes.barh(row, speed, height=0.62, color=colour(i), **tag(i, f"{mixer['title']}: {speed:,.0f} tokens per second"))
        beside = {"textcoords": "offset points", "va": "center_baseline", "color": colour(i), "annotation_clip": False}
        axes.annotate(mixer["title"], (0, row), xytext=(-8, 0), ha="right", **beside, **tag(i))
        axes.annotate(f"{speed:,.0f}", (speed, row), xytext=(6, 0), ha="left", **beside, **tag(i))
    return figure


def picture(results: Results, path: str | os.PathLike) -> None:
    """Write one wide PNG: retrieval by length for both tasks, and at the longest length against state bytes."""
    check_results(results)
    with style():
        figure, panels = _panels(results, 3, width=13, height=3.8)
        _retrieval_panel(panels[0], results, "needle")
        _retrieval_panel(panels[1], results, "needles")
        _state_panel(panels[2], results, "needle")
        figure.savefig(path, dpi=118, facecolor=SURFACE, bbox_inches="tight", pad_inches=0.15, metadata={"Software": None})


def _panels(results: Results, count: int, *, width: float, height: float):
    """Axes side by side, each with room in inches around it: below for ticks, above for the title, right for its labels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    cell = width / count
    across = cell - LEFT - min(_label_inches(results), cell / 2)
    down = height - BOTTOM - TOP
    boxes = [((i * cell + LEFT) / width, BOTTOM / height, across / width, down / height) for i in range(count)]
    panels = [figure.add_axes(box) for box in boxes]
    for axes in panels:
        axes.grid(axis="y")
    return figure, panels


def _label_inches(results: Results) -> float:
    """The width of the longest title with its leader."""
    return 0.4 + 0.072 * max((len(mixer["title"]) for mixer in results["mixers"]), default=0)


def _title(axes, text: str) -> None:
    """A title that begins where the tick labels do."""
    inches = axes.get_position().width * axes.figure.get_figwidth()
    axes.set_title(text, x=-LEFT / inches, pad=10)


def _length_axis(axes, results: Results) -> None:
    lengths, trained = results["lengths"], results["train_length"]
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{multiple(n, trained)}\n{n:,}" for n in lengths])
    axes.minorticks_off()
    axes.set_xlim(lengths[0] / 1.12, lengths[-1] * 1.12)
    axes.set_xlabel(f"tokens, and multiples of the {trained:,} trained on")


def _share_axis(axes) -> None:
    axes.set_ylim(-0.04, 1.04)
    axes.set_yticks([0, GUESS, 0.25, 0.5, 0.75, 1], ["0 %", "guess", "25 %", "50 %", "75 %", "100 %"])
    axes.axhline(GUESS, color=MUTED, linewidth=0.8, dashes=(2, 3))


def _curve(axes, i: int, mixer: Mixer, results: Results, value: Callable, say: Callable) -> None:
    lengths, trained = results["lengths"], results["train_length"]
    axes.plot(lengths, [value(n) for n in lengths], color=colour(i), **tag(i))
    for n in lengths:
        _point(axes, i, n, value(n), f"{mixer['title']} at {multiple(n, trained)}: {say(value(n))}")


def _point(axes, i: int, x: float, y: float, tip: str, points: float = 6) -> None:
    edge = {"markeredgecolor": SURFACE, "markeredgewidth": 0.8}
    axes.plot([x], [y], marker(i), color=colour(i), markersize=points, clip_on=False, zorder=3, **edge, **tag(i, tip))


def _retrieval_panel(axes, results: Results, task: str) -> None:
    _share_axis(axes)
    _length_axis(axes, results)
    last = results["lengths"][-1]
    for i, mixer in enumerate(results["mixers"]):
        _curve(axes, i, mixer, results, lambda n, m=mixer: m[task][str(n)]["accuracy"], percent)
    _title(axes, f"{TASKS[task]}: digits found, by length")
    label_points(
        axes, [(i, last, m[task][str(last)]["accuracy"], m["title"]) for i, m in enumerate(results["mixers"])], at=1.06
    )


def _state_panel(axes, results: Results, task: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    last, trained = results["lengths"][-1], results["train_length"]
    points = [
        (i, m["state_bytes"][str(last)], m[task][str(last)]["accuracy"], m["title"]) for i, m in enumerate(results["mixers"])
    ]
    _share_axis(axes)
    axes.set_xscale("log", base=2)
    axes.set_xlabel(f"bytes of state a sequence of {last:,} tokens holds")
    _title(axes, f"{TASKS[task]} at {multiple(last, trained)}: digits found, by state size")
    if points:
        axes.set_xlim(min(x for _, x, _, _ in points) / 1.7, max(x for _, x, _, _ in points) * 1.7)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: size(x)))
    axes.minorticks_off()
    for i, x, y, title in points:
        _point(axes, i, x, y, f"{title}: {percent(y)} with {size(x)}", points=9)
    for cluster in _neighbours(points):
        label_points(axes, cluster)


def _neighbours(points: list[tuple[int, float, float, str]], ratio: float = 4.0):
    """Points in groups of state sizes so close that their labels could meet."""
    clusters: list[list] = []
    for point in sorted(points, key=lambda point: point[1]):
        if clusters and point[1] < ratio * clusters[-1][-1][1]:
            clusters[-1].append(point)
        else:
            clusters.append([point])
    return clusters


def _thin(numbers: list[float], most: int = 300) -> list[float]:
    """Means of neighbours, so that at most `most` are left: a figure has no more pixels than that."""
    width = -(-len(numbers) // most)
    return (
        [sum(part) / len(part) for part in (numbers[i : i + width] for i in range(0, len(numbers), width))] if numbers else []
    )


def _smooth(numbers: list[float], reach: int = 8) -> list[float]:
    """The mean of each number and its neighbours within reach on both sides, which does not lag as a running mean does."""
    windows = (numbers[max(0, i - reach) : i + reach + 1] for i in range(len(numbers)))
    return [sum(window) / len(window) for window in windows]
