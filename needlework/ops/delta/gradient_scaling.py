"""The power of two by which gradients are divided before they become float16 operands: one for all that flows back."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.delta.scalar.scan_bwd import amax, gradient_factor
from needlework.ops.runtime.precompile import run

# a pass over memory: a few programs a multiprocessor, each with as much as its registers hold
SHARES = 1024
BLOCK = 4096


@triton.jit(do_not_specialize=["n"])
def scaled_kernel(p_x, p_y, p_peaks, p_unit, n, NP: tl.constexpr, BLK: tl.constexpr):
    """y = x / unit, and unit itself."""
    factor = gradient_factor(p_peaks, NP, 1)
    if tl.program_id(0) == 0:
        tl.store(p_unit, 1.0 / factor)
    for i in range(tl.cast(tl.program_id(0), tl.int64) * BLK, n, tl.num_programs(0) * BLK):
        o = i + tl.arange(0, BLK)
        b = tl.load(p_x + o, mask=o < n, other=0.0).to(tl.float32) * factor
        tl.store(p_y + o, b.to(p_y.dtype.element_ty), mask=o < n)


def divided(do: Tensor, dstate: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """do / unit in float16, dstate / unit, and unit [1], the power of two at or above every |do| and |dstate|. Contiguous in."""
    peaks, unit = (torch.empty(n, dtype=torch.float32, device=do.device) for n in (SHARES, 1))
    end = (do, 0, 0) if dstate is None else (dstate, dstate.numel(), 1)
    run(amax, (SHARES,), do, end[0], peaks, do.numel(), end[1], NP=SHARES, BLK=BLOCK, END=end[2], num_warps=4)

    def scaled(x: Tensor, dtype: torch.dtype) -> Tensor:
        y = torch.empty_like(x, dtype=dtype)
        run(scaled_kernel, (SHARES,), x, y, peaks, unit, x.numel(), NP=SHARES, BLK=BLOCK, num_warps=4)
        return y

    return scaled(do, torch.float16), None if dstate is None else scaled(dstate, torch.float32), unit
