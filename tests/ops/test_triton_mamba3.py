"""Mamba-3's kernels where the battery in the interpreter does not go, or takes long to go: documents and pieces, steps, slots, any pairs,
bfloat16 and its powers of two, rows of R."""

import dataclasses
import os
from functools import partial

import pytest
import torch

from needlework.ops.delta.scaling import of_states, shares
from needlework.ops.mamba3 import empty_state, step_mamba3
from needlework.ops.mamba3.spec import SPECS, sample
from needlework.ops.mamba3.state import Mamba3State
from needlework.ops.runtime.launch_configs import forced
from needlework.testing.budget import budgeted
from needlework.testing.compare import assert_close, differentiate, leaves, make, tokens, whole
from needlework.testing.errors import assert_within_budget, over_budget
from needlework.testing.rows import chosen
from needlework.testing.slots import on_slots, slots_hold_states
from needlework.testing.steps import by_steps

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")

SISO, MIMO = (dataclasses.replace(spec, chunk=partial(spec.chunk, impl="triton")) for spec in SPECS)
BOTH = pytest.mark.parametrize("spec", [SISO, MIMO], ids=lambda spec: spec.name)


def same(call, want, inputs, where):
    """Values and gradients."""
    for got, exact in zip(differentiate(call, inputs), differentiate(want, inputs), strict=True):
        assert_close(got, exact, where)


def test_documents_go_on_from_states_and_leave_them():
    """One is empty, one ends at a tile's border; the states' gradients too."""
    ends = torch.tensor([0, 5, 5, 37, 41])
    states = dict(leaves(whole(SISO.recurrent)(make(SISO, 4, 3, seed=1))[-1]))
    inputs = make(SISO, 1, 41) | {f"state.{name}": x for name, x in states.items()}

    def call(chunk):
        split = lambda x: (Mamba3State(*(x.pop(f"state.{name}") for name in states)), x)

        def on(inputs):
            initial, given = split(dict(inputs))
            return chunk(**given, initial_state=initial, output_final_state=True, cu_seqlens=ends)

        return on

    same(call(SISO.chunk), call(SISO.recurrent), inputs, "packed")


def test_a_call_that_leaves_no_state_has_as_many_rows_as_tokens():
    inputs = make(SISO, 2, 32)
    same(lambda x: SISO.chunk(**x), lambda x: SISO.recurrent(**x), inputs, "no final state")


@BOTH
@pytest.mark.parametrize("BV", [2, 4, 8], ids="tiles of {}".format)
def test_steps_are_the_definition(spec, BV, monkeypatch):
    """States too, from which a padded row and a slot that nobody owns stay apart. The six values of a head are three tiles of three programs,
    two of one, or one."""
    monkeypatch.setenv("NEEDLEWORK_IMPL", "triton")
    single, wide = ({name: x.to(dtype) for name, x in make(spec, 3, 7).items()} for dtype in (torch.float32, torch.float64))
    exact, definition = (dict(leaves(whole(spec.recurrent)(x))) for x in (wide, single))
    with forced("mamba3/step", "plain", step={"BV": BV}):
        fast = by_steps(spec, single)
    assert_within_budget(over_budget(fast, exact, definition, definition))


@pytest.mark.parametrize("BV", [2, 4], ids="tiles of {}".format)
def test_steps_of_heads_in_two_groups(BV, monkeypatch):
    """Two rows of four heads, each two of which share a query and a key."""
    monkeypatch.setenv("NEEDLEWORK_IMPL", "triton")
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(2, 5, *shape, generator=g).double()
    inputs = {
        "q": draw(2, 8),
        "k": draw(2, 8),
        "v": draw(4, 6),
        "g": -draw(4).abs(),
        "dt": draw(4).abs() / 8,
        "lam": draw(4).sigmoid(),
    }
    inputs |= {"angle": draw(3), "q_bias": draw(4, 8)[0, 0], "k_bias": draw(4, 8)[0, 1]}
    with forced("mamba3/step", "plain", step={"BV": BV}):
        table = empty_state(2, 4, 8, 6, 3, dtype=torch.float64)
        found = [step_mamba3(**tokens(SISO, inputs, lambda x, t=t: x[:, t]), state=table) for t in range(5)]
    o, state = SISO.recurrent(**inputs, output_final_state=True)
    assert_close({"o": torch.stack(found, 1), **dict(leaves(table))}, {"o": o, **dict(leaves(state))}, "groups")


