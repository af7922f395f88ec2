"""States that grow past what float16 operands hold: the kernels' bf16 fallback, in Triton's interpreter.

The float64 tests launch nothing but the fallback, with float64 for every type: each tensor must be the definition's to the last
digits. Those in half precision mend the interpreter, whose bfloat16 is a uint16: products are its numbers', and it rounds.
"""

import dataclasses
import os
from functools import partial

import pytest
import torch

from needlework.ops.common.samples import normal, unit
from needlework.ops.delta.inputs import DeltaInputs
from needlework.ops.qdelta import chunk_qdelta, recurrent_qdelta
from needlework.ops.qdelta.spec import growing
from needlework.ops.runtime.launch_configs import forced
from needlework.ops.specs import specs
from needlework.testing.budget import budgeted
from needlework.testing.compare import EXACT, differentiate, poisoned, relative, whole
from needlework.testing.rows import chosen

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # what FORM 1 leaves
]


def started(generator, B, T, style="random", *, N=None, q_read=False, size=1.0, **sizes):
    """`growing`, from a state and with a query of its own."""
    x = growing(generator, B, T, style, **sizes)
    (H, K), (HV, V) = x["k"].shape[2:], x["v"].shape[2:]
    if q_read:
        x["q_read"] = unit(normal(generator, B, T, H, K))
    return x | {"v": size * x["v"], "initial_state": size * normal(generator, N or B, HV, K, V)}


def sample(B=1, T=160, seed=0, **sizes):
    return started(torch.Generator().manual_seed(seed), B, T, **sizes)


def overflow_of(x, dtype=torch.bfloat16):
    from needlework.ops.delta.scalar.op import delta_scalar_fwd
    from needlework.ops.delta.scalar.operands import Saved

    tokens = {n: x[n].to(dtype if n in "qkv" else torch.float32) for n in ("q", "k", "v", "g", "beta", "lam")}
    _, _, *kept = delta_scalar_fwd(*DeltaInputs(**tokens, initial_state=x["initial_state"].float()), None, 0.25)
    return Saved(*kept).overflow


@pytest.fixture
def fallback_in_float64(monkeypatch):
    from needlework.ops.delta.scalar import backward as scalar_backward
    from needlework.ops.delta.scalar import forward as scalar_forward
    from needlework.ops.delta.scalar import operands, transitions
    from needlework.ops.runtime.triton_types import TYPES

    double = TYPES[torch.float64]
    caches = (operands.scan_constants, scalar_backward.constants)
    for module in (scalar_forward, scalar_backward, transitions):
        monkeypatch.setattr(module, "forms", lambda dtype, lam: (2,))
    empty = operands.Saved.empty
    overflown = lambda *given, **settings: empty(*given, **settings)._replace(overflow=torch.ones(1, dtype=torch.int32))
    monkeypatch.setattr(operands.Saved, "empty", overflown)
    for module in (operands, scalar_backward):
        of_form = lambda dtype, form: dict(BT=double, ST=double, TT=double, SOLVE="ieee", FORM=form)
        monkeypatch.setattr(module, "operand_types", of_form)
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


def within_budget(x, T, dtype=torch.bfloat16, style="random"):
    spec = next(spec for spec in specs() if spec.name == "qdelta")
    spec = dataclasses.replace(spec, chunk=partial(spec.chunk, impl="triton"), inputs=x)
    for name, ratio in budgeted(spec, dtype, 1, T, style, torch.device("cpu")).items():
        assert ratio <= 1, f"{name}: error is {ratio:.2f} x its budget"


def test_the_sample_grows_past_float16():
    o, state = recurrent_qdelta(**sample(), output_final_state=True)
    assert state.abs().max() > 2**20 and o.isfinite().all()


@pytest.mark.parametrize("style", ("random", "cut"))
def test_the_fallback_is_the_rule(fallback_in_float64, style):
    check(sample(style=style))


@pytest.mark.parametrize(
    "sizes", ({"q_read": True}, {"K": 136, "V": 40, "HV": 1, "T": 112}, {"H": 2, "HV": 4, "V": 72, "K": 8, "T": 112})
)
def test_the_fallback_at_other_sizes(fallback_in_float64, sizes):
    check(sample(**sizes))


def test_the_fallback_of_packed_sequences_and_of_an_empty_one(fallback_in_float64):
    check(sample(T=150, N=4), cu_seqlens=torch.tensor([0, 100, 100, 133, 150]))


def test_the_fallback_goes_on_where_a_chain_is_cut(fallback_in_float64):
    check(sample(B=3, T=112, HV=1), {name: {"NP": 2} for name in ("scan", "adjoint", "replay_forward")})


def test_the_fallback_of_segments(fallback_in_float64, monkeypatch):
    from needlework.ops.delta.scalar import op as scalar_op

    monkeypatch.setattr(scalar_op, "_segment_length", lambda *given: 4)
    check(sample(T=160))


@pytest.mark.parametrize("style", chosen(("random", "cut"), quick=("cut",)))
def test_bfloat16_holds_what_grows_within_its_budget(bfloat16_in_the_interpreter, style):
    assert overflow_of(sample(style=style)) == 1
    within_budget(started, 160, style=style)


def test_bfloat16_holds_what_grows_in_segments(bfloat16_in_the_interpreter, monkeypatch):
    from needlework.ops.delta.scalar import op as scalar_op

    monkeypatch.setattr(scalar_op, "_segment_length", lambda *given: 4)
    within_budget(started, 160)


