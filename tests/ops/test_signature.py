"""NamedTuples of tensors at torch.library's boundary: `ops/runtime/signature.py`, by operators of its own."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from needlework.ops.runtime.custom_op import backward_operator, differentiable, fake, operator, step_operator


class Given(NamedTuple):
    x: Tensor
    weight: Tensor | None = None


class Kept(NamedTuple):
    x: Tensor
    weight: Tensor | None
    sign: Tensor | None


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


class Shown(NamedTuple):
    x: Tensor
    mask: Tensor | None
    window: int | None


SEEN = []


@operator
def signature_fwd(given: Given, pair: Pair | None, scale: float) -> tuple[Tensor, Kept, Pair | None]:
    SEEN.append((given, pair))
    x, weight = given
    y = scale * (x.clone() if weight is None else x * weight)
    kept = Kept(x.clone(), None if weight is None else weight.clone(), None if pair is None else pair.a.sign())
    return y, kept, None if pair is None else Pair(pair.a.clone(), pair.b.clone())


@fake(signature_fwd)
def _(given: Given, pair: Pair | None, scale: float) -> tuple[Tensor, Kept, Pair | None]:
    like = lambda x: None if x is None else torch.empty_like(x)
    kept = Kept(torch.empty_like(given.x), like(given.weight), None if pair is None else like(pair.a))
    return torch.empty_like(given.x), kept, None if pair is None else Pair(torch.empty_like(pair.a), torch.empty_like(pair.b))


@backward_operator
def signature_bwd(dy: Tensor, kept: Kept, pair: Pair | None, scale: float) -> Given:
    SEEN.append((kept, pair))
    dx = scale * (dy.clone() if kept.weight is None else dy * kept.weight)
    return Given(dx, None if kept.weight is None else scale * dy * kept.x)


@fake(signature_bwd)
def _(dy: Tensor, kept: Kept, pair: Pair | None, scale: float) -> Given:
    return Given(torch.empty_like(dy), None if kept.weight is None else torch.empty_like(kept.weight))


def _save(ctx, inputs, output) -> None:
    *_, ctx.scale = inputs
    _, kept, pair = output
    assert isinstance(kept, Kept) and isinstance(pair, Pair)  # with empty vectors for None
    ctx.save_for_backward(*kept, *pair)


def _backward(ctx, dy, *_):
    found = signature_bwd(dy, *ctx.saved_tensors, ctx.scale)
    return *(dx if needed else None for dx, needed in zip(found, ctx.needs_input_grad, strict=False)), None, None, None


differentiable(signature_fwd, _backward, _save)


@step_operator("pair.b", "table")
def signature_step(pair: Pair, table: Given, rows: list[Tensor], x: Tensor) -> Tensor:
    pair.b.add_(pair.a)
    table.x.add_(len(rows))
    return x.clone()


@operator
def signature_numbers(shown: Shown) -> Tensor:
    SEEN.append(shown)
    return shown.x.clone()


def test_a_field_that_is_no_tensor_stays_what_it_is():
    x, nothing = torch.ones(2), torch.empty(0)
    for mask, window in ((None, None), (nothing, 3), (x, 0)):
        SEEN.clear()
        signature_numbers(x, mask, window)
        assert SEEN[0].window == window and (SEEN[0].mask is None) == (mask is not x)


def test_the_schema_has_the_fields_one_by_one_and_tells_those_of_one_name_apart():
    assert str(signature_fwd._schema) == (
        "needlework::signature_fwd(Tensor x, Tensor? weight, Tensor? a, Tensor? b, float scale) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    )
    assert str(signature_bwd._schema) == (
        "needlework::signature_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor? sign, Tensor? a, Tensor? b, float scale) -> (Tensor, Tensor)"
    )
    assert str(signature_step._schema) == (
        "needlework::signature_step(Tensor a, Tensor(a1!) b, Tensor(a2!) table_x, Tensor(a3!)? weight, Tensor[] rows, Tensor x) -> Tensor"
    )


@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("paired", (False, True))
def test_none_is_none_again_in_the_backward(weighted, paired):
    x, weight = (torch.randn(3, 2, requires_grad=True) for _ in range(2))
    pair = Pair(torch.randn(2), torch.randn(0)) if paired else (None, None)
    SEEN.clear()
    y, *kept = signature_fwd(x, weight if weighted else None, *pair, 2.0)
    (y * y.detach()).sum().backward()
    (given, pair_in), (saved, pair_out) = SEEN
    assert type(given) is Given and type(saved) is Kept
    assert [z is None for z in (given.weight, pair_in, saved.weight, saved.sign, pair_out)] == [
        not weighted, not paired, not weighted, not paired, not paired,
    ]  # fmt: skip
    assert [z.numel() for z in kept[1:3]] == [6 * weighted, 2 * paired]
    assert torch.equal(x.grad, 2 * y * (weight if weighted else 1))
    assert weight.grad is None if not weighted else torch.equal(weight.grad, 2 * y * x)


def test_a_tensor_without_elements_that_is_no_vector_is_not_none():
    SEEN.clear()
    signature_fwd(torch.zeros(0, 2), torch.zeros(0, 2), None, None, 1.0)
    assert SEEN[0][0].weight is not None


@pytest.mark.parametrize("weighted", (False, True))
def test_torch_library_and_the_compiler_take_it(weighted):
    x = torch.randn(3, 2, requires_grad=True)
    args = (x, torch.randn(3, 2) if weighted else None, None, None, 2.0)
    torch.library.opcheck(signature_fwd, args)
    whole = torch.compile(lambda *given: signature_fwd(*given)[0], fullgraph=True, backend="aot_eager")
    assert torch.equal(whole(*args), signature_fwd(*args)[0])


def test_only_named_fields_are_counted_as_changed():
    a, b, x = torch.ones(2), torch.ones(2), torch.zeros(2)
    signature_step(a, b, x, None, [a, a], a)
    assert (a._version, b._version, x._version) == (0, b._version, x._version) and b._version and x._version
    assert torch.equal(b, 2 * a) and torch.equal(x, 2 * a)
