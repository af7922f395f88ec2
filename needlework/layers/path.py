"""PaTH, an attend rule: softmax attention whose positions are products of reflections that the tokens make."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from needlework.fields import AtLeastTwo, Count, Positive
from needlework.layers.batch import Batch
from needlework.layers.config import Width
from needlework.layers.conv import ShortConv, conv_held
from needlework.layers.fox import log_gate
from needlework.layers.norm import l2, wide
from needlework.layers.projection import Projection
from needlework.layers.softmax import AttendConfig, AttendRule
from needlework.layers.state import Captured, Part, fixed, of
from needlework.ops.path import BLOCK, PathState, chunk_path, paged_path
from needlework.probe import probe


@dataclass(frozen=True, kw_only=True)
class Path(AttendConfig):
    """PaTH attention: a key meets its query through the product of the factors of the tokens after the key.

        A_ij = scale · q_iᵀ H_i … H_{j+1} k_j,    H_t = I − β_t w_t w_tᵀ,    o_i = Σ_j softmax_j(A_i·) v_j
        w = l2(silu(conv(W x))) [B T Hkv K],    β = 2σ(W_β x + b) [B T Hkv]
        forget (PaTH-FoX): A_ij + ln f_{j+1} + … + ln f_i,    f = σ(W_f x + b) [B T Hq]

    It has no other position: the layer's `position` is None.

    rank: W = W₂ W₁ with W₁ [r D], W₂ [Hkv·K r]; None: one map.
    conv: taps of the causal depthwise convolution of W x, at least 2. None: none, and no SiLU either, as in LUCID's PaTH.
    forget: whether the scores have `Fox`'s forget gate, a number a token and query head. The state then holds the sums of its logarithms
        beside keys and values, in float64: 8 Hq bytes a token.
    window: W; only keys with 0 <= i − j < W are seen. None: every key so far.
    scale: of q_iᵀ H … k_j; None: d^-1/2.
    Raises ValueError where the layer is built with a position.

    >>> import torch
    >>> from needlework.layers import Attention, Path
    >>> Attention(heads=4, kv_heads=2, head_dim=16, attend=Path()).build(64)(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "path"
    rank: Count | None = 32
    conv: AtLeastTwo | None = 3
    forget: bool = False
    window: Count | None = None
    scale: Positive | None = None

    def build(self, width: Width) -> AttendRule:
        return _Path(self, width)


class PathCache(NamedTuple):
    """What the op carries (`PathState`), and the last inputs of the convolution, [N conv-1 Hkv·K]."""

    k: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor
    length: Tensor
    decay: Tensor | None
    conv: Tensor | None


class Reflections(nn.Module):
    """x -> β and w of each token and key-value head, and the convolution's last inputs."""

    def __init__(self, width: Width, rank: int | None, conv: int | None):
        super().__init__()
        D, self.shape = width.dim, (width.heads, width.key_dim)
        channels = width.heads * width.key_dim
        self.taps = None if conv is None else ShortConv(width=conv)
        self.conv = None if self.taps is None else self.taps.build(channels)
        self.w = (
            Projection(D, channels, bias=False)
            if rank is None
            else nn.Sequential(Projection(D, rank, bias=False), Projection(rank, channels, bias=False))
        )
        self.beta = Projection(D, width.heads)

    def forward(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """β [B T Hkv] in float32, w [B T Hkv K], the convolution's state."""
        w = self.w(x)
        if self.conv is not None:
            (w,), state = self.conv((w,), state, cu_seqlens)
        return self._strength(x), self._unit(w), state

    def serve(self, x: Tensor, tables: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """β [T Hkv] and w [T Hkv K] of tokens x [T D]."""
        w = self.w(x)
        if self.conv is not None:
            (w,) = self.conv.serve(w, (w.shape[-1],), tables["conv"], batch)
        return self._strength(x), self._unit(w)

    def held(self, dtype: torch.dtype) -> dict[str, Part]:
        """One sequence's open block, and the convolution's last inputs."""
        H, K = self.shape
        opened = {"w": Part((BLOCK, H, K), dtype), "beta": Part((BLOCK, H), fixed(dtype))}
        return opened | conv_held(self.taps, H * K, dtype)

    def _unit(self, w: Tensor) -> Tensor:
        return l2(w.unflatten(-1, self.shape))

    def _strength(self, x: Tensor) -> Tensor:
        return 2 * torch.sigmoid(wide(self.beta(x)))


class _Path(AttendRule[Path]):
    own_positions = rewrites = True

    def __init__(self, config: Path, width: Width):
        super().__init__(config, width)
        self.reflect = Reflections(width, config.rank, config.conv)
        self.forget = Projection(width.dim, width.value_heads) if config.forget else None

    def forward(self, x, q, k, v, *, initial_state: PathCache | None, output_final_state, cu_seqlens):
        past = None if initial_state is None else PathState(*initial_state[:6])
        beta, w, conv = self.reflect(x, initial_state and initial_state.conv, cu_seqlens)
        o, state = chunk_path(
            q, k, v, probe("path.beta", beta), probe("path.w", w), g=self._gate(x), window=self.config.window, scale=self.config.scale,
            initial_state=past, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return o, None, state and PathCache(*state, conv=conv)

    def serve(self, x, q, k, v, tables, batch):
        own = of("attend", tables)
        beta, w = self.reflect.serve(x, own, batch)
        attend = partial(
            paged_path, k_pages=tables["k"], v_pages=tables["v"], w_slots=own["w"], beta_slots=own["beta"],
            window=self.config.window, scale=self.config.scale,
        )  # fmt: skip
        tokens = {"q": q, "k": k, "v": v, "beta": beta, "w": w, "rows": batch.pages[self.reach].rows}
        if (g := self._gate(x)) is not None:
            attend, tokens = partial(attend, decay_pages=tables["decay"]), tokens | {"g": g}
        return batch.on_slots_and_pages(attend, self.reach, **tokens), None

    def rows(self, dtype: torch.dtype) -> dict[str, Part]:
        """Keys that are carried on are float32."""
        k, v = super().rows(dtype).values()
        sums = {} if self.forget is None else {"decay": Part((self.width.value_heads,), torch.float64)}
        return {"k": k._replace(dtype=fixed(dtype)), "v": v} | sums

    def fixed(self, dtype: torch.dtype) -> dict[str, Part]:
        return self.reflect.held(dtype)

    def _gate(self, x: Tensor) -> Tensor | None:
        return None if self.forget is None else log_gate(self.forget, x)

    def captured(self, dtype: torch.dtype) -> Captured:
        return "all" if kernels_have(self.width, dtype) else "steps"


def kernels_have(width: Width, dtype: torch.dtype) -> bool:
    """Whether a prompt's kernels have a launch config for these heads: wider ones, whose prompts PyTorch computes, read values back."""
    return max(width.key_dim, width.value_dim) <= (128 if dtype.itemsize == 2 else 64)
