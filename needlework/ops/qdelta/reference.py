"""Q-Delta as its equation reads: token by token (the definition) and chunk by chunk, and the authors' kernels' variant of each.

All take a `Rule`'s tensors: q, k, read [B T H K], v [B T H V], g, beta, lam [B T H 1]. Slow, literal, under autograd; they
share no code with the fast path. `operand` is applied to every operand of a matrix or outer product.
"""

import torch
from torch import Tensor

from needlework.ops.common.operands import Operand, identity
from needlework.ops.delta.reference import by_sequence


@by_sequence
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lam: Tensor, read: Tensor, *,
    scale: float, initial_state: Tensor, operand: Operand = identity,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x_t = k_t + λ_t q_t,   S_t = α_t (I − β_t k_t x_tᵀ) S_{t-1} + β_t k_t v_tᵀ,   o_t = scale · S_tᵀ q_t,   α_t = e^{g_t}"""
    S, outputs = initial_state, [v[:, :0]]
    for t in range(q.shape[1]):
        x = k[:, t] + lam[:, t] * q[:, t]
        S = g[:, t].exp()[..., None] * S
        w = beta[:, t] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", operand(S), operand(x)))
        S = S + torch.einsum("bhk,bhv->bhkv", operand(k[:, t]), operand(w))
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", operand(S), operand(read[:, t]))[:, None])
    return torch.cat(outputs, 1), S


@by_sequence
def recurrent_transposed(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lam: Tensor, read: Tensor, *,
    scale: float, initial_state: Tensor, operand: Operand = identity,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `recurrent`, but what the chunk's own tokens wrote is held under x_s and read with k_t; chunks of 64 from the start.

    S_t = α_t S_{t-1} + k_t w_tᵀ,   w_t = β_t (v_t − Z_tᵀ x_t − N_tᵀ k_t):  Z the decayed state of the chunk's start, N = Σ_s e^{G_t − G_s} x_s w_sᵀ
    """
    S, outputs = initial_state, [v[:, :0]]
    Z, N = S, torch.zeros_like(S)
    for t in range(q.shape[1]):
        if t > 0 and t % 64 == 0:
            Z, N = S, torch.zeros_like(S)
        x = k[:, t] + lam[:, t] * q[:, t]
        S, Z, N = (g[:, t].exp()[..., None] * M for M in (S, Z, N))
        held = torch.einsum("bhkv,bhk->bhv", operand(Z), operand(x))
        held = held + torch.einsum("bhkv,bhk->bhv", operand(N), operand(k[:, t]))
        w = beta[:, t] * (v[:, t] - held)
        S = S + torch.einsum("bhk,bhv->bhkv", operand(k[:, t]), operand(w))
        N = N + torch.einsum("bhk,bhv->bhkv", operand(x), operand(w))
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", operand(S), operand(read[:, t]))[:, None])
    return torch.cat(outputs, 1), S


@by_sequence
def literal(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lam: Tensor, read: Tensor, *,
    scale: float, initial_state: Tensor, chunk_size: int, transposed: bool = False, operand: Operand = identity,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A_ts = β_t x_tᵀ(e^{G_t − G_s} ⊙ k_s), s < t (transposed: β_t e^{G_t − G_s} k_tᵀ x_s);   W = (I + A)⁻¹ (β ⊙ (v − e^G ⊙ x S₀))
    o_t  = scale · [ S₀ᵀ(e^{G_t} ⊙ q_t) + Σ_{s≤t} (k_sᵀ(e^{G_t − G_s} ⊙ q_t)) W_s ];   S_C = Diag(e^{G_C}) S₀ + Σ_s (e^{G_C − G_s} ⊙ k_s) W_sᵀ
    """
    S, outputs = initial_state, [v[:, :0]]
    for start in range(0, q.shape[1], chunk_size):
        part = slice(start, start + chunk_size)
        q_, k_, v_, g_, beta_, lam_, read_ = (x[:, part] for x in (q, k, v, g, beta, lam, read))
        x_ = k_ + lam_ * q_
        G = g_.double().cumsum(1)  # exact to the difference
        C = q_.shape[1]
        lower = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
        ratio = (G[:, :, None] - G[:, None]).to(q.dtype)  # [B t s H K], or 1 for K as in g
        ratio = ratio.masked_fill(~lower[:, :, None, None], -torch.inf).exp()

        row, column = (k_, x_) if transposed else (x_, k_)
        A = torch.einsum("bth,bthk,btshk,bshk->bhts", beta_[..., 0], row, ratio, column).tril(-1)
        R = beta_ * (v_ - torch.einsum("bthk,bhkv->bthv", operand(G.to(q.dtype).exp() * x_), operand(S)))
        eye = torch.eye(C, dtype=q.dtype, device=q.device)
        W = torch.linalg.solve_triangular(eye + A, R.transpose(1, 2), upper=False, unitriangular=True)  # [B H C V]
        P = torch.einsum("bshk,btshk->bhts", operand(k_), operand(ratio * read_[:, :, None]))
        old = torch.einsum("bthk,bhkv->bthv", operand(G.to(q.dtype).exp() * read_), operand(S))
        outputs.append(scale * (old + torch.einsum("bhts,bhsv->bthv", operand(P), operand(W))))
        left = (G[:, -1:] - G).to(q.dtype).exp() * k_
        S = G[:, -1].to(q.dtype).exp()[..., None] * S
        S = S + torch.einsum("bshk,bhsv->bhkv", operand(left), operand(W))
    return torch.cat(outputs, 1), S
