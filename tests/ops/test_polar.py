"""Polar attention: what spec/polar.md ("Polar attention and ATMA", the paper is arXiv 2606.25156) claims, bad input, and the backward."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from needlework.ops.polar import PolarState, chunk, chunk_polar, recurrent_polar, step_polar
from needlework.ops.polar.arguments import Parameters, Tokens
from needlework.ops.polar.spec import inputs as sample
from needlework.testing.compare import EXACT, assert_close, leaves

PARAMETERS = ("alpha", "beta", "gamma", "null_base", "v_null")


def make(B: int, T: int, seed: int = 0, style: str = "random", **sizes) -> dict[str, torch.Tensor]:
    return sample(torch.Generator().manual_seed(seed), B, T, style, **sizes)


def pages(lengths: list[int], window: int | None, seed: int = 1, Hkv: int = 2, d: int = 16, V: int = 24) -> PolarState:
    """Pages that hold `lengths` tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = min(max(lengths), window or max(lengths))
    normal = lambda width: torch.randn(len(lengths), rows, Hkv, width, generator=generator, dtype=torch.float64)
    return PolarState(normal(d), normal(V), torch.tensor(lengths))


def gradients(function, inputs: dict, state: PolarState | None, **settings) -> dict[str, torch.Tensor]:
    """Outputs, final state, and the gradient of every tensor, initial pages included, under fixed cotangents everywhere."""
    inputs = {n: x.detach().requires_grad_() for n, x in inputs.items()}
    given = dict(inputs)
    if state is not None:
        state = state._replace(k=state.k.detach().requires_grad_(), v=state.v.detach().requires_grad_())
        given |= {"page_k": state.k, "page_v": state.v}
    values = dict(leaves(function(**inputs, initial_state=state, output_final_state=True, **settings)))
    generator = torch.Generator().manual_seed(3)
    weigh = lambda x: (x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum()
    loss = sum(weigh(x) for x in values.values() if x.is_floating_point())
    found = torch.autograd.grad(loss, list(given.values()))
    return {n: x.detach() for n, x in values.items()} | {f"d{name}": x for name, x in zip(given, found, strict=True)}


def same_as_the_definition(inputs: dict, state: PolarState | None = None, **settings) -> None:
    fast = gradients(chunk_polar, inputs, state, chunk_size=16, **settings)
    assert_close(fast, gradients(recurrent_polar, inputs, state, **settings), "against autograd of the definition")


@pytest.mark.parametrize("window", [None, 1, 7, 20, 40])
def test_the_backward_is_autograd_of_the_definition(window):
    same_as_the_definition(make(2, 37, Hq=4), pages([5, 23], window), window=window)


@pytest.mark.parametrize("window", [None, 9])
def test_the_backward_holds_for_packed_sequences_with_a_past(window):
    ends = torch.tensor([0, 19, 19, 20, 41])
    same_as_the_definition(make(1, 41, Hq=4), pages([5, 0, 30, 2], window), window=window, cu_seqlens=ends)


def test_the_backward_holds_under_the_norm_clamp():
    """Half of the tokens have ‖s‖ below 1e-6, where the direction is s / 1e-6 and no longer a unit vector."""
    inputs = make(2, 37)
    inputs["v"] = inputs["v"] * torch.where(torch.arange(37) < 18, 1e-8, 1.0)[:, None, None]
    inputs["v_null"] = torch.zeros_like(inputs["v_null"])
    norm = chunk_polar(**inputs).direction.norm(dim=-1)
    assert (norm[:, :18] < 0.1).all() and (norm[:, 18:] > 1 - EXACT).all()
    same_as_the_definition(inputs)


@pytest.mark.parametrize("null_base", [12.0, 60.0])
def test_the_backward_holds_with_a_dominant_null(null_base):
    inputs = make(2, 37)
    inputs["null_base"] = torch.full_like(inputs["null_base"], null_base)
    same_as_the_definition(inputs)


def test_the_gradient_of_the_temperature_is_read_off_the_query():
    """dtemp = q·dq / temp + null da_N, with dnull_base = temp da_N: checked on autograd of the definition, one token a loss."""
    inputs = {n: x.requires_grad_() for n, x in make(1, 12, Hq=4).items()}
    result = recurrent_polar(**inputs)
    for i in (0, 5, 11):
        loss = result.direction[0, i, :, 0].sum() + result.magnitude[0, i].sum()
        names = ("q", "alpha", "null_base")
        dq, dalpha, dnull_base = torch.autograd.grad(loss, [inputs[n] for n in names], retain_graph=True)
        log_n, root = torch.tensor([i + 1.0, i + 2.0], dtype=torch.float64).log() ** torch.tensor([1.0, 0.5])
        temp = 1 + F.softplus(inputs["alpha"]) * log_n
        null = inputs["null_base"] + F.softplus(inputs["gamma"]) * root
        dtemp = ((inputs["q"] * dq)[0, i].sum(-1) + null * dnull_base) / temp
        read_off = torch.sigmoid(inputs["alpha"]) * log_n * dtemp
        assert_close({"dalpha": read_off.detach()}, {"dalpha": dalpha}, f"token {i}")


def nothing_held(tokens: Tokens) -> PolarState:
    return PolarState(tokens.k[:, :0], tokens.v[:, :0], torch.zeros(len(tokens.k), dtype=torch.int64))


def test_merged_splits_of_the_keys_are_the_whole():
    """M = max, L and S rescaled by e^{M − M'}, Q₂ by its square: keys in pages, cut anywhere, against keys in one piece."""
    inputs = make(2, 30, Hq=4)
    tokens = Tokens(*(inputs[n] for n in ("q", "k", "v")))
    parameters = Parameters(*(inputs[n] for n in PARAMETERS))
    whole = chunk.forward(tokens, parameters, nothing_held(tokens), window=None, chunk_size=30)
    for cut in (1, 13, 29):
        held = PolarState(tokens.k[:, :cut], tokens.v[:, :cut], torch.tensor([cut, cut]))
        new = Tokens(*(x[:, cut:] for x in tokens))
        for size in (4, 30):
            split = chunk.forward(new, parameters, held, window=None, chunk_size=size)
            for name, a, b in zip(("direction", "magnitude", "M, L, Q₂, ‖s‖"), split, whole, strict=True):
                assert_close({name: a}, {name: b[:, cut:]}, f"cut at {cut}, blocks of {size}")


def near_equal_keys(gap: float) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """64 keys with scores of 0.1 N(0, 1), a null `gap` above the largest for the last query; temp = 1. And those scores."""
    scores = 0.1 * torch.randn(64, generator=torch.Generator().manual_seed(119), dtype=torch.float64)
    inputs = make(1, 64, Hq=1, Hkv=1, d=1)
    fixed = {"alpha": -1e3, "gamma": -1e3, "null_base": float(scores.max()) + gap, "q": 1.0}
    inputs |= {n: torch.full_like(inputs[n], x) for n, x in fixed.items()}
    return inputs | {"k": scores.view(1, 64, 1, 1)}, scores


@pytest.mark.parametrize("gap", [10, 43, 50, 90])
def test_a_dominant_null_leaves_n_eff_its_digits(gap):
    inputs, scores = near_equal_keys(gap)
    n_eff = scores.exp().sum() ** 2 / scores.exp().square().sum()
    single = {n: x.float().requires_grad_() for n, x in inputs.items()}
    result = chunk_polar(**single)
    m_eff = torch.expm1(torch.atanh(result.magnitude[0, -1, 0].double()) / F.softplus(single["beta"].double()))
    share = 1 / (1 + (gap + scores.max() - scores.logsumexp(0)).exp())
    # f = sigmoid(M + ln L − a_N): an exponent of size `gap`, rounded a few times, moves f by that many roundings of it
    bound = 8 * (gap + 1) * torch.finfo(torch.float32).eps
    assert abs(m_eff / share / n_eff - 1) < bound
    (result.direction.sum() + result.magnitude.sum()).backward()
    assert all(torch.isfinite(x.grad).all() for x in single.values())


def test_a_null_folded_into_a_clamped_q2_loses_n_eff():
    """The released code's form on the same keys: 5.3 instead of 63.3 at a_N − M = 10."""
    _, scores = near_equal_keys(10)
    p = torch.exp(scores - scores.max())
    rescale = torch.exp(torch.tensor(-10.0, dtype=torch.float64))  # the null is the running maximum
    L, Q2 = rescale * p.sum(), (rescale**2 * p.square().sum()).clamp(min=1e-6)
    assert round(float(p.sum() ** 2 / p.square().sum()), 1) == 63.3
    assert round(float(L**2 / Q2), 1) == 5.3


def test_a_null_folded_into_q2_leaves_float32():
    """α² = e^{−2(a_N − M)} is below the smallest normal number past a gap of 43; at 50 digits are gone, at 90 n_eff is NaN."""
    _, scores = near_equal_keys(10)
    p = torch.exp(scores - scores.max())
    exact, p, float32 = p.sum() ** 2 / p.square().sum(), p.float(), torch.finfo(torch.float32)

    def folded(gap: float) -> tuple[float, float]:
        """α² and the relative error of n_eff."""
        rescale = torch.exp(torch.tensor(-float(gap)))
        n_eff = (rescale * p.sum()) ** 2 / (rescale**2 * p.square().sum())
        return float(rescale**2), float(abs(n_eff / exact - 1))

    assert folded(43)[0] >= float32.tiny > folded(44)[0]
    assert folded(43)[1] < 64 * float32.eps  # 64 terms in each sum
    assert folded(50)[1] > 1e-2
    assert folded(90)[1] != folded(90)[1]


@pytest.mark.parametrize("style", ["random", "identical", "clustered"])
def test_n_eff_lies_between_one_and_the_keys_seen_and_the_magnitude_below_one(style):
    inputs = {n: x.float() for n, x in make(2, 50, style=style).items()}
    tokens, parameters = Tokens(*(inputs[n] for n in ("q", "k", "v"))), Parameters(*(inputs[n] for n in PARAMETERS))
    _, magnitude, saved = chunk.forward(tokens, parameters, nothing_held(tokens), window=20, chunk_size=16)
    assert (magnitude >= 0).all() and (magnitude < 1).all()
    _, L, Q2, _ = saved.unbind(-1)
    n = torch.arange(1, 51).clamp(max=20)[:, None]
    rounding = n * torch.finfo(torch.float32).eps  # n terms in each sum
    assert (L**2 / Q2 >= 1 - rounding).all() and (L**2 / Q2 <= n * (1 + rounding)).all()


class Largest(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("window", [None, 40])
def test_the_largest_tensor_grows_with_t_times_c(window):
    C, Hq = 32, 4
    for T in (128, 256):
        x = make(1, T, Hq=Hq)
        tokens, parameters = Tokens(*(x[n] for n in ("q", "k", "v"))), Parameters(*(x[n] for n in PARAMETERS))
        arguments = tokens, parameters, PolarState(*pages([T], window))
        settings = {"window": window, "chunk_size": C}
        with Largest() as forward:
            direction, magnitude, saved = chunk.forward(*arguments, **settings)
        with Largest() as backward:
            chunk.backward(direction, magnitude, direction, saved, *arguments, **settings)
        assert max(forward.numel, backward.numel) == Hq * T * C


def test_autocast_changes_nothing_inside():
    inputs = {n: x.float() for n, x in make(2, 33).items()}
    with torch.autocast("cpu", torch.bfloat16):
        inside = chunk_polar(**inputs)
    assert torch.equal(inside.direction, chunk_polar(**inputs).direction)


def test_half_precision_in_is_half_out_with_a_float32_magnitude():
    inputs = {n: x.to(torch.bfloat16 if n in "qkv" else torch.float32) for n, x in make(2, 33).items()}
    result = chunk_polar(**inputs, output_final_state=True)
    assert result.direction.dtype == result.state.k.dtype == result.state.v.dtype == torch.bfloat16
    assert result.magnitude.dtype == torch.float32


def test_the_reference_implementation_can_be_asked_for():
    inputs = make(2, 9)
    results = [dict(leaves(chunk_polar(**inputs, output_final_state=True, impl=i))) for i in ("torch", "reference")]
    assert_close(*results, "impl")


def test_a_full_table_is_refused_and_left_alone():
    inputs = make(2, 1)
    token = {n: x[:, 0] if n in "qkv" else x for n, x in inputs.items()}
    table = pages([4, 3], None)
    before = [x.clone() for x in table]
    with pytest.raises(ValueError, match=r"state\.k: axis 1 \(P\) has capacity 4.* length 4"):
        step_polar(**token, state=table)
    assert all(torch.equal(a, b) for a, b in zip(table, before, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": lambda x: x[:, :8]}, r"k: axis 1 \(T\) of \[B T Hkv d\] has size 8, expected 9"),
        ({"v": lambda x: x[:, :, :1]}, r"v: axis 2 \(Hkv\) of \[B T Hkv V\] has size 1, expected 2"),
        ({"q": lambda x: x[:, :, :1]}, r"q: axis 2 \(Hq\) has size 1, expected a multiple of the 2"),
        ({"alpha": lambda x: x[:1]}, r"alpha: axis 0 \(Hq\) of \[Hq\] has size 1, expected 2"),
        ({"v_null": lambda x: x[:, :3]}, r"v_null: axis 1 \(V\) of \[Hq V\] has size 3, expected 24"),
        ({"k": lambda x: x.float()}, r"mixed dtypes: q is torch.float64, k is torch.float32"),
    ],
)
def test_bad_tensors_are_named_with_their_axis_and_sizes(change, message):
    inputs = make(2, 9)
    with pytest.raises(ValueError, match=message):
        chunk_polar(**{n: change.get(n, lambda x: x)(x) for n, x in inputs.items()})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 0}, "window: expected at least 1"),
        ({"chunk_size": 0}, "chunk_size: expected at least 1"),
        ({"impl": "triton"}, "polar has no Triton kernel"),
        ({"cu_seqlens": torch.tensor([0, 9])}, "expected B = 1, got B = 2"),
        ({"initial_state": pages([3], None)}, r"initial_state.k: axis 0 \(N\) .* has size 1, expected 2"),
        ({"initial_state": pages([8, 3], None), "window": 4}, r"initial_state.k: axis 1 \(P\) has size 8, .* window 4"),
        (
            {"initial_state": pages([3, 3], None)._replace(length=torch.tensor([3, 5]))},
            "a sequence holds 5 tokens, but the pages hold 3 rows",
        ),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        chunk_polar(**make(2, 9), **settings)
