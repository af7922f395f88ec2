"""y = x Wᵀ + b. Of few rows a product is as long as the reading of W: there a kernel of sums takes the place of the library's tiles."""

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from needlework.ops.api import Impl, resolve
from needlework.ops.common.shapes import check
from needlework.ops.runtime.launch_configs import misfit

FEW = 1  # rows, up to which the kernel is faster than a matrix product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, impl: Impl = "auto") -> Tensor:
    """y [.. N] of x [.. D]: torch.nn.functional.linear, by a kernel of its own where no gradient is asked for and x has one row.

        y = x Wᵀ + b

    weight [N D], bias [N] or None. One dtype; sums are made in float32 (float64 of float64) and rounded once.
    The kernel begins to read W before the kernel in front of it has ended: nothing that runs just before may write W.
    impl: "auto": the kernel on a CUDA device, where it can take the call; "triton": of any number of rows; "torch", "reference": PyTorch.
    Raises ValueError with the reason for impl="triton" where that cannot be.

    >>> import torch
    >>> from needlework.ops.linear import linear
    >>> with torch.no_grad():
    ...     linear(torch.randn(1, 64), torch.randn(100, 64)).shape
    torch.Size([1, 100])
    """
    if impl == "auto" and x.numel() != FEW * x.shape[-1]:
        return F.linear(x, weight, bias)
    if resolve("linear", impl, x.device, lambda: _unsupported(x, weight, bias)) != "triton":
        return F.linear(x, weight, bias)
    from needlework.ops.linear.few_rows import few_rows

    rows = x.reshape(-1, x.shape[-1])
    return few_rows(rows, weight, bias).view(*x.shape[:-1], len(weight))


def _unsupported(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    check("weight", weight, "N D", D=x.shape[-1])
    if type(weight) not in (Tensor, Parameter):
        return f"weight is a {type(weight).__name__}, expected a tensor"
    tensors = [t for t in (x, weight, bias) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "a gradient is asked for"
    if len({t.dtype for t in tensors}) > 1 or torch.is_autocast_enabled(x.device.type):
        return f"its tensors have {', '.join(str(t.dtype) for t in tensors)}, expected one dtype and no autocast"
    if weight.stride() != (weight.shape[1], 1):
        return f"weight has strides {weight.stride()}, expected contiguous rows"
    return misfit("linear/few_rows", x.device, x.dtype, x.shape[-1], len(weight))
