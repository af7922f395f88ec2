"""CARVE: the erase gate sees what memory holds."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from needlework.fields import Count, Natural, Positive
from needlework.layers.config import Width
from needlework.layers.gates import half_lives, inverse_softplus
from needlework.layers.norm import Later, wide
from needlework.layers.projection import Map, Projection, side_by_side
from needlework.layers.state import Part, fixed
from needlework.layers.write import WriteConfig, WriteRule
from needlework.ops.carve import chunk_carve, step_carve
from needlework.ops.carve.arguments import Prediction
from needlework.ops.carve.state import CarveState
from needlework.probe import probe


@dataclass(frozen=True, kw_only=True)
class Carve(WriteConfig):
    """CARVE: a delta rule whose erase gate b sees what the memory gave in the last content chunk.

        S_t = Diag(e^g ⊙ (1 − b)) S_{t-1} + w k (v − S_{t-1}ᵀ k)ᵀ,    b = σ(b_x + W₂ tanh(W₁ m)),    S [K V] a head, float32

    m [V] is the mean output of the last whole content chunk. g and b_x are one a key channel, w one a head.

    rank: r of W₁ [r V] and W₂ [K r]; 0 for a gate that is blind to the memory, b = σ(b_x).
    content_chunk: L tokens, a parameter of the model: another L is another model.
    prediction: the state that v is compared with: "previous" is S_{t-1}, "decayed" is Diag(e^g ⊙ (1 − b)) S_{t-1}.
    write_rank: R rows written a token.
    half_life: the range, in tokens, over which the erase gate's and the decay's starts are spread in log over the channels.
    Raises ValueError where the layer is built with value_heads other than heads.

    >>> import torch
    >>> from needlework.layers import Carve, Recurrent, Silu
    >>> mixer = Recurrent(heads=4, key_dim=16, value_dim=16, conv=Silu(), output_gate=False, write=Carve()).build(64)
    >>> mixer(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "carve"
    rank: Natural = 16
    content_chunk: Count = 64
    prediction: Prediction = "previous"
    write_rank: Count = 1
    half_life: tuple[Positive, Positive] = (32.0, 8192.0)

    def build(self, width: Width) -> WriteRule:
        if width.value_heads != width.heads:
            raise ValueError(
                f"carve: value_heads is {width.value_heads}, expected heads = {width.heads}: CARVE has no grouped values"
            )
        return _Carve(self, width)


class _Carve(WriteRule[Carve]):
    """f and b_x come through a bottleneck of rank V, as in KDA; W₁ and W₂ are shared by the heads; W₂ starts at zero."""

    chunk, step = staticmethod(chunk_carve), staticmethod(step_carve)

    def __init__(self, config: Carve, width: Width):
        super().__init__(config, width)
        self.cut = config.content_chunk
        D, H, K, V = width.dim, width.heads, width.key_dim, width.value_dim
        self.f = nn.Sequential(Projection(D, V, bias=False), Projection(V, H * K, bias=False))
        self.b = nn.Sequential(Projection(D, V, bias=False), Projection(V, H * K, bias=False))
        self.w = Projection(D, H, bias=False)
        self.A_log = nn.Parameter(torch.empty(H, K))
        self.dt_bias = nn.Parameter(torch.empty(H, K))
        if config.rank:
            self.w1 = nn.Parameter(torch.empty(config.rank, V))
            self.w2 = nn.Parameter(torch.empty(K, config.rank))
        self.register_buffer("erase_bias", torch.empty(H, K))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        h = half_lives(*self.config.half_life, *self.A_log.shape)
        with torch.no_grad():
            self.erase_bias.copy_(torch.expm1(math.log(2) / h).log())  # σ(−bias) = 2^{−1/h}
            self.A_log.zero_()
            self.dt_bias.copy_(inverse_softplus(math.log(2) / h))
            if self.config.rank:
                self.w1.normal_(std=self.w1.shape[1] ** -0.5)
                self.w2.zero_()

    def gates(self, x: Tensor | Later, *beside: Map) -> tuple[dict[str, Tensor | None], list[Tensor]]:
        """g is None: what decays depends on what was read. f and b are as their maps give them: the op widens them."""
        *others, f, b, w = side_by_side(x, *beside, self.f, self.b, self.w)
        heads = (self.width.heads, -1)
        return {"g": None, "f": f.unflatten(-1, heads), "b": b.unflatten(-1, heads), "w": wide(w)}, others

    def call(self, op, q, k, v, *, g, f, b, w, q_read):
        w1, w2 = self.feedback()
        inputs = {
            "q": q_read, "k": k, "v": v, "f": f, "b": b, "w": w,
            "A_log": self.A_log, "dt_bias": self.dt_bias, "w1": w1, "w2": w2, "b_bias": self.erase_bias,
        }  # fmt: skip
        for name, value in inputs.items():
            probe(f"carve.{name}", value)
        settings = {"content_chunk": self.config.content_chunk, "prediction": self.config.prediction, "scale": self.width.scale}
        return op(**inputs, **settings)

    def forward(
        self, op: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, **gates: Any
    ) -> tuple[Tensor, CarveState | None]:
        o, state = super().forward(op, q, k, v, **gates)
        return probe("carve.o", o), state

    def feedback(self) -> tuple[Tensor, Tensor]:
        """W₁ [r V] and W₂ [K r]; the op's blind layer is W₂ = 0."""
        if self.config.rank:
            return self.w1, self.w2
        zeros = partial(torch.zeros, dtype=self.w.weight.dtype, device=self.w.weight.device)
        return zeros(1, self.width.value_dim), zeros(self.width.key_dim, 1)

    def held(self, dtype: torch.dtype) -> dict[str, Part]:
        H, K, V = self.width.heads, self.width.key_dim, self.width.value_dim
        shapes = {"S": (H, K, V), "m": (H, V), "total": (H, V)}
        return {name: Part(shape, fixed(dtype)) for name, shape in shapes.items()} | {"position": Part((), torch.int64)}

    def state(self, tables: Mapping[str, Tensor]) -> CarveState:
        return CarveState(**tables)
