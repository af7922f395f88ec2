"""States that grow past what float16 operands hold: units of tiles of values, in Triton's interpreter.

The float64 tests force units on, which are powers of two: every tensor must be the definition's to the last digits.
"""

import dataclasses
import math
import os
from functools import partial

import pytest
import torch

from needlework.ops.common.launch import forced
from needlework.ops.common.samples import normal, unit
from needlework.ops.qdelta import chunk_qdelta, recurrent_qdelta
from needlework.ops.specs import specs
from needlework.testing.checks import budgeted
from needlework.testing.compare import EXACT, differentiate, relative, whole

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")

GATE = -0.22  # √2 e^{−0.22} = 1.13 a token


def growing(generator, B, T, style="random", *, H=1, HV=2, K=16, V=12, N=None, q_read=False):
    """q turns by 45° a token and k ⟂ q, λ = β = 1: a state in their plane grows by √2 e^g a token (`tests/ops/test_qdelta.py`)."""
    plane = torch.linalg.qr(normal(generator, B, H, K, 2))[0].mT[:, None]  # [B 1 H 2 K]
    angle = (torch.arange(T, dtype=torch.float64) * -math.pi / 4)[:, None, None]
    q = angle.cos() * plane[..., 0, :] + angle.sin() * plane[..., 1, :]
    k = -angle.sin() * plane[..., 0, :] + angle.cos() * plane[..., 1, :]
    one = torch.ones(B, T, HV, dtype=torch.float64)
    inputs = {"q": q, "k": k, "v": normal(generator, B, T, HV, V), "g": GATE * one, "beta": one, "lam": one.clone()}
    if style == "cut":
        inputs["g"][:, T // 2] = -30.0  # what has grown is gone at once
    if q_read:
        inputs["q_read"] = unit(normal(generator, B, T, H, K))
    return inputs | {"initial_state": normal(generator, N or B, HV, K, V)}


def sample(B=1, T=160, seed=0, **sizes):
    return growing(torch.Generator().manual_seed(seed), B, T, **sizes)


@pytest.fixture
def units_in_float64(monkeypatch):
    from needlework.ops.delta import triton_scalar, triton_scalar_bwd

    caches = (triton_scalar.scan_constants, triton_scalar_bwd.constants)
    for module in (triton_scalar, triton_scalar_bwd):
        monkeypatch.setattr(module, "grows", lambda dtype, lam: bool(lam))
    for made in caches:
        made.cache_clear()
    yield
    for made in caches:
        made.cache_clear()


def check(inputs, overrides=None, **settings):
    kernels = whole(partial(chunk_qdelta, impl="triton"), scale=0.25, **settings)
    with forced("delta/scalar", **(overrides or {})):
        found = differentiate(kernels, inputs)
    expected = differentiate(whole(recurrent_qdelta, scale=0.25, **settings), inputs)
    for got, want in zip(found, expected, strict=True):
        for name in want:
            size = want[name].norm()
            assert relative(got[name] / size, want[name] / size) <= EXACT, name


def test_the_sample_grows_past_float16():
    o, state = recurrent_qdelta(**sample(), output_final_state=True)
    assert state.abs().max() > 2**20 and o.isfinite().all()


@pytest.mark.parametrize("style", ("random", "cut"))
def test_units_change_nothing(units_in_float64, style):
    from needlework.ops.delta.triton_scalar import delta_scalar_fwd

    x = sample(style=style)
    given = *(x[n] for n in ("q", "k", "v", "g", "beta", "lam")), None, x["initial_state"], None, 0.25
    units, _ = delta_scalar_fwd(*given)[8].unbind(-1)  # the second: what is left of them in the next chunk
    assert units.max() >= 2**10 and units.min() == 1
    assert torch.equal(units.log2(), units.log2().round())
    check(x)


@pytest.mark.parametrize(
    "sizes", ({"q_read": True}, {"K": 136, "V": 40, "HV": 1, "T": 112}, {"H": 2, "HV": 4, "V": 72, "K": 8, "T": 112})
)
def test_units_change_nothing_at_other_sizes(units_in_float64, sizes):
    check(sample(**sizes))


def test_units_of_packed_sequences_and_of_an_empty_one(units_in_float64):
    check(sample(T=150, N=4), cu_seqlens=torch.tensor([0, 100, 100, 133, 150]))


def test_units_go_on_where_a_chain_is_cut_and_start_from_any_state(units_in_float64):
    x = sample(B=3, T=112, HV=1)
    x["initial_state"] *= 2.0**30
    check(x, {name: {"NP": 2} for name in ("scan", "adjoint", "replay_forward")})


def test_units_of_segments(units_in_float64, monkeypatch):
    from needlework.ops.delta import triton_scalar

    monkeypatch.setattr(triton_scalar, "_parts", lambda *given: 3)
    check(sample(T=160))


def test_half_precision_holds_what_grows_within_its_budget():
    spec = next(spec for spec in specs() if spec.name == "qdelta")
    spec = dataclasses.replace(spec, chunk=partial(spec.chunk, impl="triton"), inputs=growing)
    found = budgeted(spec, torch.bfloat16, 1, 160, "random", torch.device("cpu"))
    for name, ratio in found.items():
        # the interpreter cuts what it returns as bfloat16 off, which alone is the budget
        bound = 1.5 if name in ("o", "dq", "dk", "dv") else 1
        assert ratio <= bound, f"{name}: error is {ratio:.2f} x its budget"


def test_float16_inputs_may_have_states_that_float16_does_not_hold():
    x = sample()
    x |= {name: x[name] * 2.0**-13 for name in ("v", "initial_state")}
    x = {name: y.to(torch.float16 if name in "qkv" else torch.float32) for name, y in x.items()}
    o, state = chunk_qdelta(**x, scale=0.25, output_final_state=True, impl="triton")
    want = recurrent_qdelta(**{n: y.double() for n, y in x.items()}, scale=0.25, output_final_state=True)
    assert want.state.abs().max() > 1e5
    assert relative(o, want.o) < 5e-3 and relative(state, want.state) < 5e-3


def test_rules_that_contract_have_no_units():
    from needlework.ops.delta.triton_scalar import grows

    assert not grows(torch.bfloat16, False) and not grows(torch.float32, True) and grows(torch.float16, True)
