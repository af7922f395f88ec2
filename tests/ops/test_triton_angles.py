"""Cosines and sines of Mamba-3's kernels."""

import os

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from needlework.ops.mamba3.siso.angles import cos_sin  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")


@triton.jit
def kernel(p_x, p_cos, p_sin, N: tl.constexpr):
    o = tl.arange(0, N)
    cos, sin = cos_sin(tl.load(p_x + o))
    tl.store(p_cos + o, cos)
    tl.store(p_sin + o, sin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_cosines_and_sines_have_the_digits_of_their_type(dtype):
    """Of half-turns in all four quarters, on their borders, and far away."""
    x = torch.cat([torch.arange(-16, 16) / 4, torch.linspace(-40, 40, 2016)]).to(dtype)
    cos, sin = torch.empty_like(x), torch.empty_like(x)
    kernel[(1,)](x, cos, sin, 2048)
    theta = torch.pi * (x.double() - 2 * torch.round(x.double() / 2))
    for found, exact in ((cos, theta.cos()), (sin, theta.sin())):
        assert (found.double() - exact).abs().max() < 4 * torch.finfo(dtype).eps
