"""CCQ, a read rule: the query is cleaned by the covariance of the stored keys, q̃ = (I − λΣ) q; the write is untouched."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from needlework.fields import Inside, Portion
from needlework.layers.batch import Batch
from needlework.layers.config import Config, Width
from needlework.layers.norm import wide
from needlework.layers.projection import Projection
from needlework.layers.state import Part, fixed
from needlework.layers.write import Factor, WriteConfig
from needlework.ops.ccq import chunk_ccq, step_ccq
from needlework.ops.ccq.state import CcqOutput, CurvatureState
from needlework.probe import probe


class ReadConfig(Config):
    """Base of the read rules' configs: `build(width, write)` makes the module: q, k, g -> the query that reads, the rule's state."""

    def build(self, width: Width, write: WriteConfig) -> "ReadRule":
        raise NotImplementedError


class ReadRule(nn.Module):
    """Base of the read rules: `forward(op, *logits, q, k, g=) -> (q̃ [B T HV K], state)`, logits what `maps` give, op `chunk` with its
    states and where sequences end, as a write rule is given its own (`layers/write.py`)."""

    chunk: Callable[..., Any]

    @property
    def maps(self) -> tuple[nn.Module, ...]:
        """Of the layer's input."""
        return ()

    def held(self, dtype: torch.dtype) -> dict[str, Part]:
        """The tensors of one sequence's state, the model in `dtype`."""
        return {}

    def serve(
        self, *logits: Tensor, q: Tensor, k: Tensor, g: Tensor | None, tables: Mapping[str, Tensor], batch: Batch
    ) -> Tensor:
        """q̃ [T HV K] of tokens [T …]; the tables of `held` advance in place."""
        raise NotImplementedError


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


def raw(q: Tensor, **states: object) -> tuple[Tensor, None]:
    """The query as it is, by an op without a state."""
    return q, None


class _Plain(ReadRule):
    chunk = staticmethod(raw)

    def forward(self, op, q, k, *, g) -> tuple[Tensor, None]:
        return op(q)

    def serve(
        self, *logits: Tensor, q: Tensor, k: Tensor, g: Tensor | None, tables: Mapping[str, Tensor], batch: Batch
    ) -> Tensor:
        return q


@dataclass(frozen=True, kw_only=True)
class CCQ(ReadConfig):
    """CCQ: the query that reads is cleaned of the directions that many keys share. The write is untouched.

        q̃ = q − λ Σ q,    λ = σ(W_λ x + b_λ) a head,    o = scale · Sᵀ q̃

    Σ [K K] is the covariance of the unit keys so far. The state holds it, the keys' mean and their count: K² + K + 1 a key head,
    float32.

    start: λ at initialisation, in (0, 1).
    aligned: Σ forgets as the state does, with the weights e^{ḡ}, ḡ the mean decay of a head.
    factor: λ is multiplied by a number a head that is learned in [0, 1] and starts here; 0 starts as the raw query. None: it is not.
    Raises ValueError where the layer is built on CARVE with aligned=True, on more than one row a token, or on a rule that normalises.

    >>> import torch
    >>> from needlework.layers import CCQ, QDelta, Recurrent
    >>> mixer = Recurrent(heads=4, key_dim=16, value_dim=16, write=QDelta(), read=CCQ()).build(64)
    >>> mixer(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "ccq"
    start: Inside = 0.1
    aligned: bool = False
    factor: Portion | None = None

    def build(self, width: Width, write: WriteConfig) -> ReadRule:
        if self.aligned and write.kind == "carve":
            raise ValueError(
                "ccq: aligned=True needs the decay before the read, and CARVE's decay depends on its own outputs; use aligned=False"
            )
        if write.write_rank > 1:
            raise ValueError(f"ccq: cleans against one key a token, got {write.kind} with {write.write_rank} rows a token")
        if write.normalise:
            raise ValueError(
                f"ccq: {write.kind} has normalise=True, expected False: a cleaned query can make the denominator 0 or less"
            )
        return _CCQ(self, width)


class _CCQ(ReadRule):
    chunk = staticmethod(chunk_ccq)

    def __init__(self, config: CCQ, width: Width):
        super().__init__()
        self.config, self.width = config, width
        self.project = Projection(width.dim, width.value_heads, bias=False)
        self.bias = nn.Parameter(torch.empty(width.value_heads))
        self.factor = None if config.factor is None else Factor(config.factor, width.value_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.bias, math.log(self.config.start / (1 - self.config.start)))

    @property
    def maps(self) -> tuple[nn.Module, ...]:
        """Of the layer's input: what they give comes first in `forward`."""
        return (self.project,)

    def forward(self, op, logit, q, k, *, g) -> CcqOutput:
        """logit [B T HV], q and unit k [B T H K], g [B T HV], [B T HV K] or None -> q̃ [B T HV K] and the statistic."""
        return op(q, probe("ccq.k", k), *self._strengths(logit, q, g))

    def serve(
        self, *logits: Tensor, q: Tensor, k: Tensor, g: Tensor | None, tables: Mapping[str, Tensor], batch: Batch
    ) -> Tensor:
        (logit,) = logits
        eta, g = self._strengths(logit, q, g)
        state = CurvatureState(**tables)
        chunk = lambda **tokens: chunk_ccq(**tokens, state=state).q
        return batch.on_slots(partial(step_ccq, state=state), chunk, q=q, k=k, eta=eta, g=g)

    def _strengths(self, logit: Tensor, q: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """λ [.. HV] of the logit and, where the statistic forgets, its log decay a key head [.. H]."""
        eta = torch.sigmoid(wide(logit) + self.bias)
        eta = eta if self.factor is None else self.factor(eta)
        if g is None or not self.config.aligned:
            return eta, None
        g = g.mean(-1) if g.dim() == q.dim() else g
        return eta, g.unflatten(-1, (self.width.heads, -1)).mean(-1)

    def held(self, dtype: torch.dtype) -> dict[str, Part]:
        H, K = self.width.heads, self.width.key_dim
        return {name: Part(shape, fixed(dtype)) for name, shape in {"C": (H, K, K), "mean": (H, K), "n": (H,)}.items()}
