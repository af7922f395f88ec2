"""CCQ's Triton kernels against the definition, in Triton's interpreter: values, the final state and every gradient."""

import os
from dataclasses import replace
from functools import partial, wraps
from itertools import product

import pytest
import torch

from needlework.ops.ccq import chunk_ccq
from needlework.ops.ccq.arguments import CcqInputs
from needlework.ops.ccq.curvature import operands
from needlework.ops.ccq.reference import literal_ccq, recurrent_ccq
from needlework.ops.ccq.spec import SPECS
from needlework.ops.ccq.state import CcqOutput, CurvatureState, empty_state, symmetric
from needlework.ops.runtime import launch_configs
from needlework.testing.compare import assert_close, differentiate, poisoned
from needlework.testing.errors import assert_within_budget, operand, over_budget, stored
from needlework.testing.rows import chosen, covering
from needlework.testing.slots import slots_hold_states

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")

ENGINE = "ccq/curvature"
STATE = CurvatureState._fields
PACKED = torch.tensor([0, 17, 17, 33, 60])


def make(B, T, H, HV, K, *, gated=False, carried=False, N=None, keys="random"):
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    N = N or B
    k = normal(B, T, H, K) + (2 if keys == "clustered" else 0)
    if keys == "identical":
        k = k[:, :1].expand_as(k).clone()
    inputs = {"q": normal(B, T, H, K), "k": torch.nn.functional.normalize(k, dim=-1), "eta": normal(B, T, HV).sigmoid()}
    if gated:
        inputs["g"] = -0.1 * normal(B, T, H).abs()
        inputs["g"][:, 3::7] = -30
        inputs["g"][:, 4::7] = -1e-3
    state = empty_state(N, H, K, dtype=torch.float64)
    if carried:
        seen = normal(N, H, 5, K)
        mean = seen.mean(2)
        seen = seen - mean[:, :, None]
        state = CurvatureState(seen.mT @ seen, mean, torch.full((N, H), 5.0, dtype=torch.float64))
    return inputs | state._asdict()


def clean(inputs, cu_seqlens=None):
    state = CurvatureState(inputs["C"], inputs["mean"], inputs["n"])
    given = (inputs["q"], inputs["k"], inputs["eta"], inputs.get("g"))
    return chunk_ccq(*given, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens, impl="triton")


def define(inputs, cu_seqlens=None, form=recurrent_ccq, **settings):
    # the kernels' C is symmetric by contract: its gradient is compared along symmetric changes
    state = CurvatureState((inputs["C"] + inputs["C"].mT) / 2, inputs["mean"], inputs["n"])
    given = (inputs["q"], inputs["k"], inputs["eta"], inputs.get("g"))
    cleaned, final = form(*given, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens, **settings)
    # and so is the final C's
    return CcqOutput(cleaned, CurvatureState((final.C + final.C.mT) / 2, final.mean, final.n))


def compare(inputs, cu_seqlens=None):
    ours = differentiate(lambda x: clean(x, cu_seqlens), inputs)
    exact = differentiate(lambda x: define(x, cu_seqlens), inputs)
    assert_close(ours[0], exact[0], "values")
    assert_close(ours[1], exact[1], "gradients")


@pytest.mark.parametrize("T, gated", covering([1, 37, 100], [False, True], pairs=False))
def test_any_length_is_the_definition(T, gated):
    compare(make(2, T, 1, 1, 12, gated=gated))


@pytest.mark.parametrize("gated", [False, True])
def test_grouped_value_heads_share_statistics_that_go_on_from_a_state(gated):
    compare(make(2, 37, 2, 4, 12, gated=gated, carried=True))


@pytest.mark.parametrize("carried, gated", covering([False, True], [False, True], pairs=False))
def test_packed_sequences_an_empty_one_among_them(gated, carried):
    compare(make(1, 60, 1, 2, 12, gated=gated, carried=carried, N=4), PACKED)


@pytest.mark.parametrize("gated", [False, True])
def test_several_tiles_of_rows_that_end_inside_one(gated):
    compare(make(1, 40, 1, 1, 40, gated=gated, carried=True))


@pytest.mark.parametrize("HV", [1, 2])
def test_mild_gates_bring_a_state_through_chunks(HV):
    inputs = make(1, 75, 1, HV, 40, gated=True, carried=True)
    inputs["g"] = inputs["g"].clamp(min=-0.05)
    compare(inputs)


def rows_of(BV, NP):
    """The row of the copy engine, in tiles that the interpreter is done with."""
    own = {"walk": {"BV": BV, "NP": NP}, "backward": {"BV": BV, "NP": NP + 1, "ND": 1}, "means": {"BD": 16, "BT": 2}}
    own |= {name: {"BD": 16} for name in ("sums", "intra", "adjoint")}
    return launch_configs.forced(ENGINE, "sm90-k256", shared={"C": 32}, **own)


