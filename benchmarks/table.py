"""The README's performance table, made from benchmarks/results/*.json: `python benchmarks/table.py`."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
START, END = "<!-- performance -->", "<!-- /performance -->"


def table(rows: list[dict]) -> list[str]:
    lines = [
        "| op | B, T, H, K, V | pass | ms | peer, ms | ratio | bar | MiB, peer's | floor, ms | error ÷ budget |",
        "|" + " --- |" * 10,
    ]
    for r in rows:
        if r["pass"] == "cold":
            continue
        shape = ", ".join(f"{size:,}" for size in r["shape"].values())
        number = lambda x, digits=2: "" if x is None else f"{x:.{digits}f}"
        met = "" if r["bar"] is None or r["ratio"] is None else f"{r['bar']} {'met' if r['ratio'] <= r['bar'] else 'NOT met'}"
        lines.append(
            f"| {r['op']} | {shape} | {r['pass']} | {r['ms']:.3f} | {number(r['peer_ms'], 3)} | {number(r['ratio'])} | {met} | "
            f"{r['peak_mib']:.0f}, {number(r['peer_peak_mib'], 0)} | {number(r['floor_ms'], 3)} | {r['error_over_budget']:.2f} |"
        )
    cold = [r["ms"] / 1e3 for r in rows if r["pass"] == "cold"]
    if cold:
        lines += ["", f"First forward and backward with an empty Triton cache: {min(cold):.1f} to {max(cold):.1f} s."]
    return lines


def main() -> None:
    lines = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        rows = json.loads(path.read_text())
        first = rows[0]
        about = (
            f"{first['device']}, torch {first['torch']}, Triton {first['triton']}, bfloat16, medians, commit {first['commit']}."
        )
        lines += [about, "", *table(rows), ""]
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(START)
    _, after = rest.split(END)
    readme.write_text(f"{before}{START}\n" + "\n".join(lines).rstrip() + f"\n{END}{after}")


if __name__ == "__main__":
    main()
