"""The battery's error budget: every output, state and gradient, against its budget (`errors.py`)."""

import torch
from torch import Tensor

from needlework.ops.api import OpSpec
from needlework.testing.compare import differentiate, make, outputs, tokens, whole
from needlework.testing.errors import error_over_budget, operand, stored

# numbers that an error is measured on: of two equal errors one is twice the other by chance in 7 % of cases of 2 numbers, in 5e-6 of 24
ENOUGH = 24


def error_budget(
    spec: OpSpec,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16),
    B: int = 32,  # 4,096 numbers a head even for a gate
    T: int = 128,
) -> dict[str, float]:
    """Every dtype, outputs, states and gradients, all styles. Returns {dtype: worst error ÷ budget}."""
    worst = {}
    for dtype in dtypes:
        figures = []
        for style in spec.styles:
            inputs = make(spec, B, T, style=style)
            by_token = {f"d{name}" for name in spec.tokens} | _token_outputs(spec, inputs)
            found = _four_ways(spec, dtype, inputs)
            found |= _over_seeds(spec, dtype, style, {n: x[0].numel() for n, x in found.items() if x[0].numel() < ENOUGH})
            for name, results in found.items():
                fast, exact, definition, literal = results
                ratio, head = error_over_budget(fast, exact, definition, literal, 2 if name in by_token else None)
                figures.append((ratio, f"{name}, head {head}, {style} inputs"))
        ratio, where = max(figures)
        assert ratio <= 1, f"{dtype}: {where}: error is {ratio:.2f} x its budget"
        worst[str(dtype).removeprefix("torch.")] = ratio
    return worst


def _four_ways(spec: OpSpec, dtype: torch.dtype, inputs: dict) -> dict[str, tuple[Tensor, ...]]:
    """Every output, state and gradient: fast, exact, by the definition and by the literal form at `dtype`."""
    kept, wide, single = stored(inputs, dtype, spec.half)
    ways = (
        differentiate(whole(spec.chunk), kept),
        differentiate(whole(spec.recurrent), wide),
        differentiate(whole(spec.recurrent, operand=operand(dtype)), single),
        differentiate(whole(spec.literal, operand=operand(dtype)), single),
    )
    fast, exact, definition, literal = ({**values, **gradients} for values, gradients in ways)
    for name in [name for name, x in fast.items() if not x.is_floating_point()]:
        assert torch.equal(fast.pop(name), exact[name]), f"{name} differs"
    return {name: (x, exact[name], definition[name], literal[name]) for name, x in fast.items()}


def budgeted(spec: OpSpec, dtype: torch.dtype, B: int, T: int, style: str, device: torch.device) -> dict[str, float]:
    """error ÷ budget of every output, state and gradient of one case on `device`, over all heads together."""
    inputs = {name: x.to(device) for name, x in make(spec, B, T, style=style).items()}
    found = {}
    for name, (fast, exact, definition, literal) in _four_ways(spec, dtype, inputs).items():
        found[name] = error_over_budget(fast, exact, definition, literal, None)[0]
    return found


def _over_seeds(spec: OpSpec, dtype: torch.dtype, style: str, sizes: dict[str, int]) -> dict[str, tuple[Tensor, ...]]:
    """The tensors of so few numbers (parameters' gradients) again, from as many short cases as make them ENOUGH."""
    seeds = range(-(-ENOUGH // min(sizes.values())) if sizes else 0)
    cases = [_four_ways(spec, dtype, make(spec, 2, 24, seed, style)) for seed in seeds]
    return {name: tuple(torch.stack(way) for way in zip(*(case[name] for case in cases), strict=True)) for name in sizes}


def _token_outputs(spec: OpSpec, inputs: dict) -> set[str]:
    """Names of the outputs laid out [B T H ...]: all fields but the state."""
    return set(outputs(spec.chunk(**tokens(spec, inputs, lambda x: x[:1, :1]))))
