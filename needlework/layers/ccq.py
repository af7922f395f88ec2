"""CCQ, a read rule: the query is cleaned by the covariance of the stored keys, q̃ = (I − λΣ) q; the write is untouched."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from needlework.fields import Inside
from needlework.layers.config import Config, Width
from needlework.layers.norm import wide
from needlework.layers.state import fixed_size
from needlework.ops.ccq import chunk_ccq
from needlework.probe import probe


class ReadConfig(Config):
    """Base of the read rules' configs."""


@dataclass(frozen=True, kw_only=True)
class Plain(ReadConfig):
    """The raw query reads."""

    kind = "plain"

    def build(self, width: Width, write: Config) -> nn.Module:
        return _Plain()


class _Plain(nn.Module):
    maps = ()

    def forward(self, q, k, *, g, **carry) -> tuple[Tensor, None]:
        return q, None

    def state_size(self, dtype: torch.dtype) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class CCQ(ReadConfig):
    """q̃ = q − λ Σ q, Σ the running covariance of the unit keys, λ = σ(W_λ x + b_λ) from `start` at initialisation.

    aligned: the covariance forgets as the state does (weights e^{ḡ}, ḡ the mean decay of a head).
    """

    kind = "ccq"
    start: Inside = 0.1
    aligned: bool = False

    def build(self, width: Width, write: Config) -> nn.Module:
        if self.aligned and write.kind == "carve":
            raise ValueError(
                "ccq: aligned=True needs the decay before the read, and CARVE's decay depends on its own outputs; use aligned=False"
            )
        if write.kind == "carve" and write.write_rank > 1:
            raise ValueError(f"ccq: cleans against one key a token, got carve with write_rank={write.write_rank}")
        return _CCQ(self, width)


class _CCQ(nn.Module):
    def __init__(self, config: CCQ, width: Width):
        super().__init__()
        self.config, self.width = config, width
        self.project = nn.Linear(width.dim, width.value_heads, bias=False)
        self.bias = nn.Parameter(torch.empty(width.value_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.bias, math.log(self.config.start / (1 - self.config.start)))

    @property
    def maps(self) -> tuple[nn.Module, ...]:
        """Of the layer's input: what they give comes first in `forward`."""
        return (self.project,)

    def forward(self, logit, q, k, *, g, **carry) -> tuple[Tensor, tuple]:
        """logit [B T HV], q and unit k [B T H K], g [B T HV], [B T HV K] or None -> q̃ [B T HV K] and the statistic."""
        eta = torch.sigmoid(wide(logit) + self.bias)
        if not self.config.aligned:
            g = None
        elif g is not None:
            g = g.mean(-1) if g.dim() == 4 else g
            g = g.unflatten(-1, (self.width.heads, -1)).mean(-1)  # statistics are per key head
        return chunk_ccq(q, probe("ccq.k", k), eta, g, **carry)

    def state_size(self, dtype: torch.dtype) -> int:
        K = self.width.key_dim
        return self.width.heads * (K * K + K + 1) * fixed_size(dtype)
