"""Narrow maps of one input are one product, and what they are beside one another is what they are alone."""

import pytest
import torch
from torch import nn

from needlework.layers import Carve, Delta, QDelta, Recurrent, ScalarGate
from needlework.layers.numbers import side_by_side

DIM = 24


def maps(*biases):
    torch.manual_seed(0)
    return [nn.Linear(DIM, n, bias=bias).double() for n, bias in zip((3, 5, 2), biases, strict=True)]


@pytest.mark.parametrize("biases", [(False, False, False), (True, False, True)])
def test_maps_side_by_side_are_the_maps(biases):
    alone = [*maps(*biases), nn.Sequential(nn.Linear(DIM, 7, bias=False), nn.Linear(7, 4)).double()]
    x = torch.randn(2, 6, DIM, dtype=torch.float64, requires_grad=True)
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


def test_a_map_that_someone_has_adapted_is_called():
    class Adapted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    plain, *_ = maps(False, False, False)
    adapted = Adapted(DIM, 3).double()
    x = torch.randn(1, 4, DIM, dtype=torch.float64)
    assert torch.equal(side_by_side(x, plain, adapted)[1], adapted(x))


@pytest.mark.parametrize("write, products", [(Delta(gate=ScalarGate()), 6), (QDelta(), 6), (Carve(), 8)])
def test_a_layer_makes_its_numbers_in_one_product(write, products, monkeypatch):
    """q, k, v, the output gate, the output and the numbers; CARVE's f and b leave a bottleneck each."""
    mixer = Recurrent(heads=2, key_dim=8, value_dim=8, write=write).build(DIM)
    made, linear = [], torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *given: made.append(given) or linear(*given))
    mixer(torch.randn(1, 5, DIM))
    assert len(made) == products
