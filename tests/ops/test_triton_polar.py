"""Polar's kernels in Triton's interpreter against the definition: values and every gradient."""

import os

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from needlework.ops.common.kernels.parts import parts_of
from needlework.ops.polar import PolarState, chunk_polar, recurrent_polar
from needlework.ops.polar.attention import launches
from needlework.ops.polar.spec import inputs as sample
from needlework.ops.runtime.launch_configs import forced, rows
from needlework.testing.compare import EXACT, differentiate, poisoned, relative
from needlework.testing.errors import assert_within_budget, operand, over_budget, stored
from needlework.testing.rows import covering

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")
ENGINE = "polar/attention"
SMALL = {"shared": {"C": 32}} | {
    "attend": {"BM": 32, "BN": 16, "NS": 1},
    "attend_few": {"BM": 16, "BN": 32, "NS": 1},
    "prepare": {"BM": 16},
    "queries": {"BM": 16, "BN": 32, "NS": 1},
    "keys": {"BM": 32, "BN": 16, "NS": 1},
}


def make(B: int, T: int, style: str = "random", **sizes: int) -> dict[str, torch.Tensor]:
    return sample(torch.Generator().manual_seed(T), B, T, style, **{"Hq": 4, "Hkv": 2} | sizes)


def agree(inputs: dict[str, torch.Tensor], **settings) -> None:
    kernels = differentiate(lambda x: chunk_polar(**x, **settings, impl="triton")[:2], inputs)
    definition = differentiate(lambda x: recurrent_polar(**x, **settings)[:2], inputs)
    for found, exact in zip(kernels, definition, strict=True):
        for name, want in exact.items():
            error = relative(found[name], want)
            assert error <= EXACT, f"{name} is off by {error:.2e} in relative norm"


@pytest.mark.parametrize("T", (1, 16, 37, 70))
def test_any_length_is_the_definition(T):
    agree(make(2, T))


@pytest.mark.parametrize("style", ("identical", "clustered", "null"))
def test_every_style_is_the_definition(style):
    agree(make(1, 50, style))


@pytest.mark.parametrize("Hkv", (1, 4))
def test_a_group_sums_its_gradients(Hkv):
    agree(make(1, 40, Hkv=Hkv))


@pytest.mark.parametrize("window", (1, 7, 20, 40, 64))
def test_windows_skip_tiles(window):
    agree(make(1, 70), window=window)


@pytest.fixture
def fused(monkeypatch):
    """Products that enter a sum or a difference are not rounded, as a GPU's compiler leaves them: a b − c in one instruction."""
    multiply = InterpreterBuilder.create_fmul

    def product(builder, a, b):
        found = multiply(builder, a, b)
        found.factors = a.data, b.data
        return found

    def unrounded(x):
        a, b = getattr(x, "factors", (x.data, 1))
        return np.multiply(a, b, dtype=np.longdouble)

    def contract(name, op):
        plain = getattr(InterpreterBuilder, name)

        def one(builder, a, b):
            found = plain(builder, a, b)
            x, y = (unrounded(a), b.data) if hasattr(a, "factors") else (a.data, unrounded(b))
            found.data = op(x, y).astype(found.data.dtype)
            return found

        monkeypatch.setattr(InterpreterBuilder, name, one)

    monkeypatch.setattr(InterpreterBuilder, "create_fmul", product)
    contract("create_fadd", np.add)
    contract("create_fsub", np.subtract)


@pytest.mark.parametrize("window, ends", covering((None, 5, 20, 45), ([0, 19, 19, 69, 70], None), pairs=False))
def test_products_fused_into_sums_change_nothing(fused, window, ends):
    """Behind a window a tile of keys may hold none that a query sees: its maximum is then −1e30, of whose products digits matter."""
    agree(make(1, 70), window=window, cu_seqlens=None if ends is None else torch.tensor(ends))


@pytest.mark.parametrize("ends, window", covering(([0, 19, 19, 60, 61], [0, 0, 50, 61, 61], [0, 61]), (9, None), pairs=False))
def test_packed_sequences_are_separate(ends, window):
    agree(make(1, 61), cu_seqlens=torch.tensor(ends), window=window)


