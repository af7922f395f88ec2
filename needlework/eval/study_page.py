"""The page of a study: what was run, what was found, which claims hold, and what it cannot say. Markdown, from the runs alone."""

import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from . import study_figures as figures
from .results import write_whole
from .study import Claim, Spread, Study, found
from .words import count, multiple, size


def write_page(study: Study, directory: Path, claims: tuple[Claim, ...], limits: str) -> Path:
    """README.md and its pictures in `directory`; equal runs give equal bytes. `limits` is what the author knows it cannot say."""
    tasks, shown = study.tasks, (study.lengths[0], study.lengths[len(study.lengths) // 2 - 1], study.lengths[-1])
    figures.at_a_glance(study, directory / "glance.png", tasks)
    figures.retrieval_by_length(study, directory / "retrieval.png", tasks)
    figures.retrieval_by_state(study, directory / "state.png", tasks, tuple(dict.fromkeys(shown)))
    sections = [
        _summary(study),
        "![Retrieval at a glance](glance.png)",
        "![Retrieval by length](retrieval.png)",
        "![Retrieval against state bytes](state.png)",
    ]
    sections += ["## Which claims hold", _claims(study, claims)]
    if study.ended:
        sections += ["## What ended early", _ended(study)]
    sections += ["## Every mixer", _overview(study)]
    if all("positions" in run for runs in study.runs.values() for run in runs):
        figures.loss_by_position(study, directory / "positions.png")
        sections += ["## Loss by position", _POSITIONS, "![Loss by position](positions.png)"]
    sections += ["## Every task, by length", *(_task(study, task) for task in tasks)]
    if diagnoses := _diagnoses(study):
        sections += ["## Inside the models", diagnoses]
    sections += ["## What this cannot say", limits]
    path = directory / "README.md"
    parameters = [run["parameters"] for runs in study.runs.values() for run in runs]
    title = f"# The comparison at {count(statistics.median(parameters))} parameters"
    write_whole(path, "\n\n".join([title, *sections]) + "\n")
    return path


_POSITIONS = (
    "Nats per token of long held-out documents, minus the median run's at that position: down is better. Right of the "
    "training length no model was trained."
)


def _summary(study: Study) -> str:
    runs = [run for of in study.runs.values() for run in of]
    some = runs[0]
    counts = sorted({len(of) for of in study.runs.values()})
    seeds = f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else f"{counts[0]} seed{'s'[: counts[0] > 1]}"
    told = "Every number is a mean over seeds ± their standard deviation" if counts[-1] > 1 else "No number has a spread"
    sizes = [run["parameters"] for run in runs]
    machines = sorted({f"{run['machine']}, torch {run['versions']['torch']}" for run in runs})
    commits = sorted({_code(run) for run in runs})
    others = [_other(study, digest) for digest in study.others]
    return (
        f"{len(study.runs)} mixers, {seeds} each, {min(sizes):,} to {max(sizes):,} parameters, {some['train']['tokens']:,} "
        f"training tokens of length {study.train_length:,}, one recipe and for a seed one order of data. Corpus SHA-256 "
        f"{study.corpus[:16]}.{''.join(others)} Trained on {'; '.join(machines)}; code {', '.join(commits)}. {told}; every run is "
        f"beside this page, with its config."
    )


def _code(run: dict[str, Any]) -> str:
    return run["commit"][:10] if run["commit"] else "of no known commit"  # a copy without its history has none


def _other(study: Study, digest: str) -> str:
    """Who read a text that is not quite the first one's, and what that has."""
    who = [
        f"{run['title']}, seed {run['seed']}," for of in study.runs.values() for run in of if run["corpus"]["sha256"] == digest
    ]
    return f" {' and '.join(who)} read {digest[:16]}: {study.others[digest]}."


def _claims(study: Study, claims: tuple[Claim, ...]) -> str:
    rows, verdicts = [], [study.judge(claim) for claim in claims]
    words = Counter(verdict.word for verdict in verdicts)
    for claim, verdict in zip(claims, verdicts, strict=True):
        points = "" if verdict.difference is None else _points(verdict.difference)
        seeds = "" if verdict.difference is None else str(verdict.difference.n)
        at = ", ".join(f"{m:g}×" for m in claim.multiples)
        rows.append((claim.says, f"{', '.join(claim.tasks)} at {at}", points, seeds, f"**{verdict.word}**"))
    told = f"Of {len(claims)} claims: {', '.join(f'{n} × {word}' for word, n in words.most_common())}."
    note = "A difference counts where 0 lies outside its 95 % interval over paired seeds (Student's t)"
    note += "; ± says half of that here." if any(v.difference and v.difference.deviation is not None for v in verdicts) else "."
    return f"{told} {note}\n\n{_table(('claim', 'measured by', 'difference, points', 'seeds', ''), rows)}"


def _ended(study: Study) -> str:
    head = ("mixer", "seed", "code", "step", "why")
    rows = []
    for run in study.ended:
        where = run["ended"]
        rows.append((run["title"], str(run["seed"]), _code(run), f"{where['step']:,} of {where['steps']:,}", where["why"]))
    return f"The guard ended these runs; no mean and no claim has them.\n\n{_table(head, rows)}"


def _overview(study: Study) -> str:
    near, far = study.lengths[0], study.lengths[-1]
    head = (
        "mixer",
        "seeds",
        "loss",
        *(f"found at {multiple(T, study.train_length)}" for T in study.lengths),
        "tokens/s",
        f"state at {far:,}",
    )
    rows = []
    for mixer, runs in study.runs.items():
        shares = [study.spread(mixer, lambda run, T=T: found(run, study.tasks, [T])) for T in study.lengths]
        loss = study.spread(mixer, lambda run: run["loss"][str(near)])
        speed = study.spread(mixer, lambda run: run["train"]["tokens_per_second"])
        rows.append(
            (
                study.title(mixer),
                str(loss.n),
                _number(loss, 3),
                *map(_share, shares),
                f"{speed.mean:,.0f}",
                size(runs[0]["state_bytes"][str(far)]),
            )
        )
    return (
        f"{_table(head, rows)}\n\n`found` is the mean of all tasks: {', '.join(study.tasks)}; in percent of the values' tokens."
    )


def _task(study: Study, task: str) -> str:
    head = (task, *(multiple(T, study.train_length) for T in study.lengths))
    rows = [(study.title(m), *(_share(study.accuracy(m, task, T)) for T in study.lengths)) for m in study.runs]
    return _table(head, rows)


def _diagnoses(study: Study) -> str:
    """A table a rule: each of its numbers, a mean over layers and seeds."""
    tables = []
    for rule in ("qdelta", "ccq", "carve", "lucid", "polar"):
        rows, names = [], ()
        for mixer, runs in study.runs.items():
            layers = [layer for run in runs for layer in run.get("diagnostics", {}).get(rule, [])]
            if layers:
                names = tuple(layers[0])
                rows.append((study.title(mixer), *(f"{sum(x[n] for x in layers) / len(layers):.4g}" for n in names)))
        if rows:
            tables.append(_table((rule, *(n.replace("_", " ") for n in names)), rows))
    rows = []
    for mixer, runs in study.runs.items():
        norms = [run["diagnostics"]["state_norms"] for run in runs if "state_norms" in run.get("diagnostics", {})]
        if norms:
            mean = lambda T, norms=norms: sum(sum(n[str(T)]) / len(n[str(T)]) for n in norms) / len(norms)
            rows.append((study.title(mixer), *(f"{mean(T):.3g}" for T in study.lengths)))
    if rows:
        tables.append(_table(("norm of the state", *(multiple(T, study.train_length) for T in study.lengths)), rows))
    return "\n\n".join(tables)


def _number(s: Spread, digits: int) -> str:
    return f"{s.mean:.{digits}f}" + ("" if s.deviation is None else f" ± {s.deviation:.{digits}f}")


def _share(s: Spread) -> str:
    return f"{100 * s.mean:.0f}" + ("" if s.deviation is None else f" ± {100 * s.deviation:.0f}")


def _points(s: Spread) -> str:
    return f"{100 * s.mean:+.1f}" + ("" if s.interval is None else f" ± {100 * s.interval:.1f}")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
