"""LUCID's fast path as operators that the compiler does not look into: packing, and pages in and out or behind a block table.

Tensors share one dtype, float32 or float64 (behind a table any); arguments have been checked, but for the values of cu_seqlens,
length and rows, which are data.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.attention.growth import came_from, final_rows, give_back, grow
from needlework.ops.attention.pages import positions
from needlework.ops.common.packing import lengths, pad, unpad
from needlework.ops.lucid import chunk
from needlework.ops.lucid.arguments import check_data
from needlework.ops.paged.placement import Placement, check_placement_data
from needlework.ops.runtime.custom_op import backward_operator, differentiable, operator, step_operator
from needlework.ops.runtime.each import Ts, each
from needlework.ops.runtime.precision import keep_precision


@operator
def lucid_fwd(
    k: Tensor, v: Tensor, beta: Tensor | None, page_k: Tensor, page_y: Tensor, length: Tensor, cu_seqlens: Tensor | None,
    rowmax: bool, window: int | None, chunk_size: int, keep_pages: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y, and the final pages and length (pages of no rows without keep_pages)."""
    check_data(length, page_k.shape[1], window, cu_seqlens, *k.shape[:2])
    k, v, beta = _batch(cu_seqlens, k, v, beta)
    y = chunk.forward(k, v, beta, page_k, page_y, length, rowmax=rowmax, window=window, chunk_size=chunk_size)
    if keep_pages:
        page_k, page_y = grow((page_k, page_y), (k, y), length, cu_seqlens, window)
    else:
        page_k, page_y = page_k[:, :0].clone(), page_y[:, :0].clone()
    n_new = k.shape[1] if cu_seqlens is None else lengths(cu_seqlens)
    return y.contiguous() if cu_seqlens is None else unpad(y, cu_seqlens), page_k, page_y, length + n_new


@torch.library.register_fake(lucid_fwd)
def _(k, v, beta, page_k, page_y, length, cu_seqlens, rowmax, window, chunk_size, keep_pages):
    if not keep_pages:
        P = 0
    elif cu_seqlens is None:
        P = final_rows(page_k.shape[1], k.shape[1], window)
    else:
        P = torch.library.get_ctx().new_dynamic_size()
    pages = (x.new_empty(len(x), P, *x.shape[2:]) for x in (page_k, page_y))
    return v.new_empty(v.shape), *pages, torch.empty_like(length)


class Saved(NamedTuple):
    """What the backward wants of the forward."""

    k: Tensor
    v: Tensor
    beta: Tensor | None
    page_k: Tensor
    page_y: Tensor
    y: Tensor
    length: Tensor
    cu_seqlens: Tensor | None


