"""PaTH attention in blocks of C tokens, streamed from the newest to the oldest. Plain tensors of one dtype, no autograd.

    q⁰ = Q − L U,  L = tril(Q Wᵀ)                  own scores: tril(Q Kᵀ) − L R                      (transition.py has U, R, k¹)
    for each older block, the newest first:         scores x k¹ᵀ, then x ← x − (x Wᵀ) U               x begins as q⁰
    then the open block of the state, as a block whose queries came earlier, and its pages: scores x k̃ᵀ
    with a forget gate every score gets G_i − G_j,  G_t = g_1 + … + g_t, which no factor touches

Letters of shapes: n blocks of C tokens, H key-value heads, G query heads each. Dtypes are op.py's, packing and the growth of pages
custom_op.py's, the cutting into blocks common/blocks.py's. The backward is backward.py's.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.attention.blocks import Blocks
from needlework.ops.attention.pages import positions
from needlework.ops.path.arguments import PathInputs
from needlework.ops.path.state import BLOCK
from needlework.ops.path.transition import Transition

Which = int | slice


class Opened(NamedTuple):
    """The open block: its tensors [B H BLOCK ·], its values, where its tokens stand (−1: no key) and the rows that they have in the
    pages, [B BLOCK], and the sums of gates of its tokens."""

    block: Transition
    v: Tensor
    at: Tensor
    row: Tensor
    decay: Tensor | None  # [B H G BLOCK]

    def in_pages(self, x: Tensor, P: int) -> Tensor:
        """The tokens' rows x [B H BLOCK ·] where they lie in pages, [B P H ·]; zeros in the other rows."""
        n = torch.arange(len(self.at), device=x.device)[:, None]
        x = torch.where((self.at >= 0)[..., None, None], x.transpose(1, 2), 0)
        return x.new_zeros(len(x), P, *x.shape[2:]).index_put_((n, self.row), x, accumulate=True)

    def of_pages(self, x: Tensor) -> Tensor:
        """The gradient of `in_pages`: of pages [B P H ·], their tokens' rows [B H BLOCK ·]."""
        n = torch.arange(len(self.at), device=x.device)[:, None]
        return torch.where((self.at >= 0)[..., None, None], x[n, self.row], 0).transpose(1, 2)


