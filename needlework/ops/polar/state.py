"""What Polar attention returns and what it carries from one call to the next."""

from typing import NamedTuple

import torch
from torch import Tensor


class PolarState(NamedTuple):
    """Growing pages of keys and values (rows as in ops/attention/pages.py) and the count of tokens seen."""

    k: Tensor  # [N P Hkv d]
    v: Tensor  # [N P Hkv V]
    length: Tensor  # [N] int64


class PolarOutput(NamedTuple):
    direction: Tensor  # [B T Hq V]
    magnitude: Tensor  # [B T Hq]
    state: PolarState | None


def no_tokens_yet(N: int, k: Tensor, v: Tensor) -> PolarState:
    """The state of N sequences before their first token, for k and v [B T Hkv ·]."""
    length = torch.zeros(N, dtype=torch.int64, device=k.device)
    return PolarState(k.new_zeros(N, 0, *k.shape[2:]), v.new_zeros(N, 0, *v.shape[2:]), length)


def after_pages(
    q: Tensor, k: Tensor, v: Tensor, initial_state: PolarState, cu_seqlens: Tensor | None, window: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The call as one over packed sequences whose first tokens are the pages', oldest first, with queries of zero.

    Returns q [1 S Hq d], k, v; cu_seqlens [N+2], whose last sequence is what room is left of S = N P + B T; held [N+1]: tokens
    of each sequence that come from pages (all of the last one's); place [B T]: where each token of the call went. Sizes follow
    from shapes; differentiable in q, k, v and the pages.
    """
    (B, T), (N, P) = q.shape[:2], initial_state.k.shape[:2]
    device = q.device
    if cu_seqlens is None:
        cu_seqlens = torch.arange(B + 1, device=device) * T
    room = N * P + B * T
    held = initial_state.length.to(device).clamp(max=P)
    start = torch.zeros(N + 2, dtype=torch.int64, device=device)
    start[1:-1] = (held + cu_seqlens.diff()).cumsum(0)
    start[-1] = room
    token = torch.arange(B * T, device=device)
    n = torch.searchsorted(cu_seqlens.to(token), token, right=True) - 1
    place = start[n] + held[n] + token - cu_seqlens[n]
    oldest = torch.arange(P, device=device)
    row = initial_state.length[:, None] - held[:, None] + oldest  # the token that comes `oldest`-th
    row = row if window is None else row % window
    # rows without a token go to the room at the end, and are nothing there
    spare = torch.where(oldest < held[:, None], 1, 0)
    to = torch.where(spare > 0, start[:N, None] + oldest, room)

    def joined(page: Tensor, new: Tensor) -> Tensor:
        kept = page[torch.arange(N, device=device)[:, None], row.clamp(max=P - 1)]
        x = new.new_zeros(room + 1, *new.shape[2:])
        x = x.index_put((to.flatten(),), kept.flatten(0, 1).to(new.dtype))
        return x.index_put((place,), new.flatten(0, 1))[None, :room]

    k, v = joined(initial_state.k, k), joined(initial_state.v, v)
    q = q.new_zeros(room, *q.shape[2:]).index_put((place,), q.flatten(0, 1))[None]
    held = torch.cat((held, room - start[-2:-1]))
    return q, k, v, start, held, place
