"""Where the documents of a packed row begin, as transformers' collators and trainers say it."""

import torch
from torch import Tensor


def documents(
    x: Tensor,
    real: Tensor | None,
    position_ids: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
) -> Tensor | None:
    """cu_seqlens [N+1] of the documents in x [1 T D]; None where every row of x [B T D] is one. real [B T]: what is no pad.

    The first that is given says it: cu_seq_lens_q [N+1] is it; seq_idx [1 T] numbers the documents; position_ids [1 T] begin again
    with each. Mixers count positions themselves: position_ids that skip are refused, and so are documents that begin inside one of
    several rows (ValueError).
    """
    if cu_seq_lens_q is not None:
        return cu_seq_lens_q
    name, of, step = ("seq_idx", seq_idx, 0) if seq_idx is not None else ("position_ids", position_ids, 1)
    B, T = x.shape[:2]
    if of is None or T < 2:
        return None
    if of.shape not in ((B, T), (1, T)):
        raise ValueError(f"{name}: got shape {list(of.shape)}, expected [{B}, {T}] or [1, {T}]")
    steps = of.diff(dim=-1)
    begins = steps != step
    if real is not None:
        begins = begins & real[:, 1:] & real[:, :-1]
    if not begins.any():
        return None
    if name == "position_ids" and (begins & (steps > 1)).any():
        raise ValueError("position_ids: they skip; expected consecutive numbers that begin again where a document does")
    if B > 1:
        raise ValueError(
            f"{name}: documents begin inside the rows of a batch of {B}; expected packed documents in one row, [1, T]"
        )
    inner = begins[0].nonzero().flatten() + 1
    return torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), T)])
