"""The gradient of the scores, by hand: each query block walks back to the oldest key and returns with the gradient of what it carries.

    from the oldest block on, y = 0 at first, x the query as it met the block, dA the scores' gradient:
        transfer += xᵀ y,    y ← y − (y Uᵀ) W + dA k¹,    dk¹ += dAᵀ x;     in the end dq⁰ = y
    then every block by itself, dA its diagonal one:
        dL = −tril(dA Rᵀ + dq⁰ Uᵀ)    dR = −Lᵀ dA    dU = −Lᵀ dq⁰    dQ = dA K + dq⁰ + dL W    dK = dAᵀ Q    dW = dLᵀ Q
    and transition.py's for what dR, dU, transfer and dk¹ give

H is singular at β = 1: the carried queries are made again and kept, T K numbers a head at a time, never divided back. What dA is, and
what values get, is the caller's.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.path.transition import Cotangents, gradients
from needlework.ops.path.walk import Met, Place, Walk


class Gradients(NamedTuple):
    """Of `chunk.forward`'s inputs: the tokens', then what came before. The sums of gates are the caller's, as what dA is."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    w: Tensor
    page_k: Tensor
    page_v: Tensor
    open_w: Tensor
    open_beta: Tensor
    decay: Tensor | None = None
    page_decay: Tensor | None = None


class Sweep:
    """Of one call's walk. dv [n B H C V], page_dv [B H P V] and open_dv [B H BLOCK V] are the caller's."""

    def __init__(self, walk: Walk):
        self.walk = walk
        transfer = lambda x: x.new_zeros(*x.shape[:-2], x.shape[-1], x.shape[-1])
        self.dq0, self.dk1, self.dv = (torch.zeros_like(x) for x in (walk.q0, walk.block.k1, walk.values))
        self.transfer = transfer(walk.block.W)
        self.page_dk, self.page_dv = (torch.zeros_like(x).transpose(1, 2) for x in (walk.past.page_k, walk.past.page_v))
        if walk.opened is not None:
            self.open_dk, self.open_dv = torch.zeros_like(walk.opened.block.k1), torch.zeros_like(walk.opened.v)
            self.open_transfer = transfer(walk.opened.block.W)

    def values(self, place: Place) -> Tensor:
        """Where the gradient of `walk.v(place)` is added up."""
        if isinstance(place, int):
            return self.dv[place]
        return self.page_dv[:, :, place] if isinstance(place, slice) else self.open_dv

    def come_back(self, y: Tensor, met: Met, dA: Tensor) -> Tensor:
        """y [B H GC K] behind what it has met, with the scores' gradient [B H GC columns]; from the oldest on."""
        dk = dA.mT @ met.x
        match met.place:
            case int(j):
                self.dk1[j] += dk
                self.transfer[j] += met.x.mT @ y
            case slice() as rows:
                self.page_dk[:, :, rows] += dk
            case _:
                self.open_dk += dk
                self.open_transfer += met.x.mT @ y
        return (y if met.form is None else met.form.on(y)) + dA @ met.k

    def arrived(self, i: int, y: Tensor) -> None:
        """Query block i is back with y [B H GC K]."""
        self.dq0[i] = y.unflatten(2, (-1, self.walk.blocks.C))

    def finish(self, dA: Tensor) -> Gradients:
        """dA: of `Walk.own`'s scores, zeros above the diagonal. The values' gradients are what the caller has made of dv, page_dv and
        open_dv."""
        walk = self.walk
        block, q, past, blocks = walk.block, walk.tokens.q, walk.past, walk.blocks
        dL = -(dA @ block.R.mT[:, :, :, None] + self.dq0 @ block.U.mT[:, :, :, None]).tril_()
        passed = [Cotangents(self.transfer, self.dk1)]
        dW, dk, dbeta = gradients(block, passed, -(walk.L.mT @ dA).sum(3), -(walk.L.mT @ self.dq0).sum(3))
        dq = dA @ block.K[:, :, :, None] + self.dq0 + dL @ block.W[:, :, :, None]
        dk = dk + (dA.mT @ q).sum(3)
        dW = dW + (dL.mT @ q).sum(3)
        page_k, page_v = (x.transpose(1, 2) for x in (self.page_dk, self.page_dv))
        open_w, open_beta = torch.zeros_like(past.w), torch.zeros_like(past.beta)
        if walk.opened is not None:
            dw, dopen_k, db = gradients(walk.opened.block, [Cotangents(self.open_transfer, self.open_dk)])
            open_w, open_beta = dw.transpose(1, 2), db.transpose(1, 2)
            P = page_k.shape[1]
            page_k = page_k + walk.opened.in_pages(dopen_k, P)
            page_v = page_v + walk.opened.in_pages(self.open_dv, P)
        one = lambda x: blocks.join(x[:, :, :, None])
        return Gradients(
            q=blocks.join(dq), k=one(dk), v=one(self.dv), beta=one(dbeta), w=one(dW),
            page_k=page_k, page_v=page_v, open_w=open_w, open_beta=open_beta,
        )  # fmt: skip
