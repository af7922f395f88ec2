"""y = x Wᵀ + b. Of few rows a product takes as long as reading W: there a kernel of sums takes the place of a matrix product's tiles."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from needlework.ops.api import Impl, resolve
from needlework.ops.common.shapes import check
from needlework.ops.linear.arguments import GateActivation, Maps, Normed, NormedHeads
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
    return _mapped(x, Maps(weight, bias), None, impl)


def glu(
    x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None = None, up_bias: Tensor | None = None,
    *, activation: Activation = "silu", impl: Impl = "auto",
) -> Tensor:  # fmt: skip
    """y [.. N] of x [.. D], two maps and what comes between them:

        y = φ(x Gᵀ + b) ⊙ (x Uᵀ + c),    φ = silu, or relu² with activation="relu2"

    gate, up [N D]; gate_bias, up_bias [N] or None. Otherwise as `linear`; in the kernel nothing is rounded but y.

    >>> import torch
    >>> from needlework.ops.linear import glu
    >>> with torch.no_grad():
    ...     glu(torch.randn(1, 64), torch.randn(100, 64), torch.randn(100, 64)).shape
    torch.Size([1, 100])
    """
    return _mapped(x, Maps(gate, gate_bias, up, up_bias), activation, impl)


def normed_linear(x: Normed, weight: Tensor, bias: Tensor | None = None, *, impl: Impl = "auto") -> tuple[Tensor, Tensor]:
    """`linear` of x's norm, and x + more. The kernel rounds that sum, and of the norm nothing.

    >>> import torch
    >>> from needlework.ops.linear import Normed, normed_linear
    >>> with torch.no_grad():
    ...     y, x = normed_linear(Normed(torch.randn(1, 64), torch.randn(1, 64), torch.ones(64), 1e-6), torch.randn(100, 64))
    >>> y.shape, x.shape
    (torch.Size([1, 100]), torch.Size([1, 64]))
    """
    return _normed(x, Maps(weight, bias), None, impl)


def normed_glu(
    x: Normed, gate: Tensor, up: Tensor, gate_bias: Tensor | None = None, up_bias: Tensor | None = None,
    *, activation: Activation = "silu", impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`glu` of x's norm, and x + more, as `normed_linear` has it.

    >>> import torch
    >>> from needlework.ops.linear import Normed, normed_glu
    >>> with torch.no_grad():
    ...     x = Normed(torch.randn(1, 64), torch.randn(1, 64), torch.ones(64), 1e-6)
    ...     y, total = normed_glu(x, torch.randn(100, 64), torch.randn(100, 64))
    >>> y.shape, torch.equal(total, x.x + x.more)
    (torch.Size([1, 100]), True)
    """
    return _normed(x, Maps(gate, gate_bias, up, up_bias), activation, impl)


def normed_heads_linear(
    x: NormedHeads, weight: Tensor, bias: Tensor | None = None, *, activation: GateActivation = "silu", impl: Impl = "auto"
) -> Tensor:  # fmt: skip
    """`linear` of heads that are normed and gated, y [.. N]. The kernel rounds nothing but y.

    weight [N H·V], bias [N] or None; activation: the gate's, "silu" or "sigmoid"; impl: as `linear`.

    >>> import torch
    >>> from needlework.ops.linear import NormedHeads, normed_heads_linear
    >>> with torch.no_grad():
    ...     normed_heads_linear(NormedHeads(torch.randn(1, 4, 16), torch.ones(16), torch.randn(1, 64), 1e-6), torch.randn(100, 64)).shape
    torch.Size([1, 100])
    """
    maps, row = Maps(weight, bias), x.x.flatten(-2)
    if _path(impl, None, row, maps, x.norm, x.gate) != "triton":
        return _by_products(x.made(activation).flatten(-2), maps, None)
    from needlework.ops.linear.few_heads import few_heads

    return few_heads(*x, *maps, activation).view(*row.shape[:-1], len(weight))


def _mapped(x: Tensor, maps: Maps, activation: Activation | None, impl: Impl) -> Tensor:
    if _path(impl, activation, x, maps) != "triton":
        return _by_products(x, maps, activation)
    from needlework.ops.linear.few_rows import few_rows

    return few_rows(x, *maps, activation).view(*x.shape[:-1], len(maps.weight))


def _normed(x: Normed, maps: Maps, activation: Activation | None, impl: Impl) -> tuple[Tensor, Tensor]:
    if _path(impl, activation, x.x, maps, x.more, x.norm) != "triton":
        whole = x.whole()
        return _by_products(x.of(whole), maps, activation), whole
    from needlework.ops.linear.few_rows import few_rows_normed

    y, total = few_rows_normed(*x, *maps, activation)
    return y.view(*x.x.shape[:-1], len(maps.weight)), x.x if x.more is None else total


def _by_products(x: Tensor, maps: Maps, activation: Activation | None) -> Tensor:
    y = F.linear(x, maps.weight, maps.bias)
    if activation is None or maps.up is None:
        return y
    return ACTIVATIONS[activation](y) * F.linear(x, maps.up, maps.up_bias)


def _path(impl: Impl, activation: Activation | None, x: Tensor, maps: Maps, *others: Tensor | None) -> str:
    if impl == "auto" and not few(x):
        return "torch"
    return resolve("linear" if activation is None else "glu", impl, x.device, lambda: _unsupported(x, maps, *others))


def _unsupported(x: Tensor, maps: Maps, *others: Tensor | None) -> str | None:
    tensors = [t for t in (*maps, *others) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *tensors)):
        return "a gradient is asked for"
    if any(t.dtype != x.dtype for t in tensors) or torch.is_autocast_enabled(x.device.type):
        return f"its tensors have {', '.join(str(t.dtype) for t in (x, *tensors))}, expected one dtype and no autocast"
    for weight in (maps.weight, *(() if maps.up is None else (maps.up,))):
        check("weight", weight, "N D", N=len(maps.weight), D=x.shape[-1])
        if type(weight) not in (Tensor, Parameter):
            return f"weight is a {type(weight).__name__}, expected a tensor"
        if weight.stride() != (weight.shape[1], 1):
            return f"weight has strides {weight.stride()}, expected contiguous rows"
    return misfit("linear/few_rows", x.device, x.dtype, x.shape[-1], len(maps.weight))
