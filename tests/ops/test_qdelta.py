"""What Q-Delta's paper (arXiv 2606.08804) and its settled page (spec/qdelta.md) claim, and its gradients, tensor by tensor."""

import math

import pytest
import torch
from torch import Tensor

from needlework.ops.common.samples import normal, uniform, unit
from needlework.ops.delta import chunk_delta
from needlework.ops.qdelta import chunk_qdelta, recurrent_qdelta, step_qdelta
from needlework.ops.qdelta.spec import H, K, V, literal, sample
from needlework.testing.compare import assert_close, differentiate, relative
from needlework.testing.errors import error_over_budget, operand

TOKENS = ("q", "k", "v", "g", "beta", "lam")


def inputs_of(B: int, T: int, style: str = "random", **more) -> dict[str, Tensor]:
    return sample(torch.Generator().manual_seed(0), B, T, style, **more)


def constant(like: Tensor, value: float) -> Tensor:
    return torch.full(like.shape[:3], value, dtype=like.dtype)


# gradients


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("coupling", ["recurrent", "transposed"])
@pytest.mark.parametrize("style", ["random", "strong"])
def test_all_gradients_with_grouped_values_a_read_query_and_a_state(style, coupling, packed):
    inputs = inputs_of(1 if packed else 2, 70, style, q_read=True)
    state = normal(torch.Generator().manual_seed(1), 4 if packed else 2, inputs["v"].shape[2], K, V)
    ends = torch.tensor([0, 2, 2, 68, 70]) if packed else None

    def run(op):
        def call(x):
            x = dict(x)
            settings = {"coupling": coupling, "cu_seqlens": ends, "output_final_state": True}
            return op(initial_state=x.pop("initial_state"), **x, **settings)

        return differentiate(call, {**inputs, "initial_state": state})

    (value, fast), (wanted, exact) = run(chunk_qdelta), run(recurrent_qdelta)
    assert all(exact[name].any() for name in exact)
    assert_close(value, wanted, "value")
    assert_close(fast, exact, "gradient")


def test_the_query_of_the_write_has_the_gradient_of_lambda_and_none_without_it():
    """dq_write = λ dx: with a read query of its own, q matters through x only."""
    inputs = inputs_of(1, 20, q_read=True)
    still = {**inputs, "lam": 0 * inputs["lam"]}
    gradient = lambda x: differentiate(lambda x: chunk_qdelta(**x), x)[1]
    assert gradient(inputs)["dq"].any() and not gradient(still)["dq"].any()
    assert gradient(still)["dlam"].any()


# the rule


def test_the_rule_is_the_papers_product_of_matrices():
    """S_t = α_t (I − β_t k_t x_tᵀ) S_{t-1} + β_t k_t v_tᵀ, x = k + λq without `scale`."""
    inputs = inputs_of(1, 25, HV=H)
    q, k, v, g, beta, lam = (inputs[name][0] for name in TOKENS)
    S = torch.zeros(H, K, V, dtype=q.dtype)
    for t in range(25):
        x = k[t] + lam[t, :, None] * q[t]
        step = torch.eye(K, dtype=q.dtype) - beta[t, :, None, None] * k[t, :, :, None] * x[:, None, :]
        S = g[t].exp()[:, None, None] * step @ S + beta[t, :, None, None] * k[t, :, :, None] * v[t, :, None, :]
    for scale in (0.1, 1.0):
        o, state = chunk_qdelta(**inputs, scale=scale, output_final_state=True)
        assert relative(state[0], S) < 1e-12
        assert relative(o[0, -1], scale * torch.einsum("hkv,hk->hv", S, q[-1])) < 1e-12


def test_the_error_after_a_write_is_the_error_before_it_contracted():
    """Lemma 3.1 with decay: v − S_tᵀx_t = (1 − β_t a_t)(v_t − α_t S_{t-1}ᵀx_t), a_t = k_t·x_t."""
    inputs = inputs_of(1, 25, HV=H)
    table = torch.zeros(1, H, K, V, dtype=torch.float64)
    for t in range(25):
        token = {name: inputs[name][:, t] for name in TOKENS}
        x = token["k"] + token["lam"][..., None] * token["q"]
        a = (token["k"] * x).sum(-1)
        before = token["v"] - token["g"].exp()[..., None] * torch.einsum("bhkv,bhk->bhv", table, x)
        step_qdelta(**token, state=table)
        after = token["v"] - torch.einsum("bhkv,bhk->bhv", table, x)
        assert relative(after, (1 - token["beta"] * a)[..., None] * before) < 1e-12


