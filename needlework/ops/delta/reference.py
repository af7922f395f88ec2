"""The delta rule as its equation reads, twice: token by token (the definition) and chunk by chunk. Slow, literal, under autograd.

Both take a `Rule`'s tensors: q, k [B T H K], v [B T H V], g [B T H 1] or [B T H K], and the gates b = erase, w = write (None: 0
and 1). They share no code with the fast path. `operand` is applied to every operand of a matrix or outer product.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from needlework.ops.common.operands import Operand, identity
from needlework.ops.delta.arguments import Prediction, direction

Form = Callable[..., tuple[Tensor, Tensor]]


def by_sequence(form: Form) -> Form:
    """`form` on packed sequences: one call each, in order, the results side by side."""

    def packed(*tensors: Tensor | None, initial_state: Tensor, cu_seqlens: Tensor | None = None, **settings: object):
        if cu_seqlens is None:
            return form(*tensors, initial_state=initial_state, **settings)
        sequences = [
            form(*(None if x is None else x[:, a:b] for x in tensors), initial_state=initial_state[n : n + 1], **settings)
            for n, (a, b) in enumerate(pairwise(cu_seqlens.tolist()))
        ]
        return torch.cat([o for o, _ in sequences], 1), torch.cat([S for _, S in sequences])

    return packed


@by_sequence
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, erase: Tensor | None, write: Tensor | None, *,
    prediction: Prediction, scale: float, initial_state: Tensor, operand: Operand = identity,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """S_t = Diag(e^{g_t}) S_{t-1} + k_t (w_t ⊙ v_t − S_{t-1}ᵀ (e^{g_t} ⊙ b_t ⊙ k_t))ᵀ,   o_t = scale · S_tᵀ q_t

    "previous" reads S_{t-1} as it was: without e^{g_t} in the erase. So does "given", along b_t itself.
    """
    S, outputs = initial_state, [v[:, :0]]
    for t in range(q.shape[1]):
        before = S
        S = g[:, t].exp()[..., None] * S
        w = v[:, t] if write is None else write[:, t] * v[:, t]
        if erase is not None:
            read = S if prediction == "decayed" else before
            w = w - torch.einsum("bhkv,bhk->bhv", operand(read), operand(direction(erase[:, t], k[:, t], prediction)))
        S = S + torch.einsum("bhk,bhv->bhkv", operand(k[:, t]), operand(w))
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", operand(S), operand(q[:, t]))[:, None])
    return torch.cat(outputs, 1), S


@by_sequence
def literal(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, erase: Tensor | None, write: Tensor | None, *,
    prediction: Prediction, scale: float, initial_state: Tensor, chunk_size: int, operand: Operand = identity,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """R_t = u_t − S₀ᵀ(e^{G_{t-1}} ⊙ e_t),   A_ts = k_sᵀ(e^{G_{t-1} − G_s} ⊙ e_t), s < t,   W = (I + A)⁻¹ R
    o_t  = scale · [ S₀ᵀ(e^{G_t} ⊙ q_t) + Σ_{s≤t} (k_sᵀ(e^{G_t − G_s} ⊙ q_t)) W_s ];   S_C = Diag(e^{G_C}) S₀ + Σ_s (e^{G_C − G_s} ⊙ k_s) W_sᵀ

    u = w ⊙ v and e = b ⊙ k, or b if "given"; "decayed" has G_t for G_{t-1} in R and A. The C×C×K tensor of factors is formed, C×C of a
    scalar gate.
    """
    S, outputs = initial_state, [v[:, :0]]
    u = v if write is None else write * v
    for start in range(0, q.shape[1], chunk_size):
        q_, k_, u_, g_ = (x[:, start : start + chunk_size] for x in (q, k, u, g))
        G = g_.double().cumsum(1)  # exact to the difference
        C = q_.shape[1]
        lower = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()

        def ratio(later: Tensor, seen: Tensor, G: Tensor = G) -> Tensor:
            """e^{later_t − G_s} [B t s H K], or 1 for K as in g; zero where s is not seen from t: never above 1."""
            return (later[:, :, None] - G[:, None]).to(q.dtype).masked_fill(~seen[:, :, None, None], -torch.inf).exp()

        W = u_.transpose(1, 2)  # [B H C V]
        if erase is not None:
            e = direction(erase[:, start : start + chunk_size], k_, prediction)
            before = G if prediction == "decayed" else G - g_.double()
            A = torch.einsum("bshk,btshk,bthk->bhts", k_, ratio(before, lower.tril(-1)), e)
            R = W - torch.einsum("bthk,bhkv->bhtv", operand(before.to(q.dtype).exp() * e), operand(S))
            eye = torch.eye(C, dtype=q.dtype, device=q.device)
            W = torch.linalg.solve_triangular(eye + A, R, upper=False, unitriangular=True)
        P = torch.einsum("bshk,btshk->bhts", operand(k_), operand(ratio(G, lower) * q_[:, :, None]))
        read = torch.einsum("bthk,bhkv->bthv", operand(G.to(q.dtype).exp() * q_), operand(S))
        outputs.append(scale * (read + torch.einsum("bhts,bhsv->bthv", operand(P), operand(W))))
        left = (G[:, -1:] - G).to(q.dtype).exp() * k_
        S = G[:, -1].to(q.dtype).exp()[..., None] * S
        S = S + torch.einsum("bshk,bhsv->bhkv", operand(left), operand(W))
    return torch.cat(outputs, 1), S
