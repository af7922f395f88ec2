"""The kernels in Triton's interpreter with log decays however deep: as those at which e^g is 0, which meet the error budget."""

import os
from dataclasses import replace
from functools import partial

import pytest
import torch

from needlework.ops.common.decay import NOTHING
from needlework.ops.specs import specs
from needlework.testing.budget import budgeted
from needlework.testing.compare import differentiate, make, whole

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")
KERNELS = {spec.name: replace(spec, chunk=partial(spec.chunk, impl="triton")) for spec in specs()}
T = 37
RULES = pytest.mark.parametrize(
    "name", ("qdelta", "delta/kda", "ccq/aligned", pytest.param("delta/gdn2", marks=pytest.mark.slow))
)


def inputs(spec, depth, *given):
    """Small gates, and one of `depth` in turn at the first, near the last, on both sides of the borders of chunks, and elsewhere at every
    second channel."""
    x = KERNELS[spec].inputs(*given)
    for i, t in enumerate((0, 5, 15, 16, 17, 31, 32, T - 3)):
        x["g"][:, t] = depth[i % len(depth)]
    if x["g"].dim() == 4:
        x["g"][:, 9::11, :, ::2] = depth[-1]
    return x


@RULES
def test_gates_of_no_retention_meet_the_budget(name):
    spec = replace(KERNELS[name], inputs=partial(inputs, name, (NOTHING,)))
    found = budgeted(spec, torch.float32, 4, T, spec.styles[0], torch.device("cpu"))
    assert all(ratio <= 1 for ratio in found.values()), found


@RULES
def test_deeper_gates_are_bit_equal_to_gates_of_no_retention(name):
    def results(depth, dtype):
        spec = replace(KERNELS[name], inputs=partial(inputs, name, depth))
        x = {n: x.to(dtype if n in spec.half else torch.float32) for n, x in make(spec, 1, T).items()}
        return differentiate(whole(spec.chunk), x)

    for dtype in (torch.float32, torch.float16):
        want = results((NOTHING,), dtype)
        for got, expected in zip(results((-1e5, -1e20, -torch.inf), dtype), want, strict=True):
            for key, x in got.items():
                assert torch.equal(x, expected[key]), f"{dtype}: {key}"


@pytest.mark.parametrize("name", ("qdelta", "delta/kda", "ccq/aligned"))
def test_a_gate_that_is_no_number_is_not_taken_for_a_deep_one(name):
    x = {n: x.float() for n, x in make(KERNELS[name], 1, 5).items()}
    x["g"][:, 2] = torch.nan
    assert KERNELS[name].chunk(**x)[0].isnan().any()


def test_carve_takes_gates_of_any_depth():
    """f and b of 10²⁰ are retentions of 0, as those of 10⁵ are."""
    spec = KERNELS["carve"]

    def results(depth):
        x = {n: x.float() for n, x in make(spec, 1, T).items()}
        x["f"][:, 5::11, :, ::2] = depth
        x["b"][:, 7::9] = depth
        return differentiate(whole(spec.chunk), x)

    for got, want in zip(results(1e20), results(1e5), strict=True):
        for name in got.keys() - {"df", "dA_log", "ddt_bias"}:
            assert torch.equal(got[name], want[name]), name
        assert all(x.isfinite().all() for x in got.values())