@pytest.mark.parametrize("BV, cu_seqlens, gated", covering([16, 32], [None, PACKED], [False, True]))
def test_the_copy_engine_reads_the_same_and_chains_are_cut(BV, cu_seqlens, gated):
    inputs = make(1, 60, 1, 2, 24, gated=gated, carried=True, N=1 if cu_seqlens is None else 4)
    with rows_of(BV, NP=3 if BV == 16 else 1):
        compare(inputs, cu_seqlens)


@pytest.mark.parametrize("BV, gated, HV", covering([64, 128], [False, True], [1, 2]))
def test_two_tiles_of_columns_the_own_rows_first(BV, gated, HV):
    inputs = make(1, 70, 1, HV, 136, gated=gated, carried=True)
    with rows_of(BV, NP=2):
        compare(inputs)


def length_of(heads, documents, own=None):
    """Chunks of 32 tokens that a segment of packed documents has, on a GPU with 132 places."""
    row = next(row for row in launch_configs.rows(ENGINE) if row.name == "sm90-k256")
    ends = torch.tensor([0, *documents]).cumsum(0)
    tokens = torch.empty(1, int(ends[-1]), heads, 192, device="meta")
    inputs = CcqInputs(tokens, tokens, tokens[..., 0], None)
    return operands.task_of(inputs, ends, None, None, row, own).length


def test_documents_are_cut_where_the_longest_leaves_places_free():
    one_long, even = [32 * 2000, *[320] * 25], [32 * 90] * 26
    assert length_of(1, one_long) > 0 and length_of(1, even) == 0
    assert length_of(27, one_long) == 0, "where all places are taken each is slower"


def test_what_a_tables_documents_are_is_not_read():
    even = [32 * 90] * 26
    assert length_of(1, even, own=object()) > 0, "one is taken to have half of the tokens"


@pytest.fixture
def cut(monkeypatch):
    """Sequences in segments of at most two chunks."""
    monkeypatch.setattr(operands, "segment_length", lambda *_, **__: 2)


@pytest.mark.parametrize("gated, carried", list(product([False, True], [False, True])))
def test_segments_of_a_row_are_walked_side_by_side(cut, gated, carried):
    inputs = make(2, 100, 1, 2, 12, gated=gated, carried=carried)
    if gated:  # what is before a segment counts
        inputs["g"] = inputs["g"].clamp(min=-0.05)
    compare(inputs)


@pytest.mark.parametrize("gated, carried", covering([False, True], [False, True], pairs=False))
def test_segments_of_packed_sequences_an_empty_one_among_them(cut, gated, carried):
    compare(make(1, 130, 1, 1, 12, gated=gated, carried=carried, N=4), torch.tensor([0, 50, 50, 67, 130]))


@pytest.mark.parametrize("BV, gated", covering([64, 128], [False, True]))
def test_segments_of_two_tiles_of_columns(cut, BV, gated):
    inputs = make(1, 150, 1, 1, 136, gated=gated, carried=True)
    with rows_of(BV, NP=2):
        compare(inputs)


def test_segments_read_no_memory_that_nobody_wrote(cut):
    with poisoned():
        compare(make(1, 130, 1, 1, 24, gated=True, carried=True, N=4), torch.tensor([0, 50, 50, 67, 130]))


def test_segments_without_a_state_or_its_gradient(cut):
    inputs = make(1, 100, 1, 1, 24, gated=True)
    inputs["g"] = inputs["g"].clamp(min=-0.05)
    tokens = {name: inputs[name] for name in ("q", "k", "eta", "g")}
    ours = differentiate(lambda x: chunk_ccq(**x, impl="triton"), tokens)
    exact = differentiate(lambda x: CcqOutput(define(inputs | x).q, None), tokens)
    assert_close(ours[0], exact[0], "values")
    assert_close(ours[1], exact[1], "gradients")


@pytest.mark.parametrize("gated", [False, True])
def test_memory_that_holds_nan_changes_nothing(gated):
    with poisoned():
        compare(make(1, 60, 1, 1, 12, gated=gated, N=4), PACKED)


@pytest.mark.parametrize("cu_seqlens", [None, PACKED])
def test_without_a_state_it_starts_from_nothing(cu_seqlens):
    inputs = make(1, 60, 1, 1, 12, gated=True, N=1 if cu_seqlens is None else 4)
    tokens = {name: inputs[name] for name in ("q", "k", "eta", "g")}
    settings = {"output_final_state": True, "cu_seqlens": cu_seqlens}
    ours = differentiate(lambda x: chunk_ccq(**x, **settings, impl="triton"), tokens)
    exact = differentiate(lambda x: define(inputs | x, cu_seqlens), tokens)
    assert_close(ours[0], exact[0], "values")
    assert_close(ours[1], exact[1], "gradients")


