"""The page of a study that asked before it ran: each claim with its verdict, effect, interval and picture, and what follows from them.

Made from the study's packs alone; a claim whose runs are not there says "not run yet". Equal runs give equal bytes. The page is read in three
minutes; answers_runs.py makes the one behind it.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from needlework.files import write_whole

from . import answers_figures as figures
from .answers import Answer, answers, compared
from .answers_runs import runs_page
from .answers_words import difference, shown, spread
from .asked import Asked, Packs
from .markdown import table

RUNS = "runs.md"
LEAST = 1e-4  # smaller p are not told apart


class Study(NamedTuple):
    """What a page is made of beside the runs. title; primary: the claims that are judged together; explored: what else is compared; advice:
    about -> what for, what to take where the claim holds, and where it is the opposite; curve: experiment and runs of the picture against
    bytes; method, limits: the author's text; before: the pages of the study before."""

    title: str
    primary: tuple[Asked, ...]
    explored: tuple[Asked, ...]
    advice: Mapping[str, tuple[str, str, str]]
    curve: tuple[str, tuple[str, ...]]
    method: str
    limits: str
    before: str


def write_answers(study: Study, packs: Packs, directory: Path) -> Path:
    """README.md, runs.md and their pictures in `directory`."""
    found = answers(study.primary, packs)
    sections = [f"# {study.title}", _summary(found), _claims(found)]
    for answer in found:
        sections += [f"## {answer.asked.about}: {answer.word}", *_picture(answer, directory), _said(answer)]
    sections += ["## Accuracy against the bytes of a state", _by_bytes(study, packs, directory)]
    sections += ["## Which mixer for what", _advice(study, found)]
    sections += [
        "## How it was done",
        study.method,
        "## What this cannot say",
        study.limits,
        "## The study before",
        study.before,
    ]
    explored = [compared(one, packs.get(one.experiment, [])) for one in study.explored]
    write_whole(directory / RUNS, runs_page(f"{study.title}: the runs", explored, packs))
    path = directory / "README.md"
    write_whole(path, "\n\n".join(sections) + "\n")
    return path


def _summary(found: list[Answer]) -> str:
    words = Counter(answer.word.partition(":")[0] for answer in found)
    return (
        f"{len(found)} claims, each with one measure, a margin and a number of seeds that were fixed before the runs: "
        f"{', '.join(f'{n} × {word}' for word, n in words.most_common())}."
    )


def _claims(found: list[Answer]) -> str:
    rows = []
    for answer in found:
        asked, p = answer.asked, "" if answer.p is None else f"{answer.p:.2g}" if answer.p >= LEAST else f"< {LEAST:g}"
        margin = f"{shown(asked, asked.margin)} {asked.measure.unit}"
        rows.append((asked.says, margin, difference(answer), p, f"{answer.n} of {asked.seeds}", f"**{answer.word}**"))
    return table(("claim", "by more than", "difference, 95 %", "p, corrected", "seeds", "verdict"), rows)


def _picture(answer: Answer, directory: Path) -> list[str]:
    """The picture's line, where there are runs to draw."""
    if answer.better is None:
        return []
    name = f"{'-'.join(''.join(c if c.isalnum() else ' ' for c in answer.asked.about.lower()).split())}.png"
    figures.answer(answer, directory / name)
    return [f"![{answer.asked.about}]({name})"]


def _said(answer: Answer) -> str:
    """What was measured on either side, and how many runs that is."""
    asked = answer.asked
    if answer.looked == 0:
        return f"The first look is at {asked.seeds // 2} of {asked.seeds} seeds."
    said = [] if answer.looked == asked.seeds else [f"The first {answer.looked} of {asked.seeds} seeds."]
    if answer.better is not None and answer.worse is not None:
        better, worse = (spread(asked, side.values) for side in (answer.better, answer.worse))
        said.append(f"{answer.titles[0]}: {better}. {answer.titles[1]}: {worse} {asked.measure.unit}.")
    if answer.n < answer.looked:
        what = "pairs" if asked.trunk else "runs of a side"
        said.append(
            f"Only {answer.n} of {answer.looked} {what} are scored: the rest did not pass the gate, or their guard ended them."
        )
    if answer.passed is not None:
        said.append(f"{answer.passed[0]} of {answer.passed[1]} runs passed their gate in time.")
    return " ".join(said)


def _by_bytes(study: Study, packs: Packs, directory: Path) -> str:
    experiment, names = study.curve
    points = figures.points(packs.get(experiment, []), names)
    if not points:
        return "Not run yet."
    figures.by_bytes(points, directory / "bytes.png")
    return "![Accuracy against the bytes of a state](bytes.png)"


def _advice(study: Study, found: list[Answer]) -> str:
    rows = []
    for answer in found:
        what, holds, opposite = study.advice[answer.asked.about]
        word = answer.word.partition(":")[0]
        take = {"holds": holds, "opposite": opposite, "negligible": f"either; {opposite} is the simpler one"}.get(
            word, "not known"
        )
        rows.append((what, take, answer.asked.about, answer.word))
    return table(("for", "take", "claim", "verdict"), rows)
