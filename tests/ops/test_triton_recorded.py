"""Calls that are played back give the bits of calls that are not, in Triton's interpreter: kernels are launched by addresses alone, as a
GPU's C functions are."""

import ctypes
import os

import numpy as np
import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from needlework.ops.runtime import launcher, precompile, recorded, recording
from needlework.ops.specs import specs
from needlework.testing.compare import differentiate, leaves, make
from tests.ops.test_remembered import lasting  # noqa: F401 (a fixture)

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")

RULES = (
    "delta/gla", "delta/grouped", "delta/gated", "delta/kda", "delta/given", "delta/previous", "qdelta", "ccq", "lucid", "lucid/window",
    "polar", "polar/grouped", "path", "path/fox", "path/lucid", "mamba3", "carve", "carve/rank4",
)  # fmt: skip


class ByAddress:
    """A kernel that is launched knowing of its tensors where they lie, and their types."""

    def __init__(self, kernel, arguments, constants):
        self.kernel, self.constants = kernel, constants
        self.types = [x.base.dtype if isinstance(x, TensorDescriptor) else getattr(x, "dtype", None) for x in arguments]
        self.descriptors = [(i, {}, {}) for i, x in reversed([*enumerate(arguments)]) if isinstance(x, TensorDescriptor)]

    def start(self, grid, stream, given):
        given = [x if dtype is None else at(x, dtype) for x, dtype in zip(given, self.types, strict=True)]
        self.kernel[grid](*given, **self.constants)


def at(x, dtype):
    if isinstance(x, recording.Tile):
        return TensorDescriptor(at(x.base, dtype), *x[1:])
    if not x:
        return torch.empty(0, dtype=dtype)
    return torch.from_numpy(np.frombuffer((ctypes.c_char * 16).from_address(x), np.uint8)).view(dtype)


@pytest.fixture(autouse=True)
def bounded():
    """Not here: how large a tensor is nobody knows of its address."""


@pytest.fixture
def played(monkeypatch):
    """As if on a GPU; every call that is played back."""

    def launch(kernel, grid, arguments, constants):
        kernel[grid](*arguments, **constants)
        if (tell := launcher.told.get()) is not None:
            tell.launched(ByAddress(kernel, arguments, constants), grid, arguments)

    calls, play = [], recording.Recording.__call__
    monkeypatch.setattr(precompile, "launch", launch)
    monkeypatch.setattr(launcher, "calls_directly", lambda: True)
    monkeypatch.setattr(launcher, "current_stream", lambda: 0)
    monkeypatch.setattr(launcher, "encode", lambda tile, block: [tile])
    monkeypatch.setattr(recorded, "_on_gpu", lambda x: True)
    monkeypatch.setattr(recording.Recording, "__call__", lambda self, tensors: (calls.append(self), play(self, tensors))[1])
    return calls


def found(name, seed, dtype, **options):
    spec = next(spec for spec in specs() if spec.name == name)
    x = {n: y.to(dtype) if y.is_floating_point() else y for n, y in make(spec, 1, 40, seed).items()}
    return differentiate(lambda x: spec.chunk(**x, **options, impl="triton"), x)


@pytest.mark.parametrize("name", RULES)
def test_a_second_derivative_is_refused(name):
    """Autograd sees it by the inputs that the backward takes, for what the forward alone made has no history."""
    spec = next(spec for spec in specs() if spec.name == name)
    given = {n: x.float() for n, x in make(spec, 1, 5).items()}
    unread = ("q",) if "q_read" in given else ()
    x = {n: y.requires_grad_(n not in unread) for n, y in given.items()}
    total = sum(y.sum() for _, y in leaves(spec.chunk(**x, impl="triton")) if y.is_floating_point())
    asked = [y for n, y in x.items() if n not in unread]
    for dx in torch.autograd.grad(total, asked, create_graph=True):
        with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
            torch.autograd.grad(dx.sum(), asked)


def same(a, b):
    return all(x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
@pytest.mark.parametrize("name", RULES)
def test_a_third_call_of_a_kind_is_played_back_with_the_same_bits(name, dtype, played, monkeypatch):
    for seed in range(2):
        found(name, seed, dtype)
    del played[:]
    got = found(name, 2, dtype)
    assert len(played) >= 2  # forward and backward
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "calls_directly", lambda: False)
        assert same(got, found(name, 2, dtype))


def test_launches_of_all_content_chunks_are_one_step(played):
    for seed in range(3):
        found("carve", seed, torch.float32)
    for recording_ in played[-2:]:  # forward and backward
        chain, *others = [step for step, _ in recording_.steps if isinstance(step, recording.Chain)]
        assert len(chain.launches) > 3 and not others


def test_carve_from_a_state_is_played_back_and_looks_at_each_position(played, lasting):  # noqa: F811
    """A state's position is a new tensor at each call."""
    spec = next(spec for spec in specs() if spec.name == "carve")
    x = {n: y.float() for n, y in make(spec, 1, 20, 0).items()} | {"content_chunk": 8, "impl": "triton"}
    start = spec.chunk(**x, output_final_state=True).state
    call = lambda position: spec.chunk(**x, initial_state=start._replace(position=torch.tensor([position])))
    for position in (0, 7, 4):
        del played[:]
        call(position)
    assert len(played) == 1
    for position in (8, -1):
        with pytest.raises(ValueError, match=f"initial_state.position: {position} is not inside a content chunk"):
            call(position)


@pytest.mark.parametrize("name", RULES)
def test_documents_are_played_back_until_their_lengths_change(name, played, lasting, monkeypatch):  # noqa: F811
    ends, again = torch.tensor([0, 4, 4, 40]), torch.tensor([0, 21, 30, 40])
    for _ in range(2):
        for seed in range(4):
            del played[:]
            got = found(name, seed, torch.float32, cu_seqlens=ends)
        assert len(played) >= 2
        with monkeypatch.context() as patch:
            patch.setattr(launcher, "calls_directly", lambda: False)
            assert same(got, found(name, seed, torch.float32, cu_seqlens=ends.clone()))
        ends.copy_(again)
