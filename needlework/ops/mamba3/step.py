"""One token of Mamba-3 on a slot table, in place, with one row or R.

Bound by bandwidth: a program holds a [K BV] tile of one head's S in registers, reads it once and writes it once. Every tile of a head reads
its k and angle. They advance in the same program where it has all tiles of the head, one or two, and else by a second kernel.
"""

import math
from collections.abc import Mapping

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
def tanh(x):
    """Near 0, where 1 − 2/(e^{2x} + 1) cancels, the seventh convergent of Lambert's x/(1 + x²/(3 + x²/(5 + …))), written as
    what x is too large by: within 5e-15 of it up to 0.625."""
    z = x * x
    near = x - x * z * (45045 + z * (2772 + z * 27)) / (135135 + z * (62370 + z * (3150 + z * 28)))
    far = 1 - 2 / (tl.exp(2 * tl.abs(x)) + 1)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def angle_now(p_angle, p_a, p_dt, row, head, pair, M: tl.constexpr, ACC: tl.constexpr):
    """Θ of pairs of one head after its step, 0 of pairs that do not turn; p_angle is the head's in its slot."""
    before = tl.load(p_angle + pair, mask=pair < M, other=0.0).to(ACC)
    a = tl.load(p_a + row * M + pair, mask=pair < M, other=0.0).to(ACC)
    return before + tanh(a) * tl.load(p_dt + head).to(ACC) * PI


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
def row_of(p_rows, r, K: tl.constexpr):
    """Where row r begins; None of None."""
    p_row = p_rows
    if p_rows is not None:
        p_row = p_rows + r * K
    return p_row


