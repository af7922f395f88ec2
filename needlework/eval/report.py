"""The report of a comparison: one self-contained HTML file, every number of which comes from results.json.

report.html is the page with its style and script; figures.py and table.py make what goes into it.
"""

import json
import os
from collections.abc import Callable
from html import escape
from importlib.resources import files
from string import Template
from typing import NamedTuple

from . import figures
from .palette import variables
from .results import Mixer, Results, check_results, write_whole
from .table import TASKS, name_of, table
from .words import percent, summary


class Shown(NamedTuple):
    """One figure on the page: what draws it, its name for who cannot see it, and the line below it."""

    figure: Callable
    label: str
    caption: str


ROWS = (
    (
        Shown(
            figures.retrieval_by_length,
            "Retrieval by length",
            "Up is better; right of 1× no model was trained. A guess finds one digit in ten.",
        ),
    ),
    (
        Shown(
            figures.retrieval_by_state,
            "Retrieval by state size",
            "Up and to the left is better: more found with less memory.",
        ),
    ),
    (
        Shown(
            figures.loss_by_step,
            "Training loss by step",
            "Smoothed; the recorded values lie faint behind. The first steps are cut off.",
        ),
        Shown(figures.loss_by_length, "Loss by length", "A model that generalises does not rise."),
    ),
    (Shown(figures.training_speed, "Training speed", "On the machine named below, with what else ran on it."),),
)


def write_report(results: Results, path: str | os.PathLike) -> None:
    """Write report.html for these results, whole or not at all. Equal results give equal bytes.

    Raises ValueError that names what is missing from the results.
    """
    check_results(results)
    template = Template(files(__package__).joinpath("report.html").read_text(encoding="utf-8"))
    finished = bool(results["mixers"])
    light, dark = ("; ".join(f"--{name}: {pair[i]}" for name, pair in variables().items()) for i in (0, 1))
    page = template.substitute(
        title=escape(f"{results['name']}: which mixer finds the needle?"),
        light_variables=light,
        dark_variables=dark,
        summary=escape(summary(results)),
        origin=escape(f"{results['name']} · {results['date']} · {len(results['mixers'])} mixers · {results['machine']}"),
        legend="\n".join(_button(i, mixer) for i, mixer in enumerate(results["mixers"])),
        figures="\n".join(_row(row, results) for row in ROWS) if finished else "",
        table=table(results) if finished else "",
        provenance=_provenance(results),
        config=escape(json.dumps(results["config"], indent=2, ensure_ascii=False)),
        limits=f"<p>{escape(_limits(results))}</p>" if finished else "",
    )
    write_whole(path, page)


def _button(index: int, mixer: Mixer) -> str:
    return f'<button type="button" data-mixer="{index}" aria-pressed="false">{name_of(index, mixer)}</button>'


def _row(row: tuple[Shown, ...], results: Results) -> str:
    drawn = "".join(
        f'<figure role="group" aria-label="{shown.label}">{figures.draw(shown.figure, results)}'
        f"<figcaption>{shown.caption}</figcaption></figure>\n"
        for shown in row
    )
    return f'<div class="pair">{drawn}</div>' if len(row) > 1 else drawn


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
    scores = [score for mixer in results["mixers"] for task in TASKS for score in mixer[task].values()]
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
