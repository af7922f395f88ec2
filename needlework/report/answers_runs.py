"""The page behind the claims' page: what else the runs show, and the runs."""

from typing import Any

from .answers import Answer
from .answers_words import difference, spread
from .asked import Entry, Packs, passes
from .markdown import table
from .words import listing


def runs_page(title: str, explored: list[Answer], packs: Packs) -> str:
    """Its text; `explored` are compared and have no verdict."""
    return (
        "\n\n".join((f"# {title}", "## What else was compared", _EXPLORED, _explored(explored), "## The runs", _runs(packs)))
        + "\n"
    )


_EXPLORED = (
    "These were not among the claims: no verdict is given, and no p. A difference is better less worse, as the claims count it, ± half its 95 % "
    "interval, over all runs that are in."
)


def _explored(found: list[Answer]) -> str:
    rows = []
    for answer in found:
        sides = [spread(answer.asked, side.values) if side else "" for side in (answer.better, answer.worse)]
        rows.append((answer.asked.says, *sides, difference(answer) or "not run yet", str(answer.n or "")))
    return table(("compared", "better", "worse", "difference", "seeds"), rows)


def _runs(packs: Packs) -> str:
    """Of each experiment its runs, minutes, gates and machines; runs that their guard ended by name."""
    rows = [_row(name, [entry for entry in entries if "ended" not in entry]) for name, entries in packs.items()]
    text = table(("experiment", "runs", "minutes of training", "passed the gate", "machine"), rows)
    ended = [_ended(name, entry) for name, entries in packs.items() for entry in entries if "ended" in entry]
    return text if not ended else "\n\n".join((text, "The guard ended these runs, and no mean has them:", "\n".join(ended)))


def _row(name: str, whole: list[Entry]) -> tuple[str, ...]:
    machines = listing(sorted({entry["machine"] for entry in whole})) if whole else ""
    minutes = f"{sum(map(_seconds, whole)) / 60:.0f}" if whole else ""
    gated = [entry for entry in whole if "gate" in entry]
    by = listing([str(step) for step in sorted({entry["gate"]["most"] for entry in gated})]) if gated else ""
    passed = f"{sum(map(passes, gated))} of {len(gated)} by step {by}" if gated else ""
    return name, str(len(whole)), minutes, passed, machines


def _ended(name: str, entry: Entry) -> str:
    return f"- {name}: {entry['title']}, seed {entry['seed']}, at step {entry['ended']['step']}, {entry['ended']['why']}"


def _seconds(entry: Any) -> float:
    branches = entry.get("branches", {}).values()
    return entry["train"]["seconds"] + sum(branch["train"]["seconds"] for branch in branches if "train" in branch)
