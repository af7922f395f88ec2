"""The sums G of a forget gate's logarithms: of a call's tokens, from where the tokens before it have got.

A score gets G_i − G_j, which is g_{j+1} + … + g_i. G is float64, of whose differences few digits are lost after a long past, and its
gradient's own sum (backward.py) is autograd's of the sum here.
"""

import torch
from torch import Tensor

from needlework.ops.common.decay import summed
from needlework.ops.common.packing import sequences
from needlework.ops.path.chunk import History
from needlework.ops.path.state import PathState


def sums(g: Tensor, past: PathState | History | None, window: int | None, cu_seqlens: Tensor | None) -> Tensor:
    """G [B T Hq] of log gates g, in float64."""
    if past is None or past.decay is None:
        before = g.new_zeros(sequences(cu_seqlens, len(g)), g.shape[2], dtype=torch.float64)
    else:
        before = newest(past.decay, past.length, window)
    return summed(g, before, cu_seqlens)[0]


def newest(pages: Tensor, length: Tensor, window: int | None) -> Tensor:
    """[N Hq] of each sequence's last token in pages [N P Hq], 0 before the first. A window of 1 may have lost it: there no sum counts."""
    if not pages.shape[1]:
        return pages.new_zeros(len(pages), pages.shape[2])
    last = (length - 1).clamp(min=0)
    row = last if window is None else last % window
    found = pages[torch.arange(len(pages), device=pages.device), row.clamp(max=pages.shape[1] - 1)]
    return torch.where((length > 0)[:, None], found, 0)
