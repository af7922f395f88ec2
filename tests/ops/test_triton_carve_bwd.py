"""CARVE's backward kernels in the Triton interpreter, against autograd of the recurrence: all 14 gradients, W₂ far from 0."""

import os
import sys
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from needlework.ops.carve import CarveState, recurrent_carve
from needlework.ops.carve import chunk as torch_path
from needlework.ops.carve.arguments import CarveInputs, checked
from needlework.ops.carve.feedback.layout import Layout
from needlework.ops.carve.grid import Grid
from needlework.ops.carve.spec import literal
from needlework.ops.common.samples import keys, normal, uniform, unit
from needlework.ops.runtime.launch_configs import forced, launch_config
from needlework.testing.compare import EXACT, relative
from needlework.testing.errors import assert_within_budget, operand, over_budget
from needlework.testing.rows import chosen, covering

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")

H, K, V, RANK = 2, 20, 12, 3
MANY = 16, 16  # heads and rank: enough numbers in every gradient that its error is not one draw
TOKENS, HALF = ("q", "k", "v", "f", "b", "w"), ("q", "k", "v", "do")
INPUTS = (*TOKENS, "A_log", "dt_bias", "w1", "w2", "b_bias", "S", "m", "total")


class Problem(NamedTuple):
    tensors: dict[str, Tensor]  # the 14 inputs, and the cotangents do, dS, dm, dtotal
    position: Tensor | None
    cu_seqlens: Tensor | None
    L: int
    R: int
    prediction: str
    scale: float = 0.3

    def to(self, dtype: torch.dtype) -> "Problem":
        """q, k, v and do rounded to dtype; all else no narrower than float32."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return self._replace(tensors={n: x.to(dtype if n in HALF else wide) for n, x in self.tensors.items()})

    def settings(self) -> dict:
        return {"content_chunk": self.L, "prediction": self.prediction, "scale": self.scale}


def make(
    T: int, L: int, *, B: int = 1, R: int = 1, position: list[int] | None = None, cu: list[int] | None = None,
    prediction: str = "previous", style: str = "random", heads: tuple[int, int] = (H, RANK), size: float = 1.0,
) -> Problem:  # fmt: skip
    g = torch.Generator().manual_seed(T + L + R)
    (H, RANK), N = heads, B if cu is None else len(cu) - 1
    f = uniform(g, -4, 0, B, T, H, K)
    if style == "strong":
        f = torch.where(uniform(g, 0, 1, B, T, H, K) < 0.3, 30.0, -7.0).to(f)
    x = {
        "q": unit(normal(g, B, T, H, K)),
        "k": keys(g, B, T * R, H, K, style).view(B, T, R, H, K).transpose(2, 3).contiguous(),
        "v": normal(g, B, T, H, R, V),
        "f": f,
        "b": normal(g, B, T, H, K),
        "w": uniform(g, -2, 2, B, T, H) if R == 1 else uniform(g, -3, -0.5, B, T, H),
        "A_log": uniform(g, -0.5, 0, H, K),
        "dt_bias": 0.1 * normal(g, H, K),
        "w1": normal(g, RANK, V),
        "w2": normal(g, K, RANK),
        "b_bias": 0.5 * normal(g, H, K) - 3,
        "S": normal(g, N, H, K, V),
        "m": normal(g, N, H, V),
        "total": normal(g, N, H, V) if position else torch.zeros(N, H, V, dtype=torch.float64),
        "do": size * (8 * normal(g, B, T, H, V)).round() / 8,  # few bits: float16 holds them at every size
        "dS": size * normal(g, N, H, K, V),
        "dm": size * normal(g, N, H, V),
        "dtotal": size * normal(g, N, H, V),
    }
    position, cu = (None if x is None else torch.tensor(x) for x in (position, cu))
    return Problem(x, position, cu, L, R, prediction)


def expected(p: Problem, form=recurrent_carve, **settings) -> dict[str, Tensor]:
    """Gradients by autograd of the definition, in p's own precision."""
    x = {n: y.detach().requires_grad_(n in INPUTS) for n, y in p.tensors.items()}
    N = len(x["S"])
    position = torch.zeros(N, dtype=torch.int64) if p.position is None else p.position
    state = CarveState(x["S"], x["m"], x["total"], position)
    given = {n: x[n] for n in INPUTS[:11]} | p.settings() | settings
    o, new = form(**given, initial_state=state, output_final_state=True, cu_seqlens=p.cu_seqlens)
    loss = sum((y * x[n].to(y)).sum() for n, y in (("do", o), ("dS", new.S), ("dm", new.m), ("dtotal", new.total)))
    return dict(zip(INPUTS, torch.autograd.grad(loss, [x[n] for n in INPUTS]), strict=True))


