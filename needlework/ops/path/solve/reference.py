"""LUCID-PaTH's solve twice, literally: one row at a time (the definition), and by blocks. They know nothing of chunk.py.

The values that PaTH's literal forms carry are here y and the key's norm side by side. `operand` rounds k̂ before the products of keys; the
blocked form rounds P and Y in the sum over earlier blocks too. What is solved with is not rounded.
"""

from math import sqrt

import torch
from torch import Tensor

from needlework.ops.common.operands import Operand, identity
from needlework.ops.path.arguments import check_keys
from needlework.ops.path.literal import Attend, InBlocks, Passing, Past, Tokens, each_sequence
from needlework.ops.path.solve.arguments import as_they_came, check_call, directions, unit
from needlework.ops.path.solve.state import LucidPathOutput, LucidPathState
from needlework.ops.path.state import PathState


def recurrent_lucid_path(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    w: Tensor,
    *,
    window: int | None = None,
    l2norm: bool = False,
    initial_state: LucidPathState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    operand: Operand = identity,
) -> LucidPathOutput:
    """LUCID-PaTH's solve row by row, j over the rows before i that the window shows:

        y_i = v_i − Σ_j e^{√d (k̂_iᵀ H_i … H_{j+1} k̂_j − 1)} y_j,    H_t = I − β_t w_t w_tᵀ,    k̂ = k / max(‖k‖, 1e-6)

    Arguments and errors as in `chunk_lucid_path`; `operand` is applied to every operand of a product of keys.

    >>> import torch
    >>> from torch.nn.functional import normalize
    >>> from needlework.ops.path import chunk_lucid_path, recurrent_lucid_path
    >>> k, v, beta = torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 64), 2 * torch.rand(1, 100, 2)  # [B T Hkv ·]
    >>> w = normalize(torch.randn(1, 100, 2, 32), dim=-1)
    >>> torch.allclose(recurrent_lucid_path(k, v, beta, w).y, chunk_lucid_path(k, v, beta, w).y, atol=1e-5)
    True
    """

    def solve(q: Tensor, own: Tokens, past: Past) -> tuple[Tensor, Tensor, Tensor]:
        held, d, keys = past.k.shape[1], q.shape[-1], Passing(own, past, operand)
        v, norm = own.v[..., :-1], own.v[..., -1:]
        ys = list(past.v[..., :-1].unbind(1))
        for i, now in enumerate(keys):
            seen = slice(max(0, held + i + 1 - (window or held + i + 1)), held + i)
            dots = torch.einsum("bhk,bjhk->bjh", operand(q[:, i]), operand(now[:, seen]))
            Y = torch.stack(ys[seen], 1) if ys[seen] else v[:, :0]  # [B j H V]
            ys.append(v[:, i] - torch.einsum("bjh,bjhv->bhv", torch.exp(sqrt(d) * (dots - 1)), Y))
        y = torch.stack(ys[held:], 1) if ys[held:] else v
        return y, keys.kept, torch.cat([y, norm], -1)

    return _solved(solve, k, v, beta, w, initial_state, output_final_state, window, l2norm, cu_seqlens)


def literal_lucid_path(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    w: Tensor,
    *,
    window: int | None = None,
    l2norm: bool = False,
    initial_state: LucidPathState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    operand: Operand = identity,
) -> LucidPathOutput:
    """LUCID-PaTH's solve by blocks: Y_b = P_bb⁻¹ (V_b − Σ_{b'<b} P_bb' Y_b'), the products of keys as `literal_path` has its scores."""

    def solve(q: Tensor, own: Tokens, past: Past) -> tuple[Tensor, Tensor, Tensor]:
        blocks, d = InBlocks(q, own, past, chunk_size, operand), q.shape[-1]
        v, norm = own.v[..., :-1], own.v[..., -1:]
        Y = past.v[..., :-1].transpose(1, 2)  # [B H · V], what is solved so far
        for row in blocks.rows(window):
            C = row.tokens.stop - row.tokens.start
            P = torch.exp(sqrt(d) * (row.scores[:, :, 0].masked_fill(row.hidden, float("-inf")) - 1))
            rhs = v[:, row.tokens].transpose(1, 2) - operand(P[..., :-C]) @ operand(Y)
            own_P = P[..., -C:].tril(-1) + torch.eye(C, dtype=q.dtype, device=q.device)
            Y = torch.cat([Y, torch.linalg.solve_triangular(own_P, rhs, upper=False)], 2)
        y = Y[:, :, past.k.shape[1] :].transpose(1, 2)
        return y, blocks.kept(), torch.cat([y, norm], -1)

    return _solved(solve, k, v, beta, w, initial_state, output_final_state, window, l2norm, cu_seqlens)


def _solved(
    solve: Attend, k: Tensor, v: Tensor, beta: Tensor, w: Tensor, initial_state: LucidPathState | None, output_final_state: bool,
    window: int | None, l2norm: bool, cu_seqlens: Tensor | None,
) -> LucidPathOutput:  # fmt: skip
    check_keys(k, v, beta, w, "B T Hkv")
    check_call(k, v, window, initial_state, cu_seqlens)
    direction, norm = unit(k)
    past = None
    if initial_state is not None:
        beside = torch.cat([initial_state.y, initial_state.norm.to(initial_state.y)[..., None]], -1)
        past = PathState(directions(initial_state), beside, *initial_state[3:])
    tokens = Tokens(direction, torch.cat([v, norm[..., None]], -1), beta, w)
    settings = {"window": window, "scale": 1.0, "l2norm": l2norm, "cu_seqlens": cu_seqlens}
    y, state = each_sequence(solve, direction, tokens, past, output_final_state, **settings)
    if state is None:
        return LucidPathOutput(y, None)
    y_pages, norms = state.v[..., :-1], state.v[..., -1]
    return LucidPathOutput(y, LucidPathState(as_they_came(state.k, norms), norms, y_pages, *state[2:5]))
