"""LUCID's solve with pages as operators: in front of the tokens that follow them, so that kernels walk one sequence, whole blocks of
columns, the newest last.

Where pages end inside a block, its first columns hold no token: keys and values of zero there, which overlap with nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.attention.growth import came_from, give_back, grow
from needlework.ops.common.packing import lengths, pad, unpad
from needlework.ops.lucid.arguments import LucidInputs, check_data
from needlework.ops.lucid.custom_op import fake_gradients, fake_pages
from needlework.ops.lucid.solve.launches import ENGINE, Saved, Task, alignment, backward
from needlework.ops.lucid.solve.op import check_blocks, solved
from needlework.ops.lucid.state import LucidState, PageRows
from needlework.ops.runtime.custom_op import backward_operator, differentiable, fake, operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import LaunchConfig, launch_config


class Joined(NamedTuple):
    """Sequence n of [N P] pages and of the tokens is row n of a batch, or, packed, what lies between two of cu_seqlens."""

    columns: int  # of pages, whole blocks
    T: int  # of a row, pages and tokens
    cu_seqlens: Tensor | None  # of pages and tokens together
    skip: Tensor | None  # [N] int32 columns that hold no token; None: no columns
    row: Tensor | None  # [N columns] where in the pages each lies, P for none
    from_page: Tensor | None  # [N columns] packed: places of the pages' columns
    from_token: Tensor | None  # [T] and of the tokens

    @classmethod
    def of(cls, initial_state: LucidState, T: int, cu_seqlens: Tensor | None, window: int | None, C: int) -> "Joined":
        N, P = initial_state.k.shape[:2]
        if P == 0:
            return cls(0, T, cu_seqlens, None, None, None, None)
        columns, length = -(-P // C) * C, initial_state.length
        held = length.clamp(max=P)
        position = length[:, None] - columns + torch.arange(columns, device=length.device)
        row = torch.where(position >= (length - held)[:, None], position if window is None else position % window, P)
        skip = (columns - held).to(torch.int32)
        if cu_seqlens is None:
            return cls(columns, columns + T, None, skip, row, None, None)
        n = torch.arange(N + 1, device=length.device)
        starts = cu_seqlens.to(device=length.device, dtype=torch.int64) + n * columns
        token = torch.arange(T, device=length.device)
        before = torch.searchsorted(cu_seqlens.to(length.device), token, right=True)
        from_page = starts[:-1, None] + torch.arange(columns, device=length.device)
        return cls(columns, N * columns + T, starts, skip, row, from_page, token + before * columns)

    def join(self, page: Tensor, tokens: Tensor) -> Tensor:
        """[N P ...] and [B T ...] -> [B columns + T ...], or packed."""
        if not self.columns:
            return tokens
        padded = torch.cat([page, page.new_zeros(len(page), 1, *page.shape[2:])], 1)
        first = padded[torch.arange(len(page), device=page.device)[:, None], self.row]
        if self.from_token is None:
            return torch.cat([first, tokens], 1)
        out = tokens.new_empty(1, self.T, *tokens.shape[2:])
        out[0, self.from_page] = first
        out[0, self.from_token] = tokens[0]
        return out

    def part(self, x: Tensor, P: int) -> tuple[Tensor | None, Tensor]:
        """The inverse of `join`, for gradients: of the pages' rows, zero where a row is empty (None: no pages), and of the tokens."""
        if not self.columns:
            return None, x
        assert self.skip is not None  # there are columns
        N = len(self.skip)
        packed = self.from_token is not None
        first, tokens = (
            (x[0, self.from_page], x[:, self.from_token]) if packed else (x[:, : self.columns], x[:, self.columns :])
        )
        page = x.new_zeros(N, P + 1, *x.shape[2:])
        page[torch.arange(N, device=x.device)[:, None], self.row] = first
        return page[:, :P], tokens


