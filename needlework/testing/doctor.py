"""`needlework doctor`: whether the kernels are right on this machine, under every launch config that may be picked here.

A compiler can miscompile a kernel silently, and differently from one release to the next. Every rule runs under each config,
forward and backward, twice, against the definition in float64 by the error budget (`verdict.py`); what is wrong goes on
the denylist (`ops/runtime/denylist.py`) and is never taken here again. Which rules and configs: `targets.py`.
"""

import math
import platform
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from needlework.ops.runtime import denylist, launch_configs
from needlework.ops.runtime.target import Target
from needlework.testing.helpers import judged
from needlework.testing.processes import cores
from needlework.testing.targets import RULES, Rule, sizes, taken
from needlework.testing.verdict import FORMS, GROWN, ROWS, SEVERAL, SHORT, STEP, Task, Verdict

# bytes of the GPU that a process may want: the context, the kernels' code, a token loop's saved states
A_PROCESS = 5 * 2**30
USUAL = (128, 128)  # K, V


def tasks(device: torch.device, full: bool) -> list[Task]:
    """What may be picked here, longest first."""
    interpreted = launch_configs.interpreted()
    arch = launch_configs.capability(device)
    dtypes = ("float32",) if interpreted else ("bfloat16", "float16", "float32")
    found: list[Task] = []
    for rule, engine in ((x, engine) for x in RULES for engine in (x.chunk, x.step) if engine):
        steps = SEVERAL if rule.several else STEP
        for row, dtype in product(launch_configs.rows(engine), dtypes):
            if interpreted:
                chosen = [(size, SHORT) for size in sizes(row, arch, dtype, rule.keys_alone)[:1]]
            else:
                chosen = _chosen(rule, row, arch, dtype, full)
            for size, forms in chosen:
                found.append(
                    Task(rule.spec, engine, row.name, dtype, size[0], size[1], steps if engine == rule.step else forms)
                )
    if interpreted:  # that the doctor works; the kernels have the battery there
        found = list({task.engine: task for task in reversed(found)}.values())
    # by what a task takes, roughly, most of it compilation: the longest begin, or the last would end alone
    return sorted(found, key=lambda task: (task.forms in (STEP, SEVERAL), -len(task.forms) * math.sqrt(task.K * task.V)))


def _chosen(
    rule: Rule, row: launch_configs.LaunchConfig, arch: tuple[int, int], dtype: str, full: bool
) -> list[tuple[tuple, tuple]]:
    """Sizes and forms: with `full` all. Without, the rules that cover the kernels at the largest size that takes the row now, in every
    dtype, in the first one by every form; the others in bfloat16 at the row and the size that most models have. Each size is another
    compilation of every kernel."""
    every = (*ROWS, *GROWN) if rule.grows and dtype == "bfloat16" else ROWS
    if full:
        return [(size, every) for size in sizes(row, arch, dtype, rule.keys_alone)]
    here = lambda row, dtype: taken(row, arch, dtype, rule.keys_alone)
    found = here(row, dtype)
    if found and rule.covers:
        return [(found[-1], every if dtype == next(name for name in row.dtypes if here(row, name)) else SHORT)]
    usual = USUAL in found and dtype == "bfloat16" and not denylist.denied(row.engine, row.name, dtype)
    return [(USUAL, SHORT)] if usual else []


def run(device: torch.device, full: bool, done: Callable[[Verdict, int, int], None]) -> list[Verdict]:
    """Every verdict; `done` gets each as it comes, its number and how many there will be. Failures go on the denylist, and what is
    taken in the place of a config that went there is judged too."""
    verdicts: list[Verdict] = []
    seen: set[Task] = set()
    while todo := [task for task in tasks(device, full) if task not in seen]:
        total = len(verdicts) + sum(len(task.forms) for task in todo)
        for verdict in judged(device, todo, _processes(device)):
            verdicts.append(verdict)
            done(verdict, len(verdicts), total)
        if not launch_configs.interpreted():
            denylist.record(outcome(verdicts, full))
        seen |= set(todo)
    order = {rule.spec: i for i, rule in enumerate(RULES)}
    return sorted(verdicts, key=lambda v: (v.form in SEVERAL, order[v.op], v.config, v.dtype, v.K, tuple(FORMS).index(v.form)))


def outcome(verdicts: list[Verdict], full: bool) -> dict[str, str | None]:
    """ "engine/config/dtype" -> why it is on the denylist. Only a full run removes an entry: a short one does not repeat what failed."""
    found: dict[str, str | None] = {}
    for v in verdicts:
        key = f"{v.engine}/{v.config}/{v.dtype}"
        if v.wrong:
            found.setdefault(key, f"{v.op}, {v.form}, K {v.K}, V {v.V}: {'; '.join(v.failing)}")
    passed = {f"{v.engine}/{v.config}/{v.dtype}": None for v in verdicts} if full else {}
    return passed | found


def _processes(device: torch.device) -> int:
    if device.type != "cuda":
        return cores()
    return max(1, min(cores(), torch.cuda.mem_get_info()[0] // A_PROCESS))


def facts(targets: Sequence[Target] = ()) -> dict[str, Any]:
    """What a verdict depends on; the tools are those for the GPU that is here, or for the newest target."""
    from needlework.ops.runtime.compile import versions

    arch = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    arch = max((target.arch for target in targets), default=arch)
    known = {"machine": denylist.machine(), "python": platform.python_version(), "torch": torch.__version__}
    return known | {"cuda": torch.version.cuda, "capability": f"{arch[0]}.{arch[1]}", **versions(10 * arch[0] + arch[1])}


def warning(facts: dict[str, Any], arch: tuple[int, int]) -> str | None:
    """What is known of this combination of tools."""
    number = lambda text: tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())
    if arch == (9, 0) and (3, 4) <= number(facts["triton"]) < (3, 7, 1) and number(facts["ptxas"]) < (13, 3):
        return (
            f"Triton {facts['triton']} with ptxas {facts['ptxas']}: Triton 3.4 to 3.7.0 silently miscompiles on Hopper a product whose "
            "first operand is the result of another, transposed in registers, and some 64-wide kernels of four warps "
            "(flash-linear-attention issues 640 and 984). The kernels here form no such product; whether each is right under this "
            "compiler is what doctor measures on the GPU."
        )


def report(rows: Sequence[NamedTuple], known: dict[str, Any], seconds: float) -> dict[str, Any]:
    made = {"made": time.strftime("%Y-%m-%d %H:%M:%S"), "seconds": round(seconds, 1)}
    return {**made, **known, "denylist": str(denylist.path()), "rows": [row._asdict() for row in rows]}
