"""Content chunks as runs of whole kernel chunks: what CARVE's kernels walk, one launch for the i-th of every sequence.

Rows are tokens, or with R writes a token its R rows. A content chunk takes ⌈L/C⌉ kernel chunks, so that L may be any number;
rows in its gap are no tokens: the caller fills them with what writes, reads and decays nothing. A sequence that resumes inside a
content chunk starts with a shorter one. Sizes are bounds that the host knows: cu_seqlens and position are never read back.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from needlework.ops.common.kernels.moves import moved
from needlework.ops.common.remembered import remembered, standing
from needlework.ops.runtime.each import Ts, each
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import cdiv

PLACES, SEQUENCES = 64, 64  # of a program of `layout_kernel`


class ByChunk(NamedTuple):
    """What a walk from the last content chunk to the first is given, in rows of a multiple of 16 bytes: kernels are compiled once for all
    of their pointers."""

    spans: Tensor  # [longest N.. 2] Layout's
    slots: Tensor  # [longest N..] int32: where the i-th content chunk of each sequence is kept
    unused: Tensor | None  # [slots 1 1] the slots that keep none; None: every slot keeps one


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
    sources: Tensor | None  # [B T] int32: the given row, of the whole batch, that each row has, −1: none; None: nothing moved
    places: Tensor | None  # [B T given] int32: the row, of the whole batch, that each given one went to

    @classmethod
    def of(
        cls, position: Tensor | None, cu_seqlens: Tensor | None, B: int, T: int, L: int, C: int, R: int, device: torch.device
    ) -> "Layout":
        """B batch rows of T, or packed in one. position [N] and cu_seqlens [N+1] count tokens of R rows; position None: all start anew."""
        packed, N = cu_seqlens is not None, B if cu_seqlens is None else len(cu_seqlens) - 1
        longest, parts, slots, aligned = cls.sizes(position is not None, packed, N, T, L, C)
        if position is None and not packed and stays(T, L, C):
            chunks = -(-T // C)
            edges = torch.arange(0, longest * parts + 1, max(parts, 1), dtype=torch.int32, device=device).clamp_(max=chunks)
            rows = torch.arange(B, dtype=torch.int32, device=device)
            spans = edges.unfold(0, 2, 1)[:, None] + (rows * chunks)[:, None]
            ends = torch.full((B,), T, device=device)
            return cls(spans.contiguous(), rows * longest, ends, N, T, L, longest, parts, slots, None, None)

        cu_seqlens, position = each(lambda x: x.to(device).contiguous(), cu_seqlens, position)
        new = lambda *shape: torch.empty(shape, dtype=torch.int32, device=device)
        ends = torch.empty(N, dtype=torch.int64, device=device)
        found = new(longest, N, 2), new(N), ends, new(B, aligned), new(B, T)
        sizes = {"L": L, "C": C, "R": R, "PARTS": parts, "BLK": PLACES, "BN": SEQUENCES}
        grid = (cdiv(max(B * aligned, longest * N), PLACES),)
        run(layout_kernel, grid, cu_seqlens, position, *found, N, T, B * T, B * aligned, longest, **sizes, num_warps=4)
        spans, bases, _, sources, places = found
        return cls(spans, bases, ends, N, aligned, L, longest, parts, slots, sources, places)

    def by_chunk(self) -> ByChunk:
        steps = torch.arange(self.longest, dtype=torch.int32, device=self.bases.device)[:, None]
        spans = pad(self.spans, (0, 0, 0, -self.N % 4)).contiguous()
        slots = pad((self.bases + steps).clamp_(max=self.slots - 1), (0, -self.N % 4))
        if self.sources is None:
            return ByChunk(spans, slots, None)
        unused = torch.ones(self.slots + 1, dtype=torch.bool, device=spans.device)
        kept_at = torch.where(spans[..., 0] < spans[..., 1], slots, self.slots)
        # an index_put of a number copies it from the host, which no capture takes
        unused.scatter_(0, kept_at.flatten().to(torch.int64), False)
        return ByChunk(spans, slots, unused[:-1, None, None])

    @staticmethod
    def sizes(resumed: bool, packed: bool, N: int, T: int, L: int, C: int) -> tuple[int, int, int, int]:
        """longest, parts, slots and T of `of`, for N sequences; resumed: they may start inside a content chunk."""
        late = L - 1 if resumed else 0
        longest, parts = (T + late + L - 1) // L, -(-min(L, T) // C)
        slots = (T + N * (late + L - 1)) // L if packed else N * longest
        moved = resumed or packed or not stays(T, L, C)
        return longest, parts, slots, (slots if packed else longest) * parts * C if moved else T

    def align(self, *tensors: *Ts, fill: float = 0.0) -> tuple[*Ts]:
        """Each [B T given ...] -> [B T ...], `fill` in the gaps; as it is, contiguous, where nothing moves."""
        return each(Tensor.contiguous, *tensors) if self.sources is None else _moved(self.sources, *tensors, fill=fill)

    def restore(self, *tensors: *Ts) -> tuple[*Ts]:
        """The inverse of `align`."""
        return tensors if self.places is None else _moved(self.places, *tensors)


def stays(T: int, L: int, C: int) -> bool:
    """Whether T rows that start anew are whole kernel chunks as they lie."""
    return L % C == 0 or T <= L


def _moved(rows: Tensor, *tensors: *Ts, fill: float = 0.0) -> tuple[*Ts]:
    """Each [B · ...] at `rows` [B ·], which count through the batch."""
    found = moved(rows.flatten(), *each(lambda x: x.flatten(0, 1)[None], *tensors), fill=fill)
    return each(lambda x: x.view(*rows.shape, *x.shape[2:]), *found)


@standing
def of_rows(device: torch.device, B: int, T: int, L: int, C: int) -> tuple[Layout, ByChunk]:
    """Of a batch of T rows each that stay: its sizes say all."""
    layout = Layout.of(None, None, B, T, L, C, 1, device)
    return layout, layout.by_chunk()


@remembered
def of_packed(cu_seqlens: Tensor, T: int, L: int, C: int, R: int, device: torch.device) -> tuple[Layout, ByChunk]:
    """Where rows of packed sequences that all start anew go, T in all; cu_seqlens counts tokens of R rows."""
    layout = Layout.of(None, cu_seqlens, 1, T, L, C, R, device)
    return layout, layout.by_chunk()


@triton.jit
def _of(mask, x):
    """[BLK] of each place, x [BN] of the sequence that it is of; 0 of none."""
    return tl.sum(tl.where(mask, x[None, :], 0), 1)


@triton.jit(do_not_specialize=["N", "T", "given", "rows", "longest"])
def layout_kernel(
    p_cu_seqlens, p_position, p_spans, p_bases, p_ends, p_sources, p_places, N, T, given, rows, longest,
    L: tl.constexpr, C: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, BLK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Layout of what moves: BLK rows, as many given ones and spans, of sequence after sequence as memory has them. Every program goes over
    all sequences: each place is of one at most."""
    i = tl.program_id(0) * BLK + tl.arange(0, BLK)
    slot = i // (PARTS * C)  # whose row i is
    step = i // N  # whose span i is, of sequence i % N
    none = tl.zeros([BLK], tl.int32)
    # of the sequence of row i: its first content chunk, first given row, position before that and the one after the last
    r_base, r_start, r_before, r_end = none, none, none, none
    t_base, t_start, t_before, t_found = none, none, none, none
    s_base, s_before, s_end, s_count = none, none, none, none
    chunks = 0
    for n in range(0, N, BN):
        o_n = n + tl.arange(0, BN)
        inside = o_n < N
        if p_cu_seqlens is None:
            start = o_n * T
            length = tl.where(inside, T, 0)
        else:
            start = tl.load(p_cu_seqlens + o_n, mask=inside, other=0).to(tl.int32) * R
            length = tl.load(p_cu_seqlens + o_n + 1, mask=inside, other=0).to(tl.int32) * R - start
        before = tl.zeros([BN], tl.int32)
        if p_position is not None:
            before = tl.load(p_position + o_n, mask=inside, other=0).to(tl.int32) * R
        end = before + length
        count = tl.where(length > 0, (end + L - 1) // L, 0)
        if p_cu_seqlens is None:
            base = o_n * longest
        else:
            base = chunks + tl.cumsum(count, 0) - count
        chunks += tl.sum(count, 0)
        if tl.program_id(0) == 0:
            tl.store(p_bases + o_n, base, mask=inside)
            tl.store(p_ends + o_n, end.to(tl.int64), mask=inside)
        here = (base[None, :] <= slot[:, None]) & (slot[:, None] < (base + count)[None, :])
        r_base += _of(here, base)
        r_start += _of(here, start)
        r_before += _of(here, before)
        r_end += _of(here, end)
        here = (start[None, :] <= i[:, None]) & (i[:, None] < (start + length)[None, :])
        t_base += _of(here, base)
        t_start += _of(here, start)
        t_before += _of(here, before)
        t_found += _of(here, (length > 0).to(tl.int32))
        here = (i % N)[:, None] == o_n[None, :]
        s_base += _of(here, base)
        s_before += _of(here, before)
        s_end += _of(here, end)
        s_count += _of(here, count)

    opened = tl.maximum((slot - r_base) * L, r_before)
    closed = tl.minimum((slot - r_base + 1) * L, r_end)
    row = i % (PARTS * C)
    source = tl.where(row < closed - opened, r_start + opened - r_before + row, -1)
    tl.store(p_sources + i, source, mask=i < rows)

    at = t_before + i - t_start
    place = (t_base + at // L) * (PARTS * C) + at % L - tl.where(at < L, t_before, 0)
    tl.store(p_places + i, tl.where(t_found > 0, place, -1), mask=i < given)

    opened, closed = tl.maximum(step * L, s_before), tl.minimum((step + 1) * L, s_end)
    first = (s_base + step) * PARTS
    last = first + (tl.maximum(closed - opened, 0) + C - 1) // C
    of_span = (i < longest * N) & (step < s_count)
    tl.store(p_spans + 2 * i, tl.where(of_span, first, 0), mask=i < longest * N)
    tl.store(p_spans + 2 * i + 1, tl.where(of_span, last, 0), mask=i < longest * N)