def lucid_after(
    initial_state: LucidState, tokens: LucidInputs, cu_seqlens: Tensor | None, rowmax: bool, window: int | None, keep: bool
) -> tuple[Tensor, LucidState]:
    """y [B T H V] in k's dtype and the final pages (of no rows without `keep`), of contiguous tensors; differentiable in them."""
    y, *final = lucid_pages(*tokens, *initial_state, cu_seqlens, rowmax, window, keep)
    return y, LucidState(*final)


@operator
def lucid_pages(
    tokens: LucidInputs, initial_state: LucidState, cu_seqlens: Tensor | None, rowmax: bool, window: int | None, keep: bool
) -> tuple[Tensor, LucidState]:
    """y and the final pages."""
    y, final, _ = _call(tokens, initial_state, cu_seqlens, rowmax, window, keep, save=False)
    return y, final


@operator
def lucid_pages_fwd(
    tokens: LucidInputs, initial_state: LucidState, cu_seqlens: Tensor | None, rowmax: bool, window: int | None, keep: bool
) -> tuple[Tensor, LucidState, Saved]:
    """y, the final pages, and what the backward takes."""
    return _call(tokens, initial_state, cu_seqlens, rowmax, window, keep, save=True)


def _call(
    tokens: LucidInputs,
    initial_state: LucidState,
    cu_seqlens: Tensor | None,
    rowmax: bool,
    window: int | None,
    keep: bool,
    *,
    save: bool,
) -> tuple[Tensor, LucidState, Saved]:
    k, length, (B, T) = tokens.k, initial_state.length, tokens.k.shape[:2]
    check_data(length, initial_state.k.shape[1], window, cu_seqlens, B, T)
    joined, task = _task(tokens, initial_state, cu_seqlens, rowmax, window)
    y, saved = solved(_joint(joined, task, PageRows(*initial_state[:2]), tokens), task, save)
    (y,) = task.align.restore(y)
    _, y = joined.part(y, initial_state.k.shape[1])
    y = y.contiguous()
    n_new = T if cu_seqlens is None else lengths(cu_seqlens)
    if keep:
        new = (k, y) if cu_seqlens is None else (pad(k, cu_seqlens), pad(y, cu_seqlens))
        page_k, page_y = (x.contiguous() for x in grow((initial_state.k, initial_state.y), new, length, cu_seqlens, window))
    else:
        page_k, page_y = initial_state.k[:, :0].clone(), initial_state.y[:, :0].clone()
    return y, LucidState(page_k, page_y, length + n_new), saved


@backward_operator
def lucid_pages_bwd(
    dy: Tensor, final: PageRows, saved: Saved, tokens: LucidInputs, initial_state: LucidState, cu_seqlens: Tensor | None,
    rowmax: bool, window: int | None,
) -> tuple[LucidInputs, PageRows]:  # fmt: skip
    """Gradients of `tokens` and `initial_state` from those of y and of the final pages."""
    (k, v, beta), (page_k, page_y, length) = tokens, initial_state
    P = page_k.shape[1]
    joined, task = _task(tokens, initial_state, cu_seqlens, rowmax, window)
    check_blocks(saved, task)
    of_tokens = lambda x: x[:, P:] if cu_seqlens is None else unpad(x[:, P:], cu_seqlens)
    through = None
    if final.k.shape[1]:  # a final page is a copy of columns: its k passes dk through, its y adds to dY
        T = k.shape[1] if cu_seqlens is None else int(lengths(cu_seqlens).max())
        source = came_from(P, T, length, cu_seqlens, window)
        through = PageRows(*(give_back(x, source, P + T) for x in final))
        dy = dy + of_tokens(through.y)
    joint = _joint(joined, task, PageRows(torch.zeros_like(page_y), page_y), LucidInputs(dy, v, beta))
    found = backward(*joint, saved, k.shape[-1], task)
    dk, dv, dbeta = task.align.restore(*found)
    (dpage_k, dk), (dpage_y, dv) = joined.part(dk, P), joined.part(dv, P)
    if through is not None:
        dk = dk + of_tokens(through.k)
        if dpage_k is not None and dpage_y is not None:
            dpage_k, dpage_y = dpage_k + through.k[:, :P], dpage_y + through.y[:, :P]
    if dpage_k is None or dpage_y is None:  # no pages
        dpage_k, dpage_y = page_k.clone(), page_y.clone()
    dbeta = None if beta is None or dbeta is None else joined.part(dbeta, P)[1].to(beta.dtype)
    # clones: slices of one tensor, and an operator's results may not share memory
    fresh = lambda x: x.clone(memory_format=torch.contiguous_format) if x._is_view() or not x.is_contiguous() else x
    return LucidInputs(*each(fresh, dk, dv, dbeta)), PageRows(*each(fresh, dpage_k, dpage_y))


