"""Polar attention as torch.library custom ops, opaque to torch.compile: packing, the growth of pages, and what only the values
of integer tensors can show. All floating tensors of a call share one dtype, float32 or float64."""

import torch
from torch import Tensor

from needlework.ops.common.growth import came_from, final_rows, give_back, grow
from needlework.ops.common.packing import check_cu_seqlens, lengths, pad, unpad
from needlework.ops.common.precision import keep_precision
from needlework.ops.polar import chunk


def check_data(length: Tensor, P: int, window: int | None, cu_seqlens: Tensor | None, B: int, T: int) -> None:
    """What only the values of integer tensors show; called where torch.compile does not look."""
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, B, T)
    if len(length) and P != window and int(length.max()) > P:
        raise ValueError(f"initial_state.length: a sequence holds {int(length.max())} tokens, but the pages hold {P} rows")


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
    return *found, *grow((page_k, page_v), (k, v), length, cu_seqlens, window), length + n_new


@polar_fwd.register_fake
def _(q, k, v, alpha, beta, gamma, null_base, v_null, page_k, page_v, length, cu_seqlens, window, chunk_size, keep_pages):
    B, T, Hq, _ = q.shape
    if not keep_pages:
        P = 0
    elif cu_seqlens is None:
        P = final_rows(page_k.shape[1], T, window)
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
        P, T = page_k.shape[1], dk.shape[1]
        source = came_from(P, T, length, cu_seqlens, window)
        for dfinal, dpage, dnew in ((dpage_k, dinitial_k, dk), (dpage_v, dinitial_v, dv)):
            x = give_back(dfinal, source, P + T)
            dpage += x[:, :P]
            dnew += x[:, P:]
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

keep_precision(polar_fwd, polar_bwd)
