"""Time drawn calls (`draw.py`) beside their peers on this GPU, and say how the ratios are distributed.

    python benchmarks/grid.py --seed 102 --minutes 25 [--rules gated polar] [--calls 40] [--out FILE] [--dry] [--ours]
    python benchmarks/grid.py --report FILE

Rules take turns, so a run that is cut short has covered all of them; a later one with the same seed, calls, commit and FILE goes on where
that one stopped. Processes side by side prepare calls: they judge one against float64 at 136 tokens, and compile its kernels and its
peer's. Another process times calls one after another, in the order in which they get ready: first a peer that tunes itself does so, then
figures are taken. What prepares is stopped meanwhile: our launches wait for Python more than a peer's. Where there are several GPUs,
all but the first are for what prepares. A call is timed forward and forward + backward, by launches and, where it can be captured,
replayed from a CUDA graph. Every figure is a median. What is over its budget is not timed.
What fails or is wrong has a row that says why. Rows are written one by one. --dry says what is left, and what it takes by the seconds of
the rows in FILE, and times nothing.

--ours: peers take most of the minutes, and stay as they are. Calls are judged and timed alone. One that FILE has rows of keeps its
peer's figures; `peer_commit` says which run they are of. The peer of any other is asked by the next run without --ours.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from statistics import mean
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent))
import distribution
import results
from children import Running, answer, answers_of
from draw import CALLS, REPORTING, RULES, TUNING, Call, drawn, memory
from drawn import Drawn, case_of
from judge import compared, flat
from run import commit, say, why
from timing import median, passes, peak, replay

from needlework.testing.budget import ENOUGH
from needlework.testing.compare import whole
from needlework.testing.errors import mean_of_draws
from needlework.testing.processes import cores
from needlework.testing.verdict import DRAWS

SCRIPT = Path(__file__)
DEVICE = "cuda"
JUDGED = {"T": 136, "documents": (1, 30, 35, 70)}
# Value heads at least: where nothing decays all of dg's error is one number a chunk and head, and few of those are twice as large by chance
HEADS = ENOUGH // 3
# Processes, no more than a GPU holds, and threads of each that compile a peer's configurations: one that judges leaves cores to others
SIDE_BY_SIDE = min(28 * max(1, torch.cuda.device_count() - 1), max(1, cores() // 3))
COMPILERS = 6
PREPARED = 2**28  # bytes that a call may take beside others, and its peer as many
SHORTEST = 128  # tokens of a row that it takes all the same
PASSES = ("fwd", "fwd+bwd")


def small(call: Call) -> Call:
    """What is judged for a call: its widths, dtype, groups, packing and initial state, few tokens of HEADS value heads or a group more."""
    group = call.HV // call.H
    H = -(-HEADS // group)
    return call._replace(B=1, H=H, HV=H * group, T=JUDGED["T"], documents=JUDGED["documents"] if call.documents else ())


def shorter(call: Call, limit: int = PREPARED) -> Call:
    """With fewer rows, and then fewer tokens or documents, until it can be run beside others: all that its kernels are compiled for
    stays."""
    while memory(call) > limit and (call.B > 1 or call.T > SHORTEST):
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
    """The largest error ÷ budget in the mean of the draws that it takes, and the tensor that has it. The CPU computes the references: thousands
    of small kernels would keep the GPU from what is timed."""
    tried, reference = (case_of(small(call), device) for device in (DEVICE, "cpu"))

    def one(seed: int) -> dict[str, float]:
        x = reference.drawn("cpu", seed)
        fast = flat(whole(tried.spec.chunk), {name: y.to(DEVICE) for name, y in x.items()})
        return compared({name: y.cpu() for name, y in fast.items()}, reference.spec, x, getattr(torch, call.dtype))

    return max((ratio, name) for name, ratio in mean_of_draws(map(one, range(DRAWS))).items())


Beside = Callable[[Drawn, dict[str, torch.Tensor]], tuple[dict, str]]


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


def alone(case: Drawn, x: dict[str, torch.Tensor]) -> tuple[dict, str]:
    """No peer's passes, in the place of `beside`."""
    return {}, "" if case.peer is None else NOT_ASKED


def tuned_with(benchmark: Callable[..., list[float]]) -> None:
    """How Triton's autotuner, which peers have, times a configuration."""
    from triton.runtime import driver

    driver.active.get_benchmarker = lambda: benchmark


