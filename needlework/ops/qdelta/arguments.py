"""What Q-Delta's entry points accept. Sizes, dtypes and defaults that it shares with the delta op are that op's."""

from typing import Literal, NamedTuple, get_args

from torch import Tensor

from needlework.ops.delta.arguments import check_gate, check_heads, check_number, checked_gate, checked_heads, checked_number

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


def check_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, lam: Tensor, coupling: Coupling, q_read: Tensor | None
) -> None:
    """ValueError for what does not fit."""
    if coupling not in get_args(Coupling):
        raise ValueError(f"coupling: got {coupling!r}, expected 'recurrent' or 'transposed'")
    check_heads(q, k, v, q_read)
    check_gate(g, v, k.shape[-1])
    check_number("beta", beta, v)
    check_number("lam", lam, v)
    if coupling == "transposed" and g is not None and g.dim() == 4:
        raise ValueError(f"g: coupling='transposed' has one gate per head [B T HV], got {g.shape[-1]} channels")


def checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    lam: Tensor,
    coupling: Coupling,
    q_read: Tensor | None,
    l2norm: bool = False,
) -> Rule:
    """The rule's tensors; ValueError for what does not fit."""
    check_rule(q, k, v, g, beta, lam, coupling, q_read)
    q, k, v, read = checked_heads(q, k, v, q_read, l2norm)
    g = checked_gate(g, v, k.shape[-1])
    return Rule(q, k, v, g, checked_number("beta", beta, v), checked_number("lam", lam, v), read)
