"""Precompiling: what an op would launch is noted and compiled, and nothing is launched."""

from contextlib import nullcontext

import pytest
import torch

from needlework.ops.runtime import precompile as module
from needlework.ops.runtime.precompile import meta, precompile, run


class Kernel:
    """In the place of a Triton kernel; fails to compile where `broken`."""

    def __init__(self, broken: bool = False):
        self.broken, self.launched, self.compiled = broken, [], []

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.launched.append((grid, arguments, constants))

    def warmup(self, *arguments, grid, **constants):
        self.compiled.append((arguments, constants))
        if self.broken:
            raise RuntimeError("does not compile")
        return self

    run = None


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.setattr(module, "interpreted", lambda: False)
    monkeypatch.setattr(module, "_precompiled", set())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return lambda call, key="op": precompile(torch.device("cpu"), key, call)


def test_precompiling_compiles_once_a_key_and_launches_nothing(compiled):
    kernel, x = Kernel(), torch.zeros(3)
    for _ in range(2):
        compiled(lambda: run(kernel, (1,), *meta(x), BLOCK=16))
    assert [constants for _, constants in kernel.compiled] == [{"BLOCK": 16}] and not kernel.launched
    assert kernel.compiled[0][0][0].device.type == "meta"
    run(kernel, (1,), x, BLOCK=16)
    assert len(kernel.launched) == 1 and len(kernel.compiled) == 1


def test_launches_that_differ_in_sizes_alone_are_compiled_once(compiled):
    kernel = Kernel()
    compiled(lambda: [run(kernel, (n,), torch.zeros(n), n, None, BLOCK=16) for n in (3, 4)])
    assert len(kernel.compiled) == 1
    compiled(lambda: [run(kernel, (1,), torch.zeros(3), 3, None, BLOCK=n) for n in (16, 32)], key="other")
    assert len(kernel.compiled) == 3


def test_what_does_not_compile_says_so_when_launched_and_not_before(compiled):
    compiled(lambda: run(Kernel(broken=True), (1,)))


def test_an_op_that_fails_while_precompiling_leaves_launches_as_they_were(compiled):
    kernel = Kernel()

    def call():
        run(kernel, (1,))
        raise ValueError("no such shape")

    with pytest.raises(ValueError):
        compiled(call)
    run(kernel, (1,))
    assert len(kernel.launched) == 1 and not kernel.compiled
