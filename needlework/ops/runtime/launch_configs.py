"""Which constants a kernel is launched with: a table beside the op, read once, never tuned at run time.

A row of `ops/<op>/<engine>.launch.json` names the conditions under which it may be picked (compute capability at least `arch` and
below `before`, a GPU that has its `shared_memory` for a program, operand dtypes, ranges of K and V), the constants of every kernel
of the engine, and why they are what they are. The first row that fits, and that is not on this machine's denylist, is taken. Knows no
kernel. Imports no Triton.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from needlework.ops.runtime.constant import constant
from needlework.ops.runtime.denylist import denied, denylist
from needlework.ops.runtime.target import AMD, INTERPRETER, compute_capability, on_amd, shared_memory


class Unsupported(Exception):
    """No config fits; the message says why."""


ROW_BYTES = 16  # of which the copy engine takes multiples


class LaunchConfig(NamedTuple):
    """One row: its conditions, and kernel -> constants, num_warps, num_stages. `launch["shared"]["C"]` is the chunk."""

    engine: str
    name: str
    arch: tuple[int, int]
    dtypes: tuple[str, ...]
    K: tuple[int, int]
    V: tuple[int, int]
    tma: bool
    launch: Mapping[str, Mapping[str, int]]
    why: str
    measured: str = ""  # by benchmarks/tune.py
    shared_memory: int = 0  # bytes that its kernels want of a GPU; 0: what every one has
    before: tuple[int, int] | None = None  # the compute capability from which on it does not compile

    def __hash__(self) -> int:
        return hash((self.engine, self.name))

    def misfit(self, arch: tuple[int, int], dtype: str, K: int, V: int) -> str | None:
        """What keeps this row from being picked, None if nothing does."""
        if arch < self.arch:
            return f"needs compute capability {self.arch[0]}.{self.arch[1]}"
        if self.before is not None and arch >= self.before:
            return f"does not compile for compute capability {self.before[0]}.{self.before[1]} and later"
        if shared_memory(arch) < self.shared_memory:
            return f"needs {self.shared_memory:,} bytes of shared memory, {arch[0]}.{arch[1]} has {shared_memory(arch):,}"
        if dtype not in self.dtypes:
            return f"is for {', '.join(self.dtypes)}"
        if dtype == "float64" and arch != INTERPRETER:
            return "runs float64 in the interpreter alone"
        for axis, size, (low, high) in (("K", K, self.K), ("V", V, self.V)):
            if not low <= size <= high:
                return f"is for {axis} from {low} to {high}"
        # the copy engine wants rows of a multiple of 16 bytes
        itemsize = getattr(torch, dtype).itemsize
        if self.tma and (K * itemsize % ROW_BYTES or V * itemsize % ROW_BYTES):
            return f"needs rows of a multiple of {ROW_BYTES} bytes"
        return None


# a kernel's constants by name: numbers, and Triton's dtypes and modes, of which the checker knows no type
Constants = dict[str, Any]
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")


class Case(NamedTuple):
    """One launch, enough to compile it without a GPU."""

    kernel: Any
    signature: dict[str, str]
    constexprs: Constants
    options: dict[str, int]


def split(constants: Mapping[str, Any]) -> tuple[Constants, dict[str, int]]:
    """What a kernel is launched with: the constants that it takes, and the compiler's options."""
    options = {name: x for name, x in constants.items() if name in OPTIONS}
    return {name: x for name, x in constants.items() if name not in options}, options


def absent(kernel: Any, constants: Mapping[str, Any], only_with: Mapping[str, tuple[str, ...]]) -> dict[str, None]:
    """None for each argument that `kernel` does not read under these constants. only_with: flag -> arguments that it alone reads."""
    unread = {name for flag, names in only_with.items() if not constants.get(flag, True) for name in names}
    return {name: None for name in kernel.arg_names if name in unread}


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; the interpreter and AMD's GPUs have none and take the plainest rows."""
    if interpreted():
        return INTERPRETER
    return AMD if on_amd() else compute_capability(device)


