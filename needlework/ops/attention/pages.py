"""Growing states: pages of keys and values that hold every token of a sequence, or a window's worth.

Token t of a sequence lies in row t (no window) or t mod W (window W: the pages are a ring). `length [N]` counts the
tokens seen, so a row's position follows from it and rows of different lengths share one batch.
"""

import torch
from torch import Tensor


def positions(length: Tensor, rows: int, window: int | None) -> Tensor:
    """[N] tokens seen -> [N rows] position of the token in each row, -1 where the row is empty."""
    row = torch.arange(rows, device=length.device)
    last = length[:, None] - 1
    if window is None:
        return torch.where(row <= last, row, -1)
    held = last - (last - row) % window  # the newest t < length with t = row (mod W)
    return torch.where(held >= 0, held, -1)


def append(
    pages: tuple[Tensor, ...], new: tuple[Tensor, ...], length: Tensor, n_new: Tensor, window: int | None
) -> tuple[Tensor, ...]:
    """Pages [N P ...] with `length [N]` tokens, then new rows [N T ...] of which row n's first n_new[n] are real.

    Returns the new pages, [N P' ...] with P' = the longest sequence, at most W.
    """
    N, P = len(length), pages[0].shape[1]
    total = length + n_new
    rows = int(total.max()) if N else 0
    if window is not None:
        rows = min(rows, window)
    at = positions(total, rows, window)  # [N P'] the token that each row must hold
    held = at if window is None else at.clamp(min=0) % window
    source = torch.where(at >= length[:, None], P + at - length[:, None], held).clamp(min=0)

    def take(page: Tensor, fresh: Tensor) -> Tensor:
        x = torch.cat([page, fresh], 1)
        axes = [N, rows] + [1] * (x.dim() - 2)
        taken = x.gather(1, source.view(axes).expand(N, rows, *x.shape[2:]))
        return torch.where((at >= 0).view(axes), taken, x.new_zeros(()))

    return tuple(take(page, fresh) for page, fresh in zip(pages, new, strict=True))
