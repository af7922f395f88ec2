"""PaTH attention three times, literally: token by token (the definition), by blocks, and its scores in closed form.

All run in the dtype of their inputs, under autograd. They know nothing of chunk.py. `operand` rounds what enters a matrix product;
M, what it is solved from and what is carried from token to token, or from block to block, stay as they are.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.common.operands import Operand, identity
from needlework.ops.common.unit import unit_rows
from needlework.ops.path.arguments import check_call, check_data, check_keys, check_queries, check_read, no_tokens_yet
from needlework.ops.path.state import BLOCK, PathOutput, PathState


class Tokens(NamedTuple):
    """What a key-value head has of some tokens of a sequence, [B T Hkv ·]."""

    k: Tensor
    v: Tensor
    beta: Tensor
    w: Tensor


class Past(NamedTuple):
    """The tokens before a call: `k` as the state keeps it, w and beta of the open block's tokens alone."""

    k: Tensor
    v: Tensor
    beta: Tensor
    w: Tensor
    length: int  # k and v may have fewer tokens, the newest

    @property
    def open(self) -> int:
        return self.w.shape[1]


Attend = Callable[[Tensor, Tokens, Past], tuple[Tensor, Tensor]]


def recurrent_path(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    w: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    l2norm: bool = False,
    initial_state: PathState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    operand: Operand = identity,
) -> PathOutput:
    """PaTH attention in token order: every key is carried through every later token's factor, one after the other.

        H_t = I − β_t w_t w_tᵀ,    A_ij = scale · q_iᵀ H_i H_{i−1} … H_{j+1} k_j,    o_i = Σ_j softmax_j(A_i·) v_j

    Arguments and errors as in `chunk_path`; `operand` is applied to every operand of a matrix product.

    >>> import torch
    >>> from torch.nn.functional import normalize
    >>> from needlework.ops.path import chunk_path, recurrent_path
    >>> q, k, v = torch.randn(1, 100, 4, 32), torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 64)  # [B T heads channels]
    >>> beta, w = 2 * torch.rand(1, 100, 2), normalize(torch.randn(1, 100, 2, 32), dim=-1)
    >>> torch.allclose(recurrent_path(q, k, v, beta, w).o, chunk_path(q, k, v, beta, w).o, atol=1e-5)
    True
    """

    def attend(q: Tensor, own: Tokens, past: Past) -> tuple[Tensor, Tensor]:
        G, held = q.shape[2] // own.k.shape[2], past.k.shape[1]
        kept, now, values = past.k, past.k, operand(torch.cat([past.v, own.v], 1))
        for t in range(past.open):  # its factor is not in the keys before it yet
            end = max(0, held - past.open + t)
            now = torch.cat([carried(now[:, :end], past.w[:, t], past.beta[:, t]), now[:, end:]], 1)
        o = []
        for i in range(q.shape[1]):
            now = torch.cat([carried(now, own.w[:, i], own.beta[:, i]), own.k[:, i : i + 1]], 1)
            ends = (past.length + i + 1) % BLOCK == 0
            kept = now if ends else torch.cat([kept, own.k[:, i : i + 1]], 1)
            seen = slice(max(0, held + i + 1 - (window or held + i + 1)), held + i + 1)
            heads = operand(q[:, i]).unflatten(1, (-1, G))
            a = torch.einsum("bhgk,bjhk->bhgj", heads, operand(now[:, seen]))
            o.append(torch.einsum("bhgj,bjhv->bhgv", operand(torch.softmax(a, -1)), values[:, seen]).flatten(1, 2))
        return torch.stack(o, 1) if o else q.new_zeros(*q.shape[:3], own.v.shape[3]), kept

    def carried(k: Tensor, w: Tensor, beta: Tensor) -> Tensor:
        """H k of the keys of all earlier tokens."""
        along = torch.einsum("bhk,bjhk->bjh", operand(w), k)
        return k - (beta[:, None] * along)[..., None] * w[:, None]

    settings = {"window": window, "scale": scale, "l2norm": l2norm, "cu_seqlens": cu_seqlens}
    return _each_sequence(attend, q, Tokens(k, v, beta, w), initial_state, output_final_state, **settings)


