"""Time candidates for the launch tables on this GPU and write the fastest into needlework/ops/*/*.launch.json.

    python benchmarks/tune.py --only gated/A [--seconds 90] [--write]
    python benchmarks/tune.py --drawn gated kda [--seconds 300] [--write]

A row is picked by the GPU, the dtype, K and V. Rows, tokens and heads are not in the table: they decide how many programs a kernel launches, so
a row that was timed at some of them is used at all. With --drawn it is tuned on several drawn calls that pick it (`draw.py`, the seeds
in TUNING), by the geometric mean of their times. A row without "measured" was not tuned so: its "why" names what it was chosen by.
`held_out.py` measures how far from the best rows are at shapes that were not timed.

One constant of a kernel after another, each over its neighbours, forward + backward of the whole op, until none gains 1 % or the time is
over. What is faster is taken if it is so twice and the doctor finds it right: outputs and gradients by the error budget, short, long and
packed, the same in two runs. A candidate that does not compile is dropped with its reason. Without --write what would change is printed
and nothing changes.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from cases import Case
from draw import TUNING, Call, draw, rule_of
from drawn import case_of
from grid import shorter
from run import CASES
from timing import median, passes

from needlework.ops.runtime import launch_configs
from needlework.testing.verdict import Task, weigh

# op -> the launch table that its case is to tune
ENGINES = {
    "gated": "delta/scalar",
    "qdelta": "delta/scalar",
    "kda": "delta/channel",
    "carve-gates-given": "delta/channel",
    "ccq": "ccq/curvature",
    "path": "path/engine",
}
CHOICES = {
    "num_warps": (1, 2, 4, 8), "NS": (1, 2, 3, 4), "STAGES": (1, 2, 3, 4), "num_stages": (1, 2, 3, 4), "BV": (16, 32, 64, 128),
    "BK": (16, 32, 64, 128), "KB": (16, 32, 64, 128), "VB": (16, 32, 64, 128), "KS": (32, 64, 128), "NT": (1, 2, 4),
    "NP": (132, 264, 528), "BD": (32, 64, 128), "BT": (16, 32, 64), "R": (16, 32, 64, 128),
    "BN": (16, 32, 64, 128), "HB": (1, 2, 4), "NI": (1, 2, 3), "NO": (1, 2, 3), "LATE": (0, 1),
}  # fmt: skip
GAIN = 0.01
TOGETHER, MEMORY = 6, 4 * 2**30  # drawn calls that a row is tuned on, and bytes of each
FORMS = ("short", "long", "packed")


def neighbours(constant: str, value: int) -> tuple[int, ...]:
    """The choices beside the present one."""
    if constant not in CHOICES:
        return ()
    choices = sorted({*CHOICES[constant], value})
    at = choices.index(value)
    return tuple(choices[max(at - 1, 0) : at] + choices[at + 1 : at + 2])


def wrong(case: Case, row: launch_configs.LaunchConfig, device: torch.device, dtype: torch.dtype) -> str:
    """What the doctor finds wrong under the config that is now forced; empty if it is right."""
    name = str(dtype).removeprefix("torch.")
    task = Task(case.spec.name, row.engine, row.name, name, case.shape["K"], case.shape["V"], FORMS)
    found = (weigh(task, form, device.type)[1] for form in FORMS)
    return next(("; ".join(failing) for failing in found if failing), "")


def tune(
    case: Case,
    device: torch.device,
    dtype: torch.dtype,
    *,
    seconds: float = math.inf,
    timer: Callable[[Callable], float] = median,
    verdict: Callable[..., str] = wrong,
) -> tuple[launch_configs.LaunchConfig, dict[str, dict[str, int]], float, float]:
    """The row, the constants that beat it, and the milliseconds before and after, taken one after the other at the end."""
    call = passes(case.ours, case.tensors(device, dtype, case.shape["B"], case.shape["T"]))["fwd+bwd"]
    row = launch_configs.launch_config(ENGINES[case.op], device, dtype, case.shape["K"], case.shape["V"])
    return row, *search(row, [call], lambda: verdict(case, row, device, dtype), seconds=seconds, timer=timer)


def tune_drawn(
    row: launch_configs.LaunchConfig, calls: Sequence[Call], device: torch.device, *, seconds: float = math.inf
) -> tuple[dict[str, dict[str, int]], float, float]:
    """As `search`, for one row on drawn calls that pick it."""
    cases = [case_of(call, device) for call in calls]
    timed = [passes(case.ours, case.drawn(device))["fwd+bwd"] for case in cases]

    def verdict() -> str:
        found = (wrong(case, row, device, getattr(torch, case.call.dtype)) for case in cases)
        return next(filter(None, found), "")

    return search(row, timed, verdict, seconds=seconds)


def by_row(rule: str, device: torch.device) -> dict[launch_configs.LaunchConfig, list[Call]]:
    """Calls of the tuning seeds that pick each row, short enough to be held together."""
    found: dict[launch_configs.LaunchConfig, list[Call]] = {}
    for call in (call for seed in TUNING for call in draw(rule_of(rule), seed)[0]):
        row = launch_configs.launch_config(ENGINES[rule], device, getattr(torch, call.dtype), call.K, call.V)
        if len(found.setdefault(row, [])) < TOGETHER:
            found[row].append(shorter(call, MEMORY))
    return found


def search(
    row: launch_configs.LaunchConfig,
    calls: Sequence[Callable[[], object]],
    verdict: Callable[[], str],
    *,
    seconds: float = math.inf,
    timer: Callable[[Callable], float] = median,
) -> tuple[dict[str, dict[str, int]], float, float]:
    """The constants that beat the row's, and the geometric means of the calls' milliseconds before and after."""
    until = time.monotonic() + seconds
    places = [(kernel, name) for kernel, own in row.launch.items() if kernel != "shared" for name in own]

    def timed(constants: dict) -> float:
        with launch_configs.forced(row.engine, row.name, **constants):
            return statistics.geometric_mean(map(timer, calls))

    def why_not(trial: dict) -> str:
        """Why the trial is not taken; empty if it is. Each is timed beside the best, as a GPU's clock wanders."""
        for _ in range(2):
            ms, now = timed(trial), timed(best)
            if ms >= now * (1 - GAIN):
                return f"{ms:.3f} ms against {now:.3f}"
        with launch_configs.forced(row.engine, row.name, **trial):
            return verdict()

    best: dict[str, dict[str, int]] = {}
    gained = True
    while gained:
        gained = False
        for kernel, name in places:
            value = best.get(kernel, {}).get(name, row.launch[kernel][name])
            for candidate in neighbours(name, value):
                if time.monotonic() >= until:
                    return best, timed({}), timed(best)
                trial = best | {kernel: best.get(kernel, {}) | {name: candidate}}
                try:
                    reason = why_not(trial)
                except Exception as error:  # Triton, LLVM, ptxas and a launch raise what they like: that is its verdict
                    reason = f"{type(error).__name__}: {str(error)[:120]}"
                print(f"  {kernel}.{name} = {candidate}: {reason or 'taken'}", flush=True)
                if not reason:
                    best, gained = trial, True
    return best, timed({}), timed(best)


