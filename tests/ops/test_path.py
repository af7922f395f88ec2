"""What the PaTH paper and its settled page claim, its hand-derived backward from any state, and what it refuses."""

from functools import partial
from itertools import product

import pytest
import torch

from needlework.ops.common.samples import keys, normal, uniform, unit
from needlework.ops.path import BLOCK, PathState, chunk_path, recurrent_path, step_path
from needlework.ops.path.reference import literal_path, scores
from needlework.ops.path.spec import inputs
from needlework.testing.compare import assert_close, differentiate, leaves, relative, whole
from needlework.testing.errors import assert_within_budget, over_budget, stored
from needlework.testing.rows import chosen, covering


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sample(B, T, *, Hq=4, H=2, K=16, V=12, seed=0, style="random", gates=False):
    g = generator(seed)
    q, k, v = normal(g, B, T, Hq, K), normal(g, B, T, H, K), normal(g, B, T, H, V)
    x = {"q": q, "k": k, "v": v, "beta": uniform(g, 0, 2, B, T, H), "w": keys(g, B, T, H, K, style)}
    return x | ({"g": -uniform(g, 0, 1, B, T, Hq).pow(4)} if gates else {})


def cut(inputs, tokens):
    return {name: x[:, tokens] for name, x in inputs.items()}


# The scores.


def test_the_closed_form_is_the_product_of_the_factors():
    x = sample(1, 20, Hq=1, H=1)
    q, k, w, beta = (x[name][0, :, 0] for name in ("q", "k", "w", "beta"))
    H = torch.eye(16, dtype=torch.float64) - beta[:, None, None] * w[:, :, None] * w[:, None]
    A = torch.zeros(20, 20, dtype=torch.float64)
    for i, j in product(range(20), range(20)):
        if j <= i:
            passed = torch.eye(16, dtype=torch.float64)
            for t in range(j + 1, i + 1):
                passed = H[t] @ passed
            A[i, j] = q[i] @ passed @ k[j] / 4
    assert relative(scores(x["q"], x["k"], x["beta"], x["w"])[0, 0], A) <= 1e-12


@pytest.mark.parametrize("beta", (1.0, 2.0, None))
def test_a_score_is_at_most_that_of_the_norms_at_any_distance(beta):
    x = sample(1, 300, style="clustered")
    if beta is not None:
        x["beta"].fill_(beta)
    A = scores(x["q"], x["k"], x["beta"], x["w"])[0]
    bound = x["q"].norm(dim=-1)[0].T[:, :, None] * x["k"].norm(dim=-1)[0].T.repeat_interleave(2, 0)[:, None] / 4
    assert (A.abs() <= bound * (1 + 1e-12)).all()


def test_tokens_that_are_alike_are_within_the_budget():
    """In M W of rows that are alike the rounding errors of M add up."""
    x = inputs(generator(), 8, 70, "identical", Hq=4)
    kept, wide, single = stored(x, torch.float32, ("q", "k", "v", "w"))
    calls = (chunk_path, kept), (chunk_path, wide), (recurrent_path, single), (literal_path, single)
    fast, exact, definition, literal = (
        {**values, **gradients} for values, gradients in (differentiate(whole(form), given) for form, given in calls)
    )
    ratios = over_budget(fast, exact, definition, literal)
    del ratios["dbeta"]  # it has fewer than 4,096 numbers; the battery has more
    assert_within_budget(ratios)


def test_a_factor_beyond_the_range_lets_scores_grow_with_the_distance():
    x = sample(1, 40, Hq=2)
    x["w"] = x["w"][:, :1].expand_as(x["w"]).contiguous()
    x["k"], x["beta"] = x["w"].clone(), torch.full_like(x["beta"], 2.5)
    A = scores(x["w"], x["k"], x["beta"], x["w"])[0, 0]
    assert relative(A[-1].abs() * 4, 1.5 ** torch.arange(39, -1, -1, dtype=torch.float64)) <= 1e-9


def test_tokens_whose_beta_is_zero_move_no_key():
    x = sample(1, 60)
    x["beta"][:, 20:40] = 0
    left = cut(x, [t for t in range(60) if not 20 <= t < 40])
    whole_A, A = (scores(y["q"], y["k"], y["beta"], y["w"]) for y in (x, left))
    outside = torch.tensor([t for t in range(60) if not 20 <= t < 40])
    assert relative(whole_A[..., outside, :][..., outside], A) <= 1e-12


