"""Learning rate, gradient norm and memory of a training's log, in as few numbers as a figure needs."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("lr", "grad_norm", "memory")
MOST = 64


def curves(path: Path) -> dict[str, list[float]] | None:
    """{"steps", "lr", "grad_norm", "memory"} of a log.jsonl, at most 64 of each; None if no line has all of them.

    Each entry is a stretch of logged steps: its last step, learning rate and peak memory, and the mean of its gradient norms, of
    three digits. A step without one of them (a gradient that was not finite) is left out.
    """
    logged = list(_logged(path)) if path.exists() else []
    if not logged:
        return None
    width = -(-len(logged) // MOST)
    stretches = [logged[i : i + width] for i in range(0, len(logged), width)]
    return {
        "steps": [stretch[-1]["step"] for stretch in stretches],
        "lr": [_rounded(stretch[-1]["lr"]) for stretch in stretches],
        "grad_norm": [_rounded(sum(line["grad_norm"] for line in stretch) / len(stretch)) for stretch in stretches],
        "memory": [stretch[-1]["memory"] for stretch in stretches],
    }


def _logged(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if all(isinstance(line.get(name), int | float) and math.isfinite(line[name]) for name in NAMES):
            yield line


def _rounded(number: float) -> float:
    return float(f"{number:.3g}")
