"""CCQ's kernels in Triton's interpreter, from an initial C and with a cotangent of the final one that are not symmetric."""

import os

import pytest
import torch

from needlework.ops.ccq.op import chunk_ccq
from needlework.ops.ccq.state import CurvatureState
from needlework.ops.specs import specs
from needlework.testing.compare import assert_close, make

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")


@pytest.mark.parametrize("lengths", ([9, 21], [0, 30]))
def test_every_gradient_is_the_definitions_where_c_and_its_cotangent_are_not_symmetric(lengths):
    spec = next(spec for spec in specs() if spec.name == "ccq/aligned")
    inputs = make(spec, 1, sum(lengths))
    (_, _, H, K), generator = inputs["k"].shape, torch.Generator().manual_seed(3)
    normal = lambda *sizes: torch.randn(*sizes, generator=generator, dtype=torch.float64)
    state = CurvatureState(normal(2, H, K, K), normal(2, H, K) / 4, torch.full((2, H), 5.0, dtype=torch.float64))
    leaves = {**inputs, **state._asdict()}
    cu_seqlens = torch.tensor([0, lengths[0], sum(lengths)])
    weights = [normal(*x.shape) for x in state]

    def values(impl):
        x = {name: y.clone().requires_grad_() for name, y in leaves.items()}
        given = CurvatureState(*(x.pop(name) for name in state._fields))
        cleaned, last = chunk_ccq(**x, initial_state=given, output_final_state=True, cu_seqlens=cu_seqlens, impl=impl)
        total = cleaned.square().sum() + sum((a * weight).sum() for a, weight in zip(last, weights, strict=True))
        gradients = torch.autograd.grad(total, [*x.values(), *given])
        return {"q": cleaned.detach(), **dict(zip([*x, *state._fields], gradients, strict=True))}

    assert_close(values("triton"), values("reference"), f"lengths {lengths}")
