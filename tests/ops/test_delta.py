"""What the settled page (spec/delta.md, spec/backward.md) says of the delta family, and the hand-derived backward, tensor by tensor."""

import pytest
import torch
from torch import Tensor

from needlework.ops.common.samples import decay, normal, uniform, unit
from needlework.ops.delta import chunk, chunk_delta, recurrent_delta, step_delta
from needlework.ops.delta.decay import ScalarDecay
from needlework.ops.delta.spec import H, K, V, sample, sample_gdn2
from needlework.ops.qdelta import chunk_qdelta, recurrent_qdelta, step_qdelta
from needlework.testing.compare import EXACT, assert_close, differentiate, relative


def inputs_of(B: int, T: int, style: str = "random", **rule) -> dict[str, Tensor]:
    return sample(torch.Generator().manual_seed(0), B, T, style, **rule)


def same_as_definition(inputs: dict[str, Tensor], state: Tensor, **settings) -> None:
    """Values and every gradient, the initial state's included, under cotangents of o and of the final state."""

    def run(op):
        def call(x):
            x = dict(x)
            return op(initial_state=x.pop("initial_state"), output_final_state=True, **x, **settings)

        return differentiate(call, {**inputs, "initial_state": state})

    (value, fast), (wanted, exact) = run(chunk_delta), run(recurrent_delta)
    assert all(exact[name].any() for name in exact if name != "dq" or "q_read" not in inputs)
    assert_close(value, wanted, "value")
    assert_close(fast, exact, "gradient")


# the hand-derived backward is autograd of the definition

RULES = {
    "linear attention": {"beta": False},
    "RetNet, Mamba-2": {"beta": False, "gate": "scalar"},
    "GLA": {"beta": False, "gate": "channel"},
    "DeltaNet": {},
    "Gated DeltaNet": {"gate": "scalar"},
    "KDA": {"gate": "channel"},
}


@pytest.mark.parametrize("style", ["random", "identical", "strong"])
@pytest.mark.parametrize("rule", RULES)
def test_all_gradients_of_every_rule_with_grouped_values(rule, style):
    same_as_definition(inputs_of(2, 37, style, HV=4, **RULES[rule]), normal(torch.Generator().manual_seed(1), 2, 4, K, V))


@pytest.mark.parametrize("gate", ["scalar", "channel"])
def test_all_gradients_when_the_prediction_is_previous(gate):
    state = normal(torch.Generator().manual_seed(1), 2, H, K, V)
    same_as_definition(inputs_of(2, 37, gate=gate), state, prediction="previous")


def test_all_gradients_of_gdn2_with_a_read_query_packed_and_with_an_empty_sequence():
    g = torch.Generator().manual_seed(1)
    same_as_definition(sample_gdn2(g, 1, 31, "random"), normal(g, 4, H, K, V), cu_seqlens=torch.tensor([0, 4, 4, 20, 31]))


def engine(B: int, T: int, R: int, width: int, style: str) -> list[Tensor]:
    """q, k, u, e, g and an initial state as the engine takes them, R rows a token."""
    g = torch.Generator().manual_seed(2)
    k = unit(normal(g, B, T, H, R, K))
    gate = decay(g, B, T, H, width, style=style)
    return [unit(normal(g, B, T, H, K)), k, normal(g, B, T, H, R, V), 0.4 * k, gate, normal(g, B, H, K, V)]


def rank(q, k, u, e, g, S, *, scale, prediction) -> tuple[Tensor, Tensor]:
    """S_t = Diag(e^{g_t}) S_{t-1} + Σ_r k_tr (u_tr − S_{t-1}ᵀ ê_tr)ᵀ, token by token."""
    outputs = []
    for t in range(q.shape[1]):
        retention = g[:, t].exp()
        erase = e[:, t] * retention[:, :, None] if prediction == "decayed" else e[:, t]
        w = u[:, t] - torch.einsum("bhkv,bhrk->bhrv", S, erase)
        S = retention[..., None] * S + torch.einsum("bhrk,bhrv->bhkv", k[:, t], w)
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(outputs, 1), S


