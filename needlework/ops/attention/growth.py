"""How a call's tokens enter the pages, and where the final pages' gradient goes. Rows are those of ops/attention/pages.py."""

import torch
import torch.nn.functional as F
from torch import Tensor

from needlework.ops.attention.pages import append
from needlework.ops.common.packing import lengths


def final_rows(P: int, T: int, window: int | None) -> int:
    """Rows of the final pages where shapes alone decide: all sequences bring T tokens."""
    return P + T if window is None else min(P + T, window)


def grow(
    pages: tuple[Tensor, ...], new: tuple[Tensor, ...], length: Tensor, cu_seqlens: Tensor | None, window: int | None
) -> tuple[Tensor, ...]:
    """Pages [N P ...], then new rows [N T ...] -> pages with `final_rows` rows, or the longest sequence's with cu_seqlens."""
    P, T = pages[0].shape[1], new[0].shape[1]
    n_new = torch.full_like(length, T) if cu_seqlens is None else lengths(cu_seqlens)
    grown = append(pages, new, length, n_new, window)
    if cu_seqlens is not None:
        return grown
    missing = final_rows(P, T, window) - grown[0].shape[1]
    return tuple(F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing)) for x in grown)


def came_from(P: int, T: int, length: Tensor, cu_seqlens: Tensor | None, window: int | None) -> Tensor:
    """[N P'] for each final row: 1 + the column (P pages, then T tokens) that it was copied from, 0 for an empty row."""
    number = torch.arange(1, P + T + 1, device=length.device).expand(len(length), -1)
    return grow((number[:, :P],), (number[:, P:],), length, cu_seqlens, window)[0]


def give_back(dfinal: Tensor, source: Tensor, columns: int) -> Tensor:
    """Gradient of the final rows [N P' ...] -> of the columns they came from, [N columns ...]."""
    given = dfinal.new_zeros(len(dfinal), 1 + columns, *dfinal.shape[2:])
    return given.index_put_((torch.arange(len(dfinal), device=dfinal.device)[:, None], source), dfinal, True)[:, 1:]
