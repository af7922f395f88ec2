"""Polar attention streamed over key blocks, and its backward derived by hand. Plain tensors of one dtype, no autograd.

    ŵ_ij = e^{a_ij − M_i} / L_i                 over real keys;  M = max a,  L = Σ e^{a−M},  Q₂ = Σ e^{2(a−M)}
    f    = sigmoid(M + ln L − a_N)              what the keys get, 1 − f the null;  a = temp σ,  a_N = temp null
    s    = f Σ ŵ v + (1 − f) v_null             direction c = s / max(‖s‖, 1e-6)
    mag  = tanh(softplus(β) ln(1 + m_eff))      m_eff = f n_eff,  n_eff = L²/Q₂ = 1 / Σ ŵ²

The null never enters M, L, Q₂: where it dominates, they keep their digits. Letters of shapes: n blocks of C tokens, H key-value
heads, G query heads each. Dtypes are op.py's, packing and the growth of pages custom_op.py's, the cutting into blocks common/blocks.py's.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from needlework.ops.attention.blocks import Blocks
from needlework.ops.polar.arguments import Parameters, Tokens
from needlework.ops.polar.state import PolarState

CLAMP = 1e-6


class _Gains(NamedTuple):
    """What a query's count of visible keys decides; each [n B H G C]."""

    log_n: Tensor
    root: Tensor  # √ln(n + 1)
    temp: Tensor
    null: Tensor


def _per_head(x: Tensor, H: int) -> Tensor:
    """[Hq ...] -> [H G 1 ...], to broadcast against [n B H G C ...]."""
    return x.unflatten(0, (H, -1)).unsqueeze(2)


def _gains(blocks: Blocks, length: Tensor, alpha: Tensor, gamma: Tensor, null_base: Tensor) -> _Gains:
    seen = (blocks.positions(length) + 1).clamp(min=1, max=blocks.window).to(alpha.dtype)  # [n B C]
    seen = seen[:, :, None, None]
    log_n, root = seen.log(), (seen + 1).log().sqrt()
    alpha, gamma, null_base = (_per_head(x, blocks.H) for x in (alpha, gamma, null_base))
    return _Gains(log_n, root, 1 + F.softplus(alpha) * log_n, null_base + F.softplus(gamma) * root)