@pytest.mark.parametrize("R", [1, 2, 4])
@pytest.mark.parametrize("width", [1, K])
@pytest.mark.parametrize("prediction", ["decayed", "previous"])
@pytest.mark.parametrize("style", ["random", "strong"])
def test_the_engine_writes_several_rows_a_token_and_knows_its_gradients(R, width, prediction, style):
    inputs = engine(2, 21, R, width, style)
    leaves = [x.clone().requires_grad_() for x in inputs]
    exact = rank(*leaves, scale=0.3, prediction=prediction)
    cotangents = [torch.ones_like(x) for x in exact]
    settings = {"scale": 0.3, "prediction": prediction, "chunk_size": 8}
    fast = chunk.forward(*inputs, **settings)
    assert_close(dict(zip("oS", fast, strict=True)), dict(zip("oS", (x.detach() for x in exact), strict=True)), "value")
    fast, exact = chunk.backward(*cotangents, *inputs, **settings), torch.autograd.grad(exact, leaves, cotangents)
    names = ("dq", "dk", "du", "de", "dg", "dS")
    assert_close(dict(zip(names, fast, strict=True)), dict(zip(names, exact, strict=True)), "gradient")


def test_beta_times_its_gradient_is_what_was_written_times_its_gradient():
    """β_t dβ_t = W_t · du_t, W_t = β_t (v_t − e^{g_t} S_{t-1}ᵀ k_t), and dv_t = β_t du_t."""
    inputs = inputs_of(1, 30, gate="scalar")
    q, k, v, g, beta = (inputs[name] for name in ("q", "k", "v", "g", "beta"))
    _, gradient = differentiate(lambda x: chunk_delta(**x, output_final_state=True), inputs)
    S, W = torch.zeros(1, H, K, V, dtype=q.dtype), []
    for t in range(30):
        S = g[:, t].exp()[..., None, None] * S
        W.append(beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])))
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], W[-1])
    assert relative(beta * beta * gradient["dbeta"], (torch.stack(W, 1) * gradient["dv"]).sum(-1)) < 1e-12


@pytest.mark.parametrize("gate", ["none", "scalar", "channel"])
def test_all_gradients_where_some_write_strengths_are_zero(gate):
    """spec/backward.md: never divide by β."""
    inputs = inputs_of(2, 37, gate=gate)
    inputs["beta"] = torch.where(inputs["beta"] < 0.4, 0, inputs["beta"])
    same_as_definition(inputs, normal(torch.Generator().manual_seed(1), 2, H, K, V))


# decay: exponents that are right to their own size


