"""The delta engine: the chunk form of one recurrence, and its hand-derived backward, in plain tensors.

    S_t = Diag(e^{g_t}) S_{t-1} + Σ_r k_tr (u_tr − S_{t-1}ᵀ e_tr)ᵀ        o_t = scale · S_tᵀ q_t

    (I + A) W = u − ê S₀,   o = scale (q̂ S₀ + P W),   S_C = e^{G_C} ⊙ S₀ + k̂ᵀ W        in a chunk that starts with S₀
    A_ts = k_sᵀ(e^{G_{t-1} − G_s} ⊙ e_t), s < t   P_ts = k_sᵀ(e^{G_t − G_s} ⊙ q_t), s <= t
    q̂ = e^G ⊙ q   ê_t = e^{G_{t-1}} ⊙ e_t   k̂ = e^{G_C − G} ⊙ k

prediction "decayed" reads the decayed state: e there is e^{g} ⊙ e here. R rows are written a token; they do not see each other.
e = None writes u as it is (additive rules): W = u. Knows no rule by name; all tensors share one dtype, heads are expanded.

    q [B T H K]   k, e [B T H R K]   u [B T H R V]   g [B T H 1] or [B T H K]   initial_state [B H K V]   o [B T H V]
"""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.delta.decay import ChannelDecay, ScalarDecay, decay_of


