"""Time candidates for the launch tables on this GPU and write the fastest into needlework/ops/*/*.plans.json.

    python benchmarks/tune.py --only gated/A [--write]

One constant after another, each over its neighbours, forward + backward of the case, until none gains 1 %: the tables are
what the library launches with, so nothing is tuned when it is used. A candidate that fails to compile, or whose error is over
the budget, is dropped with its reason. Without --write what would change is printed and nothing changes.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES, Case
from judge import judge
from timing import median, passes

from needlework.ops.common import launch

# op -> the launch table that its case is to tune
ENGINES = {
    "gated": "delta/scalar",
    "qdelta": "delta/scalar",
    "kda": "delta/channel",
    "carve-gates-given": "delta/channel",
    "ccq": "ccq/curvature",
}
CHOICES = {
    "num_warps": (1, 2, 4, 8), "NS": (1, 2, 3, 4), "STAGES": (1, 2, 3, 4), "num_stages": (1, 2, 3, 4), "BV": (16, 32, 64, 128),
    "BK": (16, 32, 64, 128), "KB": (16, 32, 64, 128), "VB": (16, 32, 64, 128), "KS": (32, 64, 128), "NT": (1, 2, 4),
    "NP": (132, 264, 528), "BD": (32, 64, 128), "BT": (16, 32, 64), "R": (16, 32, 64, 128),
}  # fmt: skip


def neighbours(constant: str, value: int) -> tuple[int, ...]:
    """The choices beside the present one."""
    if constant not in CHOICES:
        return ()
    choices = sorted({*CHOICES[constant], value})
    at = choices.index(value)
    return tuple(choices[max(at - 1, 0) : at] + choices[at + 1 : at + 2])


def tune(
    case: Case,
    device: torch.device,
    dtype: torch.dtype,
    *,
    timer: Callable[[Callable], float] = median,
    verdict: Callable[..., tuple[float, str]] = judge,
    limit: float = 0.01,
) -> tuple[launch.Plan, dict, float, float]:
    """The row, the constants that beat it, and the milliseconds before and after."""
    engine = ENGINES[case.op]
    x = case.tensors(device, dtype, case.shape["B"], case.shape["T"])
    call = passes(case.ours, x)["fwd+bwd"]
    row = launch.plan(engine, device, dtype, case.shape["K"], case.shape["V"])
    best, before = {}, timer(call)
    now, gained = before, True
    while gained:
        gained = False
        for kernel, constants in row.launch.items():
            for constant, value in () if kernel == "shared" else constants.items():
                for candidate in neighbours(constant, best.get(kernel, {}).get(constant, value)):
                    trial = best | {kernel: best.get(kernel, {}) | {constant: candidate}}
                    with launch.forced(engine, row.name, **trial):
                        try:
                            (worst, name), ms = verdict(case, device, dtype), timer(call)
                        except Exception as e:  # a candidate may not compile or not fit: that is its verdict
                            print(f"  {kernel}.{constant} = {candidate}: {type(e).__name__}: {str(e)[:120]}", flush=True)
                            continue
                    print(f"  {kernel}.{constant} = {candidate}: {ms:.3f} ms, error {worst:.2f} ({name})", flush=True)
                    if worst <= 1 and ms < now * (1 - limit):
                        best, now, gained = trial, ms, True
    return row, best, before, now


def write(row: launch.Plan, best: dict, note: str, folder: Path = Path(launch.__file__).parents[1]) -> None:
    path = folder / f"{row.engine}.plans.json"
    table = json.loads(path.read_text())
    for entry in table:
        if entry["name"] == row.name:
            for kernel, constants in best.items():
                entry["launch"][kernel].update(constants)
            entry["measured"] = note
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(table, indent=2) + "\n")
    partial.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="KEY", help="gated/A, kda/B, …")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    for case in CASES:
        if case.op not in ENGINES or (options.only and case.key not in options.only):
            continue
        row, best, before, after = tune(case, torch.device("cuda"), torch.bfloat16)
        note = f"{case.key} {case.shape}, fwd+bwd {before:.3f} -> {after:.3f} ms on {torch.cuda.get_device_name()}"
        print(f"{row.engine}/{row.name}: {note}: {best}", flush=True)
        if options.write and best:
            write(row, best, note)


if __name__ == "__main__":
    main()
