"""The convolution's kernels in the interpreter: values and every gradient are those of the plain form."""

import os

import pytest
import torch

from needlework.ops.common.conv import causal_conv
from needlework.ops.runtime.launch_configs import forced
from needlework.testing.compare import EXACT, poisoned, relative
from needlework.testing.rows import covering

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")


def differentiated(impl: str, x, weight, dy, **settings) -> tuple[torch.Tensor, ...]:
    x, weight = (t.clone().requires_grad_() for t in (x, weight))
    y = torch.cat(causal_conv(x, weight, **settings, impl=impl)[0], -1)
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy)


SHAPES = (
    (1, 4, None, None), (3, 2, None, (3, 17)), (21, 3, None, None), (21, 4, None, (16, 4)), (21, 4, [0, 1, 1, 9, 21], (1, 18, 1)),
)  # fmt: skip


@pytest.mark.parametrize(("shape", "after"), covering(SHAPES, ("none", "silu", "add"), pairs=False))
def test_kernels_are_the_plain_form(shape, after):
    T, width, ends, parts = shape
    generator = torch.Generator().manual_seed(T)
    B, C = (1 if ends else 2), 20
    x, weight, dy = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((B, T, C), (C, width), (B, T, C)))
    settings = {"after": after, "parts": parts, "cu_seqlens": None if ends is None else torch.tensor(ends)}
    small = {"BC": 16, "BT": 8}
    with forced("common/conv", conv_forward_kernel=small, conv_backward_kernel=small), poisoned():
        found = differentiated("triton", x, weight, dy, **settings)
    for name, got, want in zip(("y", "dx", "dweight"), found, differentiated("torch", x, weight, dy, **settings), strict=True):
        assert relative(got, want) <= EXACT, name
    with forced("common/conv", conv_forward_kernel=small, conv_backward_kernel=small):
        assert all(map(torch.equal, found, differentiated("triton", x, weight, dy, **settings))), "not the same twice"