def literal_path(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    w: Tensor,
    *,
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

    def attend(q: Tensor, own: Tokens, past: Past) -> tuple[Tensor, Tensor]:
        T, held, G = q.shape[1], past.k.shape[1], q.shape[2] // own.k.shape[2]
        q, k, v, w = (x.transpose(1, 2) for x in (q, own.k, own.v, own.w))  # [B H T ·]
        q, beta = q.unflatten(1, (-1, G)), own.beta.transpose(1, 2)  # [B H G T K]
        k_past, v_past, w_open = (x.transpose(1, 2) for x in (past.k, past.v, past.w))
        s = held - past.open  # from here on tokens before the call are in the open block
        # the open block may be older than its keys: those out of the window are gone, their factors are not
        k_open, gone = k_past[:, :, max(s, 0) :], past.open - min(past.open, held)
        opened = _Block.of(k_open, w_open, past.beta.transpose(1, 2), gone)
        starts = range(0, T, chunk_size)
        cut = lambda x, i: x[..., i : i + chunk_size, :]
        blocks = [_Block.of(cut(k, i), cut(w, i), cut(beta[..., None], i)[..., 0]) for i in starts]
        o = []
        for n, start in enumerate(starts):
            block, own_q = blocks[n], cut(q, start)
            L = (operand(own_q) @ operand(block.W).mT[:, :, None]).tril()
            x = own_q - operand(L) @ operand(block.MW)[:, :, None]
            scores = [(operand(own_q) @ operand(block.K).mT[:, :, None]) - operand(L) @ operand(block.MN)[:, :, None]]
            for other in [*reversed(blocks[:n]), opened]:
                scores.append(operand(x) @ operand(other.k1).mT[:, :, None])
                x = x - operand(operand(x) @ operand(other.W).mT[:, :, None]) @ operand(other.MW)[:, :, None]
            scores.append(operand(x) @ operand(k_past[:, :, : max(s, 0)]).mT[:, :, None])
            a = torch.cat(scores[::-1], -1)  # oldest keys first
            i = torch.arange(start, start + own_q.shape[3], device=q.device)
            gap = i[:, None] + held - torch.arange(a.shape[-1], device=q.device)
            hidden = (gap < 0) | (gap >= (window or held + T))
            p = torch.softmax(a.masked_fill(hidden, float("-inf")), -1)
            values = torch.cat([v_past, v[:, :, : a.shape[-1] - held]], 2)
            o.append((operand(p) @ operand(values)[:, :, None]).flatten(1, 2).transpose(1, 2))
        total = past.length + T
        kept = _kept(total // BLOCK * BLOCK - (past.length - past.open), past, own, k_past, opened, blocks, chunk_size)
        return torch.cat(o, 1) if o else q.new_zeros(len(q), 0, q.shape[1] * G, v.shape[3]), kept

    settings = {"window": window, "scale": scale, "l2norm": l2norm, "cu_seqlens": cu_seqlens}
    return _each_sequence(attend, q, Tokens(k, v, beta, w), initial_state, output_final_state, **settings)


def scores(q: Tensor, k: Tensor, beta: Tensor, w: Tensor, scale: float | None = None) -> Tensor:
    """A [B Hq T T] in closed form, zeros above the diagonal: scale · (tril(Q Kᵀ) − tril(Q Wᵀ) M stril(W Kᵀ))."""
    G = q.shape[2] // k.shape[2]
    q, k, w = (x.transpose(1, 2) for x in (q, k, w))
    k, w, beta = (x.repeat_interleave(G, 1) for x in (k, w, beta.transpose(1, 2)))
    block = _Block.of(k, w, beta)
    A = (q @ k.mT).tril() - (q @ w.mT).tril() @ block.MN
    return A * (q.shape[-1] ** -0.5 if scale is None else scale)


class _Block(NamedTuple):
    """A block's W, K, M W, M N and k¹, [B H C ·]."""

    W: Tensor
    K: Tensor
    MW: Tensor
    MN: Tensor
    k1: Tensor

    @classmethod
    def of(cls, K: Tensor, W: Tensor, beta: Tensor, gone: int = 0) -> "_Block":
        """gone: of so many of its first tokens there are no keys."""
        C = W.shape[-2]
        A = torch.eye(C, dtype=W.dtype, device=W.device) + beta[..., None] * (W @ W.mT).tril(-1)
        M = torch.linalg.solve_triangular(A, torch.diag_embed(beta), upper=False)
        MN = M @ (W @ K.mT).tril(-1 - gone)
        return cls(W, K, M @ W, MN, K - MN.mT @ W)


def _kept(
    end: int, past: Past, own: Tokens, k_past: Tensor, opened: _Block, blocks: Sequence[_Block], C: int
) -> Tensor:  # fmt: skip
    """Keys as the state keeps them, if the call's tokens close a block: `end` tokens after the last boundary. By blocks."""
    if end <= 0:
        return torch.cat([past.k, own.k], 1)
    s = max(past.k.shape[1] - past.open, 0)
    k = k_past[:, :, :s]
    k = torch.cat([k - (k @ opened.MW.mT) @ opened.W, opened.k1], 2)
    for n, block in enumerate(blocks):
        # M is lower triangular: rows of tokens past the boundary are left out
        inside = (n * C + torch.arange(block.W.shape[2], device=k.device) < end - past.open)[:, None]
        MW, MN = (torch.where(inside, x, 0) for x in (block.MW, block.MN))
        k = torch.cat([k - (k @ MW.mT) @ block.W, block.K - MN.mT @ block.W], 2)
    return k.transpose(1, 2)


def _each_sequence(
    attend: Attend, q: Tensor, tokens: Tokens, initial_state: PathState | None, output_final_state: bool, *,
    window: int | None, scale: float | None, l2norm: bool, cu_seqlens: Tensor | None,
) -> PathOutput:  # fmt: skip
    """attend(q, tokens, past) of each sequence, or of the whole batch where all have the same past; returns o and the state's keys."""
    check_keys(*tokens, "B T Hkv")
    check_queries(q, tokens.k, "B T Hq")
    check_read(window, scale)
    N = check_call(tokens.k, tokens.v, window, initial_state, cu_seqlens)
    P = 0 if initial_state is None else initial_state.k.shape[1]
    state = no_tokens_yet(N, *tokens) if initial_state is None else initial_state
    check_data(state.length, P, window, cu_seqlens, *q.shape[:2])
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    tokens = tokens._replace(w=unit_rows(tokens.w)) if l2norm else tokens
    pasts = state.length.tolist()
    if cu_seqlens is not None:
        ends = cu_seqlens.tolist()
        pieces = [(slice(0, 1), slice(ends[n], ends[n + 1]), slice(n, n + 1)) for n in range(N)]
    elif len(set(pasts)) == 1:
        pieces = [(slice(0, N), slice(None), slice(0, N))]
    else:
        pieces = [(slice(n, n + 1), slice(None), slice(n, n + 1)) for n in range(N)]
    outputs, grown = [], []
    for row, which, sequence in pieces:
        length, own = pasts[sequence.start], Tokens(*(x[row, which] for x in tokens))
        page = [t % (window or length) for t in range(max(0, length - (window or length)), length)]
        k, v = (x[sequence][:, page] for x in (state.k, state.v))
        beta, w = (x[sequence, : length % BLOCK] for x in (state.beta, state.w))
        past = Past(k.to(own.k.dtype), v.to(own.v.dtype), beta.to(own.beta.dtype), w.to(own.w.dtype), length)
        o, kept = attend(q[row, which], own, past)
        outputs.append(o)
        grown.append((kept, torch.cat([past.v, own.v], 1), *_open(past, own)))
    o = torch.cat(outputs, 0 if cu_seqlens is None else 1)
    if not output_final_state:
        return PathOutput(o, None)
    totals = [length + x.shape[1] for length, x in zip([pasts[s.start] for *_, s in pieces], outputs, strict=True)]
    rows = P + q.shape[1] if cu_seqlens is None else max(totals)
    pages = [[_page(x, total, rows, window) for x in held[:2]] for held, total in zip(grown, totals, strict=True)]
    k, v, beta, w = (
        torch.cat(column) for column in zip(*((*a, *b[2:]) for a, b in zip(pages, grown, strict=True)), strict=True)
    )
    length = torch.tensor([total for o, total in zip(outputs, totals, strict=True) for _ in range(len(o))], device=q.device)
    return PathOutput(o, PathState(k, v, w, beta, length.to(torch.int64)))


def _open(past: Past, own: Tokens) -> tuple[Tensor, Tensor]:
    """β and w of the open block after the call, [B BLOCK ·]."""
    left = (past.length + own.k.shape[1]) % BLOCK

    def last(before: Tensor, new: Tensor) -> Tensor:
        x = torch.cat([before, new], 1)
        x = x[:, x.shape[1] - left :]
        return torch.cat([x, x.new_zeros(len(x), BLOCK - left, *x.shape[2:])], 1)

    return last(past.beta, own.beta), last(past.w, own.w)


def _page(x: Tensor, total: int, rows: int, window: int | None) -> Tensor:
    """[B · ...], a sequence's newest tokens of `total` -> its pages, [B P ...]."""
    kept = range(max(0, total - (window or total)), total)
    row = torch.tensor([t % (window or total) for t in kept], dtype=torch.int64, device=x.device)
    return x.new_zeros(len(x), min(rows, window or rows), *x.shape[2:]).index_copy(1, row, x[:, x.shape[1] - len(kept) :])
