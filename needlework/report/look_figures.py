"""The figures of `needlework look`: what the papers look at, by layer, by position, by number of keys, and maps by head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .drawing import label_points, style, svg, tag
from .look import ByLayer, Look, Map, number, shown
from .palette import INK, MUTED, colour
from .panels import point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 5.4, 3.0  # inches
ABOVE, BELOW = "#3f87e8", "#e8626c"  # a picture's colours are the same in both themes: seen on either ground
LINES, LAYERS, HEADS = 8, 6, 8  # at most so many lines, layers with maps, heads of a layer


class Drawn(NamedTuple):
    """svg: the figure. caption: one line on what it shows. kind: "" or "wide", for the page."""

    svg: str
    caption: str
    kind: str = ""


class Measure(NamedTuple):
    """A figure of one or two measures of a rule by layer, called `labels` in it. Dashed lines are drawn at `marks`."""

    rule: str
    measures: tuple[str, ...]
    title: str
    caption: str
    scale: str = "linear"
    marks: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()


MEASURES = (
    Measure(
        "qdelta", ("beta a", "beta a most"), "Q-Delta: does a write contract?",
        "β k·(k + λq) of each token, its mean and its largest: a write reduces the error where it lies between 0 and 2.", marks=(0, 2), labels=("mean", "largest"),
    ),
    Measure(
        "qdelta", ("cosine",), "Q-Delta: does the query ask what the key asks?",
        "Cosine of what the state returns for the query and for the key, before the token is written; the paper's 340M model has 0.07.",
        marks=(0,),
    ),
    Measure("qdelta", ("drift",), "Q-Delta: drift", "Norm of Theorem 3.2's residual: how far the target moves from one token to the next."),
    Measure(
        "ccq", ("needle", "distractor"), "CCQ: alignment of keys",
        "Share of a key's energy in the 16 directions that most keys share; needles stand out where theirs is the smaller.", marks=(0, 1), labels=("needle", "other tokens"),
    ),
    Measure(
        "carve", ("content",), "CARVE: content share",
        "How much of what moves the erase gate comes from what was read, and not from the token; 0 is a gate blind to the memory.",
        marks=(0, 1),
    ),
    Measure("carve", ("staleness",), "CARVE: staleness", "What it changes in the output that the content signal is a chunk old; the paper has 0.0018."),
    Measure(
        "lucid", ("condition",), "LUCID: condition of the keys",
        "Largest by smallest singular value of P: 1 where keys are orthogonal, large where they overlap.", scale="log", marks=(1,),
    ),
    Measure("lucid", ("off diagonal",), "LUCID: overlap of the keys", "Share of P below its diagonal: how much of a value is taken off for earlier keys like its own.", marks=(0,)),
    Measure("polar", ("n eff",), "Polar: effective count", "How many keys a query rests on, 1/Σw²; the mean over queries and heads.", scale="log", marks=(1,)),
    Measure("polar", ("null mass",), "Polar: null mass", "The weight that rests on no key, on the null sink.", marks=(0, 1)),
)  # fmt: skip


def drawn(look: Look) -> Iterator[Drawn]:
    """Every figure that the model has, in the page's order."""
    with style():
        for one in MEASURES:
            if one.rule in look.rules:
                yield _drawn(one.title, one.caption, _by_layer(look.rules[one.rule], one, len(look.layers)))
        for found, title, caption, axis, scale in (
            (look.norms, "Size of the state", _NORMS, "tokens read", "log"),
            (look.overwrite, "Selective key overwrite", _OVERWRITE, "keys, as a share of the key's channels", "log"),
            (look.chunks, "CARVE: chunkability", _CHUNKS, "tokens of a content chunk", "log"),
        ):
            if found is not None:
                yield _drawn(title, caption, _curves(found, title, axis, scale))
        layers = shown(sorted({one.layer for one in look.maps}), LAYERS)
        for one in look.maps:
            if one.layer in layers:
                title = f"Layer {one.layer}: what each token reads, {one.rule}"
                yield _drawn(title, _mapped(one), _map(one, title), "wide")


_NORMS = "Mean Frobenius norm of the state by tokens read, a line a layer: a memory that grows without bound shows here first."
_OVERWRITE = "Mean squared error of every key's last value, with this text's gates, where keys are given new values; 0 is perfect, 1 an empty memory."
_CHUNKS = "Staleness if the content signal were of the last chunk of so many tokens; the paper's Table 4 has 0.0018, flat."


def _mapped(one: Map) -> str:
    H = len(one.weights)
    heads = f"the first {HEADS} of {H} heads" if H > HEADS else f"{H} head{'' if H == 1 else 's'}"
    below = "; red is below zero" if bool((one.weights < -1e-6).any()) else ""
    return f"Row t, column s: how much of token s's value is in what token t reads; {heads}; a stronger colour is more, by its square root{below}."


