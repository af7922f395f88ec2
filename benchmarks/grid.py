"""Time drawn calls (`draw.py`) beside their peers on this GPU, and say how the ratios are distributed.

    python benchmarks/grid.py --seed 101 --minutes 25 [--rules gated polar] [--calls 40] [--out FILE]
    python benchmarks/grid.py --report FILE

Rules take turns, so a run that is cut short has covered all of them; a later one with the same seed, commit and FILE goes on where that
one stopped. Each call is first judged against float64 at 136 tokens, in processes side by side that also compile its kernels and its
peer's. What is over its budget is not timed. A call is timed forward and forward + backward, by launches and, unless documents are packed,
replayed from a CUDA graph. What does not fit, fails or is wrong has a row that says why. Rows are written one by one.
"""

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import distribution
import results
from children import answer, answers_of
from draw import CALLS, REPORTING, RULES, TUNING, Call, drawn, memory
from drawn import Drawn, case_of
from judge import ratios
from run import commit, say, why
from timing import median, passes, peak, replay

from needlework.testing.errors import mean_of_draws
from needlework.testing.processes import cores
from needlework.testing.verdict import DRAWS

SCRIPT = Path(__file__)
DEVICE = "cuda"
JUDGED = {"T": 136, "documents": (1, 30, 35, 70)}
SIDE_BY_SIDE = 7
PREPARED = 5 * 2**30  # bytes that a call may take beside others
PASSES = ("fwd", "fwd+bwd")