def test_unit_queries_and_keys_keep_beta_a_between_0_and_2():
    inputs = inputs_of(4, 200, HV=H)
    a = 1 + inputs["lam"] * (inputs["q"] * inputs["k"]).sum(-1)
    beta_a = inputs["beta"] * a
    assert beta_a.min() >= 0 and beta_a.max() <= 2


def test_the_one_step_condition_does_not_bound_the_state():
    """q turns by 45° a token, k ⟂ q, λ = β = 1, g = 0: βa = 1 at every token, and ‖S‖ = 2^50 after 100 (√2 a token)."""
    angle = torch.arange(100, dtype=torch.float64) * torch.pi / 4
    q = torch.stack([angle.cos(), angle.sin()], -1)[None, :, None]  # [1 T 1 2]
    k = torch.stack([angle.sin(), -angle.cos()], -1)[None, :, None]
    one = constant(q, 1.0)
    assert relative((k * (k + q)).sum(-1), one) < 1e-12
    # a step is (q − k) qᵀ: it turns what lies along q by 45° and stretches it by √2
    start = q[:, 0, :, :, None]  # [1 1 K 1]
    v = torch.zeros(1, 100, 1, 1, dtype=q.dtype)
    state = chunk_qdelta(q, k, v, None, one, one, initial_state=start, output_final_state=True).state
    assert float(state.norm()) == pytest.approx(2.0**50, rel=1e-12)


@pytest.mark.parametrize(("beta", "lam"), [(1.0, 1.0), (0.5, 1.0), (0.7, 0.3)])
def test_a_step_can_stretch_the_state_by_the_root_of_1_plus_beta_lambda_squared(beta, lam):
    """spec/qdelta.md: at k ⟂ q a state along q grows by e^g √(1 + β²λ²)."""
    q, k = torch.linalg.qr(normal(torch.Generator().manual_seed(0), K, 2)).Q.T.view(2, 1, 1, 1, K)
    one, v = constant(q, 1.0), torch.zeros(1, 1, 1, 1, dtype=q.dtype)
    start = q[:, 0, :, :, None]
    state = chunk_qdelta(q, k, v, -0.1 * one, beta * one, lam * one, initial_state=start, output_final_state=True).state
    assert float(state.norm()) == pytest.approx(math.exp(-0.1) * math.sqrt(1 + (beta * lam) ** 2), rel=1e-12)


def test_the_next_error_is_this_one_and_the_drift_contracted():
    """Theorem 3.2 at α = 1: e_t = v_t − S_tᵀx_t, r_t = (v_{t+1} − v_t) − S_tᵀ(x_{t+1} − x_t); e_{t+1} = (1 − β a)(e_t + r_t)."""
    inputs = inputs_of(1, 25, HV=H) | {"g": None}
    table = torch.zeros(1, H, K, V, dtype=torch.float64)
    x = inputs["k"] + inputs["lam"][..., None] * inputs["q"]
    a = (inputs["k"] * x).sum(-1)
    read = lambda x: torch.einsum("bhkv,bhk->bhv", table, x)
    error = drift = None
    for t in range(25):
        step_qdelta(**{name: y if y is None else y[:, t] for name, y in inputs.items()}, state=table)
        contraction = (1 - inputs["beta"] * a)[:, t, :, None]
        now = inputs["v"][:, t] - read(x[:, t])
        if error is not None:
            assert relative(now, contraction * (error + drift)) < 1e-12
        if t < 24:
            error, drift = now, inputs["v"][:, t + 1] - inputs["v"][:, t] - read(x[:, t + 1] - x[:, t])


