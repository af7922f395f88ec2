"""Causal depthwise convolution of tokens. Knows no op; `kernels/conv.py` has it in one pass.

c_t = Σ_j w_j ⊙ x_{t−past+j},  j = 0 … past        zeros before a sequence, or the inputs that its state kept
y = c, silu(c) or x + c                             sums in the wider of x's and the weight's dtype, y in x's
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from needlework.ops.api import Impl, resolve
from needlework.ops.common.packing import document_positions, lengths, sequences
from needlework.ops.common.shapes import check
from needlework.ops.runtime.launch_configs import misfit

After = Literal["none", "silu", "add"]
TAPS = 4  # that the kernels hold at most


def causal_conv(
    x: Tensor, weight: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None,
    *, parts: Sequence[int] | None = None, after: After = "none", impl: Impl = "auto",
) -> tuple[tuple[Tensor, ...], Tensor]:  # fmt: skip
    """y [B T C] and the new state, the last `past` inputs of each sequence.

    x [B T C]; weight [C past+1], two taps or more, the newest last; state [N past C], the inputs before; T may be below `past`.
    parts: y comes in tensors of so many channels each (q, k and v, say, of one product); None for one of all C. ValueError unless
        they sum to C.
    cu_seqlens: [N+1] integers from 0 to T that never fall. Their values are not checked: reading them back would wait for the GPU.
    impl: "triton" begins without a state, with at most 4 taps.

    >>> import torch
    >>> from needlework.ops.common.conv import causal_conv
    >>> x, weight = torch.randn(1, 100, 12), torch.randn(12, 4)  # [B T C] and four taps
    >>> (q, k, v), state = causal_conv(x, weight, parts=[4, 4, 4], after="silu")
    >>> q.shape, state.shape  # the state is the last three inputs
    (torch.Size([1, 100, 4]), torch.Size([1, 3, 12]))
    """
    check("x", x, "B T C")
    check("weight", weight, "C past+1", C=x.shape[-1])
    past = weight.shape[1] - 1
    parts = [x.shape[-1]] if parts is None else list(parts)
    if sum(parts) != x.shape[-1]:
        raise ValueError(f"parts: got {parts}, expected channels that sum to x's {x.shape[-1]}")

    def unfit() -> str | None:
        if state is not None:
            return "a state is given"
        return (
            f"{past + 1} taps, at most {TAPS}"
            if past + 1 > TAPS
            else misfit("common/conv", x.device, x.dtype, *x.shape[2:] * 2)
        )

    path = resolve("causal_conv", impl, x.device, unfit)
    (_, T, C), position = x.shape, None
    if cu_seqlens is None:
        before = x.new_zeros(len(x), past, C) if state is None else state.to(x.dtype)
        last = torch.cat([before, x[:, max(0, T - past) :]], 1)[:, -past:]
    else:
        N = sequences(cu_seqlens, len(x))
        before = x.new_zeros(N, past, C) if state is None else state.to(x.dtype)
        document, position = document_positions(cu_seqlens, T)
        line = torch.cat([before.flatten(0, 1), x[0]])  # every document's past, then the tokens

        def earlier(document: Tensor, position: Tensor, lag: int) -> Tensor:
            """The inputs `lag` tokens before `position` of `document`."""
            at = position - lag
            return line[torch.where(at >= 0, N * past + cu_seqlens[document] + at, document * past + past + at)]

        every, length = torch.arange(N, device=x.device), lengths(cu_seqlens)
        last = torch.stack([earlier(every, length, past - j) for j in range(past)], 1)
    if path == "triton":
        from needlework.ops.common.kernels.conv import conv_triton

        return tuple(conv_triton(x.contiguous(), weight, position, after, parts)), last
    if position is None:
        line = torch.cat([before, x], 1)
        seen = (line[:, j : j + T] for j in range(past + 1))
    else:
        seen = (earlier(document, position, past - j)[None] for j in range(past + 1))
    c = sum(tap * inputs for tap, inputs in zip(weight.unbind(-1), seen, strict=True)).to(x.dtype)
    y = {"none": lambda: c, "silu": lambda: F.silu(c), "add": lambda: x + c}[after]()
    return y.split(parts, -1), last
