"""How the launch tables do at shapes that were not timed: the milliseconds of the row that is picked, over the best that is found there.

    python benchmarks/held_out.py [--rules gated kda] [--calls 10] [--seed 21] [--out FILE]

The calls are drawn (`draw.py`) with a seed of which no table is made, and shortened to a few GiB. At each shape every constant of the row is
moved to its neighbours (`tune.py`), one at a time, and then all kernels' best moves are tried together, as kernels run one after another.
So the best is at most one move of a kernel away. What two moves of one kernel gain together, or a move past a neighbour, is not found: the true
ratio is as large or larger. What is best must be right by the error budget. Candidates are compiled side by side first, then timed alone,
replayed from a CUDA graph where a call can be captured: minutes a rule.
"""

import argparse
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import results
from children import answer, answers_of
from draw import HELD_OUT, Call, draw, rule_of
from drawn import Drawn, case_of, engine_of
from grid import judge, shorter
from run import commit, say
from timing import median, passes, replay
from tune import neighbours

from needlework.ops.runtime import launch_configs
from needlework.testing.processes import cores

DEVICE = "cuda"
ROOT = results.ROOT / "held_out"
CALLS = 10
BAR = 1.15
MEMORY, SIDE_BY_SIDE = 3 * 2**30, 32  # bytes of a call, and how many are compiled side by side at most
# a rule of each launch table whose kernels every call launches anew: CARVE's are replayed as they were
RULES = {
    "gated": "delta/scalar", "additive": "delta/additive", "kda": "delta/channel", "ccq": "ccq/curvature",
    "mamba3": "mamba3/siso", "lucid": "lucid/solve", "polar": "polar/attention", "path": "path/engine",
}  # fmt: skip
Trial = dict[str, dict[str, int]]  # kernel -> constants
# of a row, what reads shared memory that Triton 3.6 did not give the program: after an illegal access no other candidate runs
FATAL: dict[tuple[str, str], Trial] = {("delta/additive", "sm90-k32"): {"intra_bwd": {"NS": 1}}}
clock = partial(median, warmup=10, rep=50)


def shapes(rule: str, seed: int, count: int, arch: tuple[int, int]) -> list[Call]:
    """Drawn calls whose kernels read the rule's table, short enough to be compiled side by side."""
    drawn, _ = draw(rule_of(rule), seed)
    return [shorter(call, MEMORY) for call in drawn if engine_of(call, arch) == RULES[rule]][:count]


def moves(row: launch_configs.LaunchConfig) -> list[Trial]:
    """Every constant at the choices beside its own, but those that end the process."""
    places = [(kernel, name, value) for kernel, own in row.launch.items() if kernel != "shared" for name, value in own.items()]
    trials = [{kernel: {name: choice}} for kernel, name, value in places for choice in neighbours(name, value)]
    return [trial for trial in trials if trial != FATAL.get((row.engine, row.name))]


def together(times: list[tuple[float, Trial]], now: float) -> Trial:
    """Of each kernel the move that gains most."""
    best: dict[str, tuple[float, Trial]] = {}
    for ms, trial in times:
        (kernel,) = trial
        if ms < best.get(kernel, (now, {}))[0]:
            best[kernel] = ms, trial
    return {kernel: constants for _, trial in best.values() for kernel, constants in trial.items()}


class Shape:
    """A call as it is timed, and the row that is picked for it."""

    def __init__(self, call: Call):
        self.case: Drawn = case_of(call, DEVICE)
        self.captured = call.captured
        self.engine = engine_of(call, launch_configs.capability(torch.device(DEVICE)))
        self.call = passes(self.case.ours, self.case.drawn(DEVICE))["fwd+bwd"]
        facts = torch.device(DEVICE), getattr(torch, call.dtype), call.K, call.V
        self.row = launch_configs.launch_config(self.engine, *facts)

    def under(self, trial: Trial) -> AbstractContextManager[None]:
        return launch_configs.forced(self.engine, self.row.name, **trial)

    def clocked(self) -> float:
        """Milliseconds; in a graph the GPU's alone."""
        return clock(replay(self.call) if self.captured else self.call)

    def timed(self, trial: Trial) -> float | None:
        """None of what does not compile or launch."""
        try:
            with self.under(trial):
                return self.clocked()
        except Exception:  # Triton, LLVM, ptxas and a launch raise what they like: that is its verdict
            return None