class History(NamedTuple):
    """What came before a call: pages of carried keys, and the open block. `page_k` has open tokens' rows too, as the state has them."""

    page_k: Tensor  # [B P H K]
    page_v: Tensor  # [B P H V]
    w: Tensor  # [B BLOCK H K]
    beta: Tensor  # [B BLOCK H]
    length: Tensor  # [B]
    window: int | None
    decay: Tensor | None = None  # [B P HG]

    @property
    def start(self) -> Tensor:
        """[B] the open block's first token."""
        return self.length // BLOCK * BLOCK

    @property
    def empty(self) -> bool:
        """Whether shapes alone say that there is nothing."""
        return self.page_k.shape[1] == 0

    def open_block(self) -> Opened:
        t = self.start[:, None] + torch.arange(BLOCK, device=self.length.device)
        real = t < self.length[:, None]
        there = real & (
            t >= self.length[:, None] - self.page_k.shape[1]
        )  # a window shorter than the block has lost its first keys
        row = torch.where(there, t if self.window is None else t % self.window, 0)
        n = torch.arange(len(row), device=row.device)[:, None]
        k, v = (torch.where(there[..., None, None], x[n, row], 0).transpose(1, 2) for x in (self.page_k, self.page_v))
        w = torch.where(real[..., None, None], self.w, 0).transpose(1, 2)
        beta = torch.where(real[..., None], self.beta, 0).transpose(1, 2)
        decay = None if self.decay is None else torch.where(there[..., None], self.decay[n, row], 0)
        return Opened(Transition.of(w, k, beta), v, torch.where(there, t, -1), row, self._heads(decay))

    def _heads(self, decay: Tensor | None) -> Tensor | None:
        """[B rows HG] -> [B H G rows]."""
        return None if decay is None else decay.transpose(1, 2).unflatten(1, (self.page_k.shape[2], -1))

    def pages(self, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
        """(where their tokens stand [B rows], keys [B H rows K], values, sums of gates [B H G rows]) of `size` rows at a time; −1: empty,
        or of the open block."""
        at = positions(self.length, self.page_k.shape[1], self.window)
        at = torch.where(at < self.start[:, None], at, -1)
        k, v = self.page_k.transpose(1, 2), self.page_v.transpose(1, 2)
        for start in range(0, at.shape[1], size):
            rows = slice(start, start + size)
            yield at[:, rows], k[:, :, rows], v[:, :, rows], self._heads(None if self.decay is None else self.decay[:, rows])


class InBlocks(NamedTuple):
    """A call's tokens in blocks: q [n B H G C K], v [n B H C V], the blocks' own tensors [n B H …], and sums of gates [n B H G C]."""

    q: Tensor
    v: Tensor
    block: Transition
    decay: Tensor | None

    @classmethod
    def of(cls, blocks: Blocks, x: PathInputs) -> "InBlocks":
        decay = None if x.decay is None else blocks.split(x.decay)
        return cls(blocks.split(x.q), blocks.split(x.v)[:, :, :, 0], transition(blocks, x.k, x.beta, x.w), decay)

    def entered(self) -> tuple[Tensor, Tensor]:
        """L [n B H G C C], and q⁰."""
        L = (self.q @ self.block.W.mT[:, :, :, None]).tril_()
        return L, self.q - L @ self.block.U[:, :, :, None]


def transition(blocks: Blocks, k: Tensor, beta: Tensor, w: Tensor) -> Transition:
    """Of the blocks of a call's tokens [B T H ·]: [n B H …]."""
    k, beta, w = (blocks.split(x)[:, :, :, 0] for x in (k, beta, w))
    return Transition.of(w, k, beta)


def older(blocks: Blocks, x: Tensor, tokens: InBlocks) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """(query blocks, the key blocks that they meet, what is hidden) for blocks 1, 2, … behind, and x as it meets them, changed in place."""
    n, W, U = blocks.n, *(y[:, :, :, None] for y in (tokens.block.W, tokens.block.U))
    for offset, hidden in blocks.diagonals(x.device):
        if offset:
            rows, keys = slice(offset, n), slice(0, n - offset)
            yield rows, keys, hidden
            x[rows] -= (x[rows] @ W[keys].mT) @ U[keys]


def forgotten(a: Tensor, own: Tensor | None, keys: Tensor | None, which: Which = slice(None)) -> Tensor:
    """Scores a [.. C columns] with G_i − G_j of the gates' sums, [.. C] of the queries `which` of own and [.. columns] of keys; None: as
    they are. a is changed in place."""
    if own is None or keys is None:
        return a
    return a.add_((own[which][..., None] - keys[..., None, :]).to(a.dtype))


def hides(blocks: Blocks, here: Tensor, at: Tensor) -> Tensor:
    """[m B 1 1 C columns] true where a query at `here` [m B C] does not see the column's token, at [B columns], −1 for none."""
    hidden = (at < 0)[None, :, None]
    if blocks.window is not None:
        hidden = hidden | (here[..., None] - at[None, :, None] >= blocks.window)
    return hidden[:, :, None, None]


def reached(blocks: Blocks) -> int:
    """Of how many of the first blocks some query may see what came before the call."""
    return blocks.n if blocks.window is None else min(blocks.n, (blocks.window + blocks.C - 2) // blocks.C)


def forward(inputs: PathInputs, past: History, *, chunk_size: int) -> tuple[Tensor, Tensor]:
    """o [B T Hq V], and the logarithm of each softmax's denominator [B T Hq] for the backward."""
    q, v = inputs.q, inputs.v
    blocks = Blocks(q.shape[1], v.shape[2], past.window, chunk_size)
    tokens = InBlocks.of(blocks, inputs)
    L, x = tokens.entered()
    block, values, decay = tokens.block, tokens.v[:, :, :, None], tokens.decay
    M = x.new_full(x.shape[:-1], float("-inf"))
    D, S = torch.zeros_like(M), x.new_zeros(*M.shape, v.shape[-1])

    def merge(rows: slice, a: Tensor, v: Tensor, hidden: Tensor | None) -> None:
        """One block of keys more for the query blocks `rows`."""
        a = a if hidden is None else a.masked_fill_(hidden, float("-inf"))
        new = torch.maximum(M[rows], a.amax(-1))
        p = a.sub_(new[..., None]).exp_()
        rescale = torch.exp(M[rows] - new)
        M[rows] = new
        D[rows].mul_(rescale).add_(p.sum(-1))
        S[rows].mul_(rescale[..., None]).add_(p @ v)

    diagonal = dict(blocks.diagonals(q.device)).get(0)
    own = tokens.q @ block.K.mT[:, :, :, None] - L @ block.R[:, :, :, None]
    merge(slice(0, blocks.n), forgotten(own, decay, decay), values, diagonal)
    for rows, keys, hidden in older(blocks, x, tokens):
        a = x[rows] @ block.k1[keys].mT[:, :, :, None]
        merge(rows, forgotten(a, decay, None if decay is None else decay[keys], rows), values[keys], hidden)
    if not past.empty:
        first, here = slice(0, reached(blocks)), blocks.positions(past.length)
        x, opened = x[first].flatten(3, 4), past.open_block()
        a = (x @ opened.block.k1.mT).unflatten(3, (-1, blocks.C))
        merge(first, forgotten(a, decay, opened.decay, first), opened.v[:, :, None], hides(blocks, here[first], opened.at))
        x = opened.block.back(x)
        for at, page_k, page_v, page_decay in past.pages(chunk_size):
            a = (x @ page_k.mT).unflatten(3, (-1, blocks.C))
            merge(first, forgotten(a, decay, page_decay, first), page_v[:, :, None], hides(blocks, here[first], at))
    return blocks.join(S / D[..., None]), blocks.join(M + D.log())
