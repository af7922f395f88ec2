"""PaTH attention three times, literally: token by token (the definition), by blocks, and its scores in closed form.

They know nothing of chunk.py; what they share with LUCID-PaTH's is in literal.py.
"""

import torch
from torch import Tensor

from needlework.ops.common.operands import Operand, identity
from needlework.ops.path.literal import Block, InBlocks, Passing, Past, Tokens, each_sequence, forgotten
from needlework.ops.path.state import PathOutput, PathState


def recurrent_path(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    w: Tensor,
    *,
    g: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    l2norm: bool = False,
    initial_state: PathState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    operand: Operand = identity,
) -> PathOutput:
    """PaTH attention in token order: every key is carried through every later token's factor, one after the other.

        H_t = I − β_t w_t w_tᵀ,    A_ij = scale · q_iᵀ H_i H_{i−1} … H_{j+1} k_j + g_{j+1} + … + g_i,    o_i = Σ_j softmax_j(A_i·) v_j

    Arguments and errors as in `chunk_path`; `operand` is applied to every operand of a matrix product.

    >>> import torch
    >>> from torch.nn.functional import normalize
    >>> from needlework.ops.path import chunk_path, recurrent_path
    >>> q, k, v = torch.randn(1, 100, 4, 32), torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 64)  # [B T heads channels]
    >>> beta, w = 2 * torch.rand(1, 100, 2), normalize(torch.randn(1, 100, 2, 32), dim=-1)
    >>> torch.allclose(recurrent_path(q, k, v, beta, w).o, chunk_path(q, k, v, beta, w).o, atol=1e-5)
    True
    """

    def attend(q: Tensor, own: Tokens, past: Past) -> tuple[Tensor, Tensor, Tensor]:
        G, held, keys = q.shape[2] // own.k.shape[2], past.k.shape[1], Passing(own, past, operand)
        values, o = operand(torch.cat([past.v, own.v], 1)), []
        for i, now in enumerate(keys):
            seen = slice(max(0, held + i + 1 - (window or held + i + 1)), held + i + 1)
            heads = operand(q[:, i]).unflatten(1, (-1, G))
            a = torch.einsum("bhgk,bjhk->bhgj", heads, operand(now[:, seen]))[:, :, :, None]
            a = forgotten(a, own, past, slice(i, i + 1), seen)[:, :, :, 0]
            o.append(torch.einsum("bhgj,bjhv->bhgv", operand(torch.softmax(a, -1)), values[:, seen]).flatten(1, 2))
        return torch.stack(o, 1) if o else q.new_zeros(*q.shape[:3], own.v.shape[3]), keys.kept, own.v

    settings = {"g": g, "window": window, "scale": scale, "l2norm": l2norm, "cu_seqlens": cu_seqlens}
    return each_sequence(attend, q, Tokens(k, v, beta, w), initial_state, output_final_state, **settings)


def literal_path(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    w: Tensor,
    *,
    g: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    l2norm: bool = False,
    initial_state: PathState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    operand: Operand = identity,
) -> PathOutput:
    """PaTH attention by blocks of chunk_size tokens, each with its own W, K, L = tril(Q Wᵀ), N = stril(W Kᵀ) and

        M = (I + Diag(β) stril(W Wᵀ))⁻¹ Diag(β)            H_n … H_1 = I − Wᵀ M W
        q⁰ = Q − L M W  (carried to the block's start)      k¹ = K − (M N)ᵀ W  (carried to its end)
        own scores tril(Q Kᵀ) − L M N;   for each older block, the newest first: scores x k¹ᵀ, then x ← x − (x Wᵀ) M W

    x begins as q⁰. Arguments as in `recurrent_path`.
    """

    def attend(q: Tensor, own: Tokens, past: Past) -> tuple[Tensor, Tensor, Tensor]:
        blocks, values, o = InBlocks(q, own, past, chunk_size, operand), torch.cat([past.v, own.v], 1).transpose(1, 2), []
        for row in blocks.rows(window):
            a = forgotten(row.scores, own, past, row.tokens, slice(row.scores.shape[-1]))
            p = torch.softmax(a.masked_fill(row.hidden, float("-inf")), -1)
            v = values[:, :, None, : p.shape[-1]]
            o.append((operand(p) @ operand(v)).flatten(1, 2).transpose(1, 2))
        return torch.cat(o, 1) if o else q.new_zeros(*q.shape[:3], own.v.shape[3]), blocks.kept(), own.v

    settings = {"g": g, "window": window, "scale": scale, "l2norm": l2norm, "cu_seqlens": cu_seqlens}
    return each_sequence(attend, q, Tokens(k, v, beta, w), initial_state, output_final_state, **settings)


def scores(q: Tensor, k: Tensor, beta: Tensor, w: Tensor, scale: float | None = None) -> Tensor:
    """A [B Hq T T] in closed form, zeros above the diagonal: scale · (tril(Q Kᵀ) − tril(Q Wᵀ) M stril(W Kᵀ))."""
    G = q.shape[2] // k.shape[2]
    q, k, w = (x.transpose(1, 2) for x in (q, k, w))
    k, w, beta = (x.repeat_interleave(G, 1) for x in (k, w, beta.transpose(1, 2)))
    block = Block.of(k, w, beta)
    A = (q @ k.mT).tril() - (q @ w.mT).tril() @ block.MN
    return A * (q.shape[-1] ** -0.5 if scale is None else scale)
