"""LUCID-PaTH's kernels in Triton's interpreter: TRITON_INTERPRET=1 pytest. Blocks of 16 tokens, two a superblock, as PaTH's tests have
them: a superblock then waits for older ones, and several of them pass each other's transfers."""

import dataclasses
import os
from functools import partial

import pytest
import torch

from needlework.ops.path import chunk_lucid_path, chunk_path, paged_lucid_path, recurrent_lucid_path
from needlework.ops.path.engine import op as engine
from needlework.ops.path.solve.engine import op as solve
from needlework.ops.path.solve.reference import literal_lucid_path
from needlework.ops.runtime.launch_configs import forced
from needlework.ops.specs import specs
from needlework.testing import checks
from needlework.testing.compare import assert_close, differentiate, poisoned, relative
from needlework.testing.errors import assert_within_budget, operand, over_budget, stored
from needlework.testing.path_pages import in_calls
from needlework.testing.rows import chosen
from tests.ops.test_lucid_path import sample as lucid_path_sample
from tests.ops.test_triton_path import ENDS, assert_operators, held
from tests.ops.test_triton_path import sample as path_sample

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")
kernels = partial(chunk_lucid_path, impl="triton")
sample = partial(lucid_path_sample, H=1, K=8, V=6)


@pytest.fixture(autouse=True)
def small():
    with forced("path/engine", shared={"C": 16, "M": 2}):
        yield


ROWS = [(T, window) for T in (0, 1, 16, 37, 75, 110) for window in (None, 1, 20, 40)]


@pytest.mark.parametrize("T, window", chosen(ROWS, [(0, None), (110, 40), (110, None)]))
def test_values_and_gradients_are_those_of_the_definition(T, window):
    x = sample(1, T)
    fast = differentiate(lambda x: kernels(**x, window=window).y, x)
    definition = recurrent_lucid_path if T else partial(chunk_lucid_path, impl="torch")  # a stack of no tokens has no gradient
    exact = differentiate(lambda x: definition(**x, window=window).y, x)
    for got, want, what in zip(fast, exact, ("values", "gradients"), strict=True):
        assert_close(got, want, what)


@pytest.mark.parametrize("window", chosen([None, 20], [20]))
def test_packed_sequences_are_separate(window):
    """Values, gradients and final states, of two heads; one is empty, one has a block and a half of a superblock, one three superblocks."""
    x, ends = sample(1, 115, H=2), torch.tensor([0, 40, 40, 50, 115])
    call = lambda form, x: form(**x, window=window, cu_seqlens=ends, output_final_state=True)
    fast = differentiate(partial(call, kernels), x)
    exact = differentiate(partial(call, recurrent_lucid_path), x)
    for got, want, what in zip(fast, exact, ("values", "gradients"), strict=True):
        assert_close(got, want, what)


def test_panels_of_walks_are_one(monkeypatch):
    """A walk of one superblock at a time, of a batch and of packed sequences, bit for bit."""
    x, ends = sample(2, 110), torch.tensor([0, 70, 110])
    one = {n: y[:1] for n, y in x.items()}
    both = lambda: (differentiate(lambda x: kernels(**x).y, x), differentiate(lambda x: kernels(**x, cu_seqlens=ends).y, one))
    values = [found for found, _ in both()]
    for module in (engine, solve):
        monkeypatch.setattr(module, "SCRATCH", 1)
    monkeypatch.setattr(engine, "MOST", 1)
    again = both()
    for (got, _), want in zip(again, values, strict=True):
        assert all(torch.equal(got[name], want[name]) for name in want)
    exact = differentiate(lambda x: recurrent_lucid_path(**x).y, x)
    assert_close(again[0][1], exact[1], "panels")


@pytest.mark.parametrize("dtype, style", chosen([(d, s) for d in (torch.float32, torch.float16) for s in ("random", "clustered", "identical")], [(torch.float16, "clustered")]))  # fmt: skip
def test_half_and_single_precision_are_within_the_budget(dtype, style):
    kept, wide, single = stored(sample(4, 60, K=16, V=16, style=style), dtype, ("k", "v", "w"))
    ways = (
        differentiate(lambda x: kernels(**x).y, kept),
        differentiate(lambda x: recurrent_lucid_path(**x).y, wide),
        differentiate(lambda x: recurrent_lucid_path(**x, operand=operand(dtype)).y, single),
        differentiate(lambda x: literal_lucid_path(**x, operand=operand(dtype), chunk_size=16).y, single),
    )
    fast, exact, definition, literal = ({**values, **gradients} for values, gradients in ways)
    assert_within_budget(over_budget(fast, exact, definition, literal))


