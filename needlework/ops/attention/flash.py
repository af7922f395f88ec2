"""Softmax attention in a window or over packed documents by PyTorch's flash kernels, which compile nothing and look at no block of keys
that a block of queries does not see: half precision.

torch.nn.attention.varlen calls them too. Here they are operators of ours, because its call wants a flag for fewer heads of keys in torch
2.13, which 2.11 does not have, and takes the longest document as a number, which a traced program does not have.
"""

from itertools import pairwise

import torch
from torch import Tensor

from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.common.remembered import remembered
from needlework.ops.common.shapes import behind
from needlework.ops.runtime.custom_op import backward_operator, differentiable, operator
from needlework.ops.runtime.target import compute_capability

FORWARD, BACKWARD = torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward
WIDEST, MULTIPLE = 256, 8  # numbers a head


def takes(q: Tensor, v: Tensor) -> bool:
    """Whether `flash_attention` takes tensors like these: half precision on a GPU from Ampere on, at most 256 numbers a head."""
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or max(q.shape[-1], v.shape[-1]) > WIDEST:
        return False
    return torch.backends.cuda.is_flash_attention_available() and compute_capability(q.device) >= (8, 0)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window: int | None, scale: float | None
) -> Tensor:
    """o [B T Hq V] of q [B T Hq d] and k, v [B T Hkv ·]; scale None: d^-1/2. Keys and values that differ in width, or are no multiple of 8
    wide, get zeros behind."""
    K, V = q.shape[-1], v.shape[-1]
    width = -(-max(K, V) // MULTIPLE) * MULTIPLE
    o, _, _ = flash_fwd(*(behind(x, width) for x in (q, k, v)), cu_seqlens, window, K**-0.5 if scale is None else scale)
    return o[..., :V]


@operator
def flash_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window: int | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """o, the logarithm of each row's sum, float32, and the tokens of the longest sequence, on the CPU: its gradient waits for no GPU."""
    B, T = q.shape[:2]
    ends = [0, T] if cu_seqlens is None else check_cu_seqlens(cu_seqlens, B, T)
    longest = max(b - a for a, b in pairwise(ends))
    o, lse, *_ = FORWARD(
        *_rows(cu_seqlens, q, k, v), *_lengths(cu_seqlens, longest, q), 0.0, window is None, False, scale=scale, **_seen(window)
    )
    return o.view(q.shape), lse, torch.tensor(longest)


@torch.library.register_fake(flash_fwd)
def _(q, k, v, cu_seqlens, window, scale):
    B, T, H, _ = q.shape
    lse = q.new_empty(*(() if cu_seqlens is not None else (B,)), H, T, dtype=torch.float32)
    return q.new_empty(q.shape), lse, torch.empty((), dtype=torch.int64, device="cpu")


@backward_operator
def flash_bwd(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, longest: Tensor,
    cu_seqlens: Tensor | None, window: int | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv."""
    drawn = torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0)  # for a dropout, of which there is none
    dq, dk, dv = BACKWARD(
        *_rows(cu_seqlens, do, q, k, v, o), lse, *_lengths(cu_seqlens, int(longest), q), 0.0, window is None, *drawn,
        scale=scale, **_seen(window),
    )  # fmt: skip
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


@torch.library.register_fake(flash_bwd)
def _(do, q, k, v, o, lse, longest, cu_seqlens, window, scale):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output):
    q, k, v, cu_seqlens, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


def _backward(ctx, do, *_):
    *kept, cu_seqlens = ctx.saved_tensors
    return *flash_bwd(do, *kept, cu_seqlens, *ctx.settings), None, None, None


differentiable(flash_fwd, _backward, _save)


def _rows(cu_seqlens: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Packed tokens have no axis of a batch; a token's numbers lie side by side."""
    return tuple((x if cu_seqlens is None else x[0]).contiguous() for x in tensors)


def _lengths(cu_seqlens: Tensor | None, longest: int, q: Tensor) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Of queries and of keys. Where no document had two tokens, the kernels would take heads of a group for rows."""
    ends = cu_seqlens
    if ends is not None and (ends.dtype, ends.device) != (torch.int32, q.device):
        ends = _int32(ends, q.device)
    return ends, ends, max(longest, 2), max(longest, 2)


@remembered
def _int32(cu_seqlens: Tensor, device: torch.device) -> Tensor:
    return cu_seqlens.to(device, torch.int32)


def _seen(window: int | None) -> dict[str, int]:
    """Keys before and after its own that a query sees; −1: all, as causal as the call is."""
    before, after = (-1, -1) if window is None else (window - 1, 0)
    return {"window_size_left": before, "window_size_right": after}
