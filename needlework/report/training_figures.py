"""The figures of training: its curves by step, and its speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from .drawing import label_points, tag
from .palette import colour
from .panels import TOP, WIDTH, label_inches, panels, title
from .results import Results
from .words import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def loss_by_step(results: Results) -> Figure:
    """Training loss: smoothed, with the recorded values faint behind."""
    figure, (axes,) = panels(results)
    ends, shown = [], []
    for i, mixer in enumerate(results["mixers"]):
        steps, raw = _thin(mixer["train"]["steps"]), _thin(mixer["train"]["loss"])
        if not steps:
            continue
        smooth = _smooth(raw)
        axes.plot(steps, raw, color=colour(i), linewidth=0.7, alpha=0.16, **tag(i))
        axes.plot(steps, smooth, color=colour(i), **tag(i, f"{mixer['title']}: {smooth[-1]:.3f} nats at step {steps[-1]:,.0f}"))
        ends.append((i, steps[-1], smooth[-1], mixer["title"]))
        # The first few steps fall from log(vocabulary); to show them would flatten everything that differs.
        shown += smooth[len(smooth) // 6 :]
    if ends:
        margin = 0.12 * (max(shown) - min(shown)) or 0.1
        axes.set_ylim(min(shown) - margin, max(shown))
    _by_step(axes, ends, "Training loss, nats per token")
    return figure


def learning_rate(results: Results) -> Figure:
    """The learning rate by step."""
    figure, (axes,) = panels(results)
    _logged(axes, results, "lr", "Learning rate", "{:.2e}".format)
    return figure


def gradient_norm(results: Results) -> Figure:
    """The norm of the gradient before it is clipped, by step."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure, (axes,) = panels(results)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    _logged(axes, results, "grad_norm", "Norm of the gradient", "{:.3g}".format)
    return figure


def memory(results: Results) -> Figure:
    """The most that was held so far, by step: of a GPU its memory, of a CPU the process's."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure, (axes,) = panels(results)
    most = max((max(log["memory"]) for mixer in results["mixers"] if (log := mixer["train"].get("log"))), default=1)
    axes.set_ylim(0, 1.08 * most)
    axes.set_yticks([tick * 2**20 for tick in MaxNLocator(5).tick_values(0, most / 2**20) if tick * 2**20 <= 1.08 * most])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: size(y)))
    _logged(axes, results, "memory", "Most memory held", size)
    return figure


def training_speed(results: Results) -> Figure:
    """Tokens per second in training, fastest first."""
    from matplotlib.figure import Figure

    mixers = sorted(enumerate(results["mixers"]), key=lambda pair: -pair[1]["train"]["tokens_per_second"])
    rows, names = 0.28 * len(mixers), label_inches(results)
    figure = Figure(figsize=(WIDTH, rows + TOP))
    axes = figure.add_axes((names / WIDTH, 0, 1 - (names + 0.7) / WIDTH, rows / (rows + TOP)))
    axes.spines["bottom"].set_visible(False)
    axes.set(xticks=[], yticks=[], ylim=(len(mixers) - 0.5, -0.5))
    axes.set_xlim(0, max((mixer["train"]["tokens_per_second"] for _, mixer in mixers), default=1))
    axes.set_title("Tokens per second in training", x=-names / (WIDTH - names - 0.7), pad=10)
    for row, (i, mixer) in enumerate(mixers):
        speed = mixer["train"]["tokens_per_second"]
        axes.barh(row, speed, height=0.62, color=colour(i), **tag(i, f"{mixer['title']}: {speed:,.0f} tokens per second"))
        beside: dict[str, Any] = {
            "textcoords": "offset points",
            "va": "center_baseline",
            "color": colour(i),
            "annotation_clip": False,
        }
        axes.annotate(mixer["title"], (0, row), xytext=(-8, 0), ha="right", **beside, **tag(i))
        axes.annotate(f"{speed:,.0f}", (speed, row), xytext=(6, 0), ha="left", **beside, **tag(i))
    return figure


def _logged(
    axes: Axes, results: Results, name: Literal["lr", "grad_norm", "memory"], heading: str, say: Callable[[float], str]
) -> None:
    ends = []
    for i, mixer in enumerate(results["mixers"]):
        log = mixer["train"].get("log")
        if log is None or not log["steps"]:
            continue
        steps, values = log["steps"], log[name]
        axes.plot(steps, values, color=colour(i), **tag(i, f"{mixer['title']}: {say(values[-1])} at step {steps[-1]:,}"))
        ends.append((i, steps[-1], values[-1], mixer["title"]))
    _by_step(axes, ends, heading)


def _by_step(axes: Axes, ends: Sequence[tuple[int, float, float, str]], heading: str) -> None:
    if ends:
        axes.set_xlim(0, max(x for _, x, _, _ in ends) or 1)
    axes.set_xlabel("training step")
    title(axes, heading)
    label_points(axes, ends, at=1.06)


def _thin(numbers: Sequence[float], most: int = 300) -> list[float]:
    """Means of neighbours, so that at most `most` are left: a figure has no more pixels than that."""
    width = max(1, -(-len(numbers) // most))
    return [sum(part) / len(part) for part in (numbers[i : i + width] for i in range(0, len(numbers), width))]


def _smooth(numbers: list[float], reach: int = 8) -> list[float]:
    """The mean of each number and its neighbours within reach on both sides, which does not lag as a running mean does."""
    windows = (numbers[max(0, i - reach) : i + reach + 1] for i in range(len(numbers)))
    return [sum(window) / len(window) for window in windows]
