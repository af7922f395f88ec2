"""What the state keeps after a call: the keys H_{e−1} … H_{j+1} k_j, up to the last block boundary e, and w and β of the tokens from e on.

Tokens from e on take no part: their rows of U and R are left out (`Transition.until`), so that no block of the call has to end at e.
A sequence whose open block stays open keeps its keys as they are.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.attention.blocks import Blocks
from needlework.ops.path.chunk import History, transition
from needlework.ops.path.state import BLOCK
from needlework.ops.path.transition import Cotangents, Transition, gradients


def closing(length: Tensor, new: Tensor) -> Tensor:
    """[B] of a call's `new` [B] tokens after `length` others, how many come before the last boundary; none: the open block stays open."""
    return ((length + new) // BLOCK * BLOCK - length).clamp(min=0)


class After(NamedTuple):
    """A state's tensors after a call, apart: the keys of the pages' rows and of the call's tokens, and the open block."""

    page_k: Tensor  # [B P H K]
    k: Tensor  # [B T H K]
    w: Tensor  # [B BLOCK H K]
    beta: Tensor  # [B BLOCK H]


def after(past: History, new: Tensor, k: Tensor, beta: Tensor, w: Tensor, *, chunk_size: int) -> After:
    """Of a call that brings each row `new` [B] tokens, at most T of [B T H ·]."""
    page_k, end, moved = past.page_k, closing(past.length, new), Moved.of(past.length, new)
    opened = moved.take(past.w, w), moved.take(past.beta, beta)
    if bool((end > 0).any()):
        blocks = Blocks(k.shape[1], k.shape[2], past.window, chunk_size)
        page_k, k = Kept(blocks, transition(blocks, k, beta, w), past, end).forward()
    return After(page_k, k, *opened)


class KeptGradients(NamedTuple):
    """Of what the kept keys were made from; of the call's tokens first."""

    k: Tensor
    beta: Tensor
    w: Tensor
    page_k: Tensor
    open_w: Tensor
    open_beta: Tensor


def gradients_of_kept(
    past: History, dpage_k: Tensor, dk: Tensor, k: Tensor, beta: Tensor, w: Tensor, end: Tensor, *, chunk_size: int
) -> KeptGradients:
    """From gradients of the kept keys of the pages [B P H K] and of the call [B T H K], of which the first `end` [B] tokens' are closed."""
    open_w, open_beta = torch.zeros_like(past.w), torch.zeros_like(past.beta)
    if not bool((end > 0).any()):
        return KeptGradients(dk, torch.zeros_like(beta), torch.zeros_like(w), dpage_k, open_w, open_beta)
    blocks = Blocks(k.shape[1], k.shape[2], past.window, chunk_size)
    block = transition(blocks, k, beta, w)
    kept = Kept(blocks, block, past, end)
    dpage_k, own, open_own = kept.backward(dpage_k, dk)
    dW, dK, dbeta = gradients(block, [own])
    if kept.opened is not None and open_own is not None:
        dw, dopen_k, db = gradients(kept.opened.block, [open_own])
        open_w, open_beta = dw.transpose(1, 2), db.transpose(1, 2)
        dpage_k = dpage_k + kept.opened.in_pages(dopen_k, dpage_k.shape[1])
    one = lambda x: blocks.join(x[:, :, :, None])
    return KeptGradients(one(dK), one(dbeta), one(dW), dpage_k, open_w, open_beta)


class Moved(NamedTuple):
    """Where the rows of the open block after a call come from, [N BLOCK]: of the one before and then the call's tokens, 0 … BLOCK + T."""

    row: Tensor
    real: Tensor

    @classmethod
    def of(cls, length: Tensor, new: Tensor) -> "Moved":
        before, total = length % BLOCK, length + new
        t = (total // BLOCK * BLOCK - length)[:, None] + torch.arange(
            BLOCK, device=length.device
        )  # of the call, below 0: before it
        row = torch.where(t < 0, before[:, None] + t, BLOCK + t)
        real = torch.arange(BLOCK, device=length.device) < (total % BLOCK)[:, None]
        return cls(torch.where(real, row, 0), real)

    def take(self, opened: Tensor, new: Tensor) -> Tensor:
        """[N BLOCK ...] of opened [N BLOCK ...] and the call's tokens [N T ...]."""
        x = torch.cat([opened, new], 1)
        return torch.where(self._real(x), x[self._sequence, self.row], 0)

    def back(self, d: Tensor, T: int) -> tuple[Tensor, Tensor]:
        """The gradient of `take`, of both."""
        given = d.new_zeros(len(d), BLOCK + T, *d.shape[2:])
        given.index_put_((self._sequence, self.row), d * self._real(d), accumulate=True)
        return given[:, :BLOCK], given[:, BLOCK:]

    @property
    def _sequence(self) -> Tensor:
        return torch.arange(len(self.row), device=self.row.device)[:, None]

    def _real(self, x: Tensor) -> Tensor:
        return self.real.view(*self.real.shape, *[1] * (x.dim() - 2))


class Kept:
    """The keys of one call's: `end` [B] of its tokens are closed. Every form of a block here is the block of those alone."""

    def __init__(self, blocks: Blocks, block: Transition, past: History, end: Tensor):
        token = torch.arange(blocks.n * blocks.C, device=end.device).view(blocks.n, 1, 1, blocks.C)
        self.blocks, self.past = blocks, past
        self.inside = (token < end[:, None, None]).to(block.W.dtype)  # [n B 1 C]
        self.form = block.until(self.inside)
        self.opened = None if past.empty else past.open_block()
        self.closed = (end > 0).to(block.W.dtype)[:, None, None].expand(-1, 1, BLOCK)

    def forward(self) -> tuple[Tensor, Tensor]:
        """The keys of the pages' rows [B P H K] and of the call's tokens [B T H K]."""
        n, k = self.blocks.n, self.form.k1.clone()
        for offset in range(1, n):
            k[: n - offset] = self.form.at(slice(offset, n)).on(k[: n - offset])
        page_k = self.past.page_k
        if self.opened is not None:
            keys = self._before()
            for i in range(n):
                keys = self._on(i, keys)
            page_k = self._pages(*keys)
        return page_k, self.blocks.join(k[:, :, :, None])

    def backward(self, dpage_k: Tensor, dk: Tensor) -> tuple[Tensor, Cotangents, Cotangents | None]:
        """Gradients of forward's results -> of the pages' keys [B P H K], and what passed the blocks, and the open block."""
        n, D = self.blocks.n, self.blocks.split(dk)[:, :, :, 0]
        transfer = D.new_zeros(*D.shape[:-2], D.shape[-1], D.shape[-1])
        for j in range(n):
            keys = [self.form.k1[j]]
            for i in range(j + 1, n):
                keys.append(self.form.at(i).on(keys[-1]))
            for i in range(n - 1, j, -1):
                transfer[i] += D[j].mT @ keys[i - j - 1]
                D[j] = self.form.at(i).back(D[j])
        own = Cotangents(transfer, D, self.inside)
        if self.opened is None:
            return dpage_k, own, None
        keys = [self._before()]
        for i in range(n):
            keys.append(self._on(i, keys[-1]))
        d = self._columns(dpage_k)
        for i in range(n - 1, -1, -1):
            transfer[i] += d[0].mT @ keys[i][0] + d[1].mT @ keys[i][1]
            d = self.form.at(i).back(d[0]), self.form.at(i).back(d[1])
        dpage, dk1 = d
        open_form = self.opened.block.until(self.closed)
        page = self.past.page_k.transpose(1, 2)
        back = Cotangents(dpage.mT @ page, dk1, self.closed)
        return open_form.back(dpage).transpose(1, 2), own, back

    def _before(self) -> tuple[Tensor, Tensor]:
        """Keys of the pages and of the open block, as the call's first token finds them."""
        assert self.opened is not None
        form = self.opened.block.until(self.closed)
        return form.on(self.past.page_k.transpose(1, 2)), form.k1

    def _on(self, i: int, keys: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The same behind the call's block i."""
        return self.form.at(i).on(keys[0]), self.form.at(i).on(keys[1])

    def _pages(self, page: Tensor, own: Tensor) -> Tensor:
        """[B P H K], the open block's tokens in their rows."""
        opened, P = self.opened, page.shape[2]
        assert opened is not None
        return torch.where(opened.in_pages(torch.ones_like(own), P) > 0, opened.in_pages(own, P), page.transpose(1, 2))

    def _columns(self, dpage_k: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of `_pages`."""
        opened, P = self.opened, dpage_k.shape[1]
        assert opened is not None
        own = opened.of_pages(dpage_k)
        page = torch.where(opened.in_pages(torch.ones_like(own), P) > 0, 0, dpage_k)
        return page.transpose(1, 2), own