def test_l2norm_makes_the_reflections_unit_vectors():
    x = sample(2, 70)
    long = x | {"w": 3 * x["w"]}
    inside = whole(chunk_path, l2norm=True)(long)
    norm = (9 + 1e-6) ** 0.5
    assert_close(dict(leaves(inside)), dict(leaves(whole(chunk_path)(x | {"w": 3 / norm * x["w"]}))), "l2norm")
    assert_close(dict(leaves(inside)), dict(leaves(whole(recurrent_path, l2norm=True)(long))), "l2norm")


# The state.


def state_of(lengths, window, seed=3, H=2, K=16, V=12, gates=None):
    """Any numbers: rows of pages and of open blocks that hold a token, zeros elsewhere."""
    N, g = len(lengths), generator(seed)
    P = max(lengths) + 3 if window is None else min(window, max(lengths))
    pages = normal(g, N, P, H, K), normal(g, N, P, H, V)
    opened = unit(normal(g, N, BLOCK, H, K)), uniform(g, 0, 2, N, BLOCK, H)
    for n, length in enumerate(lengths):
        for x in opened:
            x[n, length % BLOCK :] = 0
    return PathState(*pages, *opened, torch.tensor(lengths), gates and normal(g, N, P, gates))


ROWS = covering((None, 6, 30, 90), (False, True), (16, 64)) + [(None, False, 1000)]


@pytest.mark.parametrize("window, packed, chunk_size", ROWS)
def test_the_hand_derived_backward_is_autograd_of_the_definition(window, packed, chunk_size):
    """Every tensor, from states of unlike lengths, some of whose open blocks end in the call, and the final states' cotangents."""
    forms = {"fast": partial(chunk_path, chunk_size=chunk_size), "definition": recurrent_path, "literal": literal_path}
    equal_from_states(forms, sample, state_of([0, 5, 63, 70, 128], window), window, packed)


@pytest.mark.parametrize("window, packed", [(None, True), (30, False), (6, False), (90, False)])
def test_so_is_that_of_the_gates(window, packed):
    forms = {"fast": partial(chunk_path, chunk_size=16), "definition": recurrent_path, "literal": literal_path}
    past = state_of([0, 5, 63, 70, 128], window, gates=4)
    equal_from_states(forms, partial(sample, gates=True), past, window, packed)


def equal_from_states(forms, sample, past, window, packed):
    """Values of all forms and gradients of the first two, of 80 tokens a row, or of packed sequences, one of them empty."""
    T = 250 if packed else 80
    inputs = sample(1 if packed else 5, T)
    settings = {"cu_seqlens": torch.tensor([0, 80, 83, 84, 84, T])} if packed else {}
    fields = {f"state_{name}": x for name, x in past._asdict().items() if name != "length" and x is not None}

    def call(form):
        def of(x):
            tokens = {n: y for n, y in x.items() if not n.startswith("state_")}
            start = past._replace(**{name.removeprefix("state_"): x[name] for name in fields})
            return form(**tokens, window=window, initial_state=start, output_final_state=True, **settings)

        return of

    fast, exact, literal = (differentiate(call(form), inputs | fields) for form in forms.values())
    assert_close(fast[0], exact[0], "values")
    assert_close(fast[1], exact[1], "gradients")
    assert_close(literal[0], exact[0], "literal form")


def test_keys_are_carried_where_a_block_ends_and_nowhere_else():
    x = sample(1, 2 * BLOCK + 10)
    k = lambda T: whole(chunk_path)(cut(x, slice(0, T)))[-1].k[0, :BLOCK]
    assert torch.equal(k(BLOCK - 1)[: BLOCK - 1], x["k"][0, : BLOCK - 1])
    assert torch.equal(k(BLOCK), k(2 * BLOCK - 1))
    assert relative(k(BLOCK)[: BLOCK - 1], x["k"][0, : BLOCK - 1]) > 0.1
    assert torch.equal(k(BLOCK)[BLOCK - 1], x["k"][0, BLOCK - 1])  # the key's own factor is not applied
    assert relative(k(2 * BLOCK), k(BLOCK)) > 0.1


