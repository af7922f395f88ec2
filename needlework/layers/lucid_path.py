"""LUCID-PaTH, an attend rule: PaTH attention on values that were solved against the overlap of their keys, as PaTH has moved them."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from needlework.fields import AtLeastTwo, Count, Positive
from needlework.layers.config import Width
from needlework.layers.path import Reflections, kernels_have
from needlework.layers.softmax import AttendConfig, AttendRule
from needlework.layers.state import Captured, Part, fixed, of
from needlework.ops.path import LucidPathState, chunk_lucid_path, chunk_path, paged_lucid_path
from needlework.probe import probe


@dataclass(frozen=True, kw_only=True)
class LucidPath(AttendConfig):
    """LUCID-PaTH: PaTH attention on solved values.

        O = softmax(A) Y,    P Y = V,    P_ij = e^{√d (k̂_iᵀ H_i … H_{j+1} k̂_j − 1)} for j <= i, else 0

    A, H, w and β as in `Path`: its scores take q and k as they are. The state holds the solved y and the norms of keys, not v. It has no
    other position: the layer's `position` is None.

    rank, conv: of w, as in `Path`; LUCID's own is one map without convolution.
    window: W; solve and read see keys with 0 <= i − j < W. None: every key so far.
    scale: of the scores; None: d^-1/2.
    Raises ValueError where the layer is built with a position.

    >>> import torch
    >>> from needlework.layers import Attention, LucidPath
    >>> Attention(heads=4, kv_heads=2, head_dim=16, attend=LucidPath()).build(64)(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "lucid_path"
    rank: Count | None = None
    conv: AtLeastTwo | None = None
    window: Count | None = None
    scale: Positive | None = None

    def build(self, width: Width) -> AttendRule:
        return _LucidPath(self, width)


class LucidPathCache(NamedTuple):
    """What the solve carries (`LucidPathState`), and the last inputs of the convolution, [N conv-1 Hkv·K]."""

    k: Tensor
    norm: Tensor
    y: Tensor
    w: Tensor
    beta: Tensor
    length: Tensor
    conv: Tensor | None


class _LucidPath(AttendRule[LucidPath]):
    own_positions = rewrites = True

    def __init__(self, config: LucidPath, width: Width):
        super().__init__(config, width)
        self.reflect = Reflections(width, config.rank, config.conv)

    def forward(self, x, q, k, v, *, initial_state: LucidPathCache | None, output_final_state, cu_seqlens):
        past = None if initial_state is None else LucidPathState(*initial_state[:6])
        beta, w, conv = self.reflect(x, initial_state and initial_state.conv, cu_seqlens)
        rule = {
            "beta": probe("path.beta", beta),
            "w": probe("path.w", w),
            "window": self.config.window,
            "cu_seqlens": cu_seqlens,
        }
        y, state = chunk_lucid_path(
            probe("lucid_path.k", k), v, **rule, initial_state=past, output_final_state=output_final_state
        )  # fmt: skip
        # the solve has made the state
        o, _ = chunk_path(q, k, y, **rule, scale=self.config.scale, initial_state=None if past is None else past.read)
        return o, None, state and LucidPathCache(*state, conv=conv)

    def serve(self, x, q, k, v, tables, batch):
        own = of("attend", tables)
        beta, w = self.reflect.serve(x, own, batch)
        attend = partial(
            paged_lucid_path, k_pages=tables["k"], norm_pages=tables["norm"], y_pages=tables["y"], w_slots=own["w"],
            beta_slots=own["beta"], window=self.config.window, scale=self.config.scale,
        )  # fmt: skip
        rows = batch.pages[self.reach].rows
        return batch.on_slots_and_pages(attend, self.reach, q=q, k=k, v=v, beta=beta, w=w, rows=rows), None

    def rows(self, dtype: torch.dtype) -> dict[str, Part]:
        """Keys that are carried on and their norms are float32; *solved* values."""
        k, y = super().rows(dtype).values()
        return {"k": k._replace(dtype=fixed(dtype)), "norm": Part((self.width.heads,), fixed(dtype)), "y": y}

    def fixed(self, dtype: torch.dtype) -> dict[str, Part]:
        return self.reflect.held(dtype)

    def captured(self, dtype: torch.dtype) -> Captured:
        return "all" if kernels_have(self.width, dtype) else "none"
