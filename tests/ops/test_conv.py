"""The causal convolution against torch's own and a loop over tokens, and its state: given, and on a table of slots."""

import re
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch.nn import functional as F

from needlework.ops.conv import causal_conv, causal_conv_slots, step_conv
from needlework.ops.unit.reference import unit_rows
from needlework.testing.compare import EXACT, relative
from needlework.testing.rows import covering

AFTER = {"none": lambda c, x: c, "silu": lambda c, x: F.silu(c), "add": lambda c, x: x + c}


def inputs(T: int, width: int = 4, B: int = 2, C: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(T)
    return tuple(torch.randn(size, generator=generator, dtype=torch.float64) for size in ((B, T, C), (C, width)))


def bias_of(weight: torch.Tensor) -> torch.Tensor:
    return weight.sum(1).cos()


def by_torch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, after: str) -> torch.Tensor:
    c = F.conv1d(F.pad(x.mT, (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=len(weight)).mT
    return AFTER[after](c, x)


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize(("T", "width"), ((1, 4), (2, 4), (9, 2), (9, 3), (9, 6)))
def test_it_is_torchs_convolution(T, width, after):
    x, weight = inputs(T, width)
    for bias in (None, bias_of(weight)):
        found = causal_conv(x, weight, bias=bias, after=after, impl="torch")[0][0]
        torch.testing.assert_close(found, by_torch(x, weight, bias, after))


def test_it_comes_in_parts():
    x, weight = inputs(9)
    (y,), _ = causal_conv(x, weight, impl="torch")
    parts, _ = causal_conv(x, weight, parts=(2, 3), impl="torch")
    assert [part.shape[-1] for part in parts] == [2, 3] and torch.equal(torch.cat(parts, -1), y)


def unit_by_hand(y: torch.Tensor, K: int) -> torch.Tensor:
    if not K:
        return y
    return torch.cat([head / (head.square().sum(-1, keepdim=True) + 1e-6).sqrt() for head in y.split(K, -1)], -1)


UNIT = (None, (2, 0, 4), (1, 5, 0), (6, 5, 8))  # of parts of 6, 5 and 8 channels


@pytest.mark.parametrize(("unit", "after"), covering(UNIT, tuple(AFTER), pairs=False))
def test_heads_get_unit_norm_after_all_else(unit, after):
    """From a state too, and of packed documents: the values are those of the norm of what it gives without."""
    x, weight = inputs(12, B=1, C=19)
    given = {"bias": bias_of(weight), "parts": (6, 5, 8), "after": after, "impl": "torch"}
    for ends in (None, torch.tensor([0, 1, 1, 6, 12])):
        _, state = causal_conv(x.flip(1), weight, None, ends, **given)
        y, last = causal_conv(x, weight, state, ends, **given)
        found, end = causal_conv(x, weight, state, ends, **given, unit=unit)
        assert torch.equal(end, last)
        for got, one, K in zip(found, y, unit or (0, 0, 0), strict=True):
            torch.testing.assert_close(got, unit_by_hand(one, K), rtol=1e-14, atol=1e-14)


def test_unit_heads_are_those_of_y_as_it_is_rounded():
    x, weight = (t.bfloat16() for t in inputs(9, C=12))
    (y,), _ = causal_conv(x, weight, after="silu", impl="torch")
    (found,), _ = causal_conv(x, weight, unit=[4], after="silu", impl="torch")
    want = unit_rows(y.unflatten(-1, (-1, 4))).flatten(-2)
    assert found.dtype == torch.bfloat16 and torch.equal(found, want)


@pytest.mark.parametrize("after", AFTER)
def test_unit_heads_have_every_gradient(after):
    x, weight = inputs(4, B=1, C=6)
    given = [t.clone().requires_grad_() for t in (x, weight, torch.randn(1, 3, 6, dtype=torch.float64), bias_of(weight))]

    def called(x, weight, state, bias):
        y, last = causal_conv(x, weight, state, bias=bias, parts=(4, 2), unit=(2, 0), after=after, impl="torch")
        return *y, last

    assert torch.autograd.gradcheck(called, given)


@pytest.mark.parametrize("unit", ((2,), (2, 3), (-1, 2), (4, 2, 0), (0, 4)))
def test_heads_that_no_part_has_are_refused(unit):
    message = rf"unit: got {list(unit)}, expected 0 or channels of a head for each of the parts [4, 2], which divide them"
    with pytest.raises(ValueError, match=re.escape(message)):
        causal_conv(*inputs(4, C=6), parts=(4, 2), unit=unit)


def test_parts_that_are_not_all_channels_are_refused():
    with pytest.raises(ValueError, match=r"parts: got \[2, 2\], expected channels that sum to x's 5"):
        causal_conv(*inputs(4), parts=(2, 2))


@pytest.mark.parametrize("cut", (1, 2, 7))
def test_it_goes_on_from_its_state(cut):
    x, weight = inputs(9)
    (y,), last = causal_conv(x, weight, impl="torch")
    (first,), state = causal_conv(x[:, :cut], weight, impl="torch")
    (second,), end = causal_conv(x[:, cut:], weight, state, impl="torch")
    torch.testing.assert_close(torch.cat([first, second], 1), y, rtol=0, atol=0)
    assert torch.equal(end, last)


def test_packed_documents_do_not_see_one_another():
    x, weight = inputs(12, B=1)
    ends = [0, 1, 1, 6, 12]
    (y,), state = causal_conv(x, weight, cu_seqlens=torch.tensor(ends), after="silu", impl="torch")
    for n, (a, b) in enumerate(pairwise(ends)):
        (own,), last = causal_conv(x[:, a:b], weight, after="silu", impl="torch")
        torch.testing.assert_close(y[:, a:b], own, rtol=0, atol=0)
        assert torch.equal(state[n : n + 1], last)
    (again,), state = causal_conv(x, weight, state, torch.tensor(later := [0, 5, 8, 8, 12]), impl="torch")
    for n, (a, b, c, d) in enumerate(zip(ends[:-1], ends[1:], later[:-1], later[1:], strict=True)):
        (own,), last = causal_conv(torch.cat([x[:, a:b], x[:, c:d]], 1), weight, impl="torch")
        torch.testing.assert_close(again[:, c:d], own[:, b - a :], rtol=0, atol=0)
        assert torch.equal(state[n : n + 1], last)


class Table(NamedTuple):
    """Slots that lie apart, and the memory around them: what no sequence owns is NaN, and so is what a fresh one owns."""

    memory: torch.Tensor  # [S 3 past C]
    slots: torch.Tensor
    fresh: torch.Tensor | None

    @classmethod
    def of(cls, slots, fresh, past: int, C: int, dtype: torch.dtype = torch.float64) -> "Table":
        memory = torch.full((9, 3, past, C), torch.nan, dtype=dtype)
        generator = torch.Generator().manual_seed(9)
        for slot, new in zip(slots, fresh or [False] * len(slots), strict=True):
            if slot >= 0 and not new:
                memory[slot, 1] = torch.randn(past, C, generator=generator).to(dtype)
        return cls(memory, torch.tensor(slots), None if fresh is None else torch.tensor(fresh))

    @property
    def state(self) -> torch.Tensor:
        return self.memory[:, 1]

    def bytes(self) -> torch.Tensor:
        return self.memory.view(torch.uint8)


def by_loop(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, held: torch.Tensor, after: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence x [T C] after the inputs `held` [past C]: y, and the last inputs as `held` keeps them."""
    line = [row.to(x.dtype) for row in held]
    y = []
    for token in x:
        line.append(token)
        c = bias + sum(tap * row for tap, row in zip(weight.unbind(-1), line[-weight.shape[1] :], strict=True))
        y.append(AFTER[after](c, token))
    kept = [*held, *x.to(held.dtype)][-len(held) :]
    return torch.stack(y) if y else x, torch.stack(kept)


def by_loops(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, ends, table: Table, after: str
) -> tuple[torch.Tensor, Table]:
    """y [B T C], and the table after it."""
    rows = [x[0, a:b] for a, b in pairwise(ends)] if ends else list(x)
    memory, found = table.memory.clone(), []
    for n, (row, slot) in enumerate(zip(rows, table.slots.tolist(), strict=True)):
        new = slot < 0 or (table.fresh is not None and bool(table.fresh[n]))
        y, last = by_loop(row, weight, bias, torch.zeros_like(memory[0, 1]) if new else memory[slot, 1], after)
        found.append(y)
        if slot >= 0:
            memory[slot, 1] = last
    return torch.cat(found)[None] if ends else torch.stack(found), table._replace(memory=memory)


# tokens, or the ends of packed sequences; taps; parts; slots; fresh
SERVED = (
    (1, 4, None, [5, -1, 0], None),
    (2, 4, (1, 18, 1), [8, 2, -1], [True, False, False]),
    (3, 3, None, [3, 1, 0], [False, True, True]),
    (70, 2, (3, 17), [-1, 7, 4], [False, False, True]),
    ([0, 1, 1, 3, 6, 76], 4, (8, 12), [5, 0, 3, -1, 2], [False, False, True, False, False]),
    ([0, 0, 2, 2, 4, 13], 3, None, [4, 1, 0, -1, 7], [True, False, False, True, False]),
    ([0, 7, 8, 8, 16], 4, None, [3, 2, 1, 0], None),
)


def check_slots_are_the_loop(impl: str, sizes, after: str, dtype: torch.dtype) -> None:
    tokens, width, parts, slots, fresh = sizes
    ends = tokens if isinstance(tokens, list) else None
    x, weight = inputs(ends[-1] if ends else tokens, width, B=1 if ends else len(slots), C=20)
    table = Table.of(slots, fresh, width - 1, 20, dtype)
    bias = bias_of(weight) if ends else None  # packed rows have one
    want, expected = by_loops(x, weight, torch.zeros(20, dtype=x.dtype) if bias is None else bias, ends, table, after)
    given = {
        "slots": table.slots.int() if ends else table.slots,
        "fresh": table.fresh,
        "parts": parts,
        "after": after,
        "bias": bias,
    }
    if ends or width > 2:  # rows lie apart, as those of a wider product do
        x = torch.cat([x, -x], -1)[..., :20]
    y = causal_conv_slots(x, weight, None if ends is None else torch.tensor(ends), state=table.state, **given, impl=impl)
    assert [part.shape[-1] for part in y] == list(parts or [20])
    assert impl == "torch" or all(part.is_contiguous() for part in y)
    assert relative(torch.cat(y, -1), want) <= EXACT
    assert torch.equal(table.bytes(), expected.bytes()), "a slot is not what it should be"


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=str)
@pytest.mark.parametrize(("sizes", "after"), covering(SERVED, tuple(AFTER), pairs=False))
def test_on_slots_it_is_a_loop_over_tokens(sizes, after, dtype):
    check_slots_are_the_loop("torch", sizes, after, dtype)


def check_steps_are_a_chunk(impl: str, width: int, after: str, parts) -> None:
    """Rows out of order, one without a slot, tokens one at a time after a few as a chunk."""
    x, weight = inputs(6, width, B=3, C=20)
    stepped, whole = (Table.of([6, -1, 1], None, width - 1, 20) for _ in range(2))
    given = {"bias": bias_of(weight) if parts else None, "parts": parts, "after": after}
    want = causal_conv_slots(x, weight, state=whole.state, slots=whole.slots, **given, impl="torch")
    for t in range(6):
        # rows lie apart, as those of a wider product do
        token = torch.cat([x[:, t], x[:, t]], 1)[:, :20]
        y = step_conv(token, weight, state=stepped.state, slots=stepped.slots.int(), **given)
        for one, every in zip(y, want, strict=True):
            assert relative(one[[0, 2]], every[[0, 2], t]) <= EXACT
            assert not one[1].any(), "a row without a slot is not zero"
    assert torch.equal(stepped.bytes(), whole.bytes())
    # row b has slot b
    table = stepped.state[[6, 1, 6]].contiguous()
    y = step_conv(x[:, 0], weight, state=table, **given)
    again = step_conv(x[[0], 0], weight, state=stepped.state, slots=torch.tensor([6]), **given)
    assert all(torch.equal(one[:1], other) for one, other in zip(y, again, strict=True))
    assert torch.equal(table[0], stepped.state[6])


STEPS = (4, "silu", (3, 1, 16)), (3, "none", None), (2, "add", (17, 3))


@pytest.mark.parametrize(("width", "after", "parts"), (*STEPS, (6, "silu", None)))
def test_steps_are_a_chunk(width, after, parts):
    check_steps_are_a_chunk("torch", width, after, parts)


@pytest.mark.parametrize("call", (causal_conv_slots, step_conv), ids=lambda call: call.__name__)
def test_a_table_has_no_gradient(call):
    x, weight = inputs(4)
    x, table = x if call is causal_conv_slots else x[:, 0], torch.zeros(2, 3, 5, dtype=torch.float64)
    for asking in (x, weight, table):
        asking.requires_grad_()
        with pytest.raises(ValueError, match="state: no gradient flows through a table"):
            call(x, weight, state=table)
        asking.requires_grad_(False)
    with torch.no_grad():
        call(x, weight.requires_grad_(), state=table)


@pytest.mark.parametrize("call", (causal_conv, causal_conv_slots), ids=lambda call: call.__name__)
def test_what_the_kernels_do_not_take_is_named(call, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=f"{call.__name__} has no Triton kernel for this call: 5 taps, at most 4"):
        call(*inputs(4, 5), state=torch.zeros(2, 4, 5, dtype=torch.float64), impl="triton")


def test_wide_heads_have_no_kernel(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x, weight = inputs(2, C=2048)
    with pytest.raises(ValueError, match="no Triton kernel for this call: unit heads of 2048 channels, at most 1024"):
        causal_conv(x, weight, unit=[2048], impl="triton")
    assert causal_conv(x, weight, unit=[2048])[0][0].norm(dim=-1).amax() <= 1
