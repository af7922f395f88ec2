"""Cross entropy of a linear head without its logits in memory: [N D] hidden states, [N] targets -> one number.

    loss = Σ_n  logsumexp_v z_nv − z_n,target(n)      z = softcap(W x + b), over the n whose target is not −100

`CHUNK` rows of logits exist at a time, in the backward too, where they are made again. Float32, whatever the weights are.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

IGNORE = -100
CHUNK = 4096


def softcap(z: Tensor, c: float | None) -> Tensor:
    """c·z/√(z² + c²), between −c and c; None leaves z as it is."""
    return z if c is None else c * z * torch.rsqrt(z.square() + c * c)


def linear_cross_entropy(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, cap: float | None = None) -> Tensor:
    """The sum over counted targets; x [N D], weight [V D], bias [V], targets [N] int64 with −100 where nothing is counted."""

    def of(rows: Tensor, wanted: Tensor) -> Tensor:
        z = softcap(F.linear(rows, weight, bias), cap)
        return F.cross_entropy(z.to(torch.promote_types(z.dtype, torch.float32)), wanted, ignore_index=IGNORE, reduction="sum")

    total = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
    for rows, wanted in zip(x.split(CHUNK), targets.split(CHUNK), strict=True):
        total = total + checkpoint(of, rows, wanted, use_reentrant=False)
    return total
