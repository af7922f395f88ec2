"""LUCID's fast path as operators that the compiler does not look into: packing, and pages in and out or behind a block table.

Tensors share one dtype, float32 or float64 (behind a table any); arguments have been checked, but for the values of cu_seqlens,
length and rows, which are data.
"""

import torch
from torch import Tensor

from needlework.ops.attention.growth import came_from, final_rows, give_back, grow
from needlework.ops.attention.pages import positions
from needlework.ops.common.packing import lengths, pad, unpad
from needlework.ops.lucid import chunk
from needlework.ops.lucid.arguments import LucidInputs, check_data
from needlework.ops.lucid.state import LucidState, PageRows
from needlework.ops.paged.placement import Placement, check_placement_data
from needlework.ops.runtime.custom_op import backward_operator, differentiable, fake, operator, step_operator
from needlework.ops.runtime.each import Ts, each
from needlework.ops.runtime.precision import keep_precision


@operator
def lucid_fwd(
    tokens: LucidInputs, initial_state: LucidState, cu_seqlens: Tensor | None,
    rowmax: bool, window: int | None, chunk_size: int, keep_pages: bool,
) -> tuple[Tensor, LucidState]:  # fmt: skip
    """y, and the final pages (of no rows without keep_pages)."""
    length = initial_state.length
    check_data(length, initial_state.k.shape[1], window, cu_seqlens, *tokens.k.shape[:2])
    tokens = LucidInputs(*_batch(cu_seqlens, *tokens))
    y = chunk.forward(tokens, initial_state, rowmax=rowmax, window=window, chunk_size=chunk_size)
    if keep_pages:
        page_k, page_y = grow((initial_state.k, initial_state.y), (tokens.k, y), length, cu_seqlens, window)
    else:
        page_k, page_y = initial_state.k[:, :0].clone(), initial_state.y[:, :0].clone()
    n_new = tokens.k.shape[1] if cu_seqlens is None else lengths(cu_seqlens)
    return y.contiguous() if cu_seqlens is None else unpad(y, cu_seqlens), LucidState(page_k, page_y, length + n_new)


@fake(lucid_fwd)
def _(
    tokens: LucidInputs, initial_state: LucidState, cu_seqlens: Tensor | None,
    rowmax: bool, window: int | None, chunk_size: int, keep_pages: bool,
):  # fmt: skip
    return tokens.v.new_empty(tokens.v.shape), fake_pages(tokens, initial_state, cu_seqlens, window, keep_pages)


def fake_pages(
    tokens: LucidInputs, initial_state: LucidState, cu_seqlens: Tensor | None, window: int | None, keep_pages: bool
) -> LucidState:
    """The final pages of a fake operator."""
    if not keep_pages:
        P = 0
    elif cu_seqlens is None:
        P = final_rows(initial_state.k.shape[1], tokens.k.shape[1], window)
    else:
        P = torch.library.get_ctx().new_dynamic_size()
    page_k, page_y = (x.new_empty(len(x), P, *x.shape[2:]) for x in (initial_state.k, initial_state.y))
    return LucidState(page_k, page_y, torch.empty_like(initial_state.length))


@backward_operator
def lucid_bwd(
    dy: Tensor, final: PageRows, y: Tensor, tokens: LucidInputs, initial_state: LucidState, cu_seqlens: Tensor | None,
    rowmax: bool, window: int | None, chunk_size: int,
) -> tuple[LucidInputs, PageRows]:  # fmt: skip
    """Gradients of `tokens` and `initial_state` from those of y and of the final pages."""
    dy, y = _batch(cu_seqlens, dy, y)
    tokens = LucidInputs(*_batch(cu_seqlens, *tokens))
    P, T = initial_state.k.shape[1], tokens.k.shape[1]
    through = None
    if final.k.shape[1]:  # a final page is a copy of columns: its k passes dk through, its y adds to dY
        source = came_from(P, T, initial_state.length, cu_seqlens, window)
        through = PageRows(*(give_back(x, source, P + T) for x in final))
        dy = dy + through.y[:, P:]
    (dk, dv, dbeta), before = chunk.backward(dy, y, tokens, initial_state, rowmax=rowmax, window=window, chunk_size=chunk_size)
    if through is not None:
        dk, before = dk + through.k[:, P:], PageRows(*(x + way[:, :P] for x, way in zip(before, through, strict=True)))
    own = dk, dv, dbeta
    if cu_seqlens is not None:
        own = each(lambda x: unpad(x, cu_seqlens), *own)
    # clones: slices of one tensor, and an operator's outputs may not share memory
    clone = lambda x: x.clone(memory_format=torch.contiguous_format)
    return LucidInputs(*each(clone, *own)), PageRows(*each(clone, *before))


@fake(lucid_bwd)
def fake_gradients(
    dy: Tensor, final: PageRows, saved: object, tokens: LucidInputs, initial_state: LucidState, *settings: object
) -> tuple[LucidInputs, PageRows]:
    """Those of a fake operator."""
    empty = lambda x: x.new_empty(x.shape)
    return LucidInputs(*each(empty, *tokens)), PageRows(*each(empty, initial_state.k, initial_state.y))


def _setup_context(ctx, inputs, output) -> None:
    tokens, initial_state, cu_seqlens, *ctx.settings, _ = inputs
    ctx.save_for_backward(output[0], *tokens, *initial_state, cu_seqlens)


def _backward(ctx, dy, dfinal_k, dfinal_y, dlength):
    found = lucid_bwd(dy, dfinal_k, dfinal_y, *ctx.saved_tensors, *ctx.settings)
    return *(dx if needed else None for dx, needed in zip(found, ctx.needs_input_grad, strict=False)), *[None] * 6


differentiable(lucid_fwd, _backward, _setup_context)


def _batch(cu_seqlens: Tensor | None, *tensors: *Ts) -> tuple[*Ts]:
    """One sequence per row, padded at the tail, where causality keeps the padding from every real token."""
    return tensors if cu_seqlens is None else each(lambda x: pad(x, cu_seqlens), *tensors)


@step_operator("k_pages", "y_pages")
def lucid_by_table(
    tokens: LucidInputs, k_pages: Tensor, y_pages: Tensor, where: Placement, rowmax: bool, window: int | None
) -> Tensor:
    """`solve_pages` of tensors of any one dtype: y [T H V]. The rows that a window shows are gathered."""
    (k, v, _), (block_table, length, rows, _) = tokens, where
    T, PG = len(k), k_pages.shape[1]
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
    new = LucidInputs(*each(lambda x: pad(x[None, :some].to(wide), ends), *tokens))
    with torch.autocast(k.device.type, enabled=False):
        solved = chunk.forward(new, LucidState(*held, past), rowmax=rowmax, window=window, chunk_size=64)
    live = (length >= 0).repeat_interleave(lengths(ends))
    y[:some] = torch.where(live[:, None, None], unpad(solved, ends)[0], 0).to(y.dtype)
    token = (live & (rows[:some] >= 0)).nonzero()[:, 0]
    row = rows[token]
    k_pages[row // PG, row % PG] = k[token]
    y_pages[row // PG, row % PG] = y[token]
    return y


@fake(lucid_by_table)
def _(tokens: LucidInputs, *_):
    return tokens.v.new_empty(tokens.v.shape)


keep_precision(lucid_fwd, lucid_bwd)
