"""What the LUCID paper and its settled page claim of the solve, its hand-derived backward, and what it refuses."""

import math
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from needlework.ops.common.samples import keys, normal, uniform, unit
from needlework.ops.lucid import LucidState, chunk_lucid, recurrent_lucid, step_lucid
from needlework.ops.lucid import chunk as fast
from needlework.ops.lucid.arguments import LucidInputs
from needlework.ops.lucid.reference import literal_lucid
from needlework.testing.compare import assert_close, differentiate, relative
from needlework.testing.rows import chosen

STYLES = ("random", "clustered", "identical")
PRECONDITIONS = ("key", "rowmax", "beta")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inverse(k, beta=None, **settings):
    """A⁻¹ [T T] for keys [T K]: the solve of the identity."""
    T = len(k)
    v = torch.eye(T, dtype=k.dtype)[None, :, None]
    beta = None if beta is None else torch.full((1, T, 1), beta, dtype=k.dtype)
    return chunk_lucid(k[None, :, None], v, beta, **settings).y[0, :, 0]


def spectral(x) -> float:
    return float(torch.linalg.matrix_norm(x, 2))


def sample(B, T, H=2, K=16, V=12, *, precondition="key", seed=0):
    g = generator(seed)
    inputs = {"k": normal(g, B, T, H, K), "v": normal(g, B, T, H, V)}
    return inputs | {"beta": uniform(g, 0, 2, B, T, H)} if precondition == "beta" else inputs


# What a query gets back ("Exact retrieval").


def overlap(k, query, upto):
    """e^{√d (k̂_query·k̂_j − 1)}, j < upto, for keys [T K]."""
    k = unit(k)
    return torch.exp(math.sqrt(k.shape[-1]) * (k[:upto] @ k[query] - 1))


@pytest.mark.parametrize("style", STYLES)
def test_a_query_at_t_gets_v_t_back(style):
    T, d = 96, 16
    k, v = keys(generator(), 1, T, 1, d, style), normal(generator(1), 1, T, 1, 8)
    y = chunk_lucid(k, v).y[0, :, 0]
    for t in (0, 1, 63, 64, 95):
        weight = overlap(k[0, :, 0], t, t + 1)
        read = weight @ y[: t + 1] / weight.sum()  # softmax with scores √d k̂_t·k̂_j
        assert relative(read, v[0, t, 0] / weight.sum()) <= 1e-12


def test_a_later_query_also_gets_the_later_writes_to_correlated_keys():
    T, d, t, i = 96, 16, 40, 95
    k, v = keys(generator(), 1, T, 1, d, "random"), normal(generator(1), 1, T, 1, 8)
    y = chunk_lucid(k, v).y[0, :, 0]
    weight = overlap(k[0, :, 0], t, i + 1)
    later = weight[t + 1 :] @ y[t + 1 : i + 1]
    assert relative(weight @ y[: i + 1], v[0, t, 0] + later) <= 1e-12
    assert later.norm() > 0.01 * v[0, t, 0].norm()


def test_retrieval_is_exact_in_a_window_when_solve_and_read_share_it():
    T, W = 96, 10
    k, v = keys(generator(), 1, T, 1, 16, "clustered"), normal(generator(1), 1, T, 1, 8)
    y = chunk_lucid(k, v, window=W).y[0, :, 0]
    for t in (5, 40, 95):
        weight = overlap(k[0, :, 0], t, t + 1)[-W:]
        assert relative(weight @ y[: t + 1][-W:], v[0, t, 0]) <= 1e-12


def test_a_global_solve_subtracts_an_equal_key_outside_the_window():
    g, W = generator(), 4
    k = torch.linalg.qr(normal(g, 128, 128)).Q[:12]
    k[11] = k[0]  # one key again; between orthogonal keys of width 128 P is e^-11.3
    v = normal(g, 1, 12, 1, 8)
    both = {solve: chunk_lucid(k[None, :, None], v, window=W, solve=solve).y[0, -1, 0] for solve in ("window", "global")}
    spill = 2 * 12 * math.exp(-math.sqrt(128)) * v.norm()
    assert (both["window"] - v[0, 11, 0]).norm() < spill
    assert (both["global"] - (v[0, 11, 0] - v[0, 0, 0])).norm() < spill


def test_lucid_is_the_delta_rule_in_the_kernels_feature_space():
    T, d = 24, 16
    k, v = unit(normal(generator(), T, d)), normal(generator(1), T, 5)
    phi = torch.linalg.cholesky(torch.exp(math.sqrt(d) * (k @ k.T - 1)))  # features: their products are the kernel
    S, writes = torch.zeros(T, 5, dtype=torch.float64), []
    for t in range(T):
        writes.append(v[t] - S.T @ phi[t])
        S = S + torch.outer(phi[t], writes[-1])
    assert relative(chunk_lucid(k[None, :, None], v[None, :, None]).y[0, :, 0], torch.stack(writes)) <= 1e-12


