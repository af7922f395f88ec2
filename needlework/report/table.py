"""The tables of a comparison in HTML: one row a mixer, every number that the figures show."""

import statistics
from html import escape

from .palette import LIGHT, glyph
from .results import Mixer, Results, Score, scores_of, tasks_of
from .words import multiple, percent, size, task_title


def retrieval_table(results: Results) -> str:
    """The <table> of what was found, by task and length, and below it what its columns count."""
    lengths, tasks = results["lengths"], tasks_of(results)
    heads = "".join(f'<th colspan="{len(lengths)}">digits found, {escape(task_title(task))}</th>' for task in tasks)
    lengths_head = "".join(f"<th>{multiple(n, results['train_length'])}</th>" for n in lengths) * len(tasks)
    cells = lambda mixer: "".join(_share(scores_of(mixer, task)[str(n)]) for task in tasks for n in lengths)
    note = f"{_counts(results)} Point at a share to see how many values were right from the first digit to the last."
    return _table(heads, lengths_head, [cells(mixer) for mixer in results["mixers"]], results, note)


def cost_table(results: Results) -> str:
    """The <table> of what each model is and costs: parameters, state, loss, time."""
    trained, ends = results["train_length"], list(dict.fromkeys((results["lengths"][0], results["lengths"][-1])))
    median = statistics.median(mixer["parameters"] for mixer in results["mixers"])
    heads = (
        f'<th colspan="2">parameters</th><th colspan="{len(ends)}">state at</th><th colspan="2">loss, nats</th>'
        '<th colspan="2">training</th>'
    )
    below = ["count", "to median", *(multiple(n, trained) for n in ends), "training", f"text {multiple(ends[0], trained)}"]
    columns = "".join(f"<th>{name}</th>" for name in (*below, "tokens/s", "seconds"))
    note = (
        "State is what one sequence holds after that many tokens, over all layers. The training loss is the mean of the last tenth of "
        "the recorded steps."
    )
    return _table(heads, columns, [_cost(mixer, ends, median) for mixer in results["mixers"]], results, note)


def _table(heads: str, columns: str, rows: list[str], results: Results, note: str) -> str:
    body = "\n".join(
        f'<tr data-mixer="{i}"><th scope="row">{name_of(i, mixer)}<small>{escape(mixer["equation"])}</small></th>{cells}</tr>'
        for i, (mixer, cells) in enumerate(zip(results["mixers"], rows, strict=True))
    )
    return f"""<div class="scroll" tabindex="0" role="region" aria-label="A table, wider than a small screen"><table>
<thead>
<tr><th></th>{heads}</tr>
<tr><th style="text-align:left">mixer</th>{columns}</tr>
</thead>
<tbody>
{body}
</tbody>
</table></div>
<p class="note">{escape(note)}</p>"""


def name_of(index: int, mixer: Mixer) -> str:
    """The marker in its colour, and the title."""
    colour = f"var(--mixer-{index % len(LIGHT)})"
    return f'<span class="glyph" style="color: {colour}">{glyph(index)}</span>{escape(mixer["title"])}'


def _cost(mixer: Mixer, ends: list[int], median: float) -> str:
    curve = mixer["train"]["loss"]
    tail = curve[-max(1, len(curve) // 10) :]
    off = 100 * (mixer["parameters"] / median - 1)
    cells = [
        f"{mixer['parameters']:,}",
        f"{off:+.1f} %".replace("-", "−") if round(off, 1) else "0",
        *(size(mixer["state_bytes"][str(n)]) for n in ends),
        f"{statistics.mean(tail):.3f}" if tail else "",
        f"{mixer['loss'][str(ends[0])]:.3f}",
        f"{mixer['train']['tokens_per_second']:,.0f}",
        f"{mixer['train']['seconds']:,.0f}",
    ]
    return "".join(f"<td>{cell}</td>" for cell in cells)


def _share(score: Score) -> str:
    tip = escape(
        f"{percent(score['accuracy'])} of {score['digits']:,} digits, {percent(score['exact'])} of {score['values']:,} values whole"
    )
    return f'<td class="share" style="--share: {score["accuracy"]:.3f}" data-tip="{tip}">{100 * score["accuracy"]:.1f}</td>'


def _counts(results: Results) -> str:
    """How many digits each share was taken over: one number if it is the same at every length, else one a length."""
    said = []
    for task in tasks_of(results):
        counts = [sorted({scores_of(mixer, task)[str(n)]["digits"] for mixer in results["mixers"]}) for n in results["lengths"]]
        written = ["–".join(f"{count:,}" for count in (few[0], few[-1])[: len(few)]) for few in counts]
        said.append(
            f"{task_title(task)} " + (f"{written[0]} at each length" if len(set(written)) == 1 else " / ".join(written))
        )
    return f"Digits found are in per cent of the digits scored ({', '.join(said)})."
