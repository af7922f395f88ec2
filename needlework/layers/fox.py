"""Forgetting attention, an attend rule: a forget gate a token and head lowers the scores of all keys before it."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from needlework.fields import Count, Positive
from needlework.layers.batch import Batch
from needlework.layers.config import Width
from needlework.layers.norm import wide
from needlework.layers.projection import Projection
from needlework.layers.softmax import AttendConfig, AttendRule, appended, softmax_attention
from needlework.layers.state import KVState, Part
from needlework.ops.common.decay import summed
from needlework.ops.common.packing import sequences
from needlework.ops.paged import paged_attention, write_pages
from needlework.ops.slots.table import Sequences


@dataclass(frozen=True, kw_only=True)
class Fox(AttendConfig):
    """Forgetting attention (FoX, arXiv 2503.02130): softmax attention with a forget gate f a token and head.

        o_i = Σ_j softmax_j(scale · q_i·k_j + G_i − G_j) v_j,    G_t = Σ_{s<=t} ln f_s,    f = σ(W_f x + b)

    The state holds G beside each key and value, in float64, of which differences keep their digits: 8 Hq bytes a token.

    window: W; only keys with 0 <= i − j < W are seen. None: every key so far.
    scale: of q_i·k_j; None: d^-1/2.

    >>> import torch
    >>> from needlework.layers import Attention, Fox
    >>> Attention(heads=4, head_dim=16, attend=Fox()).build(64)(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "fox"
    window: Count | None = None
    scale: Positive | None = None

    def build(self, width: Width) -> AttendRule:
        return _Fox(self, width)


class FoxState(NamedTuple):
    """Growing: k [N P Hkv K], v [N P Hkv V], decay [N P Hq] float64, length [N]. total [N Hq]: G after the last token."""

    k: Tensor
    v: Tensor
    decay: Tensor
    total: Tensor
    length: Tensor


class _Fox(AttendRule[Fox]):
    def __init__(self, config: Fox, width: Width):
        super().__init__(config, width)
        self.project = Projection(width.dim, width.value_heads)

    def forward(self, x, q, k, v, *, initial_state, output_final_state, cu_seqlens):
        W, past, N = self.config.window, initial_state, sequences(cu_seqlens, len(q))
        before = x.new_zeros(N, self.width.value_heads, dtype=torch.float64) if past is None else past.total
        decay, total = summed(log_gate(self.project, x), before, cu_seqlens)
        o, _ = softmax_attention(
            q, k, v, window=W, ring=W, scale=self.config.scale, decay=decay, past_decay=None if past is None else past.decay,
            initial_state=None if past is None else KVState(past.k, past.v, past.length), cu_seqlens=cu_seqlens,
        )  # fmt: skip
        if not output_final_state:
            return o, None, None
        rows = k, v, decay
        pages = tuple(z.new_zeros(N, 0, *z.shape[2:]) for z in rows) if past is None else (past.k, past.v, past.decay)
        length = torch.zeros(N, dtype=torch.int64, device=x.device) if past is None else past.length
        (k, v, decay), length = appended(pages, rows, length, W, cu_seqlens)
        return o, None, FoxState(k, v, decay, total, length)

    def serve(self, x, q, k, v, tables, batch):
        c, pages = self.config, {"k_pages": tables["k"], "v_pages": tables["v"], "decay_pages": tables["decay"]}
        decay = self._on_slots(log_gate(self.project, x), tables["attend.total"], batch)
        write_pages(k, v, **pages, decay=decay, rows=batch.pages[self.reach].rows)
        attend = partial(paged_attention, **pages, window=c.window, scale=c.scale)
        return batch.on_pages(attend, self.reach, q=q, decay=decay), None

    def fixed(self, dtype: torch.dtype) -> dict[str, Part]:
        return {"total": Part((self.width.value_heads,), torch.float64)}

    def rows(self, dtype: torch.dtype) -> dict[str, Part]:
        return super().rows(dtype) | {"decay": Part((self.width.value_heads,), torch.float64)}

    def _on_slots(self, g: Tensor, table: Tensor, batch: Batch) -> Tensor:
        """G [T Hq] of new tokens; the table of totals advances in place."""

        def chunk(g: Tensor, slots: Tensor, fresh: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
            own = Sequences.of(slots, fresh, len(slots), g.shape[1], cu_seqlens, g.device)
            decay, total = summed(g, own.read(table), cu_seqlens)
            own.write(table, total)
            return decay

        return batch.on_slots(lambda g, slots: chunk(g[:, None], slots, None, None)[:, 0], chunk, g=g)


def log_gate(project: Projection, x: Tensor) -> Tensor:
    """ln f [.. Hq]."""
    return F.logsigmoid(wide(project(x)))