@backward_operator
def lucid_bwd(
    dy: Tensor, dfinal_k: Tensor, dfinal_y: Tensor,
    k: Tensor, v: Tensor, beta: Tensor | None, page_k: Tensor, page_y: Tensor, y: Tensor, length: Tensor,
    cu_seqlens: Tensor | None, rowmax: bool, window: int | None, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of k, v, beta (empty without beta), page_k, page_y."""
    dy, k, v, beta, y = _batch(cu_seqlens, dy, k, v, beta, y)
    P, columns = page_k.shape[1], page_k.shape[1] + k.shape[1]
    through_k = through_y = None
    if dfinal_k.shape[1]:  # a final page is a copy of columns: its k passes dk through, its y adds to dY
        source = came_from(P, k.shape[1], length, cu_seqlens, window)
        through_k, through_y = (give_back(x, source, columns) for x in (dfinal_k, dfinal_y))
        dy = dy + through_y[:, P:]
    dk, dv, dbeta, dpage_k, dpage_y = chunk.backward(
        dy, k, v, beta, page_k, page_y, y, length, rowmax=rowmax, window=window, chunk_size=chunk_size
    )
    if through_k is not None and through_y is not None:
        dk, dpage_k, dpage_y = dk + through_k[:, P:], dpage_k + through_k[:, :P], dpage_y + through_y[:, :P]
    dbeta = k.new_empty(0) if dbeta is None else dbeta
    if cu_seqlens is not None:
        dk, dv, dbeta = (unpad(x, cu_seqlens) if x.numel() else x for x in (dk, dv, dbeta))
    # clones: slices of one tensor, and an operator's outputs may not share memory
    return each(lambda x: x.clone(memory_format=torch.contiguous_format), dk, dv, dbeta, dpage_k, dpage_y)


@torch.library.register_fake(lucid_bwd)
def _(dy, dfinal_k, dfinal_y, k, v, beta, page_k, page_y, *_):
    inputs = k, v, k.new_empty(0) if beta is None else beta, page_k, page_y
    return tuple(x.new_empty(x.shape) for x in inputs)


def _setup_context(ctx, inputs, output) -> None:
    k, v, beta, page_k, page_y, length, cu_seqlens, *ctx.settings, _ = inputs
    ctx.save_for_backward(*Saved(k, v, beta, page_k, page_y, output[0], length, cu_seqlens))


def _backward(ctx, dy, dfinal_k, dfinal_y, dlength):
    dk, dv, dbeta, dpage_k, dpage_y = lucid_bwd(dy, dfinal_k, dfinal_y, *Saved(*ctx.saved_tensors), *ctx.settings)
    dbeta = dbeta if ctx.needs_input_grad[2] else None
    return dk, dv, dbeta, dpage_k, dpage_y, None, None, None, None, None, None


differentiable(lucid_fwd, _backward, _setup_context)


def _batch(cu_seqlens: Tensor | None, *tensors: *Ts) -> tuple[*Ts]:
    """One sequence per row, padded at the tail, where causality keeps the padding from every real token."""
    return tensors if cu_seqlens is None else each(lambda x: pad(x, cu_seqlens), *tensors)


@step_operator("k_pages", "y_pages")
def lucid_by_table(
    k: Tensor, v: Tensor, beta: Tensor | None, k_pages: Tensor, y_pages: Tensor, block_table: Tensor, length: Tensor, rows: Tensor,
    cu_seqlens: Tensor | None, rowmax: bool, window: int | None,
) -> Tensor:  # fmt: skip
    """`solve_pages` of tensors of any one dtype: y [T H V]. The rows that a window shows are gathered."""
    T, PG = len(k), k_pages.shape[1]
    where = Placement(block_table, length, rows, cu_seqlens)
    check_placement_data(where, T, len(k_pages), PG)
    y = v.new_zeros(v.shape)
    if not y.numel():
        return y
    wide, ends = torch.promote_types(k.dtype, torch.float32), where.ends(T)
    past = (length - lengths(ends)).clamp(min=0)
    most = int(past.max())
    at = positions(past, most if window is None else min(most, window), window)
    # of the newest W tokens the oldest is before the window of the first new one
    seen = at >= 0 if window is None else at > (past[:, None] - window).clamp(min=-1)
    at = torch.where(seen, at, 0)
    page = torch.where(seen, block_table.long().gather(1, at // PG), 0) if most else at
    held = each(lambda x: torch.where(seen[..., None, None], x[page, at % PG].to(wide), 0), k_pages, y_pages)
    some = int(ends[-1])
    tokens = each(lambda x: pad(x[None, :some].to(wide), ends), k, v, beta)
    with torch.autocast(k.device.type, enabled=False):
        solved = chunk.forward(*tokens, *held, past, rowmax=rowmax, window=window, chunk_size=64)
    live = (length >= 0).repeat_interleave(lengths(ends))
    y[:some] = torch.where(live[:, None, None], unpad(solved, ends)[0], 0).to(y.dtype)
    token = (live & (rows[:some] >= 0)).nonzero()[:, 0]
    row = rows[token]
    k_pages[row // PG, row % PG] = k[token]
    y_pages[row // PG, row % PG] = y[token]
    return y


@torch.library.register_fake(lucid_by_table)
def _(k, v, *_):
    return v.new_empty(v.shape)


keep_precision(lucid_fwd, lucid_bwd)
