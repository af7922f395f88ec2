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


@pytest.mark.parametrize("T", (100, 128))
@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks a GPU's kernels")
def test_what_is_asked_does_not_depend_on_what_was_before(T):
    q, k, v = torch.randn(3, 1, 4, T, 64, device="cuda", dtype=torch.bfloat16)
    by_cudnn = []
    for gradients in (False, True, False):
        with torch.set_grad_enabled(gradients), torch.profiler.profile() as seen:
            fused.causal(q, k, v, scale=None, enable_gqa=False)
            torch.cuda.synchronize()
        by_cudnn.append(any("cudnn" in x.key and x.self_device_time_total for x in seen.key_averages()))
    if not by_cudnn[1]:
        pytest.skip("cuDNN has no attention for this GPU")
    assert by_cudnn == [T == 128, True, T == 128]