def _scores(q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor:
    a = torch.einsum("nbhgcd,nbhsd->nbhgcs", q, k)
    return a if hidden is None else a.masked_fill_(hidden, float("-inf"))


def forward(
    tokens: Tokens, parameters: Parameters, initial_state: PolarState, *, window: int | None, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """direction [B T Hq V], magnitude [B T Hq], and (M, L, Q₂, ‖s‖) [B T Hq 4] for the backward. N = B."""
    (q, k, v), (page_k, page_v, length) = tokens, initial_state
    alpha, beta, gamma, null_base, v_null = parameters
    blocks = Blocks(q.shape[1], k.shape[2], window, chunk_size)
    n = blocks.n
    gains = _gains(blocks, length, alpha, gamma, null_base)
    q = blocks.split(q) * (gains.temp * q.shape[-1] ** -0.5)[..., None]  # [n B H G C d]
    k, v = blocks.split(k)[:, :, :, 0], blocks.split(v)[:, :, :, 0]  # [n B H C d], [n B H C V]
    M = q.new_full(q.shape[:-1], float("-inf"))
    L, Q2 = torch.zeros_like(M), torch.zeros_like(M)
    S = q.new_zeros(*M.shape, v.shape[-1])

    def merge(rows: slice, k: Tensor, v: Tensor, hidden: Tensor | None) -> None:
        """One block of keys more for the query blocks `rows`."""
        a = _scores(q[rows], k, hidden)
        new = torch.maximum(M[rows], a.amax(-1))
        p = a.sub_(new[..., None]).exp_()
        rescale = torch.exp(M[rows] - new)
        M[rows] = new
        L[rows].mul_(rescale).add_(p.sum(-1))
        Q2[rows].mul_(rescale.square()).add_(p.square().sum(-1))
        S[rows].mul_(rescale[..., None]).add_(torch.einsum("nbhgcs,nbhsv->nbhgcv", p, v))

    for offset, hidden in blocks.diagonals(q.device):
        merge(slice(offset, n), k[: n - offset], v[: n - offset], hidden)
    for at, hidden in blocks.pages(length, page_k.shape[1]):
        merge(slice(0, n), _page(page_k, at, n), _page(page_v, at, n), hidden)

    gap = M + L.log() - gains.temp * gains.null
    s = (torch.sigmoid(gap) / L)[..., None] * S + torch.sigmoid(-gap)[..., None] * _per_head(v_null, blocks.H)
    r = s.norm(dim=-1)
    m_eff = L.square() / Q2 * torch.sigmoid(gap)
    magnitude = torch.tanh(F.softplus(_per_head(beta, blocks.H)) * torch.log1p(m_eff))
    direction = s / r.clamp(min=CLAMP)[..., None]
    return blocks.join(direction), blocks.join(magnitude), blocks.join(torch.stack([M, L, Q2, r], -1))


def _page(page: Tensor, rows: slice, n: int) -> Tensor:
    """[B P H d] -> [n B H rows d]: the same rows for every query block."""
    return page[:, rows].transpose(1, 2).expand(n, -1, -1, -1, -1)


def backward(
    ddirection: Tensor,
    dmagnitude: Tensor,
    direction: Tensor,
    stats: Tensor,
    tokens: Tokens,
    parameters: Parameters,
    initial_state: PolarState,
    *,
    window: int | None,
    chunk_size: int,
) -> tuple[Tokens, Parameters, Tensor, Tensor]:
    """Gradients of the tokens, the parameters and the pages' k and v.

    With r = ‖s‖ and h = dmag softplus(β) (1 − mag²) m_eff / (1 + m_eff):

        ds = (dc − c (c·dc)) / r,  δ = 0   where r > 1e-6;      ds = dc / 1e-6,  δ = ds·s = c·dc   under the clamp
        da_ij = ŵ_ij (f (ds_i·v_j − δ_i) + h_i (3 − f_i) − 2 h_i n_eff,i ŵ_ij)
        da_N  = (1 − f) (ds·v_null − δ − h) = −Σ_j da_ij
        dtemp = q·dq / temp + null da_N,    dnull = temp da_N
    """
    (q, k, v), (page_k, page_v, length) = tokens, initial_state
    alpha, beta, gamma, null_base, v_null = parameters
    blocks = Blocks(q.shape[1], k.shape[2], window, chunk_size)
    n = blocks.n
    gains = _gains(blocks, length, alpha, gamma, null_base)
    gain = gains.temp * q.shape[-1] ** -0.5
    q = blocks.split(q) * gain[..., None]
    k, v = blocks.split(k)[:, :, :, 0], blocks.split(v)[:, :, :, 0]
    c, dc, dmag = blocks.split(direction), blocks.split(ddirection), blocks.split(dmagnitude)
    M, L, Q2, r = blocks.split(stats).unbind(-1)
    # L and Q₂ hold the largest key's 1; only padding, where zeros were filled in, has less
    L, Q2 = L.clamp(min=1), Q2.clamp(min=1)
    v_null, strength = _per_head(v_null, blocks.H), F.softplus(_per_head(beta, blocks.H))

    lse = M + L.log()
    gap = lse - gains.temp * gains.null
    f, missed = torch.sigmoid(gap), torch.sigmoid(-gap)
    n_eff = L.square() / Q2
    log_m = torch.log1p(n_eff * f)
    dlog = dmag * (1 - torch.tanh(strength * log_m).square())  # gradient of softplus(β) ln(1 + m_eff)
    h = dlog * strength * n_eff * f / (1 + n_eff * f)

    radial = (c * dc).sum(-1)
    free = r > CLAMP
    ds = (dc - c * torch.where(free, radial, 0)[..., None]) / r.clamp(min=CLAMP)[..., None]
    delta = torch.where(free, 0, radial)
    e = f[..., None] * ds
    constant = (h * (3 - f) - f * delta)[..., None]
    slope = (-2 * h * n_eff)[..., None]

    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    da_keys = torch.zeros_like(lse)
    dpage_k, dpage_v = torch.zeros_like(page_k), torch.zeros_like(page_v)

    def meet(rows: slice, k: Tensor, v: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        """Adds one block of keys to dq; returns that block's dk, dv."""
        w = _scores(q[rows], k, hidden).sub_(lse[rows][..., None]).exp_()
        da = torch.einsum("nbhgcv,nbhsv->nbhgcs", e[rows], v)
        da.add_(constant[rows]).addcmul_(w, slope[rows]).mul_(w)
        dq[rows] += torch.einsum("nbhgcs,nbhsd->nbhgcd", da, k)
        da_keys[rows] += da.sum(-1)
        da, w, q_rows, e_rows = (x.flatten(3, 4) for x in (da, w, q[rows], e[rows]))  # r: the rows of a group, G·C
        return torch.einsum("nbhrs,nbhrd->nbhsd", da, q_rows), torch.einsum("nbhrs,nbhrv->nbhsv", w, e_rows)

    for offset, hidden in blocks.diagonals(q.device):
        dk_block, dv_block = meet(slice(offset, n), k[: n - offset], v[: n - offset], hidden)
        dk[: n - offset] += dk_block
        dv[: n - offset] += dv_block
    for at, hidden in blocks.pages(length, page_k.shape[1]):
        dk_block, dv_block = meet(slice(0, n), _page(page_k, at, n), _page(page_v, at, n), hidden)
        dpage_k[:, at] += dk_block.sum(0).transpose(1, 2)
        dpage_v[:, at] += dv_block.sum(0).transpose(1, 2)

    # −Σ_j da_j and the docstring's da_N are equal; in float32 the first is noise where f nears 1, the second where f nears 0
    # (ds·v_null cancels to order f). Their mean with weights 1 − f and f is good everywhere.
    da_null = missed * (f * ((ds * v_null).sum(-1) - delta - h) - da_keys)
    dtemp = (q * dq).sum(-1) / gains.temp + gains.null * da_null
    dnull = gains.temp * da_null
    dv_null = (missed[..., None] * ds).sum((0, 1, 4)).flatten(0, 1)

    def over_tokens(x: Tensor) -> Tensor:
        return x.sum((0, 1, 4)).flatten()  # [Hq]

    return (
        Tokens(blocks.join(dq * gain[..., None]), blocks.join(dk[:, :, :, None]), blocks.join(dv[:, :, :, None])),
        Parameters(
            torch.sigmoid(alpha) * over_tokens(dtemp * gains.log_n),
            torch.sigmoid(beta) * over_tokens(dlog * log_m),
            torch.sigmoid(gamma) * over_tokens(dnull * gains.root),
            over_tokens(dnull),
            dv_null,
        ),
        dpage_k,
        dpage_v,
    )
