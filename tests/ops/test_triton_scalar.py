"""The scalar-gate kernels in Triton's interpreter against the definition: values, states and gradients."""

import dataclasses
import os
from functools import partial

import pytest
import torch

from needlework.ops.delta.inputs import DeltaInputs
from needlework.ops.delta.recurrent import recurrent_delta
from needlework.ops.qdelta.op import recurrent_qdelta
from needlework.ops.runtime.launch_configs import forced
from needlework.ops.specs import specs
from needlework.testing.budget import budgeted
from needlework.testing.compare import differentiate, relative
from needlework.testing.rows import chosen, covering

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")
ENGINE = "delta/scalar"
EXACT = 1e-12
SCALE = 0.25  # a power of two: a kernel's scalar arguments are float32


def inputs(B=1, T=37, H=1, HV=1, K=16, V=12, N=None, rule="qdelta", kind="random"):
    generator = torch.Generator().manual_seed(T + K)
    normal = lambda *s: torch.randn(*s, generator=generator, dtype=torch.float64)
    uniform = lambda *s: torch.rand(*s, generator=generator, dtype=torch.float64)
    unit = lambda x: torch.nn.functional.normalize(x, dim=-1)
    x = {"q": unit(normal(B, T, H, K)), "k": unit(normal(B, T, H, K)), "v": normal(B, T, HV, V)}
    x["g"] = -0.2 * uniform(B, T, HV)
    if kind == "strong":
        x["g"] = torch.where(uniform(B, T, HV) < 0.3, -30.0, -1e-3).double()
    if kind == "identical":
        x["k"] = x["k"][:, :1].expand_as(x["k"]).contiguous()
    if rule != "additive":
        x["beta"] = 0.1 + 0.9 * uniform(B, T, HV)
    if rule == "qdelta":
        x["lam"] = uniform(B, T, HV)
    x["initial_state"] = normal(N or B, HV, K, V)
    return x


def definition(x, cu_seqlens=None):
    call = recurrent_qdelta if "lam" in x else recurrent_delta
    return call(**{"g": None, **x}, scale=SCALE, output_final_state=True, cu_seqlens=cu_seqlens)


def kernels(x, cu_seqlens=None):
    from needlework.ops.delta.scalar.op import scalar

    return scalar(DeltaInputs(**x), cu_seqlens, scale=SCALE)


def agree(x, cu_seqlens=None, bound=EXACT):
    exact = definition(x, cu_seqlens)
    for got, want in zip(kernels(x, cu_seqlens), exact, strict=True):
        assert relative(got, want) <= bound


@pytest.mark.parametrize("T", (1, 37, 63, 100))
def test_any_length_is_the_recurrence(T):
    agree(inputs(B=2, T=T, H=2, HV=2))


@pytest.mark.parametrize(
    "rule, kind", covering(("additive", "gated", "qdelta"), ("random", "strong", "identical"), pairs=False)
)
def test_every_rule_is_the_recurrence(rule, kind):
    agree(inputs(rule=rule, kind=kind))


