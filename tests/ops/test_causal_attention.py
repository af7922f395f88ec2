"""Which of PyTorch's kernels attention over whole sequences asks first."""

import pytest
import torch
from torch.nn.attention import SDPBackend

from needlework.ops.attention import fused

CUDNN, FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION


def first(T, H=8, K=64, V=64):
    return fused.asked(*(torch.empty(1, H, T, D, device="meta") for D in (K, V)))[0]


@pytest.mark.parametrize(
    "shape, backend",
    [
        ({"T": 1000}, FLASH),
        ({"T": 1024}, CUDNN),
        ({"T": 1000, "V": 128}, CUDNN),  # wider values than keys
        ({"T": 5909, "H": 32, "K": 128, "V": 128}, FLASH),
        ({"T": 16385, "H": 32, "K": 128, "V": 128}, CUDNN),  # long
    ],
)
def test_prompts_of_any_length_have_no_plan_made(shape, backend):
    with torch.no_grad():
        assert first(**shape) is backend
    assert first(**shape) is CUDNN  # in training
