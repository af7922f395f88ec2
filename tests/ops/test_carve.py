"""What CARVE's paper (arXiv 2606.27229) and its settled page claim, and the hand-derived backward, tensor by tensor."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, silu

from needlework.ops.carve import CarveState, chunk_carve, recurrent_carve, step_carve
from needlework.ops.carve.reference import retention
from needlework.ops.carve.spec import H, K, V, literal, sample
from needlework.ops.common.samples import normal, uniform, unit
from needlework.testing.compare import assert_close, differentiate, leaves, relative
from needlework.testing.errors import error_over_budget

STILL = -1e3  # as f and b: no decay, no erase, l = 0 in float64
SURE = 40.0  # as w: a write gate of 1


def inputs_of(B: int, T: int, *, R: int = 1, style: str = "random", seed: int = 0) -> dict[str, Tensor]:
    return sample(torch.Generator().manual_seed(seed), B, T, style, R=R)


def state_of(N: int, position: list[int], seed: int = 1) -> CarveState:
    g = torch.Generator().manual_seed(seed)
    return CarveState(normal(g, N, H, K, V), normal(g, N, H, V), normal(g, N, H, V), torch.tensor(position))


def bare(q: Tensor, k: Tensor, v: Tensor, l: Tensor, w: Tensor, r: int = 2) -> dict[str, Tensor]:
    """Inputs of the memory-blind layer with retention l < 0 given: b = log(e^{−l} − 1), no decay gate."""
    b = torch.log(torch.expm1(-l))
    zero = q.new_zeros(q.shape[2], q.shape[3])
    parameters = {"A_log": zero, "dt_bias": zero, "w1": q.new_zeros(r, v.shape[-1]), "w2": q.new_zeros(q.shape[3], r)}
    return {"q": q, "k": k, "v": v, "f": torch.full_like(q, STILL), "b": b, "w": torch.logit(w), **parameters}


def blind(T: int = 48, seed: int = 0):
    """Random q, k, v, l, w of one batch row, as the page's formulas take them."""
    g = torch.Generator().manual_seed(seed)
    q, k = unit(normal(g, 1, T, H, K)), unit(normal(g, 1, T, H, K))
    return q, k, normal(g, 1, T, H, V), uniform(g, -0.5, -0.01, 1, T, H, K), uniform(g, 0.1, 0.9, 1, T, H)


# gradients: "CARVE whole" of the settled backward


@pytest.mark.parametrize("prediction", ["previous", "decayed"])
@pytest.mark.parametrize("R", [1, 2, 4])
def test_all_fourteen_gradients_are_autograd_of_the_definition(R, prediction):
    inputs = inputs_of(3, 30, R=R)
    state = state_of(3, [0, 7, 3])
    carried = dict(zip(("S", "m", "total"), state[:3], strict=True))

    def run(op):
        def call(x):
            given = CarveState(x["S"], x["m"], x["total"], state.position)
            rest = {name: x[name] for name in inputs}
            return op(**rest, initial_state=given, output_final_state=True, content_chunk=8, prediction=prediction)

        return differentiate(call, {**inputs, **carried})

    (value, fast), (wanted, exact) = run(chunk_carve), run(recurrent_carve)
    assert len(exact) == 14 and all(exact[name].any() for name in exact)
    assert_close(value, wanted, "value")
    assert_close(fast, exact, "gradient")


def test_packed_sequences_resume_at_their_own_positions_with_all_gradients():
    inputs, ends = inputs_of(1, 31), torch.tensor([0, 4, 4, 20, 31])
    state = state_of(4, [7, 2, 0, 5])

    def run(op):
        def call(x):
            given = CarveState(x["S"], x["m"], x["total"], state.position)
            rest = {name: x[name] for name in inputs}
            return op(**rest, initial_state=given, output_final_state=True, content_chunk=8, cu_seqlens=ends)

        return differentiate(call, {**inputs, "S": state.S, "m": state.m, "total": state.total})

    (value, fast), (wanted, exact) = run(chunk_carve), run(recurrent_carve)
    assert value["state.position"].tolist() == [3, 2, 0, 0]
    assert_close(value, wanted, "value")
    assert_close(fast, exact, "gradient")


