"""Attention over pages in plain torch: the rows that a call's queries may see are gathered, a batch of all sequences at once.

Dtypes are op.py's. Sequences are padded to the longest, whose length is read back: the kernels are for what a CUDA graph captures.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, scaled_dot_product_attention

from needlework.ops.attention.pages import positions
from needlework.ops.common.packing import lengths, pad, unpad
from needlework.ops.paged.arguments import Bias, Pages
from needlework.ops.polar import chunk
from needlework.ops.polar.arguments import Parameters, Tokens
from needlework.ops.polar.state import PolarState


class Batch(NamedTuple):
    """N sequences of S queries, of which the first `new` are real; `before` tokens of each came earlier."""

    q: Tensor  # [N S Hq d]
    new: Tensor  # [N]
    before: Tensor  # [N]

    @classmethod
    def of(cls, q: Tensor, pages: Pages) -> "Batch":
        if pages.cu_seqlens is None:
            return cls(q[:, None], torch.ones_like(pages.length), pages.length - 1)
        new = lengths(pages.cu_seqlens)
        return cls(pad(q[None, : int(pages.cu_seqlens[-1])], pages.cu_seqlens), new, pages.length - new)

    @property
    def own(self) -> Tensor:
        """[N S] position of each query."""
        return self.before[:, None] + torch.arange(self.q.shape[1], device=self.q.device)


def softmax(q: Tensor, pages: Pages, scale: float | None, bias: Bias | None) -> Tensor:
    batch = Batch.of(q, pages)
    at, seen = _visible(batch, pages)
    added = None if bias is None else _added(bias, batch, at, pages)
    return spread(_softmax(batch.q, *_take(pages, at, q.dtype), seen, scale, added), q, pages)


def difference(q: Tensor, pages: Pages, lam: Tensor, scale: float | None) -> Tensor:
    """The two vectors of a head as two heads of half the size, on values that are there twice."""
    batch = Batch.of(q, pages)
    at, seen = _visible(batch, pages)
    k, v = _take(pages, at, q.dtype)
    halves = lambda x: torch.cat(x.chunk(2, -1), 2)
    first, second = _softmax(halves(batch.q), halves(k), torch.cat((v, v), 2), seen, scale).chunk(2, 2)
    return spread(first - lam.to(q.dtype).expand(q.shape[1])[:, None] * second, q, pages)


def direction(q: Tensor, pages: Pages, parameters: Parameters) -> tuple[Tensor, Tensor]:
    batch = Batch.of(q, pages)
    room, before = _room(pages), batch.before.clamp(min=0)
    held = positions(before, min(room, pages.window or room), pages.window)
    if pages.window is not None:
        # the ring's oldest row may be one that no query sees, on a page that has been freed
        held = torch.where(held > (before - pages.window)[:, None], held, -1)
    (k, v), (k_held, v_held) = (_take(pages, at, q.dtype) for at in (batch.own, held))
    tokens, past = Tokens(batch.q, k, v), PolarState(k_held, v_held, before)
    found = chunk.forward(tokens, parameters, past, window=pages.window, chunk_size=64)
    keyless = (batch.own < 0)[..., None]
    null = normalize(parameters.v_null, dim=-1, eps=chunk.CLAMP)
    direction, magnitude = torch.where(keyless[..., None], null, found[0]), torch.where(keyless, 0, found[1])
    return spread(direction, q, pages), spread(magnitude, q, pages)


def spread(x: Tensor, q: Tensor, pages: Pages) -> Tensor:
    """[N S Hq ...] -> [T Hq ...], zeros in padded rows."""
    x = torch.where((pages.length >= 0).view(-1, *[1] * (x.dim() - 1)), x, 0)
    if pages.cu_seqlens is None:
        return x[:, 0]
    found = unpad(x, pages.cu_seqlens)[0]
    return torch.cat((found, found.new_zeros(len(q) - len(found), *found.shape[1:])))


def write(rows: Tensor, *columns: tuple[Tensor, Tensor]) -> None:
    """Each of `columns`: new rows [T …], and the pages [n PG …] that they go to."""
    real = rows >= 0
    for new, pages in columns:
        pages[rows[real] // pages.shape[1], rows[real] % pages.shape[1]] = new[real].to(pages.dtype)


def _softmax(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None, added: Tensor | None = None
) -> Tensor:  # fmt: skip
    """[N S Hq V], zeros where a query sees nothing; added [N Hq S R] to the scores."""
    if not seen.numel():
        return q.new_zeros(*q.shape[:3], v.shape[-1])
    heads = (x.transpose(1, 2) for x in (q, k, v))
    mask = seen[:, None] if added is None else added.masked_fill(~seen[:, None], -torch.inf)
    o = scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale, enable_gqa=q.shape[2] != k.shape[2])
    return torch.where(seen.any(-1)[..., None, None], o.transpose(1, 2), 0)


def _added(bias: Bias, batch: Batch, at: Tensor, pages: Pages) -> Tensor:
    """−slope_h (i − j) + G_i − G_j [N Hq S R] of keys at [N R], in the dtype of q."""
    added = torch.zeros((), dtype=torch.float64, device=at.device)
    if bias.slopes is not None:
        added = -bias.slopes.double()[:, None, None] * (batch.own[..., None] - at[:, None])[:, None]
    if bias.decay is not None and bias.pages is not None:
        ends = pages.cu_seqlens
        own = bias.decay[:, None] if ends is None else pad(bias.decay[None, : int(ends[-1])], ends)  # [N S Hq]
        (held,) = _rows(pages, at, bias.pages)
        added = added + (own.transpose(1, 2)[..., None] - held.transpose(1, 2)[:, :, None])
    return added.to(batch.q.dtype)


def _visible(batch: Batch, pages: Pages) -> tuple[Tensor, Tensor]:
    """The positions [N R] of the rows that some query of a sequence may see, −1 for none, and which each sees [N S R]."""
    W, S, room = pages.window, batch.q.shape[1], _room(pages)
    oldest = torch.zeros_like(batch.before) if W is None else (batch.before + 1 - W).clamp(min=0)
    at = oldest[:, None] + torch.arange(room if W is None else min(room, W - 1 + S), device=batch.q.device)
    at = torch.where(at < pages.length[:, None], at, -1)
    lag = batch.own[..., None] - at[:, None]
    seen = (at >= 0)[:, None] & (lag >= 0)
    return at, seen if W is None else seen & (lag < W)


def _take(pages: Pages, at: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [N R Hkv ·] in `dtype` of tokens at [N R], zeros where there is none."""
    k, v = _rows(pages, at, pages.k, pages.v)
    return k.to(dtype), v.to(dtype)


def _rows(pages: Pages, at: Tensor, *columns: Tensor) -> list[Tensor]:
    """[N R …] of each of `columns`' pages, of tokens at [N R], zeros where there is none. What is not asked for is not read: it may be
    NaN."""
    PG = pages.k.shape[1]
    there = (at >= 0) & (at < pages.length[:, None])
    at = torch.where(there, at, 0).long()
    # a table without a column has no token
    table = pages.block_table.long() if pages.block_table.shape[1] else at.new_zeros(len(at), 1)
    page = torch.where(there, table.gather(1, at // PG), 0)

    def rows(x: Tensor) -> Tensor:
        return torch.where(there.view(*there.shape, *[1] * (x.dim() - 2)), x[page, at % PG], 0)

    return [rows(x) for x in columns]


def _room(pages: Pages) -> int:
    return pages.block_table.shape[1] * pages.k.shape[1]