def test_a_call_on_slots_is_a_call_from_states():
    """Out of order, none, fresh, and empty sequences that leave their slots as they are."""
    ends, slots, fresh = [0, 9, 9, 9, 20, 37], [4, 1, 0, -1, 2], [False, False, True, False, True]
    on_slots(SPECS[0], "triton", make(SISO, 1, 37), slots, fresh, ends)


@pytest.mark.slow
@BOTH
def test_every_call_on_slots(spec):
    slots_hold_states(dataclasses.replace(spec, chunk=spec.chunk.func), T=37, impls=("triton",))


@pytest.mark.parametrize(
    ("pairs", "m"), chosen([(p, m) for p in ("even", "halves") for m in (1, 6)], quick=[("halves", 1), ("even", 6)])
)
def test_any_pairs_turn(pairs, m):
    """One of six, all of six; in the config of large K too."""
    inputs = make(SISO, 1, 20) | {"angle": torch.randn(1, 20, m, generator=torch.Generator().manual_seed(0)).double()}
    call, want = (lambda x, form=form: form(**x, pairs=pairs) for form in (SISO.chunk, SISO.recurrent))
    with forced("mamba3/siso", "plain"):
        same(call, want, inputs, f"{m} pairs, {pairs}")


def test_twelve_heads_of_two_keys_are_summed_in_groups():
    """Two heads a program of queries and keys, four of angles; pairs of a token and a head fill no whole number of programs."""
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(1, 37, *shape, generator=g).double()
    inputs = {"q": draw(2, 12), "k": draw(2, 12), "v": draw(12, 6), "g": -draw(12).abs(), "dt": draw(12).abs() / 8}
    inputs |= {"lam": draw(12).sigmoid(), "angle": draw(4), "q_bias": draw(12, 12)[0, 0], "k_bias": draw(12, 12)[0, 1]}
    same(lambda x: SISO.chunk(**x), lambda x: SISO.recurrent(**x), inputs, "groups")


def test_sums_of_angles_go_on_from_block_to_block_of_tiles_for_each_slice_of_angles():
    """Five tiles, two at a time, and six angles, two at a time."""
    inputs = make(SISO, 1, 70) | {"angle": torch.randn(1, 70, 6, generator=torch.Generator().manual_seed(0)).double()}
    with forced("mamba3/siso", "plain", starts={"BC": 2, "BS": 2}):
        same(lambda x: SISO.chunk(**x), lambda x: SISO.recurrent(**x), inputs, "blocks and slices")


@pytest.mark.parametrize(
    "by",
    [
        pytest.param({"q": 2.0**12, "q_bias": 2.0**12, "k": 2.0**12, "k_bias": 2.0**12, "v": 2.0**12}, id="large"),
        pytest.param({"dt": 2.0**-20, "g": 2.0**-20}, id="small steps"),
    ],
)
@pytest.mark.parametrize("engine", ["additive", "scalar"])
def test_bfloat16_has_its_own_range(engine, by, monkeypatch, bfloat16_in_the_interpreter):
    """The scalar engine's operands are float16: products of 2²⁴ would be infinite, and writes of 2⁻²² have no digits."""
    if engine == "scalar":
        every_engine_is_scalar(monkeypatch)
    scaled = lambda *given: {name: x * by.get(name, 1) for name, x in sample(*given).items()}
    found = budgeted(dataclasses.replace(SISO, inputs=scaled), torch.bfloat16, 2, 40, "random", torch.device("cpu"))
    assert max(found.values()) <= 1, found


def every_engine_is_scalar(monkeypatch):
    """As where the additive engine has no config."""
    from needlework.ops.mamba3.siso import engine

    monkeypatch.setattr(engine.Engine, "of", classmethod(lambda cls, q, v: engine.SCALAR))


@pytest.mark.parametrize("ends", [None, [0, 5, 5, 37, 41]], ids=["batch", "packed"])
def test_the_scalar_engine_walks_the_same_rows(ends, monkeypatch):
    """From a state and to one, with every gradient."""
    inputs = make(SISO, 1, 41)
    states = dict(leaves(whole(SISO.recurrent)(make(SISO, 1 if ends is None else 4, 3, seed=1))[-1]))
    where = {} if ends is None else {"cu_seqlens": torch.tensor(ends)}

    def call(x):
        state = Mamba3State(*(x[f"state.{name}"] for name in states))
        return SISO.chunk(**{n: x[n] for n in inputs}, initial_state=state, output_final_state=True, **where)

    given = inputs | {f"state.{name}": x for name, x in states.items()}
    want = differentiate(call, given)
    every_engine_is_scalar(monkeypatch)
    for got, exact in zip(differentiate(call, given), want, strict=True):
        assert_close(got, exact, "scalar")