@contextmanager
def compiled_alone() -> Iterator[None]:
    """What is launched through Triton is compiled and not launched, each configuration that an autotuner would time, several side by side.
    One that does not compile says so where it is timed."""
    from triton import AsyncCompileMode, JITFunction

    def once(call: Callable[[], object], quantiles: tuple[float, ...]) -> list[float]:
        call()
        return [0.0 for _ in quantiles]

    run = JITFunction.run
    tuned_with(once)
    JITFunction.run = lambda self, *arguments, warmup, **more: run(self, *arguments, warmup=True, **more)
    try:
        # a backward by autograd's own threads would not know of the mode
        with (
            ThreadPoolExecutor(COMPILERS) as pool,
            AsyncCompileMode(pool, ignore_errors=True),
            torch.autograd.set_multithreading_enabled(False),
        ):
            yield
    finally:
        JITFunction.run = run


@contextmanager
def clocked(found: dict, what: str) -> Iterator[None]:
    """The seconds it took are kept."""
    begun = time.monotonic()
    try:
        yield
    finally:
        found.setdefault("took", {})[what] = time.monotonic() - begun


def prepare(call: Call, found: dict, beside: Beside = beside) -> None:
    """Judged, and compiled with its peer, on a GPU where nothing is timed, if there is one."""
    from needlework.ops.runtime.precompile import compile_in

    last = torch.cuda.device_count() - 1
    torch.cuda.set_device(last - os.getpid() % max(1, last))
    compile_in(max(1, cores() // SIDE_BY_SIDE))
    with clocked(found, "judging"):
        found["error_over_budget"], found["tensor"] = judge(call)
    torch.cuda.empty_cache()
    if found["error_over_budget"] <= 1:
        case = case_of(shorter(call), DEVICE)
        x = case.drawn(DEVICE)
        with clocked(found, "compiling"):
            passes(case.ours, x)["fwd+bwd"]()
        with clocked(found, "the peer"), compiled_alone():
            beside(case, x)


class Ready(NamedTuple):
    """A call before its figures are taken."""

    peer: str | None
    mine: dict[str, Callable[[], object]]
    theirs: dict[str, Callable[[], object]]
    reason: str  # why there are none

    @classmethod
    def of(cls, call: Call, beside: Beside) -> "Ready":
        """Run once, its peer too, which tunes itself."""
        from triton.testing import do_bench

        tuned_with(partial(do_bench, warmup=2, rep=10))  # a peer has up to hundreds of configurations: by default 125 ms each
        case = case_of(call, DEVICE)
        x = case.drawn(DEVICE)
        mine = passes(case.ours, x)
        mine["fwd+bwd"]()
        return cls(case.peer and case.peer.name, mine, *beside(case, x))


READY: dict[Call, Ready] = {}


def timed(call: Call, found: dict, beside: Beside = beside) -> None:
    """Asked twice: a call is made ready, and then its figures are taken."""
    ready = READY.pop(call, None)
    with clocked(found, "tuning" if ready is None else "timing"):
        if ready is None:
            READY[call] = Ready.of(call, beside)
        else:
            figures(call, ready, found)


def figures(call: Call, ready: Ready, found: dict) -> None:
    """Of each pass. Captures come last: one that fails may leave the process unusable."""
    peer, mine, theirs, reason = ready
    for name in PASSES:
        found[name] = {"ms": median(mine[name]), "peak_mib": peak(mine[name]), "peer": peer}
    for name in PASSES:
        found[name] |= {"peer_ms": median(theirs[name]) if theirs else None, "peer_why": reason}
    for figure, calls in (("graph_ms", mine), ("peer_graph_ms", theirs)):
        for name in calls if call.captured else ():
            torch.cuda.empty_cache()
            try:
                found[name][figure] = median(replay(calls[name]))
            except Exception as error:
                raise RuntimeError(f"{figure} of {name}: {why(error)}") from error


OURS = "ours: "  # before an act: without the peer
NOT_ASKED = "it was not asked yet"
ACTS = {
    "prepare": prepare,
    "time": timed,
    OURS + "prepare": partial(prepare, beside=alone),
    OURS + "time": partial(timed, beside=alone),
}
# seconds that a call is given at a time, those in which others are timed included
LIMITS = {"prepare": 1500, "time": 100, OURS + "prepare": 500, OURS + "time": 100}
PEERS = ("peer", "peer_ms", "peer_graph_ms", "peer_why", "prepare_s", "time_s")  # what a row keeps whose call is timed alone
MEMORY_RAN_OUT = "OutOfMemory"
ROOM = 56 * 2**30  # bytes that a call may take while others are prepared
# seconds that a call takes, of rules that the file has no rows of
GUESSED = {"prepare": 100.0, "time": 15.0, OURS + "prepare": 40.0, OURS + "time": 5.0}


class Run:
    """Rows of one run: what they share, and where they go."""

    def __init__(self, file: Path | None, of: str, calls: int, ours: bool = False):
        import triton

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        self.common = {"device": device, **versions, "commit": of, "calls": calls}
        self.file = file or results.path(device, distribution.ROOT)
        self.before = results.read(self.file)
        self.running = Running()
        self.prefix = OURS if ours else ""
        self.earlier = {results.key(row): row for row in self.before} if ours else {}

    def put(self, call: Call, found: dict, reason: str | None) -> None:
        """A row of each pass."""
        about = {
            "op": call.rule,
            "impl": "triton",
            "shape": call.shape,
            "dtype": call.dtype,
            "seed": call.seed,
            "index": call.index,
        }
        shared = {"error_over_budget": found.get("error_over_budget"), "prepare_s": found.get("prepare_s")}
        took = found.get("took", {})
        shared["time_s"] = took["tuning"] + took["timing"] if "timing" in took else None
        for name in PASSES:
            figures = dict.fromkeys(distribution.FIGURES) | found.get(name, {}) | {"why": reason} | shared
            row = about | {"pass": name} | figures | self.common
            if (earlier := self.earlier.get(results.key(row))) is not None:
                row |= {figure: earlier[figure] for figure in PEERS} | {
                    "peer_commit": earlier.get("peer_commit", earlier["commit"])
                }
            results.put(self.file, row)
            ratios = {way: distribution.ratio(row, way) for way in distribution.WAYS}
            say(f"{call.name} {name}: {reason or ''} {row['ms']} ms, ratios {ratios} {row['peer_why'] or ''}")

    def left(self, calls: list[Call]) -> list[Call]:
        """Those that this commit has no rows of, or, if peers are asked, none beside its peer."""
        same = lambda row: all(row[name] == self.common[name] for name in ("device", "commit", "calls"))
        whole = lambda row: self.prefix or row["peer_why"] != NOT_ASKED
        finished = {distribution.name_of(row) for row in results.read(self.file) if same(row) and whole(row)}
        return [call for call in calls if call.name not in finished]

    def seconds(self, act: str, rule: str) -> float:
        """What a call of the rule takes, by the rows that the file had when the run began."""
        of = [row for row in self.before if row["op"] == rule and row["peer_why"] != NOT_ASKED]
        known = [row[f"{act}_s"] for row in of if row[f"{act}_s"] is not None]
        return mean(known) if known and not self.prefix else GUESSED[self.prefix + act]

    def plan(self, calls: list[Call]) -> list[str]:
        """What these calls take."""
        sums = {act: sum(self.seconds(act, call.rule) for call in calls) / 60 for act in ("prepare", "time")}
        whole = max(sums["prepare"] / SIDE_BY_SIDE, sums["time"])
        known = {row["op"] for row in self.before if row["time_s"] is not None}
        lines = [
            f"{rule.name}: {sum(call.rule == rule.name for call in calls)} calls, "
            f"{self.seconds('prepare', rule.name):.0f} s to prepare and {self.seconds('time', rule.name):.0f} to time one"
            f"{'' if rule.name in known else ', by guess'}"
            for rule in RULES
            if any(call.rule == rule.name for call in calls)
        ]
        return [
            *lines,
            f"{len(calls)} calls: {sums['prepare']:,.0f} minutes to prepare, by {SIDE_BY_SIDE} processes at once, and {sums['time']:,.0f} to time "
            f"meanwhile: {whole:,.0f} minutes of this GPU",
        ]

    def prepared(self, call: Call, until: float) -> tuple[dict, str | None] | None:
        """Judged and compiled; None where there is no time to do that and then to time it."""
        begun = time.monotonic()
        if begun + self.seconds("prepare", call.rule) + self.seconds("time", call.rule) > until:
            return None
        for _, found, reason in answers_of(SCRIPT, self.prefix + "prepare", [call], LIMITS, until, self.running):
            found["prepare_s"] = time.monotonic() - begun
            took = found.get("took", {}) | {"whole": found["prepare_s"]}
            say(f"{call.name}: " + ", ".join(f"{what} {seconds:.0f} s" for what, seconds in took.items()))
            return found, reason
        return None

    def turn(self, calls: list[Call], until: float, workers: int) -> list[Call]:
        """Calls are prepared by so many workers, and each is timed once it is. Those that have no memory beside others come back."""
        crowded = [call for call in calls if workers > 1 and memory(call) > ROOM]
        beside_others = [call for call in calls if call not in crowded]
        right: dict[Call, dict] = {}
        ready: SimpleQueue = SimpleQueue()

        def row(call: Call, found: dict, reason: str | None) -> None:
            if workers > 1 and MEMORY_RAN_OUT in f"{reason} {found.get('fwd', {}).get('peer_why')}":
                crowded.append(call)
            else:
                self.put(call, found, reason)

        def waiting() -> Iterator[Call]:
            """What is right, as it gets ready, while there is time for it."""
            for _ in beside_others:
                call, future = ready.get()
                found, reason = future.result() or ({}, None)
                error = found.get("error_over_budget")
                if reason:
                    row(call, found, f"not prepared: {reason}")
                elif error is not None and not error <= 1:
                    row(call, found, f"WRONG: the error of {found['tensor']} is {error:.2f} × its budget")
                elif error is not None and time.monotonic() + self.seconds("time", call.rule) <= until:
                    right[call] = found
                    yield call  # made ready
                    if call in right:
                        with self.running.stopped():
                            yield call

        with ThreadPoolExecutor(workers) as pool:
            for call in beside_others:
                pool.submit(self.prepared, call, until).add_done_callback(lambda future, call=call: ready.put((call, future)))
            following = waiting()
            for first in following:  # a child times as many as it survives, the next one goes on
                for call, found, reason in answers_of(SCRIPT, self.prefix + "time", chain([first], following), LIMITS, until):
                    took = right[call].get("took", {}) | found.get("took", {})
                    right[call] |= found | {"took": took}
                    if reason or "fwd" in found:
                        row(call, right.pop(call), reason)
        return crowded


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seed", type=int, default=REPORTING[0], help=f"launch configs were chosen on {TUNING}, reports are of {REPORTING}"
    )
    parser.add_argument("--minutes", type=float, default=25.0, help="after which the run ends")
    parser.add_argument("--rules", nargs="+", default=[rule.name for rule in RULES], choices=[rule.name for rule in RULES])
    parser.add_argument("--calls", type=int, default=CALLS, help="of each rule: another number is another draw")
    parser.add_argument("--out", type=Path, metavar="FILE", help="benchmarks/results/grids/<device>.json")
    parser.add_argument("--commit", default=commit(), help="what the rows are said to be of, where git cannot tell")
    parser.add_argument("--dry", action="store_true", help="say what is left and what it takes")
    parser.add_argument("--ours", action="store_true", help="time us alone, beside the peers' figures that FILE has")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print the distribution of its rows, and time nothing")
    options = parser.parse_args()
    if options.report:
        say("\n".join(distribution.section(results.read(options.report))))
        return 0
    if not (options.dry or torch.cuda.is_available()):
        parser.error("no CUDA device here: kernels are timed on a GPU")
    rules = tuple(rule for rule in RULES if rule.name in options.rules)
    run = Run(options.out, options.commit, options.calls, options.ours)
    calls, left_out = drawn(options.seed, rules, options.calls)
    begun = time.monotonic()
    left = run.left(calls)
    say("\n".join(run.plan(left)))
    if options.dry:
        say("\n".join(f"{call.name} {call.shape}: left out, it {reason}" for call, reason in left_out.items()))
        return 0
    until = begun + 60 * options.minutes
    crowded = run.turn(left, until, SIDE_BY_SIDE)
    run.turn(crowded, until, 1)
    say(f"[{time.monotonic() - begun:.0f} s] {len(run.left(left))} calls are left")
    rows = [row for row in results.read(run.file) if row["seed"] == options.seed]
    say("\n".join(distribution.section(rows)))
    return 0


if __name__ == "__main__":
    answer(ACTS)
    raise SystemExit(main())
