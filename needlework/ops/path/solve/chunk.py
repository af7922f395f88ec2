"""LUCID-PaTH's fast path in plain PyTorch: the solve by blocks, and its backward by hand. Plain tensors of one dtype, no autograd.

    Y_b = P_bb⁻¹ (V_b − Σ_{older} P Y),    P_ij = e^{√d (k̂_iᵀ H_i … H_{j+1} k̂_j − 1)} for j < i, P_ii = 1 by definition
    Z = P⁻ᵀ dY, the same solve run backwards in time;  dV = Z;  dA_ij = −√d (z_i·y_j) P_ij for j < i, of PaTH's scores with both sides k̂

k is k̂ here, and so are the pages' keys: of norm 1 when they came. Blocks wait for one another: query block after query block (walk.py).
"""

from math import sqrt

import torch
from torch import Tensor

from needlework.ops.attention.blocks import Blocks
from needlework.ops.path.arguments import PathInputs
from needlework.ops.path.chunk import History, InBlocks
from needlework.ops.path.sweep import Gradients, Sweep
from needlework.ops.path.walk import Walk


def forward(k: Tensor, v: Tensor, beta: Tensor, w: Tensor, past: History, *, chunk_size: int) -> Tensor:
    """y [B T H V] of k̂ [B T H K], v, beta [B T H], w."""
    walk, root = _walk(k, v, beta, w, past, chunk_size), sqrt(k.shape[-1])
    P, y = _diagonal(walk, root), walk.values  # V until it is solved
    for i in range(walk.blocks.n):
        u = y[i]
        for met in walk.back(i):
            u = u - _couplings(met.x @ met.k.mT, met.hidden, root) @ walk.v(met.place)
        y[i] = torch.linalg.solve_triangular(P[i], u, upper=False, unitriangular=True)
    return walk.blocks.join(y[:, :, :, None])


def backward(
    dy: Tensor, k: Tensor, y: Tensor, beta: Tensor, w: Tensor, past: History, *, chunk_size: int
) -> Gradients:  # fmt: skip
    """Gradients of forward's inputs (both sides' in k, none in q), of the pages and of the open block."""
    walk, root = _walk(k, y, beta, w, past, chunk_size), sqrt(k.shape[-1])
    sweep, blocks, P = Sweep(walk), walk.blocks, _diagonal(walk, root)
    z = sweep.dv.copy_(blocks.split(dy)[:, :, :, 0])  # dY less what later rows take, until it is solved
    for i in range(blocks.n - 1, -1, -1):
        z[i] = torch.linalg.solve_triangular(P[i].mT, z[i], upper=True, unitriangular=True)
        back = torch.zeros_like(walk.q0[i, :, :, 0])
        for met in reversed(walk.back(i)):
            p = _couplings(met.x @ met.k.mT, met.hidden, root)
            sweep.values(met.place).sub_(p.mT @ z[i])
            back = sweep.come_back(back, met, (z[i] @ walk.v(met.place).mT).mul_(p).mul_(-root))
        sweep.arrived(i, back)
    dA = (z @ walk.values.mT).mul_(P).mul_(-root)[:, :, :, None]
    found = sweep.finish(dA)
    return found._replace(k=found.k + found.q, q=torch.zeros_like(found.q))


def _walk(k: Tensor, v: Tensor, beta: Tensor, w: Tensor, past: History, chunk_size: int) -> Walk:
    blocks = Blocks(k.shape[1], k.shape[2], past.window, chunk_size)
    return Walk(blocks, InBlocks.of(blocks, PathInputs(k, k, v, beta, w)), past, chunk_size)


def _diagonal(walk: Walk, root: float) -> Tensor:
    """P of every block with itself [n B H C C], strictly lower: its diagonal of ones is put there by the solve."""
    hidden = walk.hidden.get(0)
    a = walk.own()[:, :, :, 0]
    a = a if hidden is None else a.masked_fill_(hidden, float("-inf"))
    return a.sub_(1).mul_(root).exp_().tril_(-1)


def _couplings(a: Tensor, hidden: Tensor | None, root: float) -> Tensor:
    """P [B H C columns] of products of keys; hidden as `Met` has it, for one head of queries."""
    if hidden is not None:
        a = a[:, :, None].masked_fill_(hidden, float("-inf"))[:, :, 0]
    return a.sub_(1).mul_(root).exp_()