@pytest.mark.parametrize("rule, heads", covering(("gated", "qdelta"), (1, 2), pairs=False))
def test_a_read_query_of_its_own_is_read(rule, heads):
    x = inputs(H=1, HV=2, rule=rule)
    x["q_read"] = torch.randn(1, 37, heads, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    agree(x)


def test_no_gate_and_no_initial_state_is_the_recurrence():
    x = inputs()
    del x["g"], x["initial_state"]
    agree(x)


def test_grouped_values_share_keys():
    agree(inputs(H=2, HV=6, T=20))


@pytest.mark.parametrize("K, V", ((3, 5), (128, 64), (136, 24), (256, 40)))
def test_any_width_is_the_recurrence(K, V):
    agree(inputs(T=20, K=K, V=V))


@pytest.mark.parametrize("rule, K", covering(("additive", "qdelta"), (16, 144), pairs=False))
def test_copies_by_descriptor_are_the_recurrence(rule, K):
    with forced(ENGINE, "sm90-k128", scan={"BV": 16, "NS": 1}):
        agree(inputs(B=2, T=70, H=1, HV=2, K=K, V=24, rule=rule))


@pytest.mark.parametrize("NP", chosen((1, 2, 3, 5, 7), quick=(2, 5)))
def test_chains_cut_between_slots_are_the_recurrence(NP):
    with forced(ENGINE, scan={"NP": NP, "BV": 16}):
        agree(inputs(B=2, T=70, HV=3, V=20))


def test_a_team_walks_the_heads_of_a_key_head_side_by_side():
    """Two teams of four slots, two heads in two tiles each, have three chains: one is cut."""
    with forced(ENGINE, scan={"NP": 8, "BV": 16}):
        agree(inputs(B=3, T=70, HV=2, V=20))


@pytest.mark.parametrize(
    "group, tiles, slots, heads", ((8, 2, 264, 8), (24, 3, 264, 12), (5, 1, 264, 5), (1, 7, 264, 1), (2, 2, 8, 2), (2, 2, 9, 1))
)
def test_a_team_leaves_few_slots_without_work(group, tiles, slots, heads):
    from needlework.ops.delta.scalar.operands import heads_of_team

    assert heads_of_team(group, tiles, slots) == heads


@pytest.mark.parametrize("ends, NP", covering(([0, 19, 19, 60, 61], [0, 0, 50, 61, 61], [0, 61]), (3, 1, 216), pairs=False))
def test_packed_sequences_are_separate_and_empty_ones_keep_their_state(ends, NP):
    with forced(ENGINE, scan={"NP": NP}):
        agree(inputs(T=61, HV=2, N=len(ends) - 1), torch.tensor(ends))


def test_chunks_that_share_a_tile_do_not_see_each_other():
    with forced(ENGINE, intra={"R": 64}):
        agree(inputs(T=70, HV=2))


def test_no_token_keeps_the_state():
    agree(inputs(T=0))


def test_what_the_backward_is_given_is_what_the_page_says():
    """W of the recurrence; T and P' of the chunk; prefixes in log2."""
    from needlework.ops.delta.scalar.op import delta_scalar_fwd
    from needlework.ops.delta.scalar.operands import Saved

    x = inputs(T=21, rule="gated")
    _, _, *kept = delta_scalar_fwd(*DeltaInputs(**x), None, SCALE)
    W, Tp, Pp, A, G, E, *_ = Saved(*kept)
    C = Tp.shape[-1]
    q, k, g = (y[0, :C, 0] for y in (x["q"], x["k"], x["g"]))
    prefix = g.cumsum(0)
    decay = (prefix[:, None] - prefix).tril().exp()
    within = ((k @ k.T) * decay).tril(-1)
    assert relative(A[0, 0, :C], within) <= EXACT
    assert relative(Tp[0, 0, :C], torch.linalg.inv(torch.eye(C).double() + x["beta"][0, :C] * within)) <= EXACT
    assert relative(Pp[0, 0, :C], SCALE * (q @ k.T).tril() * decay) <= EXACT
    assert relative(G[0, 0, :C].exp2(), prefix.exp()) <= EXACT
    beta, to_end = x["beta"][0, :C, 0], (prefix[-1] - prefix).exp()
    since = (prefix - prefix[0]).exp()
    start = prefix.exp()
    factors = beta, -beta * start, None, SCALE * start, -start, to_end, since, g.exp()
    for found, want in zip(E[0, 0, 0], factors, strict=True):
        assert want is None or relative(found, want) <= EXACT
    S = x["initial_state"][0, 0]
    end = prefix[-1].exp() * S + ((prefix[-1] - prefix).exp()[:, None] * k).T @ W[0, :C, 0]
    want = definition({n: y if n == "initial_state" else y[:, :C] for n, y in x.items()}).state
    assert relative(end, want[0, 0]) <= EXACT


@pytest.mark.parametrize("dtype, H, HV, heads", ((torch.float64, 1, 4, 4), (torch.float16, 2, 12, 2)))
def test_value_heads_that_share_a_product_have_the_bits_of_their_own(dtype, H, HV, heads, monkeypatch):
    from needlework.ops.delta.scalar import forward
    from needlework.ops.delta.scalar.op import delta_scalar_fwd
    from needlework.ops.delta.scalar.operands import Saved

    x = inputs(B=2, H=H, HV=HV, rule="additive")
    x = {n: y.to(dtype) if n in "qkv" or dtype == torch.float64 else y.float() for n, y in x.items()}

    def call():
        o, state, *kept = delta_scalar_fwd(*DeltaInputs(**x), None, SCALE)
        kept = Saved(*kept)
        return o, state, kept.Pp, kept.G, kept.E[..., 3:, :]  # no β and no λ are written

    assert forward.heads_of_program(HV // H, 1) == 1
    alone = call()
    monkeypatch.setattr(forward, "LEAST_PROGRAMS", 1)
    assert forward.heads_of_program(HV // H, 100) == heads
    assert all(torch.equal(y, z) for y, z in zip(call(), alone, strict=True))


def test_programs_share_where_there_are_enough_of_them():
    from needlework.ops.delta.scalar.forward import heads_of_program

    assert [heads_of_program(64, n) for n in (64, 4095, 4096, 16384, 1 << 20)] == [1, 1, 2, 8, 8]
    assert [heads_of_program(n, 1 << 20) for n in (1, 3, 6, 12, 24)] == [1, 1, 2, 4, 8]


@pytest.mark.parametrize("rule", ("additive", "gated", "qdelta"))
@pytest.mark.parametrize("ends", (None, [0, 19, 19, 61]))
def test_every_gradient_is_that_of_the_recurrence(rule, ends):
    pytest.importorskip("needlework.ops.delta.scalar.backward")
    ends = None if ends is None else torch.tensor(ends)
    x = inputs(T=61, H=1, HV=2, N=1 if ends is None else len(ends) - 1, rule=rule)
    _, got = differentiate(lambda x: tuple(kernels(x, ends)), x)
    _, want = differentiate(lambda x: tuple(definition(x, ends)), x)
    for name in want:
        assert relative(got[name], want[name]) <= EXACT, name


def test_the_operator_passes_opcheck():
    from needlework.ops.delta.scalar.op import delta_scalar, delta_scalar_fwd

    x = inputs(T=20)
    args = *DeltaInputs(**x), None, SCALE
    for operator in (delta_scalar, delta_scalar_fwd):
        torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    "narrow, kind", covering(((torch.float32, 2e-6), (torch.float16, 3e-3)), ("random", "strong", "identical"), pairs=False)
)
def test_narrower_types_stay_near(narrow, kind):
    dtype, bound = narrow
    x = {n: y.to(dtype if n in "qkv" else torch.float32) for n, y in inputs(T=64, kind=kind).items()}
    exact = definition({n: y.double() for n, y in x.items()})
    for got, want in zip(kernels(x), exact, strict=True):
        assert relative(got, want) <= bound


@pytest.mark.parametrize(
    "dtype, every, style",
    chosen(
        [(*kept, style) for kept in ((torch.bfloat16, 16), (torch.float16, 4)) for style in ("random", "strong", "identical")],
        quick=[(torch.float16, 4, "random")],
    ),
)
def test_half_precision_is_within_the_error_budget(style, dtype, every):
    """Both types by the same operands; what the gates' sums are carried over is as long as the tables allow."""
    spec = next(spec for spec in specs() if spec.name == "qdelta")
    spec = dataclasses.replace(spec, chunk=partial(spec.chunk, impl="triton"))
    with forced(ENGINE, replay_forward={"EVERY": every}):
        found = budgeted(spec, dtype, 2, 96, style, torch.device("cpu"))
    for name, ratio in found.items():
        assert ratio <= 1, f"{name}: error is {ratio:.2f} x its budget"


def test_operands_of_another_half_type_are_copied_once():
    """Copies of q, k and q_read, exact, with rows past the end left alone; none where the input is an operand already."""
    from needlework.ops.delta.scalar.op import delta_scalar_fwd
    from needlework.ops.delta.scalar.operands import Saved

    x = inputs(B=2, T=37, H=2, HV=4)
    x["q_read"] = torch.randn(2, 37, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v, read = (x[n].to(dtype) for n in ("q", "k", "v", "q_read"))
        g, beta, lam = (x[n].float() for n in ("g", "beta", "lam"))
        _, _, *kept = delta_scalar_fwd(*DeltaInputs(q, k, v, g, beta, lam, q_read=read), None, SCALE)
        saved = Saved(*kept)
        for copy, given in ((saved.q, q), (saved.k, k), (saved.q_read, read)):
            if dtype == torch.bfloat16:
                assert copy.dtype == torch.float16 and torch.equal(copy, given.to(torch.float16))
            else:
                assert not copy.numel()
