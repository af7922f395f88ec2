"""Mamba-2, a write rule: the additive write with one step size a head, which scales what is written and sets the decay."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from needlework.layers.config import Width
from needlework.layers.gates import start_steps
from needlework.layers.norm import Later, wide
from needlework.layers.projection import Map, Projection, side_by_side
from needlework.layers.write import WriteConfig, WriteRule
from needlework.ops.delta import chunk_delta, step_delta


@dataclass(frozen=True, kw_only=True)
class Mamba2(WriteConfig):
    """Mamba-2 (arXiv 2405.21060): a linear state with a step Δ a head and token, and a skip of its input.

        S_t = e^{ΔA} S_{t-1} + B_t (Δ x_t)ᵀ,    y_t = S_tᵀ C_t + D x_t,    A = −e^{A_log},    Δ = softplus(W_Δ h + dt_bias)

    C, B and x are the layer's q, k and v, after its convolution; A, D and Δ are one number a head; S [K V] a head, float32. The
    paper's layer is `Recurrent(heads=1, value_heads=dim // 32, key_dim=128, value_dim=64, write=Mamba2(), conv=ShortConv(bias=True),
    norm=GatedNorm())` in blocks without an MLP.

    >>> import torch
    >>> from needlework.layers import Mamba2, Recurrent
    >>> mixer = Recurrent(heads=1, value_heads=8, key_dim=32, value_dim=16, write=Mamba2()).build(64)
    >>> mixer(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "mamba2"
    unit_keys = False

    def build(self, width: Width) -> WriteRule:
        return _Mamba2(self, width)


class _Mamba2(WriteRule[Mamba2]):
    chunk, step = staticmethod(chunk_delta), staticmethod(step_delta)

    def __init__(self, config: Mamba2, width: Width):
        super().__init__(config, width)
        self.project = Projection(width.dim, width.value_heads, bias=False)
        self.A_log, self.dt_bias, self.D = (nn.Parameter(torch.empty(width.value_heads)) for _ in range(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.A_log.uniform_(1, 16).log_()
            self.D.fill_(1)
        start_steps(self.dt_bias)

    def gates(self, x: Tensor | Later, *beside: Map) -> tuple[dict[str, Tensor | None], list[Tensor]]:
        *others, logit = side_by_side(x, *beside, self.project)
        dt = F.softplus(wide(logit) + self.dt_bias)
        return {"g": -wide(self.A_log).exp() * dt, "dt": dt}, others

    def call(self, op, q, k, v, *, g, dt, q_read):
        return op(q, k, (dt[..., None] * v).to(v.dtype), g, q_read=q_read, scale=1.0)

    def forward(self, op, q, k, v, **gates):
        o, state = super().forward(op, q, k, v, **gates)
        return self._skipped(o, v), state

    def serve(self, q, k, v, tables, batch, **gates):
        return self._skipped(super().serve(q, k, v, tables, batch, **gates), v)

    def _skipped(self, o: Tensor, v: Tensor) -> Tensor:
        return (o + wide(self.D)[:, None] * v).to(o.dtype)
