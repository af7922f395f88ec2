"""Softmax attention, full or in a sliding window: PyTorch's own kernels behind one masked call. Other attend rules score with it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from needlework.layers.config import Config, Width
from needlework.layers.state import KVState, size
from needlework.ops.common.packing import check_cu_seqlens, lengths, pad, unpad
from needlework.ops.common.pages import append, positions


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    ring: int | None = None,
    scale: float | None = None,
    initial_state: KVState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, KVState | None]:
    """o_i = Σ_j softmax_j(scale · q_i·k_j) v_j over the keys with 0 <= i − j < window of the same document.

    q [B T Hq d], k [B T Hkv d], v [B T Hkv V], scale default d^-1/2 -> o [B T Hq V] and the pages after the last token.
    Pages are a ring of `ring` rows, or hold every token (`ops/common/pages.py`).
    """
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q.shape[0], q.shape[1])
        q, k, v = (pad(x, cu_seqlens) for x in (q, k, v))
    # a padded row's queries give arbitrary numbers, which nobody reads
    o = _attend(q, k, v, window, ring, scale, initial_state)
    state = None
    if output_final_state:
        real = torch.full((len(k),), k.shape[1], device=k.device) if cu_seqlens is None else lengths(cu_seqlens)
        past = initial_state or KVState(k[:, :0], v[:, :0], torch.zeros_like(real))
        state = KVState(*append((past.k, past.v), (k, v), past.length, real, ring), past.length + real)
    return o if cu_seqlens is None else unpad(o, cu_seqlens), state


def _attend(q, k, v, window: int | None, ring: int | None, scale: float | None, past: KVState | None) -> Tensor:
    T, mask = q.shape[1], None
    at = torch.arange(T, device=q.device)
    if past is not None:
        held = positions(past.length, past.k.shape[1], ring)  # [N P]
        at = past.length[:, None] + at  # [N T]
        mask = _visible(at, torch.cat([held, at], 1), window)[:, None]
        k, v = torch.cat([past.k.to(k.dtype), k], 1), torch.cat([past.v.to(v.dtype), v], 1)
    elif window is not None and window < T:
        mask = _visible(at, at, window)
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[2] != k.shape[2],
    )  # fmt: skip
    return o.transpose(1, 2)


def _visible(i: Tensor, j: Tensor, window: int | None) -> Tensor:
    """Positions i [.. T] of queries and j [.. P] of keys (−1: an empty row) -> which keys a query sees, [.. T P]."""
    lag = i[..., :, None] - j[..., None, :]
    seen = (lag >= 0) & (j >= 0)[..., None, :]
    return seen if window is None else seen & (lag < window)


class AttendRule(nn.Module):
    """Base of the attend rules: `forward(x, q, k, v, **carry) -> (o [B T Hq V], residual [B T D] or None, state)`.

    The state has a field `length` [N], the tokens seen. `residual` is what a rule adds to the layer's output by itself.
    """

    def __init__(self, config: Config, width: Width):
        super().__init__()
        self.config, self.width = config, width

    def state_size(self, T: int, dtype: torch.dtype) -> int:
        """Bytes of one sequence's pages: keys and values of min(T, window) tokens, and the length."""
        rows = T if self.config.window is None else min(T, self.config.window)
        return self.width.heads * (self.width.key_dim + self.width.value_dim) * rows * size(dtype) + 8


@dataclass(frozen=True, kw_only=True)
class Softmax(Config):
    """o_i = Σ_j softmax_j(scale · q_i·k_j) v_j; window W: only keys with 0 <= i − j < W."""

    kind = "softmax"
    window: int | None = None
    scale: float | None = None

    def build(self, width: Width) -> nn.Module:
        return _Softmax(self, width)


class _Softmax(AttendRule):
    def forward(self, x, q, k, v, **carry):
        o, state = softmax_attention(
            q, k, v, window=self.config.window, ring=self.config.window, scale=self.config.scale, **carry
        )
        return o, None, state
