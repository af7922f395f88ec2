"""y = x Wᵀ + b. Of few rows a product takes as long as reading W: there a kernel of sums takes the place of a matrix product's tiles."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from needlework.ops.api import Impl, resolve
from needlework.ops.common.shapes import check, width
from needlework.ops.runtime.launch_configs import misfit
from needlework.ops.unit.reference import rms_rows

Activation = Literal["silu", "relu2"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"silu": F.silu, "relu2": lambda x: F.relu(x).square()}


def few(x: Tensor) -> bool:
    """Whether x [.. D] has one row: of more a matrix product is faster, or as fast."""
    return x.numel() == x.shape[-1]


def added(x: Tensor, more: Tensor | None) -> Tensor:
    """x + more, made in float32 and rounded, as halves are added. Written so, a compiler does not make it part of the product that gave
    `more`, which would copy x first."""
    return x if more is None else (x.to(width(x)) + more).to(x.dtype)


class Normed(NamedTuple):
    """A row as a product may take it: x + more, normed. RMSNorm(x + more) ⊙ norm, x and more [.. D], norm [D]; more None: of x."""

    x: Tensor
    more: Tensor | None
    norm: Tensor
    eps: float

    def whole(self) -> Tensor:
        return added(self.x, self.more)

    def of(self, whole: Tensor) -> Tensor:
        """The norm of the sum, rounded before it meets its weight."""
        return rms_rows(whole, self.eps) * self.norm


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
    if (impl == "auto" and not few(x)) or _path("linear", impl, x, None, (weight,), (bias,)) != "triton":
        return F.linear(x, weight, bias)
    from needlework.ops.linear.few_rows import few_rows

    return _shaped(few_rows(_rows(x), weight, bias, None, None, None), x)


def heads_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, impl: Impl = "auto") -> Tensor:
    """`linear` of x [.. H V], whose heads lie side by side in a row: weight [N H·V]. A compiler that norms each head writes them as they are."""
    row = x.flatten(-2)
    if (impl == "auto" and not few(row)) or _path("linear", impl, row, None, (weight,), (bias,)) != "triton":
        return F.linear(row, weight, bias)
    from needlework.ops.linear.few_rows import few_rows

    return _shaped(few_rows(x, weight, bias, None, None, None), row)


def glu(
    x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None = None, up_bias: Tensor | None = None,
    *, activation: Activation = "silu", impl: Impl = "auto",
) -> Tensor:  # fmt: skip
    """y [.. N] of x [.. D], two maps and what stands between them:

        y = φ(x Gᵀ + b) ⊙ (x Uᵀ + c),    φ = silu, or relu² with activation="relu2"

    gate, up [N D]; gate_bias, up_bias [N] or None. Otherwise as `linear`; in the kernel nothing is rounded but y.

    >>> import torch
    >>> from needlework.ops.linear import glu
    >>> with torch.no_grad():
    ...     glu(torch.randn(1, 64), torch.randn(100, 64), torch.randn(100, 64)).shape
    torch.Size([1, 100])
    """
    if (impl == "auto" and not few(x)) or _path("glu", impl, x, None, (gate, up), (gate_bias, up_bias)) != "triton":
        return ACTIVATIONS[activation](F.linear(x, gate, gate_bias)) * F.linear(x, up, up_bias)
    from needlework.ops.linear.few_rows import few_rows

    return _shaped(few_rows(_rows(x), gate, gate_bias, up, up_bias, activation), x)


def normed_linear(x: Normed, weight: Tensor, bias: Tensor | None = None, *, impl: Impl = "auto") -> tuple[Tensor, Tensor]:
    """`linear` of x's norm, and x + more. The kernel rounds that sum, and of the norm nothing.

    >>> import torch
    >>> from needlework.ops.linear import Normed, normed_linear
    >>> with torch.no_grad():
    ...     y, x = normed_linear(Normed(torch.randn(1, 64), torch.randn(1, 64), torch.ones(64), 1e-6), torch.randn(100, 64))
    >>> y.shape, x.shape
    (torch.Size([1, 100]), torch.Size([1, 64]))
    """
    if (impl == "auto" and not few(x.x)) or _path("linear", impl, x.x, x, (weight,), (bias,)) != "triton":
        whole = x.whole()
        return F.linear(x.of(whole), weight, bias), whole
    return _of_normed(x, weight, bias, None, None, None)


def normed_glu(
    x: Normed, gate: Tensor, up: Tensor, gate_bias: Tensor | None = None, up_bias: Tensor | None = None,
    *, activation: Activation = "silu", impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`glu` of x's norm, and x + more, as `normed_linear` has it."""
    if (impl == "auto" and not few(x.x)) or _path("glu", impl, x.x, x, (gate, up), (gate_bias, up_bias)) != "triton":
        whole = x.whole()
        return glu(x.of(whole), gate, up, gate_bias, up_bias, activation=activation, impl="torch"), whole
    return _of_normed(x, gate, gate_bias, up, up_bias, activation)


def _of_normed(
    x: Normed, weight: Tensor, bias: Tensor | None, up: Tensor | None, up_bias: Tensor | None, activation: Activation | None
) -> tuple[Tensor, Tensor]:
    from needlework.ops.linear.few_rows import few_rows_normed

    more = None if x.more is None else _rows(x.more)
    y, total = few_rows_normed(_rows(x.x), more, x.norm, x.eps, weight, bias, up, up_bias, activation)
    return _shaped(y, x.x), x.x if more is None else _shaped(total, x.x)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _shaped(y: Tensor, x: Tensor) -> Tensor:
    return y.view(*x.shape[:-1], y.shape[-1])


def _path(
    op: str, impl: Impl, x: Tensor, normed: Normed | None, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...]
) -> str:
    return resolve(op, impl, x.device, lambda: _unsupported((x, *(normed or ())[:3]), weights, biases))


def _unsupported(
    inputs: tuple[Tensor | None, ...], weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...]
) -> str | None:
    x, *tensors = [t for t in (*inputs, *weights, *biases) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *tensors)):
        return "a gradient is asked for"
    if any(t.dtype != x.dtype for t in tensors) or torch.is_autocast_enabled(x.device.type):
        return f"its tensors have {', '.join(str(t.dtype) for t in (x, *tensors))}, expected one dtype and no autocast"
    for weight in weights:
        check("weight", weight, "N D", N=len(weights[0]), D=x.shape[-1])
        if type(weight) not in (Tensor, Parameter):
            return f"weight is a {type(weight).__name__}, expected a tensor"
        if weight.stride() != (weight.shape[1], 1):
            return f"weight has strides {weight.stride()}, expected contiguous rows"
    return misfit("linear/few_rows", x.device, x.dtype, x.shape[-1], len(weights[0]))