def test_a_key_of_no_length_is_scaled_and_not_turned():
    """Below 1e-6 a key is divided by that, and its gradient has no part taken off."""
    x = sample(1, 20)
    x["k"][0, 3] *= 1e-9
    x["k"][0, 7] = 0
    fast, exact = (differentiate(lambda x, form=form: form(**x).y, x) for form in (kernels, recurrent_lucid_path))
    for got, want, what in zip(fast, exact, ("values", "gradients"), strict=True):
        assert_close(got, want, what, bound=1e-7)  # the kernels' 1e-6 is a float32 number


def test_every_number_is_written():
    for T, ends in ((1, None), (37, None), (70, torch.tensor([0, 40, 70]))):
        with poisoned():
            found = differentiate(lambda x, ends=ends: kernels(**x, cu_seqlens=ends).y, sample(1, T))
        assert all(torch.isfinite(x).all() for part in found for x in part.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", [checks.compiles_without_a_graph_break, checks.custom_ops_pass_opcheck, checks.batch_invariant]
)
def test_the_operator_is_one_of_pytorchs(check, monkeypatch):
    monkeypatch.setenv("NEEDLEWORK_IMPL", "triton")
    spec = next(spec for spec in specs() if spec.name == "path/lucid")
    check(dataclasses.replace(spec, chunk=partial(spec.chunk, impl="triton")))


def test_a_state_to_go_on_from_is_refused_by_name():
    x = sample(1, 5)
    state = chunk_lucid_path(**x, output_final_state=True).state
    with pytest.raises(
        ValueError, match=r"impl='triton': lucid-path has no Triton kernel for this call: it goes on from a state"
    ):
        kernels(**x, initial_state=state)
    with pytest.raises(ValueError, match=r"no launch config for float64, K = 65"):
        kernels(**sample(1, 5, K=65))


@pytest.mark.parametrize("window", [None, 20, 90])
def test_a_prompt_on_pages_is_the_sequence(window):
    """What it returns, and what the pages then hold, some of it decoded; keys of any norm."""
    x = {name: y[0] for name, y in sample(1, 300).items()}
    y, memory = in_calls(x, ENDS, window=window, impl="triton")
    exact = chunk_lucid_path(**{name: y[None] for name, y in x.items()}, cu_seqlens=ENDS, window=window).y[0]
    assert relative(y, exact) <= 1e-12
    for n in (0, 2, 3):
        (t, rows), k = held(memory, ENDS, n, window), x["k"][ENDS[n] : ENDS[n + 1]]
        assert relative(rows["norm_pages"], k[t].norm(dim=-1)) <= 1e-12
        assert relative(rows["y_pages"], exact[ENDS[n] : ENDS[n + 1]][t]) <= 1e-12


@pytest.mark.parametrize("window", [None, 20, 90])
def test_a_token_that_decodes_is_solved_and_read_in_one_pass(window):
    """Behind a prompt on pages, to the end of a block and past it: o, and what pages and slots then hold."""
    x = {name: y[0] for name, y in path_sample(1, 300, Hq=3, H=1, K=8, V=6).items()}
    o, memory = in_calls(x, ENDS, window=window, impl="triton", solve=True)
    q, k, v, beta, w = (y[None] for y in x.values())
    solved = chunk_lucid_path(k, v, beta, w, cu_seqlens=ENDS, window=window)
    assert relative(o, chunk_path(q, k, solved.y, beta, w, cu_seqlens=ENDS, window=window).o[0]) <= 1e-12
    for n in (0, 2, 3):
        (t, rows), own = held(memory, ENDS, n, window), slice(int(ENDS[n]), int(ENDS[n + 1]))
        state = chunk_lucid_path(*(z[:, own] for z in (k, v, beta, w)), output_final_state=True).state
        assert relative(rows["k_pages"], state.k[0, t]) <= 1e-12
        assert relative(rows["norm_pages"], k[0, own][t].norm(dim=-1)) <= 1e-12
        assert relative(rows["y_pages"], solved.y[0, own][t]) <= 1e-12


@pytest.mark.parametrize("count, cu_seqlens", [(2, torch.tensor([0, 2])), (1, None)])
def test_the_operators_on_pages_are_some_of_pytorchs(count, cu_seqlens):
    """The solve and the read, or both at once."""
    assert_operators(paged_lucid_path, count, path_sample(1, count), cu_seqlens)


def test_shares_of_long_pages_are_summed():
    """A launch config with as many programs as there are keys in pages."""
    x = {name: y[0] for name, y in sample(1, 300).items()}
    one, _ = in_calls(x, ENDS, window=None, impl="triton")
    with forced("path/engine", shared={"C": 16, "M": 2}, take_past={"NP": 1, "BN": 16}):
        assert relative(in_calls(x, ENDS, window=None, impl="triton")[0], one) <= 1e-12
    with forced("path/engine", shared={"C": 16, "M": 2}, take_past={"NP": 400, "BN": 16}):
        assert relative(in_calls(x, ENDS, window=None, impl="triton")[0], one) <= 1e-12
