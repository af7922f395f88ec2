"""CCQ as its equation reads, twice: token by token with plain sums (the definition), and chunk by chunk with centred ones.

Slow and literal, under autograd, in the dtype of q; both share no code with chunk.py. `operand` is applied to every operand
of a matrix or outer product.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from needlework.ops.ccq.arguments import check_state, check_tokens
from needlework.ops.ccq.state import CcqOutput, CurvatureState, empty_state, symmetric
from needlework.ops.common.operands import Operand, identity
from needlework.ops.common.packing import check_cu_seqlens, sequences


def _by_sequence(form: Callable[..., tuple[Tensor, CurvatureState]]) -> Callable[..., CcqOutput]:
    """`form` on checked arguments, once per packed sequence, with g and the state filled in; q̃ returns in q's dtype."""

    def whole(
        q: Tensor, k: Tensor, eta: Tensor, g: Tensor | None = None, *, initial_state: CurvatureState | None = None,
        output_final_state: bool = False, cu_seqlens: Tensor | None = None, **settings: object,
    ) -> CcqOutput:  # fmt: skip
        check_tokens(q, k, eta, g)
        N = sequences(cu_seqlens, len(q))
        if initial_state is not None:
            check_state("initial_state", initial_state, k, N=N)
        dtype = torch.promote_types(q.dtype, torch.float32)
        state = empty_state(N, *k.shape[2:], device=k.device) if initial_state is None else symmetric(initial_state)
        state = CurvatureState(*(x.to(dtype) for x in state))
        rows = tuple(x.to(dtype) for x in (q, k, eta, k.new_zeros(k.shape[:3]) if g is None else g))
        if cu_seqlens is None:
            out, state = form(*rows, state, **settings)
        else:
            check_cu_seqlens(cu_seqlens, *q.shape[:2])
            parts = [
                form(*(x[:, a:b] for x in rows), CurvatureState(*(x[i : i + 1] for x in state)), **settings)
                for i, (a, b) in enumerate(pairwise(cu_seqlens.tolist()))
            ]
            out = torch.cat([part[0] for part in parts], 1)
            state = CurvatureState(*(torch.cat(x) for x in zip(*(part[1] for part in parts), strict=True)))
        return CcqOutput(out.to(q.dtype), state if output_final_state else None)

    whole.__name__, whole.__doc__ = form.__name__, form.__doc__
    return whole


@_by_sequence
def recurrent_ccq(
    q: Tensor, k: Tensor, eta: Tensor, g: Tensor, state: CurvatureState, *, operand: Operand = identity
) -> tuple[Tensor, CurvatureState]:
    """CCQ's definition, token by token, under autograd.

        M_t = e^{g_t} M_{t-1} + k_t k_tᵀ,   s_t = e^{g_t} s_{t-1} + k_t,   n_t = e^{g_t} n_{t-1} + 1,   μ_t = s_t / n_t
        q̃_t = q_t − λ_t (M_t q_t / n_t − μ_t (μ_tᵀ q_t))

    The arguments of `chunk_ccq` without chunk_size and impl.

    >>> import torch
    >>> from torch.nn.functional import normalize
    >>> from needlework.ops.ccq import chunk_ccq, recurrent_ccq
    >>> q, k = torch.randn(1, 100, 4, 32), normalize(torch.randn(1, 100, 4, 32), dim=-1)  # [B T H K]
    >>> eta = torch.rand(1, 100, 4)
    >>> torch.allclose(recurrent_ccq(q, k, eta).q, chunk_ccq(q, k, eta).q, atol=1e-5)
    True
    """
    if q.shape[1] == 0:
        return q.repeat_interleave(eta.shape[2] // q.shape[2], 2), state
    C, mean, n = state
    M, s, outputs = C + n[..., None, None] * torch.einsum("bhk,bhl->bhkl", mean, mean), n[..., None] * mean, []
    for t in range(q.shape[1]):
        decay = g[:, t].exp()  # [B H]
        M = decay[..., None, None] * M + torch.einsum("bhk,bhl->bhkl", operand(k[:, t]), operand(k[:, t]))
        s = decay[..., None] * s + k[:, t]
        n = decay * n + 1
        mean = s / n[..., None]
        Mq = torch.einsum("bhkl,bhl->bhk", operand(M), operand(q[:, t]))
        along = torch.einsum("bhk,bhk->bh", operand(mean), operand(q[:, t]))
        outputs.append((q[:, t], Mq / n[..., None] - mean * along[..., None]))
    q, Sq = (torch.stack(x, 1).repeat_interleave(eta.shape[2] // q.shape[2], 2) for x in zip(*outputs, strict=True))
    C = M - n[..., None, None] * torch.einsum("bhk,bhl->bhkl", mean, mean)
    return q - eta[..., None] * Sq, CurvatureState(C, mean, n)


@_by_sequence
def literal_ccq(
    q: Tensor, k: Tensor, eta: Tensor, g: Tensor, state: CurvatureState, *, chunk_size: int = 64, operand: Operand = identity
) -> tuple[Tensor, CurvatureState]:
    """Σ_t q = n_t⁻¹ [e^{Ḡ_t} C₀ q + Σ_s ω_ts (s'_ts − s̄'_t) k'_s],   k' = k − μ₀,  s' = q·k',  s̄' = n_t⁻¹ Σ_s ω_ts s'_ts
    C ← e^{Ḡ_C} C + K''ᵀΩK'' + (n m/(n+m)) d dᵀ,   m = Σω,  d = Σωk'/m,  K'' = k' − d,  μ ← μ + m d/(n+m)

    with n decayed, chunk after chunk. The arguments of `chunk_ccq` without impl.
    """
    C, mean, n = state
    outputs = []
    for start in range(0, q.shape[1], chunk_size):
        q_, k_, g_ = (x[:, start : start + chunk_size].transpose(1, 2) for x in (q, k, g))  # [B H C K], [B H C]
        G = g_.double().cumsum(-1)
        future = torch.ones(G.shape[-1], G.shape[-1], dtype=torch.bool, device=G.device).triu(1)
        w = (G[..., :, None] - G[..., None, :]).to(q.dtype).masked_fill(future, -torch.inf).exp()  # [B H t s]
        decay = G.exp().to(q.dtype)
        count = decay * n[..., None] + w.sum(-1)
        k_ = k_ - mean[:, :, None]
        scores = torch.einsum("bhtk,bhsk->bhts", operand(q_), operand(k_))
        scores = w * (scores - ((w * scores).sum(-1) / count)[..., None])
        Cq = torch.einsum("bhkl,bhtl->bhtk", operand(C), operand(decay[..., None] * q_))
        Sq = (Cq + torch.einsum("bhts,bhsk->bhtk", operand(scores), operand(k_))) / count[..., None]
        outputs.append(Sq.transpose(1, 2))

        w, n = w[:, :, -1], decay[..., -1] * n
        m = w.sum(-1)
        d = (w[..., None] * k_).sum(2) / m[..., None]
        k_ = k_ - d[:, :, None]
        C = decay[..., -1, None, None] * C + torch.einsum("bhsk,bhsl->bhkl", operand(w[..., None] * k_), operand(k_))
        C = C + (n * m / (n + m))[..., None, None] * torch.einsum("bhk,bhl->bhkl", operand(d), operand(d))
        mean = mean + (m / (n + m))[..., None] * d
        n = n + m
    Sq = torch.cat(outputs, 1) if outputs else q
    q, Sq = (x.repeat_interleave(eta.shape[2] // q.shape[2], 2) for x in (q, Sq))
    return q - eta[..., None] * Sq, CurvatureState(C, mean, n)
