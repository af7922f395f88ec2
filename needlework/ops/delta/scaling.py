"""Power-of-two scaling: it keeps the operands of an additive rule within float16, as which the kernels multiply half precision.

Nothing normalises its keys and nothing erases its state, and bfloat16 has the range of float32: a GLA of 60M parameters had states
of 5.5e4 in its first layer after training, and a loss of NaN on the way there. Multiplication by powers of two rounds nothing:

    q' = q / a,   k' = k / b,   v' = v / c,   S₀' = S₀ / (bc)        o = abc · o',   S = bc · S'

Not for float16 inputs: abc times the gradient of o would pass 65,504 before the operands do.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class PowersOfTwo(NamedTuple):
    """a, b and c, at least 1: of each sequence of the batch and head."""

    q: Tensor  # [B 1 HR 1]
    k: Tensor  # [B 1 H 1]
    v: Tensor  # [B 1 HV 1]

    @classmethod
    @torch.no_grad()
    def of(cls, q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | None, scale: float) -> "PowersOfTwo":
        """Powers of two with which no operand of T tokens passes 2¹⁵, whatever their signs and gates.

        initial_state [N HV K V], or of each head its largest number [N HV 1 1].

        With |q'|, |k'|, |v'| ≤ 16, T |k'| ≤ 2¹⁰ and |S₀'| ≤ 2¹⁴: |S'| ≤ 2¹⁴ + T |k'| |v'| ≤ 2¹⁵. Couplings scale · q'·k' are
        at most 2¹⁴ where |scale| K |q'| ≤ 2¹⁰. What flows back is at most 1 a token: |dS'| ≤ |scale| T |q'| ≤ 2¹⁴, and
        do'·v' ≤ 16 V.
        """
        T, K = k.shape[1], k.shape[3]
        bounds = (torch.linalg.vector_norm(x, torch.inf, (1, 3), keepdim=True).float() for x in (q, k, v))
        a, b, c = (x * share for x, share in zip(bounds, shares(T, K, scale), strict=True))
        if initial_state is not None:
            c = torch.maximum(c, of_states(initial_state, len(c))[:, None, :, None])
        return cls(*map(_power_of_two, (a, b, c)))

    def divide(
        self, q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q', k', v' and S₀'."""
        q, k, v = (x * power.reciprocal().to(x.dtype) for x, power in zip((q, k, v), self, strict=True))
        return q, k, v, None if initial_state is None else initial_state * self._state().reciprocal()

    def multiply(self, o: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """o and S from o' and S'."""
        return self.outputs(o), state * self._state()

    def outputs(self, o: Tensor) -> Tensor:
        """o from o'."""
        HV = o.shape[2]
        return o * (_heads(self.q, HV) * _heads(self.k, HV) * self.v).to(o.dtype)

    def of_states(self, N: int) -> Tensor:
        """bc [N HV], by which N states are divided."""
        return self._state().flatten(1).expand(N, -1).contiguous()

    def _state(self) -> Tensor:
        """bc [B HV 1 1]."""
        return (_heads(self.k, self.v.shape[2]) * self.v).transpose(1, 2)


def shares(T: int, K: int, scale: float) -> tuple[float, float, float]:
    """What a, b and c are at least, of the largest |q|, |k| and |v| (`PowersOfTwo.of`)."""
    return max(1 / 16, abs(scale) * K / 2**10, abs(scale) * T / 2**14), max(1 / 16, T / 2**10), 1 / 16


def of_states(initial_state: Tensor, B: int) -> Tensor:
    """[B HV]: what c is at least, of the states; packed sequences are one row of the batch."""
    states = torch.linalg.vector_norm(initial_state, torch.inf, (2, 3)).float() / 2**14
    return states if len(states) == B else states.amax(0, keepdim=True)


def _heads(power: Tensor, HV: int) -> Tensor:
    return power.repeat_interleave(HV // power.shape[2], 2)


def _power_of_two(x: Tensor) -> Tensor:
    """The least at or above x and 1: the exponent of float32, one more where the mantissa is not 0."""
    return ((x.clamp(min=1).view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