def _drawn(title: str, caption: str, figure: Figure, kind: str = "") -> Drawn:
    return Drawn(svg(figure, title, caption), caption, kind)


def _axes(right: float, title: str) -> tuple[Figure, Axes]:
    """A figure, and axes with `right` inches beside them for labels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT))
    left, bottom, top = 0.62, 0.55, 0.4
    box = left / WIDTH, bottom / HEIGHT, (WIDTH - left - right) / WIDTH, (HEIGHT - bottom - top) / HEIGHT
    axes = figure.add_axes(box)
    axes.grid(axis="y")
    axes.set_title(title, x=-left / (WIDTH - left - right), pad=10)
    return figure, axes


def _by_layer(found: ByLayer, one: Measure, layers: int) -> Figure:
    from matplotlib.ticker import MaxNLocator

    several, labels = len(one.measures) > 1, one.labels or one.measures
    figure, axes = _axes(0.4 + 0.075 * max(map(len, labels)) if several else 0.25, one.title)
    axes.set_yscale(one.scale)
    ends = []
    for i, (measure, name) in enumerate(zip(one.measures, labels, strict=True)):
        values, at = found.values[measure], i if several else 1
        axes.plot(found.layers, values, color=colour(at), linewidth=1, **tag(at))
        for layer, value in zip(found.layers, values, strict=True):
            tip = f"layer {layer}, {name}: {number(value)}"
            point(axes, at, layer, value, tip)
        ends.append((at, found.layers[-1], values[-1], name))
    for mark in one.marks:
        axes.axhline(mark, color=MUTED, linewidth=0.8, dashes=(2, 3))
    _y_numbers(axes, one.scale)
    if one.scale == "linear" and min(min(found.values[measure]) for measure in one.measures) >= 0:
        axes.set_ylim(bottom=0)
    axes.set_xlim(-0.4, layers - 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("layer")
    if several:
        label_points(axes, ends, at=1.03)
    return figure


def _curves(found: ByLayer, title: str, axis: str, scale: str) -> Figure:
    """A line a layer over the places that the measures name; of many layers some are named and the rest are thin."""
    figure, axes = _axes(0.85, title)
    if scale == "log":
        axes.set_xscale("log", base=2)
    places = [float(place) for place in found.values]
    named = shown(range(len(found.layers)), LINES)
    ends = []
    for line in range(len(found.layers)):
        values = [column[line] for column in found.values.values()]
        if line not in named:
            axes.plot(places, values, color=MUTED, linewidth=0.7, alpha=0.6)
            continue
        i = named.index(line)
        axes.plot(places, values, color=colour(i), **tag(i))
        for place, value in zip(places, values, strict=True):
            tip = f"layer {found.layers[line]}, {place:,g} {axis}: {number(value)}"
            point(axes, i, place, value, tip)
        ends.append((i, places[-1], values[-1], f"layer {found.layers[line]}"))
    axes.set_ylim(bottom=0)
    axes.set_xticks(places, [f"{place:,g}" for place in places])
    axes.minorticks_off()
    axes.set_xlabel(axis)
    label_points(axes, ends, at=1.03)
    return figure


def _y_numbers(axes: Axes, scale: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if scale == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: number(y)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.margins(y=0.12)


def _map(one: Map, title: str) -> Figure:
    """The heads side by side, one picture each."""
    from matplotlib.figure import Figure

    weights = np.asarray(one.weights)[:HEADS]
    side, gap, top = 1.3, 0.12, 0.62
    width = 11.0
    figure = Figure(figsize=(width, side + top))
    figure.text(0, 1 - 0.12 / (side + top), title, fontsize=10, fontweight="bold", color=INK, va="top")
    for h, head in enumerate(weights):
        axes = figure.add_axes((h * (side + gap) / width, 0.02, side / width, side / (side + top)))
        axes.imshow(painted(head), interpolation="nearest", aspect="equal")
        axes.set(xticks=[], yticks=[])
        axes.set_title(f"head {h}", fontsize=8, fontweight="normal", color=MUTED, pad=3)
        for spine in axes.spines.values():
            spine.set(visible=True, linewidth=0.6)
    return figure


def painted(head: np.ndarray) -> np.ndarray:
    """[T T] numbers as colours [T T 4] on any ground: blue above zero, red below, opaque where |w| is largest."""
    from matplotlib.colors import to_rgb

    most = np.abs(head).max()
    above, below = to_rgb(ABOVE), to_rgb(BELOW)
    made = np.where((head >= 0)[..., None], above, below)
    alpha = np.sqrt(np.abs(head) / most) if most > 0 else np.zeros_like(head)
    return np.concatenate([made, alpha[..., None]], -1)
