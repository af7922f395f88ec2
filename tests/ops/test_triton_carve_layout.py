"""Where CARVE's kernels find rows of content chunks, against loops over rows."""

import os

import pytest
import torch

from needlework.ops.carve.feedback.layout import Layout, of_packed

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")

CPU = torch.device("cpu")
MANY = [3 * i % 7 for i in range(150)]  # more than a program looks at at once, empty ones among them


def literal(sequences: list[tuple[int, int, int]], bases: list[int], layout: Layout, L: int, C: int) -> tuple[list, list, list]:
    """Of sequences (first given row, position, rows): the given row of each row, the row of each given one, the spans."""
    P = layout.parts * C
    sources, places = [-1] * layout.sources.numel(), [-1] * layout.places.numel()
    spans = [[[0, 0] for _ in sequences] for _ in range(layout.longest)]
    for n, (start, before, length) in enumerate(sequences):
        filled: dict[int, int] = {}
        for t in range(length):
            i = (before + t) // L
            row = (bases[n] + i) * P + filled.get(i, 0)
            filled[i] = filled.get(i, 0) + 1
            sources[row], places[start + t] = start + t, row
        for i in range(-(-(before + length) // L) if length else 0):
            first = (bases[n] + i) * layout.parts
            spans[i][n] = [first, first - (-filled.get(i, 0) // C)]
    return sources, places, spans


def agrees(layout: Layout, sequences: list[tuple[int, int, int]], bases: list[int], L: int, C: int) -> None:
    sources, places, spans = literal(sequences, bases, layout, L, C)
    assert layout.ends.tolist() == [before + length for _, before, length in sequences]
    kept = [n for n, (_, _, length) in enumerate(sequences) if length]
    assert [layout.bases.tolist()[n] for n in kept] == [bases[n] for n in kept]
    assert layout.sources.flatten().tolist() == sources
    assert layout.places.flatten().tolist() == places
    assert layout.spans.tolist() == spans
    by_chunk = layout.by_chunk()
    used = {bases[n] + i for n in kept for i in range(layout.longest) if spans[i][n][0] < spans[i][n][1]}
    assert {n for n, unused in enumerate(by_chunk.unused.flatten().tolist()) if not unused} == used
    assert by_chunk.spans[:, : layout.N].equal(layout.spans)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("R", [1, 2])
@pytest.mark.parametrize(
    "lengths, position",
    [([37], None), ([0, 5, 0, 40, 17, 0], [3, 19, 0, 7, 0, 11]), (MANY, None), (MANY, [i % 20 for i in range(150)])],
)
@pytest.mark.parametrize("L", [20, 32])
def test_packed_sequences_lie_where_loops_have_them(lengths, position, L, R, dtype):
    C, ends = 16, torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    before = None if position is None else torch.tensor(position)
    T = int(ends[-1]) * R
    layout = Layout.of(before, ends.to(dtype), 1, T, L * R, C, R, CPU)
    sequences = [(int(ends[n]) * R, (position or [0] * len(lengths))[n] * R, length * R) for n, length in enumerate(lengths)]
    bases, count = [], 0
    for _, start, length in sequences:
        bases.append(count)
        count += -(-(start + length) // (L * R)) if length else 0
    agrees(layout, sequences, bases, L * R, C)
    if position is None:
        found, by_chunk = of_packed(ends.to(dtype), T, L * R, C, R, CPU)
        assert all(x.equal(y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(found, layout, strict=True))
        assert by_chunk.slots.equal(layout.by_chunk().slots)


@pytest.mark.parametrize("T, L, position", [(50, 20, None), (50, 20, [0, 19, 7]), (33, 32, [31, 0, 16]), (3, 64, [61, 62, 0])])
def test_a_batch_lies_where_loops_have_it(T, L, position):
    C, B = 16, 3
    layout = Layout.of(None if position is None else torch.tensor(position), None, B, T, L, C, 1, CPU)
    sequences = [(n * T, (position or [0] * B)[n], T) for n in range(B)]
    agrees(layout, sequences, [n * layout.longest for n in range(B)], L, C)


def test_rows_move_there_and_back_with_what_gaps_hold():
    layout = Layout.of(torch.tensor([5, 0]), None, 2, 30, 16, 16, 1, CPU)
    x, f = torch.randn(2, 30, 3, 4), torch.randn(2, 30, 5).half()
    (there,) = layout.align(x)
    (gated,) = layout.align(f, fill=-torch.inf)
    gaps = layout.sources < 0
    assert not there[gaps].any() and gated[gaps].eq(-torch.inf).all()
    assert gaps.any() and not there[~gaps].eq(0).any()
    assert all(a.equal(b) for a, b in zip(layout.restore(there, gated), (x, f), strict=True))


def test_where_nothing_moves_rows_stay_and_every_slot_is_kept():
    layout = Layout.of(None, None, 2, 40, 32, 16, 1, CPU)
    x = torch.randn(2, 40, 3)
    assert layout.sources is None and layout.align(x)[0] is x and layout.restore(x)[0] is x
    assert layout.spans.tolist() == [[[0, 2], [3, 5]], [[2, 3], [5, 6]]]
    assert layout.by_chunk().unused is None
