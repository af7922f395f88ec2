"""LUCID's kernels in Triton's interpreter against the definition: values, gradients, pages, steps."""

import contextlib
import dataclasses
import os
from functools import partial

import pytest
import torch

from needlework.ops.common.samples import keys, normal, uniform
from needlework.ops.lucid import LucidState, chunk_lucid, recurrent_lucid, step_lucid
from needlework.ops.lucid.spec import SPECS
from needlework.ops.runtime.launch_configs import forced
from needlework.testing.budget import budgeted
from needlework.testing.compare import differentiate, poisoned, relative
from needlework.testing.errors import assert_within_budget
from needlework.testing.rows import chosen, covering

pytest.importorskip("triton")
from needlework.ops.lucid.solve.launches import Saved
from needlework.ops.lucid.solve.op import lucid_triton, lucid_triton_fwd
from needlework.ops.lucid.solve.pages import lucid_pages, lucid_pages_fwd

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")
ENGINE = "lucid/solve"
EXACT = 1e-12
PRECONDITIONS = ("key", "rowmax", "beta")
STYLES = ("random", "clustered", "identical")
ENDS = [0, 19, 19, 60, 61]
# blocks of 16 rows where the interpreter would take minutes for 64
SMALL = {"shared": {"C": 16}}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def inputs(B=2, T=37, H=2, K=16, V=12, precondition="key", style="random"):
    """Keys of one norm where all are identical: of equal maxima any may have the gradient."""
    g = generator(T + K)
    k = keys(g, B, T, H, K, style)
    x = {"k": k if style == "identical" else k * uniform(g, 1, 3, B, T, H, 1), "v": normal(g, B, T, H, V)}
    return x | ({"beta": uniform(g, 0, 2, B, T, H)} if precondition == "beta" else {})


def agree(x, **settings):
    got = differentiate(lambda x: (chunk_lucid(**x, **settings, impl="triton").y,), x)
    want = differentiate(lambda x: (recurrent_lucid(**x, **settings).y,), x)
    close(got, want)


def close(got, want):
    for found, exact in zip(got, want, strict=True):
        for name in exact:
            # of identical keys the gradient is nothing, and the definition's own rounding is 1e-13
            zero = exact[name].abs().max() < 1e-9
            assert found[name].abs().max() < 1e-9 if zero else relative(found[name], exact[name]) <= EXACT, name


@pytest.mark.parametrize("T", (1, 16, 37, 100))
def test_any_length_is_the_definition(T):
    agree(inputs(B=1, T=T, H=1))


@pytest.mark.parametrize("precondition, style", covering(PRECONDITIONS, STYLES, pairs=False))
def test_every_variant_is_the_definition(precondition, style):
    agree(inputs(precondition=precondition, style=style), precondition=precondition)


@pytest.mark.parametrize("precondition, window", covering(PRECONDITIONS, (1, 5, 16, 17, 18, 21, 200), pairs=False))
def test_in_a_window(precondition, window):
    agree(inputs(B=1, T=61, precondition=precondition), precondition=precondition, window=window)


@pytest.mark.parametrize("K, V", ((3, 5), (40, 24), (68, 68), (128, 16), (136, 200)))
def test_any_width_is_the_definition(K, V):
    agree(inputs(B=1, T=20, H=1, K=K, V=V))


@pytest.mark.parametrize("precondition", ("key", "beta"))
def test_a_key_too_short_to_be_scaled_has_the_definitions_gradient(precondition):
    """The kernels' 1e-6 is a float32 number."""
    x = inputs(B=1, T=20, H=1, precondition=precondition)
    x["k"][:, 7] *= 1e-7
    ways = [partial(chunk_lucid, impl="triton"), recurrent_lucid]
    got, want = (differentiate(lambda x, f=f: (f(**x, precondition=precondition).y,), x)[1] for f in ways)
    for name in want:
        assert relative(got[name], want[name]) <= 1e-8, name


@pytest.mark.parametrize("precondition, window", covering(PRECONDITIONS, (None, 21), pairs=False))
def test_packed_sequences_are_separate_and_some_are_empty(precondition, window):
    agree(inputs(1, 61, precondition=precondition), precondition=precondition, window=window, cu_seqlens=torch.tensor(ENDS))


