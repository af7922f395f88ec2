"""Mamba-3 as a call of the additive engine: the rows that it is given, and their hand-derived backward, in plain tensors.

    k'_t = B̄_{t-1},  u'_t = c_t x_{t-1},  c_t = α_t (λ_{t-1}Δ_{t-1} + (1 − λ_t)Δ_t)        α = e^g,  B̄ = R(Θ) k,  C̄ = R(Θ) q
    o_t = engine_t + λ_tΔ_t (q_tᵀk_t) x_t                                                  Θ_t = Θ_{t-1} + π rate_t Δ_t

One row more than tokens: at the first k' and x are the state's, and c has no λΔ (it is in S already); at the last α = 1 and Δ = 0, so
that the engine leaves S with the last token's λΔ part. The own term's angles cancel. With R rows a token the engine is given R rows as
R tokens, the gate on the first: row r of a token then sees its rows 1 … r, and what the others write at the same token is added,

    o_{t,r} = engine_{t,r} + Σ_l own_{t,rl} x_{t,l} + Σ_{l>r} (C̄_{t,r}ᵀk'_{t,l}) u'_{t,l},    own_{t,rl} = λ_tΔ_t q_{t,r}ᵀk_{t,l}

Nothing of a later token enters o_t, to the bit. All tensors share one dtype, heads are expanded.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.mamba3.edges import Edges


class RowInputs(NamedTuple):
    """Tensors of the tokens and of the state; their gradients come back as `RowInputs` too."""

    q: Tensor  # [B T H R K]
    k: Tensor  # [B T H R K]
    v: Tensor  # [B T H R V]
    g: Tensor  # [B T H]
    dt: Tensor  # [B T H]
    lam: Tensor  # [B T H]
    rate: Tensor  # [B T m] tanh(a)
    k0: Tensor  # [N H R K]
    v0: Tensor  # [N H R V]
    angle0: Tensor  # [N H m]


class Rows(NamedTuple):
    """What the engine reads, in rows [B T+1 H R ·] or, packed, [1 T+N H R ·]; what is added to what it gives; the state's new k and
    angle."""

    q: Tensor
    k: Tensor
    u: Tensor
    own: Tensor  # [B T H R R]
    later: Tensor  # [B T H R R], l > r; without numbers where R = 1
    k_end: Tensor  # [N H R K]
    angle_end: Tensor  # [N H m]


class Angles(NamedTuple):
    """cos and sin of Θ at every token [B T H m], and Θ after the last [N H m], in [−π, π]."""

    cos: Tensor
    sin: Tensor
    end: Tensor

    @classmethod
    def of(cls, rate: Tensor, dt: Tensor, start: Tensor, edges: Edges) -> "Angles":
        """Half-turns are summed, in float64, and reduced before they are rounded: a float32 π times a long sum would err by 3e-8 of it."""
        upto, total = edges.sums(rate[:, :, None] * dt[..., None])
        start = start.double() / math.pi
        now, end = (_radians(x).to(dt.dtype) for x in (edges.spread(start) + upto, start + total))
        return cls(now.cos(), now.sin(), end)

    def turn(self, x: Tensor, halves: bool, back: bool = False) -> Tensor:
        """R(Θ) x of rows x [B T H R K], or R(−Θ) x."""
        cos, sin = self.cos[..., None, :], -self.sin[..., None, :] if back else self.sin[..., None, :]
        a, b = _pairs(x, cos.shape[-1], halves)
        y = x.clone()
        first, second = _pairs(y, cos.shape[-1], halves)
        first.copy_(cos * a - sin * b)
        second.copy_(sin * a + cos * b)
        return y


def _radians(half_turns: Tensor) -> Tensor:
    """In [−π, π]."""
    return math.pi * (half_turns - 2 * torch.round(half_turns / 2))


def forward(inputs: RowInputs, edges: Edges, halves: bool) -> Rows:
    q, k, v, k0, v0 = inputs.q, inputs.k, inputs.v, inputs.k0, inputs.v0
    g, dt, lam = inputs.g, inputs.dt, inputs.lam
    angles = Angles.of(inputs.rate, dt, inputs.angle0, edges)
    turned, rows = angles.turn(q, halves), edges.shifted(k0, angles.turn(k, halves))
    own = (lam * dt)[..., None, None] * (q @ k.mT)
    u = weights(g, dt, lam, edges)[..., None, None] * edges.shifted(v0, v)
    later = q.new_empty(0)
    if q.shape[3] > 1:
        later = (turned @ edges.tokens(rows).mT).triu(1)
    return Rows(edges.ended(turned), rows, u, own, later, edges.last(rows).clone(), angles.end)


def weights(g: Tensor, dt: Tensor, lam: Tensor, edges: Edges) -> Tensor:
    """c of every row."""
    own = lam * dt
    return edges.ended(g).exp() * (edges.shifted(_nothing(own, edges), own) + edges.ended(dt - own))


def backward(d: Rows, inputs: RowInputs, edges: Edges, halves: bool) -> RowInputs:
    """Gradients of `inputs` from those of the rows. With dB̄, dC̄ those of the turned rows:

        dΘ_t = Σ_r [B̄ × dB̄ + C̄ × dC̄] per pair,  (x, y) × (dx, dy) = x dy − y dx;    D_t = Σ_{s>=t} dΘ_s + dΘ_end
        drate_t = π Σ_heads Δ_t D_t;    dΔ_t = π Σ_m rate_t D_t + λ_t w_t + (1 − λ_t) z_t;    dλ_t = Δ_t (w_t − z_t)

    z_t = ∂/∂((1 − λ)Δ) = α_t dc_t, w_t = ∂/∂(λΔ) = α_{t+1} dc_{t+1} + Σ down ⊙ qᵀk, dg_t = c_t dc_t, α = e^g inside c.
    """
    q, k, v, k0, v0 = inputs.q, inputs.k, inputs.v, inputs.k0, inputs.v0
    g, dt, lam, rate = inputs.g, inputs.dt, inputs.lam, inputs.rate
    angles = Angles.of(rate, dt, inputs.angle0, edges)
    own, decay, c = lam * dt, edges.ended(g).exp(), weights(g, dt, lam, edges)
    x, dk_rows, dq_turned = edges.shifted(v0, v), d.k.clone(), edges.tokens(d.q)
    if q.shape[3] > 1:
        turned, rows = angles.turn(q, halves), edges.shifted(k0, angles.turn(k, halves))
        dlater = d.later.triu(1)
        dq_turned = dq_turned + dlater @ edges.tokens(rows)
        dk_rows += edges.ended(dlater.mT @ turned)
    edges.add_last(dk_rows, d.k_end)
    dk0, dk_turned = edges.unshifted(dk_rows)
    dq, dk = angles.turn(dq_turned, halves, back=True), angles.turn(dk_turned, halves, back=True)
    m = rate.shape[-1]
    dangle = (_cross(q, dq, m, halves) + _cross(k, dk, m, halves)).sum(-2)  # the same in either frame
    dq, dk = dq + own[..., None, None] * (d.own @ k), dk + own[..., None, None] * (d.own.mT @ q)
    dv0, dv = edges.unshifted(c[..., None, None] * d.u)
    dc = (d.u * x).sum((-2, -1))
    _, dbefore = edges.unshifted(decay * dc)
    dnow = edges.tokens(decay * dc)
    down = dbefore + (d.own * (q @ k.mT)).sum((-2, -1))
    upto, total = edges.sums(dangle)
    dangle0 = total.to(q.dtype) + d.angle_end
    D = math.pi * ((edges.spread(total) - upto).to(q.dtype) + dangle + edges.spread(d.angle_end))
    ddt = (rate[:, :, None] * D).sum(-1) + lam * down + (1 - lam) * dnow
    drate = (dt[..., None] * D).sum(2)
    return RowInputs(dq, dk, dv, edges.tokens(c * dc), ddt, dt * (down - dnow), drate, dk0, dv0, dangle0)


def _pairs(x: Tensor, m: int, halves: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and second channels of the m pairs of x [.. K] that turn."""
    if halves:
        K = x.shape[-1]
        return x[..., :m], x[..., K // 2 : K // 2 + m]
    return x[..., 0 : 2 * m : 2], x[..., 1 : 2 * m : 2]


def _cross(x: Tensor, dx: Tensor, m: int, halves: bool) -> Tensor:
    (a, b), (da, db) = _pairs(x, m, halves), _pairs(dx, m, halves)
    return a * db - b * da


def _nothing(x: Tensor, edges: Edges) -> Tensor:
    """Zeros [N H], of tokens x [B T H]."""
    return x.new_zeros(len(x) if edges.packed is None else len(edges.packed.ends) - 1, *x.shape[2:])
