"""`needlework doctor --compile-only`: every kernel of every launch config, compiled without a GPU, and what became of it."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING, NamedTuple

import torch

from needlework.ops.runtime import launch_configs
from needlework.ops.runtime.target import SMALL, TARGETS
from needlework.testing.machine_code import unwritten
from needlework.testing.processes import context, cores
from needlework.testing.targets import ENGINES, sizes

if TYPE_CHECKING:
    from needlework.ops.runtime.compile import Compiled


class Build(NamedTuple):
    """A kernel of an engine under a config, compiled; `error` where it was not, or not rightly."""

    engine: str
    config: str
    dtype: str
    K: int
    V: int
    target: str
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
    target: str
    variants: bool  # all of a kernel, or `fewer`


def tasks(full: bool, targets: Sequence[str] = ()) -> list[Task]:
    """For each target the configs that may be picked there. Without targets configs for Hopper for sm_90 and plain ones for sm_89,
    which has the least shared memory; with `full` those for Blackwell for sm_100 too, and plain ones also for sm_80.

    Each at the largest sizes at which it is taken, where registers and shared memory are scarcest, and between a table's first and
    last row one variant of each kernel; with `full` at every size, in every dtype, in all variants."""
    found = []
    for engine, files in ENGINES.items():
        table = launch_configs.rows(engine)
        for row in table:
            variants = full or row in (table[0], table[-1])
            for target, dtype, size in _cases(row, full, targets):
                found += [Task(file, engine, row.name, dtype, *size, target, variants) for file in files]
    return sorted(found, key=lambda task: -task.K * task.V)


def _cases(row: launch_configs.LaunchConfig, full: bool, targets: Sequence[str]) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """Targets, dtypes and sizes of one config."""
    for target in [TARGETS[name] for name in targets or _usual(row, full)]:
        for dtype in [name for name in row.dtypes if name != "float64"] if full else row.dtypes[:1]:
            fits = sizes(row, target.arch, dtype)
            yield from ((target.name, dtype, size) for size in (fits if full else fits[-1:]))


def _usual(row: launch_configs.LaunchConfig, full: bool) -> tuple[str, ...]:
    if row.arch >= (10, 0):
        return ("sm_100",) if full else ()
    if row.arch >= (9, 0):
        return ("sm_90",)
    return ("sm_80", "sm_89") if full else ("sm_89",)


def compile_all(full: bool, targets: Sequence[str], done: Callable[[int, int], None]) -> list[Build]:
    """Every build, in the order of the tables; `done` gets how many tasks of how many are done. Raises ValueError for a target that this
    Triton compiles nothing for."""
    from needlework.ops.runtime.compile import gpu

    for name in targets:
        gpu(TARGETS[name])
    return compiled(tasks(full, targets), done)


def compiled(todo: Sequence[Task], done: Callable[[int, int], None] = lambda count, of: None) -> list[Build]:
    """As `compile_all`, of some tasks: one process for each core."""
    builds = []
    with ProcessPoolExecutor(cores(), mp_context=context()) as pool:
        for count, future in enumerate(as_completed([pool.submit(_compile, task) for task in todo]), 1):
            builds += future.result()
            done(count, len(todo))
    places = list(ENGINES)
    return sorted(set(builds), key=lambda b: (places.index(b.engine), b.config, b.target, b.dtype, -b.K, b.kernel))


def _compile(task: Task) -> list[Build]:
    from needlework.ops.runtime.compile import compile_case, disassembled

    facts, target = task[1:-1], TARGETS[task.target]
    row = next(row for row in launch_configs.rows(task.engine) if row.name == task.config)
    of_target = row._replace(arch=target.arch)  # another table's row beside it is the one that is picked there
    module = importlib.import_module(f"needlework.ops.{task.file}")
    cases = module.compile_cases(of_target, getattr(torch, task.dtype), task.K, task.V)
    if not task.variants:
        cases = fewer(cases)
    builds = []
    for case in cases:
        try:
            made = compile_case(case, target)
            # a disassembly takes a third of a second: of those alone that have such operands
            text = disassembled(made.code) if made.wgmma and target.name == "sm_90" else None
            wrong = unwritten(text) if text else []
            error = f"ptxas assembled {len(wrong)} wgmma wrongly: {wrong[0]}" if wrong else _more_than_said(row, made)
            builds.append(Build(*facts, *made[:-1], error))
        except Exception as error:
            # Triton, LLVM and ptxas raise what they like, and the other kernels are still to be compiled
            builds.append(Build(*facts, case.kernel.__name__, error=f"{type(error).__name__}: {error}"))
    return builds


def fewer(cases: Sequence[launch_configs.Case]) -> list[launch_configs.Case]:
    """Of a kernel the variant with the most arguments; of those on a slot table, and of each number of warps, whose tiles are others,
    likewise."""
    by_arguments = sorted(cases, key=lambda case: len(case.signature))
    return list({(case.kernel, "p_slots" in case.signature, *case.options.items()): case for case in by_arguments}.values())


def _more_than_said(row: launch_configs.LaunchConfig, made: "Compiled") -> str:
    """A row for Hopper or later is also picked where a program has less: the row says what it wants."""
    said = row.shared_memory or SMALL
    if row.arch < (9, 0) or made.shared <= said:
        return ""
    return f"{made.kernel} wants {made.shared:,} bytes of shared memory, its row says {said:,}"