def test_gradients_that_grow_where_no_state_does(bfloat16_in_the_interpreter):
    small = partial(started, size=2.0**-20)
    assert overflow_of(small(torch.Generator().manual_seed(0), 1, 160)) == 0
    within_budget(small, 160)


def test_a_row_beside_one_that_grows_keeps_its_numbers(bfloat16_in_the_interpreter):
    spec = next(spec for spec in specs() if spec.name == "qdelta")
    given = spec.inputs(torch.Generator().manual_seed(0), 1, 96, "random")
    (_, _, H, K), (HV, V) = given["k"].shape, given["v"].shape[2:]
    grown = growing(torch.Generator().manual_seed(0), 1, 96, H=H, HV=HV, K=K, V=V)
    usual = {n: x for n, x in given.items() if n in grown}
    weights = normal(torch.Generator().manual_seed(1), *usual["v"].shape)

    def row(x, dtype, op):
        """o of the first row and its gradients."""
        x = {n: y.to(dtype if n in "qkv" else torch.promote_types(dtype, torch.float32)).requires_grad_() for n, y in x.items()}
        o = op(**x, scale=0.25)[0]
        o.backward((weights.expand_as(o)).to(o.dtype))
        return {"o": o[:1].detach()} | {n: y.grad[:1] for n, y in x.items()}

    beside = row({n: torch.cat((x, grown[n])) for n, x in usual.items()}, torch.bfloat16, partial(chunk_qdelta, impl="triton"))
    for name, want in row(usual, torch.float64, recurrent_qdelta).items():
        assert relative(beside[name], want) <= 2.0**-6, name  # four roundings to bfloat16


def test_memory_that_nothing_wrote_sets_no_overflow_flag(bfloat16_in_the_interpreter, monkeypatch):
    """Packed sequences lie apart, and of the chunks that none of them has nothing is written."""
    from needlework.ops.delta.scalar import backward as scalar_backward

    flags, run = [], scalar_backward.run

    def spied(kernel, grid, *arguments, **constants):
        if "p_overflow_bwd" in kernel.arg_names:
            flags.append(arguments[kernel.arg_names.index("p_overflow_bwd")])
        return run(kernel, grid, *arguments, **constants)

    monkeypatch.setattr(scalar_backward, "run", spied)
    inputs = sample(T=60, N=4)
    x = {n: y.to(torch.bfloat16 if n in "qkv" else torch.float32).requires_grad_() for n, y in inputs.items()}
    with poisoned():
        o, state = chunk_qdelta(
            **x, scale=0.25, cu_seqlens=torch.tensor([0, 17, 17, 34, 60]), output_final_state=True, impl="triton"
        )
        (o.float().sum() + state.sum()).backward()
    assert flags and not any(flag.any() for flag in flags)
    assert all(y.grad.isfinite().all() for y in x.values())


def test_what_does_not_grow_needs_no_fallback(bfloat16_in_the_interpreter):
    assert overflow_of(sample(T=16)) == 0


def test_float16_inputs_may_have_states_that_float16_does_not_hold(bfloat16_in_the_interpreter):
    x = {name: y.to(torch.float16 if name in "qkv" else torch.float32) for name, y in sample(size=2.0**-13).items()}
    o, state = chunk_qdelta(**x, scale=0.25, output_final_state=True, impl="triton")
    want = recurrent_qdelta(**{n: y.double() for n, y in x.items()}, scale=0.25, output_final_state=True)
    assert want.state.abs().max() > 1e5
    assert relative(o, want.o) < 5e-2 and relative(state, want.state) < 5e-2


@pytest.mark.parametrize(
    "T, size, length, NP", ((160, 1.0, 0, 216), (112, 1.0, 0, 2), (160, 1.0, 4, 216), (16, 2.0**-20, 0, 216))
)
def test_a_slot_table_keeps_what_the_fallback_starts_from(bfloat16_in_the_interpreter, monkeypatch, T, size, length, NP):
    """In place FORM 1 writes the slots from which FORM 2 is to start: bits are those of a call from initial states."""
    from needlework.ops.delta.scalar import op as scalar_op

    monkeypatch.setattr(scalar_op, "_segment_length", lambda *given: length)
    x = sample(B=3, T=T, size=size, HV=1)
    x = {n: y.to(torch.bfloat16 if n in "qkv" else torch.float32) for n, y in x.items()}
    assert bool(overflow_of(x)) == (T > 16)
    table = torch.full((5, *x["initial_state"].shape[1:]), torch.nan)
    slots, fresh = torch.tensor([3, -1, 0]), torch.tensor([False, False, True])
    table[3] = x["initial_state"][0]
    x["initial_state"][1:] = 0
    call = partial(chunk_qdelta, impl="triton", scale=0.25)
    with forced("delta/scalar", scan={"NP": NP}):
        o, state = call(**x, output_final_state=True)
        del x["initial_state"]
        found = call(**x, state=table, slots=slots, fresh=fresh).o
    assert torch.equal(found, o) and torch.equal(table[[3, 0]], state[[0, 2]]) and table[[1, 2, 4]].isnan().all()


def test_rules_that_contract_have_no_fallback():
    from needlework.ops.delta.scalar.operands import forms

    assert forms(torch.bfloat16, False) == (0,) == forms(torch.float32, True) and forms(torch.float16, True) == (1, 2)
