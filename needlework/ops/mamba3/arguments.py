"""What Mamba-3's arguments must be; every form of the op checks them here and goes on with a `Rule`."""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from needlework.ops.common import shapes
from needlework.ops.common.packing import sequences
from needlework.ops.common.shapes import check, check_dtypes, check_groups, check_tensor, width
from needlework.ops.mamba3.state import Mamba3State, empty_state

Pairs = Literal["even", "halves"]


class Mamba3Inputs(NamedTuple):
    """The op's tensors: of the tokens, then the layer's own."""

    q: Tensor  # [B T H K] or [B T H R K]
    k: Tensor  # [B T H K] or [B T H R K]
    v: Tensor  # [B T HV V]
    g: Tensor  # [B T HV]
    dt: Tensor  # [B T HV]
    lam: Tensor  # [B T HV]
    angle: Tensor  # [B T m]
    q_bias: Tensor | None  # [HV K] or [HV R K]
    k_bias: Tensor | None  # [HV K] or [HV R K]
    mimo_x: Tensor | None  # [HV R V]

    @property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self[:7]

    @property
    def parameters(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self[7:]


class Rule(NamedTuple):
    """The op's tensors in the dtype that it computes in; heads are expanded to HV, a token has R rows."""

    q: Tensor  # [B T HV R K] C + b_C
    k: Tensor  # [B T HV R K] B + b_B
    v: Tensor  # [B T HV V] x
    g: Tensor  # [B T HV]
    dt: Tensor  # [B T HV]
    lam: Tensor  # [B T HV]
    angle: Tensor  # [B T m]
    mimo_x: Tensor  # [HV R V]; row r writes x ⊙ X_r


def check_rule(inputs: Mamba3Inputs, pairs: Pairs) -> None:
    """ValueError for what does not fit."""
    q, k, v, g, dt, lam, angle = inputs.tokens
    q_bias, k_bias, mimo_x = inputs.parameters
    if pairs not in get_args(Pairs):
        raise ValueError(f"pairs: got {pairs!r}, expected 'even' or 'halves'")
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, "B T …")
    check_dtypes(q=q, k=k, v=v)
    axes = "B T H R K" if q.dim() == 5 else "B T H K"
    check("q", q, axes)
    sizes = dict(zip(axes.split(), q.shape, strict=True))
    check("k", k, axes, **sizes)
    B, T, H, K = (sizes[axis] for axis in "BTHK")
    check("v", v, "B T HV V", B=B, T=T)
    HV, V = v.shape[2:]
    check_groups(H, HV)
    if K % 2:
        raise ValueError(f"q: the last axis (K) has size {K}, expected an even number: pairs of channels turn")
    for name, x in (("g", g), ("dt", dt), ("lam", lam)):
        check(name, x, "B T HV", B=B, T=T, HV=HV)
    check("angle", angle, "B T m", B=B, T=T)
    if angle.shape[-1] > K // 2:
        raise ValueError(f"angle: axis 2 (m) of [B T m] has size {angle.shape[-1]}, expected at most K / 2 = {K // 2} pairs")
    rows = {"R": sizes["R"]} if q.dim() == 5 else {}
    if 0 in rows.values():
        raise ValueError("q: axis 3 (R) of [B T H R K] has size 0, expected at least 1")
    for name, x in (("q_bias", q_bias), ("k_bias", k_bias)):
        if x is not None:
            check(name, x, " ".join(["HV", *rows, "K"]), HV=HV, K=K, **rows)
    if mimo_x is not None:
        if not rows:
            check_tensor("mimo_x", mimo_x, "HV R V")
            raise ValueError(f"mimo_x: got {shapes.given(mimo_x)}, expected none beside q [B T H K], which has no rows")
        check("mimo_x", mimo_x, "HV R V", HV=HV, V=V, **rows)


def checked(inputs: Mamba3Inputs, pairs: Pairs) -> Rule:
    """The rule's tensors; ValueError for what does not fit."""
    check_rule(inputs, pairs)
    q, k, v, g, dt, lam, angle = inputs.tokens
    q_bias, k_bias, mimo_x = inputs.parameters
    dtype, HV = width(q), v.shape[2]
    q, k = _biased(q, q_bias, HV, dtype), _biased(k, k_bias, HV, dtype)
    v, g, dt, lam, angle = (x.to(dtype) for x in (v, g, dt, lam, angle))
    rows = v.new_ones(HV, q.shape[3], v.shape[-1]) if mimo_x is None else mimo_x.to(dtype)
    return Rule(q, k, v, g, dt, lam, angle, rows)


def _biased(x: Tensor, bias: Tensor | None, HV: int, dtype: torch.dtype) -> Tensor:
    """[B T H K] or [B T H R K] and a bias of each head -> [B T HV R K]: value head j has key head j // (HV // H)."""
    x = x.to(dtype)
    x = x if x.shape[2] == HV else x.repeat_interleave(HV // x.shape[2], 2)
    x = x if bias is None else x + bias.to(dtype)
    return x if x.dim() == 5 else x.unsqueeze(3)


def check_state(name: str, state: Mamba3State, q: Tensor, v: Tensor, angle: Tensor, **sizes: int) -> None:
    """ValueError unless the state is one of q [B T H (R) K], v [B T HV V] and angle [B T m]."""
    shapes.check_state(name, state, Mamba3State)
    HV, K, V = v.shape[2], q.shape[-1], v.shape[-1]
    check(f"{name}.S", state.S, "N HV K V", HV=HV, K=K, V=V, **sizes)
    N = len(state.S)
    check(f"{name}.k", state.k, "N HV R K", N=N, HV=HV, K=K, R=q.shape[3] if q.dim() == 5 else 1)
    check(f"{name}.v", state.v, "N HV V", N=N, HV=HV, V=V)
    check(f"{name}.angle", state.angle, "N HV m", N=N, HV=HV, m=angle.shape[-1])


def checked_state(
    initial_state: Mamba3State | None, q: Tensor, v: Tensor, angle: Tensor, cu_seqlens: Tensor | None
) -> Mamba3State:  # fmt: skip
    """initial_state in the computing dtype, zeros where there is none; ValueError where it does not fit."""
    N, dtype = sequences(cu_seqlens, len(v)), width(q)
    if initial_state is None:
        (HV, V), K, R = v.shape[2:], q.shape[-1], q.shape[3] if q.dim() == 5 else 1
        return empty_state(N, HV, K, V, angle.shape[-1], R, dtype=dtype, device=v.device)
    check_state("initial_state", initial_state, q, v, angle, N=N)
    return Mamba3State(*(x.to(dtype) for x in initial_state))
