"""What LUCID's entry points accept. The values of cu_seqlens and length are data, checked apart."""

from typing import Literal, get_args

import torch
from torch import Tensor

from needlework.ops.common.shapes import check, check_dtypes
from needlework.ops.lucid.state import LucidState

Precondition = Literal["key", "qk", "rowmax", "beta"]
Solve = Literal["window", "global"]


def check_tokens(k: Tensor, v: Tensor, beta: Tensor | None, axes: str, precondition: Precondition) -> None:
    """Raise ValueError unless k, v and beta fit each other and the precondition; axes: "B T Hkv" or "B Hkv"."""
    if precondition not in get_args(Precondition):
        raise ValueError(f"precondition: got {precondition!r}, expected one of {', '.join(get_args(Precondition))}")
    check("k", k, f"{axes} K")
    sizes = dict(zip(axes.split(), k.shape, strict=False))
    check("v", v, f"{axes} V", **sizes)
    check_dtypes(k=k, v=v)
    if (beta is not None) != (precondition == "beta"):
        given = "is missing" if beta is None else f"has shape {list(beta.shape)}"
        raise ValueError(f"beta: it belongs to precondition='beta' alone; precondition is {precondition!r} and beta {given}")
    if beta is not None:
        check("beta", beta, axes, **sizes)
        check_dtypes(beta=beta)


def solve_window(window: int | None, solve: Solve) -> int | None:
    """The window that the solve and its pages keep: none where the solve is global."""
    if window is not None and window < 1:
        raise ValueError(f"window: expected at least 1 (the row itself), got {window}")
    if solve not in get_args(Solve):
        raise ValueError(f"solve: got {solve!r}, expected 'window' or 'global'")
    return None if solve == "global" else window


def check_state(name: str, state: LucidState, k: Tensor, v: Tensor, **sizes: int) -> None:
    """Raise ValueError unless the pages have the heads and widths of k, v [... Hkv ·]."""
    Hkv, K = k.shape[-2:]
    check(f"{name}.k", state.k, "N P Hkv K", Hkv=Hkv, K=K, **sizes)
    N, P = state.k.shape[:2]
    check(f"{name}.y", state.y, "N P Hkv V", N=N, P=P, Hkv=Hkv, V=v.shape[-1])
    check(f"{name}.length", state.length, "N", N=N)


def no_tokens_yet(N: int, k: Tensor, v: Tensor) -> LucidState:
    """Pages without rows."""
    length = torch.zeros(N, dtype=torch.int64, device=k.device)
    return LucidState(k.new_zeros(N, 0, *k.shape[2:]), v.new_zeros(N, 0, *v.shape[2:]), length)
