"""The kernels of a first call, compiled side by side in threads before it. Ops launch through `run`: `precompile` calls an op on
meta tensors, where `run` notes each launch instead, and compiles what it noted.

Most of a compilation is MLIR, LLVM, ptxas and the C compiler of the launcher, none of which hold Python's lock. A note keeps the
arguments of the launch, hence the same specialisation: Triton then finds the kernel in its own table.
"""

import os
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import torch
from torch import Tensor
from triton import JITFunction
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from needlework.ops.runtime.each import Ts, each
from needlework.ops.runtime.launch_configs import interpreted
from needlework.ops.runtime.launcher import launch
from needlework.ops.runtime.target import for_amd, on_amd

_launches: ContextVar[dict[Hashable, Callable[[], None]] | None] = ContextVar("launches to compile", default=None)
_precompiled: set[Hashable] = set()
_threads = os.cpu_count()
AMD = on_amd()


def run(kernel: JITFunction, grid: tuple[int, ...], *arguments: object, **constants: object) -> CompiledKernel | None:
    """kernel[grid](...); while precompiling a note of it, and None."""
    if AMD:
        constants = for_amd(constants)
    launches = _launches.get()
    if launches is None:
        return launch(kernel, grid, arguments, constants)
    # asking for `run` builds the C launcher and loads the kernel
    key = kernel, *map(_type, arguments), *sorted(constants.items())
    launches[key] = lambda: kernel.warmup(*arguments, grid=grid, **constants).run
    return None


def compile_in(threads: int) -> None:
    """For processes that compile side by side: more threads than cores wait for one another, and cost a quarter more."""
    global _threads
    _threads = threads


def precompiling() -> bool:
    """Whether launches are noted, and tensors are meta tensors."""
    return _launches.get() is not None


def precompile(device: torch.device, key: Hashable, call: Callable[[], object]) -> None:
    """Compile everything that `call` launches, once a key. What does not compile says so when it is launched."""
    key = device, key
    if key in _precompiled or interpreted():
        return
    _precompiled.add(key)
    launches: dict[Hashable, Callable[[], None]] = {}
    token = _launches.set(launches)
    try:
        call()
    finally:
        _launches.reset(token)

    def compile_one(compilation: Callable[[], None]) -> None:
        with torch.cuda.device(device):
            compilation()

    with ThreadPoolExecutor(_threads) as threads:
        for future in [threads.submit(compile_one, compilation) for compilation in launches.values()]:
            future.exception()


def meta(*arguments: *Ts) -> tuple[*Ts]:
    """The same with meta tensors, which `call` works on."""
    return each(lambda x: torch.empty_like(x, device="meta"), *arguments)


def kind(*tensors: Tensor | None) -> Hashable:
    """What kernels are compiled for: dtypes, and sizes past batch and length."""
    return tuple(None if x is None else (x.dtype, x.shape[2:]) for x in tensors)


def _type(x: object) -> Hashable:
    """Of a kernel's argument: launches that differ in nothing else share a compilation."""
    if isinstance(x, TensorDescriptor):
        return x.base.dtype, tuple(x.block_shape)
    return getattr(x, "dtype", type(x))
