"""Q-Delta (arXiv 2606.08804): is a write stable, and what does the query ask that the key does not?"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from .listen import heard, together


class QDeltaLayer(NamedTuple):
    """Over all tokens and heads of a layer; the paper's 340M run has a mean βa of 0.043 and a mean cosine near 0.07.

    beta_a: mean of β_t a_t, a_t = k_t·(k_t + λ_t q_t); a step contracts where it lies in (0, 2). beta_a_most: the largest.
    unstable: the share of tokens where it does not lie there.
    cosine: mean of cos(S_{t-1}ᵀq_t, S_{t-1}ᵀk_t). drift: mean norm of r_t = (v_{t+1} − v_t) − S_tᵀ(x_{t+1} − x_t) (Theorem 3.2).
    """

    beta_a: float
    beta_a_most: float
    unstable: float
    cosine: float
    drift: float


def qdelta(model: nn.Module, input_ids: Tensor, ask: Callable[[], None] = lambda: None) -> list[QDeltaLayer]:
    """One entry for each Q-Delta layer of the model, from input_ids [B T]; the state is made again token by token.

    ask: called at every token; what it raises ends the walk, which may take a minute.
    """
    return [QDeltaLayer(*numbers) for numbers in together(partial(_layer, ask), heard(model, input_ids, "qdelta"))]


def _layer(
    ask: Callable[[], None], q: Tensor, k: Tensor, v: Tensor, beta: Tensor, lam: Tensor, g: Tensor | None = None
) -> tuple[Tensor, ...]:
    """A `QDeltaLayer`'s numbers. q, k [B T H K], v [B T HV V]; beta, lam, g [B T HV]."""
    repeats = v.shape[2] // k.shape[2]
    q, k = q.repeat_interleave(repeats, 2), k.repeat_interleave(repeats, 2)
    x = k + lam[..., None] * q
    beta_a = beta * (k * x).sum(-1)
    S = torch.zeros(*v[:, 0].shape[:2], k.shape[-1], v.shape[-1], device=v.device, dtype=v.dtype)
    read = lambda S, key: torch.einsum("bhkv,bhk->bhv", S, key)
    cosines, drifts = [], []
    for t in range(q.shape[1]):
        ask()
        if t:
            cosines.append(cosine_similarity(read(S, q[:, t]), read(S, k[:, t]), dim=-1))
            drifts.append((v[:, t] - v[:, t - 1] - read(S, x[:, t] - x[:, t - 1])).norm(dim=-1))
        if g is not None:
            S = g[:, t].exp()[..., None, None] * S
        S = S + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], v[:, t] - read(S, x[:, t]))
    unstable = ((beta_a <= 0) | (beta_a >= 2)).to(v.dtype).mean()
    return beta_a.mean(), beta_a.max(), unstable, torch.stack(cosines).mean(), torch.stack(drifts).mean()
