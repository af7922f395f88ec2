"""A kernel in the interpreter that looks outside of its tensors is found."""

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
