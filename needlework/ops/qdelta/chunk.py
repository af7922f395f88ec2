"""Q-Delta's fast path: the delta engine, forward and hand-derived backward, with u = βv and e = e^g β (k + λq).

What the chain from u and e to v, k, q, β and λ adds is left to autograd.
"""

from torch import Tensor

from needlework.ops.delta.custom_op import delta_fwd
from needlework.ops.qdelta.arguments import Rule


def forward(
    rule: Rule, initial_state: Tensor, cu_seqlens: Tensor | None, scale: float, chunk_size: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o [B T HV V] and the final state [N HV K V]."""
    q, k, v, g, beta, lam, read = rule
    k, u, e = (x[..., None, :] for x in (k, beta * v, beta * (k + lam * q)))  # one row a token
    return delta_fwd(
        read, k, u, e, g, initial_state, cu_seqlens=cu_seqlens, scale=scale, prediction="decayed", chunk_size=chunk_size
    )
