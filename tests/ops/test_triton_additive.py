"""The additive engine's kernels in Triton's interpreter against the definition: values, states and every gradient."""

import dataclasses
import os
from functools import partial

import pytest
import torch

from needlework.ops.common.samples import decay, normal, unit
from needlework.ops.delta.inputs import DeltaInputs
from needlework.ops.delta.op import chunk_delta
from needlework.ops.delta.recurrent import recurrent_delta
from needlework.ops.runtime import launch_configs
from needlework.ops.runtime.launch_configs import forced
from needlework.ops.specs import specs
from needlework.testing.budget import budgeted
from needlework.testing.compare import assert_close, poisoned, relative
from needlework.testing.rows import covering

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")

ENGINE = "delta/additive"
SCALE = 0.25  # a power of two: a kernel's scalar arguments are float32
PACKED = torch.tensor([0, 20, 20, 53, 60])


def inputs(B=1, T=37, H=1, HV=4, K=16, V=12, N=None, style="random", state=True, gate=True, dtype=torch.float64):
    generator = torch.Generator().manual_seed(T + K)
    x = {
        "q": unit(normal(generator, B, T, H, K)),
        "k": unit(normal(generator, B, T, H, K)),
        "v": normal(generator, B, T, HV, V),
    }
    x["g"] = decay(generator, B, T, HV, style=style) if gate else None
    x["initial_state"] = normal(generator, N or B, HV, K, V) if state else None
    wide = torch.promote_types(dtype, torch.float32)
    return {n: None if y is None else y.to(dtype if n in ("q", "k", "v") else wide) for n, y in x.items()}


def with_gradients(call, x):
    """o, the final state and the gradients of all that is given."""
    leaves = {name: None if y is None else y.clone().requires_grad_() for name, y in x.items()}
    results = call(leaves)
    generator = torch.Generator().manual_seed(7)
    cotangents = [normal(generator, *y.shape).to(y.dtype) for y in results]
    given = {f"d{name}": y for name, y in leaves.items() if y is not None}
    gradients = torch.autograd.grad(results, list(given.values()), cotangents)
    return dict(zip(("o", "state", *given), (*(y.detach() for y in results), *gradients), strict=True))


def kernels(cu_seqlens=None):
    from needlework.ops.delta.additive.op import additive

    return lambda x: additive(DeltaInputs(**x), cu_seqlens, scale=SCALE)


def definition(cu_seqlens=None):
    return lambda x: tuple(recurrent_delta(**x, scale=SCALE, output_final_state=True, cu_seqlens=cu_seqlens))


def agree(x, cu_seqlens=None):
    assert_close(with_gradients(kernels(cu_seqlens), x), with_gradients(definition(cu_seqlens), x), "the definition's")


@pytest.mark.parametrize(
    "row",
    [
        {"T": 1, "HV": 2},
        {"B": 2, "T": 37, "style": "strong"},
        {"B": 2, "T": 32, "state": False},
        {"gate": False},
        # three programs sum two heads each; states of three tiles, of keys that fill none
        {"H": 2, "HV": 12, "K": 40, "V": 80, "T": 19},
        {"T": 60, "N": 4, "HV": 2},
        # a key of its own for each head, and one for three, which are summed outside
        {"B": 2, "H": 3, "HV": 3, "style": "strong"},
        {"H": 2, "HV": 6, "K": 40, "V": 80, "T": 19},
        {"H": 2, "HV": 2, "gate": False},
        {"H": 2, "HV": 2, "T": 60, "N": 4},
        # keys of three tiles
        {"HV": 2, "K": 136, "T": 35},
        {"H": 2, "HV": 2, "K": 136, "T": 35},
    ],
    ids=str,
)
def test_values_states_and_every_gradient_are_the_definitions(row):
    agree(inputs(**row), PACKED if "N" in row else None)


@pytest.mark.parametrize("length, packed", [(2, False), (1, True), (2, True)])
def test_segments_are_the_sequence_with_every_gradient(length, packed, monkeypatch):
    from needlework.ops.delta.additive import op

    monkeypatch.setattr(op, "segment_length", lambda *_, **settings: length)
    # of packed sequences some are one segment, one of them without a chunk
    x = inputs(T=60, HV=2, N=4) if packed else inputs(B=2, T=70, HV=2, K=24)
    agree(x, PACKED if packed else None)


