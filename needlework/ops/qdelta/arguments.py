"""What Q-Delta's entry points accept. Sizes, dtypes and defaults that it shares with the delta op are that op's."""

from typing import Literal, NamedTuple, get_args

from torch import Tensor

from needlework.ops.delta.arguments import checked_gate, checked_heads, checked_number

Coupling = Literal["recurrent", "transposed"]


class Rule(NamedTuple):
    """The op's tensors, heads expanded to HV, in the dtype it computes in."""

    q: Tensor  # [B T HV K] what takes part in the write
    k: Tensor  # [B T HV K]
    v: Tensor  # [B T HV V]
    g: Tensor  # [B T HV 1] or [B T HV K]
    beta: Tensor  # [B T HV 1]
    lam: Tensor  # [B T HV 1]
    read: Tensor  # [B T HV K] what reads: q, or a read rule's query


def checked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, lam: Tensor, coupling: Coupling, q_read: Tensor | None
) -> Rule:
    """The rule's tensors; ValueError for what does not fit."""
    if coupling not in get_args(Coupling):
        raise ValueError(f"coupling: got {coupling!r}, expected 'recurrent' or 'transposed'")
    q, k, v, read = checked_heads(q, k, v, q_read)
    g = checked_gate(g, v, k.shape[-1])
    if coupling == "transposed" and g.shape[-1] != 1:
        raise ValueError(f"g: coupling='transposed' has one gate per head [B T HV], got {g.shape[-1]} channels")
    return Rule(q, k, v, g, checked_number("beta", beta, v), checked_number("lam", lam, v), read)
