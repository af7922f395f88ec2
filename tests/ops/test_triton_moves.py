"""Tokens of packed sequences moved to chunks of their own and back, against loops over tokens."""

import os
from itertools import pairwise

import pytest
import torch

from needlework.ops.common.alignment import Alignment
from needlework.ops.common.kernels.moves import moved, places

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")

CPU = torch.device("cpu")
LENGTHS = {
    "one": [37],
    "whole chunks": [16, 32],
    "empty ones": [0, 5, 0, 16, 17, 0],
    "more than a program looks at at once": [3 * i % 7 for i in range(150)],
}


def literal(ends: list[int], T: int, C: int) -> tuple[list[int], list[int], list[int]]:
    """cum, the token of each aligned row, the row of each token."""
    cum, rows, tokens = [0], [], [-1] * T
    for first, end in pairwise(ends):
        for t in range(first, end):
            tokens[t] = len(rows)
            rows.append(t)
        rows += [-1] * (-len(rows) % C)
        cum.append(len(rows) // C)
    return cum, rows, tokens


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("left", [0, 21])
def test_the_map_is_the_literal_one(lengths, left, dtype):
    C, ends = 16, [0, *torch.tensor(lengths).cumsum(0).tolist()]
    T = ends[-1] + left  # `left` tokens of no sequence
    aligned = (T // C + len(lengths)) * C
    cum, maps = places(torch.tensor(ends, dtype=dtype), T, aligned, C)
    expected, rows, tokens = literal(ends, T, C)
    assert cum.tolist() == expected
    assert maps[:aligned].tolist() == rows + [-1] * (aligned - len(rows))
    assert maps[aligned:].tolist() == tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("sizes", [(), (3,), (2, 40), (3, 300)])
def test_rows_go_where_the_map_says_and_gaps_are_zeros(sizes, dtype):
    source = torch.tensor([4, -1, 0, 0, 70, -1, 3], dtype=torch.int32)
    x = torch.randn(1, 71, *sizes).to(dtype)
    expected = torch.where((source >= 0).view(1, -1, *[1] * len(sizes)), x[:, source.clamp(min=0).long()], 0)
    assert torch.equal(moved(source, x)[0], expected)


def test_one_launch_moves_tensors_of_many_sizes_and_dtypes_and_what_is_no_tensor_stays():
    """More than a launch has room for, an empty one among them."""
    source = torch.tensor([4, -1, 0, 0, 40, -1, 3] * 30, dtype=torch.int32)
    sizes = [(), (300,), (2, 40), (1,), (0,), (3, 64), (7,), (513,), (2, 2), (5,)]
    dtypes = [torch.float32, torch.float16, torch.float64]
    given = [torch.randn(1, 41, *size).to(dtypes[i % 3]) for i, size in enumerate(sizes)]
    found = moved(source, *given[:5], None, 3, *given[5:])
    assert found[5:7] == (None, 3)
    for x, out in zip(given, (*found[:5], *found[7:]), strict=True):
        expected = torch.where((source >= 0).view(1, -1, *[1] * (x.dim() - 2)), x[:, source.clamp(min=0).long()], 0)
        assert out.dtype == x.dtype and torch.equal(out, expected)


def test_rows_of_a_wider_tensor_and_rows_that_are_not_contiguous():
    wide, source = torch.randn(1, 20, 5, 8), torch.tensor([7, -1, 19], dtype=torch.int32)
    for x in (wide[:, :, 1:3], wide[..., ::2], wide[:, ::2].expand(1, 10, 5, 8).flip(1).repeat(1, 2, 1, 1)):
        (out,) = moved(source, x)
        assert torch.equal(out[0, ::2], x[0, [7, 19]]) and not out[0, 1].any()


def test_what_is_aligned_comes_back_and_a_neighbours_nan_stays_with_it():
    ends = torch.tensor([0, 5, 5, 22, 30])
    at = Alignment.of(ends, 1, 33, 16, CPU)
    x = torch.randn(1, 33, 2, 4)
    x[0, 5:22] = float("nan")
    (there,) = at.align(x)
    assert there.shape[1] == at.T and there[0, :16].isfinite().all() and there[0, 48:].isfinite().all()
    (back,) = at.restore(there)
    torch.testing.assert_close(back[:, :30], x[:, :30], rtol=0, atol=0, equal_nan=True)
    assert not back[:, 30:].any()  # tokens of no sequence