def compiled(call: Call, found: dict) -> None:
    """Every candidate has run once."""
    shape = Shape(call)
    found["failed"] = 0
    for trial in moves(shape.row):
        try:
            with shape.under(trial):
                shape.call()
            torch.cuda.synchronize()
        except Exception:  # as in `timed`
            found["failed"] += 1


def weighed(call: Call, found: dict) -> None:
    """The picked row beside the best that is right."""
    shape = Shape(call)
    found |= {"engine": shape.engine, "config": shape.row.name}
    now = shape.clocked()
    times = [(ms, trial) for trial in moves(shape.row) if (ms := shape.timed(trial)) is not None]
    faster = sorted(((ms, trial) for ms, trial in times if ms < now), key=lambda x: x[0])
    for trial in (together(times, now), *(trial for _, trial in faster[:3]), {}):
        if not trial or right(shape, call, trial):
            break
    found["picked"] = shape.clocked()
    ms = shape.timed(trial) if trial else None
    found |= {"ms": min(found["picked"], found["picked"] if ms is None else ms), "constants": trial}
    found["ratio"] = found["picked"] / found["ms"]


def right(shape: Shape, call: Call, trial: Trial) -> bool:
    try:
        with shape.under(trial):
            return judge(call)[0] <= 1
    except Exception:  # as in `timed`
        return False


ACTS = {"compile": compiled, "weigh": weighed}
LIMITS = {"compile": 500, "weigh": 240}  # seconds of a call


def summary(rule: str, ratios: list[float]) -> str:
    verdict = "met" if max(ratios) <= BAR else "NOT met"
    text = (
        f"{rule}: picked ÷ best found of {len(ratios)} shapes: median {statistics.median(ratios):.2f}, worst {max(ratios):.2f}"
    )
    return f"{text}, bar {BAR} {verdict}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=RULES)
    parser.add_argument("--calls", type=int, default=CALLS, help="of each rule")
    parser.add_argument("--seed", type=int, default=HELD_OUT)
    parser.add_argument("--out", type=Path, metavar="FILE", help="benchmarks/results/held_out/<device>.json")
    parser.add_argument("--commit", default=commit(), help="what the rows are said to be of, where git cannot tell")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device here: kernels are timed on a GPU")
    import triton

    common = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    file = options.out or results.path(common["device"], ROOT)
    arch = launch_configs.capability(torch.device(DEVICE))
    calls = {rule: shapes(rule, options.seed, options.calls, arch) for rule in options.rules}
    with ThreadPoolExecutor(min(cores(), SIDE_BY_SIDE)) as pool:
        answered = pool.map(
            lambda call: next(answers_of(SCRIPT, "compile", [call], LIMITS)), chain.from_iterable(calls.values())
        )
        for call, found, reason in answered:
            say(f"{call.name}: {found.get('failed')} candidates do not compile or launch {reason or ''}")
    for rule, left in calls.items():
        ratios = []
        while left:
            for call, found, reason in answers_of(SCRIPT, "weigh", left, LIMITS):
                left = [other for other in left if other != call]
                say(f"{call.name} {call.shape} {call.dtype}: {reason or found}")
                if not reason:
                    ratios.append(found["ratio"])
                    about = {
                        "op": rule,
                        "shape": call.shape,
                        "dtype": call.dtype,
                        "pass": "fwd+bwd",
                        "seed": call.seed,
                        "index": call.index,
                    }
                    results.put(file, about | found | common | {"bar": BAR, "commit": options.commit})
        if ratios:
            say(summary(rule, ratios))
    return 0


SCRIPT = Path(__file__)

if __name__ == "__main__":
    answer(ACTS)
    raise SystemExit(main())
