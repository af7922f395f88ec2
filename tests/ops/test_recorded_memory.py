"""Memory of a recorded call: what launches alone see is one piece, and a result that is a view is made as it is returned."""

import ctypes
import random

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from needlework.ops.runtime import arena, launcher, recorded
from needlework.ops.runtime.recording import Allocation, Call, Launch


@pytest.fixture
def recordings(monkeypatch):
    """As if on a GPU: every recording that is made."""
    made, finish = [], recorded.Recorder.recording
    monkeypatch.setattr(launcher, "calls_directly", lambda: True)
    monkeypatch.setattr(launcher, "current_stream", lambda: 0)
    monkeypatch.setattr(recorded, "_on_gpu", lambda x: True)
    monkeypatch.setattr(recorded.Recorder, "recording", lambda *given: made.append(finish(*given)) or made[-1])
    return made


def put(numbers, out, *given):
    """So many float32 at an address: one more than the sum of those at others."""
    at = lambda address: np.frombuffer((ctypes.c_float * numbers).from_address(address), np.float32)
    at(out)[:] = 1 + sum(map(at, given))


class Put:
    """The same as a C function."""

    descriptors = []  # noqa: RUF012

    def start(self, grid, stream, given):
        put(grid[0], *given)


def launch(numbers, *tensors):
    put(numbers, *(x.data_ptr() for x in tensors))
    if (tell := launcher.told.get()) is not None:
        tell.launched(Put(), (numbers,), tensors)


def kinds(recording):
    return [type(step) for step, _ in recording.steps]


def program(seed):
    """A function of launches at random, each of which reads what is made before it, what it must return, and bytes of all that it makes."""
    draw = random.Random(seed)
    sizes = [draw.choice((8, 100, 1000, 5000)) for _ in range(24)]
    reads = [draw.sample(range(max(0, i - 5), i), min(i, draw.randint(1, 2))) for i in range(24)]
    returned = {23, *draw.sample(range(23), 3)}

    def function(x):
        made = []
        for size, read in zip(sizes, reads, strict=True):
            out = torch.empty(size)
            parts = [made[i] for i in read] or [x]
            numbers = min(size, *(part.numel() for part in parts))
            launch(size, out)
            launch(numbers, out, *parts)
            made.append(out)
        return tuple(made[i] for i in sorted(returned))

    def expected(x):
        made = []
        for size, read in zip(sizes, reads, strict=True):
            parts = [made[i] for i in read] or [x.numpy()]
            numbers = min(size, *(len(part) for part in parts))
            out = np.ones(size, np.float32)
            out[:numbers] = 1 + sum(part[:numbers] for part in parts)
            made.append(out)
        return [made[i] for i in sorted(returned)]

    return function, expected, 4 * sum(sizes)


@pytest.mark.parametrize("seed", range(8))
def test_what_launches_alone_see_is_one_piece_and_holds_its_numbers(seed, recordings):
    function, expected, in_all = program(seed)
    call = recorded.recorded(function)
    for n in range(4):
        x = torch.arange(6000.0) + n
        for found, wanted in zip(call(x), expected(x), strict=True):
            assert np.array_equal(found.numpy(), wanted)
    (recording,) = recordings
    sizes = [step.bytes for step, _ in recording.steps if isinstance(step, Allocation)]
    assert len(sizes) == 5  # the piece and four results
    assert sum(sizes) < in_all  # parts that are not there at one time share memory
    at = [offset for step, _ in recording.steps if isinstance(step, Launch) for _, _, offset in step.addresses]
    assert any(at) and all(offset % arena.UNIT == 0 for offset in at)


@pytest.mark.parametrize("most, count", ((63, 4), (64, 3), (20063, 3), (20064, 2)))
def test_what_would_be_too_large_stays_apart(most, count, recordings, monkeypatch):
    """Of 32, 32 and 20,000 bytes the small ones are one piece first."""
    monkeypatch.setattr(arena, "LARGEST", most)

    def function(x):
        first, large, second, last = (torch.empty(size) for size in (8, 5000, 8, 8))
        launch(8, first, x)
        launch(8, large, first)
        launch(8, second, large)
        launch(8, last, first, second)
        return last

    call = recorded.recorded(function)
    for n in range(3):
        x = torch.arange(8.0) + n
        assert torch.equal(call(x), 2 * x + 5)
    assert kinds(recordings[0]).count(Allocation) == count


def test_a_view_that_is_returned_is_made_as_it_is(recordings):
    def function(x):
        first, second = torch.empty(6, 4), torch.empty(24)
        launch(24, first, x)
        launch(24, second, first)
        return first.view(2, 12).t(), second

    call = recorded.recorded(function)
    for n in range(3):
        x = torch.arange(24.0) + n
        first, second = call(x)
        assert torch.equal(first, (x + 1).view(2, 12).t()) and torch.equal(second, x + 2)
    assert first.stride() == (1, 12)
    assert kinds(recordings[0]) == [Allocation, Allocation, Launch, Launch]


@pytest.mark.parametrize(
    "rest",
    [
        lambda made: (made[1:], None),  # not all of it
        lambda made: (made[:2], None),
        lambda made: (made.view(24), made.view(4, 6)),  # two results of one memory
        lambda made: (made.view(24), made.sum(0)),  # PyTorch reads it
        lambda made: (made.view(24), made.t().exp()),
        lambda made: (made.view(24).zero_(), None),  # and changes it
        lambda made: (made.view(24).zero_().view(4, 6), None),
        lambda made: (made.view(24), made),
    ],
)
def test_what_somebody_else_sees_stays_as_it_was_made(rest, recordings):
    def function(x):
        made = torch.empty(6, 4)
        launch(24, made, x)
        return rest(made)

    call = recorded.recorded(function)
    for n in range(3):
        x = torch.arange(24.0) + n
        for found, wanted in zip(call(x), rest((x + 1).view(6, 4)), strict=True):
            assert (found is wanted is None) or torch.equal(found, wanted)
    assert Call in kinds(recordings[0])