def forward(
    q: Tensor, k: Tensor, u: Tensor, e: Tensor | None, g: Tensor, initial_state: Tensor, *,
    scale: float, prediction: str, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o [B T H V] and the final state [B H K V]."""
    x = _replay(q, k, u, e, g, initial_state, prediction, chunk_size)
    o = scale * (x.q_hat @ x.starts + x.P @ x.W)
    return _join(o, q.shape[1]), x.final


def backward(
    do: Tensor, dfinal: Tensor, q: Tensor, k: Tensor, u: Tensor, e: Tensor | None, g: Tensor, initial_state: Tensor, *,
    scale: float, prediction: str, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """dq, dk, du, de (None where e is), dg, dinitial, from the gradients of o and of the final state."""
    x = _replay(q, k, u, e, g, initial_state, prediction, chunk_size)
    C = x.q.shape[-2]
    do = scale * _split(do, C)  # [n B H C V]
    du = x.P.mT @ do
    dread = x.q_hat.mT @ do  # [n B H K V]
    dends, dS = torch.empty_like(x.starts), dfinal
    for i in reversed(range(len(x.starts))):
        dends[i] = dS
        du[i] += x.k_hat[i] @ dS
        dS = x.whole[i] * dS + dread[i]
        if x.A is not None and x.e_hat is not None:
            du[i] = torch.linalg.solve_triangular(x.A[i].mT, du[i], upper=True, unitriangular=True)
            dS = dS - x.e_hat[i].mT @ du[i]

    # what the chunk's rows read from its start, and what its keys leave at its end
    dq_hat = do @ x.starts.mT
    dk_hat = (x.W @ dends.mT).view_as(x.k)
    dstart = x.q_hat * dq_hat
    dend = (x.k_hat.view_as(x.k) * dk_hat).sum(-2)
    dwhole = (x.whole * x.starts * dends).sum(-1)
    dM = torch.zeros(*x.rows.shape[:-1], x.W.shape[-2], dtype=q.dtype, device=q.device)  # [n B H C A C·R]
    dM[..., 0, :] = do @ x.W.mT
    de = de_hat = None
    if x.e is not None and x.e_hat is not None:
        de_hat = -(du @ x.starts.mT).view_as(x.e)
        dstart[..., :-1, :] += (x.e_hat.view_as(x.e) * de_hat).sum(-2)[..., 1:, :]
        dM[..., :-1, 1:, :] = -(du @ x.W.mT).unflatten(-2, (C, -1))[..., 1:, :, :]
    drows, dk, dg = x.decay.couple_backward(dM.flatten(-3, -2), x.rows, x.k)
    dg = dg + x.decay.factors_backward(dstart, dend, dwhole)
    dq = drows[..., 0, :] + x.decay.from_start * dq_hat
    dk = dk + x.decay.to_end[..., None, :] * dk_hat
    if x.e is not None and de_hat is not None:
        de = x.before[..., None, :] * de_hat
        de[..., 1:, :, :] += drows[..., :-1, 1:, :]
        if prediction == "decayed":
            dg = dg + (x.e * de).sum(-2).sum_to_size(dg.shape)
            de = x.retention[..., None, :] * de
    T = q.shape[1]
    du = du.unflatten(-2, (C, -1))
    return _join(dq, T), _join(dk, T), _join(du, T), None if de is None else _join(de, T), _join(dg, T), dS


class _Replay(NamedTuple):
    """The chunk form on inputs cut into n chunks: couplings of all chunks at once, then W and the states in order."""

    q: Tensor  # [n B H C K]
    k: Tensor  # [n B H C R K]
    e: Tensor | None  # as the state before the token's decay is read
    rows: Tensor  # [n B H C A K] q_t, and e of the token after: it sees the same keys under the same decay
    decay: ScalarDecay | ChannelDecay
    retention: Tensor  # e^g
    before: Tensor  # e^{G_{t-1}}
    whole: Tensor  # e^{G_C}  [n B H K 1] or [n B H 1 1]
    q_hat: Tensor
    k_hat: Tensor  # [n B H C·R K]
    e_hat: Tensor | None
    P: Tensor  # [n B H C C·R]
    A: Tensor | None  # [n B H C·R C·R], strictly lower by tokens
    W: Tensor  # [n B H C·R V]
    starts: Tensor  # [n B H K V] S₀ of each chunk
    final: Tensor


def _replay(
    q: Tensor, k: Tensor, u: Tensor, e: Tensor | None, g: Tensor, S: Tensor, prediction: str, chunk_size: int
) -> _Replay:
    C = _chunk(q.shape[1], chunk_size)
    q, k, u, g = (_split(x, C) for x in (q, k, u, g))
    decay = decay_of(g)
    retention = g.exp()
    before = torch.cat([torch.ones_like(g[..., :1, :]), decay.from_start[..., :-1, :]], -2)
    whole = decay.from_start[..., -1, :, None]
    q_hat = decay.from_start * q
    k_hat = (decay.to_end[..., None, :] * k).flatten(-3, -2)
    A = e_hat = None
    rows = q[..., None, :]
    if e is not None:
        e = _split(e, C)
        if prediction == "decayed":
            e = retention[..., None, :] * e
        e_hat = (before[..., None, :] * e).flatten(-3, -2)
        e_after = torch.cat([e[..., 1:, :, :], torch.zeros_like(e[..., :1, :, :])], -3)
        rows = torch.cat([rows, e_after], -2)
    M = decay.couple(rows, k).unflatten(-2, (C, -1))  # [n B H C A C·R]
    P = M[..., 0, :]
    W = u.flatten(-3, -2)
    if e is not None:
        A = torch.cat([torch.zeros_like(M[..., :1, 1:, :]), M[..., :-1, 1:, :]], -3).flatten(-3, -2)
        W = W.clone()
    starts = S.new_empty(len(q), *S.shape)
    for i in range(len(q)):
        starts[i] = S
        if A is not None and e_hat is not None:
            W[i] = torch.linalg.solve_triangular(A[i], W[i] - e_hat[i] @ S, upper=False, unitriangular=True)
        S = whole[i] * S + k_hat[i].mT @ W[i]
    return _Replay(
        q=q, k=k, e=e, rows=rows, decay=decay, retention=retention, before=before, whole=whole,
        q_hat=q_hat, k_hat=k_hat, e_hat=e_hat, P=P, A=A, W=W, starts=starts, final=S,
    )  # fmt: skip


def _chunk(T: int, chunk_size: int) -> int:
    """Tokens of a chunk: the largest power of two up to chunk_size, and no more than hold T."""
    return min(1 << (chunk_size.bit_length() - 1), 1 << max(T - 1, 0).bit_length())


def _split(x: Tensor, C: int) -> Tensor:
    """[B T H ...] -> [n B H C ...], zeros after the end: such tokens write nothing and decay nothing."""
    B, T = x.shape[:2]
    if T % C:
        x = torch.cat([x, x.new_zeros(B, -T % C, *x.shape[2:])], 1)
    x = x.view(B, -(-T // C), C, *x.shape[2:])
    return x.transpose(0, 1).transpose(2, 3).contiguous()


def _join(x: Tensor, T: int) -> Tensor:
    """[n B H C ...] -> [B T H ...]."""
    return x.transpose(2, 3).transpose(0, 1).flatten(1, 2)[:, :T]
