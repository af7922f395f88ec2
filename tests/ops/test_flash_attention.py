"""Attention by flash kernels as operators: PyTorch's two calls stand in as plain scores, for a CPU has neither, against masks and padding."""

import pytest
import torch

from needlework.layers import softmax
from needlework.ops.attention import flash, fused
from needlework.testing.compare import EXACT, relative
from tests.ops.test_windowed_attention import call

SHAPES = [
    (1, None, 1),
    (129, None, 5),
    (70, None, 300),
    (70, [0, 10, 10, 41, 70], None),
    (70, [0, 10, 10, 41, 70], 6),
    (3, [0, 1, 2, 3], None),
]


def probabilities(q, k, ends, causal, scale, left, right):
    """[H i j] of packed rows, as the kernels' documentation has it; −1: no bound."""
    i = torch.arange(len(q))
    document = torch.searchsorted(ends, i, right=True)
    lag = i[:, None] - i
    seen = document[:, None] == document
    if causal:
        seen &= lag >= 0
    if left >= 0:
        seen &= lag <= left
    if right >= 0:
        seen &= -lag <= right
    return torch.einsum("ihd,jhd->hij", q * scale, k).masked_fill(~seen, -torch.inf).softmax(-1)


def rows(ends, longest, *x):
    """Tensors without an axis of a batch, and where their sequences end, if they are what the kernels take."""
    assert all(y.shape[-1] == x[0].shape[-1] and y.shape[-1] % 8 == 0 and y.stride(-1) == 1 for y in x)
    if ends is None:
        B, T = x[0].shape[:2]
        return torch.arange(B + 1) * T, *(y.flatten(0, 1) for y in x)
    assert ends.dtype == torch.int32 and longest >= max(2, *ends.diff().tolist())
    return ends, *x


@pytest.fixture
def flashing(monkeypatch):
    def forward(
        q, k, v, ends, ends_k, longest, longest_k, dropout, causal, debug, *, scale, window_size_left, window_size_right
    ):
        assert ends is ends_k and longest == longest_k and dropout == 0 and not debug
        bounds, q_, k_, v_ = rows(ends, longest, q, k, v)
        G = q.shape[-2] // k.shape[-2]
        p = probabilities(q_, k_.repeat_interleave(G, 1), bounds, causal, scale, window_size_left, window_size_right)
        o = torch.einsum("hij,jhd->ihd", p, v_.repeat_interleave(G, 1))
        sums = q.new_zeros(*(() if ends is not None else (len(q),)), q.shape[-2], q.shape[-3], dtype=torch.float32)
        return o.contiguous().view(q.shape), sums, None, None, None

    def backward(
        do, q, k, v, o, lse, ends, _, longest, __, dropout, causal, *drawn, scale, window_size_left, window_size_right
    ):
        bounds, do_, q_, k_, v_, o_ = rows(ends, longest, do, q, k, v, o)
        G = q.shape[-2] // k.shape[-2]
        k_, v_ = (x.repeat_interleave(G, 1) for x in (k_, v_))
        p = probabilities(q_, k_, bounds, causal, scale, window_size_left, window_size_right)
        ds = scale * p * (torch.einsum("ihd,jhd->hij", do_, v_) - (do_ * o_).sum(-1).T[..., None])
        dk, dv = (torch.einsum("hij,ihd->jhd", a, b).unflatten(1, (-1, G)).sum(2) for a, b in ((ds, q_), (p, do_)))
        dq = torch.einsum("hij,jhd->ihd", ds, k_)
        return tuple(dx.contiguous() for dx in (dq, dk, dv))

    monkeypatch.setattr(flash, "FORWARD", forward)
    monkeypatch.setattr(flash, "BACKWARD", backward)
    monkeypatch.setattr(softmax, "streams", lambda q, v: True)
    monkeypatch.setattr(fused, "takes", lambda q, v: True)


def tensors(T, B, dtype=torch.float64):
    """Four heads of queries, two of keys of 20 numbers, and values of 28."""
    g = torch.Generator().manual_seed(T)
    return [torch.randn(B, T, H, D, generator=g, dtype=dtype).requires_grad_() for H, D in ((4, 20), (2, 20), (2, 28))]


