"""What the literal forms of PaTH and LUCID-PaTH share: sequences one after the other, keys carried token by token, blocks.

All of it runs in the dtype of its inputs, under autograd, and knows nothing of chunk.py. `operand` rounds what enters a matrix product;
M, what it is solved from and what is carried from token to token, or from block to block, stay as they are.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.attention.definition import page, rows_held, together
from needlework.ops.common.decay import NOTHING
from needlework.ops.common.operands import Operand
from needlework.ops.path.arguments import (
    check_call,
    check_data,
    check_gates,
    check_keys,
    check_queries,
    check_read,
    no_tokens_yet,
)
from needlework.ops.path.state import BLOCK, PathOutput, PathState
from needlework.ops.unit.reference import unit_rows


class Tokens(NamedTuple):
    """What a key-value head has of some tokens of a sequence, [B T Hkv ·], and the sums G of the query heads' log gates."""

    k: Tensor
    v: Tensor
    beta: Tensor
    w: Tensor
    decay: Tensor | None = None  # [B T Hq]


class Past(NamedTuple):
    """The tokens before a call: `k` as the state keeps it, w and beta of the open block's tokens alone."""

    k: Tensor
    v: Tensor
    beta: Tensor
    w: Tensor
    length: int  # k, v and decay may have fewer tokens, the newest
    decay: Tensor | None = None

    @property
    def open(self) -> int:
        return self.w.shape[1]


# of one sequence, or of several with as many tokens before: o, the keys that the state keeps, and its new values
Attend = Callable[[Tensor, Tokens, Past], tuple[Tensor, Tensor, Tensor]]


def forgotten(a: Tensor, own: Tokens, past: Past, queries: slice, keys: slice) -> Tensor:
    """Scores a [B H G C columns] of some of a call's queries with some of all keys so far, and what a forget gate adds: G_i − G_j."""
    if own.decay is None or past.decay is None:
        return a
    i, j = own.decay[:, queries], torch.cat([past.decay, own.decay], 1)[:, keys]
    lost = (i[:, :, None] - j[:, None]).permute(0, 3, 1, 2).to(a.dtype)  # [B Hq C columns]
    return a + lost.unflatten(1, a.shape[1:3])


class Passing:
    """A call token by token: iterates over all keys so far as each token sees them, its own included. `kept`: as the state keeps them."""

    def __init__(self, own: Tokens, past: Past, operand: Operand):
        self.own, self.past, self.operand, self.kept = own, past, operand, past.k

    def __iter__(self) -> Iterator[Tensor]:
        own, past, now = self.own, self.past, self.past.k
        for t in range(past.open):  # its factor is not in the keys before it yet
            end = max(0, past.k.shape[1] - past.open + t)
            now = torch.cat([_carried(now[:, :end], past.w[:, t], past.beta[:, t], self.operand), now[:, end:]], 1)
        for i in range(own.k.shape[1]):
            now = torch.cat([_carried(now, own.w[:, i], own.beta[:, i], self.operand), own.k[:, i : i + 1]], 1)
            ends = (past.length + i + 1) % BLOCK == 0
            self.kept = now if ends else torch.cat([self.kept, own.k[:, i : i + 1]], 1)
            yield now


def _carried(k: Tensor, w: Tensor, beta: Tensor, operand: Operand) -> Tensor:
    """H k of the keys of all earlier tokens."""
    along = torch.einsum("bhk,bjhk->bjh", operand(w), k)
    return k - (beta[:, None] * along)[..., None] * w[:, None]


class BlockRow(NamedTuple):
    """A block's queries: their scores with all keys so far, the oldest first, and what they do not see."""

    tokens: slice
    scores: Tensor  # [B H G C columns]
    hidden: Tensor  # [C columns]


