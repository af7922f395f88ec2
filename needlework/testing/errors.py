"""The error budget: derived from the definition and from the literal chunk form, never found by trying.

    ‖fast − x64‖ <= 2 · max(ρ, κ, r)
    ρ = ‖definition at precision p − x64‖    κ = ‖literal chunk form at p − x64‖    r = ‖x64 rounded to the result's dtype − x64‖

x64 is the definition in float64 on inputs that were first rounded to their storage dtype. Norms are Frobenius, over a whole
case and one head together. At p = float32 every operation is IEEE float32; at p = bfloat16 or float16 every operand of a
matrix or outer product is rounded once and products are summed in float32.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping

import torch
from torch import Tensor


def operand(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """What precision p does to an operand of a matrix product: one rounding to half, nothing in float32."""
    if dtype in (torch.float32, torch.float64):
        return lambda x: x
    return lambda x: x.to(dtype).to(x.dtype)


def stored(inputs: Mapping[str, Tensor], dtype: torch.dtype, half: Container[str]) -> tuple[dict[str, Tensor], ...]:
    """The inputs in their storage dtype (`half` names those in `dtype`, the others are float32); those in float64, in float32."""
    kept = {name: x.to(dtype if name in half else torch.float32) for name, x in inputs.items()}
    return kept, *({name: x.to(wide) for name, x in kept.items()} for wide in (torch.float64, torch.float32))


def norms(x: Tensor, head_axis: int | None) -> Tensor:
    """Frobenius norm per head, or of everything where there is no head axis."""
    x = x.double()
    if head_axis is None:
        return x.norm()[None]
    return x.movedim(head_axis, 0).flatten(1).norm(dim=1)


def in_budgets(error: Tensor, budget: Tensor) -> Tensor:
    """error ÷ budget: 0 where there is no error, ∞ where the budget alone is 0, and ∞ where a NaN leaves nothing to compare."""
    return torch.where(error == 0, 0.0, error / budget).nan_to_num(nan=math.inf, posinf=math.inf)


def error_over_budget(
    fast: Tensor, exact: Tensor, definition: Tensor, literal: Tensor, head_axis: int | None
) -> tuple[float, int]:
    """The largest ‖fast − x64‖ / (2·max(ρ, κ, r)) over heads, and that head. At most 1 is within budget."""
    rho = norms(definition.double() - exact, head_axis)
    kappa = norms(literal.double() - exact, head_axis)
    rounding = norms(exact.to(fast.dtype).double() - exact, head_axis)
    budget = 2 * torch.stack([rho, kappa, rounding]).amax(0)
    error = norms(fast.double() - exact, head_axis)
    ratio = in_budgets(error, budget)
    head = int(ratio.argmax())
    return float(ratio[head]), head


def over_budget(
    fast: Mapping[str, Tensor], exact: Mapping[str, Tensor], definition: Mapping[str, Tensor], literal: Mapping[str, Tensor],
    heads: Mapping[str, int] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Error ÷ budget of every floating tensor of `fast`; `heads` names the head axis of those that are judged head by head."""
    axes = heads or {}
    return {
        name: error_over_budget(x, exact[name], definition[name], literal[name], axes.get(name))[0]
        for name, x in fast.items()
        if x.is_floating_point()
    }


def mean_of_draws(draws: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Error ÷ budget of every tensor in the geometric mean of the draws; no more are taken than until every tensor is within its budget."""
    logs: dict[str, float] = defaultdict(float)
    mean: dict[str, float] = {}
    for count, found in enumerate(draws, 1):
        for name, ratio in found.items():
            logs[name] += math.log(max(ratio, 1e-6)) if math.isfinite(ratio) else math.inf
        mean = {name: math.exp(total / count) for name, total in logs.items()}
        if all(ratio <= 1 for ratio in mean.values()):
            break
    return mean


def assert_within_budget(ratios: Mapping[str, float], what: str = "") -> None:
    for name, ratio in ratios.items():
        assert ratio <= 1, f"{what}{': ' if what else ''}{name}: error is {ratio:.2f} x its budget"
