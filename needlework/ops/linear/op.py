"""y = x Wᵀ + b. Of few rows a product takes as long as reading W: there a kernel of sums takes the place of a matrix product's tiles."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from needlework.ops.api import Impl, resolve
from needlework.ops.common.shapes import check
from needlework.ops.runtime.launch_configs import misfit

Activation = Literal["silu", "relu2"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"silu": F.silu, "relu2": lambda x: F.relu(x).square()}


def few(x: Tensor) -> bool:
    """Whether x [.. D] has one row: of more a matrix product is faster, or as fast."""
    return x.numel() == x.shape[-1]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, impl: Impl = "auto") -> Tensor:
    """y [.. N] of x [.. D]: torch.nn.functional.linear, by a kernel of its own where x has one row and no gradient is asked for.

        y = x Wᵀ + b

    weight [N D], bias [N] or None. One dtype; sums are made in float32 (float64 of float64) and rounded once.
    impl: "auto": the kernel on a CUDA device, where it can take the call; "triton": of any number of rows; "torch", "reference": PyTorch.
    The kernel reads W while the kernel in front of it still runs: that one may not write W.
    Raises ValueError with the reason for impl="triton" where that cannot be.

    >>> import torch
    >>> from needlework.ops.linear import linear
    >>> with torch.no_grad():
    ...     linear(torch.randn(1, 64), torch.randn(100, 64)).shape
    torch.Size([1, 100])
    """
    if (impl == "auto" and not few(x)) or _path("linear", impl, x, (weight,), (bias,)) != "triton":
        return F.linear(x, weight, bias)
    from needlework.ops.linear.few_rows import few_rows

    return few_rows(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], len(weight))


def glu(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    activation: Activation = "silu",
    impl: Impl = "auto",
) -> Tensor:
    """y [.. N] of x [.. D], two maps and what stands between them:

        y = φ(x Gᵀ + b) ⊙ (x Uᵀ + c),    φ = silu, or relu² with activation="relu2"

    gate, up [N D]; gate_bias, up_bias [N] or None. Otherwise as `linear`; in the kernel nothing is rounded but y.

    >>> import torch
    >>> from needlework.ops.linear import glu
    >>> with torch.no_grad():
    ...     glu(torch.randn(1, 64), torch.randn(100, 64), torch.randn(100, 64)).shape
    torch.Size([1, 100])
    """
    if (impl == "auto" and not few(x)) or _path("glu", impl, x, (gate, up), (gate_bias, up_bias)) != "triton":
        return ACTIVATIONS[activation](F.linear(x, gate, gate_bias)) * F.linear(x, up, up_bias)
    from needlework.ops.linear.few_rows import few_rows_glu

    return few_rows_glu(x.reshape(-1, x.shape[-1]), gate, gate_bias, up, up_bias, activation).view(*x.shape[:-1], len(gate))


def _path(op: str, impl: Impl, x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...]) -> str:
    return resolve(op, impl, x.device, lambda: _unsupported(x, weights, biases))


def _unsupported(x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...]) -> str | None:
    tensors = [t for t in (x, *weights, *biases) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "a gradient is asked for"
    if len({t.dtype for t in tensors}) > 1 or torch.is_autocast_enabled(x.device.type):
        return f"its tensors have {', '.join(str(t.dtype) for t in tensors)}, expected one dtype and no autocast"
    for weight in weights:
        check("weight", weight, "N D", N=len(weights[0]), D=x.shape[-1])
        if type(weight) not in (Tensor, Parameter):
            return f"weight is a {type(weight).__name__}, expected a tensor"
        if weight.stride() != (weight.shape[1], 1):
            return f"weight has strides {weight.stride()}, expected contiguous rows"
    return misfit("linear/few_rows", x.device, x.dtype, x.shape[-1], len(weights[0]))
