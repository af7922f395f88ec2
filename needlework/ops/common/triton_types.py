"""What kernels call PyTorch's dtypes, what they sum in, and how wide their tiles are."""

import torch
import triton.language as tl
from triton import next_power_of_2

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, torch.float64: tl.float64}
NAMES = {dtype: str(kind) for dtype, kind in TYPES.items()}  # in a kernel's signature


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def padded(size: int) -> int:
    """The axis of a tile that holds `size`: a power of two, at least what a matrix product takes."""
    return max(next_power_of_2(size), 16)
