"""docs/performance.md's tables of kernels, drawn calls, held-out shapes, training and serving, made from the *.json of
benchmarks/results/, its grids/, held_out/, training/ and serving/: `python benchmarks/table.py`. The picture of the drawn calls is made
with them."""

import statistics
from pathlib import Path

import distribution
import results
from cells import bar_text, number

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
HELD_OUT = results.ROOT / "held_out"
TRAINING = results.ROOT / "training"
SERVING = results.ROOT / "serving"
SHARES = ("step", "share")
ORDER = ("gated", "qdelta", "kda", "carve-gates-given", "carve", "ccq", "ccq+gated", "mamba2", "mamba3",
         "lucid", "lucid/clustered", "lucid/attention", "polar", "polar/cudnn", "polar/decode", "path", "path/lucid",
         "paged/softmax", "paged/differential")  # fmt: skip
SIZES = ("60m", "125m", "1.3b")
# bars of training that a row does not hold, because they are of other rows: which part of the tokens/s at the shorter rows the longer ones keep
SHORTER, LONGER = 2048, 65_536
FIXED = (
    "gla",
    "gated-deltanet",
    "kda",
    "qdelta",
    "qdelta-transposed",
    "carve-blind",
    "ccq-gla",
    "ccq-gated-deltanet",
    "ccq-qdelta",
)
KEPT = dict.fromkeys(FIXED, 0.9) | {"carve": 0.7}
# bars of serving that a row does not hold, because they are of other rows or of what the row holds itself
LONG = 16_384, 0.7  # tokens of context, of what a step's bytes allow
HTTP = 0.9  # of the step alone
FIRST = 512, 8.0, 2.2  # up to so many tokens ms, beyond them floors
BEFORE = {"qdelta-340m": 25, "atma-polar-memory": 29, "transformer-500m": 8, "lucid-1b-64": 7, "carve-125m": 17}
FASTER = 5  # `generate` than BEFORE, tokens a second of one user before it ran on slots and pages


def verdict(row: dict) -> str:
    """The bar and whether it is met: a share must be reached, all else is a bound."""
    if row["bar"] is None or row["ratio"] is None:
        return ""
    return bar_text(row["bar"], row["ratio"] >= row["bar"] if row["pass"] in SHARES else row["ratio"] <= row["bar"])


def by_sequence(rows: list[dict]) -> list[str]:
    lines = [
        "| op | B, T, H, K, V | pass | ms | peer, ms | ratio | bar | ratio in a graph | MiB | peer, MiB | floor, ms | error ÷ budget | commit |",
        "|" + " --- |" * 13,
    ]
    for r in rows:
        shape = ", ".join(f"{size:,}" for size in r["shape"].values())
        graphs = r["graph_ms"] / r["peer_graph_ms"] if r.get("peer_graph_ms") else None
        figures = (number(r["ms"], 3), number(r["peer_ms"], 3), number(r["ratio"], 2 if (r["ratio"] or 1) >= 0.1 else 3), verdict(r), number(graphs, 2), number(r["peak_mib"], 0),
                   number(r["peer_peak_mib"], 0), number(r["floor_ms"], 3), number(r["error_over_budget"], 2), r["commit"])  # fmt: skip
        lines.append(f"| {r['op']} | {shape} | {r['pass']} | {' | '.join(figures)} |")
    return lines


def by_token(rows: list[dict]) -> list[str]:
    lines = [
        "| one token, in place | B, H, K, V, state | µs | of the copy bandwidth | bar | error ÷ budget | commit |",
        "|" + " --- |" * 7,
    ]
    for r in rows:
        shape = ", ".join(str(r["shape"][axis]) for axis in "BHKV")
        share = f"{100 * r['ratio']:.0f} %"
        error = number(r["error_over_budget"], 2)
        figures = f"{1e3 * r['ms']:.0f}", share, verdict(r), error, r["commit"]
        lines.append(f"| {r['op']} | {shape}, {r['dtype']} | {' | '.join(figures)} |")
    return lines