def test_the_write_gates_gradient_is_the_errors_not_the_gated_errors():
    """One token: dw = Σ_v δ ⊙ (dSᵀ k), where dδ = w dSᵀ k; taken for one another, every other gradient stays right."""
    inputs = inputs_of(1, 1)
    state = state_of(1, [0])
    w = inputs["w"].requires_grad_()
    o = chunk_carve(**inputs, initial_state=state).o
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(3), dtype=o.dtype)
    (got,) = torch.autograd.grad(o, w, do)
    q, k, v = (inputs[name][:, 0] for name in "qkv")
    dS = K**-0.5 * torch.einsum("bhk,bhv->bhkv", q, do[:, 0])
    error = v - torch.einsum("bhkv,bhk->bhv", state.S, k)
    gate = torch.sigmoid(w.detach()[:, 0])
    right = gate * (1 - gate) * (error * torch.einsum("bhkv,bhk->bhv", dS, k)).sum(-1)
    assert relative(got[:, 0], right) < 1e-12
    assert relative(gate * right, right) > 0.1


# numbers that stay numbers


@pytest.mark.parametrize("erase", [20.0, 100.0, -100.0])
def test_saturated_erase_gates_stay_finite_and_right(erase):
    """log(1 − σ(b)) is −∞ in float32 from b ≈ 17, and −∞ − (−∞) is NaN: the op never forms it."""
    inputs = inputs_of(2, 40)
    inputs["b"] = torch.where(uniform(torch.Generator().manual_seed(2), 0, 1, *inputs["b"].shape) < 0.5, erase, inputs["b"])
    single = {name: x.float() for name, x in inputs.items()}
    wide = {name: x.double() for name, x in single.items()}
    run = lambda op, x: [y for part in differentiate(lambda x: op(**x, content_chunk=16), x) for y in part.values()]
    assert all(torch.isfinite(x).all() for x in run(chunk_carve, single))
    for fast, exact in zip(run(chunk_carve, wide), run(recurrent_carve, wide), strict=True):
        assert relative(fast, exact) < 1e-12


def test_the_logarithm_of_one_minus_a_sigmoid_is_minus_infinity_from_17():
    """spec/carve.md: in float32; logσ(−b) is not."""
    b = torch.tensor([16.0, 17.0])
    assert torch.log(1 - torch.sigmoid(b)).isinf().tolist() == [False, True]
    assert torch.equal(logsigmoid(-b), -b)  # to e^-16, less than a rounding


# state: content chunks belong to the model


def test_a_call_in_pieces_cut_where_content_chunks_end_is_bit_equal_to_one_call():
    inputs = {name: x.float() for name, x in inputs_of(2, 160).items()}
    settings = {"content_chunk": 32, "chunk_size": 16, "output_final_state": True}
    whole = chunk_carve(**inputs, **settings)
    state, outputs = None, []
    for a, b in ((0, 32), (32, 128), (128, 160)):
        part = {name: x[:, a:b] if name in ("q", "k", "v", "f", "b", "w") else x for name, x in inputs.items()}
        o, state = chunk_carve(**part, initial_state=state, **settings)
        outputs.append(o)
    assert torch.equal(torch.cat(outputs, 1), whole.o)
    assert all(torch.equal(a, b) for a, b in zip(state, whole.state, strict=True))


def test_a_cut_inside_a_content_chunk_stays_within_the_error_budget():
    inputs = {name: x.float() for name, x in inputs_of(8, 96).items()}
    settings = {"content_chunk": 32, "output_final_state": True}
    state, outputs = None, []
    for a, b in ((0, 5), (5, 47), (47, 96)):
        part = {name: x[:, a:b] if name in ("q", "k", "v", "f", "b", "w") else x for name, x in inputs.items()}
        o, state = chunk_carve(**part, initial_state=state, **settings)
        outputs.append(o)
    exact = recurrent_carve(**{name: x.double() for name, x in inputs.items()}, **settings)
    definition, chunked = recurrent_carve(**inputs, **settings), literal(**inputs, **settings)
    assert error_over_budget(torch.cat(outputs, 1), exact.o, definition.o, chunked.o, 2)[0] <= 1
    assert error_over_budget(state.S, exact.state.S, definition.state.S, chunked.state.S, 1)[0] <= 1