def identity_dg(gate: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """dg by the engine's pair form and by the row identity, both at dtype, and the pair form in float64."""
    q, k, u, e, _, S = engine(1, 60, 1, 1, "random")
    tensors = [x.to(dtype) for x in (q, k, u, e, gate, S)]
    settings = {"scale": 0.3, "prediction": "previous", "chunk_size": 64}
    o, final = chunk.forward(*tensors, **settings)
    do, dS = torch.ones_like(o), torch.ones_like(final)
    dq, dk, _, de, dg, _ = chunk.backward(do, dS, *tensors, **settings)
    q, k, e = tensors[0], tensors[1][:, :, :, 0], tensors[3][:, :, :, 0]
    h = q * dq - k * dk[:, :, :, 0]
    h[:, :-1] += (e * de[:, :, :, 0])[:, 1:]
    row = (h.flip(1).cumsum(1).flip(1) + (final * dS).sum(-1)[:, None]).sum(-1, keepdim=True)
    wide = [x.double() for x in tensors]
    return dg, row, chunk.backward(do.double(), dS.double(), *wide, **settings)[4]


def test_dg_is_the_row_identity_in_float64():
    """dg_t = Σ_v S_C ⊙ dS_C + Σ_{r≥t} (q ⊙ dq − k ⊙ dk + e_{+1} ⊙ de_{+1})_r."""
    pair, row, _ = identity_dg(uniform(torch.Generator().manual_seed(0), -0.5, 0, 1, 60, H, 1), torch.float64)
    assert relative(pair, row) < 1e-12


def test_dg_of_a_gate_of_minus_30_is_no_noise_in_float32():
    """There the row identity subtracts numbers of order 1 to get one of order e^{-30}: its own error, 5e13 times the recurrence's."""
    gate = decay(torch.Generator().manual_seed(0), 1, 60, H, 1, style="strong")
    strong = gate < -1
    pair, row, exact = (x.double()[strong] for x in identity_dg(gate, torch.float32))
    assert (pair - exact).norm() < 1e-4 * exact.norm()
    assert (row - exact).norm() > 1e6 * exact.norm()


def test_decay_between_tokens_is_exact_where_a_plain_float32_prefix_is_not():
    """Gates of −30 among gates of −1e-3: a float32 prefix sum costs 2⁻²⁴·|G| in the exponent (the page: 14 to 160 × over budget)."""
    gate = decay(torch.Generator().manual_seed(0), 1, 1, 64, 1, style="strong").float()
    G = gate.double().cumsum(-2)
    exact = (G - G.mT).tril().exp().tril()
    prefix = gate.cumsum(-2)
    plain = (prefix - prefix.mT).tril().exp().tril()
    ours = ScalarDecay(gate).between
    one_rounding = torch.finfo(torch.float32).eps * exact.norm()
    assert (ours - exact).norm() <= one_rounding
    assert (plain - exact).norm() > 14 * one_rounding


@pytest.mark.parametrize("gate", ["scalar", "channel"])
def test_gates_of_any_size_overflow_nothing(gate):
    inputs = {name: x.float() for name, x in inputs_of(2, 70, gate=gate).items()}
    inputs["g"] = torch.where(inputs["g"] < -0.25, -1e4, 0.0)
    for part in differentiate(lambda x: chunk_delta(**x, output_final_state=True), inputs):
        assert all(torch.isfinite(x).all() for x in part.values())


def test_gates_of_minus_30_among_mild_ones_cost_less_than_1e_13():
    """spec/delta.md: where −30 and 0 mix use ≤ 1e-13."""
    for gate in ("scalar", "channel"):
        inputs = inputs_of(2, 64, "strong", gate=gate)
        assert relative(chunk_delta(**inputs).o, recurrent_delta(**inputs).o) <= 1e-13


def test_16_steps_of_minus_5_overflow_in_no_format_and_steps_of_minus_5_6_in_both():
    """spec/delta.md: what a bound on the log retention a step has to be for sub-blocks of 16."""
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.tensor(16 * 5.0, dtype=dtype).exp().isfinite()
        assert torch.tensor(16 * 5.6, dtype=dtype).exp().isinf()


def test_mild_gates_cost_a_few_roundings_only():
    """The page: 4e-16 for the chunk form in float64."""
    inputs = inputs_of(2, 64, gate="channel")
    assert relative(chunk_delta(**inputs).o, recurrent_delta(**inputs).o) < 16 * torch.finfo(torch.float64).eps


# rows of the table


def test_retnet_is_a_fixed_scalar_decay():
    """o_t = Σ_{s≤t} γ_h^{t−s} (q_t·k_s) v_s, γ_h = 1 − 2^{−5−h}."""
    q, k, v = (inputs_of(1, 50, beta=False)[name] for name in "qkv")
    gamma = 1 - 2.0 ** (-5 - torch.arange(H, dtype=torch.float64))
    t = torch.arange(50, dtype=torch.float64)
    power = (gamma[:, None, None] ** (t[:, None] - t).clamp(min=0)).tril()
    expected = torch.einsum("hts,bthk,bshk,bshv->bthv", power, q, k, v)
    assert relative(chunk_delta(q, k, v, gamma.log().expand(1, 50, H), scale=1.0).o, expected) < 1e-12


def test_mamba_2_is_the_additive_rule_with_scale_1():
    """h_t = e^{ΔA} h_{t-1} + B Δx, y = C h: q = C, k = B, v = Δx, g = ΔA; D·x stays outside."""
    g = torch.Generator().manual_seed(3)
    C, B, x = normal(g, 1, 40, 1, K), normal(g, 1, 40, 1, K), normal(g, 1, 40, 1, V)
    step, A = uniform(g, 0.01, 0.1, 1, 40, 1), -4.0
    h, y = torch.zeros(1, 1, K, V, dtype=torch.float64), []
    for t in range(40):
        d = step[:, t, :, None, None]
        h = (d * A).exp() * h + d * B[:, t, :, :, None] * x[:, t, :, None]
        y.append((C[:, t, :, :, None] * h).sum(-2))
    got = chunk_delta(C, B, step[..., None] * x, step * A, scale=1.0).o
    assert relative(got, torch.stack(y, 1)) < 1e-12


def test_deltanet_replaces_the_value_of_a_key_that_it_has_seen():
    q, k, v = (inputs_of(1, 9, beta=False)[name] for name in "qkv")
    k = torch.cat([k[:, :8], k[:, 3:4]], 1)
    S = chunk_delta(q, k, v, None, torch.ones(1, 9, H, dtype=q.dtype), output_final_state=True).state
    assert relative(torch.einsum("bhkv,bhk->bhv", S, k[:, 3]), v[:, 8]) < 1e-12


def test_keys_of_norm_sqrt_k_make_the_state_diverge():
    """The eigenvalue along the key is 1 − β‖k‖²: −7 at β = ½, K = 16 (ATMA, Finding 1)."""
    inputs = inputs_of(1, 21, "identical")
    inputs |= {"k": K**0.5 * inputs["k"], "beta": torch.full_like(inputs["beta"], 0.5)}
    norms = [chunk_delta(**{n: x[:, :T] for n, x in inputs.items()}, output_final_state=True).state.norm() for T in (20, 21)]
    assert norms[1] / norms[0] == pytest.approx(7, rel=1e-2)


@pytest.mark.parametrize("beta", [None, 1.0])
def test_with_unit_keys_the_delta_rules_state_stays_flat_where_the_additive_one_grows_like_the_root(beta):
    """spec/polar.md, "Findings", at γ = 1: for isotropic keys and values N(0, 1), E‖S‖² = N V without erase, K V (1 − (1 − 1/K)^N) with."""
    g, rows, N = torch.Generator().manual_seed(0), 64, 400
    k, v = unit(normal(g, rows, N, 1, K)), normal(g, rows, N, 1, V)
    for n in (100, N):
        strength = None if beta is None else torch.full((rows, n, 1), beta, dtype=k.dtype)
        S = chunk_delta(k[:, :n], k[:, :n], v[:, :n], None, strength, output_final_state=True).state
        squares = S.square().sum((1, 2, 3))
        expected = n * V if beta is None else K * V * (1 - (1 - 1 / K) ** n)
        assert abs(squares.mean() - expected) < 4 * squares.std() / rows**0.5  # four standard errors


def test_the_read_query_alone_reads():
    inputs = inputs_of(2, 20, gate="scalar")
    read = unit(normal(torch.Generator().manual_seed(5), 2, 20, H, K))
    a = chunk_delta(**inputs, q_read=read, output_final_state=True)
    b = chunk_delta(**{**inputs, "q": read}, output_final_state=True)
    assert torch.equal(a.o, b.o) and torch.equal(a.state, b.state)


def test_value_heads_share_the_key_head_of_their_group():
    inputs = inputs_of(2, 20, gate="scalar", HV=6)
    together = chunk_delta(**inputs).o
    for j in range(6):
        head = {n: x[:, :, j : j + 1] if n in ("v", "g", "beta") else x[:, :, j // 3 : j // 3 + 1] for n, x in inputs.items()}
        assert relative(chunk_delta(**head).o, together[:, :, j : j + 1]) < 1e-12


@pytest.mark.parametrize("size", [1e-3, 1.0])
@pytest.mark.parametrize(
    ("forms", "lam"),
    [((chunk_delta, recurrent_delta, step_delta), False), ((chunk_qdelta, recurrent_qdelta, step_qdelta), True)],
)
def test_l2norm_is_a_row_over_the_root_of_its_squares_and_1e_6(forms, lam, size):
    """Of q and k, not of the query that reads; of short rows the 1e-6 is what counts."""
    g = torch.Generator().manual_seed(5)
    q, k, read = (size * normal(g, 2, 1, H, K) for _ in range(3))
    rest = (normal(g, 2, 1, H, V), None, *(uniform(g, 0, 1, 2, 1, H) for _ in range(1 + lam)))
    unit_q, unit_k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state = normal(g, 2, H, K, V)
    for q_read in (None, read):
        wanted = forms[1](unit_q, unit_k, *rest, q_read=q_read, initial_state=state).o
        for form in forms[:2]:
            got = form(q, k, *rest, q_read=q_read, initial_state=state, l2norm=True).o
            assert relative(got, wanted) <= EXACT
        now = [None if x is None else x[:, 0] for x in (q, k, *rest, q_read)]
        got = forms[2](*now[:-1], q_read=now[-1], state=state.clone(), l2norm=True)
        assert relative(got, wanted[:, 0]) <= EXACT


# edges


def test_an_empty_sequence_keeps_its_state_and_nobody_elses():
    inputs = inputs_of(1, 12, gate="scalar")
    state = normal(torch.Generator().manual_seed(1), 3, H, K, V)
    result = chunk_delta(**inputs, initial_state=state, output_final_state=True, cu_seqlens=torch.tensor([0, 5, 5, 12]))
    assert torch.equal(result.state[1], state[1])
    assert not torch.equal(result.state[0], state[0]) and not torch.equal(result.state[2], state[2])


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_no_token_returns_the_initial_state_and_passes_its_gradient(impl):
    nothing = {name: x[:, :0] for name, x in inputs_of(2, 3, gate="channel").items()}
    state = normal(torch.Generator().manual_seed(1), 2, H, K, V).requires_grad_()
    o, final = chunk_delta(**nothing, initial_state=state, output_final_state=True, impl=impl)
    assert o.shape == (2, 0, H, V) and torch.equal(final, state)
    assert torch.equal(torch.autograd.grad(final.sum(), state)[0], torch.ones_like(state))


def test_a_state_is_float32_when_the_model_is_half():
    inputs = {n: x.to(torch.bfloat16 if n in "qkv" else torch.float32) for n, x in inputs_of(1, 9, gate="scalar").items()}
    inputs = {n: x.requires_grad_() for n, x in inputs.items()}
    o, state = chunk_delta(**inputs, output_final_state=True)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    (o.float().sum() + state.sum()).backward()
    assert all(x.grad.dtype == x.dtype for x in inputs.values())


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_autocast_changes_nothing(impl):
    inputs = {name: x.float().requires_grad_() for name, x in inputs_of(1, 20, gate="scalar").items()}
    outside = chunk_delta(**inputs, impl=impl).o
    with torch.autocast("cpu", torch.bfloat16):
        inside = chunk_delta(**inputs, impl=impl).o
    assert torch.equal(inside, outside)
    gradient = lambda o: torch.autograd.grad(o.sum(), list(inputs.values()))
    assert all(torch.equal(a, b) for a, b in zip(gradient(inside), gradient(outside), strict=True))


def test_a_step_without_slots_advances_every_row_in_place():
    inputs, table = inputs_of(3, 6, gate="channel"), torch.zeros(3, H, K, V, dtype=torch.float64)
    o = [step_delta(**{n: x[:, t] for n, x in inputs.items()}, state=table) for t in range(6)]
    whole = chunk_delta(**inputs, output_final_state=True)
    assert_close({"o": torch.stack(o, 1), "state": table}, {"o": whole.o, "state": whole.state}, "step")


def test_the_reference_is_asked_for_by_name_or_environment(monkeypatch):
    inputs = inputs_of(1, 20, gate="scalar")
    exact = recurrent_delta(**inputs).o
    assert torch.equal(chunk_delta(**inputs, impl="reference").o, exact)
    monkeypatch.setenv("NEEDLEWORK_IMPL", "reference")
    assert torch.equal(chunk_delta(**inputs).o, exact)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(1, 9, H, K)}, r"k: axis 1 \(T\) of \[B T H K\] has size 9, expected 8"),
        ({"v": torch.zeros(1, 8, 3, V)}, r"v: axis 2 \(HV\) has size 3, expected a multiple of the 2"),
        ({"v": torch.zeros(1, 8, H, V, dtype=torch.bfloat16)}, "mixed dtypes"),
        ({"g": torch.zeros(1, 8, 3)}, r"g: axis 2 \(HV\)"),
        ({"g": torch.zeros(1, 8, H, K + 1)}, r"g: axis 3 \(K\)"),
        ({"beta": torch.zeros(1, 8, H, 1)}, "beta: expected 3 axes"),
        ({"erase": torch.zeros(1, 8, H, K)}, "erase and write"),
        ({"erase": torch.zeros(1, 8, H, K), "write": torch.zeros(1, 8, H, V)}, "beta: erase and write"),
        ({"beta": None, "erase": torch.zeros(1, 8, H, V), "write": torch.zeros(1, 8, H, V)}, r"erase: axis 3 \(K\)"),
        ({"q_read": torch.zeros(1, 8, 3, K)}, r"q_read: axis 2 \(HV\)"),
        ({"initial_state": torch.zeros(1, H, V, K)}, r"initial_state: axis 2 \(K\)"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens: expected to rise from 0 to T = 8"),
        ({"prediction": "now"}, "prediction: got 'now'"),
        ({"chunk_size": 0}, "chunk_size: expected at least 1, got 0"),
        ({"impl": "fast"}, "impl: got 'fast'"),
        ({"impl": "triton"}, "delta has no Triton kernel"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message):
    inputs = {name: x.float() for name, x in inputs_of(1, 8, gate="scalar").items()}
    with pytest.raises(ValueError, match=message):
        chunk_delta(**{**inputs, **change})