def by_share(rows: list[dict]) -> list[str]:
    lines = ["| op | B, T, H, K, V | ms | of the run's | share | bar | error ÷ budget | commit |", "|" + " --- |" * 8]
    for r in rows:
        shape = ", ".join(f"{size:,}" for size in r["shape"].values())
        share, error = f"{100 * r['ratio']:.0f} %", number(r["error_over_budget"], 2)
        figures = number(r["ms"], 3), r["peer"], share, verdict(r), error, r["commit"]
        lines.append(f"| {r['op']} | {shape} | {' | '.join(figures)} |")
    return lines


def first_calls(rows: list[dict]) -> list[str]:
    listed = ", ".join(
        f"{r['op']} {r['ms'] / 1e3:.1f} s{'' if r['ms'] <= r['bar'] else ' (NOT met)'} at {r['commit']}" for r in rows
    )
    return [f"First forward and backward with an empty Triton cache, bar {rows[0]['bar'] / 1e3:.0f} s: {listed}."]


def heading(rows: list[dict], what: str = "bfloat16, medians") -> str:
    distinct = lambda name: ", ".join(sorted({r[name] for r in rows}))
    return (
        f"{distinct('device')}, torch {distinct('torch')}, Triton {distinct('triton')}, {what}; "
        "each row names the commit that was measured."
    )


def held_out(rows: list[dict]) -> list[str]:
    """Of each rule how far the picked launch configs are from the best that were found."""
    lines = [
        heading(rows, "bfloat16 and float16, medians"),
        "",
        "| rule | shapes | median | worst | bar | commit |",
        "|" + " --- |" * 6,
    ]
    for rule in dict.fromkeys(r["op"] for r in rows):
        own = [r for r in rows if r["op"] == rule]
        ratios = [r["ratio"] for r in own]
        middle, worst = number(statistics.median(ratios), 2), number(max(ratios), 2)
        commits = ", ".join(sorted({r["commit"] for r in own}))
        bar = own[0]["bar"]
        lines.append(f"| {rule} | {len(own)} | {middle} | {worst} | {bar_text(bar, max(ratios) <= bar)} | {commits} |")
    return lines


def training(rows: list[dict]) -> list[str]:
    """Whole training steps of one device, by size and mixer, the shortest rows first."""
    heads = f"| mixer | parameters | B, T | ms | tokens/s | MFU | bar | of {SHORTER:,}'s tokens/s | bar | MiB | commit |"
    lines = [heading(rows), "", heads, "|" + " --- |" * 11]
    speeds = {run_of(r): r["tokens_per_second"] for r in rows if r["shape"]["T"] == SHORTER}
    for r in sorted(rows, key=lambda r: (SIZES.index(r["size"]), r["op"], r["impl"], r["shape"]["T"])):
        name = r["op"] if r["impl"] == "needlework" else f"{r['op']} ({r['impl']}'s layer)"
        bar = "" if r["bar"] is None else bar_text(r["bar"], r["mfu"] >= r["bar"])
        kept = r["tokens_per_second"] / speeds[run_of(r)] if r["shape"]["T"] == LONGER and run_of(r) in speeds else None
        wanted = KEPT.get(r["op"]) if kept is not None and r["impl"] == "needlework" else None
        long = "" if wanted is None else bar_text(wanted, kept >= wanted)
        figures = (f"{r['parameters'] / 1e6:,.0f}M", f"{r['shape']['B']}, {r['shape']['T']:,}", number(r["ms"], 0), number(r["tokens_per_second"], 0),
                   f"{r['mfu']:.1%}", bar, "" if kept is None else f"{kept:.0%}", long, number(r["peak_mib"], 0), r["commit"])  # fmt: skip
        lines.append(f"| {name} | {' | '.join(figures)} |")
    return lines


def run_of(row: dict) -> tuple[str, str, str]:
    """What rows of several lengths share."""
    return row["op"], row["impl"], row["size"]


