"""What the checks are written with: inputs of a spec, tensors of a result, gradients, and what "equal" means."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from needlework.layers.state import map_state
from needlework.ops.api import OpSpec

EXACT = 1e-12  # float64: thousands of roundings, and nine orders below any mistake in a formula


def make(spec: OpSpec, B: int, T: int, seed: int = 0, style: str | None = None) -> dict[str, Tensor]:
    return spec.inputs(torch.Generator().manual_seed(seed), B, T, style or spec.styles[0])


def tokens(spec: OpSpec, inputs: dict, pick: Callable[[Tensor], Tensor]) -> dict:
    """Apply `pick` to the inputs that have a token axis; parameters pass through."""
    return {name: pick(x) if name in spec.tokens else x for name, x in inputs.items()}


def leaves(x: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every tensor in a NamedTuple, tuple or tensor; None has no tensors."""
    if isinstance(x, Tensor):
        yield name, x
    elif isinstance(x, tuple):
        fields = getattr(x, "_fields", range(len(x)))
        for field, value in zip(fields, x, strict=True):
            yield from leaves(value, f"{name}.{field}" if name else str(field))


def like(x: object, values: Iterator[Tensor]) -> object:
    """x with its tensors replaced, in the order of `leaves`."""
    return map_state(x, lambda _: next(values))


def outputs(result: tuple) -> dict[str, Tensor]:
    """The tensors of a result but its state."""
    return dict(leaves(tuple.__new__(type(result), (*result[:-1], None))))


def relative(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖, in float64; the norm of b is taken as at least 1e-2, so that an exact zero can be compared."""
    assert a.shape == b.shape, f"shape {list(a.shape)}, expected {list(b.shape)}"
    assert torch.isfinite(a).all(), "not finite"
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-2))


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], what: str, bound: float = EXACT) -> None:
    assert a.keys() == b.keys(), f"{what}: {sorted(a)} against {sorted(b)}"
    for name in a:
        error = relative(a[name], b[name])
        assert error <= bound, f"{what}: {name} is off by {error:.2e} in relative norm, bound {bound:.0e}"


def differentiate(
    call: Callable[[dict], object], inputs: dict[str, Tensor], seed: int = 7
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Values of `call(inputs)` and the gradient of every floating input under fixed random cotangents; none where no value has one."""
    inputs = {n: x.detach().requires_grad_(x.is_floating_point()) for n, x in inputs.items()}
    values = dict(leaves(call(inputs)))
    generator = torch.Generator().manual_seed(seed)
    loss: Any = 0.0
    for value in values.values():
        if value.is_floating_point():
            # eighths: the same cotangent in every precision
            weight = torch.randint(-16, 17, value.shape, generator=generator) / 8
            loss = loss + (value * weight.to(value)).double().sum()
    if not any(value.requires_grad for value in values.values()):
        return values, {}
    names = [n for n, x in inputs.items() if x.requires_grad]
    gradients = torch.autograd.grad(loss, [inputs[n] for n in names], allow_unused=True)
    return {n: v.detach() for n, v in values.items()}, {
        f"d{n}": torch.zeros_like(inputs[n]) if g is None else g for n, g in zip(names, gradients, strict=True)
    }


@contextmanager
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN: what a kernel does not write shows."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    memory: Any = torch.utils.deterministic  # a module whose class has the property
    fill, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        memory.fill_uninitialized_memory = fill


def whole(function: Callable, **settings: Any) -> Callable[[dict], tuple]:
    return lambda inputs: function(**inputs, output_final_state=True, **settings)
