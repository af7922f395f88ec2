"""ATMA's distractor loss: random keys beside a layer's own must not draw attention (Polar) or change what it reads (softmax).

X ~ N(0, 1) [B R D], R = T, drawn for each layer and call from the device's generator; k_r = rms(W_k X), v_r = W_v X, without
convolution, position and gradient. Training only. From the authors' code; the paper (Section 3.2.4) has Polar's form.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from needlework.layers.config import Config
from needlework.layers.norm import wide
from needlework.layers.polar import _Polar
from needlework.layers.softmax import AttendRule, Softmax


@dataclass(frozen=True, kw_only=True)
class Distractor(Config):
    """ATMA's distractor loss of one attention layer: what R = T random keys k_r draw from its queries.

        Polar:    mean over queries and heads of Σ_r softmax([temp_i q_i·k_r/√d, temp_i null_i])_r
        Softmax:  mean (y' − y)², y the layer's attention, y' that over the random keys and every key before it

    n_i, in temp and null, is the position in the document + 1. y' sees all T keys, even where the layer has a window.

    raw_keys: k_r = W_k X without the norm, as published for `nope`.
    Raises ValueError for a layer with another attend rule.

    >>> import torch
    >>> from needlework.layers import Attention, Distractor, Polar
    >>> mixer = Attention(heads=4, head_dim=16, attend=Polar(), qk_norm=True).build(64)
    >>> mixer.distraction(torch.randn(1, 100, 64), Distractor()).shape
    torch.Size([])
    """

    kind = "distractor"
    raw_keys: bool = False

    def __call__(self, attend: AttendRule, q: Tensor, k: Tensor, v: Tensor, k_r: Tensor, v_r: Tensor, at: Tensor) -> Tensor:
        """q [B T Hq d], k, v [B T Hkv d] as they enter `attend`, k_r, v_r [B R Hkv d], positions at [1 T] -> a number, float32."""
        k, v, k_r, v_r = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v, k_r, v_r))
        if isinstance(attend, _Polar):
            return mass(attend, q, k_r, at)
        if isinstance(attend.config, Softmax):
            return shift(attend.config, q, k, v, k_r, v_r, at)
        raise ValueError(f"distractor: defined for polar and softmax attention, this layer has {attend.config.kind}")


def mass(polar: _Polar, q: Tensor, k_r: Tensor, at: Tensor) -> Tensor:
    """The attention that random keys get beside the null sink; heads of q and k_r alike."""
    alpha, gamma, null_base = (wide(p)[:, None] for p in (polar.alpha, polar.gamma, polar.null_base))
    n = (at + 1).to(alpha.dtype)  # [1 T]
    temp = 1 + F.softplus(alpha) * n.log()  # [Hq T]
    null = null_base + F.softplus(gamma) * (n + 1).log().sqrt()
    scores = wide(torch.einsum("bthd,brhd->bhtr", q, k_r)) * q.shape[-1] ** -0.5
    return torch.sigmoid((temp[..., None] * scores).logsumexp(-1) - temp * null).mean()


def shift(config: Softmax, q: Tensor, k: Tensor, v: Tensor, k_r: Tensor, v_r: Tensor, at: Tensor) -> Tensor:
    """How far random keys and values move the attention's output; heads of all alike."""
    T = q.shape[1]
    i = torch.arange(T, device=q.device)
    lag = i[:, None] - i
    document = (lag >= 0) & (lag <= at.T)  # [T T]: no later than the query, and of its document
    seen = document if config.window is None else document & (lag < config.window)
    free = torch.ones(T, k_r.shape[1], dtype=torch.bool, device=q.device)

    def attend(k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        q_, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return wide(F.scaled_dot_product_attention(q_, k, v, attn_mask=mask, scale=config.scale))

    y = attend(k, v, seen)
    disturbed = attend(torch.cat([k_r, k], 1), torch.cat([v_r, v], 1), torch.cat([free, document], 1))
    return (disturbed - y).square().mean()
