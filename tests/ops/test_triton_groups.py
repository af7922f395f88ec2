"""Sums over the heads of a group, in Triton's interpreter, against PyTorch's."""

import os

import pytest
import torch

from needlework.ops.common.kernels.groups import of_groups

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32, torch.float64))
@pytest.mark.parametrize("sizes", ((2, 37, 6, 3, 20), (1, 5, 8, 1, 300), (2, 0, 4, 2, 8), (1, 7, 4, 4, 16)), ids=str)
def test_sums_are_rounded_once(sizes, dtype):
    B, T, HV, H, K = sizes
    wide = torch.promote_types(dtype, torch.float32)
    x = torch.randn(B, T, HV, K, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(wide)
    exact = x.double().unflatten(2, (H, -1)).sum(3)
    found = of_groups(x, H, dtype)
    assert found.dtype == dtype and found.is_contiguous()
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=8 * torch.finfo(wide).eps)
