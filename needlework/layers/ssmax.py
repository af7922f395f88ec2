"""Scalable-softmax, an attend rule: scores grow with the logarithm of how many keys a query sees."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from needlework.fields import Count, Positive
from needlework.layers.config import Width
from needlework.layers.norm import wide
from needlework.layers.softmax import AttendConfig, AttendRule, SoftmaxRule
from needlework.ops.common.packing import token_positions


@dataclass(frozen=True, kw_only=True)
class SSMax(AttendConfig):
    """Scalable-softmax (arXiv 2501.19399): attention that does not fade as the text grows.

        o_i = Σ_j softmax_j(s ln n · scale · q_i·k_j) v_j,    n the keys that i sees, s a parameter a head

    The query is scaled before it attends.

    window: W; only keys with 0 <= i − j < W are seen, and n <= W. None: every key so far.
    scale: of the scores; None: d^-1/2.
    start: s at initialisation.

    >>> import torch
    >>> from needlework.layers import Attention, SSMax
    >>> Attention(heads=4, head_dim=16, attend=SSMax()).build(64)(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "ssmax"
    window: Count | None = None
    scale: Positive | None = None
    start: Positive = 0.43

    def build(self, width: Width) -> AttendRule:
        return _SSMax(self, width)


class _SSMax(SoftmaxRule):
    def __init__(self, config: SSMax, width: Width):
        super().__init__(config, width)
        self.s = nn.Parameter(torch.empty(width.value_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.s, self.config.start)

    def forward(self, x, q, k, v, **carry):
        past = carry["initial_state"]
        at = token_positions(q, None if past is None else past.length, carry["cu_seqlens"])
        return super().forward(x, self._scaled(q, at), k, v, **carry)

    def serve(self, x, q, k, v, tables, batch):
        return super().serve(x, self._scaled(q, batch.positions), k, v, tables, batch)

    def _scaled(self, q: Tensor, at: Tensor) -> Tensor:
        """q [.. Hq d] at positions [..]."""
        s = wide(self.s)
        n = (at + 1).clamp(1, self.config.window).to(s.dtype)
        return (q * (s * n.log()[..., None])[..., None]).to(q.dtype)