def rows_of(p: Problem) -> dict[str, Tensor]:
    """Tokens as their R rows: f and b lie in the first, q and do in the last."""
    x, R = dict(p.tensors), p.R

    def one_row(y: Tensor, row: int, fill: float = 0.0) -> Tensor:
        return torch.stack([y if i == row else torch.full_like(y, fill) for i in range(R)], 2).flatten(1, 2)

    x["q"], x["do"] = one_row(x["q"], R - 1), one_row(x["do"], R - 1)
    x["f"], x["b"] = one_row(x["f"], 0, -torch.inf), one_row(x["b"], 0, -torch.inf)
    x["k"], x["v"] = (x[n].transpose(2, 3).flatten(1, 2) for n in "kv")
    x["w"] = x["w"].repeat_interleave(R, 1)
    return x


def starts_of(p: Problem) -> list[tuple[Tensor, Tensor]]:
    """S and m [N ...] at the start of every content chunk, by the torch path."""
    B, T = p.tensors["q"].shape[:2]
    lengths = torch.full((B,), T) if p.cu_seqlens is None else p.cu_seqlens.diff()
    grid = Grid.of(torch.zeros_like(lengths) if p.position is None else p.position, lengths)
    wide = {n: x.to(p.tensors["S"].dtype) for n, x in p.tensors.items()}
    fill = {"f": -torch.inf, "b": -torch.inf}
    wide["b"] = wide["b"] + wide.pop("b_bias")
    x = {n: grid.align(y, fill.get(n, 0.0)) if n in TOKENS else y for n, y in wide.items()}
    tensors, state = CarveInputs(*(x[n] for n in INPUTS[:10])), (x[n] for n in INPUTS[11:])
    return torch_path.forward(tensors, *state, grid.ends, chunk_size=16, **p.settings())[-1]


