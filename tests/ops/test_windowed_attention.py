"""Attention in windows and over documents as blocks of FlexAttention, run as it is on a CPU, against masks and padding."""

from functools import partial

import pytest
import torch
from torch.nn.attention import flex_attention

from needlework.layers import softmax
from needlework.ops.attention import fused as attention
from needlework.ops.paged.reference import literal_attention, recurrent_attention
from needlework.ops.specs import specs
from needlework.testing.compare import EXACT, differentiate, relative
from needlework.testing.errors import assert_within_budget, operand, over_budget, stored

ENDS = [0, 100, 100, 417, 700]
STREAMED = ((129, None, None), (300, None, 50), (700, None, None), (640, [0, 100, 100, 640], None))
CASES = [
    *((1, None, 1), (129, None, 5), (300, None, 50), (700, None, 300), (512, None, 128), (700, ENDS, None), (700, ENDS, 60)),
    (300, [0, 255, 300], None),  # a block's last token alone is of another document
]
cases = pytest.mark.parametrize(("T", "ends", "window"), CASES)
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture
def streaming(monkeypatch):
    """The path of a GPU: PyTorch keeps gradients from FlexAttention on CPUs, and its scores need no kernel to be right."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(attention, "_compiled", lambda: flex_attention.flex_attention)
    monkeypatch.setattr(softmax, "streams", lambda q, v: True)


def tensors(T, dtype=torch.float64):
    g = torch.Generator().manual_seed(T)
    return [torch.randn(1, T, H, D, generator=g, dtype=dtype).requires_grad_() for H, D in ((4, 16), (2, 16), (2, 24))]


def call(x, ends, window, **settings):
    cu_seqlens = None if ends is None else torch.tensor(ends)
    return softmax.softmax_attention(*x, window=window, ring=window, cu_seqlens=cu_seqlens, **settings)


@cases
def test_values_pages_and_gradients_are_those_of_masks(T, ends, window, request):
    x = tensors(T)
    want, pages = call(x, ends, window, scale=0.3, output_final_state=True)
    request.getfixturevalue("streaming")
    got, kept = call(x, ends, window, scale=0.3, output_final_state=True)
    assert relative(got.detach(), want.detach()) <= EXACT
    assert all(torch.equal(a, b) for a, b in zip(kept, pages, strict=True))
    cotangent = torch.randn_like(got)
    exact = torch.autograd.grad(want, x, cotangent)
    # in a window of one the scores have no gradient, and the masks' own rounding is 1e-12
    for a, b in zip(torch.autograd.grad(got, x, cotangent), exact, strict=True):
        assert relative(a, b) <= 10 * EXACT


@pytest.mark.parametrize(("T", "ends", "window"), ((129, None, None), (300, None, 50), (240, [0, 100, 100, 240], 60)))
def test_decays_are_added_with_the_masks_gradients(T, ends, window, request):
    """A row's own sum has no gradient: it cancels in the row's softmax."""
    x, g = tensors(T), torch.Generator().manual_seed(1)
    decay = (-torch.rand(1, T, 4, generator=g, dtype=torch.float64).cumsum(1) - 50).requires_grad_()
    want, _ = call(x, ends, window, scale=0.3, decay=decay)
    request.getfixturevalue("streaming")
    got, _ = call(x, ends, window, scale=0.3, decay=decay)
    assert relative(got.detach(), want.detach()) <= EXACT
    cotangent = torch.randn_like(got)
    pairs = zip(*(torch.autograd.grad(o, [*x, decay], cotangent) for o in (got, want)), strict=True)
    assert all(relative(a, b) <= 10 * EXACT for a, b in pairs)


def streamed_over_budget(dtype, T, ends, window, gates, device, K=64, V=64):
    """Error ÷ budget of o and of the gradients of q, k, v and, with `gates`, of g, the log gates whose sums are the decays. A GPU streams
    it where there are gates, documents or a window."""
    (spec,) = (spec for spec in specs() if spec.name == "paged/forgetting")
    x = spec.inputs(torch.Generator().manual_seed(0), 1, T, "random", d=K, V=V)
    x["g"] = x["decay"].diff(dim=1, prepend=x["decay"][:, :1])
    x = {name: x[name].to(device) for name in (*"qkv", *("g" if gates else ""))}
    kept, wide, single = stored(x, dtype, spec.half)
    settings = {"window": window, "cu_seqlens": None if ends is None else torch.tensor(ends, device=device)}

    def found(attend, x, **more):
        decays = lambda x: {"decay": x["g"].double().cumsum(1)} if gates else {}
        o, gradients = differentiate(lambda x: attend(x["q"], x["k"], x["v"], **decays(x), **settings, **more), x)
        return o | gradients

    streamed = lambda *x, **more: softmax.softmax_attention(*x, **more)[0]
    definition, literal = (found(form, single, operand=operand(dtype)) for form in (recurrent_attention, literal_attention))
    return over_budget(found(streamed, kept), found(recurrent_attention, wide), definition, literal)


@pytest.mark.parametrize(("T", "ends", "window"), STREAMED[:2])
def test_a_gates_gradient_is_within_its_budget(T, ends, window, streaming):
    """It is a sum over pairs that the gate lies between; all others are to cancel."""
    assert_within_budget(streamed_over_budget(torch.float32, T, ends, window, True, "cpu"))


@cases
def test_blocks_hold_every_pair_once_and_whole_blocks_hide_none(T, ends, window):
    """What a compiled kernel goes by: pairs in no block are never looked at, pairs in whole blocks are never masked. Each block before a row's
    own that hides none is whole."""
    bound = attention.oldest(tensors(T)[0], None if ends is None else torch.tensor(ends), window)
    mask, i = attention.visible(bound), torch.arange(T)
    seen = (i <= i[:, None]) & (i >= bound[:, None])
    BLOCK, n = attention.BLOCK, -(-T // attention.BLOCK)
    kinds = torch.zeros(n, n, dtype=torch.int64)
    for count, places, kind in (
        (mask.kv_num_blocks, mask.kv_indices, 1), (mask.full_kv_num_blocks, mask.full_kv_indices, 10),
    ):  # fmt: skip
        for row in range(n):
            for column in places[0, 0, row, : count[0, 0, row]]:
                kinds[row, column] += kind
    assert set(kinds.flatten().tolist()) <= {0, 1, 10}
    for row in range(n):
        for column in range(n):
            pairs = seen[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
            kind = int(kinds[row, column])
            assert bool(pairs.any()) == (kind > 0) and (bool(pairs.all()) and column < row) == (kind == 10)
    if window is not None and window <= BLOCK:
        assert int((kinds > 0).sum(1).max()) <= 2


def test_memory_of_masks_does_not_grow_with_the_square(streaming):
    """The largest tensor of a mask for 100,000 tokens is its table of blocks."""
    mask = attention.visible(torch.arange(100_000, dtype=torch.int32).sub_(999).clamp_(min=0))
    blocks = -(-100_000 // attention.BLOCK)
    assert max(x.numel() for x in mask.as_tuple() if isinstance(x, torch.Tensor)) <= blocks**2


def test_a_layer_compiles_without_a_graph_break(streaming):
    x, ends = tensors(300, torch.float32), torch.tensor([0, 100, 300])
    run = lambda *x: softmax.softmax_attention(*x, window=60, cu_seqlens=ends)[0]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert relative(compiled(*x).detach(), run(*x).detach()) <= 1e-6


def test_attention_stays_compiled_over_many_kinds_of_calls(monkeypatch):
    """After 8 of them torch.compile would run the T × T scores."""

    def attend(*xs, **more):
        if not torch.compiler.is_compiling():
            raise AssertionError("not compiled")
        return sum(x.sum() for x in (*xs, *more.values()))

    monkeypatch.setattr(flex_attention, "flex_attention", attend)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    compiled = attention._compiled.__wrapped__()
    one = torch.ones(2)
    for n in range(12):
        assert compiled(one, one, one, **{f"x{i}": one for i in range(n)}) == 2 * (3 + n)


def test_sizes_that_are_not_compiled_are_named(monkeypatch):
    def fails(graph, inputs):
        raise ValueError("no valid triton configs")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=fails))
    attend = attention._compiled.__wrapped__()
    q, v = torch.zeros(1, 1, 3, 64, dtype=torch.float16), torch.zeros(1, 1, 3, 256, dtype=torch.float16)
    with pytest.raises(RuntimeError, match=r"for torch.float16 heads of 64 and values of 256: no valid triton configs"):
        attend(q, q, v, enable_gqa=False)


@pytest.mark.parametrize("ends", ([0, 5, 3, 300], [0, 100], [1, 300]))
def test_what_does_not_pack_the_tokens_is_refused(streaming, ends):
    with pytest.raises(ValueError, match="cu_seqlens: expected to rise from 0 to T = 300"):
        call(tensors(300), ends, None)


def test_a_cpu_float64_and_narrow_heads_keep_the_masks():
    q = torch.zeros(1, 1, 1, 16)
    assert not attention.streams(q, q)
    on_gpu = lambda dtype, D: type("T", (), {"is_cuda": True, "dtype": dtype, "shape": (1, 1, 1, D)})()
    taken = [(torch.float32, 16), (torch.bfloat16, 128), (torch.float16, 24)]
    assert all(attention.streams(on_gpu(*x), on_gpu(*x)) for x in taken)
    assert not any(attention.streams(on_gpu(*x), on_gpu(*x)) for x in ((torch.float64, 64), (torch.float32, 8)))
