"""Diff Transformer, an attend rule: the difference of two softmaxes, (softmax₁ − λ softmax₂) V. A baseline.

Ye et al., "Differential Transformer" (2410.05258), Eq. 1-3: each head's query and key are split in halves, the values stay
whole; λ = e^{λ_q1·λ_k1} − e^{λ_q2·λ_k2} + λ_init; each head's output is RMS-normed and scaled by 1 − λ_init,
λ_init = 0.8 − 0.6 e^{−0.3 l} in layer l = 0, 1, …
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from needlework.fields import Count, Share
from needlework.layers.config import Width
from needlework.layers.norm import RMSNorm, wide
from needlework.layers.softmax import AttendConfig, AttendRule, softmax_attention
from needlework.layers.state import KVState
from needlework.ops.paged import paged_differential
from needlework.probe import probe


@dataclass(frozen=True, kw_only=True)
class Differential(AttendConfig):
    """Diff Transformer: the difference of two softmaxes over the halves of each head.

        o = (1 − λ_init) RMSNorm( (softmax(q₁k₁ᵀ/√(d/2)) − λ softmax(q₂k₂ᵀ/√(d/2))) v ),    q = [q₁ q₂],    k = [k₁ k₂]

    Positions turn each half by itself.

    window: W; only keys with 0 <= i − j < W are seen. None: every key so far.
    start: λ_init, in [0, 1); None: the paper's 0.8 − 0.6 e^{−0.3 l} in layer l, counted from 0.
    Raises ValueError where the layer is built with an odd head_dim.

    >>> import torch
    >>> from needlework.layers import Attention, Differential
    >>> Attention(heads=4, head_dim=16, attend=Differential()).build(64)(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "differential"
    window: Count | None = None
    start: Share | None = None

    def build(self, width: Width) -> AttendRule:
        return _Differential(self, width)


class _Differential(AttendRule[Differential]):
    vectors_a_head = 2

    def __init__(self, config: Differential, width: Width):
        super().__init__(config, width)
        if width.key_dim % 2:
            raise ValueError(f"differential: head dim is {width.key_dim}, expected an even number to split in two")
        # a buffer: as a number it would make torch.compile compile every layer by itself
        self.register_buffer("start", torch.empty(()))
        self.vectors = nn.Parameter(torch.empty(4, width.key_dim // 2))  # λ_q1, λ_k1, λ_q2, λ_k2
        self.norm = RMSNorm(width.value_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.vectors, std=0.1)
        start = self.config.start
        self.start.fill_(0.8 - 0.6 * math.exp(-0.3 * self.width.layer) if start is None else start)

    def forward(self, x, q, k, v, **carry):
        lam = probe("differential.lam", self._lam())
        # the two halves as heads of half the size: query heads [h₁ h₂] against key heads [h₁ h₂], the values twice
        halves = lambda x: torch.cat(x.chunk(2, -1), 2)  # [B T 2H d/2]
        o, pages = softmax_attention(
            halves(q), halves(k), torch.cat([v, v], 2),
            window=self.config.window, ring=self.config.window, **carry | {"initial_state": _spread(carry["initial_state"])},
        )  # fmt: skip
        first, second = o.chunk(2, 2)
        return self._normed(first - lam.to(o.dtype) * second), None, _gather(pages)

    def serve(self, x, q, k, v, tables, batch):
        attend = partial(paged_differential, **self.write_rows(k, v, tables, batch), lam=self._lam(), window=self.config.window)
        return self._normed(batch.on_pages(attend, self.reach, q=q)), None

    def _lam(self) -> Tensor:
        q1, k1, q2, k2 = wide(self.vectors)
        return (q1 @ k1).exp() - (q2 @ k2).exp() + wide(self.start)

    def _normed(self, difference: Tensor) -> Tensor:
        return (1 - wide(self.start)).to(difference.dtype) * self.norm(difference)


def _spread(state: KVState | None) -> KVState | None:
    """Pages as the cache holds them (whole heads) -> as the two softmaxes read them."""
    return None if state is None else state._replace(k=torch.cat(state.k.chunk(2, -1), 2), v=torch.cat([state.v, state.v], 2))


def _gather(pages: KVState | None) -> KVState | None:
    return pages and pages._replace(k=torch.cat(pages.k.chunk(2, 2), -1), v=pages.v.chunk(2, 2)[0])
