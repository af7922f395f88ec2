"""Polar attention twice, literally: one query at a time (the definition), and streamed by key blocks.

Both run in the dtype of their inputs, under autograd, one sequence after the other. They know nothing of chunk.py.
"""

from collections.abc import Callable
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from needlework.ops.attention.definition import page, rows_held, together
from needlework.ops.common.operands import identity
from needlework.ops.polar.arguments import Parameters, Tokens, check_arguments, check_data
from needlework.ops.polar.state import PolarOutput, PolarState, no_tokens_yet


def recurrent_polar(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    gamma: Tensor,
    null_base: Tensor,
    v_null: Tensor,
    *,
    window: int | None = None,
    initial_state: PolarState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    operand: Callable[[Tensor], Tensor] = identity,
) -> PolarOutput:
    """Polar attention in token order. For query i, which sees n keys, its own included:

        w = softmax([temp σ_i·, temp null]),   σ_ij = q_i·k_j / √d,   temp = 1 + softplus(alpha) ln n,
                                               null = null_base + softplus(gamma) √ln(n + 1)
        s = Σ_j w_j v_j + w_N v_null           direction = s / max(‖s‖, 1e-6)
        ŵ = w_j / Σ_j w_j,  n_eff = 1 / Σ_j ŵ²,  m_eff = n_eff (1 − w_N)
        magnitude = tanh(softplus(beta) ln(1 + m_eff))

    Arguments and errors as in `chunk_polar`; `operand` is applied to every operand of a matrix product.

    >>> import torch
    >>> from needlework.ops.polar import chunk_polar, recurrent_polar
    >>> q, k, v = torch.randn(1, 100, 4, 32), torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 64)  # [B T heads channels]
    >>> (alpha, beta, gamma, null_base), v_null = torch.zeros(4, 4), torch.randn(4, 64)
    >>> tensors = (q, k, v, alpha, beta, gamma, null_base, v_null)
    >>> torch.allclose(recurrent_polar(*tensors).direction, chunk_polar(*tensors).direction, atol=1e-5)
    True
    """
    parameters = Parameters(alpha, beta, gamma, null_base, v_null)
    N = check_arguments(Tokens(q, k, v), parameters, window, initial_state, cu_seqlens)
    length, P = (q.new_zeros(N), 0) if initial_state is None else (initial_state.length, initial_state.k.shape[1])
    check_data(length, P, window, cu_seqlens, *q.shape[:2])
    G = q.shape[2] // k.shape[2]

    def attend(q: Tensor, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
        k, v = (operand(x.repeat_interleave(G, 2)) for x in (k, v))  # [B n Hq d], [B n Hq V]
        directions, magnitudes = [], []
        for i in range(q.shape[1]):
            n = min(length + i + 1, window or length + i + 1)
            own = k.shape[1] - q.shape[1] + i
            seen = slice(own + 1 - n, own + 1)
            temp = 1 + F.softplus(alpha) * torch.log(alpha.new_tensor(n))  # [Hq]
            null = null_base + F.softplus(gamma) * torch.log(alpha.new_tensor(n + 1)).sqrt()
            a = temp[:, None] * torch.einsum("bhd,bnhd->bhn", operand(q[:, i]), k[:, seen]) / sqrt(q.shape[-1])
            a_null = (temp * null).expand(len(q), -1)[..., None]
            w, w_null = torch.softmax(torch.cat([a, a_null], -1), -1).split([n, 1], -1)
            s = torch.einsum("bhn,bnhv->bhv", operand(w), v[:, seen]) + w_null * v_null
            # ŵ and 1 − w_N without the quotient and the difference: neither survives float32 when the null dominates
            n_eff = 1 / torch.softmax(a, -1).square().sum(-1)
            m_eff = n_eff * w.sum(-1)
            directions.append(s / s.norm(dim=-1, keepdim=True).clamp(min=1e-6))
            magnitudes.append(torch.tanh(F.softplus(beta) * torch.log1p(m_eff)))
        return _concatenate(directions, magnitudes, q, v_null)

    return _each_sequence(attend, q, k, v, window, initial_state, output_final_state, cu_seqlens)


def literal_polar(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    gamma: Tensor,
    null_base: Tensor,
    v_null: Tensor,
    *,
    window: int | None = None,
    initial_state: PolarState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    operand: Callable[[Tensor], Tensor] = identity,
) -> PolarOutput:
    """Polar attention streamed over blocks of chunk_size keys. Over the keys alone, p = e^{a−M}:

        M = max a,  L = Σ p,  Q₂ = Σ p²,  S = Σ p v;   a new M' rescales L, S by e^{M−M'} and Q₂ by its square
        f = sigmoid(M + ln L − temp null),  n_eff = L²/Q₂,  m_eff = n_eff f,  s = f S/L + (1 − f) v_null

    The rest as in `recurrent_polar`.
    """
    G = q.shape[2] // k.shape[2]

    def attend(q: Tensor, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
        k, v = (operand(x.repeat_interleave(G, 2)) for x in (k, v))
        past = k.shape[1] - q.shape[1]
        directions, magnitudes = [], []
        for start in range(0, q.shape[1], chunk_size):
            i = torch.arange(start, min(start + chunk_size, q.shape[1]), device=q.device)
            n = (length + i + 1).clamp(min=1, max=window).to(q.dtype)
            temp = 1 + F.softplus(alpha)[:, None] * n.log()  # [Hq C]
            null = null_base[:, None] + F.softplus(gamma)[:, None] * (n + 1).log().sqrt()
            M = q.new_full((len(q), q.shape[2], len(i)), float("-inf"))
            L, Q2, S = torch.zeros_like(M), torch.zeros_like(M), q.new_zeros(*M.shape, v.shape[-1])
            # from the newest keys back, so that the first block holds each query's own key and M is finite
            for end in range(past + start + len(i), 0, -chunk_size):
                j = torch.arange(max(0, end - chunk_size), end, device=q.device)
                distance = past + i[:, None] - j
                hidden = (distance < 0) | (distance >= (window or past + q.shape[1]))
                a = torch.einsum("bchd,bnhd->bhcn", operand(q[:, i]), k[:, j]) * temp[..., None] / sqrt(q.shape[-1])
                a = a.masked_fill(hidden, float("-inf"))  # [B Hq C n]
                new = torch.maximum(M, a.detach().amax(-1))  # M shifts exponents and cancels: it needs no gradient
                p, rescale = torch.exp(a - new[..., None]), torch.exp(M - new)
                M, L = new, rescale * L + p.sum(-1)
                Q2 = rescale.square() * Q2 + p.square().sum(-1)
                S = rescale[..., None] * S + torch.einsum("bhcn,bnhv->bhcv", operand(p), v[:, j])
            gap = M + L.log() - temp * null
            f, missed = torch.sigmoid(gap), torch.sigmoid(-gap)
            s = (f / L)[..., None] * S + missed[..., None] * v_null[:, None]
            m_eff = L.square() / Q2 * f
            directions += (s / s.norm(dim=-1, keepdim=True).clamp(min=1e-6)).unbind(2)
            magnitudes += torch.tanh(F.softplus(beta)[:, None] * torch.log1p(m_eff)).unbind(2)
        return _concatenate(directions, magnitudes, q, v_null)

    return _each_sequence(attend, q, k, v, window, initial_state, output_final_state, cu_seqlens)


def _concatenate(directions: list, magnitudes: list, q: Tensor, v_null: Tensor) -> tuple[Tensor, Tensor]:
    """T times [B Hq V] and T times [B Hq] -> [B T Hq V] and [B T Hq]."""
    if not directions:
        return q.new_zeros(len(q), 0, *v_null.shape), q.new_zeros(len(q), 0, q.shape[2])
    return torch.stack(directions, 1), torch.stack(magnitudes, 1)


def _each_sequence(attend, q, k, v, window, initial_state, output_final_state, cu_seqlens) -> PolarOutput:
    """attend(q, k, v, tokens before q) on each sequence alone, or on the whole batch where all have the same past.

    The k and v that it gets begin with those of the pages, oldest first.
    """
    N = len(q) if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_state is None:
        initial_state = no_tokens_yet(N, k, v)
    pasts = initial_state.length.tolist()
    outputs, held = [], []
    for row, tokens, sequence in together(pasts, cu_seqlens):
        past = pasts[sequence.start]
        q_own, k_all, v_all = q[row, tokens], k[row, tokens], v[row, tokens]
        rows = rows_held(past, window)
        k_all = torch.cat([initial_state.k[sequence][:, rows], k_all], 1)
        v_all = torch.cat([initial_state.v[sequence][:, rows], v_all], 1)
        outputs.append(attend(q_own, k_all, v_all, past))
        held.append((k_all, v_all, past + q_own.shape[1]))
    direction, magnitude = (torch.cat(parts, 0 if cu_seqlens is None else 1) for parts in zip(*outputs, strict=True))
    if not output_final_state:
        return PolarOutput(direction, magnitude, None)
    P = initial_state.k.shape[1] + q.shape[1] if cu_seqlens is None else max(total for *_, total in held)
    k_final = torch.cat([page(x, total, P, window) for x, _, total in held])
    v_final = torch.cat([page(x, total, P, window) for _, x, total in held])
    new = torch.tensor([total for x, _, total in held for _ in range(len(x))], device=q.device)
    return PolarOutput(direction, magnitude, PolarState(k_final, v_final, new))