@pytest.mark.parametrize("d, V", ((3, 5), (72, 40), (136, 24), (40, 192), (160, 136)))
def test_any_width_is_the_definition(d, V):
    agree(make(1, 20, d=d, V=V))


def test_copies_by_descriptor_of_rows_in_parts_are_the_definition():
    with forced(ENGINE, "sm90-d192", **SMALL):
        agree(make(1, 50, d=144, V=192))


def test_rows_of_three_quarters_of_a_wide_tile_are_three_parts():
    assert [parts_of(D) for D in (24, 96, 128, 129, 192, 193, 256)] == [
        (32, 1),
        (128, 1),
        (128, 1),
        (64, 3),
        (64, 3),
        (256, 1),
        (256, 1),
    ]


@pytest.mark.parametrize(
    "settings", ({}, {"window": 21}, {"cu_seqlens": torch.tensor([0, 33, 33, 70])}), ids=lambda s: str([*s])
)
@pytest.mark.parametrize("few", (0, launches.FEW), ids=("many", "few"))
def test_copies_by_descriptor_and_tiles_of_every_shape_are_the_definition(settings, few, monkeypatch):
    monkeypatch.setattr(launches, "FEW", few)
    with forced(ENGINE, "sm90-d128", **SMALL):
        agree(make(1, 70), **settings)


def test_calls_of_few_queries_have_smaller_tiles():
    (row,) = (row for row in rows(ENGINE) if row.name == "sm90-d128")
    walk = launches.Walk(row, torch.bfloat16, B=2, T=4096, H=4, HK=2, K=128, V=128, window=None, spans=None, numbers=128)
    assert walk.own(launches.attend) == row.launch["attend_few"]  # 256 programs
    assert walk._replace(T=4300).own(launches.attend) == row.launch["attend"]  # 272
    assert walk.own(launches.keys) == row.launch["keys"]


def test_every_gradient_holds_under_the_norm_clamp():
    inputs = make(1, 37)
    inputs["v"] = inputs["v"] * torch.where(torch.arange(37) < 18, 1e-8, 1.0)[:, None, None]
    inputs["v_null"] = torch.zeros_like(inputs["v_null"])
    norm = chunk_polar(**inputs, impl="triton").direction.norm(dim=-1)
    assert (norm[:, :18] < 0.1).all() and (norm[:, 18:] > 1 - EXACT).all()
    agree(inputs)


@pytest.mark.parametrize("null_base", (-20.0, 12.0, 60.0))
def test_every_gradient_holds_with_a_null_that_takes_nothing_or_all(null_base):
    inputs = make(1, 37)
    agree(inputs | {"null_base": torch.full_like(inputs["null_base"], null_base)})


def test_an_output_that_nothing_depends_on_needs_no_gradient():
    inputs = make(1, 20)
    for output in (0, 1):
        ways = [lambda x, f=f, output=output: f(**x)[output] for f in (_kernels, recurrent_polar)]
        found, exact = (differentiate(way, inputs)[1] for way in ways)
        assert all(relative(found[name], want) <= EXACT for name, want in exact.items())


def _kernels(**inputs):
    return chunk_polar(**inputs, impl="triton")


def test_no_token_and_no_state():
    result = chunk_polar(**make(2, 0), impl="triton", output_final_state=True)
    assert result.direction.shape == (2, 0, 4, 24) and result.state.k.shape == (2, 0, 2, 16)


def pages(lengths: list[int], window: int | None) -> PolarState:
    generator = torch.Generator().manual_seed(1)
    rows = min(max(lengths), window or max(lengths))
    normal = lambda width: torch.randn(len(lengths), rows, 2, width, generator=generator, dtype=torch.float64)
    return PolarState(normal(16), normal(24), torch.tensor(lengths))


def continued(x: dict, chunk, state: PolarState, **settings) -> tuple:
    state = state._replace(k=x["page_k"], v=x["page_v"])
    tokens = {n: y for n, y in x.items() if not n.startswith("page")}
    return chunk(**tokens, initial_state=state, output_final_state=True, **settings)