@pytest.mark.parametrize(("lam", "grows"), [(0.5, False), (0.9, False), (1.1, True), (2.0, True)])
def test_for_isotropic_inputs_the_mean_square_grows_iff_beta_times_1_plus_lambda_squared_exceeds_2(lam, grows):
    """E‖(I − β k xᵀ) s‖² for unit s, at β = 1, g = 0."""
    g = torch.Generator().manual_seed(0)
    n = 400_000
    q, k, s = (unit(normal(g, n, 8)) for _ in range(3))
    after = s - k * ((k + lam * q) * s).sum(-1, keepdim=True)
    assert (after.square().sum(-1).mean() > 1) == grows


# the solve


def tf32(x: Tensor) -> Tensor:
    """Ten bits of fraction, to nearest."""
    return ((x.contiguous().view(torch.int32) + (1 << 12)) >> 13 << 13).view(torch.float32)


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def three_products(a: Tensor, b: Tensor) -> Tensor:
    (high_a, low_a), (high_b, low_b) = ((bf16(x), bf16(x - bf16(x))) for x in (a, b))
    return high_a @ high_b + low_a @ high_b + high_a @ low_b


SOLVES = {  # how W = (I + A)⁻¹ R is formed, and how many times over budget that is at least
    "substitution": (None, None),
    "three bf16 products": (three_products, None),
    "TF32": (lambda a, b: tf32(a) @ tf32(b), 1),
    "an inverse stored in bf16": (lambda a, b: bf16(a) @ b, 10),
    "a bf16 product": (lambda a, b: bf16(a) @ bf16(b), 10),
}


@pytest.mark.parametrize(("product", "over"), SOLVES.values(), ids=SOLVES)
def test_a_solve_must_be_float32_accurate_where_keys_and_queries_coincide(product, over, monkeypatch):
    """spec/delta.md, "Solve", at λ = β = 1: a bf16 solve is 10–56 × over budget, TF32 4–6 ×; three bf16 products are inside."""
    g = torch.Generator().manual_seed(0)
    B, T, dim = 4, 256, 64
    k = bf16(unit(normal(g, B, 1, H, dim)).expand(B, T, H, dim))
    one = constant(k, 1.0)
    inputs = {"q": k, "k": k, "v": bf16(normal(g, B, T, H, dim)), "g": 0 * one, "beta": one, "lam": one}
    half = operand(torch.bfloat16)
    exact = recurrent_qdelta(**{name: x.double() for name, x in inputs.items()}).o
    definition, chunked = recurrent_qdelta(**inputs, operand=half).o, literal(**inputs, operand=half).o
    if product is not None:
        substitute, identity = torch.linalg.solve_triangular, torch.eye(64)
        by_inverse = lambda A, R, **how: product(substitute(A, identity.expand_as(A), **how), R)
        monkeypatch.setattr(torch.linalg, "solve_triangular", by_inverse)
    ours = literal(**inputs, operand=half).o.bfloat16()
    ratio = error_over_budget(ours, exact, definition, chunked, 2)[0]
    assert ratio <= 1 if over is None else ratio > over


# the authors' kernels


def authors(lam: float) -> tuple[float, float]:
    """Relative differences of o and of dλ between the two couplings, on random unit q, k at K = 64 and mild decay."""
    g = torch.Generator().manual_seed(0)
    B, T, heads, dim = 1, 256, 2, 64
    q, k, v = unit(normal(g, B, T, heads, dim)), unit(normal(g, B, T, heads, dim)), normal(g, B, T, heads, dim)
    inputs = {"q": q, "k": k, "v": v, "g": uniform(g, -0.05, 0, B, T, heads), "beta": torch.sigmoid(normal(g, B, T, heads))}
    inputs["lam"] = constant(q, lam)
    rule, theirs = (differentiate(lambda x, c=c: chunk_qdelta(**x, coupling=c), inputs) for c in ("recurrent", "transposed"))
    return relative(theirs[0]["o"], rule[0]["o"]), relative(theirs[1]["dlam"], rule[1]["dlam"])