def test_the_gradient_of_the_query_is_the_softmax_jacobian_between_y_and_k():
    """∂o/∂q = Yᵀ (diag(a) − a aᵀ) K / √d ("No vanishing gradient in q")."""
    T, d = 20, 16
    g = generator()
    k, q = normal(g, T, d), normal(g, d)
    y = chunk_lucid(k[None, :, None], normal(g, 1, T, 1, 8)).y[0, :, 0]
    read = lambda q: torch.softmax(k @ q / math.sqrt(d), 0) @ y
    a = torch.softmax(k @ q / math.sqrt(d), 0)
    expected = y.T @ (torch.diag(a) - torch.outer(a, a)) @ k / math.sqrt(d)
    assert relative(torch.autograd.functional.jacobian(read, q), expected) <= 1e-12


# How well conditioned the solve is ("Conditioning", "‖P⁻¹‖₂ ≤ 2", "Rows of P⁻¹", "Window W").


@pytest.mark.parametrize("style, T", list(product(STYLES, (16, 100, 400))))
def test_the_inverse_has_norm_at_most_two(style, T):
    assert spectral(inverse(keys(generator(), 1, T, 1, 16, style)[0, :, 0])) <= 2


@pytest.mark.parametrize("beta", (0.5, 1.0, 1.5, 1.9))
@pytest.mark.parametrize("style", STYLES)
def test_with_beta_the_norm_is_at_most_that_of_the_definite_part(beta, style):
    """≤ 1/(1/β − ½), which is 2 at β = 1 (Table 5's variants)."""
    norm = spectral(inverse(keys(generator(), 1, 100, 1, 16, style)[0, :, 0], beta, precondition="beta"))
    assert norm <= 1 / (1 / beta - 0.5)


@pytest.mark.parametrize("style", STYLES)
def test_rows_of_the_inverse_are_contractions_of_unit_features(style):
    rows = inverse(keys(generator(), 1, 200, 1, 16, style)[0, :, 0])
    rounding = 1e-12
    assert rows.abs().max() <= 1 + rounding
    assert rows.tril(-1).norm(dim=1).max() <= 1 + rounding


def test_a_solved_row_is_bounded_by_the_earlier_values_norm_and_not_by_twice_the_largest():
    k = keys(generator(), 1, 200, 1, 16, "clustered")
    v = normal(generator(1), 1, 200, 1, 8)
    y, v = chunk_lucid(k, v).y[0, :, 0], v[0, :, 0]
    earlier = torch.cat([v.new_zeros(1), v.square().sum(-1).cumsum(0)[:-1]]).sqrt()
    assert (y.norm(dim=-1) <= v.norm(dim=-1) + earlier).all()
    assert inverse(k[0, :, 0]).abs().sum(1).max() > 2


@pytest.mark.parametrize(
    "d, printed, place", chosen([(16, 62, 2), (64, 1.6, 0.05), (128, 1.02, 0.005)], quick=[(64, 1.6, 0.05)])
)
def test_random_keys_are_conditioned_as_the_table_says(d, printed, place):
    """T 2048, float64. The printed digits hold to half a place, except 62: three seeds give 61.0, 61.6, 60.7."""
    k = keys(generator(), 1, 2048, 1, d, "random")[0, :, 0]
    P = torch.exp(math.sqrt(d) * (k @ k.T - 1)).tril()
    squares = torch.linalg.eigvalsh(P @ P.T)
    assert abs(math.sqrt(squares[-1] / squares[0]) - printed) <= place


def test_eight_tight_clusters_are_conditioned_like_their_keys_were_identical():
    """d 64, T 512: 80. Eight times 64 identical keys alone have that of 64 ones in a triangle: sin(127π/258) / sin(π/258) = 82."""
    limit = math.sin(127 * math.pi / 258) / math.sin(math.pi / 258)
    g = generator()
    k = unit(normal(g, 8, 64)).repeat(64, 1) + 1e-3 * normal(g, 512, 64)
    P_inverse = inverse(k)
    conditioning = spectral(P_inverse) * spectral(torch.linalg.inv(P_inverse))
    assert conditioning == pytest.approx(limit, rel=0.1)
    assert conditioning == pytest.approx(80, rel=0.1)


