"""What `needlework look` found inside a model: the numbers, and the page of them, one self-contained HTML file.

look.html is the page; look_figures.py draws. Of what a model does not have there is no figure.
"""

import os
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from needlework.files import write_whole

from .sheet import style_sheet, template


class ByLayer(NamedTuple):
    """layers: their numbers in the model. values: a list for each measure, one number a layer."""

    layers: list[int]
    values: dict[str, list[float]]


class Map(NamedTuple):
    """layer, rule: whose. weights: an array [H T T] of numbers."""

    layer: int
    rule: str
    weights: Any


class Look(NamedTuple):
    """name: of the checkpoint. layers: what each layer is, in words. text: where the tokens are from, and how many.

    rules: a rule's diagnosis by its name. norms, overwrite, chunks: curves, each measure a place on the axis (tokens read, keys as a share
    of K, tokens of a chunk); None where no layer has them. maps: of the tokens of `words`. notes: what was left out, and why.
    """

    name: str
    layers: list[str]
    text: str
    rules: dict[str, ByLayer]
    norms: ByLayer | None
    overwrite: ByLayer | None
    chunks: ByLayer | None
    maps: list[Map]
    words: str
    notes: list[str]


def write_look(look: Look, path: str | os.PathLike) -> None:
    """Write the page, whole or not at all; equal numbers give equal bytes."""
    from .look_figures import drawn

    page = template("look.html").substitute(
        title=escape(f"Inside {look.name}"),
        style=style_sheet(),
        summary=escape(_summary(look)),
        origin=escape(look.text),
        figures="\n".join(
            f'<figure class="{one.kind}">{one.svg}<figcaption>{escape(one.caption)}</figcaption></figure>'
            for one in drawn(look)
        ),
        table=_table(look),
        notes="".join(f"<li>{escape(note)}</li>" for note in look.notes),
        words=_words(look),
    )
    write_whole(path, page)


def _summary(look: Look) -> str:
    kinds = list(dict.fromkeys(look.layers))
    counted = "; ".join(f"{look.layers.count(kind)} of {kind}" for kind in kinds)
    return f"{len(look.layers)} layer{'' if len(look.layers) == 1 else 's'}: {counted}."


def _words(look: Look) -> str:
    """The text whose tokens the maps have."""
    if not look.maps:
        return ""
    T = look.maps[0].weights.shape[-1]
    return f'<h2>The {T} tokens of the maps</h2>\n<pre class="prompt">{escape(look.words)}</pre>'


def _table(look: Look) -> str:
    """Every number of the rules, a row a layer."""
    columns = [(rule, measure) for rule, found in look.rules.items() for measure in found.values]
    if not columns:
        return ""
    heads = "".join(f'<th colspan="{len(found.values)}">{escape(rule)}</th>' for rule, found in look.rules.items())
    names = "".join(f"<th>{escape(measure)}</th>" for _, measure in columns)
    rows = "\n".join(
        f'<tr><th scope="row">{n}<small>{escape(kind)}</small></th>{"".join(f"<td>{_cell(look, n, *of)}</td>" for of in columns)}</tr>'
        for n, kind in enumerate(look.layers)
    )
    return f"""<h2>The numbers</h2>
<div class="scroll" tabindex="0" role="region" aria-label="A table, wider than a small screen"><table>
<thead><tr><th></th>{heads}</tr><tr><th style="text-align:left">layer</th>{names}</tr></thead>
<tbody>
{rows}
</tbody></table></div>"""


def _cell(look: Look, layer: int, rule: str, measure: str) -> str:
    found = look.rules[rule]
    return number(found.values[measure][found.layers.index(layer)]) if layer in found.layers else ""


def number(value: float) -> str:
    """Three digits: 0.0434, 12.3, 1,230."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def shown(layers: Sequence[int], most: int) -> list[int]:
    """At most `most` of the layers, the first and the last among them, the others evenly between."""
    if len(layers) <= most:
        return list(layers)
    return [layers[round(i * (len(layers) - 1) / (most - 1))] for i in range(most)]
