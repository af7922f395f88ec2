"""Attention over pages, literally: every sequence's rows are gathered, and one query after the other attends.

The same two forms over dense tensors are what errors are judged by: one query at a time (the definition), and streamed by blocks of keys.
They know nothing of chunk.py and of the kernels, and run in the dtype of their inputs.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import normalize

from needlework.ops.common.operands import identity
from needlework.ops.paged.arguments import Bias, Pages
from needlework.ops.polar.arguments import Parameters
from needlework.ops.polar.reference import recurrent_polar
from needlework.ops.polar.state import PolarState


def recurrent_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    slopes: Tensor | None = None,
    decay: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    operand: Callable[[Tensor], Tensor] = identity,
) -> Tensor:
    """o_i = Σ_j softmax_j(scale · q_i·k_j − m (i − j) + G_i − G_j) v_j over the keys with 0 <= i − j < window of the same sequence.

    q [B T Hq d] are the newest of the L >= T tokens of k [B L Hkv d], v [B L Hkv V]; query head h reads key-value head h // (Hq // Hkv).
    m: slopes [Hq]; G: decay [B L Hq], float64.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None) -> Tensor:
        k, v = (operand(x.repeat_interleave(q.shape[2] // k.shape[2], 2)) for x in (k, v))
        o = []
        for i in range(q.shape[1]):
            own = k.shape[1] - q.shape[1] + i
            seen = slice(max(0, own + 1 - window) if window else 0, own + 1)
            a = (scale or q.shape[-1] ** -0.5) * torch.einsum("bhd,bnhd->bhn", operand(q[:, i]), k[:, seen])
            w = torch.softmax(a + _bias(a, slopes, decay, torch.tensor([own]), torch.arange(k.shape[1])[seen])[:, :, 0], -1)
            o.append(torch.einsum("bhn,bnhv->bhv", operand(w), v[:, seen]))
        return torch.stack(o, 1) if o else q.new_zeros(*q.shape[:3], v.shape[-1])

    return _each_sequence(attend, (q, k, v) if decay is None else (q, k, v, decay), cu_seqlens)


def _bias(a: Tensor, slopes: Tensor | None, decay: Tensor | None, i: Tensor, j: Tensor) -> Tensor:
    """−m (i − j) + G_i − G_j [· Hq I J] of queries at [I] and keys at [J], a sequence's positions, in a's dtype."""
    bias = a.new_zeros(1, a.shape[1], len(i), len(j))
    i, j = i.to(a.device), j.to(a.device)
    if slopes is not None:
        bias = bias - slopes.to(a.dtype)[:, None, None] * (i[:, None] - j)
    if decay is not None:
        bias = bias + (decay[:, i, None] - decay[:, None, j]).permute(0, 3, 1, 2).to(a.dtype)
    return bias


def literal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    slopes: Tensor | None = None,
    decay: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    operand: Callable[[Tensor], Tensor] = identity,
) -> Tensor:
    """The same streamed over blocks of chunk_size keys, p = e^{a−M} of scores a:

    M = max a,  L = Σ p,  S = Σ p v;   a new M' rescales L and S by e^{M−M'};   o = S / L
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None) -> Tensor:
        k, v = (operand(x.repeat_interleave(q.shape[2] // k.shape[2], 2)) for x in (k, v))
        past = k.shape[1] - q.shape[1]
        o = [q.new_zeros(len(q), 0, q.shape[2], v.shape[-1])]
        for start in range(0, q.shape[1], chunk_size):
            i = torch.arange(start, min(start + chunk_size, q.shape[1]), device=q.device)
            M = q.new_full((len(q), q.shape[2], len(i)), float("-inf"))
            L, S = torch.zeros_like(M), q.new_zeros(*M.shape, v.shape[-1])
            # from the newest keys back, so that the first block holds each query's own key and M is finite
            for end in range(past + start + len(i), 0, -chunk_size):
                j = torch.arange(max(0, end - chunk_size), end, device=q.device)
                distance = past + i[:, None] - j
                hidden = (distance < 0) | (distance >= (window or past + q.shape[1]))
                a = torch.einsum("bchd,bnhd->bhcn", operand(q[:, i]), k[:, j]) * (scale or q.shape[-1] ** -0.5)
                a = (a + _bias(a, slopes, decay, past + i, j)).masked_fill(hidden, float("-inf"))  # [B Hq C n]
                new = torch.maximum(M, a.amax(-1))
                p, rescale = torch.exp(a - new[..., None]), torch.exp(M - new)
                M, L = new, rescale * L + p.sum(-1)
                S = rescale[..., None] * S + torch.einsum("bhcn,bnhv->bhcv", operand(p), v[:, j])
            o.append((S / L[..., None]).transpose(1, 2))
        return torch.cat(o, 1)

    return _each_sequence(attend, (q, k, v) if decay is None else (q, k, v, decay), cu_seqlens)


def differential(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, lam: Tensor, **settings: object) -> Tensor:
    """attend(q₁, k₁, v) − λ attend(q₂, k₂, v): a head of q and k [... d] is two vectors side by side, scaled by (d/2)^-1/2."""
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    return attend(q1, k1, v, **settings) - lam.to(q.dtype).expand(q.shape[-2])[:, None] * attend(q2, k2, v, **settings)


def paged_softmax(q: Tensor, pages: Pages, scale: float | None, bias: Bias | None) -> Tensor:
    slopes, _, held = bias or Bias()

    def attend(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None) -> Tensor:
        return recurrent_attention(q, k, v, window=pages.window, scale=scale, slopes=slopes, decay=decay)

    return _each_row_of_the_table(attend, q, pages, more_pages=() if held is None else (held,))


def paged_difference(q: Tensor, pages: Pages, lam: Tensor, scale: float | None) -> Tensor:
    settings = {"window": pages.window, "scale": scale}
    attend = lambda q, k, v: differential(recurrent_attention, q, k, v, lam, **settings)
    return _each_row_of_the_table(attend, q, pages)


def paged_direction(q: Tensor, pages: Pages, parameters: Parameters) -> tuple[Tensor, Tensor]:
    W = pages.window

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past = k.shape[1] - q.shape[1]
        if past < 0:  # a query without a key
            null = normalize(parameters.v_null, dim=-1, eps=1e-6).to(q.dtype)
            return torch.cat((null, torch.zeros_like(null[:, :1])), -1)[None, None]
        P = min(past, W or past)
        ring = sorted(range(past - P, past), key=lambda t: t % P)  # the token of each row
        state = PolarState(k[:, ring], v[:, ring], torch.tensor([past]))
        direction, magnitude, _ = recurrent_polar(q, k[:, past:], v[:, past:], *parameters, window=W, initial_state=state)
        return torch.cat((direction, magnitude[..., None]), -1)

    found = _each_row_of_the_table(attend, q, pages, 1)
    return found[..., :-1], found[..., -1]


def _each_row_of_the_table(
    attend: Callable[..., Tensor], q: Tensor, pages: Pages, more: int = 0, more_pages: tuple[Tensor, ...] = ()
) -> Tensor:
    """[T Hq V + more] of attend(q [1 new Hq d], k [1 length Hkv d], v, and of more_pages) for each sequence, zeros in padded rows.

    Rows of pages that no query of the call sees are zeros there, and are never read.
    """
    PG = pages.k.shape[1]
    out = q.new_zeros(*q.shape[:2], pages.v.shape[3] + more)
    ends = list(range(len(q) + 1)) if pages.cu_seqlens is None else pages.cu_seqlens.tolist()
    for n, (length, (start, end)) in enumerate(zip(pages.length.tolist(), pairwise(ends), strict=True)):
        if length < 0 or start == end:
            continue
        oldest = max(0, length - (end - start) + 1 - pages.window) if pages.window else 0

        def rows(x: Tensor, n=n, length=length, oldest=oldest) -> Tensor:
            gathered = x.new_zeros(1, length, *x.shape[2:], dtype=torch.promote_types(q.dtype, x.dtype))
            for t in range(oldest, length):
                gathered[0, t] = x[pages.block_table[n, t // PG], t % PG]
            return gathered

        out[start:end] = attend(q[None, start:end], *map(rows, (pages.k, pages.v, *more_pages)))[0]
    return out


def _each_sequence(attend: Callable[..., Tensor], tokens: tuple[Tensor, ...], cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is None:
        return attend(*tokens)
    return torch.cat([attend(*(x[:, a:b] for x in tokens)) for a, b in pairwise(cu_seqlens.tolist())], 1)
