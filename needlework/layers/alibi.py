"""ALiBi, an attend rule: a score falls by a slope of its head for every token between query and key. It is a position encoding."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from needlework.fields import Count, Positive
from needlework.layers.config import Width
from needlework.layers.softmax import AttendConfig, AttendRule, softmax_attention
from needlework.ops.attention.pages import positions
from needlework.ops.common.packing import token_positions
from needlework.ops.paged import paged_attention


@dataclass(frozen=True, kw_only=True)
class Alibi(AttendConfig):
    """ALiBi (arXiv 2108.12409): softmax attention with linear biases, without parameters.

        o_i = Σ_j softmax_j(scale · q_i·k_j − m_h (i − j)) v_j,    m_h = 2^{−8h/Hq},    h = 1 … Hq

    Where Hq is no power of two, the slopes of the next smaller one come first, then every other one of the next larger.

    window: W; only keys with 0 <= i − j < W are seen. None: every key so far.
    scale: of q_i·k_j; None: d^-1/2.

    >>> import torch
    >>> from needlework.layers import Alibi, Attention
    >>> Attention(heads=4, head_dim=16, attend=Alibi()).build(64)(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "alibi"
    window: Count | None = None
    scale: Positive | None = None

    def build(self, width: Width) -> AttendRule:
        return _Alibi(self, width)


def slopes(heads: int) -> list[float]:
    """m_h of each head."""
    power = 1 << (heads.bit_length() - 1)
    own = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return own + [2 ** (-4 * h / power) for h in range(1, 2 * (heads - power), 2)]


class _Alibi(AttendRule[Alibi]):
    """A decay of G_t = −m t: forgetting attention whose gates are constants, and need no state."""

    def forward(self, x, q, k, v, *, initial_state, cu_seqlens, **carry):
        W, past = self.config.window, initial_state
        at = token_positions(q, None if past is None else past.length, cu_seqlens)
        held = None if past is None else self._decay(positions(past.length, past.k.shape[1], W))
        decay = self._decay(at).expand(*q.shape[:2], -1)
        o, state = softmax_attention(
            q, k, v, window=W, ring=W, scale=self.config.scale, decay=decay, past_decay=held, initial_state=past,
            cu_seqlens=cu_seqlens, **carry,
        )  # fmt: skip
        return o, None, state

    def serve(self, x, q, k, v, tables, batch):
        c, own = self.config, self._slopes(q.device).to(torch.promote_types(q.dtype, torch.float32))
        attend = partial(paged_attention, **self.write_rows(k, v, tables, batch), window=c.window, scale=c.scale, slopes=own)
        return batch.on_pages(attend, self.reach, q=q), None

    def _decay(self, at: Tensor) -> Tensor:
        """G [.. Hq] at positions [..]."""
        return -at[..., None] * self._slopes(at.device)

    def _slopes(self, device: torch.device) -> Tensor:
        return torch.tensor(slopes(self.width.value_heads), dtype=torch.float64, device=device)
