"""Polar, an attend rule with two outputs: a direction, and a bounded count of the keys that were attended to."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from needlework.fields import Count
from needlework.layers.config import Width
from needlework.layers.projection import OutProjection
from needlework.layers.softmax import AttendConfig, AttendRule
from needlework.ops.paged import paged_polar
from needlework.ops.polar import chunk_polar
from needlework.probe import probe


@dataclass(frozen=True, kw_only=True)
class Polar(AttendConfig):
    """Polar attention: a direction, and beside it a bounded count of the keys that were attended to.

        s = the read of a softmax with a null sink and a temperature that grows with the length,    o = s/‖s‖
        y ← y + W_μ mag,    mag = tanh( softplus(β) ln(1 + m_eff) ) [B T Hq]

    The card of `ops/polar` has s and m_eff, the effective number of keys.

    window: W; only keys with 0 <= i − j < W are seen. None: every key so far.

    >>> import torch
    >>> from needlework.layers import Attention, Polar
    >>> Attention(heads=4, head_dim=16, attend=Polar()).build(64)(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "polar"
    window: Count | None = None

    def build(self, width: Width) -> AttendRule:
        return _Polar(self, width)


class _Polar(AttendRule[Polar]):
    def __init__(self, config: Polar, width: Width):
        super().__init__(config, width)
        heads = width.value_heads  # Hq
        self.alpha, self.beta, self.gamma, self.null_base = (nn.Parameter(torch.empty(heads)) for _ in range(4))
        self.v_null = nn.Parameter(torch.empty(heads, width.value_dim))
        self.mag_proj = OutProjection(heads, width.dim, bias=width.bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter, start in ((self.alpha, -1.0), (self.beta, -1.5), (self.gamma, 0.5), (self.null_base, 2.0)):
            nn.init.constant_(parameter, start)
        nn.init.zeros_(self.v_null)

    def forward(self, x, q, k, v, **carry):
        q, k = probe("polar.q", q), probe("polar.k", k)
        alpha, gamma, null_base = self.alpha, self.gamma, self.null_base
        for name, value in {"alpha": alpha, "gamma": gamma, "null_base": null_base}.items():
            probe(f"polar.{name}", value)
        direction, magnitude, state = chunk_polar(
            q, k, v, alpha, self.beta, gamma, null_base, self.v_null,
            window=self.config.window, **carry,
        )  # fmt: skip
        return direction, self.mag_proj(magnitude.to(x.dtype)), state

    def serve(self, x, q, k, v, tables, batch):
        parameters = {name: getattr(self, name) for name in ("alpha", "beta", "gamma", "null_base", "v_null")}
        attend = partial(paged_polar, **self.write_rows(k, v, tables, batch), **parameters, window=self.config.window)
        direction, magnitude = batch.on_pages(attend, self.reach, q=q)
        return direction, self.mag_proj(magnitude.to(x.dtype))
