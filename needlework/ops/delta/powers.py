"""Power-of-two scaling (`scaling.py`) in an engine's kernels: two small ones find a, b and c, and whoever loads or stores rows multiplies
them there. No tensor is written only to be scaled.

    q' = q / a,   k' = k / b,   v' = v / c,   o = abc · o'        do' = abc · do,   dq = dq' / a,   dk = dk' / b,   dv = dv' / c

`peaks` reads q, k and v once. The states are S' = S/(bc) on both sides of the engine: its caller divides and multiplies them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.delta.gradient_scaling import BLOCK, SHARES, divided_by, gradient_factor, loudest
from needlework.ops.delta.scaling import shares
from needlework.ops.runtime.custom_op import fake
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig, split
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.recorded import recorded_operator
from needlework.ops.runtime.triton_types import NAMES, cdiv, padded

TOKENS = 64  # of one head that make a share: a short call has few
AT_ONCE = 1024  # peaks that a program of `powers_of_peaks` has at a time


@triton.jit
def divisors(p_abc, i_bh):
    """1/a, 1/b and 1/c of a row of the batch and value head."""
    p = p_abc + 4 * i_bh
    return 1.0 / tl.load(p), 1.0 / tl.load(p + 1), 1.0 / tl.load(p + 2)


@triton.jit
def divisor_of_v(p_abc, i_bh, there):
    """1/c, if there, as a vector of one number: a tile times a number that is not loaded as a tensor would reach a product by shared
    memory."""
    one = tl.arange(0, 1)
    return 1.0 / tl.load(p_abc + 4 * i_bh + 2 + one, mask=(one == 0) & there, other=1.0)


@triton.jit
def product(p_abc, i_bh, there=True):
    """abc; there: whether the row has any."""
    p = p_abc + 4 * i_bh
    return tl.load(p, mask=there, other=1.0) * tl.load(p + 3, mask=there, other=1.0)


@triton.jit
def loudest_row(p_x, i_b, i_h, first, end, T, H: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Largest |x| of tokens first … end − 1 of one head of x [B T H D]."""
    o_t, o_d = tl.arange(0, BT), tl.arange(0, BD)
    # a 64-bit base and 32-bit offsets: a tile of 64-bit ones is dear in registers
    o = o_t[:, None] * (H * D) + o_d[None, :]
    p_head = p_x + tl.cast(i_b, tl.int64) * T * (H * D) + i_h * D
    largest = tl.zeros([BT, BD], tl.float32)
    for t in range(first, end, BT):
        inside = (t + o_t < end)[:, None] & (o_d < D)[None, :]
        b = tl.load(p_head + tl.cast(t, tl.int64) * (H * D) + o, mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.abs(b.to(tl.float32)), propagate_nan=tl.PropagateNan.ALL)
    # a NaN must arrive: max drops it
    return tl.max(tl.max(tl.where(largest == largest, largest, float("inf")), 1), 0)


