"""How the ratios of drawn calls (`grid.py`) are distributed: the tables, the ten worst by name, and the picture. Reads rows of results
alone."""

import math
from collections import Counter
from pathlib import Path
from statistics import median

import results
from cells import bar_text, number
from draw import RULES, TUNING, drawn

ROOT = results.ROOT / "grids"
FIGURES = ("ms", "graph_ms", "peak_mib", "peer", "peer_ms", "peer_graph_ms", "peer_why")
BARS = {"median": 0.6, "90 %": 0.8, "worst": 1.0}
WORST = 10
PASSES = ("fwd", "fwd+bwd")
# how a call is timed: its own and the peer's milliseconds
WAYS = {"by launches": ("ms", "peer_ms"), "in a graph": ("graph_ms", "peer_graph_ms")}


def name_of(row: dict) -> str:
    return f"{row['op']}/{row['seed']}-{row['index']}"


def ratio(row: dict, way: str) -> float | None:
    """Our time divided by the peer's; None where one was not taken."""
    ours, peer = (row.get(figure) for figure in WAYS[way])
    return ours / peer if ours and peer else None


def ninth(ratios: list[float]) -> float:
    """The least that nine of ten do not pass."""
    return sorted(ratios)[math.ceil(0.9 * len(ratios)) - 1]


def summary(ratios: list[float]) -> dict[str, float]:
    return dict(zip(BARS, (median(ratios), ninth(ratios), max(ratios)), strict=True))


def found(rows: list[dict], way: str) -> list[float]:
    return [x for x in (ratio(row, way) for row in rows) if x is not None]


def by_rule(rows: list[dict]) -> list[str]:
    """A line for each rule and pass, and for all of them, with the bars."""
    heads = [f"{way}: {head}" for way in WAYS for head in BARS]
    lines = [f"| rule | pass | calls | beside a peer | {' | '.join(heads)} | commit |", "|" + " --- |" * (5 + len(heads))]
    rules = [rule.name for rule in RULES if any(row["op"] == rule.name for row in rows)]
    for rule in (*rules, "all"):
        for name in PASSES:
            own = [row for row in rows if row["pass"] == name and rule in (row["op"], "all")]
            cells = [cell for way in WAYS for cell in _cells(found(own, way), rule == "all")]
            beside = len(found(own, "by launches"))
            calls = sum(row["ms"] is not None for row in own)
            lines.append(f"| {rule} | {name} | {calls} | {beside} | {' | '.join(cells)} | {distinct(own, 'commit')} |")
    return lines


def distinct(rows: list[dict], name: str) -> str:
    return ", ".join(sorted({str(row[name]) for row in rows}))


def _cells(ratios: list[float], bars: bool) -> list[str]:
    if not ratios:
        return [""] * len(BARS)
    figures = summary(ratios)
    text = {head: number(x, 2) for head, x in figures.items()}
    return [f"{text[head]}, {bar_text(bar, figures[head] <= bar)}" if bars else text[head] for head, bar in BARS.items()]


def worst(rows: list[dict]) -> list[str]:
    lines = [
        f"The {WORST} worst, by launches:",
        "",
        "| call | B, T, H, HV, K, V | documents | from a state | dtype | pass | ms | peer, ms | ratio | in a graph | commit |",
        "|" + " --- |" * 11,
    ]
    compared = [row for row in rows if ratio(row, "by launches") is not None]
    for row in sorted(compared, key=lambda row: -(ratio(row, "by launches") or 0))[:WORST]:
        shape = row["shape"]
        sizes = ", ".join(f"{shape[axis]:,}" for axis in ("B", "T", "H", "HV", "K", "V"))
        facts = (shape["documents"] or "", "yes" if shape["state"] else "", row["dtype"], row["pass"])
        times = (number(row["ms"], 3), number(row["peer_ms"], 3), *(number(ratio(row, way), 2) for way in WAYS))
        lines.append(f"| {name_of(row)} | {sizes} | {' | '.join(map(str, (*facts, *times, row['commit'])))} |")
    return lines


