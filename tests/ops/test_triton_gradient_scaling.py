"""The power of two that gradients are divided by, in the interpreter: wherever the largest number lies, in whole blocks or behind them."""

import os

import pytest
import torch

from needlework.testing.rows import covering

pytest.importorskip("triton")
from needlework.ops.delta.gradient_scaling import BLOCK, amax, divided, scaled_kernel
from needlework.ops.runtime.precompile import run

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")

SHARES, SMALL = 4, 8  # programs, and numbers of a block: each program has several blocks
SIZES = 1, SMALL - 1, SMALL, SMALL + 1, SHARES * SMALL, 2 * SHARES * SMALL + 3


@pytest.mark.parametrize("n", SIZES)
def test_the_largest_number_is_found_wherever_it_lies(n):
    for at in range(n):
        do, peaks = torch.ones(n, dtype=torch.half), torch.empty(SHARES)
        do[at] = -3.0
        run(amax, (SHARES,), do, do, peaks, n, 0, NP=SHARES, BLK=SMALL, END=0, num_warps=1)
        assert peaks.max() == 3.0


@pytest.mark.parametrize("n, at", covering((1, BLOCK - 1, BLOCK, BLOCK + 1), ("first", "last")))
def test_a_nan_is_not_lost(n, at):
    do, peaks = torch.ones(n, dtype=torch.half), torch.empty(SHARES)
    do[0 if at == "first" else -1] = torch.nan
    run(amax, (SHARES,), do, do, peaks, n, 0, NP=SHARES, BLK=SMALL, END=0, num_warps=1)
    assert peaks.max() == torch.inf


@pytest.mark.parametrize("n", SIZES)
def test_each_number_is_divided_once(n):
    x, y, divisor = torch.arange(1, n + 1).half(), torch.full((n,), torch.nan).half(), torch.empty(1)
    run(scaled_kernel, (SHARES,), x, y, torch.full((SHARES,), 3.0), divisor, n, NP=SHARES, BLK=SMALL, num_warps=1)
    assert divisor == 4.0 and torch.equal(y, x / 4)


def test_both_gradients_are_divided_by_the_louder_s():
    do, dstate = torch.full((2 * BLOCK + 5,), 0.3).half(), torch.full((7,), -100.0)
    found, state, divisor = divided(do, dstate)
    assert divisor == 128.0 and torch.equal(found, do / 128) and torch.equal(state, dstate / 128)
