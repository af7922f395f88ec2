"""What kernels call PyTorch's dtypes, what they sum in, and how wide their tiles are."""

import torch
import triton.language as tl

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, torch.float64: tl.float64}
NAMES = {dtype: str(kind) for dtype, kind in TYPES.items()}  # in a kernel's signature


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def cdiv(a: int, b: int) -> int:
    """⌈a/b⌉. Triton's own may be called in a kernel too, which costs the host microseconds a call."""
    return -(-a // b)


def next_power_of_2(size: int) -> int:
    """Not below `size`, at least 1; of the host alone, as `cdiv`."""
    return 1 << max(size - 1, 0).bit_length()


def padded(size: int) -> int:
    """The axis of a tile that holds `size`: a power of two, at least what a matrix product takes."""
    return max(next_power_of_2(size), 16)


def one_layout(size: int, dtype: torch.dtype) -> int:
    """`padded`, of halves at least 64: all tiles that products take have one layout in shared memory. Where a kernel had others beside it, ptxas
    12.8 read registers that nothing had written, for the descriptors of Hopper's products."""
    return max(padded(size), 64 if dtype.itemsize == 2 else 0)
