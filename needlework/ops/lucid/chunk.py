"""LUCID's fast path in plain PyTorch: the solve by block rows, and its backward by hand. No matrix here has T × T numbers.

    Y_i = A_ii⁻¹ (V_i − Σ_{j<i} A_ij Y_j)            blocks of C tokens; A_ii is inverted by substitution

The largest tensor is one block row, [C, P + T] per head. Packing, dtypes and the growth of pages are the caller's; all
tensors here have one dtype.
"""

import torch
from torch import Tensor

from needlework.ops.lucid.arguments import LucidInputs
from needlework.ops.lucid.matrix import Matrix, fold, unfold
from needlework.ops.lucid.state import LucidState, PageRows


def forward(tokens: LucidInputs, initial_state: LucidState, *, rowmax: bool, window: int | None, chunk_size: int) -> Tensor:
    """y [B T H V] of tokens [B T H ·] after pages [B P H ·] that hold `length` [B] tokens."""
    (k, v, beta), (page_k, page_y, length) = tokens, initial_state
    matrix = Matrix.of(page_k, k, length, window, rowmax)
    y = fold(torch.cat([page_y, v], 1))  # V until it is solved
    beta = None if beta is None else fold(torch.cat([beta.new_zeros(page_k.shape[:3]), beta], 1)[..., None])
    for rows, _, past, A, _ in matrix.block_rows(chunk_size):
        C = A.shape[1]
        # contiguous: how a solve rounds depends on its operand's strides, and β = 1 has to equal no β, to the bit
        own, u = A[..., -C:].contiguous(), torch.baddbmm(y[:, rows], A[..., :-C], y[:, past], alpha=-1)
        if beta is not None:
            own, u = beta[:, rows] * own, beta[:, rows] * u
        y[:, rows] = torch.linalg.solve_triangular(own, u, upper=False, unitriangular=not rowmax)
    return unfold(y[:, matrix.P :], k.shape[2])


def backward(
    dy: Tensor, y: Tensor, tokens: LucidInputs, initial_state: LucidState, *, rowmax: bool, window: int | None, chunk_size: int
) -> tuple[LucidInputs, PageRows]:
    """Gradients of the tokens and of the pages.

        Z = A⁻ᵀ dY,  the same solve run backwards in time;   dV = Z
        G_ij = −(z_i·y_j) A_ij, j < i;    "rowmax": j <= i, then G_{i,argmax} += z_i·v_i
        dk̂ = √d (G + Gᵀ) k̂;               "rowmax": dk = (G + Gᵀ) k / √d
        "beta": z_i = β_i t_i,  t_i = dy_i − Σ_{j>i} A_ji z_j,  dβ_i = t_i·(v_i − Σ_{j<i} A_ij y_j)

    The pages are columns without rows: dY_page = −Aᵀ Z, and G alone reaches their keys.
    """
    (k, v, beta), (page_k, page_y, length) = tokens, initial_state
    H, P = k.shape[2], page_k.shape[1]
    matrix = Matrix.of(page_k, k, length, window, rowmax)
    x = matrix.x
    after = lambda page, token: fold(torch.cat([page, token], 1))
    y, z = after(page_y, y), after(torch.zeros_like(page_y), dy)  # z: dY less what later rows take, until it is solved
    v = after(torch.zeros_like(page_y), v)
    dx, dbeta = torch.zeros_like(x), None
    if beta is not None:
        beta = after(beta.new_zeros(*page_k.shape[:3], 1), beta[..., None])
        dbeta = torch.zeros_like(beta)
    for rows, seen, past, A, top in matrix.block_rows(chunk_size, backwards=True):
        C = A.shape[1]
        own = A[..., -C:] if beta is None else beta[:, rows] * A[..., -C:]
        t = torch.linalg.solve_triangular(own.mT, z[:, rows], upper=True, unitriangular=not rowmax)
        if beta is None or dbeta is None:
            z[:, rows] = t
        else:
            z[:, rows] = beta[:, rows] * t
            dbeta[:, rows] = (t * (v[:, rows] - A @ y[:, seen])).sum(-1, keepdim=True)
        z[:, past].baddbmm_(A[..., :-C].mT, z[:, rows], alpha=-1)
        G = (z[:, rows] @ y[:, seen].mT).mul_(A).neg_()
        if top is not None:
            G.scatter_add_(-1, top, (z[:, rows] * v[:, rows]).sum(-1, keepdim=True))
        dx[:, rows].baddbmm_(G, x[:, seen])
        dx[:, seen].baddbmm_(G.mT, x[:, rows])
    dk, dy = unfold(matrix.key_gradient(dx), H), unfold(z, H)
    dbeta = None if dbeta is None else unfold(dbeta, H)[:, P:, :, 0]
    return LucidInputs(dk[:, P:], dy[:, P:], dbeta), PageRows(dk[:, :P], dy[:, :P])
