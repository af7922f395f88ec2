"""A pack: the results of many runs in one compressed file, a line of JSON each, small enough to be kept in a repository.

A run's entry is its result without what takes room and says little: samples are left out, losses are means over stretches of steps.
A sweep that is given a pack does not run again what is in it.
"""

import json
import lzma
from pathlib import Path
from statistics import fmean
from typing import Any

from needlework.files import write_bytes
from needlework.json_file import read_lines

MOST = 64  # numbers of a curve


def read_pack(path: Path) -> dict[str, dict[str, Any]]:
    """<name>-<seed> -> entry; nothing where there is no file. ValueError names a file that is torn, or has a run twice."""
    entries = read_lines(path) if path.exists() else []
    found = {f"{entry['name']}-{entry['seed']}": entry for entry in entries}
    if len(found) < len(entries):
        raise ValueError(f"{path}: {len(entries)} lines are of {len(found)} runs")
    return found


def write_pack(path: Path, entries: dict[str, dict[str, Any]]) -> None:
    """Writes the entries, whole or not at all, in the order of their names; equal entries give equal bytes."""
    lines = (json.dumps(slim(entries[name]), sort_keys=True) + "\n" for name in sorted(entries))
    write_bytes(path, lzma.compress("".join(lines).encode(), preset=9))


def slim(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry with curves of at most MOST numbers and without samples; of a fork, its branches likewise. What is slim stays as it is."""
    found = {name: value for name, value in entry.items() if name != "samples"}
    if "branches" in found:
        found["branches"] = {name: slim(branch) for name, branch in found["branches"].items()}
    if "train" in found:
        loss = found["train"]["loss"]
        steps = found["train"].get("steps") or list(range(1, len(loss) + 1))
        width = max(1, -(-len(loss) // MOST))
        cuts = range(0, len(loss), width)
        found["train"] = found["train"] | {
            "loss": [float(f"{fmean(loss[i : i + width]):.5g}") for i in cuts],
            "steps": [steps[i : i + width][-1] for i in cuts],
        }
    return found
