"""The backward of chunk.py, by hand: what a softmax makes of its scores, whose own gradient is sweep.py's.

P = e^{A − lse}    dA = P ∘ (dO Vᵀ − rowsum(dO ∘ O))    dV = Pᵀ dO
"""

import torch
from torch import Tensor

from needlework.ops.attention.blocks import Blocks
from needlework.ops.path.arguments import PathInputs
from needlework.ops.path.chunk import History, InBlocks
from needlework.ops.path.sweep import Gradients, Sweep
from needlework.ops.path.walk import Walk


def backward(
    do: Tensor, o: Tensor, lse: Tensor, inputs: PathInputs, past: History, *, chunk_size: int
) -> Gradients:  # fmt: skip
    """Gradients of `chunk.forward`'s inputs."""
    blocks = Blocks(inputs.q.shape[1], inputs.k.shape[2], past.window, chunk_size)
    walk = Walk(blocks, InBlocks.of(blocks, inputs), past, chunk_size)
    sweep = Sweep(walk)
    do, lse, D = blocks.split(do), blocks.split(lse), blocks.split((do * o).sum(-1))

    def weigh(a: Tensor, i: int | slice, v: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        """P and dA of scores a [.. G C columns] of query blocks i with values v [.. columns V]."""
        p = a.sub_(lse[i][..., None]).exp_()
        if hidden is not None:
            p = p.masked_fill(hidden, 0)
        return p, p * (do[i] @ v.mT[..., None, :, :] - D[i][..., None])

    p, dA = weigh(walk.own(), slice(None), walk.values, walk.hidden.get(0))
    sweep.dv += (p.mT @ do).sum(3)
    for i in range(blocks.n):
        y, do_i = torch.zeros_like(walk.q0[i].flatten(2, 3)), do[i].flatten(2, 3)
        for met in reversed(walk.back(i)):
            p, da = weigh((met.x @ met.k.mT).unflatten(2, (-1, blocks.C)), i, walk.v(met.place), met.hidden)
            sweep.values(met.place).add_(p.flatten(2, 3).mT @ do_i)
            y = sweep.come_back(y, met, da.flatten(2, 3))
        sweep.arrived(i, y)
    return sweep.finish(dA)
