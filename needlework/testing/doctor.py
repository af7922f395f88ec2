"""`needlework doctor`: whether the kernels are right on this machine, under every launch plan that may be picked here.

A compiler can get a kernel wrong without a word, and differently from one release to the next. Every rule runs on sizes of
its own under each plan, forward and backward, against the definition in float64 with the error budget; what fails is struck
off (`ops/common/struck.py`) and never taken here again.
"""

import dataclasses
import importlib
import os
import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch import Tensor

from needlework.ops.api import OpSpec
from needlework.ops.common import launch, struck
from needlework.ops.common.samples import decay, keys, normal, uniform, unit
from needlework.ops.specs import specs
from needlework.testing.checks import budgeted
from needlework.testing.compare import leaves

# engine -> the files that hold its kernels
ENGINES = {
    "delta/scalar": ("delta.triton_scalar", "delta.triton_scalar_bwd"),
    "delta/channel": ("delta.triton_channel_intra", "delta.triton_channel_scan", "delta.triton_channel_bwd"),
    "delta/step": ("delta.triton_step",),
    "ccq/curvature": ("ccq.triton_intra", "ccq.triton_scan", "ccq.triton_reverse"),
    "ccq/step": ("ccq.triton_step",),
    "carve/step": ("carve.triton_step",),
}
# spec -> the engines of its chunk form
RULES = {
    "delta/gated": "delta/scalar",
    "qdelta": "delta/scalar",
    "delta/gla": "delta/channel",
    "delta/kda": "delta/channel",
    "delta/gdn2": "delta/channel",
    "delta/previous": "delta/channel",
}
STYLES = ("random", "identical", "strong")
SIZES = ((64, 64), (128, 128), (256, 512))
HALF = (torch.bfloat16, torch.float16)


class Verdict(NamedTuple):
    """One rule under one plan: error ÷ budget, at most 1 if right; `failing` says what is not."""

    op: str
    engine: str
    plan: str
    dtype: str
    K: int
    V: int
    T: int
    style: str
    ratio: float | None
    failing: tuple[str, ...]


def sample(rule: str, K: int, V: int, generator: torch.Generator, B: int, T: int, style: str) -> dict[str, Tensor]:
    """The inputs of a rule at these sizes: one key head with two value heads."""
    H, HV = 1, 2
    x = {"q": unit(normal(generator, B, T, H, K)), "k": keys(generator, B, T, H, K, style)}
    if rule.startswith("ccq"):
        x["eta"] = uniform(generator, 0.02, 0.98, B, T, HV)
        return x | ({"g": decay(generator, B, T, H, style=style)} if rule == "ccq/aligned" else {})
    x["v"] = normal(generator, B, T, HV, V)
    scalar = RULES[rule] == "delta/scalar"
    x["g"] = decay(generator, B, T, HV, *([] if scalar else [K]), style=style)
    if rule == "delta/gdn2":
        return x | {"erase": uniform(generator, 0, 1, B, T, HV, K), "write": uniform(generator, 0, 1, B, T, HV, V)}
    if rule != "delta/gla":
        x["beta"] = uniform(generator, 0.1, 1, B, T, HV)
    return x | ({"lam": uniform(generator, 0, 1, B, T, HV)} if rule == "qdelta" else {})


def sized(rule: str, K: int, V: int) -> OpSpec:
    """The rule's spec on these sizes, on its kernels."""
    spec = next(spec for spec in specs() if spec.name == rule)
    return dataclasses.replace(spec, inputs=partial(sample, rule, K, V), chunk=partial(spec.chunk, impl="triton"))


def cases(device: torch.device, full: bool) -> Iterator[tuple[str, launch.Plan, torch.dtype, int, int, int, str]]:
    """(rule, plan, dtype, K, V, T, style): what may be picked here; without `full` the largest size of each plan."""
    interpreted = launch.interpreted()
    arch = launch.capability(device)
    sizes = ((16, 16),) if interpreted else SIZES
    dtypes = (torch.float32,) if interpreted else (*HALF, torch.float32)
    for rule, engine in RULES.items():
        for row in launch.rows(engine):
            for dtype in dtypes:
                name = str(dtype).removeprefix("torch.")
                fits = [(K, V) for K, V in sizes if row.misfit(arch, name, K, V) is None]
                for K, V in fits if full else fits[-1:]:
                    for style in STYLES if full or dtype == HALF[0] else ("strong",):
                        yield rule, row, dtype, K, V, 19 if interpreted else 150, style


