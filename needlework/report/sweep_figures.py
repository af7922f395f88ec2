"""The pictures of a sweep: one panel per family, its mixers in colour, all others in grey. A line is the mean over seeds, its band spans
the runs. A mixer whose runs are split (sweep.py) has one line, or point, per run."""

import statistics
from collections.abc import Callable
from pathlib import Path

from needlework.eval.retrieval import GUESS

from .drawing import axis_of_bytes, label_points, style
from .palette import GRID, MUTED, SURFACE, colour, marker
from .sweep import Sweep, found
from .words import multiple, percent, size

PANEL = (5.0, 3.1)  # inches


def at_a_glance(sweep: Sweep, path: Path, tasks: tuple[str, ...]) -> None:
    """One wide panel of retrieval by length for the mixers of `sweep.glance`, each with the bytes of a sequence's state at the end."""
    from matplotlib.figure import Figure

    longest = sweep.lengths[-1]
    state = lambda mixer: size(sweep.runs[mixer][0]["state_bytes"][str(longest)])
    with style():
        figure = Figure(figsize=(10, 4.2))
        axes = figure.add_axes((0.06, 0.1, 0.56, 0.8))
        _found_by_length(axes, sweep, sweep.glance, tasks, lambda mixer: f"{sweep.title(mixer)} · {state(mixer)}")
        axes.set_title(
            f"Needles found, by length in multiples of {sweep.train_length:,} tokens · state after {longest:,} tokens"
        )
        _save(figure, path)


def retrieval_by_length(sweep: Sweep, path: Path, tasks: tuple[str, ...]) -> None:
    """Share of the values' tokens found, the mean of `tasks`, against length in multiples of the training length."""
    with style():
        figure, panels = _panels(sweep)
        for axes, (family, members) in zip(panels, sweep.families.items(), strict=False):
            _found_by_length(axes, sweep, members, tasks, sweep.title)
            axes.set_title(family)
        _save(figure, path)


def _found_by_length(axes, sweep: Sweep, members: tuple[str, ...], tasks: tuple[str, ...], label: Callable[[str], str]) -> None:
    axes.grid(axis="y")
    axes.set_ylim(-0.03, 1.03)
    axes.set_yticks([0, GUESS, 0.5, 1], ["0 %", "guess", "50 %", "100 %"])
    axes.set_xscale("log", base=2)
    axes.set_xticks(sweep.lengths, [multiple(T, sweep.train_length) for T in sweep.lengths])
    axes.minorticks_off()
    split = lambda mixer: any(sweep.split(mixer, tasks, T) for T in sweep.lengths)
    _curves(axes, sweep, members, lambda run: [(T, found(run, tasks, [T])) for T in sweep.lengths], label, split)


def loss_by_position(sweep: Sweep, path: Path) -> None:
    """Nats per token of long documents by position, minus the median run's there: what differs is a hundredth of the loss, until a
    mixer has left the length that it knows. Linear to a tenth of a nat either way, logarithmic beyond."""
    from matplotlib.ticker import FuncFormatter

    runs = [run for of in sweep.runs.values() for run in of]
    starts = runs[0]["positions"]["from"]
    middle = [statistics.median(run["positions"]["loss"][i] for run in runs) for i in range(len(starts))]
    ends = [*starts[1:], 2 * starts[-1]]
    points = lambda run: [(end, x - m) for end, x, m in zip(ends, run["positions"]["loss"], middle, strict=True)]
    with style():
        figure, panels = _panels(sweep)
        for axes, (family, members) in zip(panels, sweep.families.items(), strict=False):
            axes.grid(axis="y")
            axes.set_xscale("log", base=2)
            axes.set_xticks(ends, [f"{end:,}" if end < 1024 else f"{end // 1024}K" for end in ends])
            axes.set_yscale("symlog", linthresh=0.1, linscale=1.5)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:+g}" if y else "0"))
            axes.minorticks_off()
            axes.axhline(0, color=MUTED, linewidth=0.8, dashes=(2, 3))
            _curves(axes, sweep, members, points, sweep.title)
            axes.set_title(family)
        _save(figure, path)