@pytest.mark.parametrize("precondition", PRECONDITIONS)
def test_nothing_is_read_that_was_never_written(precondition):
    """Packed, with more blocks than the sequences fill: torch.empty gives NaN. Inverses are made of every block, also of none."""
    x, ends = inputs(1, 61, precondition=precondition), torch.tensor(ENDS)
    settings = {"precondition": precondition, "cu_seqlens": ends, "impl": "triton"}
    call = lambda: differentiate(lambda x: (chunk_lucid(**x, **settings).y,), x)
    clean = call()
    with poisoned():
        again = call()
        k, v, beta = (*x.values(), None)[:3]
        inverse = Saved(*lucid_triton_fwd(k, v, beta, ends, precondition == "rowmax", None, k.shape[-1])[1:]).inverse
    assert torch.isfinite(inverse).all()
    for before, after in zip(clean, again, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("precondition, ends", covering(PRECONDITIONS, (None, ENDS), pairs=False))
def test_copies_by_descriptor_are_the_definition(precondition, ends):
    ends = None if ends is None else torch.tensor(ends)
    with forced(ENGINE, "sm90", **SMALL):
        agree(inputs(1, 61, precondition=precondition), precondition=precondition, cu_seqlens=ends)


@pytest.mark.parametrize("precondition, window, ends", covering(PRECONDITIONS, (None, 21), (None, ENDS)))
def test_panels_are_the_definition(precondition, window, ends):
    ends = None if ends is None else torch.tensor(ends)
    with forced(ENGINE, "plain-panels", panel={"S": 2}):
        agree(inputs(1, 61, precondition=precondition), precondition=precondition, window=window, cu_seqlens=ends)


@pytest.mark.parametrize("group_bytes", (0, 50_000))
def test_groups_of_heads_are_the_definition(group_bytes, monkeypatch):
    from needlework.ops.lucid.solve import launches

    monkeypatch.setattr(launches, "GROUP_BYTES", group_bytes)
    agree(inputs(B=2, T=40, H=4))


@pytest.mark.parametrize(
    "precondition, window, packed, one_launch", covering(PRECONDITIONS, (None, 6, 30), (False, True), (True, False))
)
def test_pages_come_before_the_tokens(precondition, window, packed, one_launch):
    """Initial pages of unlike lengths, one of them longer than a panel, and the final pages' cotangents."""
    lengths = torch.tensor([0, 5, 40])
    P = min(40, window or 45)
    g = generator(3)
    x = inputs(1 if packed else 3, 41, precondition=precondition)
    x |= {"page_k": normal(g, 3, P, 2, 16), "page_y": normal(g, 3, P, 2, 12)}
    settings = {"precondition": precondition, "window": window, "output_final_state": True}
    if packed:
        settings["cu_seqlens"] = torch.tensor([0, 7, 7, 41])

    def call(op, **more):
        def on(x):
            tokens = {n: t for n, t in x.items() if not n.startswith("page")}
            return op(**tokens, initial_state=LucidState(x["page_k"], x["page_y"], lengths.clamp(max=P)), **settings, **more)

        return differentiate(on, x)

    with contextlib.nullcontext() if one_launch else forced(ENGINE, "plain-panels", panel={"S": 2}):
        got = call(chunk_lucid, impl="triton")
    close(got, call(recurrent_lucid))


@pytest.mark.parametrize("precondition, ends", covering(PRECONDITIONS, (None, ENDS), pairs=False))
def test_operators_pass_opcheck(precondition, ends):
    k, v, beta = (*inputs(1, 61, precondition=precondition).values(), None)[:3]
    given = k, v, beta, None if ends is None else torch.tensor(ends), precondition == "rowmax", None, k.shape[-1]
    for made in (lucid_triton, lucid_triton_fwd):
        torch.library.opcheck(made, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("precondition, keep", (("beta", True), ("rowmax", False)))
def test_operators_after_pages_pass_opcheck(precondition, keep):
    k, v, beta = (*inputs(2, 19, precondition=precondition).values(), None)[:3]
    pages = normal(generator(3), 2, 21, 2, 16), normal(generator(4), 2, 21, 2, 12), torch.tensor([21, 4])
    given = k, v, beta, *pages, None, precondition == "rowmax", None, keep
    for made in (lucid_pages, lucid_pages_fwd):
        torch.library.opcheck(made, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.slow
def test_a_call_with_gradients_compiles_without_a_graph_break():
    call = lambda x: (chunk_lucid(**x, impl="triton").y,)
    x = inputs(B=1, T=20, H=1)
    close(differentiate(torch.compile(call, fullgraph=True, backend="aot_eager"), x), differentiate(call, x))


@pytest.mark.parametrize("K, V", ((16, 24), (64, 16), (32, 64)))
def test_tiles_of_halves_have_one_layout(K, V):
    """With two layouts, ptxas 12.8 makes a solve that multiplies by what it never loaded."""
    from needlework.ops.lucid.solve.launches import constants
    from needlework.ops.runtime.launch_configs import rows

    solve = constants(rows(ENGINE)[0], torch.bfloat16, 2, K, V, K, False, False, False, False)["solve"]
    assert (solve["KB"], solve["VB"]) == (64, 64)


def test_a_wait_that_runs_out_is_nan_from_there_on(monkeypatch):
    from needlework.ops.lucid.solve import launches

    monkeypatch.setattr(launches, "TURNS", 0)
    y = chunk_lucid(**inputs(T=61), impl="triton").y
    assert torch.isfinite(y[:, :16]).all()
    assert torch.isnan(y[:, 16:]).all()


@pytest.mark.parametrize("style, narrow", covering(STYLES, ((torch.float32, 3e-6), (torch.float16, 3e-3)), pairs=False))
def test_narrower_types_stay_near(style, narrow):
    dtype, bound = narrow
    x = {n: t.to(dtype) for n, t in inputs(T=64, style=style).items()}
    y, exact = chunk_lucid(**x, impl="triton").y, recurrent_lucid(**{n: t.double() for n, t in x.items()}).y
    assert relative(y, exact) <= bound


@pytest.mark.parametrize(
    "precondition, K, style",
    chosen(
        [
            (*sized, style)
            for sized in (("key", 16), ("key", 64), ("rowmax", 16), ("beta", 16))
            for style in ("random", "clustered")
        ],
        quick=[("key", 16, "clustered"), ("rowmax", 16, "random")],
    ),
)
def test_float32_is_within_the_error_budget(precondition, K, style, chained):
    spec = next(spec for spec in SPECS if spec.name == {"key": "lucid"}.get(precondition, f"lucid/{precondition}"))
    spec = dataclasses.replace(spec, chunk=partial(spec.chunk, impl="triton"), literal=partial(spec.literal, chunk_size=16),
                               inputs=lambda *_: inputs(1, 256, 1, K, K, precondition, style))  # fmt: skip
    assert_within_budget(budgeted(spec, torch.float32, 1, 256, style, torch.device("cpu")))


@pytest.mark.parametrize("factor", (2.0**-30, 2.0**20))
def test_values_and_cotangents_of_any_size_are_operands(factor):
    """In half precision Y is kept times a power of two: a power of two changes no digit."""
    k, v = (x.float().bfloat16() for x in inputs(T=40).values())
    settings = {"impl": "triton"}
    ones = differentiate(lambda x: (chunk_lucid(**x, **settings).y,), {"k": k, "v": v})
    scaled = differentiate(lambda x: (chunk_lucid(**x, **settings).y,), {"k": k, "v": v * factor})
    assert torch.equal(ones[0]["0"] * factor, scaled[0]["0"])
    assert torch.equal(ones[1]["dv"], scaled[1]["dv"])


@pytest.mark.parametrize("name, style", covering(("lucid", "lucid/rowmax", "lucid/beta", "lucid/window"), STYLES, pairs=False))
def test_half_precision_is_within_the_error_budget(name, style):
    """float16, whose budget is the narrowest, with the blocks of 64 rows that a GPU has: the literal form's."""
    spec = next(spec for spec in SPECS if spec.name == name)
    spec = dataclasses.replace(spec, chunk=partial(spec.chunk, impl="triton"))
    with forced(ENGINE, "plain", shared={"C": 64}):
        found = budgeted(spec, torch.float16, 1, 192, style, torch.device("cpu"))
    assert_within_budget(found)


@pytest.mark.parametrize("style", chosen(STYLES, quick=["random"]))
def test_wide_keys_keep_their_gradient_in_half_precision(style):
    """At K = 128 overlaps of random keys are 1e-5: as float16 numbers they would be a few digits."""
    g = generator()
    k = (keys(g, 1, 192, 1, 128, style)).half()
    v, dy = normal(g, 1, 192, 1, 128).half(), normal(g, 1, 192, 1, 128)
    gradient = lambda f, dtype: torch.autograd.grad(f(x := k.to(dtype).requires_grad_(), v.to(dtype)).y, x, dy.to(dtype))[0]
    with forced(ENGINE, "plain", shared={"C": 64}):
        got = gradient(partial(chunk_lucid, impl="triton"), torch.float16)
    want = gradient(recurrent_lucid, torch.float64)
    if style == "identical":  # nothing: P does not depend on the common key; its terms are of size 100
        assert got.abs().max() <= 1e-3
    else:
        assert relative(got, want) <= 2e-3


# Steps.


def table(B, rows, K=16, V=12, dtype=torch.float64):
    """What was never written is NaN."""
    page = lambda width: torch.full((B, rows, 2, width), float("nan"), dtype=dtype)
    return LucidState(page(K), page(V), torch.zeros(B, dtype=torch.int64))


@pytest.fixture
def stepping(monkeypatch):
    monkeypatch.setenv("NEEDLEWORK_IMPL", "triton")


@pytest.mark.parametrize("precondition, window, R", covering(PRECONDITIONS, (None, 6, 30), (1, 3, 6)))
def test_steps_of_several_tokens_are_prefill(precondition, window, R, stepping):
    T = 36
    x = inputs(2, T, precondition=precondition)
    want = recurrent_lucid(**x, precondition=precondition, window=window).y
    state, slots, pad = table(4, window or 64), torch.tensor([2, -1, 0]), torch.tensor([0, 0, 1])
    for t in range(0, T, R):
        tokens = {n: y[pad, t : t + R] for n, y in x.items()}
        y = step_lucid(**tokens, state=state, slots=slots, precondition=precondition, window=window)
        assert relative(y[[0, 2]], want[:, t : t + R]) <= EXACT
        assert not y[1].any()
    assert state.length.tolist() == [T, 0, T, 0]
    assert state.k[[1, 3]].isnan().all() and state.y[[1, 3]].isnan().all()


@pytest.mark.parametrize("path", ("triton", "torch"))
def test_a_few_tokens_are_the_same_on_both_paths(path, monkeypatch):
    monkeypatch.setenv("NEEDLEWORK_IMPL", path)
    x = inputs(2, 40, precondition="beta")
    state = table(2, 64)._replace(k=torch.zeros(2, 64, 2, 16).double(), y=torch.zeros(2, 64, 2, 12).double())
    pieces = [slice(0, 1), slice(1, 17), slice(17, 30), slice(30, 40)]
    got = [step_lucid(*(y[:, p] for y in x.values()), state=state, precondition="beta") for p in pieces]
    assert relative(torch.cat(got, 1), recurrent_lucid(**x, precondition="beta").y) <= EXACT


def test_shares_of_the_pages_are_summed(stepping):
    x = inputs(1, 200, H=2)
    want, state = recurrent_lucid(**x).y, table(1, 256)
    state.k[:, :190], state.y[:, :190], state.length[0] = x["k"][:, :190], want[:, :190], 190
    for NP in (1, 6, 528):
        now = LucidState(*(y.clone() for y in state))
        with forced("lucid/step", read_pages={"NP": NP}):
            y = step_lucid(x["k"][:, 190:], x["v"][:, 190:], state=now)
        assert relative(y, want[:, 190:]) <= EXACT
        assert torch.equal(now.y[:, 190:200], y)


def test_a_full_table_is_refused(stepping):
    state = table(1, 4)
    state.length[0] = 3
    with pytest.raises(ValueError, match="capacity 4, but a sequence of length 3"):
        step_lucid(torch.zeros(1, 2, 2, 16).double(), torch.zeros(1, 2, 2, 12).double(), state=state)


def test_the_steps_operator_passes_opcheck():
    from needlework.ops.lucid.step import lucid_step

    x = inputs(2, 2)
    state = table(2, 16)
    torch.library.opcheck(
        lucid_step,
        (x["k"], x["v"], None, *state, torch.tensor([0, 1]), False, None),
        test_utils=("test_schema", "test_faketensor"),
    )
