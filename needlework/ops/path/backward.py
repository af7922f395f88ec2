"""The backward of chunk.py, by hand: each query block walks back to the oldest key and returns with the gradient of what it carries.

    dA = P ∘ (dO Vᵀ − rowsum(dO ∘ O))          P = e^{A − lse}
    from the oldest block on, y = 0 at first, x the query as it met the block:
        transfer += xᵀ y,    y ← y − (y Uᵀ) W + dA k¹,    dk¹ += dAᵀ x,    dV += Pᵀ dO;     in the end dq⁰ = y
    then every block by itself, dA its diagonal one:
        dL = −tril(dA Rᵀ + dq⁰ Uᵀ)    dR = −Lᵀ dA    dU = −Lᵀ dq⁰    dQ = dA K + dq⁰ + dL W    dK = dAᵀ Q    dW = dLᵀ Q
    and transition.py's for what dR, dU, transfer and dk¹ give

H is singular at β = 1: the carried queries are remade and kept, T K numbers a head at a time, never divided back.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.common.blocks import Blocks
from needlework.ops.path.arguments import PathInputs
from needlework.ops.path.chunk import History, InBlocks, hides, reached
from needlework.ops.path.kept import Kept
from needlework.ops.path.transition import Cotangents, Transition, gradients
from needlework.ops.runtime.each import each


class Gradients(NamedTuple):
    """Of forward's inputs, in their order; w and beta of the open block last."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    w: Tensor
    page_k: Tensor
    page_v: Tensor
    open_w: Tensor
    open_beta: Tensor


class Sums(NamedTuple):
    """What blocks [… B H] get from the queries that met them, added up in place: see the equations above."""

    transfer: Tensor  # [… K K]
    k1: Tensor  # [… C K]
    v: Tensor  # [… C V]

    @classmethod
    def of(cls, block: Transition, v: Tensor) -> "Sums":
        K = block.W.shape[-1]
        return cls(block.W.new_zeros(*block.W.shape[:-2], K, K), torch.zeros_like(block.k1), torch.zeros_like(v))

    def at(self, i: int) -> "Sums":
        return Sums(*(x[i] for x in self))

    def meet(self, key: Transition, x: Tensor, y: Tensor, p: Tensor, da: Tensor, do: Tensor) -> Tensor:
        """Adds the queries x [B H rows K] that come back with y; y as it goes on."""
        self.transfer.add_(x.mT @ y)
        self.k1.add_(da.mT @ x)
        self.v.add_(p.mT @ do)
        return key.on(y) + da @ key.k1


