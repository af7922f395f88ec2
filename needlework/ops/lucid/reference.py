"""LUCID twice, literally: one row at a time (the definition), and by blocks. They know nothing of chunk.py.

Both run in the dtype of their inputs, under autograd. `operand` rounds k before the products k̂·k̂; the blocked form rounds
also A and Y in the sum over earlier blocks. What is solved with (all rows of the definition, the diagonal blocks) is not rounded.
"""

from collections.abc import Callable
from math import sqrt

import torch
from torch import Tensor

from needlework.ops.common.operands import identity
from needlework.ops.lucid.arguments import check_call, check_data
from needlework.ops.lucid.state import LucidOutput, LucidState


def recurrent_lucid(
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    *,
    precondition: str = "key",
    window: int | None = None,
    solve: str = "window",
    initial_state: LucidState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    operand: Callable[[Tensor], Tensor] = identity,
) -> LucidOutput:
    """LUCID row by row, j over the rows before i that the window shows (0 < i − j < W):

        "key", "qk"   y_i = v_i − Σ_j P_ij y_j                                P_ij = e^{√d (k̂_i·k̂_j − 1)}
        "beta"        y_i = β_i (v_i − Σ_j P_ij y_j)                          k̂ = k / max(‖k‖, 1e-6)
        "rowmax"      y_i = (v_i − Σ_j e^{s_ij − μ_i} y_j) / e^{s_ii − μ_i}   s = k_i·k_j / √d,  μ_i = max_{j<=i} s_ij

    Arguments and errors as in `chunk_lucid`; `operand` is applied to every operand of a matrix product that is not solved with.

    >>> import torch
    >>> from needlework.ops.lucid import chunk_lucid, recurrent_lucid
    >>> k, v = torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 32)  # [B T Hkv K]
    >>> torch.allclose(recurrent_lucid(k, v).y, chunk_lucid(k, v).y, atol=1e-5)
    True
    """
    _, window = check_call(k, v, beta, precondition, window, solve, initial_state, cu_seqlens)
    length, P = ((), 0) if initial_state is None else (initial_state.length, initial_state.k.shape[1])
    check_data(length, P, window, cu_seqlens, *k.shape[:2])

    def rows(k: Tensor, v: Tensor, beta: Tensor | None, y: Tensor) -> Tensor:
        d, past = k.shape[-1], y.shape[1]
        k = operand(k if precondition == "rowmax" else _unit(k))
        y = list(y.unbind(1))
        for i in range(past, k.shape[1]):
            seen = slice(max(0, i + 1 - (window or i + 1)), i)
            dots = torch.einsum("bhk,bjhk->bjh", k[:, i], k[:, seen.start : i + 1])
            Y = torch.stack(y[seen], 1) if y[seen] else v[:, :0]  # [B j H V]
            u = v[:, i - past]
            if precondition == "rowmax":
                a = torch.exp((dots - dots.max(1, keepdim=True).values) / sqrt(d))
                y.append((u - torch.einsum("bjh,bjhv->bhv", a[:, :-1], Y)) / a[:, -1, :, None])
                continue
            u = u - torch.einsum("bjh,bjhv->bhv", torch.exp(sqrt(d) * (dots[:, :-1] - 1)), Y)
            y.append(u if beta is None else beta[:, i - past, :, None] * u)
        return torch.stack(y[past:], 1) if y[past:] else v

    return _each_sequence(rows, k, v, beta, window, initial_state, output_final_state, cu_seqlens)