@pytest.mark.parametrize("T, W", [(512, 32), (512, 16)])
def test_a_window_over_identical_keys_loses_the_bound_of_two(T, W):
    """‖P⁻¹‖ ≈ 1.3 T/W, row norm √(2T/W)."""
    rows = inverse(torch.ones(T, 16, dtype=torch.float64), window=W)
    assert round(spectral(rows) / (T / W), 1) == 1.3
    assert rows.norm(dim=1).max() == pytest.approx(math.sqrt(2 * T / W), rel=1e-9)


def test_half_precision_off_the_diagonal_costs_its_rounding_unit():
    """ "float16 beats bfloat16 for P and Y" (3.9e-3 against 3.1e-2 on clustered keys): the rounding units are 8 apart."""
    k, v = keys(generator(), 4, 256, 2, 64, "clustered"), normal(generator(1), 4, 256, 2, 32)
    exact = recurrent_lucid(k, v).y
    float16, bfloat16 = (
        relative(literal_lucid(k, v, operand=lambda x, half=half: x.to(half).to(x.dtype)).y, exact)
        for half in (torch.float16, torch.bfloat16)
    )
    assert 4 < bfloat16 / float16 < 16


# Variants and padding.


def test_the_diagonal_of_rowmax_is_its_exponential_and_not_one():
    g = generator()
    k = unit(normal(g, 80, 16)) * uniform(g, 1, 6, 80, 1)
    s = (k @ k.T / 4).tril().masked_fill(torch.ones(80, 80).triu(1).bool(), -math.inf)
    expected = torch.exp(s.amax(1) - s.diagonal())
    assert expected.max() > 2
    assert relative(inverse(k, precondition="rowmax").diagonal(), expected) <= 1e-12


def test_rowmax_has_no_bound():
    """A key half as long as an earlier parallel one of norm 16 (d 64) has diagonal 3e-4."""
    first = 16 * unit(normal(generator(), 64))
    last = inverse(torch.stack([first, first / 2]), precondition="rowmax")[1, 1]
    assert 1 / last == pytest.approx(3e-4, rel=0.5 / 3)


@pytest.mark.parametrize("precondition", PRECONDITIONS)
def test_pads_on_the_left_with_values_of_zero_solve_to_exactly_zero(precondition):
    inputs = sample(2, 90, precondition=precondition)
    inputs["v"][:, :70] = 0
    assert not chunk_lucid(**inputs, precondition=precondition).y[:, :70].any()


def test_a_key_of_zero_overlaps_with_nothing_more_than_an_orthogonal_one():
    inputs = sample(1, 40)
    inputs["k"][:, 7] = 0
    fast_values = differentiate(lambda x: chunk_lucid(**x), inputs)
    exact_values = differentiate(lambda x: recurrent_lucid(**x), inputs)
    assert_close(fast_values[0], exact_values[0], "a key of zero")
    assert_close(fast_values[1], exact_values[1], "a key of zero")


def test_half_inputs_are_solved_in_float32_and_rounded_once():
    k, v = (x.bfloat16() for x in sample(2, 90).values())
    y, state = chunk_lucid(k, v, output_final_state=True)
    assert y.dtype == state.k.dtype == state.y.dtype == torch.bfloat16
    assert torch.equal(y, chunk_lucid(k.float(), v.float()).y.bfloat16())
    assert torch.equal(state.y, y) and torch.equal(state.k, k)


# Pages.


@pytest.mark.parametrize("precondition, window, packed", list(product(PRECONDITIONS, (None, 6, 30), (False, True))))
def test_the_hand_derived_backward_is_autograd_of_the_definition(precondition, window, packed):
    """Every tensor, initial pages of unlike lengths and the final pages' cotangents included."""
    lengths = torch.tensor([0, 5, 9])
    P = min(9, window or 12)  # without a window three rows more than any sequence fills
    g = generator(3)
    inputs = sample(1 if packed else 3, 41, precondition=precondition)
    inputs |= {"page_k": normal(g, 3, P, 2, 16), "page_y": normal(g, 3, P, 2, 12)}
    settings = {"precondition": precondition, "window": window, "output_final_state": True}
    if packed:
        settings["cu_seqlens"] = torch.tensor([0, 7, 7, 41])

    def call(op, **more):
        def on(x):
            tokens = {n: t for n, t in x.items() if not n.startswith("page")}
            return op(**tokens, initial_state=LucidState(x["page_k"], x["page_y"], lengths), **settings, **more)

        return differentiate(on, inputs)

    got, want = call(chunk_lucid, chunk_size=16), call(recurrent_lucid)
    assert_close(got[0], want[0], "values")
    assert_close(got[1], want[1], "gradients")


