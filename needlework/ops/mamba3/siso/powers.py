"""Powers of two by which the rows of bfloat16 calls are divided (`delta/scaling.py`), from bounds of rows that are not made yet: two
small kernels.

    q rows: √2 (max|q| + max|b_q|)        k rows: √2 (max|k| + max|b_k|), max|k| of the state        u': 2 max Δ · max|v|, the state's v with it

A turn makes a number √2 times larger at most. Small steps make small values: c may be below 1.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.delta.powers import AT_ONCE, BLOCK, TOKENS, largest_peak, loudest_row, power_at_least
from needlework.ops.delta.scaling import of_states, shares
from needlework.ops.mamba3.siso.launches import Inputs
from needlework.ops.mamba3.state import Mamba3State
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig, split
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import NAMES, accumulator, cdiv, padded

LEAST = 2.0**-24  # of c
LEAST_C, ROOT_2 = tl.constexpr(LEAST), tl.constexpr(2**0.5)


@triton.jit(do_not_specialize=["T", "count"])
def peaks_of_tokens(
    p_q, p_k, p_v, p_dt, p_peaks, T, count,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TS: tl.constexpr,
    BLK: tl.constexpr,
):  # fmt: skip
    """p_peaks [B count 2H+2HV]: the largest |q|, |k|, |v| and Δ of TS tokens of one head."""
    HEADS: tl.constexpr = 2 * H + 2 * HV
    i_head = tl.program_id(0) % HEADS
    i_share = tl.program_id(0) // HEADS % count
    i_b = tl.program_id(0) // HEADS // count
    first = i_share * TS
    end = tl.minimum(first + TS, T)
    if i_head < H:
        largest = loudest_row(p_q, i_b, i_head, first, end, T, H, K, BLK // BK, BK)
    elif i_head < 2 * H:
        largest = loudest_row(p_k, i_b, i_head - H, first, end, T, H, K, BLK // BK, BK)
    elif i_head < 2 * H + HV:
        largest = loudest_row(p_v, i_b, i_head - 2 * H, first, end, T, HV, V, BLK // BV, BV)
    else:
        largest = loudest_row(p_dt, i_b, i_head - 2 * H - HV, first, end, T, HV, 1, TS, 1)
    tl.store(p_peaks + tl.program_id(0), largest)


@triton.jit(do_not_specialize=["B", "N", "count", "share_q", "share_k", "share_v"])
def powers_of_tokens(
    p_peaks, p_q_bias, p_k_bias, p_k0, p_v0, p_states, p_power, B, N, count, share_q, share_k, share_v,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, AT: tl.constexpr,
    BLK: tl.constexpr,
):  # fmt: skip
    """p_power [3 B HV]: a, b and c of one row of the batch and value head. p_k0 [B·N HV K], p_v0 [B·N HV V]: of N states to a row of the
    batch; p_states [B HV]: a bound of c."""
    HEADS: tl.constexpr = 2 * H + 2 * HV
    i_b = tl.program_id(0) // HV
    i_h = tl.program_id(0) % HV
    p_row = p_peaks + tl.cast(i_b, tl.int64) * count * HEADS
    q = largest_peak(p_row + i_h // (HV // H), count, HEADS, AT)
    k = largest_peak(p_row + H + i_h // (HV // H), count, HEADS, AT)
    v = largest_peak(p_row + 2 * H + i_h, count, HEADS, AT)
    dt = largest_peak(p_row + 2 * H + HV + i_h, count, HEADS, AT)
    if p_q_bias is not None:
        q += loudest_row(p_q_bias, 0, i_h, 0, 1, 1, HV, K, 1, BK)
    if p_k_bias is not None:
        k += loudest_row(p_k_bias, 0, i_h, 0, 1, 1, HV, K, 1, BK)
    k *= ROOT_2
    if p_k0 is not None:
        k = tl.maximum(k, loudest_row(p_k0, i_b, i_h, 0, N, N, HV, K, BLK // BK, BK))
        v = tl.maximum(v, loudest_row(p_v0, i_b, i_h, 0, N, N, HV, V, BLK // BV, BV))
    c = 2 * dt * v * share_v
    if p_states is not None:
        c = tl.maximum(c, tl.load(p_states + tl.program_id(0)))
    tl.store(p_power + tl.program_id(0), power_at_least(ROOT_2 * q * share_q, 1.0))
    tl.store(p_power + B * HV + tl.program_id(0), power_at_least(k * share_k, 1.0))
    tl.store(p_power + 2 * B * HV + tl.program_id(0), power_at_least(c, LEAST_C))


def powers(given: Inputs, initial_state: Mamba3State | None, T: int) -> Tensor | None:
    """[3 B HV] float32: a, b and c of each row of the batch and value head; None where nothing is divided. T: rows that the engine is given,
    at most."""
    q, k, v, _, dt = given[:5]
    if v.dtype != torch.bfloat16:
        return None
    (B, tokens, HV, V), (H, K), count = v.shape, q.shape[2:], cdiv(v.shape[1], TOKENS)
    S, k0, v0, _ = initial_state or (None, None, None, None)
    peaks = v.new_empty(B, count, 2 * (H + HV), dtype=torch.float32)
    power = v.new_empty(3, B, HV, dtype=torch.float32)
    bound = None if S is None else of_states(S, B)
    run(peaks_of_tokens, (peaks.numel(),), q, k, v, dt, peaks, tokens, count, **_constants(peaks_of_tokens, H, HV, K, V))
    run(
        powers_of_tokens, (B * HV,),
        peaks, given.q_bias, given.k_bias, k0, v0, bound, power, B, 0 if k0 is None else len(k0) // B, count, *shares(T, K, 1.0),
        **_constants(powers_of_tokens, H, HV, K, V),
    )  # fmt: skip
    return power


def _constants(kernel: triton.JITFunction, H: int, HV: int, K: int, V: int) -> Constants:
    known = dict(H=H, HV=HV, K=K, V=V, BK=padded(K), BV=padded(V), TS=TOKENS, AT=AT_ONCE, BLK=BLOCK)
    return {name: x for name, x in known.items() if name in kernel.arg_names} | {"num_warps": 4}


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Both, with biases and a state."""
    if dtype != torch.bfloat16:
        return []
    types = dict.fromkeys(("p_q", "p_k", "p_v"), f"*{NAMES[dtype]}") | dict.fromkeys(("B", "N", "T", "count"), "i32")
    types |= dict.fromkeys(("share_q", "share_k", "share_v"), "fp32")
    cases = []
    for kernel in (peaks_of_tokens, powers_of_tokens):
        constants, options = split(_constants(kernel, 1, 2, K, V))
        names = [name for name in kernel.arg_names if name not in constants]
        wide = f"*{NAMES[accumulator(dtype)]}"
        cases.append(Case(kernel, {name: types.get(name, wide) for name in names}, constants, options))
    return cases