def _task(
    tokens: LucidInputs, initial_state: LucidState, cu_seqlens: Tensor | None, rowmax: bool, window: int | None
) -> tuple[Joined, Task]:
    k, chosen = tokens.k, _config(tokens)
    C = chosen.launch["shared"]["C"]
    joined = Joined.of(initial_state, k.shape[1], cu_seqlens, window, C)
    align = alignment(chosen, k, joined.T, joined.cu_seqlens)
    return joined, Task(chosen, align, cu_seqlens is not None, rowmax, window, k.shape[-1], joined.columns // C, joined.skip)


def _config(tokens: LucidInputs) -> LaunchConfig:
    return launch_config(ENGINE, tokens.k.device, tokens.k.dtype, tokens.k.shape[-1], tokens.v.shape[-1])


def _joint(joined: Joined, task: Task, pages: PageRows, tokens: LucidInputs) -> LucidInputs:
    """Aligned, with the pages in front; a page's β, which nothing multiplies, is 1."""
    k, v, beta = tokens
    beta = None if beta is None else joined.join(beta.new_ones(pages.k.shape[:3]), beta)
    return LucidInputs(*task.align.align(joined.join(pages.k, k), joined.join(pages.y, v), beta))


@fake(lucid_pages)
def _(
    tokens: LucidInputs, initial_state: LucidState, cu_seqlens: Tensor | None, rowmax: bool, window: int | None, keep: bool
) -> tuple[Tensor, LucidState]:
    return tokens.v.new_empty(tokens.v.shape), fake_pages(tokens, initial_state, cu_seqlens, window, keep)


@fake(lucid_pages_fwd)
def _(tokens: LucidInputs, initial_state: LucidState, cu_seqlens: Tensor | None, rowmax: bool, window: int | None, keep: bool):
    chosen = _config(tokens)
    C = chosen.launch["shared"]["C"]
    columns, N, T = -(-initial_state.k.shape[1] // C) * C, len(initial_state.length), tokens.k.shape[1]
    T = T + columns if cu_seqlens is None else ((T + N * columns) // C + N) * C
    aligned = LucidInputs(*each(lambda x: x.new_empty(len(x), T, *x.shape[2:]), *tokens))
    y, final = tokens.v.new_empty(tokens.v.shape), fake_pages(tokens, initial_state, cu_seqlens, window, keep)
    return y, final, Saved.of(aligned, rowmax, True, chosen, N)


fake(lucid_pages_bwd)(fake_gradients)


def _save(ctx, inputs, output) -> None:
    tokens, initial_state, cu_seqlens, ctx.rowmax, ctx.window, _ = inputs
    ctx.save_for_backward(*output[2], *tokens, *initial_state, cu_seqlens)


def _backward(ctx, dy, dfinal_k, dfinal_y, *_):
    found = lucid_pages_bwd(dy.contiguous(), dfinal_k, dfinal_y, *ctx.saved_tensors, ctx.rowmax, ctx.window)
    return *(dx if needed else None for dx, needed in zip(found, ctx.needs_input_grad, strict=False)), *[None] * 5


differentiable(lucid_pages, _backward, _save, lucid_pages_fwd)
