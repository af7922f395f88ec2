"""What LUCID-PaTH's entry points accept. The values of cu_seqlens and length are data, checked apart."""

import torch
from torch import Tensor

from needlework.ops.common import shapes
from needlework.ops.common.packing import sequences
from needlework.ops.common.shapes import check
from needlework.ops.path import arguments
from needlework.ops.path.solve.state import LucidPathState

TINY = 1e-6  # norms below it do not scale a key to 1


def check_state(name: str, state: LucidPathState, k: Tensor, v: Tensor, **sizes: int) -> None:
    """Raise ValueError unless the state has the heads and widths of k, v [... Hkv ·]."""
    shapes.check_state(name, state, LucidPathState)
    Hkv, K = k.shape[-2:]
    check(f"{name}.k", state.k, "N P Hkv K", Hkv=Hkv, K=K, **sizes)
    N, P = state.k.shape[:2]
    check(f"{name}.norm", state.norm, "N P Hkv", N=N, P=P, Hkv=Hkv)
    check(f"{name}.y", state.y, "N P Hkv V", N=N, P=P, Hkv=Hkv, V=v.shape[-1])
    arguments.check_state(name, state.read, k, v)


def check_call(
    k: Tensor, v: Tensor, window: int | None, initial_state: LucidPathState | None, cu_seqlens: Tensor | None
) -> int:
    """How many sequences a call has; ValueError for a state or cu_seqlens that do not fit."""
    N = sequences(cu_seqlens, len(k))
    if initial_state is not None:
        check_state("initial_state", initial_state, k, v, N=N)
        arguments.check_pages(initial_state.k, window)
    return N


def no_tokens_yet(N: int, k: Tensor, v: Tensor, beta: Tensor, w: Tensor) -> LucidPathState:
    """Pages without rows, and an open block without tokens."""
    page_k, page_y, *rest, _ = arguments.no_tokens_yet(N, k, v, beta, w)
    return LucidPathState(page_k, page_k.new_zeros(page_k.shape[:3]), page_y, *rest)


def unit(k: Tensor) -> tuple[Tensor, Tensor]:
    """k̂ = k / max(‖k‖, 1e-6), and ‖k‖."""
    norm = k.norm(dim=-1)
    return k / norm.clamp(min=TINY)[..., None], norm


def directions(state: LucidPathState) -> Tensor:
    """The pages' keys as if they had come with norm 1."""
    return state.k / state.norm.clamp(min=TINY)[..., None]


def as_they_came(k: Tensor, norm: Tensor) -> Tensor:
    """The inverse of `directions`."""
    return k * norm.clamp(min=TINY)[..., None]


def wide(state: LucidPathState, dtype: torch.dtype) -> LucidPathState:
    return LucidPathState(*(x.to(dtype) for x in state[:5]), length=state.length)