class InBlocks:
    """A call in blocks of chunk_size tokens, as spec and card print them."""

    def __init__(self, q: Tensor, own: Tokens, past: Past, chunk_size: int, operand: Operand):
        self.own, self.past, self.size, self.operand = own, past, chunk_size, operand
        self.T, self.held = q.shape[1], past.k.shape[1]
        G = q.shape[2] // own.k.shape[2]
        self.q = q.transpose(1, 2).unflatten(1, (-1, G))  # [B H G T K]
        k, w = own.k.transpose(1, 2), own.w.transpose(1, 2)  # [B H T K]
        beta = own.beta.transpose(1, 2)[..., None]
        self.k_past, w_open = past.k.transpose(1, 2), past.w.transpose(1, 2)
        self.s = max(0, self.held - past.open)  # from here on tokens before the call are in the open block
        # the open block may be older than its keys: those out of the window are gone, their factors are not
        gone = past.open - min(past.open, self.held)
        self.opened = Block.of(self.k_past[:, :, self.s :], w_open, past.beta.transpose(1, 2), gone)
        cut = lambda x, i: x[..., i : i + chunk_size, :]
        self.starts = range(0, self.T, chunk_size)
        self.blocks = [Block.of(cut(k, i), cut(w, i), cut(beta, i)[..., 0]) for i in self.starts]

    def rows(self, window: int | None) -> Iterator[BlockRow]:
        operand = self.operand
        for n, start in enumerate(self.starts):
            block, tokens = self.blocks[n], slice(start, min(start + self.size, self.T))
            q = self.q[..., tokens, :]
            L = (operand(q) @ operand(block.W).mT[:, :, None]).tril()
            x = q - operand(L) @ operand(block.MW)[:, :, None]
            scores = [(operand(q) @ operand(block.K).mT[:, :, None]) - operand(L) @ operand(block.MN)[:, :, None]]
            for other in [*reversed(self.blocks[:n]), self.opened]:
                scores.append(operand(x) @ operand(other.k1).mT[:, :, None])
                x = x - operand(operand(x) @ operand(other.W).mT[:, :, None]) @ operand(other.MW)[:, :, None]
            scores.append(operand(x) @ operand(self.k_past[:, :, : self.s]).mT[:, :, None])
            a = torch.cat(scores[::-1], -1)
            i = torch.arange(tokens.start, tokens.stop, device=q.device)
            gap = i[:, None] + self.held - torch.arange(a.shape[-1], device=q.device)
            yield BlockRow(tokens, a, (gap < 0) | (gap >= (window or self.held + self.T)))

    def kept(self) -> Tensor:
        """The keys as the state keeps them after the call [B · H K]."""
        past = self.past
        end = (past.length + self.T) // BLOCK * BLOCK - (
            past.length - past.open
        )  # tokens from the last boundary to the next one
        if end <= 0:
            return torch.cat([past.k, self.own.k], 1)
        k = self.k_past[:, :, : self.s]
        k = torch.cat([k - (k @ self.opened.MW.mT) @ self.opened.W, self.opened.k1], 2)
        for start, block in zip(self.starts, self.blocks, strict=True):
            # M is lower triangular: rows of tokens past the boundary are left out
            inside = (start + torch.arange(block.W.shape[2], device=k.device) < end - past.open)[:, None]
            MW, MN = (torch.where(inside, x, 0) for x in (block.MW, block.MN))
            k = torch.cat([k - (k @ MW.mT) @ block.W, block.K - MN.mT @ block.W], 2)
        return k.transpose(1, 2)


class Block(NamedTuple):
    """A block's W, K, M W, M N and k¹, [B H C ·]."""

    W: Tensor
    K: Tensor
    MW: Tensor
    MN: Tensor
    k1: Tensor

    @classmethod
    def of(cls, K: Tensor, W: Tensor, beta: Tensor, gone: int = 0) -> "Block":
        """gone: of so many of its first tokens there are no keys."""
        C = W.shape[-2]
        A = torch.eye(C, dtype=W.dtype, device=W.device) + beta[..., None] * (W @ W.mT).tril(-1)
        M = torch.linalg.solve_triangular(A, torch.diag_embed(beta), upper=False)
        MN = M @ (W @ K.mT).tril(-1 - gone)
        return cls(W, K, M @ W, MN, K - MN.mT @ W)


