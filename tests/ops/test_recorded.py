"""What is recorded of a call, and what is not."""

import ctypes
import gc
import subprocess
import sys
import weakref

import pytest
import torch

pytest.importorskip("triton")

from triton.tools.tensor_descriptor import TensorDescriptor

from needlework.ops.runtime import launch_configs, launcher, recorded, recording
from needlework.ops.runtime.recording import Recording


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(launcher, "calls_directly", lambda: True)
    monkeypatch.setattr(launcher, "current_stream", lambda: 0)
    monkeypatch.setattr(recorded, "_on_gpu", lambda x: True)


def counted(function):
    """A function, as it is recorded, and the calls of it that ran."""
    ran = []

    def noting(*arguments):
        ran.append(arguments)
        return function(*arguments)

    return recorded.recorded(noting), ran


def test_two_calls_of_a_kind_run_and_later_ones_are_played_back():
    call, ran = counted(lambda x, y, scale: (scale * (x.new_zeros(3) + x[1:].t().contiguous() @ y[:2]).relu_(), None))
    for n in range(5):
        x, y = torch.randn(3, 3), torch.randn(4)
        want = 2.0 * (x[1:].t() @ y[:2]).relu()
        o, none = call(x, y, 2.0)
        assert torch.allclose(o, want) and none is None and len(ran) == min(n + 1, 2)
    for other in ((x, y, 3.0), (x.t(), y, 2.0), (x.double(), y.double(), 2.0), (x, y[:3], 2.0)):
        call(*other)
    assert len(ran) == 6


def test_results_have_memory_of_their_own():
    call, _ = counted(lambda x: (x + 1, x.new_empty(0)))
    (first, _), (second, _), (third, empty), (fourth, _) = (call(torch.full((4,), float(n))) for n in range(4))
    assert [x[0].item() for x in (first, second, third, fourth)] == [1, 2, 3, 4] and empty.shape == (0,)


def test_the_same_tensor_twice_is_a_kind_of_its_own():
    call, ran = counted(lambda x, y: x - y)
    for _ in range(3):
        x = torch.randn(3)
        assert torch.equal(call(x, x), torch.zeros(3))
    x, y = torch.randn(3), torch.randn(3)
    assert torch.equal(call(x, y), x - y) and len(ran) == 3


def test_addresses_that_are_no_multiple_of_16_bytes_are_a_kind_of_its_own():
    call, ran = counted(lambda x: x + 1)
    x = torch.randn(9)
    for _ in range(3):
        call(x[:4])
    assert torch.equal(call(x[1:5]), x[1:5] + 1) and len(ran) == 3


kept, base = torch.arange(3.0), torch.randn(8)
part = base[2:5]


@pytest.mark.parametrize(
    ("function", "given"),
    (
        (lambda x: x * x.sum().item(), torch.randn(3)),  # a number on the host
        (lambda x: x + len(x.nonzero()), torch.randn(3)),  # a size that follows from numbers
        (lambda x: x + kept.add_(1).mul_(0), torch.randn(3)),  # changes what is kept
        (lambda x: x + kept[1:].add_(1).sum().mul(0), torch.randn(3)),  # a part of it
        (lambda x: x[:3] + part, base),  # knows a part of what is given
    ),
)
def test_what_a_note_cannot_do_again_is_called_as_it_is(function, given):
    call, ran = counted(function)
    for n in range(4):
        assert torch.equal(call(given), function(given)) and len(ran) == n + 1


def test_what_a_call_before_left_is_kept():
    call, _ = counted(lambda x: x + kept)
    found = [call(torch.full((3,), float(n))) for n in range(4)]
    assert all(torch.equal(x, n + kept) for n, x in enumerate(found))


def test_memory_is_given_back_after_its_last_use_and_what_no_result_needs_is_left_out(monkeypatch):
    made = []
    monkeypatch.setattr(recorded, "Recording", lambda *parts: made.append(Recording(*parts)) or made[-1])

    def function(x):
        x.exp()
        a = x + 1
        b = a.view(-1) * 2
        return (b.sum() + a.sum()).view(1)

    call = recorded.recorded(function)
    x = torch.randn(2, 2)
    call(x), call(x)
    (recording,) = made
    steps = recording.steps
    assert len(steps) == 7  # without exp
    freed = [register for _, last in steps for register in last]
    # exp's and one piece for all were never there, the result stays
    assert len(freed) == len(set(freed)) == recording.count - 3
    for i, (_, last) in enumerate(steps):
        later = {register for step, _ in steps[i + 1 :] for register in (*step.uses(), *step.makes())}
        assert not later & set(last)
    assert torch.equal(recording([x]), function(x))


class Copies:
    """A C function that copies eight float32 from an address to where a descriptor lies."""

    descriptors = [(1, {}, {})]  # noqa: RUF012

    def start(self, grid, stream, given):
        assert grid == (2, 1, 1) and given[2] == 3
        ctypes.memmove(given[1], given[0], 32)


