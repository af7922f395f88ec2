"""The page of what is inside a model: one HTML file that needs no other. Of what a model does not have there is no figure."""

import os
from html import escape

from needlework.files import write_whole

from .look import Look, number
from .look_figures import drawn
from .sheet import style_sheet, template


def write_look(look: Look, path: str | os.PathLike) -> None:
    """Write the page, whole or not at all; equal numbers give equal bytes."""
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
