"""CARVE's fast path: content chunks in order, each one call of the delta engine; and its hand-derived backward.

    z = tanh(W₁ m),   p = b + W₂ z,   l = g + logσ(−p),   g = −exp(A) ⊙ softplus(f + τ);   m ← mean of o over the chunk

Tokens lie on a grid: [N T' ...] with the content chunk's ends at multiples of content_chunk in every row, `ends [N]` the
position after each row's last token. A virtual token has q = k = v = 0 and f = b = −∞, so that l = 0: nothing changes, and
no gradient passes. All tensors share one dtype. Recurrence, solve and dl are the engine's (`ops/delta/chunk.py`).
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from needlework.ops.carve.arguments import CarveInputs
from needlework.ops.delta import chunk as delta


def log_decay(f: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """g = −exp(A) ⊙ softplus(f + τ), softplus(x) as −logσ(−x), which is exact for every x."""
    return A_log.exp() * logsigmoid(-(f + dt_bias))


def hidden(m: Tensor, w1: Tensor) -> Tensor:
    """z = tanh(W₁ m)   [N H r]"""
    return torch.tanh(m @ w1.T)


def forward(
    inputs: CarveInputs, S: Tensor, m: Tensor, total: Tensor, ends: Tensor,
    *, content_chunk: int, prediction: str, scale: float, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor]]]:  # fmt: skip
    """o, S, m, total after the last token, and (S, m) at the start of every content chunk: all that backward needs."""
    (q, k, v, f, b, w), (A_log, dt_bias, w1, w2) = inputs.tokens, inputs.parameters
    g = log_decay(f, A_log, dt_bias)
    write = torch.sigmoid(w)[..., None, None]  # [N T' H 1 1]
    u, e = write * v, write * k
    outputs, starts = [torch.zeros_like(v[:, :0, :, 0])], []
    for start in range(0, q.shape[1], content_chunk):
        part = slice(start, start + content_chunk)
        starts.append((S, m))
        p = b[:, part] + (hidden(m, w1) @ w2.T)[:, None]  # [N L H K]
        o, S = delta.forward(
            q[:, part], k[:, part], u[:, part], e[:, part], g[:, part] + logsigmoid(-p), S,
            scale=scale, prediction=prediction, chunk_size=chunk_size,
        )  # fmt: skip
        outputs.append(o)
        total = total + o.sum(1)
        closed = _closed(ends, start + content_chunk)
        m = torch.where(closed, total / content_chunk, m)
        total = total.masked_fill(closed, 0)
    return torch.cat(outputs, 1), S, m, total, starts


def backward(
    do: Tensor, dS: Tensor, dm: Tensor, dtotal: Tensor, inputs: CarveInputs, starts: list[tuple[Tensor, Tensor]], ends: Tensor,
    *, content_chunk: int, prediction: str, scale: float, chunk_size: int,
) -> tuple[CarveInputs, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `inputs` and of the S, m, total carried in ("CARVE whole")."""
    (q, k, v, f, b, w), (A_log, dt_bias, w1, w2) = inputs.tokens, inputs.parameters
    x = f + dt_bias
    g = log_decay(f, A_log, dt_bias)
    gate = torch.sigmoid(w)
    write = gate[..., None, None]
    u, e = write * v, write * k
    dq, dk, du, de, dl, db = (torch.empty_like(x) for x in (q, k, v, k, f, b))
    dw1, dw2 = torch.zeros_like(w1), torch.zeros_like(w2)
    for start in reversed(range(0, q.shape[1], content_chunk)):
        part = slice(start, start + content_chunk)
        S, m = starts[start // content_chunk]
        z = hidden(m, w1)
        p = b[:, part] + (z @ w2.T)[:, None]
        closed = _closed(ends, start + content_chunk)
        # every output of the chunk is a term of its sum, and so of the next chunk's m
        dtotal = torch.where(closed, dm / content_chunk, dtotal)
        dm = dm.masked_fill(closed, 0)
        dq[:, part], dk[:, part], du[:, part], de_part, dl[:, part], dS = delta.backward(
            do[:, part] + dtotal[:, None], dS,
            q[:, part], k[:, part], u[:, part], e[:, part], g[:, part] + logsigmoid(-p), S,
            scale=scale, prediction=prediction, chunk_size=chunk_size,
        )  # fmt: skip
        assert de_part is not None  # e is given
        de[:, part] = de_part
        db[:, part] = -torch.sigmoid(p) * dl[:, part]
        dcontent = db[:, part].sum(1)  # [N H K]
        dw2 += torch.einsum("nhk,nhr->kr", dcontent, z)
        dz = (dcontent @ w2) * (1 - z * z)
        dw1 += torch.einsum("nhr,nhv->rv", dz, m)
        dm = dm + dz @ w1
    # the gate's gradient is du and de against what it scales: v·du + k·de, with no factor w
    dgate = (v * du).sum((-2, -1)) + (k * de).sum((-2, -1))
    dx = -A_log.exp() * torch.sigmoid(x) * dl
    gradients = CarveInputs(
        dq, dk + write * de, write * du, dx, db, gate * (1 - gate) * dgate,
        A_log=(g * dl).sum((0, 1)), dt_bias=dx.sum((0, 1)), w1=dw1, w2=dw2,
    )  # fmt: skip
    return gradients, dS, dm, dtotal


def _closed(ends: Tensor, end: int) -> Tensor:
    """[N 1 1] the rows that have seen the whole content chunk which ends here."""
    return (ends >= end)[:, None, None]
