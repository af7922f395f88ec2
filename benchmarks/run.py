"""Time the kernels beside their peers on this GPU and write benchmarks/results/<device>.json.

    python benchmarks/run.py [--only qdelta] [--out benchmarks/results] [--no-cold]

Every row: op, impl, shape, dtype, pass, ms, peak_mib, peer, peer_ms, ratio (ours ÷ peer), floor_ms, bar, error_over_budget,
device, torch, triton, commit. Before a case is timed its outputs and gradients are compared with the float64 definition at a
shorter length; a case over its budget is not reported, and the exit status is 1.
"""

import argparse
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES, Case
from timing import ceilings, cold, median, passes, peak

HALF = ("q", "k", "v")


def tensors(case: Case, B: int, T: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    H, K, V = (case.shape[axis] for axis in "HKV")
    return case.inputs(generator, B, T, H, K, V)


def stored(inputs: dict, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: x.to(dtype if name in HALF else torch.float32) for name, x in inputs.items()}


def ours(case: Case, **x: torch.Tensor) -> torch.Tensor:
    return case.ours(**x, impl="triton")[0]


def error(case: Case, dtype: torch.dtype, T: int = 256) -> float:
    """Largest error over outputs and gradients ÷ twice the definition's own with its operands rounded, per head."""
    from needlework.testing.errors import error_over_budget, operand

    inputs = stored(tensors(case, 1, T), dtype)
    ways = (
        (partial(ours, case), inputs),
        (lambda **x: case.definition(**x)[0], {n: x.double() for n, x in inputs.items()}),
        (lambda **x: case.definition(**x, operand=operand(dtype))[0], {n: x.float() for n, x in inputs.items()}),
    )
    cotangent = torch.randint(-16, 17, (1, T, case.shape["H"], case.shape["V"]), device="cuda") / 8
    results = []
    for function, x in ways:
        x = {n: t.detach().requires_grad_() for n, t in x.items()}
        o = function(**x)
        grads = torch.autograd.grad(o, list(x.values()), cotangent.to(o.dtype))
        results.append({"o": o.detach(), **{f"d{n}": g for n, g in zip(x, grads, strict=True)}})
    fast, exact, definition = results
    return max(error_over_budget(fast[n], exact[n], definition[n], definition[n], 2)[0] for n in fast)


def rows(case: Case, dtype: torch.dtype, limits: tuple[float, float], common: dict, with_cold: bool) -> list[dict]:
    worst = error(case, dtype)
    print(f"{case.op} {case.shape}: error {worst:.2f} × budget", flush=True)
    if not worst <= 1:
        return []
    x = stored(tensors(case, case.shape["B"], case.shape["T"]), dtype)
    mine = passes(partial(ours, case), x)
    theirs = {}
    if case.peer_call is not None:
        try:
            theirs = passes(case.peer_call(), x)
        except ModuleNotFoundError as e:
            print(f"  no peer: {e}", flush=True)
    found = []
    base = {"op": case.op, "impl": "triton", "shape": case.shape, "dtype": str(dtype).removeprefix("torch.")}
    for name in mine:
        ms, mib = median(mine[name]), peak(mine[name])
        peer_ms = median(theirs[name]) if theirs else None
        peer_mib = peak(theirs[name]) if theirs else None
        row = base | {
            "pass": name, "ms": ms, "peak_mib": mib, "peer": case.peer if theirs else None, "peer_ms": peer_ms,
            "peer_peak_mib": peer_mib, "ratio": ms / peer_ms if theirs else None, "floor_ms": case.floor(name, *limits),
            "bar": case.bars.get(name), "error_over_budget": worst,
        }  # fmt: skip
        found.append(row | common)
        print(
            f"  {name}: {ms:.3f} ms, {mib:.0f} MiB; peer {peer_ms} ms, {peer_mib} MiB; ratio {row['ratio']}, bar {row['bar']}; "
            f"floor {row['floor_ms']:.3f}",
            flush=True,
        )
    if with_cold:
        ms = cold(Path(__file__), "--cold", str(CASES.index(case)))
        found.append(base | {"pass": "cold", "ms": ms, "peak_mib": None, "peer": None, "peer_ms": None, "ratio": None,
                             "floor_ms": None, "bar": 10_000.0, "error_over_budget": worst} | common)  # fmt: skip
        print(f"  cold first forward + backward: {ms / 1e3:.1f} s", flush=True)
    return found


def first_call(case: Case) -> None:
    x = stored(tensors(case, 1, 512), torch.bfloat16)
    torch.cuda.synchronize()
    start = time.perf_counter()
    call = passes(partial(ours, case), x)["fwd+bwd"]
    call()
    torch.cuda.synchronize()
    print(1e3 * (time.perf_counter() - start))


def commit() -> str:
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="cases whose op has this name")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--no-cold", action="store_true")
    parser.add_argument("--cold", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device here: kernels are timed on a GPU")
    if options.cold is not None:
        first_call(CASES[options.cold])
        return 0
    import triton

    common = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, "commit": commit(),
    }  # fmt: skip
    limits = ceilings()
    print(f"{common}; copy {limits[0] / 1e12:.2f} TB/s, product {limits[1] / 1e12:.0f} TFLOP/s", flush=True)
    found, red = [], []
    for case in CASES:
        if options.only in (None, case.op):
            new = rows(case, torch.bfloat16, limits, common, not options.no_cold)
            found += new
            if not new:
                red.append(f"{case.op} {case.shape}")
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / f"{common['device'].replace(' ', '-').lower()}.json"
    partial_file = target.with_suffix(".partial")
    partial_file.write_text(json.dumps(found, indent=1) + "\n")
    partial_file.replace(target)
    if red:
        print(f"not reported, over the error budget: {'; '.join(red)}", file=sys.stderr)
    return int(bool(red))


if __name__ == "__main__":
    raise SystemExit(main())
