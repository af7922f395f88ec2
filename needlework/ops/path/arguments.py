"""What PaTH attention's arguments must be. The values of cu_seqlens and length are data, checked apart."""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.common import shapes
from needlework.ops.common.packing import check_cu_seqlens, sequences
from needlework.ops.common.shapes import check, check_count, check_dtypes, given, width
from needlework.ops.path.state import BLOCK, PathState
from needlework.ops.runtime.each import each


class PathInputs(NamedTuple):
    """A call's tokens, of one dtype."""

    q: Tensor  # [B T Hq K]; inside of an operator times the scores' scale
    k: Tensor  # [B T Hkv K]
    v: Tensor  # [B T Hkv V]
    beta: Tensor  # [B T Hkv]
    w: Tensor  # [B T Hkv K]
    decay: Tensor | None = None  # [B T Hq] G, the sums of log gates, float64; None: without a forget gate


class NewTokens(NamedTuple):
    """Tokens of a call that goes on from pages or from a table of slots, as kernels take them: contiguous."""

    q: Tensor  # [T Hq K]
    k: Tensor  # [T Hkv K]
    v: Tensor  # [T Hkv V]
    beta: Tensor  # [T Hkv] in the sums' dtype, as g is
    w: Tensor  # [T Hkv K]
    g: Tensor | None = None  # [T Hq] log gates; None: without a forget gate

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, w: Tensor, g: Tensor | None = None) -> "NewTokens":
        return cls(*each(Tensor.contiguous, q, k, v, beta.to(width(q)), w, None if g is None else g.to(width(q))))


class PathKeys(NamedTuple):
    """Of a call's tokens, what a key-value head has."""

    k: Tensor
    v: Tensor
    beta: Tensor
    w: Tensor


def check_keys(k: Tensor, v: Tensor, beta: Tensor, w: Tensor, axes: str) -> None:
    """Raise ValueError unless what a key-value head has of each token fits; axes: "B T Hkv", "B Hkv" or "T Hkv"."""
    check("k", k, f"{axes} K")
    sizes = dict(zip(axes.split(), k.shape, strict=False))
    check("v", v, f"{axes} V", **sizes)
    check("beta", beta, axes, **sizes)
    check("w", w, f"{axes} K", **sizes, K=k.shape[-1])
    check_dtypes(k=k, v=v, w=w)
    check_dtypes(beta=beta)


def check_queries(q: Tensor, k: Tensor, axes: str) -> None:
    """Raise ValueError unless q reads k's heads; axes: those of q without K."""
    check("q", q, f"{axes} K")
    check("q", q, f"{axes} K", K=k.shape[-1], **dict(zip(axes.split()[:-1], k.shape, strict=False)))
    Hq, Hkv = q.shape[-2], k.shape[-2]
    if Hkv == 0 or Hq % Hkv:
        raise ValueError(f"q: axis {q.dim() - 2} (Hq) has size {Hq}, expected a multiple of the {Hkv} key-value heads of k")
    check_dtypes(q=q, k=k)


def check_gates(g: Tensor | None, q: Tensor, axes: str) -> None:
    """Raise ValueError unless log gates, where there are any, are one a query head; axes as in `check_queries`."""
    if g is not None:
        check("g", g, axes, **dict(zip(axes.split(), q.shape[:-1], strict=True)))
        check_dtypes(g=g)


def check_read(window: int | None, scale: float | None) -> None:
    """Raise ValueError unless the window is a count and the scale a number above 0."""
    if window is not None:
        check_count("window", window, " (the query's own key)")
    if scale is not None and not (isinstance(scale, int | float) and scale > 0):
        raise ValueError(f"scale: expected a number above 0, got {given(scale)}")


def check_state(name: str, state: PathState, k: Tensor, v: Tensor, g: Tensor | None = None, **sizes: int) -> None:
    """Raise ValueError unless the state has the heads and widths of k, v [... Hkv ·], and sums of gates where g [... Hq] has gates."""
    shapes.check_state(name, state, PathState)
    Hkv, K = k.shape[-2:]
    check(f"{name}.k", state.k, "N P Hkv K", Hkv=Hkv, K=K, **sizes)
    N, P = state.k.shape[:2]
    check(f"{name}.v", state.v, "N P Hkv V", N=N, P=P, Hkv=Hkv, V=v.shape[-1])
    check(f"{name}.w", state.w, "N C Hkv K", N=N, C=BLOCK, Hkv=Hkv, K=K)
    check(f"{name}.beta", state.beta, "N C Hkv", N=N, C=BLOCK, Hkv=Hkv)
    check(f"{name}.length", state.length, "N", N=N)
    check_decay(f"{name}.decay", state.decay, g, "N P Hq", N=N, P=P)


def check_decay(name: str, decay: Tensor | None, g: Tensor | None, axes: str, **sizes: int) -> None:
    """Raise ValueError unless sums of gates that are held beside keys, float64, are there exactly where new tokens have gates g."""
    if decay is None or g is None:
        if decay is not g:
            raise ValueError(
                f"{name}: expected {'None without g' if g is None else f'a tensor [{axes}] beside g'}, got {given(decay)}"
            )
        return
    check(name, decay, axes, Hq=g.shape[-1], **sizes)
    if decay.dtype != torch.float64:
        raise ValueError(f"{name}: expected torch.float64, got {decay.dtype}")


def check_call(
    k: Tensor, v: Tensor, window: int | None, initial_state: PathState | None, cu_seqlens: Tensor | None, g: Tensor | None = None
) -> int:  # fmt: skip
    """How many sequences a call has; ValueError for a state or cu_seqlens that do not fit."""
    N = sequences(cu_seqlens, len(k))
    if initial_state is not None:
        check_state("initial_state", initial_state, k, v, g, N=N)
        check_pages(initial_state.k, window)
    return N


def check_pages(k: Tensor, window: int | None) -> None:
    """Raise ValueError for pages of an initial state that are no ring of the window."""
    if window is not None and k.shape[1] > window:
        raise ValueError(f"initial_state.k: axis 1 (P) has size {k.shape[1]}, expected at most the window {window}")


def check_data(length: Tensor, P: int, window: int | None, cu_seqlens: Tensor | None, B: int, T: int) -> None:
    """What only the values of integer tensors show; called where torch.compile does not look."""
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, B, T)
    if len(length) and P != window and int(length.max()) > P:
        raise ValueError(f"initial_state.length: a sequence holds {int(length.max())} tokens, but the pages hold {P} rows")


def no_tokens_yet(N: int, k: Tensor, v: Tensor, beta: Tensor, w: Tensor, g: Tensor | None = None) -> PathState:
    """Pages without rows, and an open block without tokens."""
    wide = torch.promote_types(k.dtype, torch.float32)
    pages = k.new_zeros(N, 0, *k.shape[2:], dtype=wide), v.new_zeros(N, 0, *v.shape[2:])
    opened = w.new_zeros(N, BLOCK, *w.shape[2:]), beta.new_zeros(N, BLOCK, *beta.shape[2:], dtype=wide)
    decay = None if g is None else g.new_zeros(N, 0, g.shape[-1], dtype=torch.float64)
    return PathState(*pages, *opened, torch.zeros(N, dtype=torch.int64, device=k.device), decay)