def test_a_recording_holds_no_tensor_of_its_call(monkeypatch):
    """Not by a descriptor either: the memory of a call, and what autograd keeps for it, would live on."""
    monkeypatch.setattr(launcher, "encode", lambda tile, block: [tile.base])
    copies = Copies()

    def function(x):
        y = torch.empty_like(x)
        y.copy_(x)
        if (tell := launcher.told.get()) is not None:
            tell.launched(copies, (2,), (x, TensorDescriptor(y, [8], [1], [8]), 3))
        return y

    call, seen = recorded.recorded(function), []
    gc.disable()
    try:
        for n in range(4):
            x = torch.arange(8.0) + n
            y = call(x)
            assert torch.equal(x, y)
            seen += weakref.ref(x), weakref.ref(y)
            del x, y
        assert not any(x() is not None for x in seen)
    finally:
        gc.enable()


def test_a_launch_gets_the_addresses_of_its_call(monkeypatch):
    """Arguments are remembered by where their tensors lie, which is another place in other calls; of too many places none."""
    seen = []

    class Notes:
        descriptors = [(2, {}, {})]  # noqa: RUF012

        def start(self, grid, stream, given):
            seen.append(given)

    monkeypatch.setattr(launcher, "encode", lambda tile, block: [("encoded", int(tile.base))])
    monkeypatch.setattr(launcher, "ENCODED", 2)
    notes = Notes()

    def function(x, y):
        if (tell := launcher.told.get()) is not None:
            tell.launched(notes, (2,), (x, y, TensorDescriptor(x, [8], [1], [8]), x, 3))
        return x + 1

    call, tensors = recorded.recorded(function), [torch.randn(8) for _ in range(5)]
    for _ in range(2):
        call(tensors[0], tensors[1])
    pairs = [(0, 1), (1, 0), (0, 1), (2, 1), (3, 4), (1, 0), (0, 1)]
    for i, j in pairs:
        call(tensors[i], tensors[j])
    at = [x.data_ptr() for x in tensors]
    assert seen == [[at[i], at[j], ("encoded", at[i]), at[i], 3] for i, j in pairs]
    assert seen[0] is seen[2]
    (launch,) = (step for step in gc.get_objects() if type(step) is recording.Launch and step.direct is notes)
    assert len(launch.known) <= 2


def test_memory_of_the_current_gpu_is_asked_for_the_quick_way(monkeypatch):
    quick = lambda size, stride, dtype: ("quick", size)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(recording.guards, "_empty_strided_cuda", quick)
    assert recording.empty_on(torch.device("cuda", 1)) is quick
    assert recording.empty_on(torch.device("cuda", 0)) is not quick
    made = recording.empty_on(torch.device("cpu"))((2, 3), (1, 2), torch.float16)
    assert made.shape == (2, 3) and made.stride() == (1, 2) and made.dtype == torch.float16
    monkeypatch.delattr(recording.guards, "_empty_strided_cuda")
    assert recording.empty_on(torch.device("cuda", 1)) is not quick


def test_recording_does_not_load_the_compiler():
    code = """
import sys, torch
from needlework.ops.runtime import launcher, recorded
launcher.calls_directly, launcher.current_stream, recorded._on_gpu = lambda: True, lambda: 0, lambda x: True
call = recorded.recorded(lambda x: x + 1)
for _ in range(3):
    call(torch.ones(2))
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_call_that_cannot_be_held_whole_is_never_recorded():
    """A recording needs more memory than the call: a call for which there is none is made again as it is."""

    def function(x):
        if launcher.told.get() is not None:
            raise torch.OutOfMemoryError("no memory")
        return x + 1

    call, ran = counted(function)
    for n in range(4):
        assert torch.equal(call(torch.ones(2)), torch.full((2,), 2.0)) and len(ran) == n + 1 + (n > 0)


def test_nothing_is_recorded_where_launches_are_not_the_c_functions_or_a_config_is_forced(monkeypatch):
    call, ran = counted(lambda x: x + 1)
    with launch_configs.forced("delta/scalar"):
        for _ in range(4):
            call(torch.randn(3))
    monkeypatch.setattr(launcher, "calls_directly", lambda: False)
    for _ in range(4):
        call(torch.randn(3))
    assert len(ran) == 8


def test_kinds_are_forgotten_before_they_are_too_many(monkeypatch):
    monkeypatch.setattr(recorded, "RECORDINGS", 3)
    call, ran = counted(lambda x: x + 1)
    for n in (1, 2, 3, 4):
        for _ in range(3):
            assert torch.equal(call(torch.zeros(n)), torch.ones(n))
    assert len(ran) == 8
    call(torch.zeros(1))
    assert len(ran) == 9


def test_whether_a_kind_is_recorded_is_decided_once(monkeypatch):
    entered, enter = [], recorded.Recorder.__enter__
    monkeypatch.setattr(recorded.Recorder, "__enter__", lambda self: (entered.append(self), enter(self))[1])
    call = recorded.recorded(lambda x: x.sum().item() * x)
    for _ in range(5):
        call(torch.ones(2))
    assert len(entered) == 1
