"""One token of Mamba-3 on a slot table, in place, with one row or R.

Two launches: the first advances S and reads it, a program for each [K BV] tile of one head's S. The second advances k, v and the angle,
which every tile of the first reads.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.mamba3.arguments import Mamba3Inputs
from needlework.ops.mamba3.state import Mamba3State
from needlework.ops.runtime.custom_op import fake, step_operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import Case, LaunchConfig, launch_config, split
from needlework.ops.runtime.triton_types import NAMES, TYPES, accumulator, cdiv, next_power_of_2
from needlework.ops.slots.table import check_contiguous

ENGINE = "mamba3/step"
PI = tl.constexpr(math.pi)


@triton.jit
def partners(o_k, K: tl.constexpr, HALVES: tl.constexpr):
    """Of channels o_k: their pair, the other channel of it, and the sign with which that one enters when the pair turns by +Θ."""
    if HALVES:
        pair = o_k % (K // 2)
        other = tl.where(o_k < K // 2, o_k + K // 2, o_k - K // 2)
        sign = tl.where(o_k < K // 2, -1.0, 1.0)
    else:
        pair = o_k // 2
        other = o_k + 1 - 2 * (o_k % 2)
        sign = 2.0 * (o_k % 2) - 1.0
    return pair, other, sign


@triton.jit
def angle_now(p_angle, p_rate, p_dt, row, head, pair, M: tl.constexpr, ACC: tl.constexpr):
    """Θ of pairs of one head after its step, 0 of pairs that do not turn; p_angle is the head's in its slot."""
    before = tl.load(p_angle + pair, mask=pair < M, other=0.0).to(ACC)
    rate = tl.load(p_rate + row * M + pair, mask=pair < M, other=0.0).to(ACC)
    return before + rate * tl.load(p_dt + head).to(ACC) * PI


@triton.jit
def turned(p_x, p_bias, cos, sin, o_k, other, sign, in_k, ACC: tl.constexpr):
    """R(Θ) of the row at p_x with its bias at p_bias."""
    x = tl.load(p_x + o_k, mask=in_k, other=0.0).to(ACC)
    y = tl.load(p_x + other, mask=in_k, other=0.0).to(ACC)
    if p_bias is not None:
        x += tl.load(p_bias + o_k, mask=in_k, other=0.0).to(ACC)
        y += tl.load(p_bias + other, mask=in_k, other=0.0).to(ACC)
    return x * cos + y * sin * sign


