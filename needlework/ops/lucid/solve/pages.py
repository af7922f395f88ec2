"""LUCID's solve with pages as operators: in front of the tokens that follow them, so that kernels walk one sequence, whole blocks of
columns, the newest last.

Where pages end inside a block, its first columns hold no token: keys and values of zero there, which overlap with nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.attention.growth import came_from, final_rows, give_back, grow
from needlework.ops.common.packing import lengths, pad, unpad
from needlework.ops.lucid.arguments import check_data
from needlework.ops.lucid.solve.launches import ENGINE, Saved, Task, alignment, backward
from needlework.ops.lucid.solve.op import check_blocks, solved
from needlework.ops.lucid.state import LucidState
from needlework.ops.runtime.custom_op import backward_operator, differentiable, operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import launch_config


class Given(NamedTuple):
    """What a call's backward wants of its arguments, as the caller has them."""

    k: Tensor
    v: Tensor
    beta: Tensor | None
    page_k: Tensor
    page_y: Tensor
    length: Tensor
    cu_seqlens: Tensor | None


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
    def of(cls, pages: LucidState, T: int, cu_seqlens: Tensor | None, window: int | None, C: int) -> "Joined":
        N, P = pages.k.shape[:2]
        if P == 0:
            return cls(0, T, cu_seqlens, None, None, None, None)
        columns, length = -(-P // C) * C, pages.length
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


@operator
def lucid_pages_fwd(
    k: Tensor, v: Tensor, beta: Tensor | None, page_k: Tensor, page_y: Tensor, length: Tensor, cu_seqlens: Tensor | None,
    rowmax: bool, window: int | None, keep: bool, save: bool,
) -> list[Tensor]:  # fmt: skip
    """y, the final pages (of no rows without `keep`) and length, and with `save` what the backward wants."""
    T = k.shape[1]
    check_data(length, page_k.shape[1], window, cu_seqlens, len(k), T)
    joined, task = _task(k, v, page_k, page_y, length, cu_seqlens, rowmax, window)
    y, saved = solved(_tokens(joined, task, (page_k, page_y), (k, v, beta)), task, save)
    _, y = joined.part(task.align.restore(y), page_k.shape[1])
    y = y.contiguous()
    n_new = T if cu_seqlens is None else lengths(cu_seqlens)
    if keep:
        new = (k, y) if cu_seqlens is None else (pad(k, cu_seqlens), pad(y, cu_seqlens))
        pages = tuple(x.contiguous() for x in grow((page_k, page_y), new, length, cu_seqlens, window))
    else:
        pages = page_k[:, :0].clone(), page_y[:, :0].clone()
    return [y, *pages, length + n_new, *(saved if save else ())]


@backward_operator
def lucid_pages_bwd(
    dy: Tensor, dfinal_k: Tensor, dfinal_y: Tensor, saved: list[Tensor],
    k: Tensor, v: Tensor, beta: Tensor | None, page_k: Tensor, page_y: Tensor, length: Tensor, cu_seqlens: Tensor | None,
    rowmax: bool, window: int | None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of k, v, page_k, page_y and, where it is there, beta."""
    P = page_k.shape[1]
    joined, task = _task(k, v, page_k, page_y, length, cu_seqlens, rowmax, window)
    check_blocks(saved, task)
    of_tokens = lambda x: x[:, P:] if cu_seqlens is None else unpad(x[:, P:], cu_seqlens)
    through_k = through_y = None
    if dfinal_k.shape[1]:  # a final page is a copy of columns: its k passes dk through, its y adds to dY
        T = k.shape[1] if cu_seqlens is None else int(lengths(cu_seqlens).max())
        source = came_from(P, T, length, cu_seqlens, window)
        through_k, through_y = (give_back(x, source, P + T) for x in (dfinal_k, dfinal_y))
        dy = dy + of_tokens(through_y)
    tokens = _tokens(joined, task, (torch.zeros_like(page_y), page_y), (dy, v, beta))
    found = backward(*tokens, Saved(*saved), k.shape[-1], task)
    dk, dv, dbeta = each(task.align.restore, *found)
    (dpage_k, dk), (dpage_y, dv) = joined.part(dk, P), joined.part(dv, P)
    if through_k is not None and through_y is not None:
        dk = dk + of_tokens(through_k)
        if dpage_k is not None and dpage_y is not None:
            dpage_k, dpage_y = dpage_k + through_k[:, :P], dpage_y + through_y[:, :P]
    if dpage_k is None or dpage_y is None:  # no pages
        dpage_k, dpage_y = page_k.clone(), page_y.clone()
    # clones: slices of one tensor, and an operator's results may not share memory
    fresh = lambda x: x.clone(memory_format=torch.contiguous_format) if x._is_view() or not x.is_contiguous() else x
    gradients = [dk, dv, dpage_k, dpage_y]
    if beta is not None and dbeta is not None:
        gradients.append(joined.part(dbeta, P)[1].to(beta.dtype))
    return [fresh(x) for x in gradients]


def _task(
    k: Tensor, v: Tensor, page_k: Tensor, page_y: Tensor, length: Tensor, cu_seqlens: Tensor | None,
    rowmax: bool, window: int | None,
) -> tuple[Joined, Task]:  # fmt: skip
    chosen = launch_config(ENGINE, k.device, k.dtype, k.shape[-1], v.shape[-1])
    C = chosen.launch["shared"]["C"]
    joined = Joined.of(LucidState(page_k, page_y, length), k.shape[1], cu_seqlens, window, C)
    align = alignment(chosen, k, joined.T, joined.cu_seqlens)
    return joined, Task(chosen, align, cu_seqlens is not None, rowmax, window, joined.columns // C, joined.skip)


def _tokens(
    joined: Joined, task: Task, pages: tuple[Tensor, Tensor], tokens: tuple[Tensor, Tensor, Tensor | None]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Aligned, with the pages in front; a page's β, which nothing multiplies, is 1."""
    (page_k, page_v), (k, v, beta) = pages, tokens
    joint = joined.join(page_k, k), joined.join(page_v, v)
    return each(task.align.align, *joint, None if beta is None else joined.join(beta.new_ones(page_k.shape[:3]), beta))


@torch.library.register_fake(lucid_pages_fwd)
def _(k, v, beta, page_k, page_y, length, cu_seqlens, rowmax, window, keep, save):
    if not keep:
        P = 0
    elif cu_seqlens is None:
        P = final_rows(page_k.shape[1], k.shape[1], window)
    else:
        P = torch.library.get_ctx().new_dynamic_size()
    results = [
        v.new_empty(v.shape),
        *(x.new_empty(len(x), P, *x.shape[2:]) for x in (page_k, page_y)),
        torch.empty_like(length),
    ]
    if not save:
        return results
    chosen = launch_config(ENGINE, k.device, k.dtype, k.shape[-1], v.shape[-1])
    C = chosen.launch["shared"]["C"]
    columns, N, T = -(-page_k.shape[1] // C) * C, len(length), k.shape[1]
    T = T + columns if cu_seqlens is None else ((T + N * columns) // C + N) * C
    k_aligned, v_aligned = (x.new_empty(len(x), T, *x.shape[2:]) for x in (k, v))
    return [*results, *Saved.of(k_aligned, v_aligned, beta is not None, rowmax, True, chosen, N)]


@torch.library.register_fake(lucid_pages_bwd)
def _(dy, dfinal_k, dfinal_y, saved, k, v, beta, page_k, page_y, *_):
    return [x.new_empty(x.shape) for x in (k, v, page_k, page_y, beta) if x is not None]


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.rowmax, ctx.window, _, _ = inputs
    ctx.save_for_backward(*Given(*tensors), *Saved(*output[4:]))


def _backward(ctx, grads):
    count = len(Given._fields)
    given, saved = Given(*ctx.saved_tensors[:count]), Saved(*ctx.saved_tensors[count:])
    dy, dfinal_k, dfinal_y = (
        x.new_zeros(x.shape) if d is None else d
        for d, x in zip(grads[:3], (given.v, given.page_k[:, :0], given.page_y[:, :0]), strict=True)
    )
    found = lucid_pages_bwd(dy.contiguous(), dfinal_k, dfinal_y, list(saved), *given, ctx.rowmax, ctx.window)
    dk, dv, dpage_k, dpage_y, *dbeta = found
    return dk, dv, dbeta[0] if dbeta else None, dpage_k, dpage_y, *[None] * 6


differentiable(lucid_pages_fwd, _backward, _save)
