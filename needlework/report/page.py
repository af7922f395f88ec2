"""The report of a comparison: one self-contained HTML file, every number of which comes from results.json.

page.html is the page with its style and script; figures.py and table.py make what goes into it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from needlework.eval.retrieval import chance
from needlework.files import write_whole

from . import figures, training_figures
from .results import Mixer, Results, check_results, scores_of, tasks_of
from .rows import CSV, rows
from .sheet import style_sheet, template
from .table import cost_table, name_of, retrieval_table
from .words import multiple, percent, summary, task_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Shown(NamedTuple):
    """One figure on the page: what draws it, its accessible name, and the line below it."""

    figure: Callable[[Results], Figure]
    label: str
    caption: str


BARS = "Bars are 95 % of a share over so many values (Wilson); another seed is not in them."


def shown(results: Results) -> list[Shown]:
    """The figures of these results, in their order; of what was not recorded there is none."""
    tasks, last = tasks_of(results), multiple(results["lengths"][-1], results["train_length"])
    found = [
        Shown(
            partial(figures.retrieval_by_length, task=task),
            f"{task_title(task)}: retrieval by length",
            f"Up is better; right of 1× no model was trained. A guess finds {percent(chance(task))}. {BARS}",
        )
        for task in tasks
    ]
    found += [
        Shown(
            partial(figures.retrieval_by_state, task=task),
            f"{task_title(task)}: retrieval by state size",
            f"Up and to the left is better: more found at {last} with less memory. {BARS}",
        )
        for task in tasks
    ]
    found += [
        Shown(
            training_figures.loss_by_step,
            "Training loss by step",
            "Smoothed; the recorded values lie faint behind. The first steps are cut off.",
        ),
        Shown(figures.loss_by_length, "Loss by length", "A model that generalises does not rise."),
    ]
    if any("log" in mixer["train"] for mixer in results["mixers"]):
        found += [
            Shown(training_figures.learning_rate, "Learning rate by step", "Of the first group of parameters."),
            Shown(
                training_figures.gradient_norm, "Gradient norm by step", "Before it is clipped; means of neighbouring steps."
            ),
            Shown(training_figures.memory, "Memory by step", "The most so far: of a GPU, or of the process on a CPU."),
        ]
    return [
        *found,
        Shown(training_figures.training_speed, "Training speed", "On the machine named below, with what else ran on it."),
    ]


def write_report(results: Results, path: str | os.PathLike) -> None:
    """Write report.html for these results and results.csv beside it, each whole or not at all. Equal results give equal bytes.

    Raises ValueError that names what is missing from the results.
    """
    check_results(results)
    finished = bool(results["mixers"])
    page = template("page.html").substitute(
        title=escape(f"{results['name']}: which mixer finds the needle?"),
        style=style_sheet(),
        summary=escape(summary(results)),
        origin=escape(f"{results['name']} · {results['date']} · {len(results['mixers'])} mixers · {results['machine']}"),
        legend="\n".join(_button(i, mixer) for i, mixer in enumerate(results["mixers"])),
        figures="\n".join(_figure(one, results) for one in shown(results)) if finished else "",
        tables=_tables(results) if finished else "",
        samples=_samples(results),
        serving=_serving(results) if finished else "",
        provenance=_provenance(results),
        config=escape(json.dumps(results["config"], indent=2, ensure_ascii=False)),
        limits=f"<p>{escape(_limits(results))}</p>" if finished else "",
    )
    lengths = results["lengths"]
    write_whole(Path(path).with_name(CSV), rows(results["mixers"], tasks_of(results), lengths, results["train_length"]))
    write_whole(path, page)


def _button(index: int, mixer: Mixer) -> str:
    return f'<button type="button" data-mixer="{index}" aria-pressed="false">{name_of(index, mixer)}</button>'


def _figure(one: Shown, results: Results) -> str:
    label = one.label[0].upper() + one.label[1:]
    drawn = figures.draw(one.figure, results, label, one.caption)
    return f"<figure>{drawn}<figcaption>{escape(one.caption)}</figcaption></figure>"


def _tables(results: Results) -> str:
    return f"{retrieval_table(results)}\n{cost_table(results)}\n" + (
        f'<p class="note">The same as rows: <a href="{CSV}" download>{CSV}</a>.</p>'
    )


def _serving(results: Results) -> str:
    """How to ask one of the models: in the folder of this page, where their checkpoints lie."""
    first = results["mixers"][0]["name"]
    names = ", ".join(f"<code>{escape(mixer['name'])}</code>" for mixer in results["mixers"])
    ask = f"""needlework serve {first}/checkpoint
