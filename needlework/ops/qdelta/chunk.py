"""Q-Delta's fast path: the delta engine, forward and hand-derived backward, with u = βv and e = e^g β (k + λq).

What the chain from u and e to v, k, q, β and λ adds is left to autograd. Tensors as a `Rule`'s.
"""

from torch import Tensor

from needlework.ops.delta.custom_op import delta_fwd


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lam: Tensor, read: Tensor,
    initial_state: Tensor, cu_seqlens: Tensor | None, scale: float, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o [B T HV V] and the final state [N HV K V]."""
    k, u, e = (x[..., None, :] for x in (k, beta * v, beta * (k + lam * q)))  # one row a token
    return delta_fwd(read, k, u, e, g, initial_state, cu_seqlens, scale, "decayed", chunk_size)
