"""What the definitions of attention ops share: sequences that one call takes together, and the rows of pages that hold their tokens."""

import torch
from torch import Tensor


def together(pasts: list[int], cu_seqlens: Tensor | None) -> list[tuple[slice, slice, slice]]:
    """Sequences of one past and one number of tokens: their rows of the batch, their tokens there, their numbers. pasts: tokens before
    each."""
    N = len(pasts)
    if cu_seqlens is not None:
        ends = cu_seqlens.tolist()
        return [(slice(0, 1), slice(ends[n], ends[n + 1]), slice(n, n + 1)) for n in range(N)]
    if len(set(pasts)) == 1:
        return [(slice(0, N), slice(None), slice(0, N))]
    return [(slice(n, n + 1), slice(None), slice(n, n + 1)) for n in range(N)]


def rows_held(length: int, window: int | None) -> list[int]:
    """The rows of a sequence's pages that hold a token, the oldest first."""
    return [t % (window or length) for t in range(max(0, length - (window or length)), length)]


def page(x: Tensor, length: int, rows: int, window: int | None) -> Tensor:
    """Pages [B P ...] of sequences of `length` tokens, the newest of which are x [B n ...]: `rows` of them, at most a window."""
    held = torch.tensor(rows_held(length, window), dtype=torch.int64, device=x.device)
    return x.new_zeros(len(x), min(rows, window or rows), *x.shape[2:]).index_copy(1, held, x[:, x.shape[1] - len(held) :])