@pytest.mark.parametrize("chunk_size", [1, 5, 16, 64])
def test_the_kernels_chunk_is_not_the_content_chunk(chunk_size):
    inputs = inputs_of(1, 50)
    fast = chunk_carve(**inputs, content_chunk=12, chunk_size=chunk_size).o
    assert relative(fast, recurrent_carve(**inputs, content_chunk=12).o) < 1e-12
    assert relative(fast, recurrent_carve(**inputs, content_chunk=chunk_size).o) > 1e-3


def test_content_chunks_of_one_token_are_the_sequential_recurrence():
    """Table 2, "chunk 1 = sequential": every token reads the output of the one before."""
    inputs = inputs_of(1, 40)
    fast, exact = (op(**inputs, content_chunk=1, output_final_state=True) for op in (chunk_carve, recurrent_carve))
    assert_close(dict(leaves(fast)), dict(leaves(exact)), "content_chunk 1")
    assert torch.equal(fast.state.m, fast.o[:, -1]) and not fast.state.total.any()


def test_rows_at_different_positions_share_a_batch_and_a_table():
    inputs, state = inputs_of(3, 20), state_of(3, [0, 5, 11])
    together = chunk_carve(**inputs, initial_state=state, output_final_state=True, content_chunk=12)
    assert together.state.position.tolist() == [8, 1, 7]
    table = CarveState(*(x.clone() for x in state))
    tokens = ("q", "k", "v", "f", "b", "w")
    stepped = [
        step_carve(**{n: x[:, t] if n in tokens else x for n, x in inputs.items()}, state=table, content_chunk=12)
        for t in range(20)
    ]
    assert_close({"o": torch.stack(stepped, 1)}, {"o": together.o}, "step")
    assert_close(dict(leaves(table)), dict(leaves(together.state)), "table")
    for n in range(3):
        row = {name: x[n : n + 1] if name in tokens else x for name, x in inputs.items()}
        alone = CarveState(*(x[n : n + 1] for x in state))
        assert_close(
            {"o": together.o[n : n + 1]}, {"o": chunk_carve(**row, initial_state=alone, content_chunk=12).o}, f"row {n}"
        )


def test_the_last_unfinished_content_chunk_makes_no_m():
    inputs = inputs_of(1, 20)
    o, state = chunk_carve(**inputs, content_chunk=8, output_final_state=True)
    assert_close({"m": state.m, "total": state.total}, {"m": o[:, 8:16].mean(1), "total": o[:, 16:].sum(1)}, "state")


def test_no_content_is_bit_equal_to_content_that_w2_ignores():
    """W₂ starts at zero: then the layer is the memory-blind one, whatever m and W₁ are."""
    inputs = {name: x.float() for name, x in inputs_of(2, 96).items()} | {"w2": torch.zeros(K, 4)}
    settings = {"content_chunk": 32, "output_final_state": True}
    a = chunk_carve(**inputs, **settings)
    b = chunk_carve(**{**inputs, "w1": torch.zeros(4, V)}, **settings)
    assert all(torch.equal(x, y) for x, y in zip((a.o, *a.state), (b.o, *b.state), strict=True))


# the page's identities and figures


def test_the_printed_algorithm_2_is_not_eq_5():
    """The page: 146 % in relative norm on random inputs."""
    q, k, v, l, w = blind()
    gamma = l.cumsum(1).exp()  # γ_t; γ_{t-1} is `before`, as is γ_{s-1}
    before = torch.cat([torch.ones_like(gamma[:, :1]), gamma[:, :-1]], 1)
    T = q.shape[1]
    ratio = before[:, :, None] / before[:, None]  # [B t s H K]
    M = torch.einsum("bshk,btshk,bthk->bhts", k, ratio, k) * w.transpose(1, 2)[:, :, None]
    M = M.tril(-1) + torch.eye(T, dtype=q.dtype)
    U = torch.linalg.solve_triangular(M, v.transpose(1, 2), upper=False, unitriangular=True)
    P = torch.einsum("bthk,bshk->bhts", q, k).tril() * w.transpose(1, 2)[:, :, None]
    printed = K**-0.5 * torch.einsum("bhts,bhsv->bthv", P, U)
    exact = recurrent_carve(**bare(q, k, v, l, w)).o
    assert relative(printed, exact) > 1