def test_one_call_is_two_calls_that_hand_the_state_on():
    inputs = make(2, 50, 1, 1, 12, gated=True)
    whole = clean(inputs)
    tokens = ("q", "k", "eta", "g")
    first = clean(inputs | {name: inputs[name][:, :21] for name in tokens})
    second = clean(inputs | {name: inputs[name][:, 21:] for name in tokens} | first.state._asdict())
    together = {"q": torch.cat([first.q, second.q], 1), **second.state._asdict()}
    assert_close(together, {"q": whole.q, **whole.state._asdict()}, "resumed")


def test_identical_keys_leave_the_query():
    inputs = make(2, 37, 1, 1, 12, keys="identical")
    cleaned, _ = clean(inputs)
    assert (cleaned - inputs["q"]).abs().max() < 1e-13


def test_a_gate_of_zero_is_no_gate_to_the_bit():
    inputs = make(1, 37, 1, 1, 12)
    plain, gated = clean(inputs), clean(inputs | {"g": torch.zeros(1, 37, 1, dtype=torch.float64)})
    assert torch.equal(plain.q, gated.q) and torch.equal(plain.state.C, gated.state.C)


def test_no_token_keeps_the_state():
    inputs = make(2, 0, 2, 2, 12, carried=True)
    ours, exact = differentiate(clean, inputs), differentiate(define, inputs)
    assert_close(ours[0], exact[0], "values")
    assert_close(ours[1], exact[1], "gradients")


def errors(inputs, dtype):
    """Of outputs, states and gradients, over the budget that the definition and the printed form have in that dtype."""
    kept, wide, single = stored(inputs, dtype, ("q", "k"))
    rounded = operand(dtype)
    ways = (
        differentiate(clean, kept),
        differentiate(define, wide),
        differentiate(lambda x: define(x, operand=rounded), single),
        differentiate(lambda x: define(x, form=literal_ccq, operand=rounded, chunk_size=32), single),
    )
    return over_budget(*({**values, **gradients} for values, gradients in ways))


@pytest.mark.parametrize(
    "dtype, keys, gated",
    chosen(
        product([torch.float32, torch.float16], ["random", "clustered"], [False, True]),
        quick=[(torch.float32, "clustered", True), (torch.float16, "random", False)],
    ),
)
def test_errors_stay_within_twice_the_definitions_own(dtype, keys, gated):
    found = errors(make(1, 96, 2, 2, 16, gated=gated, keys=keys), dtype)
    # of an empty state: nothing has been seen, and n is a count
    assert_within_budget({name: ratio for name, ratio in found.items() if name not in ("dC", "dmean", "dn", "state.n")})


def test_a_state_behind_strong_gates_keeps_its_gradients_digits():
    """dC is 1e-13 of the others: float32's exponent has room, if gates are summed finely enough."""
    inputs = make(1, 70, 1, 1, 16, gated=True, carried=True)
    inputs["g"] = torch.full_like(inputs["g"], -30.0)
    assert_within_budget({"dC": errors(inputs, torch.float32)["dC"]})


@pytest.mark.parametrize("dtype, gated", covering([torch.float32, torch.float16], [False, True]))
def test_errors_of_segments_stay_within_it(cut, dtype, gated):
    inputs = make(1, 96, 2, 2, 16, gated=gated, carried=True, keys="clustered")
    assert_within_budget({name: ratio for name, ratio in errors(inputs, dtype).items() if name != "state.n"})


@pytest.mark.parametrize("HV", chosen([1, 2], quick=[2]))
def test_small_gradients_stay_in_float16s_range(HV):
    inputs = make(1, 40, 1, HV, 16)
    leaves = [inputs[name].to(torch.float16 if name in "qk" else torch.float32).requires_grad_() for name in ("q", "k", "eta")]
    cleaned = chunk_ccq(*leaves, impl="triton").q
    signs = torch.randn(cleaned.shape, generator=torch.Generator().manual_seed(1)).sign().half()
    large, small = (torch.autograd.grad(cleaned, leaves, signs * size, retain_graph=True) for size in (1, 2**-14))
    for one, other in zip(large, small, strict=True):
        torch.testing.assert_close(other.float() * 2**14, one.float(), rtol=1e-2, atol=5e-3)


