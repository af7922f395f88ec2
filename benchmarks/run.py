"""Time the kernels beside their peers on this GPU and write benchmarks/results/<device>.json.

    python benchmarks/run.py [--only qdelta kda/B lucid polar path paged step cold] [--graphs] [--out benchmarks/results] [--no-warm]

Every row: op, impl, shape, dtype, pass, ms, peak_mib, peer, peer_ms, ratio (ours ÷ peer; of a step its share of the copy
bandwidth, of pass "share" that of the copy or of the matrix product), floor_ms, bar, error_over_budget, device, torch, triton, commit; with
--graphs also graph_ms, peer_graph_ms. Before a case is timed its outputs, states and gradients are compared with the float64 definition; a
case over its budget is not reported, its old rows go, and the exit status is 1. Rows are kept by key and written one by one: runs add up,
and one that is cut short loses nothing.
"""

import argparse
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import results
from attention_cases import CASES as ATTENTION
from cases import CASES, Case
from judge import judge
from steps import steps
from timing import ceilings, cold, median, passes, peak, replay

CASES = CASES + ATTENTION
DEVICE, DTYPE = "cuda", torch.bfloat16
COLD_BAR = 10_000.0
say = lambda *words: print(*words, flush=True)


class Report:
    """Rows of one run: what they share, where they go, and what is missing."""

    def __init__(self, root: Path, commit: str):
        import triton

        self.common = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        self.common["commit"] = commit
        self.file = results.path(self.common["device"], root)
        self.missing: list[str] = []

    def put(self, **row: object) -> None:
        keys = ("op", "impl", "shape", "dtype", "pass", "ms", "peak_mib", "peer", "peer_ms", "peer_peak_mib", "ratio", "floor_ms",
                "bar", "error_over_budget")  # fmt: skip
        row = {"impl": "triton"} | row
        results.put(self.file, {name: row.get(name) for name in keys} | self.common)

    def lack(self, key: str, why: str) -> None:
        say(f"{key}: {why}")
        self.missing.append(f"{key}: {why}")