curl 127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{{"prompt": "def main(", "max_tokens": 64}}'"""
    return (
        f"<h2>Ask one</h2>\n<p>In the folder of this page the first command serves a model, and the second, in another terminal, asks it. "
        f"The models: {names}. <code>make demo</code> installs <code>needlework</code> in <code>.venv/bin</code> of the checkout.</p>\n"
        f'<pre class="ask">{escape(ask)}</pre>'
    )


def _samples(results: Results) -> str:
    """Each prompt once, and how every mixer went on from it."""
    sampled = [(i, mixer) for i, mixer in enumerate(results["mixers"]) if mixer.get("samples")]
    if not sampled:
        return ""
    parts = []
    for n, first in enumerate(sampled[0][1]["samples"]):
        went_on = "".join(
            f'<tr data-mixer="{i}"><th scope="row">{name_of(i, mixer)}</th><td>{escape(mixer["samples"][n]["continuation"])}</td></tr>'
            for i, mixer in sampled
            if n < len(mixer["samples"]) and mixer["samples"][n]["prompt"] == first["prompt"]
        )
        parts.append(
            f'<pre class="prompt">{escape(first["prompt"])}</pre><table class="samples"><tbody>'
            f'<tr><th scope="row">the text itself</th><td>{escape(first["text"])}</td></tr>{went_on}</tbody></table>'
        )
    return "<h2>How they go on</h2>\n<p>Held-out text, and the likeliest next tokens, one after the other.</p>\n" + "\n".join(
        parts
    )


def _provenance(results: Results) -> str:
    corpus = results["corpus"]
    facts = {
        "run": results["name"],
        "date": results["date"],
        "machine": results["machine"],
        "seed": results["seed"],
        "corpus": f"{corpus['files']:,} files, {corpus['bytes']:,} bytes, SHA-256 {corpus['sha256']}",
        "lengths": ", ".join(f"{n:,}" for n in results["lengths"]) + f" tokens; trained at {results['train_length']:,}",
        "versions": ", ".join(f"{name} {version}" for name, version in results["versions"].items()),
    }
    return "<dl>" + "\n".join(f"<dt>{name}</dt><dd>{escape(str(fact))}</dd>" for name, fact in facts.items()) + "</dl>"


def _limits(results: Results) -> str:
    scores = [score for mixer in results["mixers"] for task in tasks_of(results) for score in scores_of(mixer, task).values()]
    digits, values = min(score["digits"] for score in scores), min(score["values"] for score in scores)
    largest = max(mixer["parameters"] for mixer in results["mixers"])
    tokens = max(mixer["train"]["tokens"] for mixer in results["mixers"])
    return (
        f"Each mixer was trained once, with seed {results['seed']}, as a model of at most {largest:,} parameters on at most "
        f"{tokens:,} tokens. Another seed moves these numbers, at such a size often by more than two mixers differ. A share over "
        f"{digits:,} digits moves in steps of {percent(1 / digits)}; and as the digits of one value tend to be right or wrong "
        f"together, the standard error of a share over {values:,} values can reach {percent(0.5 / values**0.5)}. Speed "
        f"is of this code on this machine ({results['machine']}), and an order among models this small need not hold among "
        f"large ones. What the run can show is that a mixer works at all, how its retrieval changes with length, "
        f"and what its state costs."
    )
