"""LUCID, an attend rule: softmax attention on values that were solved against the overlap of their keys."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from needlework.fields import Count, Positive
from needlework.layers.config import Width
from needlework.layers.norm import wide
from needlework.layers.softmax import AttendConfig, AttendRule, softmax_attention
from needlework.layers.state import KVState, size
from needlework.ops.lucid import chunk_lucid
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
        if c.precondition == "qk":
            q, k = _unit(q), _unit(k)
        beta = self.beta(x) if c.precondition == "beta" else None
        y, pages = chunk_lucid(
            probe("lucid.k", k), v, beta, precondition=c.precondition, window=c.window, solve=c.solve,
            **carry,
        )  # fmt: skip
        past = carry["initial_state"]
        carry |= {"initial_state": past and KVState(*past), "output_final_state": False}  # the solve has made the pages
        ring = c.window if c.solve == "window" else None
        o, _ = softmax_attention(q, k, y, window=c.window, ring=ring, scale=c.scale, **carry)
        return o, None, pages

    def state_size(self, T: int, dtype: torch.dtype) -> int:
        """Keys and *solved* values of min(T, window) tokens (of all T where the solve is global), and the length."""
        rows = T if self.config.window is None or self.config.solve == "global" else min(T, self.config.window)
        return self.width.heads * (self.width.key_dim + self.width.value_dim) * rows * size(dtype) + 8


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