@cache
def rows(engine: str) -> tuple[LaunchConfig, ...]:
    """Every row of `engine`, "delta/scalar" for ops/delta/scalar.launch.json, in the order of preference."""
    path = Path(__file__).parents[1] / f"{engine}.launch.json"
    configs = []
    for row in json.loads(path.read_text()):
        row |= {name: tuple(row[name]) for name in ("arch", "dtypes", "K", "V", "before") if name in row}
        configs.append(LaunchConfig(engine=engine, tma=bool(row.pop("tma", 0)), **row))
    return tuple(configs)


@constant
def launch_config(engine: str, device: torch.device, dtype: torch.dtype, K: int, V: int) -> LaunchConfig:
    """The row to launch with. Raises Unsupported, which names what keeps each row from being taken."""
    facts = engine, capability(device), str(dtype).removeprefix("torch."), K, V
    return _forced_config(*facts) if engine in _forced else _picked(*facts, denylist())


@cache
def _picked(engine: str, arch: tuple[int, int], dtype: str, K: int, V: int, denylist_now: frozenset[str]) -> LaunchConfig:
    refused = []
    for row in rows(engine):
        reason = row.misfit(arch, dtype, K, V) or denied(engine, row.name, dtype)
        if reason is None:
            return row
        refused.append(f"{row.name} {reason}")
    raise Unsupported(f"{engine}: no launch config for {dtype}, K = {K}, V = {V}: {'; '.join(refused)}")


def _forced_config(engine: str, arch: tuple[int, int], dtype: str, K: int, V: int) -> LaunchConfig:
    name, overrides = _forced[engine]
    if name is None:
        row = _picked(engine, arch, dtype, K, V, denylist())
    else:
        row = next((row for row in rows(engine) if row.name == name), None)
    if row is None:
        raise Unsupported(f"{engine}: no launch config is called {name}")
    launch = {kernel: {**constants, **overrides.get(kernel, {})} for kernel, constants in row.launch.items()}
    return row._replace(launch=launch)


@constant
def misfit(engine: str, device: torch.device, dtype: torch.dtype, K: int, V: int) -> str | None:
    """Why no row can be taken, None if one can; torch.compile takes the answer as a constant."""
    try:
        launch_config(engine, device, dtype, K, V)
    except Unsupported as e:
        return str(e)


def widths(engine: str, device: torch.device, dtype: torch.dtype, K: int, V: int) -> tuple[int, int]:
    """K and V that kernels are called with. More than is given where 16 bytes keep the call from the copy engine: zeros behind each row
    cost less than the row without it."""
    wide, wide_v = _widths(engine, device, dtype, K, V)  # a tuple of a traced function's own: `constant` says why
    return wide, wide_v


@constant
def _widths(engine: str, device: torch.device, dtype: torch.dtype, K: int, V: int) -> tuple[int, int]:
    unit = ROW_BYTES // dtype.itemsize
    wide = -(-K // unit) * unit, -(-V // unit) * unit
    if wide == (K, V) or misfit(engine, device, dtype, *wide) is not None:
        return K, V
    copied = lambda *sizes: launch_config(engine, device, dtype, *sizes).tma
    return wide if copied(*wide) and not copied(K, V) else (K, V)


# one for the process: autograd runs backwards on threads of its own
_forced: dict[str, tuple[str | None, dict[str, dict[str, int]]]] = {}


def forcing() -> bool:
    """Whether a config is forced."""
    return bool(_forced)


@contextmanager
def forced(engine: str, name: str | None = None, **overrides: dict[str, int]) -> Iterator[None]:
    """Take the row `name` without its conditions, and change constants of its kernels: for doctor, tuning and tests."""
    before = dict(_forced)
    _forced[engine] = (name, overrides)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)
