"""CCQ's initial C need not be symmetric: the op is a function of (C + Cᵀ)/2, in value and gradient, by every form."""

import pytest
import torch

from needlework.ops.ccq.op import chunk_ccq
from needlework.ops.ccq.reference import literal_ccq
from needlework.ops.ccq.state import CurvatureState
from needlework.ops.specs import specs
from needlework.testing.compare import assert_close, make

SPECS = {spec.name: spec for spec in specs()}
FORMS = {"torch": chunk_ccq, "reference": lambda *x, **s: chunk_ccq(*x, impl="reference", **s), "literal": literal_ccq}


def case(name="ccq/aligned", T=21):
    """Inputs, a state whose C is far from symmetric, and cotangents of q̃, C, μ and n, that of C as far from it."""
    normal = lambda *sizes: torch.randn(*sizes, generator=generator, dtype=torch.float64)
    inputs = make(SPECS[name], 2, T)
    (_, _, H, K), generator = inputs["k"].shape, torch.Generator().manual_seed(3)
    state = CurvatureState(normal(2, H, K, K), normal(2, H, K) / 4, torch.full((2, H), 5.0, dtype=torch.float64))
    return inputs, state, tuple(normal(*x.shape) for x in (*(inputs["eta"][..., None].expand(-1, -1, -1, K),), *state))


def loss(form, inputs, state, cotangents):
    cleaned, last = form(**inputs, initial_state=state, output_final_state=True)
    return sum((x * weight).sum() for x, weight in zip((cleaned, *last), cotangents, strict=True))


@pytest.mark.parametrize("T", (0, 21))
@pytest.mark.parametrize("name", ("ccq", "ccq/aligned"))
@pytest.mark.parametrize("form", FORMS)
def test_the_gradient_of_c_is_that_of_its_symmetric_part(form, name, T):
    inputs, state, cotangents = case(name, T)
    C = state.C.requires_grad_()
    (dC,) = torch.autograd.grad(loss(FORMS[form], inputs, state, cotangents), C)
    # every form is a polynomial of C of degree one: a difference of two values is its derivative
    way = torch.randn(C.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    at = lambda C: loss(FORMS[form], inputs, state._replace(C=C.detach()), cotangents)
    torch.testing.assert_close((dC * way).sum(), at(C + way) - at(C), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(at(C), at(C.mT), rtol=1e-12, atol=1e-12)
    assert torch.equal(dC, dC.mT)


@pytest.mark.parametrize("form", ("torch", "literal"))
def test_every_gradient_is_the_definitions_where_c_and_its_cotangent_are_not_symmetric(form):
    inputs, state, cotangents = case()
    leaves = {**inputs, **state._asdict()}

    def gradients(form):
        x = {name: y.detach().clone().requires_grad_() for name, y in leaves.items()}
        given = {name: x[name] for name in inputs}
        value = loss(form, given, CurvatureState(*(x[name] for name in state._fields)), cotangents)
        return dict(zip(x, torch.autograd.grad(value, list(x.values())), strict=True))

    assert_close(gradients(FORMS[form]), gradients(FORMS["reference"]), form)


def test_a_covariance_is_read_as_it_is():
    _, state, _ = case()
    C = state.C @ state.C.mT
    C = (C + C.mT) / 2
    _, same = chunk_ccq(**make(SPECS["ccq/aligned"], 2, 0), initial_state=state._replace(C=C), output_final_state=True)
    assert torch.equal(same.C, C)