def test_the_content_mean_needs_no_outputs():
    """Σ_t o_t = scale · [ S₀ᵀ Σ_t e^{G_t} ⊙ q_t + Uᵀ (w ⊙ rowsum(k ⊙ ρ)) ],  ρ_L = q_L,  ρ_s = q_s + e^{l_{s+1}} ⊙ ρ_{s+1}."""
    q, k, v, l, w = blind(16)
    S0 = state_of(1, [0]).S
    S, U = S0, []
    for t in range(16):
        U.append(v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = l[:, t].exp()[..., None] * S + torch.einsum("bh,bhk,bhv->bhkv", w[:, t], k[:, t], U[-1])
    rho = [q[:, -1]]
    for s in reversed(range(15)):
        rho.insert(0, q[:, s] + l[:, s + 1].exp() * rho[0])
    weight = w * (k * torch.stack(rho, 1)).sum(-1)
    total = torch.einsum("bthk,bhkv->bhv", l.cumsum(1).exp() * q, S0)
    total = K**-0.5 * (total + torch.einsum("bth,bthv->bhv", weight, torch.stack(U, 1)))
    given = state_of(1, [0])._replace(m=S0.new_zeros(1, H, V), total=S0.new_zeros(1, H, V))
    state = chunk_carve(**bare(q, k, v, l, w), content_chunk=16, initial_state=given, output_final_state=True).state
    assert relative(total / 16, state.m) < 1e-12


@pytest.mark.parametrize("gate", [0.6, 0.49])
def test_rank_4_on_identical_keys_diverges_unless_the_gate_is_below_a_half(gate):
    """Distance from the fixed point v̄ grows by |1 − 4w| a token: 1.4^60 ‖v̄‖ at w = 0.6 (the page: 9e8), 0.96^60 at 0.49."""
    g = torch.Generator().manual_seed(0)
    k = unit(normal(g, 1, 1, 1, 1, K)).expand(1, 60, 1, 4, K)
    v = normal(g, 1, 1, 1, 4, V).expand(1, 60, 1, 4, V)
    q = k[:, :, :, 0]
    inputs = bare(q, k, v, torch.full_like(q, -1e-15), torch.full((1, 60, 1), gate, dtype=q.dtype))
    S = chunk_carve(**inputs, output_final_state=True).state.S[0, 0]
    mean = v[0, 0, 0].mean(0)
    away = (S.T @ k[0, 0, 0, 0] - mean).norm()
    assert away == pytest.approx(float(abs(1 - 4 * gate) ** 60 * mean.norm()))
    assert (S.norm() > 1e8) == (gate > 0.5)


@pytest.mark.parametrize("prediction", ["previous", "decayed"])
def test_the_state_norm_is_bounded(prediction):
    """‖S_t‖₂ ≤ ρ‖S_{t-1}‖₂ + w_t‖v_t‖ with ρ = max(max a, w − min a) ≤ 1, "decayed" ρ = max a (R = 1, unit keys)."""
    q, k, v, l, w = blind()
    table, before = state_of(1, [0]), None
    inputs = bare(q, k, v, l, w)
    for t in range(q.shape[1]):
        before = torch.linalg.matrix_norm(table.S, 2)
        step = {name: x[:, t] if x.shape[:2] == q.shape[:2] else x for name, x in inputs.items()}
        step_carve(**step, state=table, prediction=prediction)
        a = l[:, t].exp()
        rho = a.amax(-1) if prediction == "decayed" else torch.maximum(a.amax(-1), w[:, t] - a.amin(-1))
        bound = rho * before + w[:, t] * v[:, t].norm(dim=-1)
        assert (rho <= 1).all() and (torch.linalg.matrix_norm(table.S, 2) <= bound * (1 + 1e-12)).all()


def test_orthonormal_associations_are_held_exactly_up_to_the_smaller_side():
    """Theorem 3."""
    n = min(K, V)
    k = torch.eye(K, dtype=torch.float64)[None, :n, None]
    v = normal(torch.Generator().manual_seed(0), 1, n, 1, V)
    still = torch.full_like(k, STILL)
    zeros = {"A_log": k.new_zeros(1, K), "dt_bias": k.new_zeros(1, K), "w1": k.new_zeros(1, V), "w2": k.new_zeros(K, 1)}
    sure = torch.full((1, n, 1), SURE, dtype=k.dtype)
    S = chunk_carve(q=k, k=k, v=v, f=still, b=still, w=sure, **zeros, output_final_state=True).state.S
    assert relative(torch.einsum("bhkv,bthk->bthv", S, k), v) < 1e-12


def staleness(L: int, T: int = 384, dim: int = 32, r: int = 8) -> float:
    """How far o moves because m is a chunk old: against m as the mean of the last L outputs, renewed at every token.

    Random SiLU keys of unit norm, retention half-lives log-uniform in 32 … 8,192 tokens, W₁ and W₂ with outputs of order 1.
    """
    g = torch.Generator().manual_seed(0)
    half_life = 2.0 ** uniform(g, 5, 13, dim)
    x = {
        "q": unit(silu(normal(g, 1, T, 1, dim))),
        "k": unit(silu(normal(g, 1, T, 1, dim))),
        "v": silu(normal(g, 1, T, 1, dim)),
        "f": torch.full((1, T, 1, dim), STILL, dtype=torch.float64),
        "b": torch.log(torch.expm1(math.log(2) / half_life)) + 0.3 * normal(g, 1, T, 1, dim),
        "w": normal(g, 1, T, 1),
        "A_log": torch.zeros(1, dim, dtype=torch.float64),
        "dt_bias": torch.zeros(1, dim, dtype=torch.float64),
        "w1": normal(g, r, dim) / dim**0.5,
        "w2": normal(g, dim, r) / r**0.5,
    }
    S, outputs = torch.zeros(1, 1, dim, dim, dtype=torch.float64), [torch.zeros(1, 1, dim, dtype=torch.float64)]
    for t in range(T):
        m = torch.stack(outputs[-L:]).sum(0) / L
        a = retention(x["f"][:, t], x["b"][:, t], m, x["A_log"], x["dt_bias"], x["w1"], x["w2"]).exp()
        error = x["v"][:, t] - torch.einsum("bhkv,bhk->bhv", S, x["k"][:, t])
        write = torch.sigmoid(x["w"][:, t])
        S = a[..., None] * S + torch.einsum("bh,bhk,bhv->bhkv", write, x["k"][:, t], error)
        outputs.append(dim**-0.5 * torch.einsum("bhkv,bhk->bhv", S, x["q"][:, t]))
    return relative(chunk_carve(**x, content_chunk=L).o, torch.stack(outputs[1:], 1))


def test_a_content_signal_one_chunk_old_moves_the_output_little():
    """Table 4: 0.18 % on trained activations, flat for L = 16 … 128. Here below that, and far from growing with L."""
    deviation = {L: staleness(L) for L in (16, 32, 64, 128)}
    assert all(x < 1.8e-3 for x in deviation.values()), deviation
    assert deviation[128] / deviation[16] < 128 / 16, deviation


# bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w2": torch.zeros(K, 5)}, r"w2: axis 1 \(r\)"),
        ({"b": torch.zeros(1, 9, H, K)}, r"b: axis 1 \(T\)"),
        ({"w1": torch.zeros(4, V + 1)}, r"w1: axis 1 \(V\)"),
        ({"A_log": torch.zeros(H)}, "A_log: expected 2 axes"),
        ({"b_bias": torch.zeros(H)}, "b_bias: expected 2 axes"),
        ({"k": torch.zeros(1, 8, H, 3, K), "v": torch.zeros(1, 8, H, 3, V)}, r"k: axis 3 \(R\).*1, 2 or 4"),
        ({"v": torch.zeros(1, 8, H, 2, V)}, "v: expected 4 axes"),
        ({"k": torch.zeros(1, 8, H, K, dtype=torch.bfloat16)}, "mixed dtypes"),
        ({"prediction": "now"}, "prediction: got 'now'"),
        ({"content_chunk": 0}, "content_chunk: expected at least 1, got 0"),
        ({"chunk_size": 0}, "chunk_size: expected at least 1, got 0"),
        ({"impl": "triton"}, "carve has no Triton kernel"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message):
    inputs = {name: x.float() for name, x in inputs_of(1, 8).items()}
    with pytest.raises(ValueError, match=message):
        chunk_carve(**{**inputs, **change})


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_a_state_made_with_a_longer_content_chunk_is_refused(impl):
    inputs = inputs_of(1, 12)
    state = chunk_carve(**inputs, content_chunk=64, output_final_state=True).state
    with pytest.raises(ValueError, match=r"position: 12 .* content_chunk = 8"):
        chunk_carve(**inputs, content_chunk=8, initial_state=state, impl=impl)