def serving(rows: list[dict]) -> list[str]:
    """Decoding steps of one device by model and rows, then requests from outside: streams, first tokens, `generate`."""
    steps = [r for r in rows if r["pass"] == "step"]
    lines = [
        heading(rows),
        "",
        "| model | B | context | ms a step | tokens/s | bar | of what its bytes allow | commit |",
        "|" + " --- |" * 8,
    ]
    for r in steps:
        bar = "" if r["bar"] is None else bar_text(f"{r['bar']:,}", r["tokens_per_second"] >= r["bar"])
        if r["shape"]["T"] == LONG[0]:
            bar = bar_text(f"{100 * LONG[1]:.0f} %", r["share"] >= LONG[1])
        figures = number(r["ms"], 2), number(r["tokens_per_second"], 0), bar, f"{100 * r['share']:.0f} %", r["commit"]
        lines.append(f"| {r['op']} | {r['shape']['B']} | {r['shape']['T']:,} | {' | '.join(figures)} |")
    lines += [
        "",
        "| model | B | context | what | tokens/s | of the step alone, where both are of one commit | bar | commit |",
        "|" + " --- |" * 8,
    ]
    alone = {(r["commit"], r["op"], *r["shape"].values()): r["tokens_per_second"] for r in steps}
    for r in (r for r in rows if r["pass"] in ("engine", "http", "generate")):
        step = alone.get((r["commit"], r["op"], *r["shape"].values()))
        share = "" if step is None else f"{100 * r['tokens_per_second'] / step:.1f} %"
        bar = ""
        if r["pass"] == "http" and step is not None:
            bar = bar_text(f"{100 * HTTP:.0f} %", r["tokens_per_second"] >= HTTP * step)
        elif r["pass"] == "generate" and r["op"] in BEFORE:
            bar = bar_text(FASTER * BEFORE[r["op"]], r["tokens_per_second"] >= FASTER * BEFORE[r["op"]])
        figures = r["pass"], number(r["tokens_per_second"], 0), share, bar, r["commit"]
        lines.append(f"| {r['op']} | {r['shape']['B']} | {r['shape']['T']:,} | {' | '.join(figures)} |")
    lines += ["", "| model | prompt | ms to the first token | floor, ms | times the floor | bar | commit |", "|" + " --- |" * 7]
    for r in (r for r in rows if r["pass"] == "first"):
        short, ms, floors = FIRST
        times = r["ms"] / r["floor_ms"]
        bar = bar_text(f"{ms:g} ms", r["ms"] <= ms) if r["shape"]["T"] <= short else bar_text(f"{floors} ×", times <= floors)
        figures = number(r["ms"], 1), number(r["floor_ms"], 1), number(times, 1), bar, r["commit"]
        lines.append(f"| {r['op']} | {r['shape']['T']:,} | {' | '.join(figures)} |")
    return lines


def section(rows: list[dict]) -> list[str]:
    """All that one device's file of kernels says."""
    place = lambda r: (ORDER.index(r["op"]) if r["op"] in ORDER else len(ORDER), r["shape"]["B"] * -r["shape"]["K"])
    rows = sorted(rows, key=place)
    lines = [heading(rows)]
    parts = (by_sequence, ("fwd", "fwd+bwd")), (by_token, ("step",)), (by_share, ("share",)), (first_calls, ("cold",))
    for part, passes in parts:
        if chosen := [r for r in rows if r["pass"] in passes]:
            lines += ["", *part(chosen)]
    return lines


# the name of the comments around a table, the folder of its files, and the function that makes its lines
TABLES = (
    ("performance", results.ROOT, section),
    ("grid", distribution.ROOT, distribution.page),
    ("held-out", HELD_OUT, held_out),
    ("training", TRAINING, training),
    ("serving", SERVING, serving),
)


def main() -> None:
    text = PAGE.read_text()
    for name, root, made in TABLES:
        files = [results.read(path) for path in sorted(root.glob("*.json"))]
        lines = "\n\n".join("\n".join(made(rows)) for rows in files if rows) or "Nothing has been measured yet."
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, rest = text.split(start)
        text = f"{before}{start}\n{lines}\n{end}{rest.split(end)[1]}"
    PAGE.write_text(text)
    for path in distribution.ROOT.glob("*.json"):
        distribution.picture(results.read(path), PAGE.parent)


if __name__ == "__main__":
    main()