def test_rows_of_unlike_length_share_a_batch_of_steps():
    inputs, table = sample(2, 30), LucidState(*(torch.zeros(2, 30, 2, n).double() for n in (16, 12)), torch.zeros(2).long())
    for t in range(20):  # row 1 alone
        step_lucid(inputs["k"][1:, t], inputs["v"][1:, t], state=table, slots=torch.tensor([1]))
    y = step_lucid(
        torch.stack([inputs["k"][0, 0], inputs["k"][1, 20]]), torch.stack([inputs["v"][0, 0], inputs["v"][1, 20]]), state=table
    )
    expected = chunk_lucid(**inputs).y
    assert relative(y, torch.stack([expected[0, 0], expected[1, 20]])) <= 1e-12
    assert table.length.tolist() == [1, 21]


def test_a_full_table_is_refused_with_its_capacity_and_length():
    table = LucidState(torch.zeros(1, 4, 2, 16), torch.zeros(1, 4, 2, 12), torch.tensor([4]))
    with pytest.raises(ValueError, match=r"capacity 4, but a sequence of length 4"):
        step_lucid(torch.zeros(1, 2, 16), torch.zeros(1, 2, 12), state=table)


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return result


@pytest.mark.parametrize("precondition", PRECONDITIONS)
def test_no_tensor_of_forward_or_backward_is_larger_than_a_block_row(precondition):
    T, C, K, V = 1024, 16, 8, 12
    inputs = sample(1, T, 1, K, V, precondition=precondition)
    tokens = LucidInputs(inputs["k"], inputs["v"], inputs.get("beta"))
    pages = LucidState(tokens.k[:, :0], tokens.v[:, :0], torch.zeros(1, dtype=torch.int64))
    settings = {"rowmax": precondition == "rowmax", "window": None, "chunk_size": C}
    with LargestTensor() as largest:
        y = fast.forward(tokens, pages, **settings)
        fast.backward(torch.ones_like(y), y, tokens, pages, **settings)
    assert largest.numel == C * T


@pytest.mark.parametrize("packed", (False, True))
def test_a_call_that_carries_pages_compiles_without_a_graph_break(packed):
    inputs = sample(1 if packed else 2, 20)
    state = LucidState(*(normal(generator(5), 2, 6, 2, n) for n in (16, 12)), torch.tensor([6, 4]))
    settings = {"window": 8, "output_final_state": True, "initial_state": state}
    if packed:
        settings["cu_seqlens"] = torch.tensor([0, 3, 20])
    call = lambda x: chunk_lucid(**x, **settings)
    got, want = (differentiate(f, inputs) for f in (torch.compile(call, fullgraph=True, backend="aot_eager"), call))
    assert_close(got[0], want[0], "compiled")
    assert_close(got[1], want[1], "compiled")


# What is refused.


@pytest.mark.parametrize(
    "change, message",
    [
        ({"precondition": "none"}, "precondition: got 'none', expected one of key, qk, rowmax, beta"),
        ({"solve": "local"}, "solve: got 'local'"),
        ({"window": 0}, "window: expected at least 1"),
        ({"chunk_size": 0}, "chunk_size: expected at least 1"),
        ({"impl": "triton", "k": torch.ones(2, 20, 2, 300).double()}, "lucid has no Triton kernel for this call"),
        ({"beta": torch.ones(2, 20, 2)}, "beta: expected with precondition='beta' and only then"),
        ({"precondition": "beta"}, "beta: expected with .*got None"),
        ({"precondition": "beta", "beta": torch.ones(2, 20, 3)}, r"beta: axis 2 \(Hkv\) .* has size 3, expected 2"),
        ({"v": torch.ones(2, 19, 2, 12).double()}, r"v: axis 1 \(T\) .* has size 19, expected 20"),
        ({"v": torch.ones(2, 20, 2, 12)}, "mixed dtypes: k is torch.float64, v is torch.float32"),
        ({"cu_seqlens": torch.tensor([0, 20])}, "expected B = 1, got B = 2"),
    ],
)
def test_bad_arguments_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        chunk_lucid(**{**sample(2, 20), **change})


@pytest.mark.parametrize(
    "P, length, message",
    [
        (9, 5, r"initial_state.k: axis 1 \(P\) has size 9, expected at most the window 8"),
        (4, 5, "a sequence holds 5 tokens, but the pages hold 4 rows"),
    ],
)
def test_pages_that_cannot_be_are_refused(P, length, message):
    state = LucidState(torch.zeros(2, P, 2, 16), torch.zeros(2, P, 2, 12), torch.tensor([length, 0]))
    with pytest.raises(ValueError, match=message):
        chunk_lucid(**sample(2, 20), window=8, initial_state=state)
