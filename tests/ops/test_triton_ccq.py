"""CCQ's Triton kernels against the definition, in Triton's interpreter: values, the final state and every gradient."""

import pytest
import torch

from needlework.ops.ccq.reference import literal_ccq, recurrent_ccq
from needlework.ops.ccq.state import CurvatureState, empty_state
from needlework.ops.common import launch
from needlework.testing.compare import assert_close, differentiate
from needlework.testing.errors import error_over_budget, operand

pytestmark = pytest.mark.skip(
    reason="no op takes these kernels yet: a packed case reads what was never written, and dg is over the error budget"
)

ENGINE = "ccq/curvature"
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
    from needlework.ops.ccq.triton_op import clean

    state = CurvatureState(inputs["C"], inputs["mean"], inputs["n"])
    return clean(inputs["q"], inputs["k"], inputs["eta"], inputs.get("g"), state, cu_seqlens)


def define(inputs, cu_seqlens=None, form=recurrent_ccq, **settings):
    # the kernels' C is symmetric by contract: its gradient is compared along symmetric changes
    state = CurvatureState((inputs["C"] + inputs["C"].mT) / 2, inputs["mean"], inputs["n"])
    given = (inputs["q"], inputs["k"], inputs["eta"], inputs.get("g"))
    cleaned, final = form(*given, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens, **settings)
    # and so is the final C's
    return cleaned, CurvatureState((final.C + final.C.mT) / 2, final.mean, final.n)


def compare(inputs, cu_seqlens=None):
    ours = differentiate(lambda x: clean(x, cu_seqlens), inputs)
    exact = differentiate(lambda x: define(x, cu_seqlens), inputs)
    assert_close(ours[0], exact[0], "values")
    assert_close(ours[1], exact[1], "gradients")


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("T", [1, 37, 63, 100])
def test_any_length_is_the_definition(T, gated):
    compare(make(2, T, 2, 2, 12, gated=gated))


@pytest.mark.parametrize("gated", [False, True])
def test_grouped_value_heads_share_statistics_that_go_on_from_a_state(gated):
    compare(make(2, 37, 2, 4, 12, gated=gated, carried=True))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("carried", [False, True])
def test_packed_sequences_an_empty_one_among_them(gated, carried):
    compare(make(1, 60, 2, 2, 12, gated=gated, carried=carried, N=4), PACKED)


@pytest.mark.parametrize("gated", [False, True])
def test_several_tiles_of_rows_that_end_inside_one(gated):
    compare(make(1, 40, 1, 1, 40, gated=gated, carried=True))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("cu_seqlens", [None, PACKED])
def test_the_copy_engine_reads_the_same(gated, cu_seqlens):
    inputs = make(1, 60, 2, 4, 24, gated=gated, carried=True, N=1 if cu_seqlens is None else 4)
    with launch.forced(ENGINE, "sm90", scan={"BV": 16}, reverse={"BV": 16}):
        compare(inputs, cu_seqlens)


def test_identical_keys_leave_the_query():
    inputs = make(2, 37, 2, 2, 12, keys="identical")
    cleaned, _ = clean(inputs)
    assert (cleaned - inputs["q"]).abs().max() < 1e-13


def test_no_token_keeps_the_state():
    inputs = make(2, 0, 2, 2, 12, carried=True)
    cleaned, state = clean(inputs)
    assert cleaned.shape == (2, 0, 2, 12)
    assert torch.equal(state.C, inputs["C"])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("keys", ["random", "clustered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_errors_stay_within_twice_the_definitions_own(dtype, keys, gated):
    inputs = make(1, 96, 2, 2, 16, gated=gated, keys=keys)
    inputs = {name: x.to(dtype if name in "qk" else torch.float32) for name, x in inputs.items()}
    wide = {name: x.double() for name, x in inputs.items()}
    single = {name: x.float() for name, x in inputs.items()}
    exact, rounded = differentiate(define, wide), operand(dtype)
    definition = differentiate(lambda x: define(x, operand=rounded), single)
    literal = differentiate(lambda x: define(x, form=literal_ccq, operand=rounded, chunk_size=16), single)
    ours = differentiate(clean, inputs)
    for part in (0, 1):
        for name, value in ours[part].items():
            if name in ("dC", "dmean", "dn", "1.n"):
                continue  # of an empty state: nothing has been seen, and n is a count
            if name == "dg":
                continue  # over budget next to gates of -30, and refused: the test below
            over, head = error_over_budget(value, exact[part][name], definition[part][name], literal[part][name], None)
            assert over <= 1, f"{name}: {over:.2f} of the budget in head {head}"


def test_a_gradient_of_the_gates_is_left_to_torch():
    from needlework.ops.ccq.triton_op import unsupported

    given = make(1, 20, 2, 2, 12, gated=True)
    given = [given[name] for name in ("q", "k", "eta", "g")]
    assert unsupported(*(x.float() for x in given), None) is None
    given[3].requires_grad_()
    assert "suffix sum" in unsupported(*(x.float() for x in given), None)
