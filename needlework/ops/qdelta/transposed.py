"""What the authors' released kernels compute instead of Q-Delta, so that a published checkpoint can be loaded and compared.

    A_ts = β_t e^{G_t − G_s} k_tᵀ x_s        where the recurrence needs β_t e^{G_t − G_s} x_tᵀ k_s,  s < t

All else is the chunk form, in chunks of exactly 64 from each sequence's start, which are part of the definition: a call of
one token is the true rule. Plain PyTorch under autograd. Tensors as a `Rule`'s: heads expanded, one dtype, one gate a head.
"""

import torch
from torch import Tensor

from needlework.ops.common.packing import check_cu_seqlens, pad, unpad
from needlework.ops.delta.decay import ScalarDecay

CHUNK = 64


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lam: Tensor, read: Tensor,
    state: Tensor, cu_seqlens: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o [B T HV V] and the final state [N HV K V]."""
    tensors = (k, k + lam * q, v, g, beta, read)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *q.shape[:2])
        tensors = [pad(x, cu_seqlens) for x in tensors]
    outputs = [tensors[2][:, :0]]
    for start in range(0, tensors[0].shape[1], CHUNK):
        o, state = _chunk(*(x[:, start : start + CHUNK].transpose(1, 2) for x in tensors), state)
        outputs.append(scale * o.transpose(1, 2))
    o = torch.cat(outputs, 1)
    return o if cu_seqlens is None else unpad(o, cu_seqlens), state


def _chunk(k: Tensor, x: Tensor, v: Tensor, g: Tensor, beta: Tensor, read: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk of tensors [B H C ...] after state S; o is not scaled."""
    decay = ScalarDecay(g)
    A = beta * decay.between * (k @ x.mT)
    R = beta * (v - decay.from_start * x @ S)
    W = torch.linalg.solve_triangular(A, R, upper=False, unitriangular=True)  # [B H C V]
    o = decay.from_start * read @ S + decay.between * (read @ k.mT) @ W
    return o, decay.from_start[..., -1:, :] * S + (decay.to_end * k).mT @ W