@pytest.mark.parametrize("packed", [False, True])
def test_the_operators_pass_opcheck(packed):
    from needlework.ops.ccq.curvature.op import ccq_triton, ccq_triton_fwd

    inputs = make(1, 60, 1, 1, 12, gated=True, carried=True, N=4 if packed else 1)
    given = [inputs[name].float() for name in ("q", "k", "eta", "g", "C", "mean", "n")]
    for operator, differentiable in ((ccq_triton, False), (ccq_triton_fwd, True)):
        leaves = [x.clone().requires_grad_(differentiable) for x in given]
        torch.library.opcheck(
            operator,
            (*leaves, PACKED if packed else None),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )


def of_covariances(spec):
    """`spec` with states that are what every form takes them for: of an initial C forms read (C + Cᵀ)/2, of a table's C itself."""

    @wraps(spec.chunk)
    def chunk(**given):
        result = spec.chunk(**given)
        made = "state" not in given and "initial_state" not in given
        return result._replace(state=symmetric(result.state)) if made else result

    return replace(spec, chunk=chunk)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_slots_of_a_table_hold_the_states(spec):
    slots_hold_states(of_covariances(spec), T=40, impls=("triton",))


def on_a_table(K, BV, NP):
    """Four packed sequences in slots of a larger table, of one of them nothing, of one what it had before."""
    inputs = make(1, 130, 1, 1, K, gated=True, carried=True, N=4)
    inputs["g"] = inputs["g"].clamp(min=-0.05)
    names, ends = ("q", "k", "eta", "g"), torch.tensor([0, 60, 60, 61, 130])
    table = CurvatureState(*(torch.cat((inputs[name], inputs[name]))[:, None].repeat_interleave(2, 1)[:, 1] for name in STATE))
    slots, fresh = torch.tensor([6, 1, 0, 3]), torch.tensor([False, True, False, False])
    start = CurvatureState(*(torch.where(fresh.view(-1, *[1] * (x.dim() - 1)), 0, x[slots]) for x in table))
    wanted = define({name: inputs[name] for name in names} | start._asdict(), ends)
    with rows_of(BV, NP):
        cleaned, none = chunk_ccq(
            *(inputs[name] for name in names), state=table, slots=slots, fresh=fresh, cu_seqlens=ends, impl="triton"
        )
    assert none is None
    found = {"q": cleaned, **{name: x[slots] for name, x in table._asdict().items()}}
    assert_close(found, {"q": wanted.q, **wanted.state._asdict()}, "on a table")


@pytest.mark.parametrize("K, BV, NP", [(24, 16, 5), (136, 128, 3)])
def test_cut_chains_begin_and_end_in_the_same_slots(K, BV, NP):
    """Programs that read a slot and such that write it; rows of C that end inside a tile, and two tiles of columns."""
    on_a_table(K, BV, NP)


def test_segments_begin_and_end_in_the_same_slots(cut):
    on_a_table(24, 16, 5)


@pytest.mark.parametrize("ends", [None, torch.tensor([0, 7, 7, 20])])
def test_a_call_on_a_table_reads_nothing_back(ends, monkeypatch):
    """What the host asked a tensor for, a CUDA graph could not hold."""
    inputs = make(3 if ends is None else 1, 20, 1, 1, 12, gated=True, carried=True, N=3)
    table = CurvatureState(*(inputs[name] for name in STATE))
    call = partial(chunk_ccq, *(inputs[name] for name in ("q", "k", "eta", "g")), state=table, cu_seqlens=ends, impl="triton")
    slots, fresh = torch.tensor([2, 0, -1]), torch.tensor([True, False, False])
    read_back = lambda *_: pytest.fail("a number was read back")
    for name in ("item", "tolist", "nonzero", "__bool__", "__int__", "__index__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, read_back)
    call(slots=slots, fresh=fresh)


@pytest.mark.parametrize("packed", [False, True])
def test_the_operator_on_a_table_passes_opcheck(packed):
    from needlework.ops.ccq.curvature.op import ccq_triton_slots

    inputs = make(1, 60, 1, 1, 12, gated=True, carried=True, N=4)
    given = [inputs[name].float() for name in ("q", "k", "eta", "g", *STATE)]
    of_sequences = (torch.tensor([3, 0, -1, 1]), None, PACKED) if packed else (torch.tensor([2]), torch.tensor([True]), None)
    torch.library.opcheck(ccq_triton_slots, (*given, *of_sequences), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.slow
def test_it_compiles_without_a_graph_break():
    inputs = make(1, 20, 1, 1, 12, gated=True)
    tokens = [inputs[name].float() for name in ("q", "k", "eta", "g")]
    whole = lambda *x: chunk_ccq(*x, output_final_state=True, impl="triton")
    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
    leaves = [x.clone().requires_grad_() for x in tokens]
    expected, found = whole(*tokens), compiled(*leaves)
    assert torch.equal(found.q, expected.q) and torch.equal(found.state.C, expected.state.C)
    found.q.sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in leaves)
