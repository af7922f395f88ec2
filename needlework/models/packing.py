"""A call's tokens without pads: padding is packing, a pad lies outside every document. And where the documents of a packed row begin, as
transformers' collators and trainers say it."""

from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """What blocks read: rows of one document each, or documents along one row, with cu_seqlens."""

    x: Tensor  # [B T D]; with documents [1 tokens D]
    cu_seqlens: Tensor | None  # [N+1]
    real: Tensor | None  # [B T] what is no pad of the rows as they came; None: there are no pads
    rows: tuple[int, int]  # B and T as they came

    @classmethod
    def of(cls, x: Tensor, real: Tensor | None, cu_seqlens: Tensor | None) -> "Tokens":
        """Raises ValueError for pads and packed documents in one call."""
        B, T = x.shape[:2]
        if real is None:
            return cls(x, cu_seqlens, None, (B, T))
        if cu_seqlens is not None:
            raise ValueError("attention_mask with pads and packed documents are two ways to say one thing: give one")
        counts = real.sum(1)
        return cls(x[real][None], torch.cat([counts.new_zeros(1), counts.cumsum(0)]), real, (B, T))

    def spread(self, x: Tensor) -> Tensor:
        """[B T D] as the rows came, zeros at pads."""
        if self.real is None:
            return x.view(*self.rows, x.shape[-1])
        return x.new_zeros(*self.rows, x.shape[-1]).masked_scatter(self.real[..., None], x)


def real_tokens(x: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """[B T] what is no pad of x [B T D]; None where there are no pads. ValueError for a mask [B ..T] that does not fit."""
    B, T = x.shape[:2]
    if attention_mask is None or not T:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < T:
        raise ValueError(f"attention_mask: expected [B, at least T] = [{B}, {T}], got {list(attention_mask.shape)}")
    real = attention_mask[:, -T:].bool()
    return None if real.all() else real


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
