"""Operators and their gradients: `ops/runtime/custom_op.py`, by operators of its own."""

import pytest
import torch
from torch import Tensor

from needlework.ops.runtime.custom_op import backward_operator, differentiable, fake, operator

RAN = []


@operator
def cubed(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    RAN.append("cubed")
    return scale * x**3, x.sum()


@operator
def cubed_fwd(x: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    RAN.append("cubed_fwd")
    return scale * x**3, x.sum(), 3 * scale * x**2


@backward_operator
def cubed_bwd(dy: Tensor, dsum: Tensor, slope: Tensor, x: Tensor) -> Tensor:
    RAN.append("cubed_bwd")
    return dy * slope + dsum + 0 * x


@operator
def apart(x: Tensor, parts: list[int]) -> list[Tensor]:
    return [2 * one for one in x.split(parts)]


@backward_operator
def apart_bwd(dy: list[Tensor], x: Tensor) -> Tensor:
    return 2 * torch.cat(dy) + 0 * x


@operator
def negated(x: Tensor) -> Tensor:
    return -x


@fake(negated)
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@fake(cubed)
def _(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(())


@fake(cubed_fwd)
def _(x: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(()), torch.empty_like(x)


@fake(cubed_bwd)
def _(dy: Tensor, dsum: Tensor, slope: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(dy)


@fake(apart)
def _(x: Tensor, parts: list[int]) -> list[Tensor]:
    return [x.new_empty(part) for part in parts]


@fake(apart_bwd)
def _(dy: list[Tensor], x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[2], inputs[0])


def _backward(ctx, dy, dsum, *_):
    return cubed_bwd(dy, dsum, *ctx.saved_tensors), None


differentiable(cubed, _backward, _save, cubed_fwd)
differentiable(negated, lambda ctx, dy: negated(dy))
differentiable(
    apart, lambda ctx, dy: (apart_bwd(dy, *ctx.saved_tensors), None), lambda ctx, inputs, _: ctx.save_for_backward(inputs[0])
)


@pytest.fixture(autouse=True)
def nothing_ran():
    RAN.clear()


def test_what_a_backward_takes_is_computed_where_one_may_follow():
    x = torch.randn(4, dtype=torch.float64)
    cubed(x, 2.0)
    with torch.no_grad():
        cubed(x.requires_grad_(), 2.0)
    assert RAN == ["cubed"] * 2
    y, total = cubed(x, 2.0)
    (y.sum() + 5 * total).backward()
    assert RAN[2:] == ["cubed_fwd", "cubed_bwd"]
    assert torch.equal(y, 2 * x**3) and torch.allclose(x.grad, 6 * x**2 + 5)


@pytest.mark.parametrize("op", (cubed, cubed_fwd))
def test_both_have_the_gradient(op):
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: tuple(op(x, 2.0)[:2]), x)
    torch.library.opcheck(op, (x, 2.0))


def test_a_second_derivative_raises():
    x = torch.randn(4, requires_grad=True)
    (dx,) = torch.autograd.grad(cubed(x, 2.0)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cubed_bwd: second derivatives"):
        dx.sum().backward()


def test_a_gradient_may_be_one_tensor():
    x = torch.randn(2, 3, requires_grad=True)
    negated(x).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), -1.0))


def test_results_may_be_a_list():
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    found = apart(x, [2, 3])
    assert isinstance(found, list) and [len(y) for y in found] == [2, 3]
    torch.autograd.backward(found, [torch.ones(2), torch.full((3,), 4.0)])
    assert x.grad.tolist() == [2, 2, 8, 8, 8]
    torch.library.opcheck(apart, (x, [2, 3]))


def test_what_is_compiled_computes_the_same():
    x = torch.randn(4, requires_grad=True)
    y, total = torch.compile(lambda x: cubed(x, 2.0), fullgraph=True, backend="aot_eager")(x)
    (y.sum() + total).backward()
    assert torch.equal(y, 2 * x**3) and torch.allclose(x.grad, 6 * x**2 + 1)
