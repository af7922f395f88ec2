"""What CCQ's arguments must be; every form of the op checks them here."""

from torch import Tensor

from needlework.ops.ccq.state import CurvatureState
from needlework.ops.common.shapes import check, check_dtypes


def check_arguments(q: Tensor, k: Tensor, eta: Tensor, g: Tensor | None, state: CurvatureState | None, N: int) -> None:
    """Raise ValueError unless the tensors [B T ...] fit each other and the state has N rows."""
    check("q", q, "B T H K")
    B, T, H, K = q.shape
    check("k", k, "B T H K", B=B, T=T, H=H, K=K)
    check("eta", eta, "B T HV", B=B, T=T)
    if eta.shape[2] % H:
        raise ValueError(f"eta: axis 2 (HV) has size {eta.shape[2]}, expected a multiple of the {H} key heads of k")
    if g is not None:
        check("g", g, "B T H", B=B, T=T, H=H)
    check_dtypes(q=q, k=k)
    if state is not None:
        check("state.C", state.C, "N H K K", N=N, H=H, K=K)
        check("state.mean", state.mean, "N H K", N=N, H=H, K=K)
        check("state.n", state.n, "N H", N=N, H=H)
