"""What a block of C tokens does to what passes it: H_C … H_1 = I − Wᵀ U, and its gradients by hand. Plain tensors, any batch axes.

    S = stril(W Wᵀ)    M = (I + Diag(β) S)⁻¹ Diag(β)    U = M W        N = stril(W Kᵀ)    R = M N        k¹ = K − Rᵀ W

A query passes from the block's end to its start, x − (x Wᵀ) U; a key from its start to its end, k − (k Uᵀ) W. M is lower triangular:
row t of U and R depends on no later token, so a block cut short is the block with its last rows of U and R left out.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Transition(NamedTuple):
    """A block's own tensors. K may be any rows: R has a column each."""

    W: Tensor  # [… C K]
    K: Tensor  # [… C K]
    beta: Tensor  # [… C]
    S: Tensor  # [… C C] strictly lower
    M: Tensor  # [… C C] lower
    U: Tensor  # [… C K]
    N: Tensor  # [… C C] strictly lower
    R: Tensor  # [… C C] strictly lower
    k1: Tensor  # [… C K]

    @classmethod
    def of(cls, W: Tensor, K: Tensor, beta: Tensor) -> "Transition":
        S, N = (W @ W.mT).tril_(-1), (W @ K.mT).tril_(-1)
        # U and R are solved for too: of rows that are alike, the errors of M would add up in M W
        right = torch.cat([W, N, torch.eye(S.shape[-1], dtype=W.dtype, device=W.device).expand_as(S)], -1) * beta[..., None]
        solved = torch.linalg.solve_triangular(_unit(beta, S), right, upper=False, unitriangular=True)
        U, R, M = solved.split([W.shape[-1], N.shape[-1], S.shape[-1]], -1)
        return cls(W, K, beta, S, M, U, N, R, K - R.mT @ W)

    def back(self, x: Tensor) -> Tensor:
        """Queries x [… rows K] at the block's end -> at its start."""
        return x - (x @ self.W.mT) @ self.U

    def on(self, k: Tensor) -> Tensor:
        """Keys [… rows K] at the block's start -> at its end. It is also what the gradient of `back` does."""
        return k - (k @ self.U.mT) @ self.W

    def at(self, index: int | slice) -> "Transition":
        """Some along the first axis."""
        return Transition(*(x[index] for x in self))

    def until(self, inside: Tensor) -> "Transition":
        """The block of the tokens `inside` [… C] alone, which are its first; only `back`, `on` and k1 are of any use."""
        U, R = self.U * inside[..., None], self.R * inside[..., None]
        return self._replace(U=U, R=R, k1=self.K - R.mT @ self.W)


class Cotangents(NamedTuple):
    """Of what passed a block, or its first tokens: `transfer` [… K K] is Σ xᵀ dx' over queries x that came to it and left as x', k1 the
    gradient of its k¹. A key k with cotangent dk at the block's end is such a query, dk, whose gradient is k."""

    transfer: Tensor
    k1: Tensor
    inside: Tensor | None = None  # [… C] of which tokens; None: all


def gradients(
    block: Transition, passed: list[Cotangents], dR: Tensor | None = None, dU: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """dW, dK, dβ of a block from all that passed it, and from the cotangents of R and U that its own queries give."""
    W, K, M, N = block.W, block.K, block.M, block.N
    dR = torch.zeros_like(N) if dR is None else dR
    dU = torch.zeros_like(W) if dU is None else dU
    dW, dK = torch.zeros_like(W), torch.zeros_like(K)
    for transfer, dk1, inside in passed:
        kept, form = (1, block) if inside is None else (inside[..., None], block.until(inside))
        dR = dR - kept * (W @ dk1.mT)
        dU = dU - kept * (W @ transfer)
        dW = dW - form.R @ dk1 - form.U @ transfer.mT
        dK = dK + dk1
    dM = dR @ N.mT + dU @ W.mT
    dN = (M.mT @ dR).tril_(-1)
    Z = torch.linalg.solve_triangular(_unit(block.beta, block.S).mT, dM, upper=True, unitriangular=True)
    passed_on = Z @ M.mT
    dbeta = Z.diagonal(dim1=-2, dim2=-1) - (passed_on * block.S).sum(-1)
    dS = -(block.beta[..., None] * passed_on).tril_(-1)
    dW = dW + dN @ K + M.mT @ dU + (dS + dS.mT) @ W
    return dW, dK + dN.mT @ W, dbeta


def _unit(beta: Tensor, S: Tensor) -> Tensor:
    """I + Diag(β) S, whose diagonal of ones the solves do not read."""
    return beta[..., None] * S
