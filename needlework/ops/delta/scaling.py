"""Power-of-two scaling: it keeps the operands of an additive rule within float16, as which the kernels multiply half precision.

Nothing normalises its keys and nothing erases its state, and bfloat16 has the range of float32: a GLA of 60M parameters had states
of 5.5e4 in its first layer after training, and a loss of NaN on the way there. Multiplication by powers of two rounds nothing:

    q' = q / a,   k' = k / b,   v' = v / c,   S₀' = S₀ / (bc)        o = abc · o',   S = bc · S'

a, b and c are powers of two of each row of the batch and head, at least 1: the least at or above a share of the largest |q|, |k| and |v|
(`shares`), c also of the largest |S₀| (`of_states`).

Not for float16 inputs: abc times the gradient of o would pass 65,504 before the operands do.
"""

import torch
from torch import Tensor


def shares(T: int, K: int, scale: float) -> tuple[float, float, float]:
    """What a, b and c are at least, of the largest |q|, |k| and |v|: no operand of T tokens then passes 2¹⁵, whatever their signs and gates.

    With |q'|, |k'|, |v'| ≤ 16, T |k'| ≤ 2¹⁰ and |S₀'| ≤ 2¹⁴: |S'| ≤ 2¹⁴ + T |k'| |v'| ≤ 2¹⁵. Couplings scale · q'·k' are at most 2¹⁴ where
    |scale| K |q'| ≤ 2¹⁰. What flows back is at most 1 a token: |dS'| ≤ |scale| T |q'| ≤ 2¹⁴, and do'·v' ≤ 16 V.
    """
    return max(1 / 16, abs(scale) * K / 2**10, abs(scale) * T / 2**14), max(1 / 16, T / 2**10), 1 / 16


def of_states(initial_state: Tensor, B: int) -> Tensor:
    """[B HV]: what c is at least, of the states; packed sequences are one row of the batch."""
    states = torch.linalg.vector_norm(initial_state, torch.inf, (2, 3)).float() / 2**14
    return states if len(states) == B else states.amax(0, keepdim=True)
