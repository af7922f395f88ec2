"""Rotary positions: the halves a, b of a query or key turn against each other by position · frequency.

    (a, b) → (a cos θ − b sin θ, b cos θ + a sin θ),  θ = position · frequency        q·k then depends on the distance alone

Frequencies are made in the forward pass, so that nothing is stored.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from needlework.fields import Count, Positive
from needlework.layers.config import Config
from needlework.ops.runtime.custom_op import operator


def angles(positions: Tensor, frequencies: Tensor) -> Tensor:
    """cos and sin of position · frequency: [2 B T 1 d/2] of positions [B T] and frequencies [d/2]."""
    angle = positions[..., None, None].to(frequencies.dtype) * frequencies
    return torch.stack([angle.cos(), angle.sin()])


@operator
def rope_angles(positions: Tensor, frequencies: Tensor) -> Tensor:
    """`angles` as an operator: a compiler fuses those into what reads them and makes every angle again for each row and head, a sixth of a
    training step of 125M parameters. Of a decoding step's few rows that costs less than the launch of this.
    """
    return angles(positions, frequencies)


@torch.library.register_fake(rope_angles)
def _(positions, frequencies):
    return frequencies.new_empty(2, *positions.shape, 1, len(frequencies))


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """x [B T H d], positions [B T], frequencies [d/2]: the halves of x turn against each other by position · frequency."""
    cos, sin = (rope_angles if torch.is_grad_enabled() else angles)(positions, frequencies)
    a, b = x.to(frequencies.dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def _line(x: Tensor, n: int, last: float) -> Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.linspace(0, last, n, dtype=dtype, device=x.device)


def _usual(x: Tensor, base: float) -> Tensor:
    """base^{−2i/d}, i < d/2, for x [.. d]."""
    half = x.shape[-1] // 2
    return base ** -_line(x, half, 1 - 1 / half)


class PositionConfig(Config):
    """Base of the positions' configs: `config(x [B T H d], positions [B T]) -> [B T H d]`, in x's dtype.

    multiple: d is a multiple of it; ValueError for another d.
    """

    multiple: ClassVar[int]

    def check(self, d: int) -> None:
        """ValueError if vectors of d channels cannot be turned."""
        if d % self.multiple:
            raise ValueError(f"{self.kind}: got vectors of {d} channels, expected a multiple of {self.multiple}")

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Rope(PositionConfig):
    """Rotary positions of the usual frequencies: x [B T H d], positions [B T] -> [B T H d], d even.

        (a_i, b_i) → (a_i cos θ − b_i sin θ, b_i cos θ + a_i sin θ),    θ = position · base^{−2i/d},    i < d/2

    base: of the frequencies; 10,000 as in Llama.
    Raises ValueError for an odd d.

    >>> import torch
    >>> from needlework.layers import Rope
    >>> x, positions = torch.ones(1, 2, 1, 4), torch.tensor([[0, 1]])
    >>> Rope()(x, positions)[0, :, 0]
    tensor([[ 1.0000,  1.0000,  1.0000,  1.0000],
            [-0.3012,  0.9900,  1.3818,  1.0099]])
    """

    kind = "rope"
    multiple = 2
    base: Positive = 10_000.0

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        self.check(x.shape[-1])
        return rotate(x, positions, _usual(x, self.base))


@dataclass(frozen=True, kw_only=True)
class Llama3Rope(PositionConfig):
    """Llama 3.1's rotary positions: x [B T H d], positions [B T] -> [B T H d], d even. Slow frequencies are slowed further.

        f ← f · (s + (1 − s)/factor),    s = (f · length/2π − low)/(high − low), within [0, 1],    f = base^{−2i/d}

    factor: by how much a frequency is slowed that turns less than `low` times in `length` tokens; one that turns more than `high`
        times stays as it is. length: of the text that the model was first trained on, in tokens.
    Raises ValueError for an odd d, and for a `high` that is not above `low`.

    >>> import torch
    >>> from needlework.layers import Llama3Rope
    >>> x, positions = torch.ones(1, 1, 1, 4), torch.tensor([[100]])
    >>> Llama3Rope(base=500_000.0, factor=32.0)(x, positions)[0, 0, 0]  # the second pair is slowed
    tensor([1.3687, 0.9561, 0.3560, 1.0420])
    """

    kind = "llama3_rope"
    multiple = 2
    base: Positive = 500_000.0
    factor: Positive = 8.0
    low: Positive = 1.0
    high: Positive = 4.0
    length: Count = 8192

    def __post_init__(self):
        super().__post_init__()
        if self.high <= self.low:
            raise ValueError(f"llama3_rope: high is {self.high}, expected a number above low = {self.low}")

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        self.check(x.shape[-1])
        f = _usual(x, self.base)
        stays = ((f * self.length / (2 * math.pi) - self.low) / (self.high - self.low)).clamp(0, 1)
        return rotate(x, positions, f * (stays + (1 - stays) / self.factor))


@dataclass(frozen=True, kw_only=True)
class PairRope(PositionConfig):
    """RetNet's rotary positions, as its authors have them: neighbours turn: x [B T H d], positions [B T] -> [B T H d], d even.

        (x_2i, x_2i+1) → (x_2i cos θ − x_2i+1 sin θ, x_2i+1 cos θ + x_2i sin θ),    θ = position · base^{−i/(d/2 − 1)},    i < d/2

    base: of the frequencies.
    Raises ValueError for an odd d.

    >>> import torch
    >>> from needlework.layers import PairRope
    >>> PairRope()(torch.ones(1, 2, 1, 4), torch.tensor([[0, 1]]))[0, :, 0]
    tensor([[ 1.0000,  1.0000,  1.0000,  1.0000],
            [-0.3012,  1.3818,  0.9999,  1.0001]])
    """

    kind = "pair_rope"
    multiple = 2
    base: Positive = 10_000.0

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        self.check(x.shape[-1])
        halves = x.unflatten(-1, (-1, 2)).mT.flatten(-2)  # as `rotate` takes them
        turned = rotate(halves, positions, self.base ** -_line(x, x.shape[-1] // 2, 1.0))
        return turned.unflatten(-1, (2, -1)).mT.flatten(-2)


@dataclass(frozen=True, kw_only=True)
class HalfRope(PositionConfig):
    """ATMA's half-truncated rotary: x [B T H d], positions [B T] -> [B T H d], d a multiple of 4.

        (a_i, b_i) → (a_i cos θ + b_i sin θ, b_i cos θ − a_i sin θ),    θ = position · frequency_i

    d/4 of the frequencies are (1/base)^{linspace(0, 1, d/4)}, the other d/4 are zero. The angle has the other sign than in `Rope`.

    base: of the frequencies.
    Raises ValueError for a d that is no multiple of 4.

    >>> import torch
    >>> from needlework.layers import HalfRope
    >>> HalfRope()(torch.ones(1, 2, 1, 4), torch.tensor([[0, 1]]))[0, :, 0]
    tensor([[ 1.0000,  1.0000,  1.0000,  1.0000],
            [ 1.3818,  1.0000, -0.3012,  1.0000]])
    """

    kind = "half_rope"
    multiple = 4
    base: Positive = 1024.0

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        self.check(x.shape[-1])
        quarter = x.shape[-1] // 4
        turning = -(self.base ** -_line(x, quarter, 1.0))
        return rotate(x, positions, torch.cat([turning, torch.zeros_like(turning)]))
