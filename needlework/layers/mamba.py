"""Mamba, the first, a mixer of its own: a state of N numbers for each of I channels, as rows of the additive engine.

Each channel is a value head of one number, and all share one key head: right, and wasteful on matrix units.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from needlework.fields import AtLeastTwo, Count
from needlework.layers.batch import Batch
from needlework.layers.config import Mixer, MixerConfig
from needlework.layers.conv import ShortConv, conv_held
from needlework.layers.gates import start_steps
from needlework.layers.norm import wide
from needlework.layers.projection import OutProjection, Projection
from needlework.layers.state import Held, Part, fixed
from needlework.ops.delta import chunk_delta, step_delta


@dataclass(frozen=True, kw_only=True)
class Mamba(MixerConfig):
    """Mamba (arXiv 2312.00752), a mixer: h [B T D] -> y [B T D].

        (x, z) = W_in h,    x ← silu(conv(x)),    (δ, B, C) = W_x x,    Δ = softplus(W_Δ δ + b) [I]
        S_t = e^{Δ_t A} ⊙ S_{t-1} + (Δ_t ⊙ x_t) B_tᵀ,    y = W_out( (S_t C_t + D ⊙ x_t) ⊙ silu(z_t) ),    A = −e^{A_log} [I N]

    channels: I; None: 2 D. state: N numbers a channel. rank: of δ; None: D/16, rounded up.
    width: taps of the convolution, at least 2; it has a bias.
    The state is S [I N] in float32 and the last width − 1 inputs of the convolution.

    >>> import torch
    >>> from needlework.layers import Mamba
    >>> mixer = Mamba().build(64)
    >>> mixer(torch.randn(2, 100, 64))[0].shape, mixer.state_size(1000, torch.bfloat16)
    (torch.Size([2, 100, 64]), 8960)
    """

    kind = "mamba"
    channels: Count | None = None
    state: Count = 16
    rank: Count | None = None
    width: AtLeastTwo = 4

    def build(self, dim: int, layer: int = 0) -> Mixer:
        """The module for h [B T dim]; layer makes no difference.

        `module(h, state=None, cu_seqlens=None, output_final_state=False)` returns y [B T dim] and the state, or None.
        """
        return _Mamba(self, dim)


class MambaState(NamedTuple):
    """Fixed: the convolution's last inputs [N width-1 I], and S [N I state 1] as the engine has it."""

    conv: Tensor
    S: Tensor


class _Mamba(Mixer):
    def __init__(self, config: Mamba, dim: int):
        super().__init__()
        self.config = config
        self.channels, self.rank = config.channels or 2 * dim, config.rank or -(-dim // 16)
        self.in_proj = Projection(dim, 2 * self.channels, bias=False)
        self.conv = ShortConv(width=config.width, bias=True).build(self.channels)
        self.x_proj = Projection(self.channels, self.rank + 2 * config.state, bias=False)
        self.dt_proj = _Steps(self.rank, self.channels)
        self.A_log = nn.Parameter(torch.empty(self.channels, config.state))
        self.D = nn.Parameter(torch.empty(self.channels))
        self.out_proj = OutProjection(self.channels, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.A_log.copy_(torch.arange(1, self.config.state + 1).log())
            self.D.fill_(1)

    def forward(
        self,
        x: Tensor,
        state: MambaState | None = None,
        cu_seqlens: Tensor | None = None,
        output_final_state: bool = False,
    ) -> tuple[Tensor, MambaState | None]:
        x, z = self.in_proj(x).chunk(2, -1)
        (x,), conv = self.conv((x,), None if state is None else state.conv, cu_seqlens)
        o, S = chunk_delta(
            *self._rows(x), scale=1.0, initial_state=None if state is None else state.S, cu_seqlens=cu_seqlens,
            output_final_state=output_final_state,
        )  # fmt: skip
        return self._out(o, x, z), None if S is None else MambaState(conv, S)

    def serve(self, x: Tensor, tables: Mapping[str, Tensor], batch: Batch) -> Tensor:
        x, z = self.in_proj(x).chunk(2, -1)
        (x,) = self.conv.serve(x, (self.channels,), tables["conv"], batch)
        rows, given = self._rows(x)._asdict(), {"state": tables["S"], "scale": 1.0}
        o = batch.on_slots(partial(step_delta, **given), lambda **rows: chunk_delta(**rows, **given).o, **rows)
        return self._out(o, x, z)

    def held(self, dtype: torch.dtype) -> Held:
        S = Part((self.channels, self.config.state, 1), fixed(dtype))
        return Held(conv_held(ShortConv(width=self.config.width), self.channels, dtype) | {"S": S}, {})

    def _rows(self, x: Tensor) -> "_Rows":
        """Of x [.. I] after the convolution."""
        delta, B, C = self.x_proj(x).split([self.rank, self.config.state, self.config.state], -1)
        dt = self.dt_proj(delta)
        v, g = (dt * x).to(x.dtype), -dt[..., None] * wide(self.A_log).exp()
        return _Rows(C[..., None, :], B[..., None, :], v[..., None], g)

    def _out(self, o: Tensor, x: Tensor, z: Tensor) -> Tensor:
        y = wide(o[..., 0]) + wide(self.D) * x
        return self.out_proj((y * F.silu(z)).to(x.dtype))


class _Rows(NamedTuple):
    """What the engine is given."""

    q: Tensor  # [.. 1 N]
    k: Tensor  # [.. 1 N]
    v: Tensor  # [.. I 1]
    g: Tensor  # [.. I N]


class _Steps(nn.Module):
    """Δ = softplus(W δ + b), [.. I] in float32, of δ [.. R]: starts at the published steps, W uniform in ±R^-1/2."""

    def __init__(self, rank: int, channels: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(channels, rank)), nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        start_steps(self.bias)

    def forward(self, delta: Tensor) -> Tensor:
        return F.softplus(wide(F.linear(delta, self.weight)) + self.bias)
