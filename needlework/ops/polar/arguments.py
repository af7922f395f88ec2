"""What Polar attention's arguments must be. The values of cu_seqlens and length are data, checked apart."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from needlework.ops.common.packing import check_cu_seqlens, sequences
from needlework.ops.common.shapes import check, check_count, check_dtypes, check_state
from needlework.ops.polar.state import PolarState


class Tokens(NamedTuple):
    """A call's tensors of tokens; their gradients come back as `Tokens` too."""

    q: Tensor  # [B T Hq K]
    k: Tensor  # [B T Hkv K]
    v: Tensor  # [B T Hkv V]


class Parameters(NamedTuple):
    """A layer's own tensors, one row a query head."""

    alpha: Tensor  # [Hq]
    beta: Tensor  # [Hq]
    gamma: Tensor  # [Hq]
    null_base: Tensor  # [Hq]
    v_null: Tensor  # [Hq V]

    def map(self, f: Callable[[Tensor], Tensor]) -> "Parameters":
        return Parameters(*map(f, self))


def check_arguments(
    tokens: Tokens, parameters: Parameters, window: int | None, state: PolarState | None, cu_seqlens: Tensor | None
) -> int:  # fmt: skip
    """How many sequences a call has; ValueError for what does not fit."""
    q, k, v = tokens
    check("q", q, "B T Hq d")
    B, T, Hq, d = q.shape
    check("k", k, "B T Hkv d", B=B, T=T, d=d)
    Hkv = k.shape[2]
    check("v", v, "B T Hkv V", B=B, T=T, Hkv=Hkv)
    if Hq % Hkv:
        raise ValueError(f"q: axis 2 (Hq) has size {Hq}, expected a multiple of the {Hkv} key-value heads of k")
    for name, x in zip(Parameters._fields, parameters, strict=True):
        check(name, x, "Hq V" if name == "v_null" else "Hq", Hq=Hq, V=v.shape[3])
    check_dtypes(q=q, k=k, v=v)
    if window is not None:
        check_count("window", window, " (the query's own key)")
    N = sequences(cu_seqlens, B)
    if state is not None:
        check_state("initial_state", state, PolarState)
        check("initial_state.k", state.k, "N P Hkv d", N=N, Hkv=Hkv, d=d)
        P = state.k.shape[1]
        check("initial_state.v", state.v, "N P Hkv V", N=N, P=P, Hkv=Hkv, V=v.shape[3])
        check("initial_state.length", state.length, "N", N=N)
        if window is not None and P > window:
            raise ValueError(f"initial_state.k: axis 1 (P) has size {P}, expected at most the window {window}")
    return N


def check_data(length: Tensor, P: int, window: int | None, cu_seqlens: Tensor | None, B: int, T: int) -> None:
    """What only the values of integer tensors show; called where torch.compile does not look."""
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, B, T)
    if len(length) and P != window and int(length.max()) > P:
        raise ValueError(f"initial_state.length: a sequence holds {int(length.max())} tokens, but the pages hold {P} rows")
