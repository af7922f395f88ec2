"""Maps of one input are one product where there are many tokens, and what they are side by side is what they are alone."""

import pytest
import torch
from torch import nn

from needlework.layers import (
    CCQ,
    Attention,
    Carve,
    Delta,
    Linear,
    LowRankGate,
    QDelta,
    Recurrent,
    ScalarGate,
    Silu,
    Softmax,
    SquaredReLU,
    SwiGLU,
)
from needlework.layers.norm import RMSNorm
from needlework.layers.projection import laying, side_by_side, wide_maps

DIM = 24


def maps(*biases):
    torch.manual_seed(0)
    return [nn.Linear(DIM, n, bias=bias).double() for n, bias in zip((3, 5, 2), biases, strict=True)]


@pytest.fixture
def products(monkeypatch):
    """Every linear map that is made."""
    made, linear = [], torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *given: made.append(given) or linear(*given))
    return made


@pytest.mark.parametrize("tokens", (1, 30))
@pytest.mark.parametrize("biases", [(False, False, False), (True, False, True)])
def test_maps_side_by_side_are_the_maps(biases, tokens):
    alone = [*maps(*biases), nn.Sequential(nn.Linear(DIM, 7, bias=False), nn.Linear(7, 4)).double()]
    x = torch.randn(2, tokens, DIM, dtype=torch.float64, requires_grad=True)
    inputs = [x, *nn.ModuleList(alone).parameters()]
    expected = [m(x) for m in alone]
    made = side_by_side(x, *alone)
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    weights = [torch.randn_like(y) for y in expected]
    for one, other in zip(
        torch.autograd.grad(made, inputs, weights), torch.autograd.grad(expected, inputs, weights), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gradients, tokens, count", ((False, 9, 3), (False, 10, 1), (True, 1, 1)))
def test_without_gradients_weights_are_copied_only_where_x_is_more_than_they_are(gradients, tokens, count, products):
    alone = maps(False, False, False)  # ten columns
    x = torch.randn(1, tokens, DIM, dtype=torch.float64)
    with torch.set_grad_enabled(gradients):
        (y,) = side_by_side(x, tuple(alone))
    assert len(products) == count
    torch.testing.assert_close(y, torch.cat([m(x) for m in alone], -1), rtol=1e-12, atol=1e-12)


def test_a_map_that_someone_has_adapted_is_called():
    class Adapted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    plain, *_ = maps(False, False, False)
    adapted = Adapted(DIM, 3).double()
    x = torch.randn(1, 40, DIM, dtype=torch.float64)
    assert torch.equal(side_by_side(x, plain, adapted)[1], adapted(x))
    assert torch.equal(side_by_side(x, (plain, adapted))[0][..., 3:], adapted(x))


def test_a_map_that_someone_looks_at_is_called():
    first, second, _ = maps(False, False, False)
    seen = []
    first.register_forward_hook(lambda module, given, y: seen.append(y))
    x = torch.randn(1, 40, DIM, dtype=torch.float64)
    assert torch.equal(side_by_side(x, (first, second))[0][..., :3], seen[0])


def laid(*alone):
    with torch.no_grad(), laying():
        side_by_side(torch.randn(1, DIM, dtype=torch.float64), *alone)


@pytest.mark.parametrize("biases", [(False, False, False), (True, False, True)])
def test_laid_maps_are_one_product_of_few_tokens_that_copies_no_weights(biases, products):
    first, second, third = maps(*biases)
    expected = {name: x.clone() for name, x in nn.ModuleList((first, second, third)).state_dict().items()}
    parameters = [*first.parameters(), *second.parameters(), *third.parameters()]
    laid((first, second), third)
    assert all(
        a is b for a, b in zip(parameters, (*first.parameters(), *second.parameters(), *third.parameters()), strict=True)
    )
    for name, x in nn.ModuleList((first, second, third)).state_dict().items():
        assert torch.equal(x, expected[name])
    x = torch.randn(1, DIM, dtype=torch.float64)
    alone = [torch.cat([first(x), second(x)], -1), third(x)]
    products.clear()
    with torch.no_grad():
        made = side_by_side(x, (first, second), third)
        assert len(products) == 1 and products[0][1].data_ptr() == first.weight.data_ptr()
        for one, other in zip(made, alone, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        second.weight.mul_(2)  # a later value, as a checkpoint that is loaded into the model
        torch.testing.assert_close(side_by_side(x, (first, second), third)[0][:, 3:], second(x), rtol=1e-12, atol=1e-12)


def test_maps_that_were_laid_and_then_moved_are_apart(products):
    alone = maps(True, False, True)
    laid(*alone)
    moved = [m.float() for m in alone]
    with torch.no_grad():
        for m in moved:
            m.weight.mul_(2)
        x = torch.randn(1, DIM)
        products.clear()
        made = side_by_side(x, *moved)
        assert len(products) == 3
        assert all(torch.equal(y, m(x)) for y, m in zip(made, moved, strict=True))


def test_other_maps_than_the_laid_ones_are_apart(products):
    first, second, third = maps(False, False, False)
    laid(first, second, third)
    x = torch.randn(1, DIM, dtype=torch.float64)
    with torch.no_grad():
        for others in ((first, third), (first, third, second), (second, first)):
            products.clear()
            made = side_by_side(x, *others)
            assert len(products) == len(others)
            assert all(torch.equal(y, m(x)) for y, m in zip(made, others, strict=True))


def test_compiled_code_knows_laid_maps_by_their_order():
    """It cannot ask where a weight lies."""
    first, second, third = maps(False, False, False)
    laid(first, second, third)
    x = torch.randn(2, DIM, dtype=torch.float64)
    together = torch.compile(lambda x: side_by_side(x, first, second, third), backend="eager", fullgraph=True)
    others = torch.compile(lambda x: side_by_side(x, first, third, second), backend="eager", fullgraph=True)
    with torch.no_grad():
        for made, order in ((together(x), (first, second, third)), (others(x), (first, third, second))):
            for y, m in zip(made, order, strict=True):
                torch.testing.assert_close(y, m(x), rtol=1e-12, atol=1e-12)


def test_laid_maps_learn(products):
    alone = maps(False, False, False)
    laid(*alone)
    x = torch.randn(1, DIM, dtype=torch.float64)
    grads = torch.autograd.grad(torch.cat(side_by_side(x, *alone), -1).sum(), [m.weight for m in alone])
    assert all(torch.equal(g, x.expand(m.out_features, DIM)) for g, m in zip(grads, alone, strict=True))


def test_wide_maps_are_products_of_their_own_with_gradients_only(products):
    alone = maps(False, False, False)
    x = torch.randn(1, 40, DIM, dtype=torch.float64)
    wide_maps(x, *alone)
    assert len(products) == 3
    with torch.no_grad():
        wide_maps(x, *alone)
    assert len(products) == 4


@pytest.mark.parametrize(
    "config, count",
    [
        (Recurrent(heads=2, key_dim=8, value_dim=8, write=Delta(gate=ScalarGate())), 4),
        (Recurrent(heads=2, key_dim=8, value_dim=8, write=QDelta()), 4),
        (Recurrent(heads=2, key_dim=8, value_dim=8, write=QDelta(), read=CCQ()), 4),
        (Recurrent(heads=2, key_dim=8, value_dim=8, write=Carve()), 6),
        (Recurrent(heads=2, key_dim=8, value_dim=8, write=Linear(gate=LowRankGate()), conv=None), 7),
        (Recurrent(heads=2, key_dim=8, value_dim=8, write=Carve(), conv=Silu(), output_gate=False), 7),
        (Attention(heads=2, head_dim=8, attend=Softmax()), 4),
        (SwiGLU(hidden=32), 3),
    ],
)
def test_how_many_products_a_layer_makes(config, count, products):
    """q, k and v; numbers and CCQ's λ; the output gate; the output. CARVE's f and b leave a bottleneck each, GLA's gate one.

    Without a convolution q, k and v are three products, as they are in attention.
    """
    config.build(DIM)(torch.randn(1, 80, DIM))
    assert len(products) == count


@pytest.mark.parametrize("mlp", (SwiGLU(hidden=32, bias=True), SquaredReLU(hidden=32)))
def test_one_row_without_gradients_is_the_row_of_many(mlp):
    """Of a tensor, and of a norm that its first product makes."""
    torch.manual_seed(0)
    module, norm = mlp.build(DIM).double(), RMSNorm(DIM).double()
    nn.init.normal_(norm.weight)
    x, more = torch.randn(2, 3, DIM, dtype=torch.float64)
    want = module(norm(x + more)).detach()
    with torch.no_grad():
        one = norm.later(x[:1], more[:1])
        torch.testing.assert_close(module(one), want[:1], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(one.whole, (x + more)[:1], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(module(norm(x + more)[:1]), want[:1], rtol=1e-12, atol=1e-12)
