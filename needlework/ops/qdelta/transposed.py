"""What the authors' released kernels compute instead of Q-Delta, so that a published checkpoint can be loaded and compared.

    A_ts = β_t e^{G_t − G_s} k_tᵀ x_s        where the recurrence needs β_t e^{G_t − G_s} x_tᵀ k_s,  s < t

All else is the chunk form, in chunks of exactly 64 from each sequence's start, which are part of the definition: a call of
one token is the true rule. Plain PyTorch under autograd. A `Rule` of one gate a head.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from needlework.ops.common.packing import check_cu_seqlens, pad, unpad
from needlework.ops.delta.decay import ScalarDecay
from needlework.ops.qdelta.arguments import Rule

CHUNK = 64


def forward(rule: Rule, initial_state: Tensor, cu_seqlens: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """o [B T HV V] and the final state [N HV K V]."""
    q, k, v, g, beta, lam, read = rule
    tensors = (k, k + lam * q, v, g, beta, read)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *q.shape[:2])
        tensors = [pad(x, cu_seqlens) for x in tensors]
    T = tensors[0].shape[1]
    if not T:
        return v, initial_state
    o, state = _chunks(*(_by_chunk(x, min(CHUNK, T)) for x in tensors), S=initial_state)
    o = scale * o.transpose(-3, -2).flatten(1, -3)[:, :T]
    return o if cu_seqlens is None else unpad(o, cu_seqlens), state


def _by_chunk(x: Tensor, C: int) -> Tensor:
    """[B T H D] -> [B chunks H C D]; zeros after the last token change no state."""
    return F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % C)).unflatten(1, (-1, C)).transpose(2, 3)


def _chunks(k: Tensor, x: Tensor, v: Tensor, g: Tensor, beta: Tensor, read: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """All chunks after state S, o not scaled. W = (I + A)⁻¹ β (v − e^G x S): what holds no S is solved for all chunks at once."""
    decay = ScalarDecay(g)
    A = beta * decay.between * (k @ x.mT)
    # the inverse by substitution, of C columns where v and x have K + V
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).expand_as(A)
    inverse = torch.linalg.solve_triangular(A, eye, upper=False, unitriangular=True)
    U, P = (inverse @ (beta * torch.cat([v, decay.from_start * x], -1))).split([v.shape[-1], x.shape[-1]], -1)
    left, whole = (decay.to_end * k).mT, decay.from_start[..., -1:, :]
    # a chunk is S ← M S + N: one product that waits for the chunk before
    M, N = whole * torch.eye(k.shape[-1], dtype=k.dtype, device=k.device) - left @ P, left @ U
    before = [S]
    for m, n in zip(M.unbind(1), N.unbind(1), strict=True):
        before.append(m @ before[-1] + n)
    S = torch.stack(before[:-1], 1)  # before each chunk, [B chunks H K V]
    o = decay.from_start * read @ S + decay.between * (read @ k.mT) @ (U - P @ S)
    return o, before[-1]
