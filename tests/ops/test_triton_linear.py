"""The kernel of few rows, in Triton's interpreter, against PyTorch in float64; and which calls it takes."""

import os

import pytest
import torch
from torch.nn import functional as F

from needlework.ops.linear import Normed, NormedHeads, glu, linear, normed_glu, normed_heads_linear, normed_linear
from needlework.ops.runtime.launch_configs import forced

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")


def drawn(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def check(call, *tensors, eps=3):
    """call of the kernel is PyTorch's in float64, each number within `eps` roundings of the largest."""
    found = call(*tensors, impl="triton")
    want = call(*(None if x is None else x.double() for x in tensors), impl="torch")
    for one, exact in zip(
        (found,) if isinstance(found, torch.Tensor) else found, (want,) if isinstance(want, torch.Tensor) else want, strict=True
    ):
        u = torch.finfo(one.dtype).eps
        assert one.dtype == tensors[0].dtype and one.shape == exact.shape
        assert (one.double() - exact).abs().max() <= eps * u * exact.abs().max()


@pytest.mark.parametrize("rows, D, N", [(1, 64, 100), (3, 300, 37), (2, 5, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_is_the_product(rows, D, N, dtype):
    x, weight, bias = drawn((rows, D), (N, D), (N,), dtype=dtype)
    weight = weight * D**-0.5
    check(linear, x, weight, bias)
    check(linear, x, weight, None)


@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_a_gated_map_is_two_and_what_stands_between_them(activation):
    x, gate, up, b, c = drawn((2, 70), (37, 70), (37, 70), (37,), (37,))
    call = lambda *given, impl: glu(*given, activation=activation, impl=impl)
    check(call, x, gate / 8, up / 8, b, c)
    check(call, x, gate / 8, up / 8, b, None)
    check(call, x, gate / 8, up / 8, None, c)


@pytest.mark.parametrize("both", [True, False])
def test_a_normed_row_is_normed_before_its_product_and_leaves_its_sum(both):
    x, more, norm, gate, up, bias = drawn((3, 300), (3, 300), (300,), (37, 300), (37, 300), (37,))
    more, gate, up = more if both else None, gate / 16, up / 16
    check(
        lambda x, more, norm, w, b, impl: normed_linear(Normed(x, more, norm, 1e-6), w, b, impl=impl), x, more, norm, gate, bias
    )
    check(
        lambda x, more, norm, *w, impl: normed_glu(Normed(x, more, norm, 1e-6), *w, impl=impl),
        x,
        more,
        norm,
        gate,
        up,
        bias,
        bias,
    )


def test_the_epsilon_counts_in_small_rows():
    x, norm, weight = drawn((1, 64), (64,), (9, 64))
    check(lambda x, norm, w, impl: normed_linear(Normed(x, None, norm, 1e-6), w, impl=impl), 1e-3 * x, norm, weight / 8)


def test_a_row_longer_than_a_tile_and_one_that_does_not_fill_it():
    for D in (255, 256, 257, 1000):
        x, weight = drawn((1, D), (5, D))
        with forced("linear/few_rows", few_rows={"BD": 128}):
            check(linear, x, weight / D**0.5, None)


def test_what_is_not_one_tensor_of_one_row_and_one_dtype_goes_to_the_library(monkeypatch):
    monkeypatch.setenv("NEEDLEWORK_IMPL", "triton")
    x, weight = drawn((2, 64), (9, 64))
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    weight.requires_grad_()
    assert linear(x[:1], weight).grad_fn is not None
    for other, reason in (
        (weight, "a gradient"), (weight.detach().half(), "one dtype"), (weight.detach().T.contiguous().T, "strides"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"linear has no Triton kernel for this call: .*{reason}"):
            linear(x[:1], other, impl="triton")


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("H, V", [(3, 20), (2, 64)])
def test_heads_are_normed_by_themselves_and_gated(H, V, activation):
    x, norm, gate, weight, bias = drawn((2, H, V), (V,), (2, H * V), (9, H * V), (9,))
    x = x * torch.tensor([1.0, 1e-3, 30.0])[:H, None]  # heads of other sizes, one of which shows the epsilon
    weight = weight / 8  # 3 roundings as in a product, 3 more of a head's norm and its gate

    def call(x, norm, gate, weight, bias, impl):
        return normed_heads_linear(NormedHeads(x, norm, gate, 1e-6), weight, bias, activation=activation, impl=impl)

    check(call, x, norm, gate, weight, bias, eps=6)
    check(call, x, None, gate, weight, None, eps=6)
    check(call, x, norm, None, weight, bias, eps=6)


def test_gates_that_are_large_give_numbers():
    x, norm, weight = drawn((1, 2, 16), (16,), (5, 32))
    gate = torch.tensor([-80.0, 200.0]).repeat(16)[None]
    for activation in ("silu", "sigmoid"):
        call = lambda *given, impl, a=activation: normed_heads_linear(
            NormedHeads(*given[:3], 1e-6), given[3], activation=a, impl=impl
        )
        check(call, x, norm, gate, weight, eps=6)


def test_no_row_has_no_result():
    x, more, norm, weight = drawn((0, 64), (0, 64), (64,), (9, 64))
    assert linear(x, weight, impl="triton").shape == (0, 9)
    assert [y.shape for y in normed_linear(Normed(x, more, norm, 1e-6), weight, impl="triton")] == [(0, 9), (0, 64)]
