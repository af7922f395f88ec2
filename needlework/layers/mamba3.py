"""Mamba-3, a mixer with its own projections: no convolution, keys and queries that turn, rows written by the trapezoidal rule."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from needlework.fields import Count, Positive
from needlework.layers.batch import Batch
from needlework.layers.config import Mixer, MixerConfig
from needlework.layers.gates import inverse_softplus
from needlework.layers.norm import RMSNorm, rms, wide
from needlework.layers.projection import OutProjection, Projection, side_by_side
from needlework.layers.state import Held, Part, fixed
from needlework.ops.mamba3 import Mamba3State, chunk_mamba3, step_mamba3
from needlework.ops.mamba3.arguments import Pairs
from needlework.probe import probe

EPS = 1e-5  # of its norms, as published
LEAST = 1e-4  # of −A


@dataclass(frozen=True, kw_only=True)
class Mamba3(MixerConfig):
    """Mamba-3, one row a token (SISO) or R (MIMO): x [B T D] -> y [B T D]. Its state has a fixed size.

        S_t = e^{Δ_t A_t} (S_{t-1} + (1 − λ_t) Δ_t B̄_{t-1} x_{t-1}ᵀ) + λ_t Δ_t B̄_t x_tᵀ,    y = W_o( (S_tᵀ C̄_t + D x_t) ⊙ silu(z_t) )
        B̄ = R(Θ)(RMSNorm(B) + b_B),    C̄ = R(Θ)(RMSNorm(C) + b_C),    Θ_t = Θ_{t-1} + π tanh(a_t) Δ_t

    z, x, B, C, a and the logits of Δ, A and λ are maps of the layer's input. MIMO: x_r = x ⊙ X_r, z_r = z ⊙ Z_r, and
    y = Σ_r O_r ⊙ (S_tᵀ C̄_r + D x_r) ⊙ silu(z_r).

    heads: H, of x, z and the state, of value_dim = P channels each; the paper has H P = 2 D.
    key_dim: N, of B and C; even.
    groups: G, the heads of B and C before their biases; a divisor of heads.
    rank: R.
    pairs: which channels of B and C turn together: (2i, 2i + 1) "even", or (i, i + N / 2) "halves", as published MIMO layers have it.
    turning: "half" of the pairs, rounded down, at least one, or "all".
    decay: A = −max(f(logit), 1e-4), f the "softplus" of the first release, or "rational", 1 + x for x >= 0 and 1 / (1 − x) below.
    output_norm: an RMS norm of each head before the gate, with weight.
    half_life: where every head starts, in tokens; None: the published start, Δ from 1e-3 to 1e-1.
    Raises ValueError for a field out of its range, and where the layer is built with an odd key_dim or heads that groups do not divide.

    >>> import torch
    >>> from needlework.layers import Mamba3
    >>> mixer = Mamba3(heads=8, key_dim=32, value_dim=16).build(64)
    >>> y, state = mixer(torch.randn(2, 100, 64), output_final_state=True)  # [2 100 64] and the state after token 99
    >>> mixer(torch.randn(2, 1, 64), state)[0].shape  # the next token
    torch.Size([2, 1, 64])
    >>> Mamba3(heads=8, key_dim=32, value_dim=16, rank=4, pairs="halves").build(64).mimo_x.shape
    torch.Size([8, 4, 16])
    """

    kind = "mamba3"
    heads: Count
    key_dim: Count
    value_dim: Count
    groups: Count = 1
    rank: Count = 1
    pairs: Pairs = "even"
    turning: Literal["half", "all"] = "half"
    decay: Literal["softplus", "rational"] = "softplus"
    output_norm: bool = False
    half_life: Positive | None = None

    def build(self, dim: int, layer: int = 0) -> Mixer:
        """The module for x [B T dim]; layer makes no difference.

        `module(x, state=None, cu_seqlens=None, output_final_state=False)` returns y [B T dim] and the state, or None.
        """
        return _Mamba3(self, dim)


class _Mamba3(Mixer):
    def __init__(self, config: Mamba3, dim: int):
        super().__init__()
        H, G, R, N, P = config.heads, config.groups, config.rank, config.key_dim, config.value_dim
        if N % 2:
            raise ValueError(f"mamba3: key_dim is {N}, expected an even number: pairs of channels turn")
        if H % G:
            raise ValueError(f"mamba3: heads is {H}, expected a multiple of groups = {G}")
        self.config, self.angles = config, N // 2 if config.turning == "all" else max(N // 4, 1)
        linear = partial(Projection, dim, bias=False)
        self.z_proj, self.x_proj = linear(H * P), linear(H * P)
        self.b_proj, self.c_proj = linear(R * G * N), linear(R * G * N)
        self.dt_proj, self.a_proj, self.lam_proj, self.angle_proj = linear(H), linear(H), linear(H), linear(self.angles)
        self.b_norm, self.c_norm = RMSNorm(N, EPS), RMSNorm(N, EPS)
        self.b_bias, self.c_bias = (nn.Parameter(torch.empty(H, R, N)) for _ in range(2))
        self.dt_bias, self.D = (nn.Parameter(torch.empty(H)) for _ in range(2))
        rows = (nn.Parameter(torch.empty(H, R, P)) if R > 1 else None for _ in range(3))
        self.mimo_x, self.mimo_z, self.mimo_o = rows
        self.norm_weight = nn.Parameter(torch.empty(H, P)) if config.output_norm else None
        self.out_proj = OutProjection(H * P, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        c = self.config
        with torch.no_grad():
            for ones in (self.b_bias, self.c_bias, self.D, self.mimo_z, self.norm_weight):
                if ones is not None:
                    ones.fill_(1)
            for shares in (self.mimo_x, self.mimo_o):
                if shares is not None:
                    shares.fill_(1 / c.rank)
            if c.half_life is None:
                self.dt_bias.uniform_(math.log(1e-3), math.log(1e-1)).exp_()
            else:
                self.dt_bias.fill_(math.log(2) / c.half_life).div_(self._decay(torch.zeros_like(self.dt_bias)))
            self.dt_bias.copy_(inverse_softplus(self.dt_bias))

    def forward(
        self,
        x: Tensor,
        state: Mamba3State | None = None,
        cu_seqlens: Tensor | None = None,
        output_final_state: bool = False,
    ) -> tuple[Tensor, Mamba3State | None]:
        """x [B T D] -> y [B T D] and, if asked for, the state after the last token (of every packed sequence)."""
        tokens = self._tokens(x)
        carry = {"output_final_state": output_final_state, "cu_seqlens": cu_seqlens}
        o, state = self._call(chunk_mamba3, **tokens, initial_state=state, **carry)
        return self._out(x, o, tokens["v"]), state

    def serve(self, x: Tensor, tables: Mapping[str, Tensor], batch: Batch) -> Tensor:
        tokens, state = self._tokens(x), Mamba3State(**tables)
        chunk = lambda **rows: self._call(chunk_mamba3, **rows, state=state).o
        step = lambda **rows: self._call(step_mamba3, **rows, state=state)
        return self._out(x, batch.on_slots(step, chunk, **tokens), tokens["v"])

    def held(self, dtype: torch.dtype) -> Held:
        H, R, N, P = self.config.heads, self.config.rank, self.config.key_dim, self.config.value_dim
        shapes = {"S": (H, N, P), "k": (H, R, N), "v": (H, P), "angle": (H, self.angles)}
        kept = {name: Part(shape, fixed(dtype)) for name, shape in shapes.items()}
        return Held(kept, {}, captured="all" if R == 1 else "steps")

    def _tokens(self, x: Tensor) -> dict[str, Tensor]:
        """The op's tensors of tokens x [.. D]."""
        maps = self.b_proj, self.c_proj, self.dt_proj, self.a_proj, self.lam_proj, self.angle_proj
        b, c, dt, a, lam, angle = side_by_side(x, *maps)
        k, q = self._keys(b, self.b_norm), self._keys(c, self.c_norm)
        v = self.x_proj(x).unflatten(-1, (self.config.heads, -1))
        dt = probe("mamba3.dt", F.softplus(wide(dt) + self.dt_bias))
        g, lam = -dt * self._decay(wide(a)).clamp(min=LEAST), probe("mamba3.lam", torch.sigmoid(wide(lam)))
        return {"q": q, "k": k, "v": v, "g": g, "dt": dt, "lam": lam, "angle": wide(angle)}

    def _keys(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """[.. R·G·N] -> [.. G N], or [.. G R N] where there are rows."""
        x = norm(x.unflatten(-1, (self.config.rank, self.config.groups, -1))).to(x.dtype)
        return x.squeeze(-3) if self.config.rank == 1 else x.transpose(-3, -2)

    def _decay(self, logit: Tensor) -> Tensor:
        """f of A's logit."""
        if self.config.decay == "softplus":
            return F.softplus(logit)
        return logit.clamp(min=0) + 1 / (1 - logit.clamp(max=0))

    def _call(self, op: Callable[..., Any], **given: Any) -> Any:
        q_bias, k_bias = self.c_bias, self.b_bias
        if self.config.rank == 1:
            q_bias, k_bias = q_bias.squeeze(1), k_bias.squeeze(1)
        return op(**given, q_bias=q_bias, k_bias=k_bias, mimo_x=self.mimo_x, pairs=self.config.pairs)

    def _out(self, x: Tensor, o: Tensor, v: Tensor) -> Tensor:
        """y [.. D] of what was read, o [.. H P] or [.. H R P], and of the op's values."""
        o, z = probe("mamba3.o", o), self.z_proj(x).unflatten(-1, (self.config.heads, -1))
        if self.mimo_x is None or self.mimo_z is None or self.mimo_o is None:
            y = self._normed(o + self.D[:, None] * v) * F.silu(z)
        else:
            y = o + self.D[:, None, None] * (v[..., None, :] * self.mimo_x)
            y = (self.mimo_o * self._normed(y) * F.silu(z[..., None, :] * self.mimo_z)).sum(-2)
        return self.out_proj(y.flatten(-2).to(x.dtype))

    def _normed(self, y: Tensor) -> Tensor:
        if self.norm_weight is None:
            return y
        weight = self.norm_weight if self.mimo_x is None else self.norm_weight[:, None]
        return rms(y, EPS) * weight
