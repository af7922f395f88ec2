"""The backward of chunk.py, by hand: what a softmax makes of its scores, whose own gradient is sweep.py's.

P = e^{A − lse}    dA = P ∘ (dO Vᵀ − rowsum(dO ∘ O))    dV = Pᵀ dO

A score holds G_i − G_j of the forget gates' sums: dG_t = Σ_j dA_tj − Σ_i dA_it. With G_t = g_1 + … + g_t, which is op.py's,

    dg_t = Σ_{s>=t} dG_s = Σ_{i>=t} Σ_j dA_ij − Σ_{j>=t} Σ_i dA_ij = Σ_{i >= t > j} dA_ij,

the pairs that the gate lies between. Rows of dA sum to 0; they stay, since those of a rounded O do not, and the columns have the same
error.
"""

import torch
from torch import Tensor

from needlework.ops.attention.blocks import Blocks
from needlework.ops.path.arguments import PathInputs
from needlework.ops.path.chunk import History, InBlocks, Which, forgotten
from needlework.ops.path.sweep import Gradients, Sweep
from needlework.ops.path.walk import Met, Walk


def backward(
    do: Tensor, o: Tensor, lse: Tensor, inputs: PathInputs, past: History, *, chunk_size: int
) -> Gradients:  # fmt: skip
    """Gradients of `chunk.forward`'s inputs."""
    blocks = Blocks(inputs.q.shape[1], inputs.k.shape[2], past.window, chunk_size)
    walk = Walk(blocks, InBlocks.of(blocks, inputs), past, chunk_size)
    sweep, forgets = Sweep(walk), None if walk.decay is None else Forgets(walk)
    do, lse, D = blocks.split(do), blocks.split(lse), blocks.split((do * o).sum(-1))

    def weigh(a: Tensor, i: Which, v: Tensor, keys: Tensor | None, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        """P and dA of scores a [.. G C columns] of query blocks i with values v [.. columns V] and keys' sums of gates."""
        a = forgotten(a, walk.decay, keys, i).sub_(lse[i][..., None])
        if keys is not None:
            a.clamp_(max=0)  # rows behind a sequence's end have no sum, and no lse
        p = a.exp_()
        if hidden is not None:
            p = p.masked_fill(hidden, 0)
        return p, p * (do[i] @ v.mT[..., None, :, :] - D[i][..., None])

    p, dA = weigh(walk.own(), slice(None), walk.values, walk.decay, walk.hidden.get(0))
    sweep.dv += (p.mT @ do).sum(3)
    if forgets is not None:
        forgets.own(dA)
    for i in range(blocks.n):
        y, do_i = torch.zeros_like(walk.q0[i].flatten(2, 3)), do[i].flatten(2, 3)
        for met in reversed(walk.back(i)):
            a = (met.x @ met.k.mT).unflatten(2, (-1, blocks.C))
            p, da = weigh(a, i, walk.v(met.place), met.decay, met.hidden)
            sweep.values(met.place).add_(p.flatten(2, 3).mT @ do_i)
            y = sweep.come_back(y, met, da.flatten(2, 3))
            if forgets is not None:
                forgets.met(i, met, da)
        sweep.arrived(i, y)
    found = sweep.finish(dA)
    return found if forgets is None else forgets.beside(found)


class Forgets:
    """The gradient of the gates' sums, in float64: what a query's row of dA has, less what a key's column has. Most of it cancels in dg."""

    def __init__(self, walk: Walk):
        G = walk.q0.shape[3]
        self.walk, self.d = walk, torch.zeros_like(walk.q0[..., 0], dtype=torch.float64)  # [n B H G C]
        zeros = lambda v: v.new_zeros(*v.shape[:2], G, v.shape[2], dtype=torch.float64)
        self.pages = zeros(walk.past.page_v.transpose(1, 2))
        self.opened = None if walk.opened is None else zeros(walk.opened.v)

    def own(self, dA: Tensor) -> None:
        """dA [n B H G C C] of every block with itself."""
        self.d += dA.sum(-1, dtype=torch.float64) - dA.sum(-2, dtype=torch.float64)

    def met(self, i: int, met: Met, dA: Tensor) -> None:
        """dA [B H G C columns] of query block i with what it met."""
        self.d[i] += dA.sum(-1, dtype=torch.float64)
        match met.place:
            case int(j):
                self.d[j] -= dA.sum(-2, dtype=torch.float64)
            case slice() as rows:
                self.pages[..., rows] -= dA.sum(-2, dtype=torch.float64)
            case _:
                assert self.opened is not None
                self.opened -= dA.sum(-2, dtype=torch.float64)

    def beside(self, found: Gradients) -> Gradients:
        pages = self.pages.movedim(3, 1)  # [B P H G]
        if self.opened is not None and self.walk.opened is not None:
            pages = pages + self.walk.opened.in_pages(self.opened.mT, pages.shape[1])
        return found._replace(decay=self.walk.blocks.join(self.d), page_decay=pages.flatten(2))
