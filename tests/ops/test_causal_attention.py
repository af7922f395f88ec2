"""Which of PyTorch's kernels attention over whole sequences asks, and with what."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
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


@pytest.fixture
def on_a_gpu(monkeypatch):
    """What the kernels are called with, on tensors that are only said to be on a GPU: a Hopper, until `on` says which."""
    given = {}

    def flash(q, k, v, cu_seqlens, window, scale):
        given["flash"] = q.shape, k.shape, v.shape, scale
        return v.new_empty(*q.shape[:3], v.shape[-1])

    def others(q, k, v, *, is_causal, scale, enable_gqa=False):
        given["others"] = q.shape, k.shape, v.shape, scale, enable_gqa
        return v.new_empty(*q.shape[:3], v.shape[-1])

    monkeypatch.setattr(fused, "flash_attention", flash)
    monkeypatch.setattr(fused, "scaled_dot_product_attention", others)
    monkeypatch.setattr(fused, "takes", lambda q, v: q.dtype is torch.bfloat16 and max(q.shape[-1], v.shape[-1]) <= 256)
    on(monkeypatch, (9, 0))
    with FakeTensorMode():
        yield given


def on(monkeypatch, arch, version=91000):
    monkeypatch.setattr(fused, "compute_capability", lambda device: arch)
    monkeypatch.setattr(fused, "cudnn_version", lambda: version)


def attend(dtype, K, V, heads=8):
    q, k, v = (torch.empty(2, H, 640, D, dtype=dtype, device="cuda") for H, D in ((8, K), (heads, K), (heads, V)))
    return fused.causal(q, k, v, scale=None, enable_gqa=heads != 8).shape[1:]


@pytest.mark.parametrize(
    "arch, version, K, V",
    [
        ((9, 0), 90900, 192, 68),
        ((9, 0), 90900, 192, 128),
        ((8, 0), 91100, 192, 128),
        ((10, 0), 91000, 192, 128),
        ((10, 0), 91100, 128, 192),
    ],
    ids=str,
)
def test_widths_that_cudnn_refuses_go_to_flash(on_a_gpu, monkeypatch, arch, version, K, V):
    on(monkeypatch, arch, version)
    assert attend(torch.bfloat16, K, V, heads=2) == (8, 640, V)
    wide = -(-V // 8) * 8
    assert on_a_gpu == {"flash": ((2, 640, 8, K), (2, 640, 2, K), (2, 640, 2, wide), K**-0.5)}


@pytest.mark.parametrize(
    "arch, K, V",
    [
        ((9, 0), 64, 128),
        ((9, 0), 192, 256),
        ((9, 0), 256, 64),
        ((9, 0), 36, 96),
        ((9, 0), 192, 68),
        ((10, 3), 192, 128),
        ((8, 9), 128, 72),
        ((8, 9), 68, 68),
        ((8, 9), 256, 256),  # one width goes by `asked`, whoever takes it
    ],
    ids=str,
)
def test_widths_that_a_kernel_takes_are_multiples_of_eight(on_a_gpu, monkeypatch, arch, K, V):
    on(monkeypatch, arch, 91100)
    assert attend(torch.bfloat16, K, V, heads=2) == (8, 640, V)
    wide_k, wide_v = (-(-D // 8) * 8 for D in (K, V))
    assert on_a_gpu == {"others": ((2, 8, 640, wide_k), (2, 2, 640, wide_k), (2, 2, 640, wide_v), K**-0.5, True)}


def test_what_has_no_zeros_behind_is_what_the_kernel_answers(on_a_gpu, monkeypatch):
    """The gradient of a slice of all of o would be a copy."""
    x = torch.empty(2, 8, 640, 64, dtype=torch.bfloat16, device="cuda")
    monkeypatch.setattr(fused, "scaled_dot_product_attention", lambda q, k, v, **_: v)
    assert fused.causal(x, x, x, scale=None, enable_gqa=False) is x


@pytest.mark.parametrize("dtype, K, V", [(torch.float32, 64, 64), (torch.float32, 68, 33), (torch.bfloat16, 320, 320)])
@pytest.mark.parametrize("heads", [2, 8])
def test_what_flash_does_not_take_has_as_many_heads_of_keys_as_of_queries(on_a_gpu, dtype, K, V, heads):
    assert attend(dtype, K, V, heads) == (8, 640, V)
    wide = -(-K // 8) * 8
    assert on_a_gpu == {"others": ((2, 8, 640, wide), (2, 8, 640, wide), (2, 8, 640, -(-V // 8) * 8), K**-0.5, False)}