@pytest.mark.parametrize("window, ends", covering((None, 1, 9, 20), (None, [0, 19, 19, 20, 41]), pairs=False))
def test_tokens_after_pages_are_the_definitions_and_so_are_the_pages_gradients(window, ends):
    state = pages([5, 23] if ends is None else [5, 0, 30, 2], window)
    inputs = make(2, 37) if ends is None else make(1, 41)
    inputs |= {"page_k": state.k, "page_v": state.v}
    settings = {"window": window, "cu_seqlens": None if ends is None else torch.tensor(ends)}
    kernels = differentiate(lambda x: continued(x, chunk_polar, state, **settings, impl="triton"), inputs)
    definition = differentiate(lambda x: continued(x, recurrent_polar, state, **settings), inputs)
    for found, exact in zip(kernels, definition, strict=True):
        for name, want in exact.items():
            assert relative(found[name], want) <= EXACT, name


@pytest.mark.parametrize("style, config", covering(("random", "null"), ("sm90-d128", None), pairs=False))
def test_half_precision_is_within_the_error_budget(style, config):
    """float16, whose products the interpreter has; four numbers a parameter are judged with those of two seeds more."""
    seeds = []
    half = operand(torch.float16)
    for seed in range(3):
        inputs = sample(torch.Generator().manual_seed(seed), 2, 70, style, Hq=4, Hkv=2)
        half_inputs, wide, single = stored(inputs, torch.float16, ("q", "k", "v"))
        with forced(ENGINE, config, **(SMALL if config else {})):
            ways = [differentiate(lambda x: _kernels(**x)[:2], half_inputs)]
        ways += [differentiate(lambda x: recurrent_polar(**x)[:2], wide)]
        ways += [differentiate(lambda x: recurrent_polar(**x, operand=half)[:2], single)] * 2
        seeds.append([{**values, **gradients} for values, gradients in ways])
    joined = [{name: torch.stack([x[name] for x in way]) for name in way[0]} for way in zip(*seeds, strict=True)]
    found = over_budget(*joined, heads={name: 3 for name, x in joined[0].items() if x.dim() == 5})
    if style == "null":
        del found["1"]  # the first token has all of the magnitude: one number a head
    assert_within_budget(found)


@pytest.mark.parametrize("null_base", (30.0, 45.0))
def test_half_gradients_hold_where_the_square_of_what_keys_get_underflows(null_base):
    inputs = make(1, 40) | {"null_base": torch.full([4], null_base).double()}
    inputs = {n: x.to(torch.float16 if n in "qkv" else torch.float32) for n, x in inputs.items()}
    for name, found in differentiate(lambda x: _kernels(**x)[:2], inputs)[1].items():
        assert torch.isfinite(found).all(), name


def test_half_gradients_of_tokens_after_pages_read_nothing_that_was_not_written():
    state = pages([70, 30], None)
    inputs = {n: x.to(torch.float16 if n in "qkv" else torch.float32) for n, x in make(2, 20).items()}
    inputs |= {"page_k": state.k.half(), "page_v": state.v.half()}
    with poisoned():
        values, gradients = differentiate(lambda x: continued(x, chunk_polar, state, impl="triton")[:2], inputs)
    for name, found in {**values, **gradients}.items():
        assert torch.isfinite(found).all(), name


def test_the_backward_is_left_two_bytes_a_value_and_three_numbers_a_row():
    inputs = {n: x.to(torch.float16 if n in "qkv" else torch.float32).requires_grad_() for n, x in make(1, 64).items()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        result = _kernels(**inputs)
    given = {x.untyped_storage().data_ptr() for x in inputs.values()} | {result.direction.untyped_storage().data_ptr()}
    own = sum(x.numel() * x.element_size() for x in kept if x is not None and x.untyped_storage().data_ptr() not in given)
    assert own == 2 * 64 * 4 * 24 + 3 * 4 * 64 * 4


def test_every_launch_config_is_for_some_width_and_says_why():
    for row in rows(ENGINE):
        assert row.why and row.K[0] <= row.K[1]
