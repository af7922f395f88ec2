"""ATMA's regularisers against their formulas, written token by token in float64, with the same random draws."""

import math

import pytest
import torch
from torch import Tensor

from needlework.layers import Discrete, Strong, Weak, Zipfian
from needlework.testing.compare import EXACT, relative

D, DIRECTIONS = 24, 64


def sample(B: int = 3, T: int = 35, dtype=torch.float64) -> Tensor:
    """Far from white: channels of different sizes about a mean."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, T, D, dtype=torch.float64, generator=generator) * torch.linspace(0.5, 2, D).double() + 0.3
    return x.to(dtype)


def frobenius(entries) -> Tensor:
    return torch.stack([e.square() for e in entries]).sum().sqrt()


def sketched(x: Tensor) -> list[Tensor]:
    S = torch.randn(DIRECTIONS, D, dtype=x.dtype) / math.sqrt(D)
    y = [S @ token for token in x.flatten(0, 1)]
    mean = sum(y) / len(y)
    return [token - mean for token in y]


def covariance(y: list[Tensor]) -> Tensor:
    return sum(torch.outer(token, token) for token in y) / (len(y) - 1)


def weak(x: Tensor) -> Tensor:
    return frobenius((covariance(sketched(x)) - torch.eye(DIRECTIONS).double()).flatten())


def discrete(x: Tensor) -> Tensor:
    return weak(torch.stack([torch.stack([math.sqrt(D) * token / token.norm() for token in row]) for row in x]))


def zipfian(x: Tensor) -> Tensor:
    y = sketched(x)
    C = covariance([token / token.norm() for token in y])
    off = frobenius(C[i, j] for i in range(DIRECTIONS) for j in range(DIRECTIONS) if i != j)
    norms = sorted((token.norm() for token in y), reverse=True)
    harmonic = sum(1 / rank for rank in range(1, len(y) + 1))
    return off + frobenius(norm / sum(norms) - 1 / rank / harmonic for rank, norm in enumerate(norms, 1))


def strong(x: Tensor) -> Tensor:
    A = torch.randn(D, DIRECTIONS, dtype=x.dtype)
    tokens, points = x.flatten(0, 1), [-5 + 10 * i / 16 for i in range(17)]
    total = 0.0
    for column in A.T:
        a = tokens @ (column / column.norm())
        f = []
        for t in points:
            e = math.exp(-t * t / 2)
            f.append(e * (((t * a).cos().mean() - e) ** 2 + (t * a).sin().mean() ** 2))
        total = total + sum((f[i] + f[i + 1]) / 2 * (points[i + 1] - points[i]) for i in range(16))
    return total / DIRECTIONS


LITERAL = {"weak": weak, "discrete": discrete, "zipfian": zipfian, "strong": strong}
REGULARISERS = {"weak": Weak(), "discrete": Discrete(), "zipfian": Zipfian(), "strong": Strong()}


def evaluated(function, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    torch.manual_seed(1)  # the draws come from the device's generator
    value = function(x)
    return value.detach(), torch.autograd.grad(value, x)[0]


@pytest.mark.parametrize("name", LITERAL)
def test_a_regulariser_and_its_gradient_are_the_formula_s(name):
    found, expected = evaluated(REGULARISERS[name], sample()), evaluated(LITERAL[name], sample())
    for a, b in zip(found, expected, strict=True):
        assert b.abs().max() > 1e-4  # there is something to compare
        assert relative(a, b) < 100 * EXACT  # 2048² products, summed in another order


@pytest.mark.parametrize("name", REGULARISERS)
def test_each_call_draws_anew_and_a_restored_generator_draws_again(name):
    x, regulariser = sample(), REGULARISERS[name]
    state = torch.get_rng_state()
    first, second = regulariser(x), regulariser(x)
    torch.set_rng_state(state)
    assert first != second and torch.equal(regulariser(x), first)


@pytest.mark.parametrize("name", REGULARISERS)
def test_a_regulariser_is_float32_also_of_half_precision_and_under_autocast(name):
    x, regulariser = sample(dtype=torch.bfloat16), REGULARISERS[name]
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        half = regulariser(x)
    torch.manual_seed(1)
    assert half.dtype == torch.float32 and torch.equal(half, regulariser(x.float()))


@pytest.mark.parametrize("name", ["weak", "discrete", "strong"])
def test_twice_the_tokens_leave_a_regulariser_as_it_was(name):
    """But for N − 1 where it estimates a covariance: (2N − 2)/(2N − 1) of it."""
    x = sample()
    one, dx = evaluated(REGULARISERS[name], x)
    two, dxx = evaluated(REGULARISERS[name], torch.cat([x, x]))
    loose = EXACT if name == "strong" else 2 / x[..., 0].numel()
    assert abs(two / one - 1) < loose
    assert relative(dxx[:3] + dxx[3:], dx) < 2 * loose  # each token pulls half as hard, twice as many pull


def test_zipfian_norms_of_one_over_rank_leave_only_correlation():
    """Tokens in ± pairs of falling size along one direction: u uᵀ is one matrix, so the second term alone depends on the sizes."""

    def second(sizes):  # fmt: skip
        x = torch.zeros(len(sizes), D, dtype=torch.float64)
        x[:, 0] = sizes * (-1.0) ** torch.arange(len(sizes))
        return evaluated(Zipfian(), x - x.mean(0))[0]

    rank = torch.arange(1, 401).double()
    assert second(1 / rank) < second(rank**-0.5) < second(torch.ones(400).double())


def test_weak_of_white_tokens_is_the_sketch_s_own_floor():
    x = torch.randn(20_000, 1024, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    S = torch.randn(DIRECTIONS, 1024) / 32
    floor = (S @ S.T - torch.eye(DIRECTIONS)).norm()
    torch.manual_seed(1)
    assert abs(Weak()(x) - floor) < 0.2 and 1.8 < floor < 2.2


def test_strong_is_zero_of_normal_tokens_and_n_times_itself_as_published():
    x = torch.randn(20_000, D, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    normal = Strong()(x)
    torch.manual_seed(1)
    assert normal < 1e-3 < Strong()(3 * x)
    torch.manual_seed(1)
    assert torch.allclose(Strong(summed=True)(x), 20_000 * normal)


def test_one_token_has_no_spread():
    with pytest.raises(ValueError, match="weak: a spread over tokens needs at least 2 of them, got 1"):
        Weak()(torch.ones(1, 1, D))