def test_a_call_without_gradients_gives_the_same_bits():
    from needlework.ops.delta.additive.op import delta_additive, delta_additive_fwd

    arguments = (*DeltaInputs(**inputs(T=60, N=4)), PACKED, SCALE)
    for one, other in zip(delta_additive(*arguments), delta_additive_fwd(*arguments)[:2], strict=True):
        assert torch.equal(one, other)
    tests = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(delta_additive_fwd, arguments, test_utils=tests)


def test_small_gates_beside_large_ones_keep_their_digits():
    """In float32 a difference of prefix sums of 1e4 would know a gate of 1e-3 to one digit."""
    x = inputs(T=16, HV=2, state=False)
    x["g"] = torch.full_like(x["g"], -1e-3)
    x["g"][:, 2:8] = -1400.0
    exact = with_gradients(definition(), x)
    found = with_gradients(kernels(), {name: None if y is None else y.float() for name, y in x.items()})
    for name in ("o", "dq", "dk", "dv", "dg"):
        assert relative(found[name].double()[:, 8:], exact[name][:, 8:]) < 1e-5, name


def test_without_tokens_the_state_and_its_gradient_pass_through():
    x = inputs(T=0)
    found = with_gradients(kernels(), x)
    assert torch.equal(found["state"], x["initial_state"]) and found["dinitial_state"].shape == x["initial_state"].shape
    assert found["dinitial_state"].any() and not found["dq"].numel()


def test_what_was_not_written_is_not_read():
    # of seven chunks the sixth is nobody's, the fifth a sequence's
    x, cu_seqlens = inputs(T=53, N=3, HV=2), torch.tensor([0, 20, 20, 53])
    clean = with_gradients(kernels(cu_seqlens), x)
    with poisoned():
        filled = with_gradients(kernels(cu_seqlens), x)
    for name, y in clean.items():
        assert torch.equal(y, filled[name]), name


def test_a_sequence_is_the_same_beside_others():
    x = inputs(B=3, T=37, HV=4)
    together = with_gradients(kernels(), x)
    alone = with_gradients(kernels(), {name: y[:1] for name, y in x.items()})
    assert torch.equal(alone["o"], together["o"][:1]) and torch.equal(alone["state"], together["state"][:1])


def test_the_copy_engine_loads_and_stores_the_same(monkeypatch):
    from needlework.ops.delta.additive import op

    config = launch_configs.launch_config(ENGINE, torch.device("cpu"), torch.float64, 16, 12)
    monkeypatch.setattr(op, "launch_config", lambda *_: config._replace(name="tma", tma=True))
    agree(inputs(T=37, HV=2, V=12))


@pytest.mark.parametrize("dtype, style", covering((torch.bfloat16, torch.float32), ("random", "strong"), pairs=False), ids=str)
@pytest.mark.parametrize("name", ["delta/grouped", "mamba3"])
def test_every_result_is_within_the_error_budget(name, dtype, style, bfloat16_in_the_interpreter):
    """Of heads that share a key, and of Mamba-3's, which have their own."""
    spec = next(spec for spec in specs() if spec.name == name)
    spec = dataclasses.replace(spec, chunk=partial(spec.chunk, impl="triton"))
    for what, ratio in budgeted(spec, dtype, 6, 70, style, torch.device("cpu")).items():
        assert ratio <= 1, f"{what}: error is {ratio:.2f} x its budget"


def test_value_heads_that_share_keys_take_this_engine_and_no_powers(monkeypatch, bfloat16_in_the_interpreter):
    """Nothing of it is scaled: bfloat16 has float32's range."""
    from needlework.ops.delta import op, scaled

    def refuse(*_):
        raise AssertionError("not this engine's")

    monkeypatch.setattr(scaled, "of_states", refuse)
    monkeypatch.setattr(op, "_engine", refuse)
    x = inputs(HV=2, T=9, dtype=torch.bfloat16)
    x["v"] *= 2.0**60
    o = chunk_delta(**x, impl="triton").o
    assert o.isfinite().all() and o.abs().max() > 2.0**50
    for other in (inputs(H=2, HV=2, T=9), inputs(K=200, T=9), inputs(T=9) | {"beta": torch.ones(1, 9, 4, dtype=torch.float64)}):
        with pytest.raises(AssertionError, match="not this engine's"):
            chunk_delta(**other, impl="triton")


def test_the_chunk_of_forward_and_backward_must_be_one():
    x = inputs(T=20, HV=2)
    leaves = {name: y.requires_grad_() for name, y in x.items()}
    o, _ = kernels()(leaves)
    with forced(ENGINE, shared={"C": 32}), pytest.raises(RuntimeError, match="chunks of 16"):
        o.sum().backward()
