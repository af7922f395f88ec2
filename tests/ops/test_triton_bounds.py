"""A kernel in the interpreter that looks outside of its tensors is found, and one whose programs store different numbers to one place."""

import os
from contextlib import nullcontext

import pytest
import torch
import triton
import triton.language as tl

from .interpreter import RELEASE

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter"),
    pytest.mark.skipif(not triton.__version__.startswith(RELEASE), reason="looks by functions of another Triton"),
]


@triton.jit
def copy_kernel(p_x, p_y, LOADED: tl.constexpr, STORED: tl.constexpr, ADDS: tl.constexpr):
    i = tl.arange(0, 8)
    x = tl.load(p_x + i, mask=i < LOADED, other=0.0)
    if ADDS:
        tl.atomic_add(p_y + i, x, mask=i < STORED)
    else:
        tl.store(p_y + i, x, mask=i < STORED)


@pytest.mark.parametrize(
    ("loaded", "stored", "adds", "found"),
    [
        (5, 5, False, None),
        (5, 5, True, None),
        (6, 5, False, "copy_kernel loads outside of the tensor at whose bytes 0 to 20 of 20 it looks"),
        (5, 6, False, "copy_kernel stores outside"),
        (5, 6, True, "copy_kernel changes outside"),
    ],
)
def test_numbers_outside_are_found(loaded, stored, adds, found):
    """In memory that is the caller's own, where x ends and y begins too."""
    memory = torch.arange(24.0)
    x, y = memory[4:9], memory[9:14]
    expected = x + y if adds else x.clone()
    with pytest.raises(triton.runtime.errors.InterpreterError, match=found) if found else nullcontext():
        copy_kernel[(1,)](x, y, LOADED=loaded, STORED=stored, ADDS=adds)
    assert found or torch.equal(y, expected)


@triton.jit
def meet_kernel(p_y, p_count, APART: tl.constexpr, FIRST: tl.constexpr, OWN: tl.constexpr):
    """Each program stores its OWN number, or all one, four times; those from FIRST on count before."""
    i = tl.program_id(0)
    if i >= FIRST:
        tl.atomic_add(p_count, 1)
    tl.store(p_y + i * APART + tl.arange(0, 4), i if OWN else 7)


@pytest.mark.parametrize(
    ("apart", "first", "own", "found"),
    [(4, 2, True, False), (3, 2, True, True), (3, 1, True, False), (0, 0, True, False), (3, 2, False, False)],
)
def test_two_programs_that_store_to_one_place_are_found_unless_the_later_one_has_counted(apart, first, own, found):
    text = "meet_kernel stores where another program has, at bytes 12 to 12 of 32"
    y, count = torch.zeros(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(triton.runtime.errors.InterpreterError, match=text) if found else nullcontext():
        meet_kernel[(2,)](y, count, APART=apart, FIRST=first, OWN=own)


def test_a_launch_may_store_where_another_has():
    x, y = torch.arange(8.0), torch.zeros(8)
    for _ in range(2):
        copy_kernel[(1,)](x, y, LOADED=8, STORED=8, ADDS=False)
    assert torch.equal(x, y)