def literal_lucid(
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    *,
    precondition: str = "key",
    window: int | None = None,
    solve: str = "window",
    initial_state: LucidState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    operand: Callable[[Tensor], Tensor] = identity,
) -> LucidOutput:
    """LUCID by blocks: Y_i = A_ii⁻¹ (V_i − Σ_{j<i} A_ij Y_j), one product per pair of blocks.

    "beta": A_ii = I + stril(Diag(β) P_ii), and the right side is multiplied by β. Arguments as in `recurrent_lucid`.
    """

    def blocks(k: Tensor, v: Tensor, beta: Tensor | None, y: Tensor) -> Tensor:
        d, past, T = k.shape[-1], y.shape[1], k.shape[1]
        k = operand(k if precondition == "rowmax" else _unit(k))
        solved = [(slice(j, min(j + chunk_size, past)), y[:, j : j + chunk_size]) for j in range(0, past, chunk_size)]
        held = len(solved)
        for start in range(past, T, chunk_size):
            own = slice(start, min(start + chunk_size, T))
            columns = [block for block, _ in solved] + [own]
            A = [_exponents(k, own, block, window, precondition) for block in columns]
            if precondition == "rowmax":
                mu = torch.cat(A, -1).max(-1, keepdim=True).values / sqrt(d)
                A = [torch.exp(a / sqrt(d) - mu) for a in A]
            else:
                A = [torch.exp(sqrt(d) * (a - 1)) for a in A]
            *before, diagonal = A  # [B H C C]
            rhs = v[:, start - past : own.stop - past]
            for a, (_, Y) in zip(before, solved, strict=True):
                rhs = rhs - torch.einsum("bhij,bjhv->bihv", operand(a), operand(Y))
            if beta is not None:
                b = beta[:, start - past : own.stop - past, :, None]
                rhs, diagonal = b * rhs, b.transpose(1, 2) * diagonal
            if precondition != "rowmax":
                diagonal = diagonal.tril(-1) + torch.eye(own.stop - start, dtype=k.dtype, device=k.device)
            Y = torch.linalg.solve_triangular(diagonal, rhs.transpose(1, 2), upper=False).transpose(1, 2)
            solved.append((own, Y))
        return torch.cat([Y for _, Y in solved[held:]], 1) if solved[held:] else v

    window = None if solve == "global" else window
    return _each_sequence(blocks, k, v, beta, window, initial_state, output_final_state, cu_seqlens)


def _unit(k: Tensor) -> Tensor:
    return k / k.norm(dim=-1, keepdim=True).clamp(min=1e-6)


def _exponents(k: Tensor, rows: slice, columns: slice, window: int | None, precondition: str) -> Tensor:
    """k_i·k_j [B H C C], −∞ where row i does not see j."""
    i, j = (torch.arange(x.start, x.stop, device=k.device) for x in (rows, columns))
    gap = i[:, None] - j
    hidden = (gap < 0) | (gap >= (window or k.shape[1]))
    return torch.einsum("bihk,bjhk->bhij", k[:, rows], k[:, columns]).masked_fill(hidden, float("-inf"))


def _each_sequence(solve, k, v, beta, window, initial_state, output_final_state, cu_seqlens) -> LucidOutput:
    """solve(k, v, beta, y): k begins with the keys of y, the rows solved before, oldest first. Alike sequences share a call."""
    N = len(k) if cu_seqlens is None else len(cu_seqlens) - 1
    lengths = [0] * N if initial_state is None else initial_state.length.tolist()
    take = lambda n: tuple(x if x is None else x[n : n + 1] for x in (k, v, beta))
    if cu_seqlens is not None:
        ends = cu_seqlens.tolist()
        take = lambda n: tuple(x if x is None else x[:, ends[n] : ends[n + 1]] for x in (k, v, beta))
    if initial_state is None and cu_seqlens is None:
        batches = [(k, v, beta, v[:, :0])]
    else:
        batches = []
        for n, length in enumerate(lengths):
            k_own, v_own, beta_own = take(n)
            y_past = v_own[:, :0]
            if initial_state is not None:
                row = [t % (window or length) for t in range(max(0, length - (window or length)), length)]
                k_own = torch.cat([initial_state.k[n : n + 1, row].to(k.dtype), k_own], 1)
                y_past = initial_state.y[n : n + 1, row].to(v.dtype)
            batches.append((k_own, v_own, beta_own, y_past))
    ys = [solve(*batch) for batch in batches]
    y = torch.cat(ys, 0 if cu_seqlens is None else 1)
    if not output_final_state:
        return LucidOutput(y, None)
    held = [
        (k_all[b], torch.cat([y_past, y_new], 1)[b], y_new.shape[1])
        for (k_all, _, _, y_past), y_new in zip(batches, ys, strict=True)
        for b in range(len(k_all))
    ]
    totals = [length + new for length, (_, _, new) in zip(lengths, held, strict=True)]
    P = max(totals) if cu_seqlens is not None else k.shape[1] + (0 if initial_state is None else initial_state.k.shape[1])
    P = min(P, window or P)

    def page(x: Tensor, total: int) -> Tensor:
        kept = range(max(0, total - (window or total)), total)
        row = torch.tensor([t % (window or total) for t in kept], dtype=torch.int64, device=x.device)
        return x.new_zeros(P, *x.shape[1:]).index_copy(0, row, x[len(x) - len(kept) :])

    pages = [torch.stack([page(h[i], total) for h, total in zip(held, totals, strict=True)]) for i in (0, 1)]
    return LucidOutput(y, LucidState(*pages, torch.tensor(totals, dtype=torch.int64, device=k.device)))
