"""LUCID twice, literally: one row at a time (the definition), and by blocks. They know nothing of chunk.py.

Both run in the dtype of their inputs, under autograd. `operand` rounds k before the products k̂·k̂; the blocked form rounds
also A and Y in the sum over earlier blocks. What is solved with (all rows of the definition, the diagonal blocks) is not rounded.
"""

from collections.abc import Callable
from functools import partial
from math import sqrt

import torch
from torch import Tensor

from needlework.ops.attention.definition import page, rows_held
from needlework.ops.common.operands import Operand, identity
from needlework.ops.lucid.arguments import Precondition, Solve, check_call, check_data
from needlework.ops.lucid.state import LucidOutput, LucidState
from needlework.ops.paged.placement import Placement
from needlework.ops.runtime.each import each


def recurrent_lucid(
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    *,
    precondition: Precondition = "key",
    window: int | None = None,
    solve: Solve = "window",
    initial_state: LucidState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    operand: Operand = identity,
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
    no_tokens = torch.zeros(0, dtype=torch.int64)
    length, P = (no_tokens, 0) if initial_state is None else (initial_state.length, initial_state.k.shape[1])
    check_data(length, P, window, cu_seqlens, *k.shape[:2])

    rows = partial(_rows, precondition=precondition, window=window, operand=operand)
    return _each_sequence(rows, k, v, beta, window, initial_state, output_final_state, cu_seqlens)


def recurrent_pages(
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    k_pages: Tensor,
    y_pages: Tensor,
    where: Placement,
    *,
    precondition: Precondition,
    window: int | None,
) -> Tensor:
    """`recurrent_lucid` of the newest tokens [T ...] of each sequence, after the rows of its pages that the window shows, token by
    token. The pages change in place; arguments as `solve_pages` has checked them."""
    y, PG = torch.zeros_like(v), k_pages.shape[1]
    at = lambda row: (row // PG, row % PG)
    ends, rows = where.ends(len(k)).tolist(), where.rows.tolist()
    for n, total in enumerate(where.length.tolist()):
        new = slice(ends[n], ends[n + 1])
        if total < 0 or new.start == new.stop:
            continue
        past = total - (new.stop - new.start)
        seen = range(0 if window is None else max(0, past + 1 - window), past)
        table = where.block_table[n].tolist()
        held = [(table[t // PG], t % PG) for t in seen]
        k_own, v_own, beta_own = each(lambda x, new=new: x[None, new], k, v, beta)
        k_past, y_past = (
            torch.stack([x.new_zeros(x.shape[2:]), *(x[place] for place in held)])[None, 1:].to(k.dtype)
            for x in (k_pages, y_pages)
        )
        k_own = torch.cat([k_past, k_own], 1)
        y[new] = _rows(k_own, v_own, beta_own, y_past, precondition=precondition, window=window, operand=identity)[0]
        for t in range(new.start, new.stop):
            if rows[t] >= 0:
                k_pages[at(rows[t])], y_pages[at(rows[t])] = k[t].to(k_pages.dtype), y[t].to(y_pages.dtype)
    return y


def literal_lucid(
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    *,
    precondition: Precondition = "key",
    window: int | None = None,
    solve: Solve = "window",
    initial_state: LucidState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    operand: Operand = identity,
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


def _rows(
    k: Tensor, v: Tensor, beta: Tensor | None, y: Tensor, *, precondition: Precondition, window: int | None, operand: Operand
) -> Tensor:  # fmt: skip
    """The rows of v, k beginning with the keys of y: the rows solved before, oldest first."""
    d, past = k.shape[-1], y.shape[1]
    k = operand(k if precondition == "rowmax" else _unit(k))
    ys = list(y.unbind(1))
    for i in range(past, k.shape[1]):
        seen = slice(max(0, i + 1 - (window or i + 1)), i)
        dots = torch.einsum("bhk,bjhk->bjh", k[:, i], k[:, seen.start : i + 1])
        Y = torch.stack(ys[seen], 1) if ys[seen] else v[:, :0]  # [B j H V]
        u = v[:, i - past]
        if precondition == "rowmax":
            a = torch.exp((dots - dots.max(1, keepdim=True).values) / sqrt(d))
            ys.append((u - torch.einsum("bjh,bjhv->bhv", a[:, :-1], Y)) / a[:, -1, :, None])
            continue
        u = u - torch.einsum("bjh,bjhv->bhv", torch.exp(sqrt(d) * (dots[:, :-1] - 1)), Y)
        ys.append(u if beta is None else beta[:, i - past, :, None] * u)
    return torch.stack(ys[past:], 1) if ys[past:] else v


def _unit(k: Tensor) -> Tensor:
    return k / k.norm(dim=-1, keepdim=True).clamp(min=1e-6)


def _exponents(k: Tensor, rows: slice, columns: slice, window: int | None, precondition: Precondition) -> Tensor:
    """k_i·k_j [B H C C], −∞ where row i does not see j."""
    i, j = (torch.arange(x.start, x.stop, device=k.device) for x in (rows, columns))
    gap = i[:, None] - j
    hidden = (gap < 0) | (gap >= (window or k.shape[1]))
    return torch.einsum("bihk,bjhk->bhij", k[:, rows], k[:, columns]).masked_fill(hidden, float("-inf"))


def _each_sequence(
    solve: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor], k: Tensor, v: Tensor, beta: Tensor | None,
    window: int | None, initial_state: LucidState | None, output_final_state: bool, cu_seqlens: Tensor | None,
) -> LucidOutput:  # fmt: skip
    """solve(k, v, beta, y): k begins with the keys of y, the rows solved before, oldest first. Alike sequences share a call."""
    N = len(k) if cu_seqlens is None else len(cu_seqlens) - 1
    lengths = [0] * N if initial_state is None else initial_state.length.tolist()
    ends = None if cu_seqlens is None else cu_seqlens.tolist()

    def own(x: Tensor, n: int) -> Tensor:
        return x[n : n + 1] if ends is None else x[:, ends[n] : ends[n + 1]]

    if initial_state is None and cu_seqlens is None:
        batches = [(k, v, beta, v[:, :0])]
    else:
        batches = []
        for n, length in enumerate(lengths):
            k_own, v_own, beta_own = own(k, n), own(v, n), None if beta is None else own(beta, n)
            y_past = v_own[:, :0]
            if initial_state is not None:
                row = rows_held(length, window)
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
    page_k = torch.cat([page(x[None], total, P, window) for (x, _, _), total in zip(held, totals, strict=True)])
    page_y = torch.cat([page(x[None], total, P, window) for (_, x, _), total in zip(held, totals, strict=True)])
    return LucidOutput(y, LucidState(page_k, page_y, torch.tensor(totals, dtype=torch.int64, device=k.device)))