@pytest.mark.parametrize(("T", "ends", "window"), SHAPES)
def test_values_pages_and_gradients_are_those_of_masks(T, ends, window, request):
    x = tensors(T, 1 if ends else 2)
    want, pages = call(x, ends, window, output_final_state=True)
    request.getfixturevalue("flashing")
    got, kept = call(x, ends, window, output_final_state=True)
    assert relative(got.detach(), want.detach()) <= EXACT
    assert all(torch.equal(a, b) for a, b in zip(kept, pages, strict=True))
    cotangent = torch.randn_like(got)
    for a, b in zip(*(torch.autograd.grad(o, x, cotangent) for o in (got, want)), strict=True):
        assert relative(a, b) <= 10 * EXACT  # as beside FlexAttention


@pytest.mark.parametrize(("ends", "window"), (([0, 10, 41], None), (None, 6)))
def test_a_layer_compiles_without_a_graph_break(ends, window, flashing):
    x = tensors(41, 1, torch.float32)
    run = lambda *x: call(x, ends, window)[0]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    cotangent = torch.randn(1, 41, 4, 28)
    found, want = ([o.detach(), *torch.autograd.grad(o, x, cotangent)] for o in (compiled(*x), run(*x)))
    assert all(relative(a, b) <= 1e-6 for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("ends", (None, [0, 10, 30]))
def test_operators_say_what_they_return(ends, flashing):
    q, k, v = (torch.randn(1 if ends else 2, 30, H, 24) for H in (4, 2, 2))
    call = (None if ends is None else torch.tensor(ends), 6, 0.2)
    tests = "test_schema", "test_faketensor"
    torch.library.opcheck(flash.flash_fwd, (q, k, v, *call), test_utils=tests)
    found = flash.flash_fwd(q, k, v, *call)
    torch.library.opcheck(flash.flash_bwd, (torch.randn_like(q), q, k, v, *found, *call), test_utils=tests)


@pytest.mark.parametrize("ends", ([0, 5, 3, 30], [0, 10], [1, 30]))
def test_what_does_not_pack_the_tokens_is_refused(flashing, ends):
    with pytest.raises(ValueError, match="cu_seqlens: expected to rise from 0 to T = 30"):
        call(tensors(30, 1), ends, None)


def test_tangents_are_refused(flashing):
    q, k, v = (x.detach() for x in tensors(30, 1))
    with pytest.raises(NotImplementedError, match="flash_fwd: forward-mode"):
        torch.func.jvp(lambda q: call((q, k, v), None, 6)[0], (q,), (q,))


@pytest.mark.parametrize("K, V, wide", [(16, 24, 24), (68, 36, 72), (64, 64, 64)])
def test_zeros_are_behind_up_to_the_next_multiple_of_eight(K, V, wide, monkeypatch):
    given = {}
    monkeypatch.setattr(flash, "flash_fwd", lambda q, k, v, *_: given.update(q=q, k=k, v=v) or (v, None, None))
    q, k, v = torch.randn(1, 3, 2, K), torch.randn(1, 3, 2, K), torch.randn(1, 3, 2, V)
    assert torch.equal(flash.flash_attention(q, k, v, None, None, None), v)
    assert {x.shape[-1] for x in given.values()} == {wide} and not any(x[..., max(K, V) :].any() for x in given.values())


def test_half_precision_on_a_gpu_is_taken(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(flash, "compute_capability", lambda device: (9, 0))
    on_gpu = lambda dtype, D: type("T", (), {"is_cuda": True, "device": "cuda", "dtype": dtype, "shape": (1, 1, 1, D)})()
    assert not flash.takes(torch.zeros(1, 1, 1, 16).bfloat16(), torch.zeros(1, 1, 1, 16).bfloat16())
    assert all(flash.takes(on_gpu(*x), on_gpu(*x)) for x in ((torch.bfloat16, 68), (torch.float16, 256)))
    assert not any(flash.takes(on_gpu(*x), on_gpu(*x)) for x in ((torch.float32, 64), (torch.bfloat16, 264)))
    monkeypatch.setattr(flash, "compute_capability", lambda device: (7, 5))
    assert not flash.takes(*[on_gpu(torch.float16, 64)] * 2)
