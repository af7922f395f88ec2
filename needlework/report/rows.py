"""results.csv: every score as a row, to plot it in another way. One a mixer, seed, task and length."""

import csv
import io
from collections.abc import Iterable, Mapping
from typing import Any

CSV = "results.csv"
COLUMNS = (
    "mixer", "seed", "task", "length", "multiple", "accuracy", "exact", "digits", "values", "loss", "parameters",
    "state_bytes", "train_tokens", "commit",
)  # fmt: skip


def rows(entries: Iterable[Mapping[str, Any]], tasks: Iterable[str], lengths: Iterable[int], train_length: int) -> str:
    """The CSV of runs as they are in result.json. `loss` is that of plain text of the row's length; shares and losses have
    six digits, and a field that a run does not have is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    tasks, lengths = tuple(tasks), tuple(lengths)
    for entry in entries:
        for task in tasks:
            for T in lengths:
                score = {name: entry[task][str(T)].get(name) for name in ("accuracy", "exact", "digits", "values")}
                score |= {name: f"{score[name]:.6g}" for name in ("accuracy", "exact") if score[name] is not None}
                writer.writerow(
                    {
                        "mixer": entry["name"], "seed": entry.get("seed"), "task": task, "length": T,
                        "multiple": f"{T / train_length:g}", "loss": f"{entry['loss'][str(T)]:.6g}", "parameters": entry["parameters"],
                        "state_bytes": entry["state_bytes"][str(T)], "train_tokens": entry["train"]["tokens"],
                        "commit": (entry.get("commit") or "")[:10],
                    }
                    | score
                )  # fmt: skip
    return out.getvalue()
