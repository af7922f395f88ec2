"""How a figure is drawn: the bare axes, labels at the line's own end that never overlap, and SVG that HTML can colour.

matplotlib draws with the light palette; `svg` then turns each colour into the CSS variable of the same name, and each group
that was marked with `tag` into one that a script can find by its mixer. figures.py has what is plotted.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from .palette import GRID, INK, MUTED, SURFACE, colour, variables
from .words import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABEL_POINTS = 8.5
LINE_HEIGHT = 1.3


@contextmanager
def style() -> Iterator[None]:
    """matplotlib settings for every figure: text stays text, equal input gives equal bytes, a `$` is a `$`."""
    import matplotlib

    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": "needlework",
        "text.parse_math": False,
        "font.family": "DejaVu Sans",
        "font.size": LABEL_POINTS,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlecolor": INK,
        "axes.labelcolor": MUTED,
        "axes.edgecolor": MUTED,
        "axes.facecolor": "none",
        "axes.linewidth": 0.8,
        "axes.spines.left": False,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.axisbelow": True,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.major.size": 3,
        "ytick.major.size": 0,
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "lines.linewidth": 1.8,
        "lines.markersize": 6,
        "lines.solid_capstyle": "round",
    }
    with matplotlib.rc_context(settings):
        yield


def tag(index: int, tip: str = "") -> dict[str, Any]:
    """The keyword that marks an artist as mixer number `index`'s, with what a pointer over it should say."""
    return {"gid": f"mixer-{index}|{tip}"}


def svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an <svg> element: themed, without ids that could meet another figure's, without date or links.

    name: its accessible name. `description` and the tips of all its points are the accessible description.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg ") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="mixer-(\d+)\|([^"]*)"', r'<g class="series" data-mixer="\1" data-tip="\2"', text)
    text = re.sub(r'<g id="[^"]*"', "<g", text).replace(' data-tip=""', "")
    points = "; ".join(re.findall(r'data-tip="([^"]*)"', text))
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    text = re.sub(r'( id="|#)([mp][0-9a-f]{10})\b', rf"\1{slug}-\2", text)  # of markers and clips
    said = f'<title id="{slug}-title">{escape(name)}</title><desc id="{slug}-desc">{escape(description)} {points}</desc>'
    text = re.sub(
        r'<svg [^>]*?(viewBox="[^"]*")[^>]*>',
        lambda found: (
            f'<svg {found[1]} xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
            f'aria-labelledby="{slug}-title {slug}-desc">{said}'
        ),
        text,
    )
    for variable, (light, _) in variables().items():
        text = text.replace(light, f"var(--{variable})")
    return text


def spread(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """The positions nearest to the wanted ones (least squares) that keep their order, `gap` apart, inside [low, high].

    With i gaps taken off the i-th, 'at least a gap apart' is 'never descending': pool neighbours that descend.
    """
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    pools: list[list[float]] = []
    for i, index in enumerate(order):
        pools.append([wanted[index] - i * gap])
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    level = [_mean(pool) for pool in pools for _ in pool]
    highest = max(low, high - gap * (len(wanted) - 1))
    placed = [0.0] * len(wanted)
    for i, index in enumerate(order):
        placed[index] = min(max(level[i], low), highest) + i * gap
    return placed


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def inches(axes: Axes) -> tuple[float, float]:
    """The width and height of axes."""
    from matplotlib.figure import Figure

    figure, box = axes.figure, axes.get_position()
    assert isinstance(figure, Figure)  # and no part of one
    return box.width * figure.get_figwidth(), box.height * figure.get_figheight()


def axis_of_bytes(axes: Axes, ticks: int) -> None:
    """x in powers of two, with so many of them named at most."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: size(x)))
    axes.minorticks_off()


def label_points(axes: Axes, points: Sequence[tuple[int, float, float, str]], *, at: float | None = None) -> None:
    """Write each (mixer, x, y, text) in its colour to the right of its point, at axes fraction `at` or just beside it.

    Labels that would overlap move up or down and keep a thin leader to their point. Call it when everything is plotted.
    """
    if not points:
        return
    axes.autoscale_view()  # limits that are still to be computed would make the positions below wrong
    width, height = (72 * side for side in inches(axes))
    gap = LABEL_POINTS * LINE_HEIGHT / height
    anchors = axes.transAxes.inverted().transform(axes.transData.transform([(x, y) for _, x, y, _ in points]))
    places = spread([float(y) for _, y in anchors], gap, 0.04, 1.0)
    start = at if at is not None else float(anchors[:, 0].max()) + 16 / width
    for (index, _, _, text), (x, y), place in zip(points, anchors, places, strict=True):
        axes.plot(
            [x + 5 / width, start - 3 / width],
            [y, place],
            transform=axes.transAxes,
            color=colour(index),
            linewidth=0.6,
            alpha=0.55,
            clip_on=False,
            **tag(index),
        )
        axes.text(
            start,
            place,
            text,
            transform=axes.transAxes,
            color=colour(index),
            va="center_baseline",
            bbox={"facecolor": SURFACE, "edgecolor": "none", "pad": 0.5},
            **tag(index),
        )
