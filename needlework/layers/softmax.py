"""Softmax attention, full or in a sliding window: PyTorch's own kernels. Other attend rules score with it.

On a GPU windows and packed documents take memory O(T) (`ops/attention/fused.py`); elsewhere documents are padded and windows are masks,
and so are tokens after pages everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from needlework.fields import Count, Positive
from needlework.layers.batch import Batch
from needlework.layers.config import Config, Width
from needlework.layers.state import Captured, KVState, Part
from needlework.ops.attention.fused import causal, streamed, streams
from needlework.ops.attention.pages import append, positions
from needlework.ops.common.packing import check_cu_seqlens, lengths, pad, sequences, unpad
from needlework.ops.paged import paged_attention, write_pages


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    ring: int | None = None,
    scale: float | None = None,
    decay: Tensor | None = None,
    past_decay: Tensor | None = None,
    initial_state: KVState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, KVState | None]:
    """o_i = Σ_j softmax_j(scale · q_i·k_j + G_i − G_j) v_j over the keys with 0 <= i − j < window of the same document.

    q [B T Hq d], k [B T Hkv d], v [B T Hkv V], scale default d^-1/2 -> o [B T Hq V] and the pages after the last token.
    decay: G [B T Hq], float64, of which differences in a document alone count, None: 0; past_decay [N P Hq]: of the pages' rows.
    Pages are a ring of `ring` rows, or hold every token (`ops/attention/pages.py`).
    """
    adds = decay is not None or cu_seqlens is not None or (window is not None and window < q.shape[1])
    if adds and initial_state is None and streams(q, v):
        o = streamed(q, k, v, cu_seqlens, window, scale, decay)
    elif cu_seqlens is None:
        o = _attend(q, k, v, decay, window, ring, scale, initial_state, past_decay)
    else:
        check_cu_seqlens(cu_seqlens, q.shape[0], q.shape[1])
        # a padded row's queries give arbitrary values, which `unpad` drops
        q_, k_, v_ = (pad(x, cu_seqlens) for x in (q, k, v))
        decay = None if decay is None else pad(decay, cu_seqlens)
        o = unpad(_attend(q_, k_, v_, decay, window, ring, scale, initial_state, past_decay), cu_seqlens)
    state = None
    if output_final_state:
        past = initial_state or _no_pages(k, v, sequences(cu_seqlens, len(k)))
        (k, v), length = appended((past.k, past.v), (k, v), past.length, ring, cu_seqlens)
        state = KVState(k, v, length)
    return o, state


def _no_pages(k: Tensor, v: Tensor, N: int) -> KVState:
    k, v = (x.new_zeros(N, 0, *x.shape[2:]) for x in (k, v))
    return KVState(k, v, torch.zeros(N, dtype=torch.int64, device=k.device))


def appended(
    pages: tuple[Tensor, ...], new: tuple[Tensor, ...], length: Tensor, ring: int | None, cu_seqlens: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Pages [N P …] of `length` [N] tokens with rows of new ones [B T …], and how many tokens they then hold."""
    if cu_seqlens is None:
        real = torch.full((len(new[0]),), new[0].shape[1], device=new[0].device)
    else:
        new, real = tuple(pad(x, cu_seqlens) for x in new), lengths(cu_seqlens)
    return append(pages, new, length, real, ring), length + real


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    window: int | None,
    ring: int | None,
    scale: float | None,
    past: KVState | None,
    past_decay: Tensor | None,
) -> Tensor:
    T, mask = q.shape[1], None
    at = torch.arange(T, device=q.device)
    if past is not None:
        held = positions(past.length, past.k.shape[1], ring)  # [N P]
        at = past.length[:, None] + at  # [N T]
        mask = _visible(at, torch.cat([held, at], 1), window)[:, None]
        k, v = torch.cat([past.k.to(k.dtype), k], 1), torch.cat([past.v.to(v.dtype), v], 1)
    elif decay is not None or (window is not None and window < T):
        mask = _visible(at, at, window)
    several = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if decay is not None and mask is not None:
        held = decay if past_decay is None else torch.cat([past_decay, decay], 1)
        added = decay.transpose(1, 2)[..., None] - held.transpose(1, 2)[:, :, None]  # [B Hq T P]
        # a bias in half precision would be off by as much as it is large
        wide_q, wide_k, wide_v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
        bias = added.to(wide_q.dtype).masked_fill(~mask, -torch.inf)
        o = F.scaled_dot_product_attention(wide_q, wide_k, wide_v, attn_mask=bias, scale=scale, enable_gqa=several)
        return o.to(q.dtype).transpose(1, 2)
    if mask is None:
        return causal(q, k, v, scale=scale, enable_gqa=several).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=several).transpose(1, 2)