def small(call: Call) -> Call:
    """What is judged for a call: its widths, dtype, groups, packing and initial state, one key head, few tokens."""
    return call._replace(B=1, H=1, HV=call.HV // call.H, T=JUDGED["T"], documents=JUDGED["documents"] if call.documents else ())


def shorter(call: Call, limit: int = PREPARED) -> Call:
    """With fewer rows, and then fewer tokens or documents, until it can be run beside others: all that its kernels are compiled for
    stays."""
    while memory(call) > limit:
        if call.B > 1:
            call = call._replace(B=call.B // 2)
        elif len(call.documents) > 1:
            documents = call.documents[: len(call.documents) // 2]
            call = call._replace(documents=documents, T=sum(documents))
        else:
            T = call.T // 128 * 64 + call.T % 64
            call = call._replace(T=T, documents=(T,) if call.documents else ())
    return call


def judge(call: Call) -> tuple[float, str]:
    """The largest error ÷ budget in the mean of the draws that it takes, and the tensor that has it."""
    case = case_of(small(call), DEVICE)
    draws = (ratios(case.spec, case.drawn(DEVICE, seed), getattr(torch, call.dtype)) for seed in range(DRAWS))
    return max((ratio, name) for name, ratio in mean_of_draws(draws).items())


def beside(case: Drawn, x: dict[str, torch.Tensor]) -> tuple[dict, str]:
    """The peer's passes, and why there are none."""
    if case.peer is None:
        return {}, ""
    try:
        theirs = passes(case.peer.load(), case.peer_inputs(x))
        theirs["fwd+bwd"]()
        torch.cuda.synchronize()
        return theirs, ""
    except Exception as error:  # a peer, its compiler and a launch raise what they like
        return {}, why(error)


def prepare(call: Call, found: dict) -> None:
    """Judged, and compiled with its peer."""
    found["error_over_budget"], found["tensor"] = judge(call)
    torch.cuda.empty_cache()
    if found["error_over_budget"] <= 1:
        case = case_of(shorter(call), DEVICE)
        x = case.drawn(DEVICE)
        passes(case.ours, x)["fwd+bwd"]()
        beside(case, x)


def timed(call: Call, found: dict) -> None:
    """The figures of each pass. What may leave the process unusable comes last: a peer that fails, then captures."""
    case = case_of(call, DEVICE)
    x = case.drawn(DEVICE)
    mine = passes(case.ours, x)
    for name in PASSES:
        found[name] = {"ms": median(mine[name]), "peak_mib": peak(mine[name]), "peer": case.peer and case.peer.name}
    theirs, reason = beside(case, x)
    for name in PASSES:
        found[name] |= {"peer_ms": median(theirs[name]) if theirs else None, "peer_why": reason}
    # the lengths of packed documents are read on the host, which a capture does not allow
    for figure, calls in (("graph_ms", mine), ("peer_graph_ms", theirs)):
        for name in () if call.documents else calls:
            torch.cuda.empty_cache()
            try:
                found[name][figure] = median(replay(calls[name]))
            except Exception as error:
                raise RuntimeError(f"{figure} of {name}: {why(error)}") from error


ACTS = {"prepare": prepare, "time": timed}
LIMITS = {"prepare": 300, "time": 100}  # seconds that a call is given


class Run:
    """Rows of one run: what they share, and where they go."""

    def __init__(self, file: Path | None, of: str):
        import triton

        device = torch.cuda.get_device_name()
        self.common = {"device": device, "torch": torch.__version__, "triton": triton.__version__, "commit": of}
        self.file = file or results.path(device, distribution.ROOT)

    def put(self, call: Call, found: dict, reason: str | None, error: float | None = None) -> None:
        """A row of each pass."""
        about = {
            "op": call.rule,
            "impl": "triton",
            "shape": call.shape,
            "dtype": call.dtype,
            "seed": call.seed,
            "index": call.index,
        }
        for name in PASSES:
            figures = dict.fromkeys(distribution.FIGURES) | found.get(name, {}) | {"why": reason, "error_over_budget": error}
            row = about | {"pass": name} | figures | self.common
            results.put(self.file, row)
            ratios = {way: distribution.ratio(row, way) for way in distribution.WAYS}
            say(f"{call.name} {name}: {reason or ''} {row['ms']} ms, ratios {ratios} {row['peer_why'] or ''}")

    def finished(self) -> set[str]:
        """Names of calls that this commit has rows of."""
        same = lambda row: all(row[name] == self.common[name] for name in ("device", "commit"))
        return {distribution.name_of(row) for row in results.read(self.file) if same(row)}

    def batch(self, calls: list[Call], until: float) -> None:
        """Judged and compiled side by side, then timed alone."""
        with ThreadPoolExecutor(len(calls)) as pool:
            prepared = list(pool.map(lambda call: next(answers_of(SCRIPT, "prepare", [call], LIMITS)), calls))
        right = {}
        for call, found, reason in prepared:
            error = found.get("error_over_budget")
            if error is not None and not error <= 1:
                self.put(call, {}, f"WRONG: the error of {found['tensor']} is {error:.2f} × its budget", error)
            elif reason:
                self.put(call, {}, f"not prepared: {reason}", error)
            else:
                right[call] = error
        while right and time.monotonic() < until:
            for call, found, reason in answers_of(SCRIPT, "time", list(right), LIMITS):
                self.put(call, found, reason, right.pop(call))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seed", type=int, default=REPORTING[0], help=f"launch configs were chosen on {TUNING}, reports are of {REPORTING}"
    )
    parser.add_argument("--minutes", type=float, default=25.0, help="after which no batch is begun")
    parser.add_argument("--rules", nargs="+", default=[rule.name for rule in RULES], choices=[rule.name for rule in RULES])
    parser.add_argument("--calls", type=int, default=CALLS, help="of each rule")
    parser.add_argument("--out", type=Path, metavar="FILE", help="benchmarks/results/grids/<device>.json")
    parser.add_argument("--commit", default=commit(), help="what the rows are said to be of, where git cannot tell")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print the distribution of its rows, and time nothing")
    options = parser.parse_args()
    if options.report:
        say("\n".join(distribution.section(results.read(options.report))))
        return 0
    if not torch.cuda.is_available():
        parser.error("no CUDA device here: kernels are timed on a GPU")
    rules = tuple(rule for rule in RULES if rule.name in options.rules)
    calls, left_out = drawn(options.seed, rules, options.calls)
    begun = time.monotonic()
    until = begun + 60 * options.minutes
    run = Run(options.out, options.commit)
    finished = run.finished()
    for call, reason in left_out.items():
        if call.name not in finished:
            run.put(call, {}, reason)
    todo = [call for call in calls if call.name not in finished]
    size = min(SIDE_BY_SIDE, max(1, cores() // 2))
    while todo and time.monotonic() < until:
        run.batch(todo[:size], until)
        todo = todo[size:]
        say(f"[{time.monotonic() - begun:.0f} s] {len(todo)} calls are left")
    rows = [row for row in results.read(run.file) if row["seed"] == options.seed]
    say("\n".join(distribution.section(rows)))
    return 0


if __name__ == "__main__":
    answer(ACTS)
    raise SystemExit(main())
