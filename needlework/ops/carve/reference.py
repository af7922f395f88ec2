"""CARVE as its equation reads, twice: token by token (the definition) and chunk by chunk. Slow and literal, under autograd.

Both take the op's arguments with q, k, v in float32 or float64 and a whole `state`, and share no code with the fast path.
k is [B T H R K] and v [B T H R V]: R rows a token. `operand` is applied to every operand of a matrix or outer product.
"""

from collections.abc import Callable
from functools import wraps
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from needlework.ops.carve.arguments import Prediction
from needlework.ops.carve.state import CarveState
from needlework.ops.common.operands import Operand, identity

Form = Callable[..., tuple[Tensor, CarveState]]


def by_sequence(form: Form) -> Form:
    """`form` on packed sequences: one call each, in order, the results side by side."""

    @wraps(form)
    def packed(*tensors: Tensor, state: CarveState, cu_seqlens: Tensor | None = None, **settings: object):
        if cu_seqlens is None:
            return form(*tensors, state=state, **settings)
        ends, parts = cu_seqlens.tolist(), []
        for n, (a, b) in enumerate(pairwise(ends)):
            cut = [x[:, a:b] for x in tensors[:6]]
            parts.append(form(*cut, *tensors[6:], state=CarveState(*(x[n : n + 1] for x in state)), **settings))
        states = CarveState(*(torch.cat(field) for field in zip(*(state for _, state in parts), strict=True)))
        return torch.cat([o for o, _ in parts], 1), states

    return packed


def retention(f: Tensor, b: Tensor, m: Tensor, A_log: Tensor, dt_bias: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """l = −exp(A) softplus(f + τ) + log(1 − σ(b + W₂ tanh(W₁ m)))   [B ... H K], with m [B ... H V]"""
    content = torch.einsum("kr,...r->...k", w2, torch.tanh(torch.einsum("rv,...v->...r", w1, m)))
    return A_log.exp() * logsigmoid(-(f + dt_bias)) + logsigmoid(-(b + content))  # softplus(x) = −logsigmoid(−x)


@by_sequence
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, w: Tensor,
    A_log: Tensor, dt_bias: Tensor, w1: Tensor, w2: Tensor, *,
    content_chunk: int, prediction: Prediction, scale: float, state: CarveState, operand: Operand = identity,
) -> tuple[Tensor, CarveState]:  # fmt: skip
    """S_t = Diag(e^{l_t}) S_{t-1} + σ(ŵ_t) Σ_r k_tr (v_tr − S_{t-1}ᵀ k_tr)ᵀ,   o_t = scale · S_tᵀ q_t

    l_t reads m, the mean of o over the last whole content chunk; "decayed" predicts from Diag(e^{l_t}) S_{t-1}.
    """
    S, m, total, position = state
    outputs = []
    for t in range(q.shape[1]):
        a = retention(f[:, t], b[:, t], m, A_log, dt_bias, w1, w2).exp()  # [B H K]
        erase = k[:, t] * a[:, :, None] if prediction == "decayed" else k[:, t]
        error = v[:, t] - torch.einsum("bhkv,bhrk->bhrv", operand(S), operand(erase))
        write = torch.sigmoid(w[:, t])[..., None, None] * error
        S = a[..., None] * S + torch.einsum("bhrk,bhrv->bhkv", operand(k[:, t]), operand(write))
        o = scale * torch.einsum("bhkv,bhk->bhv", operand(S), operand(q[:, t]))
        outputs.append(o)
        m, total, position = advance(o, 1, m, total, position, content_chunk)
    o = torch.stack(outputs, 1) if outputs else v[:, :, :, 0]
    return o, CarveState(S, m, total, position)