def test_the_authors_kernels_do_not_compute_the_rule():
    """The page: 0 at λ = 0, 10 % at the initial λ ≈ 0.29, 36 % at λ = 1, gradients of λ wrong by more than their size (211 %)."""
    o = {lam: authors(lam)[0] for lam in (0.0, 0.29, 1.0)}
    assert o[0.0] < 1e-12
    assert 0.05 < o[0.29] < 0.2
    assert 0.18 < o[1.0] < 0.72
    assert authors(0.29)[1] > 1


def test_transposed_chunks_start_at_every_sequence_and_a_cut_shows():
    inputs = inputs_of(1, 100, HV=H)
    run = lambda **x: chunk_qdelta(**x, coupling="transposed", output_final_state=True)
    part = lambda a, b: {name: x[:, a:b] for name, x in inputs.items()}
    packed = run(**inputs, cu_seqlens=torch.tensor([0, 40, 100]))
    assert_close({"o": packed.o}, {"o": torch.cat([run(**part(0, 40)).o, run(**part(40, 100)).o], 1)}, "packed")
    whole = run(**inputs).o
    cut = lambda at: run(**part(at, 100), initial_state=run(**part(0, at)).state).o
    assert relative(cut(64), whole[:, 64:]) < 1e-12
    assert relative(cut(40), whole[:, 40:]) > 1e-2


def test_one_transposed_token_is_the_true_rule():
    inputs = inputs_of(2, 1, HV=H)
    state = normal(torch.Generator().manual_seed(1), 2, H, K, V)
    a, b = (chunk_qdelta(**inputs, initial_state=state, coupling=c).o for c in ("recurrent", "transposed"))
    assert relative(a, b) < 1e-12


# edges


def test_lambda_0_has_gated_deltanets_gradients_to_the_bit():
    inputs = inputs_of(2, 70, "strong", HV=H)
    gated = {name: x for name, x in inputs.items() if name != "lam"}
    inputs["lam"] = 0 * inputs["lam"]
    ours = differentiate(lambda x: chunk_qdelta(**x), inputs)[1]
    theirs = differentiate(lambda x: chunk_delta(**x), gated)[1]
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("settings", [{}, {"coupling": "transposed"}, {"impl": "reference"}])
def test_autocast_changes_nothing(settings):
    inputs = {name: x.float() for name, x in inputs_of(1, 20).items()}
    outside = chunk_qdelta(**inputs, **settings)
    with torch.autocast("cpu", torch.bfloat16):
        inside = chunk_qdelta(**inputs, **settings)
    assert torch.equal(inside.o, outside.o)


def test_an_empty_sequence_and_no_token_keep_the_state():
    inputs = inputs_of(1, 12, HV=H)
    state = normal(torch.Generator().manual_seed(1), 3, H, K, V)
    for coupling in ("recurrent", "transposed"):
        run = lambda x, s, coupling=coupling, **more: chunk_qdelta(
            **x, initial_state=s, output_final_state=True, coupling=coupling, **more
        )
        assert torch.equal(run(inputs, state, cu_seqlens=torch.tensor([0, 5, 5, 12])).state[1], state[1])
        o, final = run({name: x[:, :0] for name, x in inputs.items()}, state[:1])
        assert o.shape == (1, 0, H, V) and torch.equal(final, state[:1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lam": torch.zeros(1, 8, 3)}, r"lam: axis 2 \(HV\) of \[B T HV\] has size 3, expected 2"),
        ({"beta": torch.zeros(1, 9, H)}, r"beta: axis 1 \(T\)"),
        ({"q": torch.zeros(1, 8, H, K, dtype=torch.float16)}, "mixed dtypes"),
        ({"coupling": "both"}, "coupling: got 'both'"),
        ({"coupling": "transposed", "chunk_size": 32}, "chunk_size: got 32; with coupling='transposed' chunks of 64"),
        ({"coupling": "transposed", "g": torch.zeros(1, 8, H, K)}, "one gate per head"),
        ({"chunk_size": 0}, "chunk_size: expected at least 1, got 0"),
        ({"impl": "triton"}, "qdelta has no Triton kernel"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message):
    inputs = {name: x.float() for name, x in inputs_of(1, 8, HV=H).items()}
    with pytest.raises(ValueError, match=message):
        chunk_qdelta(**{**inputs, **change})