@pytest.mark.parametrize(
    "window, gates",
    chosen([(None, False), (6, True), (30, False), (90, True), (None, True)], [(6, True), (30, False), (None, True)]),
)
def test_steps_go_on_from_a_prefilled_state_and_prefill_from_theirs(window, gates):
    x = sample(2, 2 * BLOCK + 40, gates=gates)
    full = whole(chunk_path, window=window)(x)
    start = whole(chunk_path, window=window)(cut(x, slice(0, BLOCK - 7)))
    rows = window or 2 * BLOCK + 60
    room = lambda y: torch.cat([y, y.new_zeros(len(y), rows - y.shape[1], *y.shape[2:])], 1)
    state = start.state._replace(k=room(start.state.k), v=room(start.state.v))
    state = state._replace(decay=room(start.state.decay)) if gates else state
    for t in range(BLOCK - 7, 2 * BLOCK + 9):
        o = step_path(**{n: y[:, t] for n, y in x.items()}, state=state, window=window)
        assert relative(o, full.o[:, t]) <= 1e-12, f"token {t}"
    rest = chunk_path(**cut(x, slice(2 * BLOCK + 9, None)), initial_state=state, output_final_state=True, window=window)
    assert relative(rest.o, full.o[:, 2 * BLOCK + 9 :]) <= 1e-12
    for name, y in leaves(rest.state):
        want = getattr(full.state, name)
        assert_close({name: y[:, : want.shape[1]] if y.dim() > 1 else y}, {name: want}, "the state")


def test_a_step_touches_the_slots_of_its_rows_alone():
    x, slots = sample(3, BLOCK + 5), torch.tensor([4, -1, 1])
    empty = lambda *shape: torch.full((6, *shape), torch.nan, dtype=torch.float64)
    state = PathState(
        empty(80, 2, 16), empty(80, 2, 12), empty(BLOCK, 2, 16), empty(BLOCK, 2), torch.zeros(6, dtype=torch.int64)
    )
    want = chunk_path(**x).o
    for t in range(BLOCK + 5):
        o = step_path(**{n: y[:, t] for n, y in x.items()}, state=state, slots=slots)
        assert relative(o[[0, 2]], want[[0, 2], t]) <= 1e-12 and not o[1].any()
    for y in state[:5]:
        others = y[[0, 2, 3, 5]]
        assert others.isnan().all() if y.is_floating_point() else not others.any()


def test_half_inputs_are_computed_in_float32_and_rounded_once():
    x = {name: y.bfloat16() if name != "beta" else y.float() for name, y in sample(2, 90).items()}
    o, state = whole(chunk_path)(x)
    single = whole(chunk_path)({name: y.float() for name, y in x.items()})
    assert torch.equal(o, single.o.bfloat16())
    assert [y.dtype for y in state[:4]] == [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]
    assert torch.equal(state.k, single.state.k) and torch.equal(state.w, single.state.w.bfloat16())


def test_bfloat16_beside_float32_keys_costs_its_rounding_unit():
    """Operands of eight bits cost eight times those of eleven; why W, M W and what is carried are no bfloat16 operands."""
    x = sample(2, 256, K=64)
    exact = recurrent_path(**x).o
    float16, bfloat16 = (
        relative(literal_path(**x, operand=lambda x, half=half: x.to(half).to(x.dtype)).o, exact)
        for half in (torch.float16, torch.bfloat16)
    )
    assert 4 < bfloat16 / float16 < 16


def test_gates_cost_no_digit_after_a_long_past():
    """Only differences of their sums count: in float32 and from a state that lies a hundred million below 0."""
    x = {name: y.float() for name, y in sample(2, 90, gates=True).items()}
    first = whole(chunk_path)(cut(x, slice(0, 60)))
    rest = lambda state: chunk_path(**cut(x, slice(60, None)), initial_state=state).o
    far = first.state._replace(decay=first.state.decay - 2.0**27)
    assert relative(rest(far), rest(first.state)) <= 1e-6


