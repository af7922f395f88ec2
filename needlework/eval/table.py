"""The table of a comparison in HTML: one row a mixer, every number that the figures show."""

import statistics
from html import escape

from .palette import LIGHT, glyph
from .results import Mixer, Results, Score
from .words import multiple, percent, size

TASKS = {"needle": "single needle", "needles": "several needles"}


def table(results: Results) -> str:
    """The <table>, and below it what its columns count."""
    lengths, trained = results["lengths"], results["train_length"]
    lengths_head = "".join(f"<th>{multiple(n, trained)}</th>" for n in lengths)
    ends = [lengths[0], lengths[-1]]
    median = statistics.median(mixer["parameters"] for mixer in results["mixers"])
    rows = "\n".join(_row(i, mixer, results, ends, median) for i, mixer in enumerate(results["mixers"]))
    tasks_head = "".join(f'<th colspan="{len(lengths)}">digits found, {title}</th>' for title in TASKS.values())
    state_head = "".join(f"<th>{multiple(n, trained)}</th>" for n in ends)
    return f"""<div class="scroll"><table>
<thead>
<tr><th></th><th colspan="2">parameters</th><th colspan="2">state at</th><th colspan="2">loss, nats</th>{tasks_head}<th colspan="2">training</th></tr>
<tr><th style="text-align:left">mixer</th><th>count</th><th>to median</th>{state_head}<th>training</th><th>text {multiple(lengths[0], trained)}</th>
{lengths_head}{lengths_head}<th>tokens/s</th><th>seconds</th></tr>
</thead>
<tbody>
{rows}
</tbody>
</table></div>
<p class="note">{escape(_counts(results))} Point at a share to see how many values were right from the first digit to the last.
State is what one sequence holds after that many tokens, over all layers. The training loss is the mean of the last tenth of the steps.</p>"""


def name_of(index: int, mixer: Mixer) -> str:
    """The marker in its colour, and the title."""
    colour = f"var(--mixer-{index % len(LIGHT)})"
    return f'<span class="glyph" style="color: {colour}">{glyph(index)}</span>{escape(mixer["title"])}'


def _row(index: int, mixer: Mixer, results: Results, ends: list[int], median: float) -> str:
    curve = mixer["train"]["loss"]
    tail = curve[-max(1, len(curve) // 10) :]
    off = 100 * (mixer["parameters"] / median - 1)
    cells = [
        f"{mixer['parameters']:,}",
        f"{off:+.1f} %".replace("-", "−") if round(off, 1) else "0",
        *(size(mixer["state_bytes"][str(n)]) for n in ends),
        f"{statistics.mean(tail):.3f}" if tail else "",
        f"{mixer['loss'][str(ends[0])]:.3f}",
    ]
    shares = [_share(mixer[task][str(n)]) for task in TASKS for n in results["lengths"]]
    cost = [f"{mixer['train']['tokens_per_second']:,.0f}", f"{mixer['train']['seconds']:,.0f}"]
    return (
        f'<tr data-mixer="{index}"><th>{name_of(index, mixer)}<small>{escape(mixer["equation"])}</small></th>'
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + "".join(shares)
        + "".join(f"<td>{cell}</td>" for cell in cost)
        + "</tr>"
    )


def _share(score: Score) -> str:
    tip = f"{percent(score['accuracy'])} of {score['digits']:,} digits, {percent(score['exact'])} of {score['values']:,} values whole"
    return f'<td class="share" style="--share: {score["accuracy"]:.3f}" data-tip="{tip}">{100 * score["accuracy"]:.1f}</td>'


def _counts(results: Results) -> str:
    """How many digits each share was taken over: one number if it is the same at every length, else one a length."""
    said = []
    for task, title in TASKS.items():
        counts = [sorted({mixer[task][str(n)]["digits"] for mixer in results["mixers"]}) for n in results["lengths"]]
        written = ["–".join(f"{count:,}" for count in (few[0], few[-1])[: len(few)]) for few in counts]
        said.append(f"{title} " + (f"{written[0]} at each length" if len(set(written)) == 1 else " / ".join(written)))
    return f"Digits found are in per cent of the digits scored ({', '.join(said)})."
