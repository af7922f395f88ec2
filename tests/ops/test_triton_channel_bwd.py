"""The channel-gate engine's backward kernels in the Triton interpreter, against autograd of the recurrence."""

import os
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from needlework.ops.common.alignment import Alignment
from needlework.ops.delta.inputs import DeltaInputs
from needlework.ops.delta.reference import literal, recurrent
from needlework.ops.runtime.launch_configs import forced, launch_config
from needlework.testing.compare import EXACT, relative
from needlework.testing.errors import assert_within_budget, operand, over_budget
from needlework.testing.rows import chosen, covering

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")

K, V = 20, 12
NAMES = ("q", "k", "v", "g", "beta", "erase", "write", "initial_state")
RULES = {
    "kda": ("beta", "decayed"),
    "gla": (None, "decayed"),
    "gdn2": ("gates", "decayed"),
    "previous": ("beta", "previous"),
    "gates, previous": ("gates", "previous"),
    "given": ("gates", "given"),
}


class Problem(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    erase: Tensor | None
    write: Tensor | None
    initial_state: Tensor
    do: Tensor
    dstate: Tensor
    prediction: str
    scale: float = 0.3

    def to(self, dtype: torch.dtype) -> "Problem":
        """Tokens rounded to dtype; gates and states no narrower than float32."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        tensors = {n: x.to(wide if n in ("g", "initial_state", "dstate") else dtype) for n, x in self.tensors().items()}
        return self._replace(**tensors)

    def tensors(self) -> dict[str, Tensor]:
        return {n: x for n, x in zip(self._fields, self, strict=True) if isinstance(x, Tensor)}


def make(rule: str, T: int, B: int = 1, H: int = 1, HV: int = 1, N: int | None = None, style: str = "rand") -> Problem:
    generator = torch.Generator().manual_seed(T + HV)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    rand = lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64)
    q, k = (torch.nn.functional.normalize(randn(B, T, H, K), dim=-1) for _ in range(2))
    g = -rand(B, T, HV, K) * 0.5
    if style == "strong":
        g = torch.where(rand(B, T, HV, K) < 0.3, -30.0 + g, 1e-3 * g)
    if style == "identical":
        k, g = k[:, :1].expand_as(k).contiguous(), 1e-3 * g
    gate, prediction = RULES[rule]
    beta = rand(B, T, HV) if gate == "beta" else None
    erase, write = (rand(B, T, HV, K), rand(B, T, HV, V)) if gate == "gates" else (None, None)
    states = (randn(N or B, HV, K, V) for _ in range(2))
    return Problem(q, k, randn(B, T, HV, V), g, beta, erase, write, next(states), randn(B, T, HV, V), next(states), prediction)


def expected(p: Problem, cu_seqlens: Tensor | None = None, form=recurrent, **settings) -> dict[str, Tensor]:
    """Gradients by autograd of the recurrence, in p's own precision."""
    leaves = {n: x.detach().requires_grad_() for n, x in p.tensors().items() if n in NAMES}
    HV = p.v.shape[2]
    q, k = (leaves[n].repeat_interleave(HV // p.q.shape[2], 2) for n in "qk")
    erase, write = leaves.get("erase"), leaves.get("write")
    if "beta" in leaves:
        erase = write = leaves["beta"][..., None]
    o, state = form(
        q, k, leaves["v"], leaves["g"], erase, write,
        prediction=p.prediction, scale=p.scale, initial_state=leaves["initial_state"], cu_seqlens=cu_seqlens, **settings,
    )  # fmt: skip
    loss = (o * p.do).sum() + (state * p.dstate).sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def computed(p: Problem, cu_seqlens: Tensor | None = None, name: str = "plain", R: int = 1, **constants) -> dict[str, Tensor]:
    from needlework.ops.delta.channel.backward import backward
    from needlework.ops.delta.channel.op import forward

    with forced("delta/channel", name, **constants):
        config = launch_config("delta/channel", p.q.device, p.q.dtype, K, V)
    alignment = Alignment.of(cu_seqlens, *p.q.shape[:2], config.launch["shared"]["C"], p.q.device)
    inputs = DeltaInputs(**{n: getattr(p, n) for n in NAMES}).aligned(alignment)
    settings = {"scale": p.scale, "prediction": p.prediction, "R": R, "config": config}
    _, _, *kept = forward(inputs, alignment, save=True, **settings)
    found = backward(*alignment.align(p.do), p.dstate, inputs, *kept, alignment, **settings).restored(alignment)
    return {n: x for n, x in found._asdict().items() if x is not None}


def check(p: Problem, cu_seqlens: Tensor | None = None, **constants) -> None:
    ours, theirs = computed(p, cu_seqlens, **constants), expected(p, cu_seqlens)
    assert ours.keys() == theirs.keys()
    errors = {n: relative(ours[n], theirs[n]) for n in ours}
    assert all(error <= EXACT for error in errors.values()), errors


@pytest.mark.parametrize("rule, T", covering([*RULES], [63, 37, 1], pairs=False))
def test_every_gradient_is_that_of_the_recurrence(rule, T):
    check(make(rule, T))


@pytest.mark.parametrize("rule, style", covering(["kda", "gates, previous"], ["strong", "identical"], pairs=False))
def test_strong_gates_and_identical_keys_cost_nothing(rule, style):
    check(make(rule, 37, style=style))


@pytest.mark.parametrize("rule", chosen(["kda", "gla", "gdn2"], quick=["gla", "gdn2"]))
def test_value_heads_of_a_group_add_to_their_key_head(rule):
    check(make(rule, 37, B=2, H=2, HV=4))


@pytest.mark.parametrize("rule", ["kda", "gdn2"])
def test_packed_sequences_are_separate_and_an_empty_one_passes_its_gradient(rule):
    check(make(rule, 63, HV=2, N=4), torch.tensor([0, 20, 20, 53, 63]))


@pytest.mark.parametrize("anchor", chosen([2, 3, 8], quick=[3]))
def test_between_anchors_the_state_products_telescope(anchor):
    check(make("kda", 100, B=2, HV=2), pairs={"ANCHOR": anchor})


def test_an_anchor_counts_from_each_packed_sequence_s_end():
    check(make("gdn2", 100, N=4), torch.tensor([0, 57, 57, 58, 100]), pairs={"ANCHOR": 2})


@pytest.mark.parametrize("rule", ["kda", "gates, previous"])
def test_small_slices_of_keys_and_values_are_invisible(rule):
    check(make(rule, 37), adjoint={"BV": 16}, couplings={"VB": 16}, pairs={"KB": 16, "ANCHOR": 1})


@pytest.mark.parametrize("rule", chosen(["kda", "gla", "gdn2"], quick=["kda", "gdn2"]))
def test_the_copy_engine_is_invisible(rule):
    check(make(rule, 37, B=2), name="sm90")


def rows_reference(p: Problem, R: int) -> dict[str, Tensor]:
    """Gradients of R rows a token from the plain chunk form; the tensors of the rows have an axis R after T."""
    from needlework.ops.delta import chunk

    beta = p.beta[..., None]
    du_inputs = p.q, p.k, beta * p.v, beta * p.k, p.g, p.initial_state
    settings = {"scale": p.scale, "prediction": p.prediction, "chunk_size": 16}
    rows_last = tuple(x.transpose(2, 3) if x.dim() == 5 else x for x in du_inputs)  # [B T H R D]
    dq, dk, du, de, dg, dinitial = chunk.backward(p.do, p.dstate, *rows_last, **settings)
    dk, du, de = (x.transpose(2, 3) for x in (dk, du, de))
    dbeta = (p.v * du).sum(-1) + (p.k * de).sum(-1)
    return {"q": dq, "k": dk + beta * de, "v": beta * du, "g": dg, "beta": dbeta, "initial_state": dinitial}


@pytest.mark.parametrize("R, prediction", covering([2, 4], ["decayed", "previous"], pairs=False))
def test_rows_of_one_token_do_not_see_each_other(R, prediction):
    T = 21
    p, rows = make("kda", T), make("kda", T * R)
    token_rows = {n: getattr(rows, n).unflatten(1, (T, R)) for n in ("k", "v", "beta")}
    theirs = rows_reference(p._replace(**token_rows, prediction=prediction), R)

    def one_row(x: Tensor, row: int) -> Tensor:
        zeros = torch.zeros_like(x)
        return torch.stack([x if i == row else zeros for i in range(R)], 2).flatten(1, 2)

    spread = {"q": one_row(p.q, R - 1), "do": one_row(p.do, R - 1), "g": one_row(p.g, 0)}
    ours = computed(rows._replace(**spread, initial_state=p.initial_state, dstate=p.dstate, prediction=prediction), R=R)
    ours["q"], ours["g"] = ours["q"][:, R - 1 :: R], ours["g"][:, ::R]
    for n in theirs:
        given = theirs[n].flatten(1, 2) if n in token_rows else theirs[n]
        assert relative(ours[n], given) <= EXACT, n


def figures(p: Problem, dtype: torch.dtype, **constants) -> dict[str, float]:
    """Error over budget of every gradient; at most 1 is within it."""
    p = p.to(dtype)
    single, rounding = p.to(torch.float32), operand(dtype)
    exact, ours = expected(p.to(torch.float64)), computed(p, **constants)
    references = expected(single, operand=rounding), expected(single, form=literal, chunk_size=16, operand=rounding)
    return over_budget(ours, exact, *references)


@pytest.mark.parametrize(
    "rule, style", chosen(product(["kda", "gdn2", "previous"], ["rand", "strong", "identical"]), [("gdn2", "rand")])
)
def test_float32_is_within_the_error_budget(rule, style):
    assert_within_budget(figures(make(rule, 200, style=style), torch.float32))


@pytest.mark.parametrize("size", chosen([1e-6, 1.0, 4e3], quick=[1e-6]))  # at 1e4 dk is 70,151, which float16 does not hold
def test_float16_gradients_of_any_size_are_within_the_error_budget(size):
    p = make("kda", 200)
    assert_within_budget(figures(p._replace(do=size * p.do, dstate=size * p.dstate), torch.float16))
