"""What LUCID's entry points accept. The values of cu_seqlens and length are data, checked apart."""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from needlework.ops.common import shapes
from needlework.ops.common.packing import check_cu_seqlens, sequences
from needlework.ops.common.shapes import check, check_count, check_dtypes, given
from needlework.ops.lucid.state import LucidState
from needlework.ops.paged.placement import Placement
from needlework.ops.paged.placement import check_placement as shared

Precondition = Literal["key", "qk", "rowmax", "beta"]
Solve = Literal["window", "global"]


class LucidInputs(NamedTuple):
    """A call's tokens, of one dtype. Their gradients come back as `LucidInputs` too."""

    k: Tensor  # [B T Hkv K]
    v: Tensor  # [B T Hkv V]
    beta: Tensor | None  # [B T Hkv]


def check_tokens(k: Tensor, v: Tensor, beta: Tensor | None, axes: str, precondition: Precondition) -> None:
    """Raise ValueError unless k, v and beta fit each other and the precondition; axes: "B T Hkv" or "B Hkv"."""
    if precondition not in get_args(Precondition):
        raise ValueError(f"precondition: got {precondition!r}, expected one of {', '.join(get_args(Precondition))}")
    check("k", k, f"{axes} K")
    sizes = dict(zip(axes.split(), k.shape, strict=False))
    check("v", v, f"{axes} V", **sizes)
    check_dtypes(k=k, v=v)
    if (beta is not None) != (precondition == "beta"):
        raise ValueError(
            f"beta: expected with precondition='beta' and only then; precondition is {precondition!r}, got {given(beta)}"
        )
    if beta is not None:
        check("beta", beta, axes, **sizes)
        check_dtypes(beta=beta)


def solve_window(window: int | None, solve: Solve) -> int | None:
    """The window that the solve and its pages keep: none where the solve is global."""
    if window is not None:
        check_count("window", window, " (the row itself)")
    if solve not in get_args(Solve):
        raise ValueError(f"solve: got {solve!r}, expected 'window' or 'global'")
    return None if solve == "global" else window


def check_state(name: str, state: LucidState, k: Tensor, v: Tensor, **sizes: int) -> None:
    """Raise ValueError unless the pages have the heads and widths of k, v [... Hkv ·]."""
    shapes.check_state(name, state, LucidState)
    Hkv, K = k.shape[-2:]
    check(f"{name}.k", state.k, "N P Hkv K", Hkv=Hkv, K=K, **sizes)
    N, P = state.k.shape[:2]
    check(f"{name}.y", state.y, "N P Hkv V", N=N, P=P, Hkv=Hkv, V=v.shape[-1])
    check(f"{name}.length", state.length, "N", N=N)


def check_call(
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    precondition: Precondition,
    window: int | None,
    solve: Solve,
    initial_state: LucidState | None,
    cu_seqlens: Tensor | None,
) -> tuple[int, int | None]:
    """How many sequences a call has, and the window of its solve; ValueError for what does not fit."""
    check_tokens(k, v, beta, "B T Hkv", precondition)
    window = solve_window(window, solve)
    N = sequences(cu_seqlens, len(k))
    if initial_state is not None:
        check_state("initial_state", initial_state, k, v, N=N)
        P = initial_state.k.shape[1]
        if window is not None and P > window:
            raise ValueError(f"initial_state.k: axis 1 (P) has size {P}, expected at most the window {window}")
    return N, window


def check_data(length: Tensor, P: int, window: int | None, cu_seqlens: Tensor | None, B: int, T: int) -> None:
    """What only the values of integer tensors show."""
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, B, T)
    if P and len(length) and P != window and int(length.max()) > P:
        raise ValueError(f"initial_state.length: a sequence holds {int(length.max())} tokens, but the pages hold {P} rows")


def no_tokens_yet(N: int, k: Tensor, v: Tensor) -> LucidState:
    """Pages without rows."""
    length = torch.zeros(N, dtype=torch.int64, device=k.device)
    return LucidState(k.new_zeros(N, 0, *k.shape[2:]), v.new_zeros(N, 0, *v.shape[2:]), length)


def check_placement(k: Tensor, v: Tensor, k_pages: Tensor, y_pages: Tensor, where: Placement) -> None:
    """Raise ValueError unless pages and tables fit k [T Hkv K] and v [T Hkv V]."""
    T, Hkv, K = k.shape
    check("k_pages", k_pages, "n PG Hkv d", Hkv=Hkv, d=K)
    n, PG = k_pages.shape[:2]
    check("y_pages", y_pages, "n PG Hkv V", n=n, PG=PG, Hkv=Hkv, V=v.shape[2])
    check_dtypes(k=k, k_pages=k_pages, y_pages=y_pages)
    shared(where, T, {"k_pages": k_pages, "y_pages": y_pages})
