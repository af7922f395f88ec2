"""Time candidates for the launch tables on this GPU and write the fastest into needlework/ops/*/*.plans.json.

    python benchmarks/tune.py --only gated [--write]

One constant after another, each over its neighbours, forward + backward of the case, until none gains 1 %: the tables are
what the library launches with, so nothing is tuned when it is used. A candidate that fails to compile, or whose error is over
the budget, is dropped with its reason. Without --write the table is printed and nothing changes.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES, Case
from run import error, ours, stored, tensors
from timing import median, passes

from needlework.ops.common import launch

ENGINES = {"gated": "delta/scalar", "qdelta": "delta/scalar", "kda": "delta/channel", "ccq": "ccq/curvature"}
CHOICES = {
    "num_warps": (1, 2, 4, 8), "NS": (1, 2, 3, 4), "num_stages": (1, 2, 3, 4), "BV": (16, 32, 64, 128), "BK": (32, 64, 128),
    "KB": (16, 32, 64, 128), "KS": (32, 64, 128), "VS": (64, 128, 256), "NP": (132, 264, 528), "R": (32, 64, 128),
}  # fmt: skip


def neighbours(constant: str, value: int) -> tuple[int, ...]:
    """The choices beside the present one."""
    choices = sorted({*CHOICES.get(constant, ()), value}) if constant in CHOICES else [value]
    at = choices.index(value)
    return tuple(choices[max(at - 1, 0) : at] + choices[at + 1 : at + 2])


def tune(case: Case, limit: float = 0.01) -> tuple[launch.Plan, dict, float, float]:
    """The row, the constants that beat it, and the milliseconds before and after."""
    engine, dtype = ENGINES[case.op], torch.bfloat16
    x = stored(tensors(case, case.shape["B"], case.shape["T"]), dtype)
    call = passes(lambda **x: ours(case, **x), x)["fwd+bwd"]
    row = launch.plan(engine, torch.device("cuda"), dtype, case.shape["K"], case.shape["V"])
    best, before = {}, median(call)
    now, gained = before, True
    while gained:
        gained = False
        for kernel, constants in row.launch.items():
            if kernel == "shared":
                continue
            for constant, value in constants.items():
                for candidate in neighbours(constant, best.get(kernel, {}).get(constant, value)):
                    trial = best | {kernel: best.get(kernel, {}) | {constant: candidate}}
                    with launch.forced(engine, row.name, **trial):
                        try:
                            worst, ms = error(case, dtype), median(call, warmup=8, rep=40)
                        except Exception as e:  # a candidate may not compile or not fit: that is its verdict
                            print(f"  {kernel}.{constant} = {candidate}: {type(e).__name__}: {str(e)[:120]}", flush=True)
                            continue
                    print(f"  {kernel}.{constant} = {candidate}: {ms:.3f} ms, error {worst:.2f}", flush=True)
                    if worst <= 1 and ms < now * (1 - limit):
                        best, now, gained = trial, ms, True
    return row, best, before, now


def write(row: launch.Plan, best: dict, note: str) -> None:
    path = Path(launch.__file__).parents[1] / f"{row.engine}.plans.json"
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
    parser.add_argument("--only", help="cases whose op has this name")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    for case in CASES:
        if options.only not in (None, case.op):
            continue
        row, best, before, after = tune(case)
        note = f"{case.op} {case.shape}, fwd+bwd {before:.3f} -> {after:.3f} ms on {torch.cuda.get_device_name()}"
        print(f"{row.engine}/{row.name}: {note}: {best}", flush=True)
        if options.write and best:
            write(row, best, note)


if __name__ == "__main__":
    main()
