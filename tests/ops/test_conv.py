"""The causal convolution against torch's own, and its state."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from needlework.ops.common.conv import causal_conv

AFTER = {"none": lambda c, x: c, "silu": lambda c, x: F.silu(c), "add": lambda c, x: x + c}


def inputs(T: int, width: int = 4, B: int = 2, C: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(T)
    return tuple(torch.randn(size, generator=generator, dtype=torch.float64) for size in ((B, T, C), (C, width)))


def by_torch(x: torch.Tensor, weight: torch.Tensor, after: str) -> torch.Tensor:
    c = F.conv1d(F.pad(x.mT, (weight.shape[1] - 1, 0)), weight[:, None], groups=len(weight)).mT
    return AFTER[after](c, x)


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize(("T", "width"), ((1, 4), (2, 4), (9, 2), (9, 3), (9, 6)))
def test_it_is_torchs_convolution(T, width, after):
    x, weight = inputs(T, width)
    torch.testing.assert_close(causal_conv(x, weight, after=after, impl="torch")[0][0], by_torch(x, weight, after))


def test_it_comes_in_parts():
    x, weight = inputs(9)
    (y,), _ = causal_conv(x, weight, impl="torch")
    parts, _ = causal_conv(x, weight, parts=(2, 3), impl="torch")
    assert [part.shape[-1] for part in parts] == [2, 3] and torch.equal(torch.cat(parts, -1), y)


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


@pytest.mark.parametrize(
    ("width", "state", "message"),
    ((4, torch.zeros(2, 3, 5), "a state is given"), (5, None, "5 taps, at most 4")),
)
def test_what_the_kernels_do_not_take_is_named(width, state, message, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x, weight = inputs(4, width)
    with pytest.raises(ValueError, match=message):
        causal_conv(x, weight, state, impl="triton")