def write(
    row: launch_configs.LaunchConfig, best: dict, note: str, folder: Path = Path(launch_configs.__file__).parents[1]
) -> None:
    """The constants and what was measured, into the row; every other character of the table stays."""
    path = folder / f"{row.engine}.launch.json"
    table = json.loads(path.read_text())
    entry = next(entry for entry in table if entry["name"] == row.name)
    for kernel, constants in best.items():
        entry["launch"][kernel].update(constants)
    entry["measured"] = note
    partial = path.with_suffix(".partial")
    partial.write_text(printed(table))
    partial.replace(path)


def printed(table: list[dict]) -> str:
    """A launch table as it lies beside its op: a line a fact, and a line a kernel where there are more than two."""

    def fact(name: str, value: object) -> str:
        if name == "launch" and isinstance(value, dict) and len(value) > 2:
            kernels = ",\n".join(f"      {json.dumps(kernel)}: {json.dumps(own)}" for kernel, own in value.items())
            return f'    "launch": {{\n{kernels}\n    }}'
        return f"    {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}"

    rows = ("  {\n" + ",\n".join(fact(*item) for item in entry.items()) + "\n  }" for entry in table)
    return "[\n" + ",\n".join(rows) + "\n]\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="KEY", help="gated/A, kda/B, …")
    parser.add_argument(
        "--drawn", nargs="+", default=[], metavar="RULE", choices=ENGINES, help="tune on drawn calls of these rules"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="of each case, after which what was found is the result"
    )
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda")
    for rule in options.drawn:
        for row, calls in by_row(rule, device).items():
            tried = ", ".join(call.name for call in calls)
            keep(row, tried, *tune_drawn(row, calls, device, seconds=options.seconds), write_it=options.write)
    for case in CASES:
        if options.drawn or case.op not in ENGINES or (options.only and case.key not in options.only):
            continue
        row, *found = tune(case, device, getattr(torch, options.dtype), seconds=options.seconds)
        keep(row, f"{case.key} {case.shape}", *found, write_it=options.write)


def keep(row: launch_configs.LaunchConfig, tried: str, best: dict, before: float, after: float, *, write_it: bool) -> None:
    note = f"{tried}, fwd+bwd {before:.3f} -> {after:.3f} ms on {torch.cuda.get_device_name()}"
    print(f"{row.engine}/{row.name}: {note}: {best}", flush=True)
    if write_it and best:
        write(row, best, note)


if __name__ == "__main__":
    main()