def _visible(i: Tensor, j: Tensor, window: int | None) -> Tensor:
    """Positions i [.. T] of queries and j [.. P] of keys (−1: an empty row) -> which keys a query sees, [.. T P]."""
    lag = i[..., :, None] - j[..., None, :]
    seen = (lag >= 0) & (j >= 0)[..., None, :]
    return seen if window is None else seen & (lag < window)


class AttendConfig(Config):
    """Base of the attend rules' configs: `build(width)` makes an AttendRule. Each has a window, or None."""

    if TYPE_CHECKING:  # a field, and a frozen one is read-only

        @property
        def window(self) -> int | None: ...

    def build(self, width: Width) -> "AttendRule":
        raise NotImplementedError


Rule = TypeVar("Rule", bound=AttendConfig, covariant=True)


class AttendRule(nn.Module, Generic[Rule]):
    """Base of the attend rules: `forward(x, q, k, v, **carry) -> (o [B T Hq V], residual [B T D] or None, state)`.

    The state has a field `length` [N], the tokens seen. `residual` is what a rule adds to the layer's output by itself.
    vectors_a_head: a head's query is so many vectors side by side, which score by themselves, and so is its key.
    own_positions: it distinguishes positions by itself, and takes no others.
    rewrites: later tokens change rows that were written; a page then has one owner.
    """

    vectors_a_head = 1
    own_positions = rewrites = False

    def __init__(self, config: Rule, width: Width):
        super().__init__()
        self.config, self.width = config, width

    @property
    def reach(self) -> int | None:
        """How many of the newest rows are read again; None: all."""
        return self.config.window

    def fixed(self, dtype: torch.dtype) -> dict[str, Part]:
        """What a sequence has beside its rows, by name."""
        return {}

    def captured(self, dtype: torch.dtype) -> Captured:
        """Of `Held`."""
        return "all"

    def rows(self, dtype: torch.dtype) -> dict[str, Part]:
        """One token's row in the pages, the model in `dtype`."""
        H, K, V = self.width.heads, self.width.key_dim, self.width.value_dim
        return {"k": Part((H, K), dtype), "v": Part((H, V), dtype)}

    def serve(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, tables: Mapping[str, Tensor], batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """o [T Hq V] and what the rule adds, of tokens [T …]; their rows are written to the pages first."""
        raise NotImplementedError

    def write_rows(self, k: Tensor, v: Tensor, tables: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """The pages, with the rows of new tokens."""
        write_pages(k, v, tables["k"], tables["v"], batch.pages[self.reach].rows)
        return {"k_pages": tables["k"], "v_pages": tables["v"]}


@dataclass(frozen=True, kw_only=True)
class Softmax(AttendConfig):
    """Softmax attention, full or in a sliding window.

        o_i = Σ_j softmax_j(scale · q_i·k_j) v_j

    window: W; only keys with 0 <= i − j < W are seen, and the state holds W tokens. None: every key so far.
    scale: of the scores; None: d^-1/2.

    >>> import torch
    >>> from needlework.layers import Attention, Softmax
    >>> Attention(heads=4, head_dim=16, attend=Softmax(window=32)).build(64)(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "softmax"
    window: Count | None = None
    scale: Positive | None = None

    def build(self, width: Width) -> AttendRule:
        return SoftmaxRule(self, width)


class SoftmaxRule(AttendRule):
    """Softmax attention, and the base of rules that change its scores."""

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, **carry: Any) -> tuple[Tensor, Tensor | None, KVState | None]:
        o, state = softmax_attention(
            q, k, v, window=self.config.window, ring=self.config.window, scale=self.config.scale, **carry
        )
        return o, None, state

    def serve(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, tables: Mapping[str, Tensor], batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        pages = self.write_rows(k, v, tables, batch)
        attend = partial(paged_attention, **pages, window=self.config.window, scale=self.config.scale)
        return batch.on_pages(attend, self.reach, q=q), None