def walked(saved, v: Tensor, beta: Tensor, start: Tensor, spans: list[tuple[int, int, int]], C: int) -> Tensor:
    """W of every row: the engine's recurrence in torch, from the state at the start of each content chunk."""
    W, NC = torch.zeros_like(v, dtype=start.dtype), -(-v.shape[1] // C)
    for first, end, slot in spans:
        S = start[slot]
        for c in range(first, end):
            b, t = c // NC, (c % NC) * C
            part = slice(t, min(t + C, v.shape[1]))
            n = part.stop - t
            e, k, x = (y[b, part].transpose(0, 1).to(S) for y in (saved.e_hat, saved.k_hat, v))  # [H n .]
            inverse = saved.Tp[b, :, (c % NC) * C :][:, :n, :n].to(S)
            W_ = inverse @ (beta[b, part].T[..., None] * (x - e @ S))
            S = saved.whole[b, :, c % NC, :, None] * S + k.transpose(1, 2) @ W_
            W[b, part] = W_.transpose(0, 1)
    return W


def computed(p: Problem, name: str = "plain", **constants) -> dict[str, Tensor]:
    from needlework.ops.carve.feedback.backward import backward
    from needlework.ops.delta.channel.intra import intra

    x, R, settings = rows_of(p), p.R, p.settings()
    wide = x["S"].dtype
    (B, T), K, V = x["q"].shape[:2], x["q"].shape[-1], x["v"].shape[-1]
    with forced("delta/channel", name, **constants):
        config = launch_config("delta/channel", x["q"].device, x["q"].dtype, K, V)
    C = config.launch["shared"]["C"]
    layout = Layout.of(p.position, p.cu_seqlens, B, T, p.L * R, C, R, x["q"].device)
    fill = {"f": -torch.inf, "b": -torch.inf}
    x = {n: layout.align(y, fill=fill.get(n, 0.0))[0] if n in (*TOKENS, "do") else y for n, y in x.items()}

    # slots of no content chunk hold anything
    kept = [torch.full((layout.slots, *x[n].shape[1:]), torch.nan, dtype=wide) for n in ("S", "m")]
    spans, NC = [], -(-layout.T // C)
    g = torch_path.log_decay(x["f"].to(wide), x["A_log"], x["dt_bias"])
    l = torch.zeros_like(g)
    for i, start in enumerate(starts_of(p)):
        for n, (first, end) in enumerate(layout.spans[i].tolist()):
            if first < end:
                slot = int(layout.bases[n]) + i
                spans.append((first, end, slot))
                for whole, part in zip(kept, start, strict=True):
                    whole[slot] = part[n]
                content = torch.tanh(start[1][n] @ x["w1"].T) @ x["w2"].T
                row = first // NC, slice((first % NC) * C, (first % NC + end - first) * C)
                l[row] = g[row] + torch.nn.functional.logsigmoid(-(x["b"][row] + x["b_bias"] + content))
    beta = torch.sigmoid(x["w"])
    engine = {"scale": p.scale, "prediction": p.prediction, "R": R, "config": config}
    saved = intra(x["q"], x["k"], l, beta, None, **engine)
    saved = saved._replace(W=walked(saved, x["v"], beta, kept[0], spans, C).to(saved.q_hat.dtype))
    cotangents = [x["do"], *(x[n].clone() for n in ("dS", "dm", "dtotal"))]
    tensors = CarveInputs(*(x[n] for n in INPUTS[:10]))
    gradients, *others = backward(
        *cotangents, tensors, x["b_bias"], layout, layout.by_chunk(), *kept, saved, **settings, R=R, config=config
    )
    out = dict(zip(INPUTS, (*gradients, *others), strict=True))
    out |= dict(zip(TOKENS, layout.restore(*(out[n] for n in TOKENS)), strict=True))
    out["q"] = out["q"][:, R - 1 :: R]
    out |= {n: out[n][:, ::R] for n in ("f", "b")}
    out |= {n: out[n].unflatten(1, (-1, R)).transpose(2, 3) for n in ("k", "v")}
    return out | {"w": out["w"].unflatten(1, (-1, R)).sum(2)}


def check(p: Problem, **constants) -> None:
    ours, theirs = computed(p, **constants), expected(p)
    assert len(ours) == 14 and all(x.any() for n, x in theirs.items())
    errors = {n: relative(ours[n], theirs[n]) for n in theirs}
    assert all(error <= EXACT for error in errors.values()), errors


@pytest.mark.parametrize("L, prediction", covering([8, 20, 32], ["previous", "decayed"], pairs=False))
def test_all_fourteen_gradients_are_autograd_of_the_definition(L, prediction):
    check(make(50, L, prediction=prediction))


@pytest.mark.parametrize("R, prediction", covering([2, 4], ["previous", "decayed"], pairs=False))
def test_rows_of_one_token_do_not_see_each_other(R, prediction):
    check(make(20, 8, R=R, prediction=prediction, position=[3]))


def test_sequences_resume_inside_a_content_chunk():
    check(make(37, 20, B=3, position=[0, 7, 19]))


def test_packed_sequences_are_separate_and_an_empty_one_passes_its_gradients():
    check(make(61, 20, cu=[0, 20, 20, 53, 61]))


def test_packed_sequences_resume_at_their_own_positions():
    check(make(61, 8, cu=[0, 1, 20, 20, 61], position=[7, 3, 5, 0]))


@pytest.mark.parametrize("T", chosen([1, 63, 64, 100], quick=[1, 63]))
def test_any_length(T):
    check(make(T, 32, B=2))


@pytest.mark.parametrize("L", [20, 64])
def test_keys_of_three_tiles(L, monkeypatch):
    """By the kernels of the backward alone, and by the whole op; the last tile is partly past the keys. L = 64: several kernel chunks."""
    monkeypatch.setattr(sys.modules[__name__], "K", 136)
    p = make(40, L)
    check(p)
    ours, theirs = expected(p, form=through_the_op), expected(p)
    errors = {n: relative(ours[n], theirs[n]) for n in theirs}
    assert all(error <= EXACT for error in errors.values()), errors


@pytest.mark.parametrize("style", ["strong", "identical"])
def test_strong_gates_and_identical_keys_cost_nothing(style):
    check(make(50, 20, style=style))


def test_the_copy_engine_is_invisible():
    check(make(50, 32, B=2), name="sm90")


def test_one_long_content_chunk_is_many_kernel_chunks():
    check(make(150, 1000))


@pytest.mark.parametrize("anchor", chosen([2, 3], quick=[3]))
def test_few_anchors_in_long_content_chunks(anchor, monkeypatch):
    from needlework.ops.carve.feedback import backward as feedback_backward

    monkeypatch.setattr(feedback_backward, "FEW", 0)
    check(make(150, 64, cu=[0, 130, 130, 150]), pairs={"ANCHOR": anchor})


def test_more_values_than_one_replay_holds(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "V", 264)
    check(make(20, 16))


def through_the_op(*, content_chunk, prediction, scale, initial_state, cu_seqlens, output_final_state, **tensors):
    from needlework.ops.carve.feedback.op import carve

    b_bias = tensors.pop("b_bias")
    given = content_chunk, prediction, scale, initial_state, cu_seqlens
    tensors, settings = checked(CarveInputs(**tensors), b_bias, *given)
    return carve(tensors, b_bias, initial_state, cu_seqlens, settings)


@pytest.mark.parametrize(
    "problem", [make(50, 20, B=2), make(20, 8, R=2, position=[3]), make(61, 16, cu=[0, 20, 20, 53, 61], position=[0, 9, 5, 15])]
)
def test_the_op_differentiates_itself(problem):
    ours, theirs = expected(problem, form=through_the_op), expected(problem)
    errors = {n: relative(ours[n], theirs[n]) for n in theirs}
    assert all(error <= EXACT for error in errors.values()), errors


@pytest.mark.parametrize("result", ["o", "S", "total"])
def test_one_result_alone_is_differentiated(result):
    p, gradients = make(20, 8), []
    for form in (through_the_op, recurrent_carve):
        x = {n: y.clone().requires_grad_() for n, y in p.tensors.items() if n in INPUTS[:11]}
        o, state = form(**x, **p.settings(), initial_state=None, output_final_state=True, cu_seqlens=None)
        y = {"o": o, **state._asdict()}[result]
        gradients.append(torch.autograd.grad((y * p.tensors["d" + result]).sum(), list(x.values())))
    for n, ours, theirs in zip(INPUTS[:11], *gradients, strict=True):
        assert relative(ours, theirs) <= EXACT, n


def figures(p: Problem, dtype: torch.dtype) -> dict[str, float]:
    """Error over budget of every gradient; at most 1 is within it."""
    p = p.to(dtype)
    single, rounding = p.to(torch.float32), operand(dtype)
    exact, ours = expected(p.to(torch.float64)), computed(p)
    references = expected(single, operand=rounding), expected(single, form=literal, chunk_size=16, operand=rounding)
    return over_budget(ours, exact, *references)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("style", ["random", "strong", "identical"])
def test_every_gradient_is_within_the_error_budget(style, dtype):
    assert_within_budget(figures(make(64, 16, style=style, heads=MANY), dtype))


def test_half_precision_gates_are_widened_before_anything_is_added():
    """f and b as a product makes them: all is as with the same numbers in float32, and their gradients are rounded once."""
    p = make(50, 16).to(torch.float16)
    half = {n: p.tensors[n].to(torch.float16) for n in ("f", "b")}
    single = {n: x.float() for n, x in half.items()}
    ours, wide = (computed(p._replace(tensors=p.tensors | gates)) for gates in (half, single))
    for n in ours:
        assert torch.equal(ours[n], wide[n].to(ours[n].dtype)), n
    assert ours["f"].dtype == ours["b"].dtype == torch.float16


@pytest.mark.parametrize("size", chosen([2.0**-12, 2.0**12], quick=[2.0**-12]))
def test_the_size_of_cotangents_costs_float16_nothing(size):
    """A power of two passes through to every bit: dq, dk, dv, which float16 itself may not hold, apart."""
    once, scaled = (computed(make(50, 16, size=x).to(torch.float16)) for x in (1.0, size))
    for n in INPUTS[3:]:
        assert torch.equal(scaled[n], size * once[n]), n


def test_gradients_that_fade_from_chunk_to_chunk_keep_their_digits_in_float16():
    """Cotangents at the end alone, 2^-40 of them left at the start: below all that float16 holds beside the largest."""
    p, names = make(64, 8), ("f", "b", "w")
    x = p.tensors
    x["do"][:, :56] = 0
    x["f"] = torch.zeros_like(x["f"])
    x["dm"], x["dtotal"], x["w1"] = (torch.zeros_like(x[n]) for n in ("dm", "dtotal", "w1"))
    p = p.to(torch.float16)
    ours, exact = computed(p), expected(p.to(torch.float64))
    assert exact["f"][:, :8].norm() < 2**-30 * exact["f"].norm()
    for n in names:
        first, wanted = ours[n][:, :8].double(), exact[n][:, :8]
        assert (first - wanted).norm() <= 1e-2 * wanted.norm(), n
