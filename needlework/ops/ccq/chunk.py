"""CCQ by chunks and its hand-derived backward: functions of plain tensors of one dtype, float32 or float64.

Σ_t x of a query x, read in a chunk that starts with the state (C₀, μ₀, n₀); ω_ts = e^{G_t − G_s}, k' = k − μ₀:

    Σ_t x = n_t⁻¹ [ e^{G_t} C₀ x + Σ_{s≤t} ω_ts (x·k'_s − x̄_t) k'_s ],     x̄_t = n_t⁻¹ Σ_{s≤t} ω_ts x·k'_s,   n_t = e^{G_t} n₀ + Σ_s ω_ts

The keys are centred in both directions, so nothing is a difference of large sums. Chunks are computed together; only the
states run through a loop. Tokens that are not `real` have weight 0.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from needlework.ops.ccq.state import CurvatureState
from needlework.ops.common.decay import sums_between


class _Chunks(NamedTuple):
    """What both directions read of the keys. `state` is the state before each of the n chunks and after the last."""

    k: Tensor  # [B H n C K] k'
    w: Tensor  # [B H n C C] ω_ts, 0 for s > t
    decay: Tensor  # [B H n C 1] e^{G_t}: the weight of the chunk's initial state
    left: Tensor  # [B H n C 1] ω at the chunk's end
    count: Tensor  # [B H n C 1] n_t
    state: CurvatureState  # [B H n+1 ...]


class _Applied(NamedTuple):
    """Σ_t x and what it is made of."""

    out: Tensor  # [B H n C K]
    scores: Tensor  # [B H n C C] x·k'_s − x̄_t
    mean: Tensor  # [B H n C 1] x̄_t
    carried: Tensor  # [B H n C K] C₀ x


def forward(
    q: Tensor, k: Tensor, eta: Tensor, g: Tensor | None, real: Tensor, state: CurvatureState, chunk_size: int
) -> tuple[Tensor, CurvatureState]:
    """q, k [B T H K], eta [B T HV], g [B T H] or None, real [B or 1, T] bool, T >= 1 -> q̃ [B T HV K] and the final state."""
    chunks = _chunks(k, g, real, state, chunk_size)
    Sq = _join(_apply(_split(q, chunk_size), chunks).out, q.shape[1])
    cleaned = q[:, :, :, None] - eta.unflatten(2, (q.shape[2], -1))[..., None] * Sq[:, :, :, None]
    return cleaned.flatten(2, 3), CurvatureState(*(x[:, :, -1].clone() for x in chunks.state))


def backward(
    dout: Tensor,
    dstate: CurvatureState,
    q: Tensor,
    k: Tensor,
    eta: Tensor,
    g: Tensor | None,
    real: Tensor,
    state: CurvatureState,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, CurvatureState]:
    """Gradients of q, k, eta, g and the initial state. With y_t = Σ_j λ_tj dq̃_tj over the value heads of a key head:

        dq_t = Σ_j dq̃_tj − Σ_t y_t,     dλ_tj = −dq̃_tj·Σ_t q_t
        dk_s = −Σ_{t≥s} (ω_ts/n_t) [q_t (y_t·(k_s − μ_t)) + y_t (q_t·(k_s − μ_t))]

    The final state's gradient joins dk, dg and the initial state's in `_reverse`.
    """
    T, H = q.shape[1:3]
    dout, weight = dout.unflatten(2, (H, -1)), eta.unflatten(2, (H, -1))[..., None]  # [B T H G K], [B T H G 1]
    chunks = _chunks(k, g, real, state, chunk_size)
    q, y = _split(q, chunk_size), _split((weight * dout).sum(3), chunk_size)
    Sq, Sy = _apply(q, chunks), _apply(y, chunks)
    dq = dout.sum(3) - _join(Sy.out, T)
    deta = -(dout * _join(Sq.out, T)[:, :, :, None]).sum(-1).flatten(2, 3)

    w = chunks.w / chunks.count
    dk = -((w * Sy.scores).mT @ q + (w * Sq.scores).mT @ y)
    # what a chunk sends to its initial state, seen from μ₀
    reach = chunks.decay / chunks.count
    ySq = (y * Sq.out).sum(-1, keepdim=True)
    spread = ySq - Sy.mean * Sq.mean
    sent = -(reach * y).mT @ q, (reach * (q * Sy.mean + y * Sq.mean)).sum(-2), (reach * spread).sum((-2, -1))
    d0, d = _reverse(dstate, sent, chunks)

    x = chunks.k + (chunks.state.mean[:, :, :-1] - chunks.state.mean[:, :, 1:])[:, :, :, None]  # k − μ at the chunk's end
    slope, mass = _at(d, x)
    dk = dk + chunks.left * slope
    dg = None
    if g is not None:
        # ω ∂L/∂ω of every pair (seen from, seen): tokens and the end of the chunk see its initial state and its tokens
        C0, mean0, n0 = (x[:, :, :-1] for x in chunks.state)
        step = (mean0 - chunks.state.mean[:, :, 1:])[:, :, :, None]
        start = n0[..., None, None] * _at(d, step)[1] + (d.C * C0).sum((-2, -1))[..., None, None]
        first = reach * (n0[..., None, None] * spread - (y * Sq.carried).sum(-1, keepdim=True))
        pairs = torch.cat([first, w * (ySq - Sq.scores * Sy.scores)], -1)
        end = torch.cat([chunks.decay[..., -1:, :] * start, (chunks.left * mass).mT], -1)
        # a pair's weight has e^{g_t} in it when t lies after the seen and not after the seer: no term without e^{g_t}
        dg = torch.cat([pairs, end], -2).cumsum(-1)[..., :-1].tril().sum(-2)  # [B H n C]
        dg = _join(dg[..., None], T)[..., 0]
    r, z = _at(d0, (state.mean - chunks.state.mean[:, :, 0])[:, :, None])
    return dq, _join(dk, T), deta, dg, CurvatureState(d0.C, state.n[..., None] * r[:, :, 0], z[:, :, 0, 0])


def _at(d: CurvatureState, x: Tensor) -> tuple[Tensor, Tensor]:
    """(r, z) of the points μ + x, x [... C K]: moving a mass ω there changes the loss by ω r, adding to it by z.

        r(μ + x) = r − N x,     z(μ + x) = z + r·x − ½ xᵀ N x,     N = −(d.C + d.Cᵀ)

    d.C is the gradient of C, d.mean = r that of the mean divided by n, d.n = z that of n.
    """
    Nx = -x @ (d.C + d.C.mT)
    r = d.mean[..., None, :]
    z = d.n[..., None, None] + (x * (r - Nx / 2)).sum(-1, keepdim=True)
    return r - Nx, z


def _reverse(dstate: CurvatureState, sent: tuple, chunks: _Chunks) -> tuple[CurvatureState, CurvatureState]:
    """Gradients, in the form that `_at` reads, before the first chunk, and after each [B H n ...]."""
    mean, decay = chunks.state.mean, chunks.decay[..., -1, 0]  # [B H n+1 K], [B H n]
    mass = chunks.state.n[:, :, -1, None].clamp(min=1)
    d, ends = CurvatureState(dstate.C, dstate.mean / mass, dstate.n), []
    for i in reversed(range(mean.shape[2] - 1)):
        ends.append(d)
        r, z = _at(d, (mean[:, :, i] - mean[:, :, i + 1])[:, :, None])
        arrived = d.C, r[:, :, 0], z[:, :, 0, 0]
        a = decay[:, :, i, None]
        d = CurvatureState(
            a[..., None] * arrived[0] + sent[0][:, :, i],
            a * arrived[1] + sent[1][:, :, i],
            a[..., 0] * arrived[2] + sent[2][:, :, i],
        )
    return d, CurvatureState(*(torch.stack(x[::-1], 2) for x in zip(*ends, strict=True)))


def _chunks(k: Tensor, g: Tensor | None, real: Tensor, state: CurvatureState, chunk_size: int) -> _Chunks:
    real = _split(real[..., None, None], chunk_size)[..., 0]  # [B 1 n C]
    g = real.new_zeros(real.shape, dtype=torch.float64) if g is None else _split(g[..., None].double(), chunk_size)[..., 0]
    w = sums_between(g).masked_fill(~real[..., None, :], -torch.inf).to(k.dtype).exp()
    decay, left = g.cumsum(-1).exp().to(k.dtype)[..., None], w[..., -1, :, None]

    k = _split(k, chunk_size)
    m = left.sum(-2)  # [B H n 1]: 0 without real tokens, else at least 1
    centre = (left * k).sum(-2) / m.clamp(min=1)
    spread = (left * (k - centre[:, :, :, None])).mT @ (k - centre[:, :, :, None])
    # before the first token the mean has no mass: the first key is a better place to centre at
    C, mean, n = state.C, torch.where(state.n[..., None] > 0, state.mean, k[:, :, 0, 0]), state.n[..., None]
    states = [(C, mean, n[..., 0])]
    for i in range(k.shape[2]):
        a, m_ = decay[:, :, i, -1], m[:, :, i]
        n = a * n
        share, d = m_ / (n + m_).clamp(min=1), centre[:, :, i] - mean
        C = a[..., None] * C + spread[:, :, i] + (n * share * d)[..., None] * d[:, :, None]
        mean, n = mean + share * d, n + m_
        states.append((C, mean, n[..., 0]))
    states = CurvatureState(*(torch.stack(x, 2) for x in zip(*states, strict=True)))
    count = decay * states.n[:, :, :-1, None, None] + w.sum(-1, keepdim=True)
    return _Chunks(k - states.mean[:, :, :-1, None], w, decay, left, count.clamp(min=1), states)


def _apply(x: Tensor, chunks: _Chunks) -> _Applied:
    """Σ_t x_t for x [B H n C K]."""
    k, w, count = chunks.k, chunks.w, chunks.count
    scores = x @ k.mT
    mean = (w * scores).sum(-1, keepdim=True) / count
    scores = scores - mean
    carried = x @ chunks.state.C[:, :, :-1]
    return _Applied((chunks.decay * carried + (w * scores) @ k) / count, scores, mean, carried)


def _split(x: Tensor, chunk_size: int) -> Tensor:
    """[B T H K] -> [B H n C K], zeros (False) after the end."""
    return F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % chunk_size)).transpose(1, 2).unflatten(2, (-1, chunk_size))


def _join(x: Tensor, T: int) -> Tensor:
    """[B H n C K] -> [B T H K]: the inverse of `_split`."""
    return x.flatten(2, 3)[:, :, :T].transpose(1, 2).contiguous()
