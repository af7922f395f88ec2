"""The page of a sweep in Markdown, made from its runs alone: the runs, the results, the claims' verdicts, the limits."""

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from needlework.eval.retrieval import chance
from needlework.files import write_whole

from . import sweep_figures as figures
from .claims import Claim
from .effects import Effect, effects_section
from .markdown import decimal, mean, percents, table
from .rows import CSV, rows
from .sweep import Sweep, found
from .sweep_claims import claims_section
from .words import count, listing, multiple, size


def write_page(sweep: Sweep, directory: Path, claims: tuple[Claim, ...], limits: str, effects: tuple[Effect, ...] = ()) -> Path:
    """README.md and its pictures in `directory`; equal runs give equal bytes. limits: the author's text on what the
    results do not show. effects: what was looked for after the runs."""
    tasks, shown = sweep.tasks, (sweep.lengths[0], sweep.lengths[len(sweep.lengths) // 2 - 1], sweep.lengths[-1])
    figures.at_a_glance(sweep, directory / "glance.png", tasks)
    figures.retrieval_by_length(sweep, directory / "retrieval.png", tasks)
    figures.retrieval_by_state(sweep, directory / "state.png", tasks, tuple(dict.fromkeys(shown)))
    sections = [
        _summary(sweep),
        "![Retrieval at a glance](glance.png)",
        _BANDS,
        "![Retrieval by length](retrieval.png)",
        "![Retrieval against state bytes](state.png)",
    ]
    sections += ["## Which claims hold", claims_section(sweep, claims)]
    if shows := effects_section(sweep, effects):
        sections += ["## What else the runs show", shows]
    if sweep.void:
        sections += ["## What is void", _void(sweep)]
    if sweep.ended:
        sections += ["## What ended early", _ended(sweep)]
    sections += ["## Every mixer", _overview(sweep)]
    if all("positions" in run for runs in sweep.runs.values() for run in runs):
        figures.loss_by_position(sweep, directory / "positions.png")
        sections += ["## Loss by position", _POSITIONS, "![Loss by position](positions.png)"]
    runs = (run for of in sweep.runs.values() for run in of)
    write_whole(directory / CSV, rows(runs, tasks, sweep.lengths, sweep.train_length))
    sections += [
        "## Every task, by length",
        *([_described(sweep)] if any(task in _TASKS for task in sweep.tasks) else []),
        f"[{CSV}]({CSV}) has the same scores with a row for each mixer, seed, task and length.",
        *(_task(sweep, task) for task in tasks),
    ]
    if diagnoses := _diagnoses(sweep):
        sections += ["## Inside the models", _INSIDE, diagnoses]
    sections += ["## What this cannot say", limits]
    path = directory / "README.md"
    parameters = [run["parameters"] for runs in sweep.runs.values() for run in runs]
    title = f"# The comparison at {count(statistics.median(parameters))} parameters"
    write_whole(path, "\n\n".join([title, *sections]) + "\n")
    return path


_BANDS = (
    "Lines are means over seeds. Bands reach from the least of a mixer's runs to the most. Where the tables list a mixer's runs one by one, "
    "each run has its line. Bars against state bytes are ± a standard deviation. Grey lines are the rest of the mixers."
)
_POSITIONS = (
    "Nats per token of long held-out documents, minus the median run's at that position: down is better. Positions right of the "
    "training length are beyond what any model was trained on."
)

# task -> what its rows have, what their end asks for
_TASKS = {
    "needle": ("one needle in text: `#@xy=7391`, a key of two letters and a value of four digits", "its value"),
    "needles-2": ("two such needles", "both values, in shuffled order"),
    "needles": ("four such needles", "all four values, in shuffled order"),
    "needles-8": ("eight such needles", "all eight values, in shuffled order"),
    "passkey": ("one sentence with a number of seven digits, in noise that repeats", "the number"),
    "number": ("one sentence with a number of seven digits, in text", "the number"),
    "uuid": ("one sentence with a uuid, in text", "the uuid"),
    "multikey": ("four sentences with a number each, in text", "one of the numbers"),
    "induction": ("a cue and five digits, then text, then the cue again", "the digits"),
}
_INSIDE = (
    "Diagnostics of the papers, means over layers and seeds. **qdelta**: beta a is β k·(k + λq); a step contracts where it lies between 0 "
    "and 2, and unstable is the share of tokens where it does not; cosine compares what the state returns for q and for k; drift is the "
    "norm of Theorem 3.2's residual. **ccq**: the share of a key's energy in the 16 directions that most keys share, for needles and for "
    "other tokens. **carve**: content is the share of the feedback in what moves the erase gate; staleness is what its delay by a chunk "
    "changes in the output. **lucid**: the condition number of P, and the share of P below its diagonal. **polar**: n eff is the effective "
    "number of keys attended to, null mass the weight of the null sink."
)


def _summary(sweep: Sweep) -> str:
    runs = [run for of in sweep.runs.values() for run in of]
    counts = [len(of) for of in sweep.runs.values()]
    seeds = f"{_from_to(counts)} seed{'s' if max(counts) > 1 else ''}"
    spread = _SPREAD if max(counts) > 1 else "No number has a spread."
    machines = sorted({f"{run['machine']}, torch {run['versions']['torch']}" for run in runs})
    commits = sorted({_code(run) for run in runs})
    others = [_other(sweep, digest) for digest in sweep.others]
    void = f" **Void: {listing([of[0]['title'] for of in sweep.void.values()])}**, [why](#what-is-void)." if sweep.void else ""
    return (
        f"{len(sweep.runs)} mixer{'s' if len(sweep.runs) > 1 else ''}, {seeds} each, {_from_to(run['parameters'] for run in runs)} "
        f"parameters, {_from_to(run['train']['tokens'] for run in runs)} training tokens of length {sweep.train_length:,}, "
        f"{_recipe(runs)} and for a seed one order of data.{void}\n\n{spread}\n\nEvery run is beside this page, with its config. "
        f"Corpus SHA-256 {sweep.corpus[:16]}.{''.join(others)} Trained on {'; '.join(machines)}; code {', '.join(commits)}."
    )


_SPREAD = (
    "Every number is a mean over seeds ± their standard deviation. Some mixers learn a task with some seeds only. Where a "
    "mixer's runs differ by more than half of the distance from a guess to the ceiling, the table lists them one by one, by seed, with / "
    "between them."
)


def _from_to(numbers: Iterable[int]) -> str:
    """'7', or '3 to 7'."""
    ends = sorted(set(numbers))
    return f"{ends[0]:,}" if len(ends) == 1 else f"{ends[0]:,} to {ends[-1]:,}"


def _recipe(runs: list[dict[str, Any]]) -> str:
    """Whether the runs' configs are one but for the mixer and the seed, and if not, in what they differ."""
    configs = [
        _flat({key: run.get("config", {}).get(key) for key in ("phases", "train", "objective", "start")}) for run in runs
    ]
    names = sorted({name for config in configs for name in config} - {"train.seed"})
    different = [n for n in names if len({json.dumps(config.get(n)) for config in configs}) > 1]
    return f"recipes that differ in {listing(different)}" if different else "one recipe"


def _flat(value: Any, at: str = "") -> dict[str, Any]:
    """{"train.optim.lr": 0.001, …} of nested dicts."""
    if not isinstance(value, dict):
        return {at: value}
    return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{at}.{key}" if at else key).items()}


def _code(run: dict[str, Any]) -> str:
    return run["commit"][:10] if run["commit"] else "of no known commit"  # a copy without its history has none


def _other(sweep: Sweep, digest: str) -> str:
    """Which runs read a text that differs slightly from the first run's, and in what."""
    who = [
        f"{run['title']}, seed {run['seed']}," for of in sweep.runs.values() for run in of if run["corpus"]["sha256"] == digest
    ]
    return f" {' and '.join(who)} read {digest[:16]}: {sweep.others[digest]}."


def _void(sweep: Sweep) -> str:
    rows = []
    for mixer, runs in sweep.void.items():
        seeds = ", ".join(str(seed) for seed in sorted(run["seed"] for run in runs))
        rows.append((runs[0]["title"], seeds, ", ".join(sorted({_code(run) for run in runs})), sweep.reasons[mixer]))
    head = ("mixer", "seeds", "code", "why")
    return f"No table, picture or claim has these runs until they are run again.\n\n{table(head, rows)}"


def _ended(sweep: Sweep) -> str:
    head = ("mixer", "seed", "code", "step", "why")
    rows = []
    for run in sweep.ended:
        where = run["ended"]
        rows.append((run["title"], str(run["seed"]), _code(run), f"{where['step']:,} of {where['steps']:,}", where["why"]))
    return f"The guard ended these runs; no mean and no claim has them.\n\n{table(head, rows)}"


def _overview(sweep: Sweep) -> str:
    near, far = sweep.lengths[0], sweep.lengths[-1]
    head = (
        "mixer",
        "seeds",
        "loss",
        *(f"found at {multiple(T, sweep.train_length)}" for T in sweep.lengths),
        "tokens/s",
        f"state at {far:,}",
    )
    rows, guess = [], statistics.fmean(chance(task) for task in sweep.tasks)
    for mixer, runs in sweep.runs.items():
        shares = [sweep.spread(mixer, lambda run, T=T: found(run, sweep.tasks, [T])) for T in sweep.lengths]
        loss = sweep.spread(mixer, lambda run: run["loss"][str(near)])
        speed = sweep.spread(mixer, lambda run: run["train"]["tokens_per_second"])
        rows.append(
            (
                sweep.title(mixer),
                str(loss.n),
                decimal(loss, 3),
                *(percents(share, guess) for share in shares),
                f"{speed.mean:,.0f}",
                size(runs[0]["state_bytes"][str(far)]),
            )
        )
    return (
        f"`found` is the share of the values' tokens that the model names, in percent, a mean over all tasks. A guess finds "
        f"{100 * guess:.0f} %; a model that answers with tokens that are no digits finds less. `loss` is in nats a token of held-out text at "
        f"the training length.\n\n{table(head, rows)}"
    )


def _described(sweep: Sweep) -> str:
    """What each task asks for."""
    return table(("task", "the row has", "asked for at its end"), [(t, *_TASKS[t]) for t in sweep.tasks if t in _TASKS])


def _task(sweep: Sweep, task: str) -> str:
    head = (task, *(multiple(T, sweep.train_length) for T in sweep.lengths))
    rows = [(sweep.title(m), *(percents(sweep.accuracy(m, task, T), chance(task)) for T in sweep.lengths)) for m in sweep.runs]
    return table(head, rows)


def _diagnoses(sweep: Sweep) -> str:
    """A table a rule: each of its numbers, a mean over layers and seeds."""
    tables = []
    for rule in ("qdelta", "ccq", "carve", "lucid", "polar"):
        rows, names = [], ()
        for mixer, runs in sweep.runs.items():
            layers = [layer for run in runs for layer in run.get("diagnostics", {}).get(rule, [])]
            if layers:
                names = tuple(layers[0])
                rows.append((sweep.title(mixer), *(mean(x[n] for x in layers) for n in names)))
        if rows:
            tables.append(table((rule, *(n.replace("_", " ") for n in names)), rows))
    rows = []
    for mixer, runs in sweep.runs.items():
        norms = [run["diagnostics"]["state_norms"] for run in runs if "state_norms" in run.get("diagnostics", {})]
        if norms:
            rows.append((sweep.title(mixer), *(mean((x for n in norms for x in n[str(T)]), 3) for T in sweep.lengths)))
    if rows:
        tables.append(table(("norm of the state", *(multiple(T, sweep.train_length) for T in sweep.lengths)), rows))
    return "\n\n".join(tables)
