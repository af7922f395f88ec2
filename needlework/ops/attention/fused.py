"""Causal softmax attention by the fastest of PyTorch's kernels: of whole sequences cuDNN's or flash's (`asked`), in a window or over packed
documents flash's (`flash.py`) or, in float32 and with decays, FlexAttention's, without a mask of T × T.

Windows and documents are one bound: query i sees keys j with oldest[i] <= j <= i. It never falls from query to query, so which blocks
of keys a block of queries sees whole, in part or not at all follows from its first and its last row.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from needlework.ops.attention.flash import MULTIPLE, flash_attention, takes
from needlework.ops.common.packing import check_cu_seqlens, sequences
from needlework.ops.common.shapes import behind
from needlework.ops.runtime.constant import constant
from needlework.ops.runtime.custom_op import operator, refuse_tangents
from needlework.ops.runtime.target import compute_capability

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
KINDS = 256  # of calls that FlexAttention is compiled for in a process
FASTEST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
WITHOUT_PLAN = FASTEST[1:]
FEW = 128  # tokens
LONG = 10**12  # of a call, which takes cuDNN 1.2 to 2 ms less: 30 to 50 of them win back a plan
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fastest() -> AbstractContextManager:
    """Inside, scaled_dot_product_attention asks these kernels in this order."""
    return sdpa_kernel(FASTEST, set_priority=True)


def causal(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, enable_gqa: bool) -> Tensor:
    """o [B Hq T V] of whole sequences. On a GPU no scores of T × T are made, which are what PyTorch falls back to, but in float64. Widths
    that are no multiples of 8 get zeros behind. What the first of `asked` does not take the next one does; values of another width than
    keys, which cuDNN may refuse, go to flash with zeros behind. In float32 and of more than 256 numbers a head the kernel that is left
    wants as many heads of keys as of queries."""
    if not q.is_cuda:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
    K, V, heads = q.shape[-1], v.shape[-1], q.shape[1] // k.shape[1]
    scale = K**-0.5 if scale is None else scale
    q, k, v = (behind(x, -(-x.shape[-1] // MULTIPLE) * MULTIPLE) for x in (q, k, v))
    first = FASTEST
    if not takes(q, v):
        k, v = (x.repeat_interleave(heads, 1) if enable_gqa else x for x in (k, v))
        enable_gqa = False
    elif q.shape[-1] == v.shape[-1] or cudnn_takes(q, v):
        first = asked(q, v)
    else:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return _of_values(flash_attention(q, k, v, None, None, scale).transpose(1, 2), V)
    with sdpa_kernel(first, set_priority=True):
        return _of_values(scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa), V)


def _of_values(o: Tensor, V: int) -> Tensor:
    """o without what was behind its values. The gradient of a narrow of all of o would be a copy."""
    return o if o.shape[-1] == V else o.narrow(-1, 0, V)


def cudnn_takes(q: Tensor, v: Tensor) -> bool:
    """Whether cuDNN takes keys and values of these widths, multiples of 8, as PyTorch asks it."""
    K, V, arch, version = q.shape[-1], v.shape[-1], compute_capability(q.device), cudnn_version()
    if arch == (9, 0) and version >= 91000:
        return max(K, V) <= 256
    return max(K, V) <= 128 or (arch[0] == 10 and version >= 91100 and (K, V) == (192, 128))


@constant
def cudnn_version() -> int:
    """91000 of 9.10.0; 0 of none."""
    return torch.backends.cudnn.version() or 0


def asked(q: Tensor, v: Tensor) -> list[SDPBackend]:
    """PyTorch's kernels for q [B H T d] and v [B · T V], in order. On Hopper cuDNN takes about half of flash's time, and some 60 ms to plan
    the first call of each shape. It is asked first where that pays: for training, whose shapes are few, for lengths that are multiples of FEW,
    for calls of LONG operations, and for values of another width than keys, which flash does not take. For any other prompt it is not asked
    at all: an order alone would not keep it from a process's first call. PyTorch's own order changes once somebody has asked for one."""
    B, H, T, K = q.shape
    V = v.shape[-1]
    planned = torch.is_grad_enabled() or K != V or T % FEW == 0 or B * H * T * T * (K + V) >= LONG
    return FASTEST if planned else WITHOUT_PLAN


def streams(q: Tensor, v: Tensor) -> bool:
    """Whether `streamed` takes tensors like these: on a GPU, no float64, at least 16 numbers a head."""
    return q.is_cuda and q.dtype in DTYPES and min(q.shape[-1], v.shape[-1]) >= 16


def streamed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    window: int | None,
    scale: float | None,
    decay: Tensor | None = None,
) -> Tensor:
    """o [B T Hq V] of q [B T Hq d] and k, v [B T Hkv ·], which are not expanded; scale None: d^-1/2.

    decay: G [B T Hq], float64, of which G_i − G_j is added to the scaled scores; None: nothing.
    """
    if decay is None and takes(q, v):
        return flash_attention(q, k, v, cu_seqlens, window, scale)
    from torch.nn.attention.flex_attention import flex_attention

    if torch.compiler.is_compiling():
        attend = flex_attention
    else:
        refuse_tangents("streamed attention", (q, k, v, decay))  # a compiled function drops them
        attend = _compiled()
    mask, several = visible(oldest(q, cu_seqlens, window)), q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = attend(
        q, k, v, score_mod=None if decay is None else _forgetting(decay), block_mask=mask, scale=scale, enable_gqa=several
    )
    return o.transpose(1, 2)


def _forgetting(decay: Tensor) -> Callable[..., Tensor]:
    """What FlexAttention adds to a score. A row's own G cancels in its softmax, and its gradient is 0 but for rounding, which is kept: it
    is that of the same pairs as the keys', and both cancel in a gate's sum over tokens after it. Without it a gate's gradient is 6 to 27
    times over its budget."""
    keys = decay.transpose(1, 2).contiguous()  # [B Hq T]
    own = keys.clone()  # FlexAttention takes no gradient of one tensor in two places

    def forget(score, batch, head, i, j):
        return score + (own[batch, head, i] - keys[batch, head, j]).to(score.dtype)

    return forget


@cache
def _compiled() -> Callable[..., Tensor]:
    """As it is, it would make the T × T scores, and so does what torch.compile falls back to after 8 kinds of calls: dtypes, widths, masks,
    with gradients and without. Here it may have KINDS of them, and then raises. torch.compile loads all of torch._dynamo: not where this is
    imported."""
    from torch._dynamo import config
    from torch._dynamo.exc import BackendCompilerFailed
    from torch.nn.attention.flex_attention import flex_attention

    compiled = config.patch(recompile_limit=KINDS)(torch.compile(flex_attention, fullgraph=True))

    def attend(q: Tensor, k: Tensor, v: Tensor, **settings: object) -> Tensor:
        try:
            return compiled(q, k, v, **settings)
        except BackendCompilerFailed as error:  # its own last line is how to ask PyTorch for more
            raise RuntimeError(
                f"streamed attention: PyTorch did not compile FlexAttention for {q.dtype} heads of {q.shape[-1]} and values of {v.shape[-1]}: "
                f"{error.inner_exception}"
            ) from error

    return attend


def oldest(q: Tensor, cu_seqlens: Tensor | None, window: int | None) -> Tensor:
    """[T] int32: the first key that each query sees."""
    token = torch.arange(q.shape[1], device=q.device)
    bound = torch.zeros_like(token)
    if cu_seqlens is not None:
        sequences(cu_seqlens, len(q))
        bound = document_starts(cu_seqlens, *q.shape[:2]).to(q.device)
    if window is not None:
        bound = torch.maximum(bound, token - (window - 1))
    return bound.to(torch.int32)


@operator
def document_starts(cu_seqlens: Tensor, B: int, T: int) -> Tensor:
    """[T] the first token of each token's document. An operator: what cu_seqlens holds is checked where torch.compile does not look."""
    check_cu_seqlens(cu_seqlens, B, T)
    token = torch.arange(T, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return cu_seqlens[torch.searchsorted(cu_seqlens, token, right=True) - 1].to(torch.int64)


@torch.library.register_fake(document_starts)
def _(cu_seqlens, B, T):
    return cu_seqlens.new_empty(T, dtype=torch.int64)


def visible(oldest: Tensor) -> "BlockMask":
    """Queries [T] and the keys from oldest on to their own, by blocks: all that is stored is a table of (T / 128)² numbers."""
    from torch.nn.attention.flex_attention import BlockMask

    T, device = len(oldest), oldest.device
    n = -(-T // BLOCK)
    block = torch.arange(n, dtype=torch.int32, device=device)
    first, last = oldest[block * BLOCK], oldest[((block + 1) * BLOCK - 1).clamp(max=T - 1)]
    begin = first // BLOCK
    # from here on every row of the block sees the whole of a block of keys before its own
    whole = torch.minimum((last + BLOCK - 1) // BLOCK, block)
    column, row = block[None, :], block[:, None]
    part = torch.where(column < (whole - begin)[:, None], begin[:, None] + column, row)
    full = (whole[:, None] + column).clamp(max=n - 1)

    def seen(batch, head, i, j):
        return (j <= i) & (j >= oldest[i])

    shaped = (x[None, None].contiguous() for x in (whole - begin + 1, part, block - whole, full))
    return BlockMask.from_kv_blocks(*shaped, BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(T, T))
