"""Polar's serving kernels in Triton's interpreter: steps, decode and prefill on pages, against the definition and torch."""

import os

import pytest
import torch

from needlework.ops.polar import PolarState, recurrent_polar, step_polar
from needlework.ops.polar.paged import decode_polar, prefill_polar
from needlework.ops.polar.spec import inputs as sample
from needlework.ops.runtime.launch_configs import forced
from needlework.testing.compare import EXACT, relative
from needlework.testing.rows import covering

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")
PARAMETERS = ("alpha", "beta", "gamma", "null_base", "v_null")
PAGE, COUNT = 8, 7


def pages(N: int, Hkv: int, seed: int = 0):
    """Pages of random tokens in random order, and the table."""
    generator = torch.Generator().manual_seed(seed)
    n = N * COUNT + 3
    k, v = (torch.randn(n, PAGE, Hkv, width, generator=generator, dtype=torch.float64) for width in (16, 24))
    return k, v, torch.randperm(n, generator=generator)[: N * COUNT].view(N, COUNT).int()


def queries(T: int, Hkv: int):
    x = sample(torch.Generator().manual_seed(1), 1, T, "random", Hq=4, Hkv=Hkv)
    return x["q"], [x[n] for n in PARAMETERS]


def held(x: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    return x[table.long()].flatten(0, 1)[None, :length]


@pytest.mark.parametrize("spread, window", covering(((1, 1), (2, 12), (2, 528)), (None, 5, 21), pairs=False))
def test_decode_is_the_definitions_last_token(spread, window):
    Hkv, programs = spread
    lengths = [50, 33, 1, 17]
    k, v, table = pages(len(lengths), Hkv)
    q, parameters = queries(len(lengths), Hkv)
    where = {"block_table": table, "length": torch.tensor(lengths, dtype=torch.int32), "window": window}
    with forced("polar/paged", shared={"programs": programs}):
        direction, magnitude = decode_polar(q[0], k, v, *parameters, **where, impl="triton")
    for got, want in zip((direction, magnitude), decode_polar(q[0], k, v, *parameters, **where, impl="torch"), strict=True):
        assert relative(got, want) <= EXACT
    for n, length in enumerate(lengths):
        every = torch.zeros(1, length, 4, 16).double()
        every[0, -1] = q[0, n]
        exact = recurrent_polar(every, held(k, table[n], length), held(v, table[n], length), *parameters, window=window)
        assert relative(direction[n], exact.direction[0, -1]) <= EXACT
        assert relative(magnitude[n], exact.magnitude[0, -1]) <= EXACT


@pytest.mark.parametrize("impl", ("triton", "torch"))
def test_a_row_without_keys_has_the_null_and_a_padded_row_zeros(impl):
    k, v, table = pages(3, 2)
    q, parameters = queries(3, 2)
    table[1:] = 10**6  # not to be read
    length = torch.tensor([9, 0, -1], dtype=torch.int32)
    direction, magnitude = decode_polar(q[0], k, v, *parameters, block_table=table, length=length, impl=impl)
    assert relative(direction[1], torch.nn.functional.normalize(parameters[-1], dim=-1)) <= EXACT
    assert not direction[2].any() and not magnitude[1:].any() and magnitude[0].all()


@pytest.mark.parametrize("window", (None, 5, 21))
def test_prefill_is_the_definitions_newest_tokens(window):
    ends, lengths = [0, 20, 53, 53, 54, 60], [50, 33, 9, 7, 40]
    k, v, table = pages(len(lengths), 2)
    q, parameters = queries(60, 2)
    where = {"block_table": table, "length": torch.tensor(lengths, dtype=torch.int32), "cu_seqlens": torch.tensor(ends)}
    found = {impl: prefill_polar(q, k, v, *parameters, **where, window=window, impl=impl) for impl in ("triton", "torch")}
    for got, want in zip(*found.values(), strict=True):
        assert relative(got, want) <= EXACT
    for n, length in enumerate(lengths):
        new = slice(ends[n], ends[n + 1])
        count = ends[n + 1] - ends[n]
        every = torch.zeros(1, length, 4, 16).double()
        every[0, length - count :] = q[0, new]
        exact = recurrent_polar(every, held(k, table[n], length), held(v, table[n], length), *parameters, window=window)
        assert relative(found["triton"][0][0, new], exact.direction[0, length - count :]) <= EXACT


@pytest.mark.parametrize("window, rows", ((None, 9), (4, 4), (4, 6)))
def test_steps_are_torchs_steps_to_the_last_slot(window, rows, monkeypatch):
    """Slots out of order, a padded row, a ring that wraps, a table longer than its window."""
    slots = torch.tensor([2, -1, 0])
    generator = torch.Generator().manual_seed(2)
    tables = {}
    outputs = {}
    inputs = sample(generator, 3, 8, "random", Hq=4, Hkv=2)
    for impl in ("triton", "torch"):
        monkeypatch.setenv("NEEDLEWORK_IMPL", impl)
        page = lambda width: torch.zeros(4, rows, 2, width, dtype=torch.float64)
        tables[impl] = PolarState(page(16), page(24), torch.zeros(4, dtype=torch.int64))
        token = lambda t: {n: x[:, t] if n in ("q", "k", "v") else x for n, x in inputs.items()}
        outputs[impl] = [step_polar(**token(t), state=tables[impl], slots=slots, window=window) for t in range(8)]
    for got, want in zip(outputs["triton"], outputs["torch"], strict=True):
        assert all(relative(a, b) <= EXACT for a, b in zip(got, want, strict=True))
        assert not got[0][1].any()
    assert all(torch.equal(a, b) for a, b in zip(tables["triton"], tables["torch"], strict=True))


def test_a_full_table_is_refused_and_left_alone(monkeypatch):
    monkeypatch.setenv("NEEDLEWORK_IMPL", "triton")
    inputs = sample(torch.Generator().manual_seed(0), 1, 1, "random")
    state = PolarState(torch.zeros(1, 3, 2, 16).double(), torch.zeros(1, 3, 2, 24).double(), torch.tensor([3]))
    token = {n: x[:, 0] if n in ("q", "k", "v") else x for n, x in inputs.items()}
    with pytest.raises(ValueError, match=r"state\.k: axis 1 \(P\) has capacity 3.* length 3"):
        step_polar(**token, state=state)
    assert state.length.tolist() == [3] and not state.k.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": lambda x: x[..., :8]}, r"k: axis 3 \(d\) .* has size 8, expected 16"),
        ({"v": lambda x: x[:, :4]}, r"v: axis 1 \(PG\) .* has size 4, expected 8"),
        ({"k": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)}, "k: pages must be contiguous"),
        ({"block_table": lambda x: x[:1]}, r"length: axis 0 \(B\) .* has size 2, expected 1"),
        ({"window": lambda x: 0}, "window: expected at least 1"),
        ({"impl": lambda x: "reference"}, "the definition knows no pages"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    k, v, table = pages(2, 2)
    q, parameters = queries(2, 2)
    given = {"q": q[0], "k": k, "v": v, **dict(zip(PARAMETERS, parameters, strict=True)), "block_table": table}
    given |= {"length": torch.tensor([3, 4]), "window": None, "impl": "torch"}
    with pytest.raises(ValueError, match=message):
        decode_polar(**{n: change.get(n, lambda x: x)(x) for n, x in given.items()})
