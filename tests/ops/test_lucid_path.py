"""What LUCID-PaTH's settled page claims of its solve, its hand-derived backward from any state, and what it refuses."""

from functools import partial
from math import sqrt

import pytest
import torch

from needlework.ops.common.samples import keys, normal, uniform
from needlework.ops.path import BLOCK, LucidPathState, chunk_lucid_path, recurrent_lucid_path, step_lucid_path
from needlework.ops.path.reference import scores
from needlework.ops.path.solve.reference import literal_lucid_path
from needlework.testing.compare import assert_close, relative, whole
from needlework.testing.rows import covering
from tests.ops.test_path import cut, equal_from_states, generator, state_of

STYLES = ("random", "clustered", "identical")


def sample(B, T, *, H=2, K=16, V=12, seed=0, style="random"):
    g = generator(seed)
    k, v = keys(g, B, T, H, K, style) * uniform(g, 0.5, 3, B, T, H, 1), normal(g, B, T, H, V)
    return {"k": k, "v": v, "beta": uniform(g, 0, 2, B, T, H), "w": keys(g, B, T, H, K, style)}


def matrix(k, beta, w):
    """P [T T] of one head, from PaTH's closed form."""
    unit = k / k.norm(dim=-1, keepdim=True)
    d = k.shape[-1]
    P = torch.exp(sqrt(d) * (scores(unit, unit, beta, w, scale=1.0)[0, 0] - 1)).tril(-1)
    return P + torch.eye(len(P), dtype=P.dtype)


@pytest.mark.parametrize("style", STYLES)
def test_the_solve_is_that_of_paths_products_of_unit_keys(style):
    x = sample(1, 100, H=1, style=style)
    y = chunk_lucid_path(**x).y[0, :, 0]
    assert relative(matrix(x["k"], x["beta"], x["w"]) @ y, x["v"][0, :, 0]) <= 1e-12


@pytest.mark.parametrize("beta", (0.0, 1.0, 2.0, None))
@pytest.mark.parametrize("style", STYLES)
def test_the_inverse_has_norm_at_most_two(style, beta):
    x = sample(1, 150, H=1, style=style)
    if beta is not None:
        x["beta"].fill_(beta)
    eye = torch.eye(150, dtype=torch.float64)[None, :, None]
    inverse = chunk_lucid_path(**x | {"v": eye}).y[0, :, 0]
    assert torch.linalg.matrix_norm(inverse, 2) <= 2 + 1e-12


@pytest.mark.parametrize("style", STYLES)
def test_a_query_at_t_gets_v_t_back(style):
    """With scores √d M_tj: v_t / Σ_j P_tj."""
    x = sample(1, 96, H=1, style=style)
    y, P = chunk_lucid_path(**x).y[0, :, 0], matrix(x["k"], x["beta"], x["w"])
    for t in (0, 1, 63, 64, 95):
        read = P[t] @ y / P[t].sum()
        assert relative(read, x["v"][0, t, 0] / P[t].sum()) <= 1e-12


def test_a_carried_key_is_divided_by_the_norm_that_it_came_with():
    """Normalised again it would be longer, for its factors have shortened it: another solve, by some per cent."""
    x = sample(1, BLOCK + 20)
    full = whole(chunk_lucid_path)(x)
    start = whole(chunk_lucid_path)(cut(x, slice(0, BLOCK))).state
    assert (start.k.norm(dim=-1) < 0.9 * start.norm).any()
    rest = lambda state: chunk_lucid_path(**cut(x, slice(BLOCK, None)), initial_state=state).y
    assert relative(rest(start), full.y[:, BLOCK:]) <= 1e-12
    assert relative(rest(start._replace(norm=start.k.norm(dim=-1))), full.y[:, BLOCK:]) > 0.01


def state(lengths, window):
    past = state_of(lengths, window)
    norm = uniform(generator(5), 0.5, 3, *past.k.shape[:3])
    return LucidPathState(past.k * norm[..., None] / past.k.norm(dim=-1, keepdim=True), norm, *past[1:5])


ROWS = covering((None, 6, 90), (False, True), (16, 64))


@pytest.mark.parametrize("window, packed, chunk_size", ROWS)
def test_the_hand_derived_backward_is_autograd_of_the_definition(window, packed, chunk_size):
    """Every tensor, from states of unlike lengths, some of whose open blocks end in the call, and the final states' cotangents."""
    fast = partial(chunk_lucid_path, chunk_size=chunk_size)
    forms = {"fast": fast, "definition": recurrent_lucid_path, "literal": literal_lucid_path}
    equal_from_states(forms, sample, state([0, 5, 63, 70, 128], window), window, packed)


@pytest.mark.parametrize("window", (None, 30))
def test_steps_go_on_from_a_prefilled_state_and_prefill_from_theirs(window):
    x = sample(2, 2 * BLOCK + 10)
    full = whole(chunk_lucid_path, window=window)(x)
    start = whole(chunk_lucid_path, window=window)(cut(x, slice(0, BLOCK - 7))).state
    rows = window or 2 * BLOCK + 60
    room = lambda y: torch.cat([y, y.new_zeros(2, rows - y.shape[1], *y.shape[2:])], 1)
    table = LucidPathState(*(room(y) for y in start[:3]), *start[3:])
    for t in range(BLOCK - 7, BLOCK + 9):
        assert (
            relative(step_lucid_path(**{n: y[:, t] for n, y in x.items()}, state=table, window=window), full.y[:, t]) <= 1e-12
        )
    rest = chunk_lucid_path(**cut(x, slice(BLOCK + 9, None)), initial_state=table, output_final_state=True, window=window)
    assert relative(rest.y, full.y[:, BLOCK + 9 :]) <= 1e-12
    for name, y in rest.state._asdict().items():
        want = getattr(full.state, name)
        assert_close({name: y[:, : want.shape[1]] if y.dim() > 1 else y}, {name: want}, "the state")


def test_pads_on_the_left_with_values_of_zero_solve_to_exactly_zero():
    x = sample(2, 90)
    x["v"][:, :70] = 0
    assert not chunk_lucid_path(**x).y[:, :70].any()


def test_a_state_that_does_not_fit_is_named():
    x = sample(2, 9)
    past = whole(chunk_lucid_path)(x).state
    for change, message in (
        ({"norm": past.norm[:, :4]}, r"initial_state.norm: axis 1 \(P\) of \[N P Hkv\] has size 4, expected 9"),
        ({"y": past.y[..., :3]}, r"initial_state.y: axis 3 \(V\) of \[N P Hkv V\] has size 3, expected 12"),
        ({"w": past.w[:, :5]}, r"initial_state.w: axis 1 \(C\) of \[N C Hkv K\] has size 5, expected 64"),
    ):
        with pytest.raises(ValueError, match=message):
            chunk_lucid_path(**x, initial_state=past._replace(**change))