def advance(o: Tensor, n: int, m: Tensor, total: Tensor, position: Tensor, content_chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """(m, total, position) after n more tokens, none beyond the open content chunk's end, whose outputs add up to o."""
    total, position = total + o, position + n
    full = position == content_chunk
    closed = full[:, None, None]
    return (
        torch.where(closed, total / content_chunk, m),
        torch.where(closed, torch.zeros_like(total), total),
        torch.where(full, 0, position),
    )


@by_sequence
def literal(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, w: Tensor,
    A_log: Tensor, dt_bias: Tensor, w1: Tensor, w2: Tensor, *,
    content_chunk: int, prediction: Prediction, scale: float, state: CarveState, chunk_size: int, operand: Operand = identity,
) -> tuple[Tensor, CarveState]:  # fmt: skip
    """M_ts = w_s k_sᵀ((γ_{t-1}/γ_s) ⊙ k_t), s < t, unit diagonal;   U = M⁻¹ (V − (γ_{t-1} ⊙ K) S₀)
    o_t  = scale [ S₀ᵀ(γ_t ⊙ q_t) + Σ_{s≤t} w_s (k_sᵀ((γ_t/γ_s) ⊙ q_t)) U_s ];   S_C = Diag(γ_C) S₀ + Σ_s w_s ((γ_C/γ_s) ⊙ k_s) U_sᵀ

    γ = e^G; "decayed" has γ_t for γ_{t-1} in M and U. A chunk ends where the kernel's or any row's content chunk ends.
    """
    S, m, total, position = state
    B, T, H, R, V = v.shape
    outputs, start = [v[:, :0, :, 0]], 0
    while start < T:
        C = min(chunk_size, T - start, content_chunk - int(position.max()))
        q_, k_, v_, f_, b_, w_ = (x[:, start : start + C] for x in (q, k, v, f, b, w))
        write = torch.sigmoid(w_)  # [B C H]
        l = retention(f_, b_, m[:, None], A_log, dt_bias, w1, w2)  # [B C H K]
        G = l.double().cumsum(1)
        before = G if prediction == "decayed" else G - l.double()

        def ratio(later: Tensor, seen: Tensor, G: Tensor = G) -> Tensor:
            """e^{later_t − G_s} [B t s H K], zero where s is not seen from t: never above 1."""
            return (later[:, :, None] - G[:, None]).to(k.dtype).masked_fill(~seen[:, :, None, None], -torch.inf).exp()

        lower = torch.ones(C, C, dtype=torch.bool, device=k.device).tril()
        M = torch.einsum("bshpk,btshk,bthrk->bhtrsp", k_, ratio(before, lower.tril(-1)), k_)
        M = M * write.transpose(1, 2)[:, :, None, None, :, None]
        ahead = k_ * before.exp().to(k.dtype)[:, :, :, None]
        rhs = v_ - torch.einsum("bthrk,bhkv->bthrv", operand(ahead), operand(S))
        rhs = rhs.transpose(1, 2).reshape(B, H, C * R, V)
        M = M.reshape(B, H, C * R, C * R) + torch.eye(C * R, dtype=k.dtype, device=k.device)
        U = torch.linalg.solve_triangular(M, rhs, upper=False, unitriangular=True).view(B, H, C, R, V)

        P = torch.einsum("bshrk,btshk->bhtsr", operand(k_), operand(ratio(G, lower) * q_[:, :, None]))
        P = P * write.transpose(1, 2)[:, :, None, :, None]
        read = torch.einsum("bthk,bhkv->bthv", operand(G.exp().to(k.dtype) * q_), operand(S))
        o = scale * (read + torch.einsum("bhtsr,bhsrv->bthv", operand(P), operand(U)))
        left = (G[:, -1:] - G).exp().to(k.dtype) * write[..., None]  # [B C H K]
        S = G[:, -1].exp().to(k.dtype)[..., None] * S
        S = S + torch.einsum("bshrk,bhsrv->bhkv", operand(left[:, :, :, None] * k_), operand(U))
        outputs.append(o)
        m, total, position = advance(o.sum(1), C, m, total, position, content_chunk)
        start += C
    return torch.cat(outputs, 1), CarveState(S, m, total, position)
