"""Power-of-two scaling of gradients: what flows back is divided by one power of two before it becomes float16 operands."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.runtime.precompile import run

# a pass over memory: a few programs a multiprocessor, each with as much as its registers hold
SHARES = 1024
BLOCK = 4096


@triton.jit
def louder(largest, x):
    """The larger of `largest` and |x|, by elements."""
    b = tl.abs(x.to(tl.float32))
    # a NaN must arrive: max drops it
    return tl.maximum(largest, tl.where(b == b, b, float("inf")))


@triton.jit
def loudest(p_x, n, i_share, shares, BLK: tl.constexpr):
    """Largest |x| of this program's share. Whole blocks have no mask, as `n` says nothing of where one may end: with it each number would
    be a load of its own."""
    largest = tl.zeros([BLK], tl.float32)
    whole = n // BLK * BLK
    for i in range(tl.cast(i_share, tl.int64) * BLK, whole, shares * BLK):
        largest = louder(largest, tl.load(p_x + i + tl.arange(0, BLK)))
    if i_share == 0:
        o = whole + tl.arange(0, BLK)
        largest = louder(largest, tl.load(p_x + o, mask=o < n, other=0.0))
    return tl.max(largest, 0)


@triton.jit(do_not_specialize=["n_o", "n_state"])
def amax(p_do, p_dstate, p_max, n_o, n_state, NP: tl.constexpr, BLK: tl.constexpr, END: tl.constexpr):
    """p_max [NP]: maxima of NP shares of the two gradients that come in."""
    i = tl.program_id(0)
    largest = loudest(p_do, n_o, i, NP, BLK)
    if END:
        largest = tl.maximum(largest, loudest(p_dstate, n_state, i, NP, BLK))
    tl.store(p_max + i, largest)


@triton.jit
def gradient_factor(p_max, NP: tl.constexpr, HALF: tl.constexpr):
    """2^−⌈log2 max⌉: gradients times it are at most 1."""
    factor = 1.0
    if HALF:
        largest = tl.maximum(tl.max(tl.load(p_max + tl.arange(0, NP)), 0), 1e-30)
        factor = tl.exp2(-tl.ceil(tl.log2(largest)))
    return factor


@triton.jit(do_not_specialize=["n"])
def scaled_kernel(p_x, p_y, p_peaks, p_divisor, n, NP: tl.constexpr, BLK: tl.constexpr):
    """y = x / divisor, and the divisor itself."""
    factor = gradient_factor(p_peaks, NP, 1)
    if tl.program_id(0) == 0:
        tl.store(p_divisor, 1.0 / factor)
    whole = n // BLK * BLK  # as in `loudest`
    for i in range(tl.cast(tl.program_id(0), tl.int64) * BLK, whole, tl.num_programs(0) * BLK):
        o = i + tl.arange(0, BLK)
        tl.store(p_y + o, (tl.load(p_x + o).to(tl.float32) * factor).to(p_y.dtype.element_ty))
    if tl.program_id(0) == 0:
        o = whole + tl.arange(0, BLK)
        b = tl.load(p_x + o, mask=o < n, other=0.0).to(tl.float32) * factor
        tl.store(p_y + o, b.to(p_y.dtype.element_ty), mask=o < n)


def divided(do: Tensor, dstate: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """do / divisor in float16, dstate / divisor, and the divisor [1], the power of two at or above every |do| and |dstate|. Contiguous
    in."""
    peaks, divisor = (torch.empty(n, dtype=torch.float32, device=do.device) for n in (SHARES, 1))
    end = (do, 0, 0) if dstate is None else (dstate, dstate.numel(), 1)
    run(amax, (SHARES,), do, end[0], peaks, do.numel(), end[1], NP=SHARES, BLK=BLOCK, END=end[2], num_warps=4)
    return (
        divided_by(peaks, divisor, do, torch.float16),
        None if dstate is None else divided_by(peaks, divisor, dstate),
        divisor,
    )


def divided_by(peaks: Tensor, divisor: Tensor, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """x / divisor, which is written too, of the peaks that `amax` has found."""
    y = torch.empty_like(x, dtype=dtype)
    run(scaled_kernel, (SHARES,), x, y, peaks, divisor, x.numel(), NP=SHARES, BLK=BLOCK, num_warps=4)
    return y