def backward(
    do: Tensor, o: Tensor, lse: Tensor, inputs: PathInputs, past: History,
    dkept: tuple[Tensor, Tensor] | None, end: Tensor, *, chunk_size: int,
) -> Gradients:  # fmt: skip
    """Gradients of `chunk.forward`'s inputs. dkept: those of the keys that the state keeps, [B P H K] and [B T H K], of which the first
    `end` [B] tokens' are carried on (kept.py)."""
    blocks = Blocks(inputs.q.shape[1], inputs.k.shape[2], past.window, chunk_size)
    tokens = InBlocks.of(blocks, inputs)
    block, v, L, q0 = tokens.block, tokens.v, *tokens.entered()
    do, lse, D = blocks.split(do), blocks.split(lse), blocks.split((do * o).sum(-1))
    hidden = dict(blocks.diagonals(do.device))

    def weigh(a: Tensor, i: int | slice, v: Tensor, hide: Tensor | None) -> tuple[Tensor, Tensor]:
        """P and dA of scores a [.. G C columns] of query blocks i with values v [.. columns V]."""
        p = a.sub_(lse[i][..., None]).exp_()
        if hide is not None:
            p = p.masked_fill(hide, 0)
        return p, p * (do[i] @ v.mT[..., None, :, :] - D[i][..., None])

    # every block with itself
    own = tokens.q @ block.K.mT[:, :, :, None] - L @ block.R[:, :, :, None]
    p, dA = weigh(own, slice(None), v, hidden.get(0))
    dv, dq0, sums = (p.mT @ do).sum(3), torch.zeros_like(q0), Sums.of(block, v)
    dpage_k, dpage_v = torch.zeros_like(past.page_k), torch.zeros_like(past.page_v)
    opened = None if past.empty else past.open_block()
    open_sums = None if opened is None else Sums.of(opened.block, opened.v)
    folded = lambda x: x.flatten(2, 3)  # [B H G C ·] -> [B H GC ·]
    for i in range(blocks.n):
        oldest = max(0, i + 1 - len(hidden))
        met = [folded(q0[i])]
        for j in range(i - 1, oldest - 1, -1):
            met.append(block.at(j).back(met[-1]))

        def scored(x: Tensor, k: Tensor, v: Tensor, hide: Tensor | None, i: int = i) -> tuple[Tensor, Tensor]:
            return each(folded, *weigh((x @ k.mT).unflatten(2, (-1, blocks.C)), i, v, hide))

        y = torch.zeros_like(met[0])
        if opened is not None and open_sums is not None and i < reached(blocks):
            here, x, row = blocks.positions(past.length)[i : i + 1], opened.block.back(met[-1]), 0
            for at, page_k, page_v in past.pages(chunk_size):
                p, da = scored(x, page_k, page_v, hides(blocks, here, at)[0])
                y = y + da @ page_k
                rows = slice(row, row := row + at.shape[1])
                dpage_k[:, rows] += (da.mT @ x).transpose(1, 2)
                dpage_v[:, rows] += (p.mT @ folded(do[i])).transpose(1, 2)
            p, da = scored(met[-1], opened.block.k1, opened.v, hides(blocks, here, opened.at)[0])
            y = open_sums.meet(opened.block, met[-1], y, p, da, folded(do[i]))
        for j in range(oldest, i):
            key, x = block.at(j), met[i - 1 - j]
            p, da = scored(x, key.k1, v[j], hidden[i - j])
            y = sums.at(j).meet(key, x, y, p, da, folded(do[i]))
        dq0[i] = y.unflatten(2, (-1, blocks.C))

    passed, open_passed, raw = [Cotangents(sums.transfer, sums.k1)], [], None
    if dkept is not None and bool((end > 0).any()):
        dpage, own, open_own = Kept(blocks, block, past, end).backward(*dkept)
        passed.append(own)
        open_passed += [] if open_own is None else [open_own]
        dpage_k += dpage
    elif dkept is not None:  # nothing is carried
        raw = dkept[1]
        dpage_k += dkept[0]
    dL = -(dA @ block.R.mT[:, :, :, None] + dq0 @ block.U.mT[:, :, :, None]).tril_()
    dW, dk, dbeta = gradients(block, passed, -(L.mT @ dA).sum(3), -(L.mT @ dq0).sum(3))
    dq = dA @ block.K[:, :, :, None] + dq0 + dL @ block.W[:, :, :, None]
    dk = dk + (dA.mT @ tokens.q).sum(3)
    dW = dW + (dL.mT @ tokens.q).sum(3)
    open_w, open_beta = torch.zeros_like(past.w), torch.zeros_like(past.beta)
    if opened is not None and open_sums is not None:
        dw, dopen_k, db = gradients(opened.block, [Cotangents(open_sums.transfer, open_sums.k1), *open_passed])
        open_w, open_beta = dw.transpose(1, 2), db.transpose(1, 2)
        dpage_k += opened.in_pages(dopen_k, dpage_k.shape[1])
        dpage_v += opened.in_pages(open_sums.v, dpage_k.shape[1])
    one = lambda x: blocks.join(x[:, :, :, None])
    dk = one(dk)
    return Gradients(
        q=blocks.join(dq), k=dk if raw is None else dk + raw, v=one(dv + sums.v), beta=one(dbeta), w=one(dW),
        page_k=dpage_k, page_v=dpage_v, open_w=open_w, open_beta=open_beta,
    )  # fmt: skip
