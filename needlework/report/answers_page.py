"""The page of a study that asked before it ran: each claim with its verdict, effect, interval and picture, and what follows from them.

Made from the study's packs alone; a claim whose runs are not there says "not run yet". Equal runs give equal bytes.
"""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from needlework.files import write_whole

from . import answers_figures as figures
from .answers import Answer, Asked, Entry, Packs, answers
from .markdown import table
from .words import listing


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
    """README.md and its pictures in `directory`."""
    found, explored = answers(study.primary, packs), answers(study.explored, packs)
    sections = [f"# {study.title}", _summary(found), _claims(found)]
    for answer in found:
        sections += [f"## {answer.asked.about}: {answer.word}", f"{answer.asked.says}. {_said(answer)}"]
        if answer.better is not None:
            name = f"{_slug(answer.asked.about)}.png"
            figures.answer(answer, directory / name)
            sections.append(f"![{answer.asked.about}]({name})")
    sections += ["## Which mixer for what", _advice(study, found)]
    experiment, names = study.curve
    if points := figures.points(packs.get(experiment, []), names):
        figures.by_bytes(points, directory / "bytes.png")
        sections += ["## Accuracy against the bytes of a state", "![Accuracy against the bytes of a state](bytes.png)"]
    else:
        sections += ["## Accuracy against the bytes of a state", "Not run yet."]
    sections += ["## What else was seen", _EXPLORED, _explored(explored)]
    sections += ["## How it was done", study.method, _runs(packs)]
    sections += ["## What this cannot say", study.limits, "## The study before", study.before]
    path = directory / "README.md"
    write_whole(path, "\n\n".join(section for section in sections if section) + "\n")
    return path


_EXPLORED = (
    "These were not among the claims: no verdict is given, and no p is adjusted for how many there are. A difference is better less worse, as "
    "the claims count it, ± half its 95 % interval."
)


def _slug(about: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in about.lower()).split())


def _summary(found: list[Answer]) -> str:
    words = Counter(answer.word.partition(":")[0] for answer in found)
    return (
        f"{len(found)} claims were written down before the runs, with one measure, a margin and a number of seeds each. Of them: "
        f"{', '.join(f'{n} × {word}' for word, n in words.most_common())}."
    )


def _claims(found: list[Answer]) -> str:
    head = ("claim", "better", "worse", "difference", "margin", "p", "seeds", "passed", "")
    return table(head, [_row(answer) for answer in found])


def _row(answer: Answer) -> tuple[str, ...]:
    asked = answer.asked
    if answer.better is None or answer.worse is None:
        return (
            asked.says,
            "",
            "",
            "",
            _shown(asked, asked.margin),
            "",
            f"0 of {asked.seeds}",
            _passed(answer),
            f"**{answer.word}**",
        )
    return (
        asked.says,
        *(_spread(asked, side.values) for side in (answer.better, answer.worse)),
        _difference(answer),
        _shown(asked, asked.margin),
        "" if answer.p is None else f"{answer.p:.2g}",
        f"{answer.n} of {asked.seeds}",
        _passed(answer),
        f"**{answer.word}**",
    )


def _passed(answer: Answer) -> str:
    return "" if answer.passed is None else f"{answer.passed[0]} of {answer.passed[1]}"


def _shown(asked: Asked, value: float, sign: str = "") -> str:
    """A number in the measure's unit: points with one digit, nats with three."""
    times, digits = asked.measure.times, 1 if asked.measure.times > 1 else 3
    return f"{times * value:{sign}.{digits}f}"


def _spread(asked: Asked, values: tuple[float, ...]) -> str:
    """The mean and the runs' least and most; run by run where they lie further apart than half of the measure's range."""
    measure = asked.measure
    if (
        measure.floor is not None
        and measure.ceiling is not None
        and max(values) - min(values) > (measure.ceiling - measure.floor) / 2
    ):
        return " / ".join(_shown(asked, value) for value in values)
    mean = math.fsum(values) / len(values)
    return _shown(asked, mean) + (f" ({_shown(asked, min(values))} to {_shown(asked, max(values))})" if len(values) > 1 else "")


def _difference(answer: Answer) -> str:
    assert answer.mean is not None
    half = "" if answer.half is None else f" ± {_shown(answer.asked, answer.half)}"
    return f"{_shown(answer.asked, answer.mean, '+')}{half} {answer.asked.measure.unit}"


def _said(answer: Answer) -> str:
    """The answer in a sentence or two."""
    asked = answer.asked
    if answer.better is None:
        return f"It is asked of {asked.seeds} seeds a side, by more than {_shown(asked, asked.margin)} {asked.measure.unit}."
    pairing = "branches of one trunk are a pair" if asked.trunk else "seeds of the two sides have nothing in common"
    scored = (
        ""
        if answer.passed is None
        else f" {answer.passed[0]} of {answer.passed[1]} runs passed their gate, and those are scored."
    )
    return f"Difference {_difference(answer)}, margin {_shown(asked, asked.margin)}; {pairing}.{scored}"


def _advice(study: Study, found: list[Answer]) -> str:
    rows = []
    for answer in found:
        what, holds, opposite = study.advice[answer.asked.about]
        word = answer.word.partition(":")[0]
        take = {"holds": holds, "opposite": opposite, "negligible": f"either; {opposite} is the simpler one"}.get(
            word, "not known"
        )
        rows.append((what, take, answer.word))
    return table(("for", "take", "the claim"), rows)


def _explored(found: list[Answer]) -> str:
    head = ("compared", "better", "worse", "difference", "seeds")
    rows = []
    for answer in found:
        if answer.better is None or answer.worse is None:
            rows.append((answer.asked.says, "", "", "not run yet", ""))
        else:
            better, worse = (_spread(answer.asked, side.values) for side in (answer.better, answer.worse))
            rows.append((answer.asked.says, better, worse, _difference(answer), str(answer.n)))
    return table(head, rows)


def _runs(packs: Packs) -> str:
    """Of each experiment its runs, seconds and machines; aborted runs by name."""
    rows, ended = [], []
    for name, entries in packs.items():
        whole = [entry for entry in entries if "ended" not in entry]
        ended += [
            f"{name}: {_named(entry)} at step {entry['ended']['step']}, {entry['ended']['why']}"
            for entry in entries
            if "ended" in entry
        ]
        seconds = sum(_seconds(entry) for entry in whole)
        machines = listing(sorted({entry["machine"] for entry in whole})) if whole else ""
        gated = [entry for entry in whole if "gate" in entry]
        passed = [entry["gate"]["step"] for entry in gated if entry["gate"]["step"] is not None]
        gate = (
            f"{len(passed)} of {len(gated)}, steps {min(passed)} to {max(passed)}"
            if passed
            else f"0 of {len(gated)}"
            if gated
            else ""
        )
        rows.append((name, str(len(whole)), f"{seconds / 60:.0f}" if whole else "", gate, machines))
    text = table(("experiment", "runs", "minutes of training", "passed the gate", "machine"), rows)
    return text + (
        ""
        if not ended
        else "\n\nThe guard ended these runs, and no mean has them:\n\n" + "\n".join(f"- {line}" for line in ended)
    )


def _named(entry: Entry) -> str:
    return f"{entry['title']}, seed {entry['seed']},"


def _seconds(entry: Any) -> float:
    branches = entry.get("branches", {}).values()
    return entry["train"]["seconds"] + sum(branch["train"]["seconds"] for branch in branches if "train" in branch)