def retrieval_by_state(sweep: Sweep, path: Path, tasks: tuple[str, ...], lengths: tuple[int, ...]) -> None:
    """The same share against the bytes that one sequence's state takes, a panel a length."""
    from matplotlib.figure import Figure

    longest = max(len(_at(sweep, mixer, tasks, T)) for mixer in sweep.runs for T in lengths)
    with style():
        figure = Figure(figsize=(10, 5.2 * len(lengths)))
        for n, T in enumerate(lengths):
            height, width = 1 / len(lengths), 0.89 - 0.0072 * longest
            axes = figure.add_axes((0.07, 1 - (n + 1) * height + 0.13 * height, width, 0.79 * height))
            _by_state(axes, sweep, tasks, T)
        _save(figure, path)


def _at(sweep: Sweep, mixer: str, tasks: tuple[str, ...], T: int) -> str:
    """The mixer's title, and what it finds at T: the mean, or run by run where the runs are split."""
    share = sweep.spread(mixer, lambda run: found(run, tasks, [T]))
    shares = share.values if sweep.split(mixer, tasks, T) else (share.mean,)
    return f"{sweep.title(mixer)} {' / '.join(percent(one).removesuffix(' %') for one in shares)} %"


def _by_state(axes, sweep: Sweep, tasks: tuple[str, ...], T: int) -> None:
    axes.grid(axis="y")
    axis_of_bytes(axes, 8)
    axes.set_ylim(-0.03, 1.03)
    axes.set_yticks([0, GUESS, 0.5, 1], ["0 %", "guess", "50 %", "100 %"])
    axes.set_xlabel(f"bytes of state that a sequence of {T:,} tokens holds")
    axes.set_title(f"Found at {multiple(T, sweep.train_length)} the training length, by state size")
    points, shown = [], set()
    for family, members in enumerate(sweep.families.values()):
        for i, mixer in enumerate(m for m in members if m in sweep.runs and m not in shown):
            shown.add(mixer)  # a baseline of two families is drawn with the first
            share = sweep.spread(mixer, lambda run: found(run, tasks, [T]))
            x = sweep.runs[mixer][0]["state_bytes"][str(T)]
            if sweep.split(mixer, tasks, T):
                axes.plot([x] * share.n, share.values, marker(i), color=colour(family))
            else:
                axes.errorbar(x, share.mean, yerr=share.deviation or 0, color=colour(family), fmt=marker(i), capsize=2)
            points.append((family, x, statistics.median(share.values), _at(sweep, mixer, tasks, T)))
    label_points(axes, points, at=1.03)


def _panels(sweep: Sweep):
    from matplotlib.figure import Figure

    columns = 2
    rows = -(-len(sweep.families) // columns)
    width, height = PANEL[0] * columns, PANEL[1] * rows
    figure = Figure(figsize=(width, height))
    panels = []
    for n in range(len(sweep.families)):
        left, bottom = (n % columns) / columns, 1 - (n // columns + 1) / rows
        panels.append(figure.add_axes((left + 0.05, bottom + 0.3 / height, 0.24, 1 / rows - 0.75 / height)))
    return figure, panels


def _curves(
    axes,
    sweep: Sweep,
    members: tuple[str, ...],
    points: Callable,
    label: Callable[[str], str],
    split: Callable[[str], bool] = lambda mixer: False,
) -> None:
    """Each member's mean and its band of seeds, of a split one its runs; every other mixer's mean in grey."""
    ends = []
    for mixer, runs in sweep.runs.items():
        lines = [points(run) for run in runs]
        xs = [x for x, _ in lines[0]]
        columns = list(zip(*[[y for _, y in line] for line in lines], strict=True))
        mean = [sum(column) / len(column) for column in columns]
        if mixer not in members:
            axes.plot(xs, mean, color=GRID, linewidth=1, zorder=1)
            continue
        i = members.index(mixer)
        if split(mixer):
            for _, ys in (zip(*line, strict=True) for line in lines):
                axes.plot(xs, ys, color=colour(i), marker=marker(i), markersize=4, linewidth=1, zorder=3)
            ends.append((i, xs[-1], statistics.median(columns[-1]), label(mixer)))
            continue
        axes.fill_between(xs, [min(c) for c in columns], [max(c) for c in columns], color=colour(i), alpha=0.15, linewidth=0)
        axes.plot(xs, mean, color=colour(i), marker=marker(i), markersize=4, zorder=3)
        ends.append((i, xs[-1], mean[-1], label(mixer)))
    label_points(axes, ends, at=1.04)


def _save(figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, facecolor=SURFACE, metadata={"Software": None})