@triton.jit(do_not_specialize=["T", "shares"])
def peaks(
    p_q, p_k, p_v, p_peaks, T, shares,
    H: tl.constexpr, HR: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    TS: tl.constexpr, BLK: tl.constexpr,
):  # fmt: skip
    """p_peaks [B shares HR+H+HV]: the largest |q|, |k| and |v| of TS tokens of each head. One head; those beside it in memory run beside
    it."""
    HEADS: tl.constexpr = HR + H + HV
    i_head = tl.program_id(0) % HEADS
    i_share = tl.program_id(0) // HEADS % shares
    i_b = tl.program_id(0) // HEADS // shares
    first = i_share * TS
    end = tl.minimum(first + TS, T)
    if i_head < HR:
        largest = loudest_row(p_q, i_b, i_head, first, end, T, HR, K, BLK // BK, BK)
    elif i_head < HR + H:
        largest = loudest_row(p_k, i_b, i_head - HR, first, end, T, H, K, BLK // BK, BK)
    else:
        largest = loudest_row(p_v, i_b, i_head - HR - H, first, end, T, HV, V, BLK // BV, BV)
    tl.store(p_peaks + tl.program_id(0), largest)


@triton.jit
def largest_peak(p_column, shares, HEADS: tl.constexpr, BLK: tl.constexpr):
    """Of a head's peaks."""
    largest = tl.zeros([BLK], tl.float32)
    for i in range(0, shares, BLK):
        o = i + tl.arange(0, BLK)
        largest = tl.maximum(largest, tl.load(p_column + o * HEADS, mask=o < shares, other=0.0))
    return tl.max(largest, 0)


@triton.jit
def power_at_least(x, least):
    """The least power of two at or above x and `least`: the exponent of float32, one more where the mantissa is not 0."""
    x = tl.maximum(x, least)
    return ((x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["share_q", "share_k", "share_v", "shares"])
def powers_of_peaks(
    p_peaks, p_states, p_abc, share_q, share_k, share_v, shares,
    H: tl.constexpr, HR: tl.constexpr, HV: tl.constexpr, BLK: tl.constexpr,
):  # fmt: skip
    """p_abc [B HV 4]: a, b, c and bc, of one row and value head. p_states [B HV]: a bound of c; None: there is none."""
    HEADS: tl.constexpr = HR + H + HV
    i_bh = tl.program_id(0)
    i_h = i_bh % HV
    p_row = p_peaks + tl.cast(i_bh // HV, tl.int64) * shares * HEADS
    least = 1.0
    if p_states is not None:
        least = tl.load(p_states + i_bh)
    a = power_at_least(largest_peak(p_row + i_h // (HV // HR), shares, HEADS, BLK) * share_q, 1.0)
    b = power_at_least(largest_peak(p_row + HR + i_h // (HV // H), shares, HEADS, BLK) * share_k, 1.0)
    c = power_at_least(tl.maximum(largest_peak(p_row + HR + H + i_h, shares, HEADS, BLK) * share_v, least), 1.0)
    p = p_abc + 4 * i_bh
    tl.store(p, a)
    tl.store(p + 1, b)
    tl.store(p + 2, c)
    tl.store(p + 3, b * c)


@recorded_operator
def delta_powers(q: Tensor, k: Tensor, v: Tensor, states: Tensor | None, scale: float) -> Tensor:
    """[B HV 4] float32: a, b, c and bc of `scaling.py`, of each row of the batch and value head.

    q [B T HR K], k [B T H K], v [B T HV V], contiguous, v not empty. states [B HV] float32: a bound of c; None: there is none.
    """
    (B, T, HV, V), (H, K), HR = v.shape, k.shape[2:], q.shape[2]
    heads, count = dict(H=H, HR=HR, HV=HV), cdiv(T, TOKENS)
    found, powers = (
        torch.empty(*shape, dtype=torch.float32, device=v.device) for shape in ((B, count, HR + H + HV), (B, HV, 4))
    )
    run(peaks, (found.numel(),), q, k, v, found, T, count, **heads, **peaks_constants(K, V))
    run(powers_of_peaks, (B * HV,), found, states, powers, *shares(T, K, scale), count, **heads, BLK=AT_ONCE, num_warps=4)
    return powers


@fake(delta_powers)
def _(q: Tensor, k: Tensor, v: Tensor, states: Tensor | None, scale: float) -> Tensor:
    return v.new_empty(len(v), v.shape[2], 4, dtype=torch.float32)


@triton.jit(do_not_specialize=["B", "T", "n_state"])
def amax_of_rows(
    p_do, p_dstate, p_max, p_abc, B, T, n_state,
    HV: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, TS: tl.constexpr, NP: tl.constexpr, BLK: tl.constexpr, END: tl.constexpr,
):  # fmt: skip
    """`gradient_scaling.amax` of abc do [B T HV V] and the final state's gradient."""
    i = tl.program_id(0)
    largest = 0.0
    count = tl.cdiv(T, TS)
    for i_job in range(i, B * count * HV, NP):
        i_h, i_b = i_job % HV, i_job // HV // count
        first = i_job // HV % count * TS
        found = loudest_row(p_do, i_b, i_h, first, tl.minimum(first + TS, T), T, HV, V, BLK // BV, BV)
        largest = tl.maximum(largest, found * product(p_abc, i_b * HV + i_h))
    if END:
        largest = tl.maximum(largest, loudest(p_dstate, n_state, i, NP, BLK))
    tl.store(p_max + i, largest)


@triton.jit(do_not_specialize=["B", "T"])
def scaled_rows(
    p_do, p_y, p_peaks, p_divisor, p_abc, B, T,
    HV: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, TS: tl.constexpr, NP: tl.constexpr, BLK: tl.constexpr,
):  # fmt: skip
    """y = abc do / divisor, of [B T HV V], and the divisor itself: `gradient_scaling.scaled_kernel` of rows."""
    factor = gradient_factor(p_peaks, NP, 1)
    if tl.program_id(0) == 0:
        tl.store(p_divisor, 1.0 / factor)
    count = tl.cdiv(T, TS)
    o_t, o_v = tl.arange(0, BLK // BV), tl.arange(0, BV)
    o = o_t[:, None] * (HV * V) + o_v[None, :]
    for i_job in range(tl.program_id(0), B * count * HV, NP):
        i_h, i_b = i_job % HV, i_job // HV // count
        first = i_job // HV % count * TS
        end = tl.minimum(first + TS, T)
        of_do = product(p_abc, i_b * HV + i_h)
        head = tl.cast(i_b, tl.int64) * T * (HV * V) + i_h * V
        for t in range(first, end, BLK // BV):
            inside = (t + o_t < end)[:, None] & (o_v < V)[None, :]
            at = head + tl.cast(t, tl.int64) * (HV * V) + o
            # one after the other: their product may pass what float32 holds
            b = tl.load(p_do + at, mask=inside, other=0.0).to(tl.float32) * of_do * factor
            tl.store(p_y + at, b.to(p_y.dtype.element_ty), mask=inside)


def divided_rows(do: Tensor, dstate: Tensor | None, powers: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """`gradient_scaling.divided` of abc do [B T HV V] and dstate."""
    B, T, HV, V = do.shape
    peaks, divisor = (torch.empty(n, dtype=torch.float32, device=do.device) for n in (SHARES, 1))
    end = (do, 0, 0) if dstate is None else (dstate, dstate.numel(), 1)
    c = rows_constants(HV, V)
    run(amax_of_rows, (SHARES,), do, end[0], peaks, powers, B, T, end[1], END=end[2], **c)
    y = torch.empty_like(do, dtype=torch.float16)
    run(scaled_rows, (SHARES,), do, y, peaks, divisor, powers, B, T, **c)
    return y, None if dstate is None else divided_by(peaks, divisor, dstate), divisor


def rows_constants(HV: int, V: int) -> Constants:
    return dict(HV=HV, V=V, BV=padded(V), TS=TOKENS, NP=SHARES, BLK=BLOCK, num_warps=4)


def peaks_constants(K: int, V: int) -> Constants:
    return dict(K=K, V=V, BK=padded(K), BV=padded(V), TS=TOKENS, BLK=BLOCK, num_warps=4)


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """The kernels, where rows are scaled at all."""
    if dtype != torch.bfloat16:
        return []
    rows = dict.fromkeys(("p_q", "p_k", "p_v", "p_do"), f"*{NAMES[dtype]}")
    types = rows | dict.fromkeys(("p_peaks", "p_states", "p_abc", "p_dstate", "p_max", "p_divisor"), "*fp32")
    types |= dict.fromkeys(("share_q", "share_k", "share_v"), "fp32") | dict.fromkeys(("T", "B", "shares"), "i32")
    types |= {"n_state": "i64", "p_y": "*fp16"}
    heads = dict(H=1, HR=1, HV=2)
    cases = []
    for kernel, given in (
        (peaks, heads | peaks_constants(K, V)),
        (powers_of_peaks, heads | dict(BLK=AT_ONCE, num_warps=4)),
        (amax_of_rows, rows_constants(2, V) | dict(END=1, **config.launch["amax"])),
        (scaled_rows, rows_constants(2, V)),
    ):
        constants, options = split(given)
        cases.append(
            Case(kernel, {name: types[name] for name in kernel.arg_names if name not in constants}, constants, options)
        )
    return cases