@pytest.mark.parametrize("settings", ({}, {"cu_seqlens": torch.tensor([0, 20, 70])}))
def test_rows_behind_a_sequences_end_stay_finite_beside_a_gate_that_hides_all(settings):
    x = sample(1, 70, gates=True)
    x["g"][:, 5] -= 1000
    fast, exact = (differentiate(lambda x, form=form: form(**x, **settings).o, x) for form in (chunk_path, recurrent_path))
    assert_close(fast[0], exact[0], "values")
    assert_close(fast[1], exact[1], "gradients")


def test_a_gate_hides_all_keys_before_its_token_and_none_after():
    x = sample(1, 50, gates=True)
    x["g"][:, 20] = -1e4
    o = chunk_path(**x).o
    assert relative(o[:, :20], chunk_path(**cut(x, slice(0, 20))).o) <= 1e-12
    assert relative(o[:, 20:], chunk_path(**cut(x, slice(20, None))).o) <= 1e-12


# What is refused.


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("q", lambda x: x[:, :, :3], r"q: axis 2 \(Hq\) has size 3, expected a multiple of the 2 key-value heads of k"),
        ("q", lambda x: x[..., :8], r"q: axis 3 \(K\) of \[B T Hq K\] has size 8, expected 16"),
        ("q", lambda x: x[:, :5], r"q: axis 1 \(T\) of \[B T Hq K\] has size 5, expected 9"),
        ("w", lambda x: x[..., :8], r"w: axis 3 \(K\) of \[B T Hkv K\] has size 8, expected 16"),
        ("w", lambda x: x.float(), "mixed dtypes: k is torch.float64, v is torch.float64, w is torch.float32"),
        ("beta", lambda x: x[:, :, :1], r"beta: axis 2 \(Hkv\) of \[B T Hkv\] has size 1, expected 2"),
        ("beta", lambda x: x.long(), "beta: expected a floating dtype, got torch.int64"),
        ("g", lambda _: torch.zeros(1, 9, 2), r"g: axis 2 \(Hq\) of \[B T Hq\] has size 2, expected 4"),
        ("g", lambda _: torch.zeros(1, 9, 4).long(), "g: expected a floating dtype, got torch.int64"),
        ("v", lambda x: x[:, :5], r"v: axis 1 \(T\) of \[B T Hkv V\] has size 5, expected 9"),
        ("scale", lambda _: 0.0, "scale: expected a number above 0, got float 0.0"),
        ("window", lambda _: 0, "window: expected at least 1 .the query's own key., got 0"),
    ],
)
def test_what_does_not_fit_is_named(name, change, message):
    x = sample(1, 9)
    with pytest.raises(ValueError, match=message):
        chunk_path(**x | {name: change(x.get(name))})


def test_a_state_that_does_not_fit_is_named():
    x = sample(2, 9)
    state = whole(chunk_path)(x).state
    for change, message in (
        ({"k": state.k[:1]}, r"initial_state.k: axis 0 \(N\)"),
        ({"w": state.w[:, :5]}, r"initial_state.w: axis 1 \(C\) of \[N C Hkv K\] has size 5, expected 64"),
        ({"beta": state.beta[..., :1]}, r"initial_state.beta: axis 2 \(Hkv\)"),
        ({"decay": torch.zeros(2, 9, 4)}, r"initial_state.decay: expected None without g, got a tensor \[2, 9, 4\]"),
        ({"length": state.length + 1}, "initial_state.length: a sequence holds 10 tokens, but the pages hold 9 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            chunk_path(**x, initial_state=state._replace(**change))
    g = torch.zeros(2, 9, 4)
    with pytest.raises(ValueError, match=r"initial_state.decay: expected a tensor \[N P Hq\] beside g, got None"):
        chunk_path(**x, g=g, initial_state=state)
    with pytest.raises(ValueError, match=r"initial_state.decay: expected torch.float64, got torch.float32"):
        chunk_path(**x, g=g, initial_state=state._replace(decay=g))
    with pytest.raises(ValueError, match=r"initial_state.k: axis 1 \(P\) has size 9, expected at most the window 4"):
        chunk_path(**x, initial_state=state, window=4)
    with pytest.raises(ValueError, match=r"state.k: axis 1 .P. has capacity 9, but a sequence of length 9 needs a row more"):
        step_path(**{n: y[:, 0] for n, y in x.items()}, state=state)
