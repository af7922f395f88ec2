"""LUCID, an attend rule: softmax attention on values that were solved against the overlap of their keys."""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from needlework.fields import Count, Positive
from needlework.layers.config import Width
from needlework.layers.norm import wide
from needlework.layers.softmax import AttendConfig, AttendRule, softmax_attention
from needlework.layers.state import KVState, Part
from needlework.ops.lucid import chunk_lucid, paged_lucid
from needlework.ops.lucid.arguments import Precondition, Solve
from needlework.probe import probe


@dataclass(frozen=True, kw_only=True)
class Lucid(AttendConfig):
    """LUCID: softmax attention on values that are solved against the overlap of their keys.

        O = softmax(scale · Q Kᵀ) Y,    P Y = V,    P_ij = e^{√d (k̂_i·k̂_j − 1)} for j <= i, else 0

    The state holds k and y, not v.

    precondition: the form of P: "key" as above; "qk", where the scores use √d q̂ and √d k̂ too; "rowmax"; "beta" with
        β = 2σ(W_β x), which starts at 1 (the card of `ops/lucid` has each).
    window: W; solve and read see keys with 0 <= i − j < W. None: every key so far.
    solve: "window", or "global": solves against every key and reads in the window.
    scale: of the scores; None: d^-1/2.

    >>> import torch
    >>> from needlework.layers import Attention, Lucid
    >>> Attention(heads=4, head_dim=16, attend=Lucid()).build(64)(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "lucid"
    precondition: Precondition = "key"
    window: Count | None = None
    solve: Solve = "window"
    scale: Positive | None = None

    def build(self, width: Width) -> AttendRule:
        return _Lucid(self, width)


class _Lucid(AttendRule[Lucid]):
    def __init__(self, config: Lucid, width: Width):
        super().__init__(config, width)
        if config.precondition == "beta":
            self.beta = _Beta(width)

    def forward(self, x, q, k, v, **carry):
        c = self.config
        q, k, beta = self._scored(x, q, k)
        y, pages = chunk_lucid(
            probe("lucid.k", k), v, beta, precondition=c.precondition, window=c.window, solve=c.solve,
            **carry,
        )  # fmt: skip
        past = carry["initial_state"]
        carry |= {"initial_state": past and KVState(*past), "output_final_state": False}  # the solve has made the pages
        o, _ = softmax_attention(q, k, y, window=c.window, ring=self.reach, scale=c.scale, **carry)
        return o, None, pages

    def serve(self, x, q, k, v, tables, batch):
        c = self.config
        q, k, beta = self._scored(x, q, k)
        settings = {"precondition": c.precondition, "window": c.window, "solve": c.solve, "scale": c.scale}
        attend = partial(paged_lucid, k_pages=tables["k"], y_pages=tables["y"], **settings)
        return batch.on_pages(attend, self.reach, q=q, k=k, v=v, beta=beta, rows=batch.pages[self.reach].rows), None

    def _scored(self, x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """q and k as they score, and β."""
        if self.config.precondition == "qk":
            q, k = _unit(q), _unit(k)
        return q, k, self.beta(x) if self.config.precondition == "beta" else None

    @property
    def reach(self) -> int | None:
        """A global solve reads every row."""
        return self.config.window if self.config.solve == "window" else None

    def rows(self, dtype: torch.dtype) -> dict[str, Part]:
        """Keys and *solved* values."""
        k, y = super().rows(dtype).values()
        return {"k": k, "y": y}


def _unit(x: Tensor) -> Tensor:
    """√d x/‖x‖: what "qk" scores with."""
    return (x / wide(x).norm(dim=-1, keepdim=True).clamp(min=1e-6) * math.sqrt(x.shape[-1])).to(x.dtype)


class _Beta(nn.Module):
    """β = 2σ(W x), [B T Hkv], W from zero: the layer starts equal to "key"."""

    def __init__(self, width: Width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width.heads, width.dim))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * torch.sigmoid(wide(x @ self.weight.T))
