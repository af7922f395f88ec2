"""What CCQ's arguments must be; every form of the op checks them here."""

from typing import NamedTuple

from torch import Tensor

from needlework.ops.ccq.state import CurvatureState
from needlework.ops.common import shapes
from needlework.ops.common.shapes import check, check_dtypes


class CcqInputs(NamedTuple):
    """A call's tensors of tokens; their gradients come back as `CcqInputs` too."""

    q: Tensor  # [B T H K]
    k: Tensor  # [B T H K]
    eta: Tensor  # [B T HV]
    g: Tensor | None  # [B T H]


def check_tokens(q: Tensor, k: Tensor, eta: Tensor, g: Tensor | None) -> None:
    """Raise ValueError unless the tensors [B T ...] fit each other."""
    check("q", q, "B T H K")
    B, T, H, K = q.shape
    check("k", k, "B T H K", B=B, T=T, H=H, K=K)
    check("eta", eta, "B T HV", B=B, T=T)
    if eta.shape[2] % H:
        raise ValueError(f"eta: axis 2 (HV) has size {eta.shape[2]}, expected a multiple of the {H} key heads of k")
    if g is not None:
        check("g", g, "B T H", B=B, T=T, H=H)
    check_dtypes(q=q, k=k)


def check_state(name: str, state: CurvatureState, k: Tensor, **sizes: int) -> None:
    """Raise ValueError unless the state is one of keys [... H K]."""
    shapes.check_state(name, state, CurvatureState)
    H, K = k.shape[-2:]
    check(f"{name}.C", state.C, "N H K K", H=H, K=K, **sizes)
    N = len(state.C)
    check(f"{name}.mean", state.mean, "N H K", N=N, H=H, K=K)
    check(f"{name}.n", state.n, "N H", N=N, H=H)