def warm(cases: list[Case]) -> list[subprocess.Popen]:
    """Compile the peers, each in a process of its own: 60 to 220 s at a first call. Only what they compile is kept: which
    configuration is fastest is found again by the process that times them, alone on the GPU."""
    env = os.environ | {"FLA_CACHE_RESULTS": "0", "TRITON_CACHE_AUTOTUNING": "0"}
    firsts = {(case.peer.name, case.shape["K"], case.shape["V"]): case for case in cases if case.peer and not case.peer.ours}
    return [
        subprocess.Popen(
            [sys.executable, __file__, "--warm", case.key], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for case in firsts.values()
    ]


def finish(processes: list[subprocess.Popen], seconds: float = 300) -> None:
    until = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < until:
        time.sleep(0.2)


def judged(cases: list[Case], report: Report) -> dict[str, float]:
    """case -> its error ÷ budget, of the cases that are right."""
    found = {}
    for case in cases:
        try:
            ratio, name = judge(case, DEVICE, DTYPE)
        except Exception as error:
            report.lack(case.key, f"skipped: {why(error)}")
            continue
        finally:
            torch.cuda.empty_cache()
        if ratio <= 1:
            say(f"{case.key}: error {ratio:.2f} × budget ({name})")
            found[case.key] = ratio
        else:
            report.lack(case.key, f"NOT REPORTED: the error of {name} is {ratio:.2f} × its budget")
            results.drop(report.file, case.op, case.shape)
    return found


def peer_passes(case: Case, x: dict[str, torch.Tensor], report: Report) -> dict:
    if case.peer is None:
        return {}
    try:
        return passes(case.peer.load(), case.peer_inputs(x))
    except ModuleNotFoundError as error:
        say(f"{case.key}: timed alone: {error}")
    except Exception as error:
        report.lack(case.key, f"timed alone, its peer failed: {why(error)}")
    return {}


def timed(case: Case, ratio: float, limits: tuple[float, float], report: Report) -> None:
    x = case.tensors(DEVICE, DTYPE, case.shape["B"], case.shape["T"])
    mine, theirs = passes(case.ours, x), peer_passes(case, x, report)
    for name, call in mine.items():
        ms, peer_ms = median(call), median(theirs[name]) if theirs else None
        row = {
            "op": case.op, "shape": case.shape, "dtype": str(DTYPE).removeprefix("torch."), "pass": name, "ms": ms,
            "peak_mib": peak(call), "peer": case.peer.name if theirs else None, "peer_ms": peer_ms,
            "peer_peak_mib": peak(theirs[name]) if theirs else None, "ratio": ms / peer_ms if theirs else None,
            "floor_ms": case.floor(name, *limits), "bar": case.bars.get(name), "error_over_budget": ratio,
        }  # fmt: skip
        report.put(**row)
        shown = {
            n: row[n] and round(row[n], 3) for n in ("ms", "peer_ms", "ratio", "bar", "peak_mib", "peer_peak_mib", "floor_ms")
        }
        say(f"{case.key} {name}: {shown}")
        if name == "fwd" and case.share:
            floor = row["floor_ms"]
            row |= {"pass": "share", "peer": "matrix product", "peer_ms": floor, "ratio": floor / ms, "bar": case.share}
            report.put(**row)
            say(f"{case.key}: {100 * floor / ms:.1f} % of the matrix product's rate")


def timed_in_graph(case: Case, report: Report) -> None:
    """Added to the case's rows: both sides replayed from a CUDA graph, what they cost the GPU when the host is not waited for."""
    x = case.tensors(DEVICE, DTYPE, case.shape["B"], case.shape["T"])
    mine, theirs = passes(case.ours, x), peer_passes(case, x, report)
    for name, call in mine.items():
        graph_ms, peer_graph_ms = median(replay(call)), median(replay(theirs[name])) if theirs else None
        row = {"op": case.op, "impl": "triton", "shape": case.shape, "dtype": str(DTYPE).removeprefix("torch."), "pass": name}
        results.put(report.file, results.get(report.file, row) | {"graph_ms": graph_ms, "peer_graph_ms": peer_graph_ms})
        say(f"{case.key} {name} in a graph: {graph_ms:.3f}, peer {peer_graph_ms}")


def timed_steps(chosen, bandwidth: float, report: Report) -> None:
    for step in filter(chosen, steps()):
        try:
            ratio = step.judge(DEVICE)
            if not ratio <= 1:
                report.lack(step.key, f"NOT REPORTED: the error is {ratio:.2f} × its budget")
                results.drop(report.file, step.op, step.shape)
                continue
            ms, moved = step.time(DEVICE)
            floor = 1e3 * moved / bandwidth
            report.put(op=step.op, shape=step.shape, dtype=step.dtype, **{"pass": step.kind}, ms=ms, peer="device copy",
                       peer_ms=floor, ratio=floor / ms, floor_ms=floor, bar=step.bar, error_over_budget=ratio)  # fmt: skip
            say(f"{step.key}: {1e3 * ms:.1f} us, {100 * floor / ms:.1f} % of the copy bandwidth, error {ratio:.2f} × budget")
        except Exception as error:
            report.lack(step.key, f"skipped: {why(error)}")
        finally:
            torch.cuda.empty_cache()


def timed_cold(case: Case, report: Report) -> None:
    ms = cold(Path(__file__), "--cold", case.key)
    shape = case.shape | {"B": 1, "T": 512}
    report.put(op=case.op, shape=shape, dtype=str(DTYPE).removeprefix("torch."), **{"pass": "cold"}, ms=ms, bar=COLD_BAR)
    say(f"cold/{case.key}: {ms / 1e3:.1f} s")


def first_call(case: Case) -> None:
    leaves = {name: y.requires_grad_() for name, y in case.tensors(DEVICE, DTYPE, 1, 512).items()}
    torch.cuda.synchronize()
    start = time.perf_counter()
    o = case.ours(**leaves)
    torch.autograd.grad(o, list(leaves.values()), torch.ones_like(o))
    torch.cuda.synchronize()
    print(1e3 * (time.perf_counter() - start))


def warm_peer(case: Case) -> None:
    x = case.tensors(DEVICE, DTYPE, case.shape["B"], case.shape["T"])
    passes(case.peer.load(), case.peer_inputs(x))["fwd+bwd"]()
    torch.cuda.synchronize()


def why(error: Exception) -> str:
    """Its line that names CUDA's error, or its last: of what a process said, the exception."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {next((line for line in lines if 'CUDA error' in line), lines[-1])[:400]}"


def commit() -> str:
    run = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", metavar="KEY", help="gated, gated/A, lucid, polar, step, step/carve, cold, cold/kda, …"
    )
    parser.add_argument("--out", type=Path, default=results.ROOT)
    parser.add_argument("--commit", default=commit(), help="what the rows are said to be of, where git cannot tell")
    parser.add_argument("--graphs", action="store_true", help="also replayed from CUDA graphs")
    parser.add_argument("--no-warm", action="store_true", help="the peers' kernels are compiled already")
    for task in ("--cold", "--warm"):
        parser.add_argument(task, metavar="KEY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device here: kernels are timed on a GPU")
    by_key = {case.key: case for case in CASES}
    if options.cold or options.warm:
        first_call(by_key[options.cold]) if options.cold else warm_peer(by_key[options.warm])
        return 0
    wanted = lambda key: options.only is None or any(key == only or key.startswith(f"{only}/") for only in options.only)
    start = time.monotonic()
    report = Report(options.out, options.commit)
    cases = [case for case in CASES if wanted(case.key)]
    processes = [] if options.no_warm else warm(cases)
    try:
        right = judged(cases, report)
        say(f"[{time.monotonic() - start:.0f} s] judged")
        finish(processes)
    finally:
        for process in processes:
            process.kill()
    say(f"[{time.monotonic() - start:.0f} s] peers compiled")
    limits = ceilings()
    say(f"{report.common}; copy {limits[0] / 1e12:.2f} TB/s, product {limits[1] / 1e12:.0f} TFLOP/s")
    timed_steps(lambda step: wanted(step.key), limits[0], report)
    for case in cases:
        if case.key in right:
            _guarded(case.key, report, timed, case, right[case.key], limits, report)
            say(f"[{time.monotonic() - start:.0f} s]")
    if options.graphs:  # last: a capture that fails may leave the stream unusable
        for case in cases:
            if case.key in right:
                _guarded(f"{case.key} in a graph", report, timed_in_graph, case, report)
    firsts = {case.op.partition("/")[0]: case for case in reversed(CASES)}
    for op, case in firsts.items():
        if wanted(f"cold/{op}") and (case not in cases or case.key in right):
            _guarded(f"cold/{op}", report, timed_cold, case, report)
    say(f"[{time.monotonic() - start:.0f} s] {report.file}")
    if report.missing:
        print("not reported:\n  " + "\n  ".join(report.missing), file=sys.stderr)
    return int(bool(report.missing))


def _guarded(key: str, report: Report, call, *arguments) -> None:
    """One case that fails does not take the others with it."""
    try:
        call(*arguments)
    except Exception as error:
        traceback.print_exc()
        report.lack(key, f"failed: {why(error)}")
    finally:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    raise SystemExit(main())