@triton.jit
def mamba3_step_kernel(
    p_q, p_k, p_v, p_g, p_dt, p_lam, p_rate, p_q_bias, p_k_bias, p_mimo_x, p_S, p_k_state, p_v_state, p_angle, p_slots, p_o,
    S_stride, k_stride, v_stride, angle_stride,
    H: tl.constexpr, HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, HALVES: tl.constexpr,
    ACC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """S' = α S + Σ_r (1 − λ) Δ α k_r (v ⊙ X_r)ᵀ + Σ_r λ Δ B̄_r (x ⊙ X_r)ᵀ,   o_r = S'ᵀ C̄_r;   k, v the state's; p_mimo_x None: X = 1."""
    i = tl.program_id(0)
    i_v = i % tl.cdiv(V, BV)
    head = (i // tl.cdiv(V, BV)).to(tl.int64)  # of all rows, as every offset below: beyond 2^31 numbers
    row, h = head // HV, head % HV
    key = row * H + h // (HV // H)
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    in_k, in_v = o_k < K, o_v < V
    slot = row
    if p_slots is not None:
        slot = tl.load(p_slots + row).to(tl.int64)
    if slot < 0:  # a padded row
        for r in tl.static_range(R):
            tl.store(p_o + (head * R + r) * V + o_v, tl.zeros([BV], ACC), mask=in_v)
        return

    pair, other, sign = partners(o_k, K, HALVES)
    theta = angle_now(p_angle + slot * angle_stride + h * M, p_rate, p_dt, row, head, pair, M, ACC)
    cos, sin = tl.cos(theta), tl.sin(theta)
    dt, lam = tl.load(p_dt + head).to(ACC), tl.load(p_lam + head).to(ACC)
    decay = tl.exp(tl.load(p_g + head).to(ACC))
    p_tile = p_S + slot * S_stride + h * K * V + o_k[:, None] * V + o_v[None, :]
    in_tile = in_k[:, None] & in_v[None, :]
    S = tl.load(p_tile, mask=in_tile, other=0.0).to(ACC) * decay
    x = lam * dt * tl.load(p_v + head * V + o_v, mask=in_v, other=0.0).to(ACC)
    before = tl.load(p_v_state + slot * v_stride + h * V + o_v, mask=in_v, other=0.0).to(ACC)
    before *= (1 - lam) * dt * decay
    for r in tl.static_range(R):
        spread = 1.0
        if p_mimo_x is not None:
            spread = tl.load(p_mimo_x + (h * R + r) * V + o_v, mask=in_v, other=0.0).to(ACC)
        k_before = tl.load(p_k_state + slot * k_stride + (h * R + r) * K + o_k, mask=in_k, other=0.0).to(ACC)
        p_bias = p_k_bias
        if p_k_bias is not None:
            p_bias = p_k_bias + (h * R + r) * K
        k = turned(p_k + (key * R + r) * K, p_bias, cos, sin, o_k, other, sign, in_k, ACC)
        S += k_before[:, None] * (before * spread)[None, :] + k[:, None] * (x * spread)[None, :]
    tl.store(p_tile, S, mask=in_tile)
    for r in tl.static_range(R):
        p_bias = p_q_bias
        if p_q_bias is not None:
            p_bias = p_q_bias + (h * R + r) * K
        q = turned(p_q + (key * R + r) * K, p_bias, cos, sin, o_k, other, sign, in_k, ACC)
        tl.store(p_o + (head * R + r) * V + o_v, tl.sum(S * q[:, None], 0), mask=in_v)


@triton.jit
def mamba3_keep_kernel(
    p_k, p_v, p_dt, p_rate, p_k_bias, p_k_state, p_v_state, p_angle, p_slots, k_stride, v_stride, angle_stride,
    H: tl.constexpr, HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, HALVES: tl.constexpr,
    ACC: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """One head of one row: k' = B̄, v' = x, Θ'."""
    head = tl.program_id(0).to(tl.int64)
    row, h = head // HV, head % HV
    key = row * H + h // (HV // H)
    slot = row
    if p_slots is not None:
        slot = tl.load(p_slots + row).to(tl.int64)
    if slot < 0:
        return
    o_k, o_v, o_m = tl.arange(0, BK), tl.arange(0, BW), tl.arange(0, BM)
    in_k = o_k < K
    p_angle += slot * angle_stride + h * M
    pair, other, sign = partners(o_k, K, HALVES)
    theta = angle_now(p_angle, p_rate, p_dt, row, head, pair, M, ACC)
    now = angle_now(p_angle, p_rate, p_dt, row, head, o_m, M, ACC)
    cos, sin = tl.cos(theta), tl.sin(theta)
    tl.debug_barrier()  # every warp has read the angles
    tl.store(p_angle + o_m, now - tl.floor(now / (2 * PI) + 0.5) * (2 * PI), mask=o_m < M)
    for r in tl.static_range(R):
        p_bias = p_k_bias
        if p_k_bias is not None:
            p_bias = p_k_bias + (h * R + r) * K
        k = turned(p_k + (key * R + r) * K, p_bias, cos, sin, o_k, other, sign, in_k, ACC)
        tl.store(p_k_state + slot * k_stride + (h * R + r) * K + o_k, k, mask=in_k)
    x = tl.load(p_v + head * V + o_v, mask=o_v < V, other=0.0).to(ACC)
    tl.store(p_v_state + slot * v_stride + h * V + o_v, x, mask=o_v < V)


class Token(NamedTuple):
    """A token's tensors as the kernels take them: `Mamba3Inputs` without T, of the angle the rate."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    dt: Tensor
    lam: Tensor
    rate: Tensor  # [B m] tanh(a)
    q_bias: Tensor | None
    k_bias: Tensor | None
    mimo_x: Tensor | None


@step_operator("state")
def mamba3_step(token: Token, state: Mamba3State, slots: Tensor | None, halves: bool) -> Tensor:
    """o [B HV V], or with rows [B HV R V]."""
    check_contiguous(state)
    token = Token(*each(Tensor.contiguous, *token))
    q, k, v, dt, rate = token.q, token.k, token.v, token.dt, token.rate
    (B, H), K, (HV, V), R, m = q.shape[:2], q.shape[-1], v.shape[1:], state.k.shape[2], rate.shape[-1]
    o = q.new_empty(B, HV, *q.shape[2:-1], V)
    launch = launch_config(ENGINE, q.device, q.dtype, K, V).launch
    sizes = _sizes(q.dtype, H, HV, R, K, V, m, halves)
    step, keep = (_tiles(name, launch[name], V, m) for name in ("step", "keep"))
    strides = [x.stride(0) for x in state]
    with torch.cuda.device_of(q):
        mamba3_step_kernel[(B * HV * cdiv(V, step["BV"]),)](*token, *state, slots, o, *strides, **sizes, **step)
        mamba3_keep_kernel[(B * HV,)](k, v, dt, rate, token.k_bias, *state[1:], slots, *strides[1:], **sizes, **keep)
    return o


@fake(mamba3_step)
def _(token: Token, *_):
    q, v = token.q, token.v
    return q.new_empty(*v.shape[:2], *q.shape[2:-1], v.shape[-1])


def step(inputs: Mamba3Inputs, state: Mamba3State, slots: Tensor | None, *, halves: bool) -> Tensor:
    """`step_mamba3` on arguments that it has checked: o in q's dtype, without gradients."""
    q, k, v, g, dt, lam, angle = inputs.tokens
    token = Token(q, k, v, g, dt, lam, angle.to(state.S.dtype).tanh(), *inputs.parameters)
    return mamba3_step(*token, *state, slots, halves)


def _sizes(dtype: torch.dtype, H: int, HV: int, R: int, K: int, V: int, m: int, halves: bool) -> dict:
    return dict(H=H, HV=HV, R=R, K=K, V=V, M=m, HALVES=int(halves), ACC=TYPES[accumulator(dtype)], BK=next_power_of_2(K))


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Both kernels with one row a token and pairs "even", with four and "halves"."""
    half, cases = f"*{NAMES[dtype]}", []
    types = dict.fromkeys(("p_q", "p_k", "p_v", "p_o"), half) | {"p_slots": "*i64"}
    types |= dict.fromkeys(("p_g", "p_dt", "p_lam", "p_rate", "p_S", "p_k_state", "p_v_state", "p_angle"), "*fp32")
    types |= dict.fromkeys(("p_q_bias", "p_k_bias", "p_mimo_x"), "*fp32")
    types |= dict.fromkeys(("S_stride", "k_stride", "v_stride", "angle_stride"), "i64")
    for kernel, name in ((mamba3_step_kernel, "step"), (mamba3_keep_kernel, "keep")):
        for R in (4, 1):
            launch, options = split(config.launch[name])
            constants = _sizes(dtype, 1, 2, R, K, V, max(K // 4, 1), R > 1) | _tiles(name, launch, V, max(K // 4, 1))
            constants |= {"p_mimo_x": None} if R == 1 and name == "step" else {}
            cases.append(Case(kernel, {n: types[n] for n in kernel.arg_names if n not in constants}, constants, options))
    return cases


def _tiles(name: str, launch: Mapping[str, int], V: int, m: int) -> dict[str, int]:
    if name == "step":
        return {**launch, "BV": min(launch["BV"], next_power_of_2(V))}
    return {**launch, "BW": next_power_of_2(V), "BM": next_power_of_2(m)}
