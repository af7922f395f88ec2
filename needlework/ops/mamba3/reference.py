"""Mamba-3 as its equation reads: token by token (the definition), block by block, and unrotated. Slow, literal, under autograd.

All take a `Rule`'s tensors and a `Mamba3State`, and share no code with the fast path. R(Θ) turns the first m pairs of channels by +Θ:
channels (2i, 2i + 1) are a pair ("even"), or (i, i + K/2) ("halves"). `operand` is applied to every operand of a product of matrices
or an outer product.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from needlework.ops.common.operands import Operand, identity
from needlework.ops.mamba3.arguments import Pairs, Rule
from needlework.ops.mamba3.state import Mamba3State
from needlework.ops.runtime.each import each

Form = Callable[..., tuple[Tensor, Mamba3State]]


def by_sequence(form: Form) -> Form:
    """`form` on packed sequences: one call each, in order, the results side by side."""

    def packed(rule: Rule, state: Mamba3State, cu_seqlens: Tensor | None = None, **settings: object):
        if cu_seqlens is None:
            return form(rule, state, **settings)
        parts = [
            form(
                Rule(*each(lambda x, a=a, b=b: x[:, a:b], *rule[:-1]), rule.mimo_x),
                Mamba3State(*each(lambda x, n=n: x[n : n + 1], *state)),
                **settings,
            )
            for n, (a, b) in enumerate(pairwise(cu_seqlens.tolist()))
        ]
        states = (torch.cat(column) for column in zip(*(left for _, left in parts), strict=True))
        return torch.cat([o for o, _ in parts], 1), Mamba3State(*states)

    return packed


def pair_channels(m: int, K: int, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """The first and second channels of the m pairs that turn."""
    i = torch.arange(m)
    return (2 * i, 2 * i + 1) if pairs == "even" else (i, i + K // 2)


def turned(x: Tensor, angle: Tensor, pairs: Pairs) -> Tensor:
    """R(Θ) of rows x [.. R K], Θ [.. m]."""
    first, second = pair_channels(angle.shape[-1], x.shape[-1], pairs)
    cos, sin = angle.cos()[..., None, :], angle.sin()[..., None, :]
    a, b, out = x[..., first], x[..., second], x.clone()
    out[..., first] = cos * a - sin * b
    out[..., second] = sin * a + cos * b
    return out


def reduced(angle: Tensor) -> Tensor:
    """The same angle in [−π, π]."""
    return angle - 2 * math.pi * (angle / (2 * math.pi)).detach().round()


@by_sequence
def recurrent(rule: Rule, state: Mamba3State, *, pairs: Pairs, operand: Operand = identity) -> tuple[Tensor, Mamba3State]:
    """Θ_t = Θ_{t-1} + π tanh(a_t) Δ_t,    B̄ = R(Θ) B,  C̄ = R(Θ) C,    α = e^g
    S_t = α_t S_{t-1} + Σ_r (1 − λ_t) Δ_t α_t B̄_{t-1,r} x_{t-1,r}ᵀ + Σ_r λ_t Δ_t B̄_{t,r} x_{t,r}ᵀ,    o_{t,r} = S_tᵀ C̄_{t,r}

    q, k are C, B with their biases, x_r = x ⊙ X_r. o [B T HV R V].
    """
    q, k, v, g, dt, lam, angle, X = rule
    S, k_before, x, theta = state
    x_before, outputs = x[..., None, :] * X, [v[:, :0, :, None] * X]
    written = lambda k, x: torch.einsum("bhrk,bhrv->bhkv", operand(k), operand(x))
    for t in range(q.shape[1]):
        step, share, decay = dt[:, t], lam[:, t], g[:, t].exp()  # [B HV]
        theta = reduced(theta + math.pi * angle[:, t].tanh()[:, None] * step[..., None])
        k_now, x_now = turned(k[:, t], theta, pairs), v[:, t, :, None] * X
        S = decay[..., None, None] * S + written(k_before, ((1 - share) * step * decay)[..., None, None] * x_before)
        S = S + written(k_now, (share * step)[..., None, None] * x_now)
        outputs.append(torch.einsum("bhkv,bhrk->bhrv", operand(S), operand(turned(q[:, t], theta, pairs)))[:, None])
        k_before, x_before, x = k_now, x_now, v[:, t]
    return torch.cat(outputs, 1), Mamba3State(S, k_before, x, theta)


@by_sequence
def literal(
    rule: Rule, state: Mamba3State, *, pairs: Pairs, chunk_size: int, operand: Operand = identity
) -> tuple[Tensor, Mamba3State]:
    """On shifted rows k'_t = B̄_{t-1},  u'_t = α_t (λ_{t-1}Δ_{t-1} + (1 − λ_t)Δ_t) x_{t-1},  in blocks of C tokens that start with S₀:

        o_t = S₀ᵀ(e^{G_t} C̄_t) + Σ_{s<=t} e^{G_t − G_s} (C̄_tᵀk'_s) u'_s + λ_tΔ_t (C̄_tᵀB̄_t) x_t
        S ← e^{G_C} S₀ + Σ_s (e^{G_C − G_s} k'_s) u'_sᵀ;    the last token's λΔ B̄ xᵀ is added in the end

    over all rows r of a token, masked by token. At the first token k' and x_{-1} are the state's, and their λΔ part is in S already.
    """
    q, k, v, g, dt, lam, angle, X = rule
    S, k_start, x_start, theta = state
    T = q.shape[1]
    if not T:
        return v[:, :0, :, None] * X, state
    steps = math.pi * angle.tanh()[:, :, None] * dt[..., None]
    theta = reduced(theta[:, None].double() + steps.double().cumsum(1)).to(q.dtype)  # [B T HV m]
    q, k = turned(q, theta, pairs), turned(k, theta, pairs)
    own = lam * dt
    before = torch.cat([torch.zeros_like(own[:, :1]), own[:, :-1]], 1)
    weight = g.exp() * (before + (1 - lam) * dt)
    x = v[..., None, :] * X
    shifted = torch.cat([k_start[:, None], k[:, :-1]], 1)
    u = weight[..., None, None] * torch.cat([(x_start[..., None, :] * X)[:, None], x[:, :-1]], 1)
    outputs = []
    for start in range(0, T, chunk_size):
        q_, k_, u_, g_ = (y[:, start : start + chunk_size] for y in (q, shifted, u, g))
        G = g_.double().cumsum(1).transpose(1, 2)  # [B HV C]
        C = G.shape[-1]
        future = torch.ones(C, C, dtype=torch.bool, device=q.device).triu(1)
        decay = (G[..., :, None] - G[..., None, :]).to(q.dtype).masked_fill(future, -torch.inf).exp()
        P = torch.einsum("bthrk,bshlk->bhtrsl", operand(q_), operand(k_)) * decay[:, :, :, None, :, None]
        whole = G.to(q.dtype).exp()
        read = torch.einsum("bthrk,bhkv->bthrv", operand(whole.transpose(1, 2)[..., None, None] * q_), operand(S))
        outputs.append(read + torch.einsum("bhtrsl,bshlv->bthrv", operand(P), operand(u_)))
        left = (G[..., -1:] - G).to(q.dtype).exp().transpose(1, 2)[..., None, None] * k_
        S = whole[..., -1, None, None] * S + torch.einsum("bshlk,bshlv->bhkv", operand(left), operand(u_))
    at_once = own[..., None, None] * torch.einsum("bthrk,bthlk->bthrl", operand(q), operand(k))
    o = torch.cat(outputs, 1) + torch.einsum("bthrl,bthlv->bthrv", operand(at_once), operand(x))
    last = own[:, -1, :, None, None] * x[:, -1]
    S = S + torch.einsum("bhrk,bhrv->bhkv", operand(k[:, -1]), operand(last))
    return o, Mamba3State(S, k[:, -1], v[:, -1], theta[:, -1])


def unrotated(rule: Rule, *, pairs: Pairs) -> Tensor:
    """o of sequences that begin here, in the input's frame: a complex diagonal state, b = B_first + i B_second of every pair,

        S̃_t = α_t e^{−i(Θ_t − Θ_{t-1})} (S̃_{t-1} + (1 − λ_t)Δ_t b_{t-1} x_{t-1}ᵀ) + λ_tΔ_t b_t x_tᵀ,    o_t = Re(S̃_tᵀ c̄_t)

    where c̄ is the conjugate of c; pairs that do not turn have the angle 0.
    """
    q, k, v, g, dt, lam, angle, X = rule
    K = q.shape[-1]
    first, second = pair_channels(K // 2, K, pairs)
    b, c = (torch.complex(x[..., first], x[..., second]) for x in (k, q))  # [B T HV R K/2]
    still = angle.new_zeros(*angle.shape[:2], K // 2 - angle.shape[-1])
    turn = math.pi * torch.cat([angle, still], -1).tanh()[:, :, None] * dt[..., None]
    x = (v[..., None, :] * X).to(b.dtype)
    S = b.new_zeros(*b[:, 0].shape[:2], K // 2, v.shape[-1])
    outputs = []
    for t in range(q.shape[1]):
        step, share = dt[:, t, :, None, None], lam[:, t, :, None, None]
        if t:
            S = S + (1 - share) * step * torch.einsum("bhrk,bhrv->bhkv", b[:, t - 1], x[:, t - 1])
        S = (torch.polar(g[:, t, :, None].exp().expand_as(turn[:, t]), -turn[:, t]))[..., None] * S
        S = S + share * step * torch.einsum("bhrk,bhrv->bhkv", b[:, t], x[:, t])
        outputs.append(torch.einsum("bhkv,bhrk->bhrv", S, c[:, t].conj()).real)
    return torch.stack(outputs, 1)
