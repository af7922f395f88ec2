"""Causal depthwise convolutions: short convolution, canon, and LFM2's gated convolution as a mixer of its own.

y_t = b + Σ_j w_j ⊙ x_{t-j},  j < width          the last width − 1 inputs are the state; a document starts with zeros

To serve, states lie in a table of slots [S width-1 C], which changes in place and has no gradient.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from needlework.fields import AtLeastTwo, Count
from needlework.layers.batch import Batch
from needlework.layers.config import Config, Mixer, MixerConfig
from needlework.layers.norm import Later
from needlework.layers.projection import OutProjection, Projection, ZeroProjection, mapped, side_by_side
from needlework.layers.state import Held, Part
from needlework.ops.conv.op import After, causal_conv, causal_conv_slots, step_conv
from needlework.ops.unit.reference import unit_heads


class CausalConv(nn.Module):
    """Depthwise: weight [C 1 width], newest tap last as in torch.nn.Conv1d, and bias [C] or None."""

    after: After = "none"

    def __init__(self, channels: int, width: int, bias: bool = False):
        super().__init__()
        if width < 2:
            raise ValueError(f"width: got {width}, expected at least 2 taps")
        self.width = width
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.register_parameter("bias", nn.Parameter(torch.empty(channels)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.width**-0.5  # torch.nn.Conv1d's default for a fan-in of `width`
        for p in self.parameters():
            nn.init.uniform_(p, -bound, bound)

    def forward(
        self, parts: Sequence[Tensor], state: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:  # fmt: skip
        """Each of `parts` [B T ·], which share the channels in their order, and the new state [N width-1 C].

        state: the inputs before; T may be below the width. Results have their part's dtype: under autocast, where the weights are
        wider, sums are made in theirs and what reads the result stays in half.
        """
        sizes = [x.shape[-1] for x in parts]
        weights = self.weight[:, 0].split(sizes)
        states = [None] * len(parts) if state is None else state.split(sizes, -1)
        biases = [None] * len(parts) if self.bias is None else self.bias.split(sizes)
        each = zip(parts, weights, biases, states, strict=True)
        made = [causal_conv(x, w, past, cu_seqlens, bias=b, after=self.after) for x, w, b, past in each]
        return tuple(y for (y,), _ in made), torch.cat([past for _, past in made], -1)

    def of_maps(
        self, x: Tensor, maps: Sequence[nn.Linear], sizes: Sequence[int], state: Tensor | None = None, cu_seqlens: Tensor | None = None,
        *, unit: Sequence[int] | None = None,
    ) -> tuple[tuple[Tensor, ...], Tensor]:  # fmt: skip
        """The same of maps of x [B T D] to `sizes` channels, made by one product: the convolution's gradient is that product's.

        unit: of each map the channels of a head, which gets unit norm, 0: none does; None: nowhere.
        """
        (made,) = side_by_side(x, tuple(maps))
        settings: dict[str, Any] = {"bias": self.bias, "parts": sizes, "unit": unit, "after": self.after}
        return causal_conv(made, self.weight[:, 0], state, cu_seqlens, **settings)

    def serve(self, x: Tensor, sizes: Sequence[int], table: Tensor | None, batch: Batch) -> tuple[Tensor, ...]:
        """Tokens x [T C] of all channels in parts of `sizes`; the table advances in place."""
        assert table is not None
        settings: dict[str, Any] = {"weight": self.weight[:, 0], "bias": self.bias, "state": table}
        settings |= {"parts": sizes, "after": self.after}
        return batch.on_slots(partial(step_conv, **settings), partial(causal_conv_slots, **settings), x=x)


class ConvConfig(Config):
    """Base of what q, k and v may pass before a rule: `build(channels)` makes it, with `width` taps."""

    if TYPE_CHECKING:  # a field, and a frozen one is read-only

        @property
        def width(self) -> int: ...

    def build(self, channels: int) -> "CausalConv | _Silu":
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ShortConv(ConvConfig):
    """The short convolution of DeltaNet-like layers, one filter a channel: x [B T C] -> y [B T C].

        y_t = silu( b + Σ_{j < width} w_j ⊙ x_{t−j} )

    width: taps, at least 2.
    bias: with b, as Mamba has it.

    >>> from needlework.layers import Delta, Recurrent, ShortConv
    >>> mixer = Recurrent(heads=4, key_dim=16, value_dim=16, write=Delta(), conv=ShortConv(width=3)).build(64)
    >>> mixer.conv.weight.shape  # q, k and v have 64 channels each
    torch.Size([192, 1, 3])
    """

    kind = "short_conv"
    width: AtLeastTwo = 4
    bias: bool = False

    def build(self, channels: int) -> CausalConv:
        return _ShortConv(channels, self.width, self.bias)


@dataclass(frozen=True, kw_only=True)
class Canon(ConvConfig):
    """ATMA's canon, one filter a channel: x [B T C] -> y [B T C].

        y_t = x_t + Σ_{j < width} w_j ⊙ x_{t−j}

    width: taps, at least 2.

    >>> import torch
    >>> from needlework.layers import Attention, Canon, Softmax
    >>> Attention(heads=4, head_dim=16, attend=Softmax(), conv=Canon()).build(64)(torch.randn(1, 9, 64))[0].shape
    torch.Size([1, 9, 64])
    """

    kind = "canon"
    width: AtLeastTwo = 4

    def build(self, channels: int) -> CausalConv:
        return _Canon(channels, self.width)


@dataclass(frozen=True, kw_only=True)
class Silu(ConvConfig):
    """silu(x), without a convolution and so without a state, as CARVE has it: x [B T C] -> y [B T C].

    >>> from needlework.layers import Carve, Recurrent, Silu
    >>> mixer = Recurrent(heads=4, key_dim=16, value_dim=16, write=Carve(), conv=Silu()).build(64)
    >>> sum(p.numel() for p in mixer.conv.parameters())
    0
    """

    kind = "silu"
    width = 1

    def build(self, channels: int) -> "_Silu":
        return _Silu()


class _ShortConv(CausalConv):
    after = "silu"


class _Canon(CausalConv):
    after = "add"


class _Silu(nn.Module):
    def forward(
        self, parts: Sequence[Tensor], state: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], None]:
        return tuple(F.silu(x) for x in parts), None

    def of_maps(
        self,
        x: Tensor,
        maps: Sequence[nn.Linear],
        sizes: Sequence[int],
        state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        unit: Sequence[int] | None = None,
    ) -> tuple[tuple[Tensor, ...], None]:
        y, _ = self([m(x) for m in maps])
        return y if unit is None else tuple(map(unit_heads, y, unit)), None

    def serve(self, x: Tensor, sizes: Sequence[int], table: Tensor | None, batch: Batch) -> tuple[Tensor, ...]:
        return tuple(F.silu(part) for part in x.split(sizes, -1))  # each in one piece, as a step takes it


def conv_held(conv: "ConvConfig | GatedConv | None", channels: int, dtype: torch.dtype) -> dict[str, Part]:
    """The last inputs of one sequence, by name, of a layer that convolves."""
    return {} if conv is None or conv.width == 1 else {"conv": Part((conv.width - 1, channels), dtype)}


@dataclass(frozen=True, kw_only=True)
class GatedConv(MixerConfig):
    """LFM2's gated convolution, a mixer: h [B T D] -> y [B T D]. Its state is the last width − 1 inputs of the convolution.

        (B, C, x) = W_in h,    y = W_out( C ⊙ conv(B ⊙ x) )

    width: taps of the convolution, at least 2.
    channels: of B, C and x; None: D.
    bias: in both projections.
    published_init: W_in starts at zero, as in ATMA's published models. Beside a W_out that starts at zero the layer is dead: only
        W_out's bias ever gets a gradient.

    >>> import torch
    >>> from needlework.layers import GatedConv
    >>> GatedConv().build(64)(torch.randn(2, 100, 64))[0].shape
    torch.Size([2, 100, 64])
    """

    kind = "gated_conv"
    width: AtLeastTwo = 3
    channels: Count | None = None
    bias: bool = True
    published_init: bool = False

    def build(self, dim: int, layer: int = 0) -> Mixer:
        """The module for h [B T dim]; layer makes no difference.

        `module(h, state=None, cu_seqlens=None, output_final_state=False)` returns y [B T dim] and the state, or None.
        """
        return _GatedConv(self, dim)


class _GatedConv(Mixer):
    late = True

    def __init__(self, config: GatedConv, dim: int):
        super().__init__()
        self.config, self.channels = config, config.channels or dim
        self.in_proj = (ZeroProjection if config.published_init else Projection)(dim, 3 * self.channels, bias=config.bias)
        self.conv = CausalConv(self.channels, config.width)
        self.out_proj = OutProjection(self.channels, dim, bias=config.bias)

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        output_final_state: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        b, c, x = self.in_proj(x).chunk(3, -1)
        (y,), state = self.conv((b * x,), state, cu_seqlens)
        return self.out_proj(c * y), state if output_final_state else None

    def serve(self, x: Tensor | Later, tables: Mapping[str, Tensor], batch: Batch) -> Tensor:
        b, c, x = mapped(x, self.in_proj).chunk(3, -1)
        (y,) = self.conv.serve(b * x, (self.channels,), tables["conv"], batch)
        return self.out_proj(c * y)

    def held(self, dtype: torch.dtype) -> Held:
        return Held(conv_held(self.config, self.channels, dtype), {})
