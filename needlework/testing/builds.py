"""`needlework doctor --compile-only`: every kernel of every launch config, compiled without a GPU, and what became of it."""

import importlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import NamedTuple

import torch

from needlework.ops.runtime import launch_configs
from needlework.testing.machine_code import unwritten
from needlework.testing.processes import context, cores
from needlework.testing.targets import ENGINES, sizes


class Build(NamedTuple):
    """A kernel of an engine under a config, compiled; `error` where it was not, or not rightly."""

    engine: str
    config: str
    dtype: str
    K: int
    V: int
    sm: int
    kernel: str
    registers: int = 0
    shared: int = 0
    spilled: int = 0
    wgmma: int = 0
    mma: int = 0
    error: str = ""


class Task(NamedTuple):
    """The launches of one file under one config."""

    file: str
    engine: str
    config: str
    dtype: str
    K: int
    V: int
    sm: int
    variants: bool  # all of a kernel, or the one with the most arguments, and of those on a slot table likewise


def tasks(full: bool) -> list[Task]:
    """Configs for Hopper for sm_90, plain ones for sm_89, which has the least shared memory; each at the largest sizes at which it is
    taken, where registers and shared memory are scarcest, and between a table's first and last row one variant of each kernel.
    With `full` at every size, in every dtype, in all variants, and for sm_80."""
    found = []
    for engine, files in ENGINES.items():
        table = launch_configs.rows(engine)
        for row in table:
            arch, variants = max(row.arch, (8, 0)), full or row in (table[0], table[-1])
            for dtype in [name for name in row.dtypes if name != "float64"] if full else row.dtypes[:1]:
                fits = sizes(row, arch, dtype)
                for sm in (90,) if arch >= (9, 0) else (80, 89) if full else (89,):
                    chosen = fits if full else fits[-1:]
                    found += [Task(file, engine, row.name, dtype, *size, sm, variants) for size in chosen for file in files]
    return sorted(found, key=lambda task: -task.K * task.V)


def compile_all(full: bool, done: Callable[[int, int], None]) -> list[Build]:
    """Every build, in the order of the tables; `done` hears how many tasks of how many."""
    todo = tasks(full)
    builds = []
    with ProcessPoolExecutor(cores(), mp_context=context()) as pool:
        for count, future in enumerate(as_completed([pool.submit(_compile, task) for task in todo]), 1):
            builds += future.result()
            done(count, len(todo))
    places = list(ENGINES)
    return sorted(set(builds), key=lambda b: (places.index(b.engine), b.config, b.sm, b.dtype, -b.K, b.kernel))


def _compile(task: Task) -> list[Build]:
    from needlework.ops.runtime.compile import compile_case, disassembled

    facts = task[1:-1]
    row = next(row for row in launch_configs.rows(task.engine) if row.name == task.config)
    module = importlib.import_module(f"needlework.ops.{task.file}")
    cases = module.compile_cases(row, getattr(torch, task.dtype), task.K, task.V)
    if not task.variants:
        by_arguments = sorted(cases, key=lambda case: len(case.signature))
        cases = {(case.kernel, "p_slots" in case.signature): case for case in by_arguments}.values()
    builds = []
    for case in cases:
        try:
            made = compile_case(case, task.sm)
            # a disassembly takes a third of a second: of those alone that have such operands
            text = disassembled(made.cubin) if made.wgmma and task.sm == 90 else None
            wrong = unwritten(text) if text else []
            error = f"ptxas assembled {len(wrong)} wgmma wrongly: {wrong[0]}" if wrong else ""
            builds.append(Build(*facts, *made[:-1], error))
        except Exception as error:
            # Triton, LLVM and ptxas raise what they like, and the other kernels are still to be compiled
            builds.append(Build(*facts, case.kernel.__name__, error=f"{type(error).__name__}: {error}"))
    return builds