@pytest.mark.parametrize(
    "dtype, K, name", [(torch.float16, 64, "scalar"), (torch.bfloat16, 200, "scalar"), (torch.bfloat16, 192, "additive")]
)
def test_the_engine_is_one_that_holds_the_numbers(dtype, K, name):
    from needlework.ops.mamba3.siso.engine import Engine

    q, v = torch.empty(1, 1, 1, K, dtype=dtype), torch.empty(1, 1, 1, 64, dtype=dtype)
    assert Engine.of(q, v).name == f"delta/{name}"


def test_a_warp_of_the_backward_has_as_many_pairs_as_its_registers_hold():
    """With 64 pairs of 16 tokens in one it would spill 1,480 bytes a thread on Hopper, with 32 each 88."""
    from needlework.ops.mamba3.siso.tiles import ENGINE, sizes
    from needlework.ops.runtime.launch_configs import launch_config

    config = launch_config(ENGINE, torch.device("cpu"), torch.bfloat16, 128, 64)
    warps = [sizes(config, "rows_bwd", torch.bfloat16, 1, 4, 128, 64, m, 0, False)["num_warps"] for m in (1, 32, 33, 64)]
    assert warps == [1, 1, 2, 2]


def largest(x, *axes):
    return torch.linalg.vector_norm(x, torch.inf, axes, keepdim=True).float()


@pytest.mark.parametrize("begun", ["at zero", "from states", "packed"])
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
def test_kernels_find_the_powers_of_the_page(begun, biased, monkeypatch, bfloat16_in_the_interpreter):
    """Each factor's own largest number decides in turn: of a token, a bias, a state."""
    from needlework.ops.mamba3.siso import powers
    from needlework.ops.mamba3.siso.launches import Inputs

    monkeypatch.setattr(powers, "TOKENS", 8)
    monkeypatch.setattr(powers, "BLOCK", 64)
    monkeypatch.setattr(powers, "AT_ONCE", 2)
    B, T, H, HV, K, V, N = (1 if begun == "packed" else 2), 37, 2, 4, 12, 20, (3 if begun == "packed" else 2)
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g)
    decay = draw(B, T, HV)
    for loud in ("q", "k", "v", "dt", "q_bias", "k_bias", "S", "state k", "state v"):
        size = lambda name: 2.0 ** (9 if name == loud else 3)  # noqa: B023
        q, k, v = (size(n) * draw(B, T, h, D) for n, h, D in (("q", H, K), ("k", H, K), ("v", HV, V)))
        dt = size("dt") * draw(B, T, HV).abs()
        biases = [size(f"{n}_bias") * draw(HV, K) if biased else None for n in "qk"]
        given = Inputs(q.bfloat16(), k.bfloat16(), v.bfloat16(), decay, dt, decay, decay, *biases)
        state, S = None, None
        if begun != "at zero":
            S, k0 = size("S") ** 3 * draw(N, HV, K, V), size("state k") * draw(N, HV, 1, K)
            state = Mamba3State(S, k0, size("state v") * draw(N, HV, V), draw(N, HV, 4))
        turned = lambda x, bias: (
            2**0.5 * (largest(x, 1, 3).repeat_interleave(HV // H, 2) + (0 if bias is None else largest(bias, 1)))
        )
        rows, values = turned(given.k, given.k_bias), largest(given.v, 1, 3)
        if state is not None:
            of = lambda x: largest(x, *range(2, x.dim())).view(N // B, B, HV).amax(0)[:, None, :, None]
            rows, values = torch.maximum(rows, of(state.k)), torch.maximum(values, of(state.v))
        bounds = turned(given.q, given.q_bias), rows, 2 * largest(dt, 1)[..., None] * values
        least = torch.tensor([1, 1, powers.LEAST])[:, None, None]
        expected = torch.stack([x.view(B, HV) * share for x, share in zip(bounds, shares(41, K, 1.0), strict=True)]).maximum(
            least
        )
        if S is not None:
            expected[2] = expected[2].maximum(of_states(S, B))
        found = powers.powers(given, state, 41)
        assert torch.equal(found, expected.double().log2().ceil().exp2().float()), loud
    assert powers.powers(given._replace(v=v), state, 41) is None, "float32 is not divided"


def test_rows_of_a_token_are_the_engine_s_tokens():
    inputs = tokens(MIMO, make(MIMO, 1, 37), lambda x: x[:, :20])
    same(whole(MIMO.chunk), whole(MIMO.recurrent), inputs, "two rows")