def missing(rows: list[dict]) -> list[str]:
    """What has no time, by name, and which peers did not run."""
    lines = [
        f"- {name}: {' '.join(reason.split())}"
        for name, reason in {name_of(row): row["why"] for row in rows if row["why"]}.items()
    ]
    refused = Counter((row["op"], row["peer_why"]) for row in rows if row["peer_why"] and row["pass"] == PASSES[0])
    lines += [f"- {op}: its peer did not run for {count} calls: {reason}" for (op, reason), count in sorted(refused.items())]
    return ["", "Not timed, or not wholly:", "", *lines] if lines else []


def heading(rows: list[dict]) -> str:
    """The device, and how much of the draw there is."""
    calls, wrong = (
        {name_of(row) for row in chosen} for chosen in (rows, [row for row in rows if (row["error_over_budget"] or 0) > 1])
    )
    draws = {(row["seed"], row["calls"]) for row in rows}
    whole, out = (sum(map(len, some)) for some in zip(*(drawn(seed, count=count) for seed, count in draws), strict=True))
    return (
        f"{distinct(rows, 'device')}, torch {distinct(rows, 'torch')}, Triton {distinct(rows, 'triton')}: {len(calls)} of the {whole} "
        f"calls of seed {distinct(rows, 'seed')}, {len(wrong)} over the error budget. {out} calls that do not fit were drawn and replaced. "
        "Packed documents, and CARVE from a state, are timed by launches alone." + _of_other_runs(rows)
    )


def _of_other_runs(rows: list[dict]) -> str:
    calls = {name_of(row) for row in rows if row.get("peer_commit") and row["peer_ms"] is not None}
    return f" The peers' figures of {len(calls)} calls are of an earlier run, ours of a later one." if calls else ""


def section(rows: list[dict]) -> list[str]:
    """The report of some rows."""
    return [heading(rows), "", *by_rule(rows), "", *worst(rows), *missing(rows)] if rows else []


def reported(rows: list[dict]) -> list[dict]:
    """Without the calls that launch configs were chosen on."""
    return [row for row in rows if row["seed"] not in TUNING]


def page(rows: list[dict]) -> list[str]:
    """What docs/performance.md has of one device's file."""
    rows = reported(rows)
    if not rows:
        return []
    text = "Our time divided by the peer's, by rule; the line is the median, the triangle what nine of ten calls do not pass"
    image = [f"![{text}]({_file(rows)})", ""] if found(rows, "by launches") else []
    return [*image, *section(rows)]


def _file(rows: list[dict]) -> str:
    return f"figures/grid-{rows[0]['device'].replace(' ', '-').lower()}.svg"


def picture(rows: list[dict], docs: Path) -> None:
    """Every ratio by launches as a dot, a line of dots for each rule and pass."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = reported(rows)
    lines = [(rule.name, name) for rule in RULES for name in PASSES]
    ratios = {line: found([row for row in rows if (row["op"], row["pass"]) == line], "by launches") for line in lines}
    ratios = {line: own for line, own in ratios.items() if own}
    if not ratios:
        return
    settings = {"svg.fonttype": "none", "svg.hashsalt": "needlework", "font.size": 9}
    with plt.rc_context(settings | {"axes.spines.top": False, "axes.spines.right": False}):
        figure, axis = plt.subplots(figsize=(8, 0.8 + 0.24 * len(ratios)))
        for at, ((_, name), own) in enumerate(ratios.items()):
            axis.plot(own, [at] * len(own), "o", markersize=3, alpha=0.5, color="#0072b2" if name == "fwd" else "#d55e00")
            axis.plot(summary(own)["median"], at, "|k", markersize=11)
            axis.plot(summary(own)["90 %"], at, "<k", markersize=4)
        axis.axvline(1, color="#777777", linewidth=1)
        axis.set(yticks=range(len(ratios)), yticklabels=[" ".join(line) for line in ratios], xscale="log", xlabel="ours ÷ peer")
        axis.invert_yaxis()
        figure.tight_layout()
        figure.savefig(docs / _file(rows), metadata={"Date": None})
        plt.close(figure)