def run(device: torch.device, full: bool, done: Callable[[Verdict], None]) -> list[Verdict]:
    """Every case, its verdict told as it comes, and the verdicts recorded."""
    verdicts = []
    for rule, row, dtype, K, V, T, style in cases(device, full):
        failing: dict[str, str] = {}
        ratio = None
        try:
            with launch.forced(row.engine, row.name):
                found = budgeted(sized(rule, K, V), dtype, 2, T, style, device)
            ratio = max(found.values())
            failing = {name: f"{x:.2f}" for name, x in found.items() if not x <= 1}
        except Exception as error:  # whatever a compiler or a kernel does, the other plans are still to be judged
            failing = {"": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"}
        told = tuple(f"{name} {what}".strip() for name, what in failing.items())
        name = str(dtype).removeprefix("torch.")
        verdicts.append(Verdict(rule, row.engine, row.name, name, K, V, T, style, ratio, told))
        done(verdicts[-1])
    with _kernels():
        verdicts += steps(device, done)
    outcome: dict[str, str | None] = {}
    for v in verdicts:
        key = f"{v.engine}/{v.plan}"
        outcome[key] = outcome.get(key) or (
            f"{v.op}, {v.dtype}, K {v.K}, V {v.V}: {'; '.join(v.failing)}" if v.failing else None
        )
    if not launch.interpreted():
        struck.record(outcome)
    return verdicts


@contextmanager
def _kernels() -> Iterator[None]:
    """Steps take no `impl`: the environment asks for the kernels."""
    before = os.environ.get("NEEDLEWORK_IMPL")
    os.environ["NEEDLEWORK_IMPL"] = "triton"
    try:
        yield
    finally:
        del os.environ["NEEDLEWORK_IMPL"]
        os.environ |= {} if before is None else {"NEEDLEWORK_IMPL": before}


def steps(device: torch.device, done: Callable[[Verdict], None]) -> list[Verdict]:
    """Each step kernel under each of its plans against the definition in float64, five tokens on the specs' own sizes."""
    out = []
    for rule, engine in {"delta/gated": "delta/step", "qdelta": "delta/step", "delta/gdn2": "delta/step",
                         "ccq/aligned": "ccq/step", "carve": "carve/step"}.items():  # fmt: skip
        spec = next(spec for spec in specs() if spec.name.split("/")[0] == rule or spec.name == rule)
        inputs = {n: x.float() for n, x in spec.inputs(torch.Generator().manual_seed(0), 2, 5, "random").items()}
        exact = spec.recurrent(**{n: x.double() for n, x in inputs.items()})[0]
        for row in launch.rows(engine):
            failing: tuple[str, ...] = ()
            ratio = None
            try:
                with launch.forced(engine, row.name):
                    ratio = float((_by_steps(spec, inputs, device) - exact).norm() / exact.norm()) / 1e-5
                failing = () if ratio <= 1 else (f"o {ratio:.2f}",)
            except Exception as error:
                failing = (f"{type(error).__name__}: {error}".splitlines()[0],)
            out.append(Verdict(f"{rule} (step)", engine, row.name, "float32", 16, 12, 5, "random", ratio, failing))
            done(out[-1])
    return out


def _by_steps(spec: OpSpec, inputs: dict[str, Tensor], device: torch.device) -> Tensor:
    place = lambda x: x.to(device, torch.float32) if x.is_floating_point() else x.to(device)
    table = spec.table(2)
    table = place(table) if isinstance(table, Tensor) else type(table)(*map(place, table))
    now = {n: x.to(device) for n, x in inputs.items()}
    rows = []
    for t in range(5):
        result = spec.step(**{n: x[:, t] if n in spec.tokens else x for n, x in now.items()}, state=table)
        rows.append(next(x for _, x in leaves(result if isinstance(result, tuple) else (result,))))
    return torch.stack(rows, 1).double().cpu()


class Build(NamedTuple):
    """A kernel of an engine under a plan, compiled; `error` where it was not."""

    engine: str
    plan: str
    sm: int
    kernel: str
    registers: int = 0
    shared: int = 0
    spilled: int = 0
    wgmma: bool = False
    error: str = ""


def compile_all(full: bool, done: Callable[[Build], None]) -> list[Build]:
    """Every kernel under every plan, for sm_90 or, where a plan asks for nothing, sm_80 (and sm_89 if `full`): no GPU is needed."""
    tasks = [
        (engine, file, index, sm)
        for engine, files in ENGINES.items()
        for index, row in enumerate(launch.rows(engine))
        for sm in ((90,) if row.arch >= (9, 0) else (80, 89) if full else (80,))
        for file in files
    ]
    builds = []
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for found in pool.map(_compile, tasks):
            for build in found:
                builds.append(build)
                done(build)
    return builds


def _compile(task: tuple[str, str, int, int]) -> list[Build]:
    from needlework.ops.common.triton_compile import compile_case

    engine, file, index, sm = task
    row = launch.rows(engine)[index]
    K, V = row.K[1], min(row.V[1], 2 * row.K[1])
    try:
        made = importlib.import_module(f"needlework.ops.{file}").compile_cases(row, torch.bfloat16, K, V)
    except Exception as error:
        return [Build(engine, row.name, sm, file, error=f"{type(error).__name__}: {error}")]
    builds = []
    for case in made:
        try:
            builds.append(Build(engine, row.name, sm, *compile_case(case, sm)))
        except Exception as error:
            builds.append(Build(engine, row.name, sm, case.kernel.__name__, error=f"{type(error).__name__}: {error}"))
    return builds


def facts() -> dict[str, Any]:
    """What a verdict depends on."""
    from needlework.ops.common.triton_compile import versions

    return {"machine": struck.machine(), "python": platform.python_version(), "torch": torch.__version__, **versions()}


def warning(facts: dict[str, Any], arch: tuple[int, int]) -> str | None:
    """What is known of this combination of tools."""
    number = lambda text: tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())
    if arch == (9, 0) and (3, 4) <= number(facts["triton"]) < (3, 7, 1) and number(facts["ptxas"]) < (13, 3):
        return (
            f"Triton {facts['triton']} with ptxas {facts['ptxas']} miscompiles products whose first operand is a transposed "
            "accumulator on Hopper. The kernels here do not form one, and doctor has checked each of them."
        )


def report(verdicts: list[NamedTuple], known: dict[str, Any]) -> dict[str, Any]:
    return {"made": time.strftime("%Y-%m-%d %H:%M:%S"), **known, "rows": [v._asdict() for v in verdicts]}