def each_sequence(
    attend: Attend, q: Tensor, tokens: Tokens, initial_state: PathState | None, output_final_state: bool, *,
    window: int | None, scale: float | None, l2norm: bool, cu_seqlens: Tensor | None, g: Tensor | None = None,
) -> PathOutput:  # fmt: skip
    """attend(q, tokens, past) of each sequence, or of the whole batch where all have the same past."""
    check_keys(*tokens[:4], "B T Hkv")
    check_queries(q, tokens.k, "B T Hq")
    check_gates(g, q, "B T Hq")
    check_read(window, scale)
    N = check_call(tokens.k, tokens.v, window, initial_state, cu_seqlens, g)
    P = 0 if initial_state is None else initial_state.k.shape[1]
    state = no_tokens_yet(N, *tokens[:4], g) if initial_state is None else initial_state
    check_data(state.length, P, window, cu_seqlens, *q.shape[:2])
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    tokens = tokens._replace(w=unit_rows(tokens.w)) if l2norm else tokens
    pasts = state.length.tolist()
    pieces = together(pasts, cu_seqlens)
    outputs, grown = [], []
    for row, which, sequence in pieces:
        length, own = pasts[sequence.start], Tokens(*(x[row, which] for x in tokens[:4]))
        held = rows_held(length, window)
        k, v, *decay = (x[sequence][:, held] for x in (state.k, state.v, state.decay) if x is not None)
        beta, w = (x[sequence, : length % BLOCK] for x in (state.beta, state.w))
        past = Past(k.to(own.k.dtype), v.to(own.v.dtype), beta.to(own.beta.dtype), w.to(own.w.dtype), length, *decay)
        own = own if g is None else own._replace(decay=_sums(past, g[row, which]))
        o, kept, values = attend(q[row, which], own, past)
        outputs.append(o)
        rows = kept, torch.cat([past.v, values], 1), *(() if own.decay is None else (torch.cat([*decay, own.decay], 1),))
        grown.append((rows, _open(past, own)))
    o = torch.cat(outputs, 0 if cu_seqlens is None else 1)
    if not output_final_state:
        return PathOutput(o, None)
    totals = [length + x.shape[1] for length, x in zip([pasts[s.start] for *_, s in pieces], outputs, strict=True)]
    most = P + q.shape[1] if cu_seqlens is None else max(totals)
    pages = [[page(x, total, most, window) for x in rows] for (rows, _), total in zip(grown, totals, strict=True)]
    beta, w, k, v, *decay = (
        torch.cat(column) for column in zip(*((*opened, *a) for a, (_, opened) in zip(pages, grown, strict=True)), strict=True)
    )
    length = torch.tensor([total for o, total in zip(outputs, totals, strict=True) for _ in range(len(o))], device=q.device)
    return PathOutput(o, PathState(k, v, w, beta, length.to(torch.int64), *decay))


def _sums(past: Past, g: Tensor) -> Tensor:
    """G of a call's tokens from their log gates g [B T Hq], one after the other."""
    held = past.decay
    total = g.new_zeros(len(g), g.shape[2], dtype=torch.float64) if held is None or not held.shape[1] else held[:, -1]
    sums = []
    for t in range(g.shape[1]):
        total = total + g[:, t].double().masked_fill(
            g[:, t] <= NOTHING, NOTHING
        )  # e^g is 0; a difference of −∞ would be no number
        sums.append(total)
    return torch.stack(sums, 1) if sums else g.double()


def _open(past: Past, own: Tokens) -> tuple[Tensor, Tensor]:
    """β and w of the open block after the call, [B BLOCK ·]."""
    left = (past.length + own.k.shape[1]) % BLOCK

    def last(before: Tensor, new: Tensor) -> Tensor:
        x = torch.cat([before, new], 1)
        x = x[:, x.shape[1] - left :]
        return torch.cat([x, x.new_zeros(len(x), BLOCK - left, *x.shape[2:])], 1)

    return last(past.beta, own.beta), last(past.w, own.w)
