"""Polar attention as torch.library custom ops, opaque to torch.compile: packing, the growth of pages, and what only the values
of integer tensors can show. All floating tensors of a call share one dtype, float32 or float64."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.packing import check_cu_seqlens, lengths, pad, unpad
from ..common.pages import append
from . import chunk


def check_data(length: Tensor, P: int, window: int | None, cu_seqlens: Tensor | None, B: int, T: int) -> None:
    """What only the values of integer tensors show; called where torch.compile does not look."""
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, B, T)
    if len(length) and P != window and int(length.max()) > P:
        raise ValueError(f"initial_state.length: a sequence holds {int(length.max())} tokens, but the pages hold {P} rows")


def _grow(pages, new, length: Tensor, cu_seqlens: Tensor | None, window: int | None) -> tuple[Tensor, ...]:
    """`append`, with a number of rows that shapes alone decide unless sequences are packed."""
    P, T = pages[0].shape[1], new[0].shape[1]
    n_new = torch.full_like(length, T) if cu_seqlens is None else lengths(cu_seqlens)
    grown = append(pages, new, length, n_new, window)
    if cu_seqlens is not None:
        return grown
    missing = min(P + T, window or P + T) - grown[0].shape[1]
    return tuple(F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing)) for x in grown)


@torch.library.custom_op("needlework::polar_fwd", mutates_args=())
def polar_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    gamma: Tensor,
    null_base: Tensor,
    v_null: Tensor,
    page_k: Tensor,
    page_v: Tensor,
    length: Tensor,
    cu_seqlens: Tensor | None,
    window: int | None,
    chunk_size: int,
    keep_pages: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """direction, magnitude, what the backward needs [B T Hq 4], and the final pages and length (no rows without keep_pages)."""
    check_data(length, page_k.shape[1], window, cu_seqlens, *q.shape[:2])
    if cu_seqlens is not None:
        q, k, v = (pad(x, cu_seqlens) for x in (q, k, v))
    parameters = alpha, beta, gamma, null_base, v_null
    found = chunk.forward(q, k, v, *parameters, page_k, page_v, length, window=window, chunk_size=chunk_size)
    if cu_seqlens is not None:
        found = tuple(unpad(x, cu_seqlens) for x in found)
    if not keep_pages:
        return *found, page_k[:, :0].clone(), page_v[:, :0].clone(), length.clone()
    n_new = q.shape[1] if cu_seqlens is None else lengths(cu_seqlens)
    return *found, *_grow((page_k, page_v), (k, v), length, cu_seqlens, window), length + n_new


@polar_fwd.register_fake
def _(q, k, v, alpha, beta, gamma, null_base, v_null, page_k, page_v, length, cu_seqlens, window, chunk_size, keep_pages):
    B, T, Hq, _ = q.shape
    if not keep_pages:
        P = 0
    elif cu_seqlens is None:
        P = min(page_k.shape[1] + T, window or page_k.shape[1] + T)
    else:
        P = torch.library.get_ctx().new_dynamic_size()
    return (
        q.new_empty(B, T, *v_null.shape),
        q.new_empty(B, T, Hq),
        q.new_empty(B, T, Hq, 4),
        page_k.new_empty(len(page_k), P, *page_k.shape[2:]),
        page_v.new_empty(len(page_v), P, *page_v.shape[2:]),
        torch.empty_like(length),
    )


@torch.library.custom_op("needlework::polar_bwd", mutates_args=())
def polar_bwd(
    ddirection: Tensor,
    dmagnitude: Tensor,
    dpage_k: Tensor,
    dpage_v: Tensor,
    direction: Tensor,
    saved: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    gamma: Tensor,
    null_base: Tensor,
    v_null: Tensor,
    page_k: Tensor,
    page_v: Tensor,
    length: Tensor,
    cu_seqlens: Tensor | None,
    window: int | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of polar_fwd's ten floating inputs, in their order."""
    tokens = ddirection, dmagnitude, direction, saved, q, k, v
    if cu_seqlens is not None:
        tokens = tuple(pad(x, cu_seqlens) for x in tokens)
    parameters = alpha, beta, gamma, null_base, v_null
    dq, dk, dv, *dparameters, dinitial_k, dinitial_v = chunk.backward(
        *tokens, *parameters, page_k, page_v, length, window=window, chunk_size=chunk_size
    )
    if dpage_k.shape[1]:
        # growing the numbers 1, 2, … of the rows in place of the rows tells where each final row came from; 0 is an empty one
        P, T = page_k.shape[1], dk.shape[1]
        number = torch.arange(1, P + T + 1, device=q.device).expand(len(length), -1)
        (source,) = _grow((number[:, :P],), (number[:, P:],), length, cu_seqlens, window)  # [N P']
        for dfinal, dpage, dnew in ((dpage_k, dinitial_k, dk), (dpage_v, dinitial_v, dv)):
            x = dfinal.new_zeros(len(length), 1 + P + T, *dfinal.shape[2:])
            x.scatter_add_(1, source[:, :, None, None].expand_as(dfinal), dfinal)
            dpage += x[:, 1 : 1 + P]
            dnew += x[:, 1 + P :]
    if cu_seqlens is not None:
        dq, dk, dv = (unpad(x, cu_seqlens) for x in (dq, dk, dv))
    return dq, dk, dv, *dparameters, dinitial_k, dinitial_v


@polar_bwd.register_fake
def _(ddirection, dmagnitude, dpage_k, dpage_v, direction, saved, *inputs_and_settings):
    return tuple(x.new_empty(x.shape) for x in inputs_and_settings[:10])


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.window, ctx.chunk_size, _ = inputs
    ctx.save_for_backward(output[0], output[2], *tensors)


def _backward(ctx, ddirection, dmagnitude, dsaved, dpage_k, dpage_v, dlength):
    gradients = polar_bwd(ddirection, dmagnitude, dpage_k, dpage_v, *ctx.saved_tensors, ctx.window, ctx.chunk_size)
    return *gradients, None, None, None, None, None


polar_fwd.register_autograd(_backward, setup_context=_setup_context)

for device in ("cpu", "cuda"):
    for op in (polar_fwd, polar_bwd):
        # a custom op's inside runs under its caller's autocast unless it says otherwise
        op.register_autocast(device, torch.float32)