@triton.jit
def advance(
    p_k, p_k_bias, p_a, p_dt, p_k_state, p_angle, head, cos, sin,
    H: tl.constexpr, HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, M: tl.constexpr, HALVES: tl.constexpr, ACC: tl.constexpr,
    BK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """k' = B̄ and Θ' of one head of one row, at p_k_state and p_angle in its slot: this program alone reads the old ones by now."""
    row, h = head // HV, head % HV
    key = row * H + h // (HV // H)
    o_k, o_m = tl.arange(0, BK), tl.arange(0, BM)
    _, other, sign = partners(o_k, K, HALVES)
    theta = angle_now(p_angle, p_a, p_dt, row, head, o_m, M, ACC)
    tl.debug_barrier()  # every warp has read
    for r in tl.static_range(R):
        k = turned(p_k + (key * R + r) * K, row_of(p_k_bias, h * R + r, K), cos, sin, o_k, other, sign, o_k < K, ACC)
        tl.store(p_k_state + r * K + o_k, k, mask=o_k < K)
    tl.store(p_angle + o_m, theta - tl.floor(theta / (2 * PI) + 0.5) * (2 * PI), mask=o_m < M)


@triton.jit
def mamba3_step_kernel(
    p_q, p_k, p_v, p_g, p_dt, p_lam, p_a, p_q_bias, p_k_bias, p_mimo_x, p_S, p_k_state, p_v_state, p_angle, p_slots, p_o,
    S_stride, k_stride, v_stride, angle_stride,
    H: tl.constexpr, HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, HALVES: tl.constexpr,
    ACC: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """S' = α S + Σ_r (1 − λ) Δ α k_r (v ⊙ X_r)ᵀ + Σ_r λ Δ B̄_r (x ⊙ X_r)ᵀ,   o_r = S'ᵀ C̄_r;   k, v the state's; p_mimo_x None: X = 1.

    Then v' = x, and of a head whose only program this is, k' and Θ'.
    """
    if PDL:  # before the state is read: the kernel in front may be another step on it
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    PROGRAMS: tl.constexpr = (V + BV * TILES - 1) // (BV * TILES)  # of a head
    i = tl.program_id(0)
    i_tile = i % PROGRAMS * TILES
    head = (i // PROGRAMS).to(tl.int64)  # of all rows, as every offset below: beyond 2^31 numbers
    row, h = head // HV, head % HV
    key = row * H + h // (HV // H)
    o_k = tl.arange(0, BK)
    in_k = o_k < K
    slot = row
    if p_slots is not None:
        slot = tl.load(p_slots + row).to(tl.int64)
    if slot < 0:  # a padded row
        for t in tl.range(TILES):
            o_v = (i_tile + t) * BV + tl.arange(0, BV)
            for r in tl.static_range(R):
                tl.store(p_o + (head * R + r) * V + o_v, tl.zeros([BV], ACC), mask=o_v < V)
        return

    p_S += slot * S_stride + h * K * V
    p_k_state += slot * k_stride + h * R * K
    p_v_state += slot * v_stride + h * V
    p_angle += slot * angle_stride + h * M
    pair, other, sign = partners(o_k, K, HALVES)
    theta = angle_now(p_angle, p_a, p_dt, row, head, pair, M, ACC)
    cos, sin = tl.cos(theta), tl.sin(theta)
    dt, lam = tl.load(p_dt + head).to(ACC), tl.load(p_lam + head).to(ACC)
    decay = tl.exp(tl.load(p_g + head).to(ACC))
    for t in tl.range(TILES):
        o_v = (i_tile + t) * BV + tl.arange(0, BV)
        in_v = o_v < V
        p_tile = p_S + o_k[:, None] * V + o_v[None, :]
        in_tile = in_k[:, None] & in_v[None, :]
        S = tl.load(p_tile, mask=in_tile, other=0.0).to(ACC) * decay
        v = tl.load(p_v + head * V + o_v, mask=in_v, other=0.0).to(ACC)
        before = (1 - lam) * dt * decay * tl.load(p_v_state + o_v, mask=in_v, other=0.0).to(ACC)
        for r in tl.static_range(R):
            spread = 1.0
            if p_mimo_x is not None:
                spread = tl.load(p_mimo_x + (h * R + r) * V + o_v, mask=in_v, other=0.0).to(ACC)
            k_before = tl.load(p_k_state + r * K + o_k, mask=in_k, other=0.0).to(ACC)
            k = turned(p_k + (key * R + r) * K, row_of(p_k_bias, h * R + r, K), cos, sin, o_k, other, sign, in_k, ACC)
            S += k_before[:, None] * (before * spread)[None, :] + k[:, None] * (lam * dt * v * spread)[None, :]
        tl.store(p_tile, S, mask=in_tile)
        for r in tl.static_range(R):
            q = turned(p_q + (key * R + r) * K, row_of(p_q_bias, h * R + r, K), cos, sin, o_k, other, sign, in_k, ACC)
            tl.store(p_o + (head * R + r) * V + o_v, tl.sum(S * q[:, None], 0), mask=in_v)
        tl.debug_barrier()  # every warp has read v
        tl.store(p_v_state + o_v, v, mask=in_v)

    if PROGRAMS == 1:
        advance(p_k, p_k_bias, p_a, p_dt, p_k_state, p_angle, head, cos, sin, H, HV, R, K, M, HALVES, ACC, BK, BM)


@triton.jit
def mamba3_keep_kernel(
    p_k, p_dt, p_a, p_k_bias, p_k_state, p_angle, p_slots, k_stride, angle_stride,
    H: tl.constexpr, HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, M: tl.constexpr, HALVES: tl.constexpr, ACC: tl.constexpr,
    BK: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """k' and Θ' of one head of one row, whose S several programs have advanced."""
    if PDL:  # those programs read the old ones
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0).to(tl.int64)
    row, h = head // HV, head % HV
    slot = row
    if p_slots is not None:
        slot = tl.load(p_slots + row).to(tl.int64)
    if slot < 0:
        return
    p_angle += slot * angle_stride + h * M
    p_k_state += slot * k_stride + h * R * K
    pair, _, _ = partners(tl.arange(0, BK), K, HALVES)
    theta = angle_now(p_angle, p_a, p_dt, row, head, pair, M, ACC)
    cos, sin = tl.cos(theta), tl.sin(theta)
    advance(p_k, p_k_bias, p_a, p_dt, p_k_state, p_angle, head, cos, sin, H, HV, R, K, M, HALVES, ACC, BK, BM)


@step_operator("state")
def mamba3_step(token: Mamba3Inputs, state: Mamba3State, slots: Tensor | None, halves: bool) -> Tensor:
    """o [B HV V], or with rows [B HV R V], of a token's tensors, which have no T."""
    check_contiguous(state)
    token = Mamba3Inputs(*each(Tensor.contiguous, *token))
    q, v = token.q, token.v
    (B, H), K, (HV, V), R, m = q.shape[:2], q.shape[-1], v.shape[1:], state.k.shape[2], token.angle.shape[-1]
    o = q.new_empty(B, HV, *q.shape[2:-1], V)
    launch = launch_config(ENGINE, q.device, q.dtype, K, V).launch
    sizes, tiles = _sizes(q.dtype, H, HV, R, K, m, halves), _tiles(launch["step"], V)
    programs, strides = cdiv(V, tiles["BV"] * tiles["TILES"]), [x.stride(0) for x in state]
    with torch.cuda.device_of(q):
        mamba3_step_kernel[(B * HV * programs,)](*token, *state, slots, o, *strides, **sizes, **tiles)
        if programs > 1:
            shared = token.k, token.dt, token.angle, token.k_bias, state.k, state.angle, slots, strides[1], strides[3]
            mamba3_keep_kernel[(B * HV,)](*shared, **sizes, **launch["keep"])
    return o


@fake(mamba3_step)
def _(token: Mamba3Inputs, *_):
    q, v = token.q, token.v
    return q.new_empty(*v.shape[:2], *q.shape[2:-1], v.shape[-1])


def step(inputs: Mamba3Inputs, state: Mamba3State, slots: Tensor | None, *, halves: bool) -> Tensor:
    """`step_mamba3` on arguments that it has checked: o in q's dtype, without gradients."""
    return mamba3_step(*inputs, *state, slots, halves)


def _sizes(dtype: torch.dtype, H: int, HV: int, R: int, K: int, m: int, halves: bool) -> dict:
    """Of both kernels."""
    tiles = dict(BK=next_power_of_2(K), BM=next_power_of_2(m))
    return dict(H=H, HV=HV, R=R, K=K, M=m, HALVES=int(halves), ACC=TYPES[accumulator(dtype)], **tiles)


def _tiles(launch: Mapping[str, int], V: int) -> dict[str, int]:
    """A head of two tiles has one program too, and no second kernel."""
    BV = min(launch["BV"], next_power_of_2(V))
    return {**launch, "V": V, "BV": BV, "TILES": 2 if BV < V <= 2 * BV else 1}


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Both kernels with one row a token and pairs "even", with four and "halves"."""
    half, cases = f"*{NAMES[dtype]}", []
    types = dict.fromkeys(("p_q", "p_k", "p_v", "p_o"), half) | {"p_slots": "*i64"}
    types |= dict.fromkeys(("p_g", "p_dt", "p_lam", "p_a", "p_S", "p_k_state", "p_v_state", "p_angle"), "*fp32")
    types |= dict.fromkeys(("p_q_bias", "p_k_bias", "p_mimo_x"), "*fp32")
    types |= dict.fromkeys(("S_stride", "k_stride", "v_stride", "angle_stride"), "i64")
    for kernel, name in ((mamba3_step_kernel, "step"), (mamba3_keep_kernel, "keep")):
        for R in (4, 1):
            launch, options = split(config.launch[name])
            constants = _sizes(dtype, 1, 2, R, K, max(K // 4, 1), R > 1) | (_tiles(launch, V) if name == "step" else launch)
            constants |= {"p_mimo_x": None} if R == 1 and name == "step" else {}
            cases.append(Case(kernel, {n: types[n] for n in kernel.arg_names if n not in constants}, constants, options))
    return cases
