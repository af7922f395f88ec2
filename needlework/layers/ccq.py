"""CCQ, a read rule: the query is cleaned by the covariance of the stored keys, q̃ = (I − λΣ) q; the write is untouched."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from needlework.fields import Inside
from needlework.layers.config import Config, Width
from needlework.layers.norm import wide
from needlework.layers.state import fixed_size
from needlework.layers.write import WriteConfig
from needlework.ops.ccq import chunk_ccq
from needlework.ops.ccq.state import CcqOutput
from needlework.probe import probe


class ReadConfig(Config):
    """Base of the read rules' configs: `build(width, write)` makes the module: q, k, g -> the query that reads, the rule's state."""

    def build(self, width: Width, write: WriteConfig) -> "ReadRule":
        raise NotImplementedError


class ReadRule(nn.Module):
    """Base of the read rules: `forward(*logits, q, k, g=, **carry) -> (q̃ [B T HV K], state)`, logits what `maps` give."""

    @property
    def maps(self) -> tuple[nn.Module, ...]:
        """Of the layer's input."""
        return ()

    def state_size(self, dtype: torch.dtype) -> int:
        """Bytes of one sequence's state."""
        return 0


@dataclass(frozen=True, kw_only=True)
class Plain(ReadConfig):
    """The raw query reads: no parameters and no state.

    >>> from needlework.layers import Delta, Plain, Recurrent
    >>> Recurrent(heads=4, key_dim=16, value_dim=16, write=Delta()).read == Plain()
    True
    """

    kind = "plain"

    def build(self, width: Width, write: WriteConfig) -> ReadRule:
        return _Plain()


class _Plain(ReadRule):
    def forward(self, q, k, *, g, **carry) -> tuple[Tensor, None]:
        return q, None


@dataclass(frozen=True, kw_only=True)
class CCQ(ReadConfig):
    """CCQ: the query that reads is cleaned of the directions that many keys share. The write is untouched.

        q̃ = q − λ Σ q,    λ = σ(W_λ x + b_λ) a head,    o = scale · Sᵀ q̃

    Σ [K K] is the covariance of the unit keys so far. The state holds it, the keys' mean and their count: K² + K + 1 a key head,
    float32.

    start: λ at initialisation, in (0, 1).
    aligned: Σ forgets as the state does, with the weights e^{ḡ}, ḡ the mean decay of a head.
    Raises ValueError where the layer is built on CARVE with aligned=True or with more than one row a token.

    >>> import torch
    >>> from needlework.layers import CCQ, QDelta, Recurrent
    >>> mixer = Recurrent(heads=4, key_dim=16, value_dim=16, write=QDelta(), read=CCQ()).build(64)
    >>> mixer(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "ccq"
    start: Inside = 0.1
    aligned: bool = False

    def build(self, width: Width, write: WriteConfig) -> ReadRule:
        if self.aligned and write.kind == "carve":
            raise ValueError(
                "ccq: aligned=True needs the decay before the read, and CARVE's decay depends on its own outputs; use aligned=False"
            )
        if write.kind == "carve" and write.write_rank > 1:
            raise ValueError(f"ccq: cleans against one key a token, got carve with write_rank={write.write_rank}")
        return _CCQ(self, width)


class _CCQ(ReadRule):
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

    def forward(self, logit, q, k, *, g, **carry) -> CcqOutput:
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
