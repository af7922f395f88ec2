"""Whether what is timed is right: error over the house's budget, of outputs, states and every gradient."""

from collections.abc import Callable

import torch
from cases import Case
from torch import Tensor

from needlework.ops.api import OpSpec
from needlework.testing.compare import differentiate, whole
from needlework.testing.errors import operand, over_budget


def judge(case: Case, device: torch.device | str, dtype: torch.dtype, T: int = 200) -> tuple[float, str]:
    """The largest error ÷ budget and the tensor that has it, against the definition in float64, at a shorter length."""
    return worst(case.spec, case.tensors(device, dtype, 1, T), dtype)


def worst(spec: OpSpec, stored: dict[str, Tensor], dtype: torch.dtype) -> tuple[float, str]:
    return max((ratio, name) for name, ratio in ratios(spec, stored, dtype).items())


def ratios(spec: OpSpec, stored: dict[str, Tensor], dtype: torch.dtype) -> dict[str, float]:
    """Of spec.chunk, and the references where it is."""
    return compared(flat(whole(spec.chunk), stored), spec, stored, dtype)


def compared(fast: dict[str, Tensor], spec: OpSpec, stored: dict[str, Tensor], dtype: torch.dtype) -> dict[str, float]:
    """Error ÷ budget of every tensor of `fast`, ∞ of one that is not a number. The budget is twice the larger of the definition's own error at
    `dtype` and the literal chunk form's, all heads together."""
    wide, single = ({n: x.to(kind) for n, x in stored.items()} for kind in (torch.float64, torch.float32))
    exact = flat(whole(spec.recurrent), wide)
    definition = flat(whole(spec.recurrent, operand=operand(dtype)), single)
    literal = flat(whole(spec.literal, operand=operand(dtype)), single)
    return over_budget(fast, exact, definition, literal)


def flat(call: Callable[[dict], object], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values and gradients of call(inputs)."""
    values, gradients = differentiate(call, inputs)
    return {**values, **gradients}
