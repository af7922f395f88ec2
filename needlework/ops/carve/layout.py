"""Content chunks as runs of whole kernel chunks: what CARVE's kernels walk, one launch for the i-th of every sequence.

Rows are tokens, or with R writes a token its R rows. A content chunk takes ⌈L/C⌉ kernel chunks, so that L may be any number;
rows in its gap are no tokens: the caller fills them with what writes, reads and decays nothing. A sequence that resumes inside a
content chunk starts with a shorter one. Sizes are bounds that the host knows: cu_seqlens and position are never read back.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """Kernel chunk c of batch row b has number b·⌈T/C⌉ + c. Content chunk i of sequence n is *closed*, and makes an m, if
    ends[n] >= (i + 1)·L; it is kept (its S and m at the start) at slot bases[n] + i."""

    spans: Tensor  # [longest N 2] int32: kernel chunks of the i-th content chunk of sequence n, empty past its end
    bases: Tensor  # [N] int32: the slot of each sequence's first content chunk
    ends: Tensor  # [N] int64: the position after the last row, from the start of the first content chunk
    N: int
    T: int  # aligned rows of a batch row
    L: int  # rows of a content chunk
    longest: int  # content chunks of a sequence at most
    parts: int  # kernel chunks of a content chunk at most
    slots: int  # content chunks of all sequences at most
    place: Tensor | None  # [B T given] where each row went; None: nothing moved

    @classmethod
    def of(
        cls, position: Tensor | None, cu_seqlens: Tensor | None, B: int, T: int, L: int, C: int, device: torch.device
    ) -> "Layout":
        """B batch rows of T, or packed in one. position [N] and cu_seqlens [N+1] count rows; position None: all start anew."""
        packed, N = cu_seqlens is not None, B if cu_seqlens is None else len(cu_seqlens) - 1
        longest, parts, slots, aligned = cls.sizes(position is not None, packed, N, T, L, C)
        if position is None and not packed and (L % C == 0 or T <= L):
            chunks = -(-T // C)
            edges = torch.arange(0, longest * parts + 1, max(parts, 1), dtype=torch.int32, device=device).clamp_(max=chunks)
            rows = torch.arange(B, dtype=torch.int32, device=device)
            spans = edges.unfold(0, 2, 1)[:, None] + (rows * chunks)[:, None]
            ends = torch.full((B,), T, device=device)
            return cls(spans.contiguous(), rows * longest, ends, N, T, L, longest, parts, slots, None)

        starts = None if cu_seqlens is None else cu_seqlens.to(device=device, dtype=torch.int64)
        lengths = torch.full((B,), T, device=device) if starts is None else starts.diff()
        before = torch.zeros_like(lengths) if position is None else position.to(lengths)
        ends = before + lengths
        count = torch.where(lengths > 0, (ends + L - 1) // L, 0)
        bases = count.cumsum(0) - count if packed else torch.arange(N, device=device) * longest

        i = torch.arange(longest, device=device)[:, None]
        opened, closed = (i * L).maximum(before), ((i + 1) * L).minimum(ends)
        first = (bases + i) * parts
        spans = torch.stack((first, first + ((closed - opened).clamp(min=0) + C - 1) // C), 2)
        spans = torch.where((i < count)[..., None], spans, 0)

        token = torch.arange(T, device=device)
        if starts is None:
            n = torch.arange(B, device=device)[:, None]
        else:
            n = torch.searchsorted(starts, token, right=True)[None] - 1
        at = before[n] + token - (0 if starts is None else starts[n])
        place = (at // L) * (parts * C) + at % L - torch.where(at < L, before[n], 0)
        place = place + (bases[n] * (parts * C) if packed else 0)
        return cls(spans.to(torch.int32), bases.to(torch.int32), ends, N, aligned, L, longest, parts, slots, place)

    @staticmethod
    def sizes(resumed: bool, packed: bool, N: int, T: int, L: int, C: int) -> tuple[int, int, int, int]:
        """longest, parts, slots and T of `of`, for N sequences; resumed: they may start inside a content chunk."""
        late = L - 1 if resumed else 0
        longest, parts = (T + late + L - 1) // L, -(-min(L, T) // C)
        slots = (T + N * (late + L - 1)) // L if packed else N * longest
        moved = resumed or packed or (L % C > 0 and T > L)
        return longest, parts, slots, (slots if packed else longest) * parts * C if moved else T

    def align(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """[B T ...] -> [B aligned ...], `fill` in the gaps; as it is, contiguous, where nothing moves."""
        if self.place is None:
            return x.contiguous()
        out = x.new_full((x.shape[0], self.T, *x.shape[2:]), fill)
        out[torch.arange(len(x), device=x.device)[:, None], self.place] = x
        return out

    def restore(self, x: Tensor) -> Tensor:
        """The inverse of `align`."""
        return x if self.place is None else x[torch.arange(len(x), device=x.device)[:, None], self.place]
