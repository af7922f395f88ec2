"""Tiles of contiguous tensors, by the copy engine (descriptors of blocks [1 1 rows columns]) or by pointers."""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from needlework.ops.common.decay import NOTHING

LEAST = tl.constexpr(NOTHING)


def token_tile(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """`rows` tokens and `columns` of D of one head, of x [B T H D]: indexed [b, h, t, d], zeros past T and D."""
    B, T, H, D = x.shape
    return _descriptor(x, [B, H, T, D], [T * H * D, D, H * D, 1], rows, columns)


def block(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Of x [a b rows columns], indexed in this order."""
    _, b, m, n = x.shape
    return _descriptor(x, list(x.shape), [b * m * n, m * n, n, 1], rows, columns)


def _descriptor(x: Tensor, shape: list[int], strides: list[int], rows: int, columns: int) -> TensorDescriptor:
    # without __init__, whose checks cost more than a launch, dozens of times a call: the launch config asks for rows of a multiple
    # of 16 bytes; the base may be a user's slice
    made = object.__new__(TensorDescriptor)
    made.base = x if x.data_ptr() % 16 == 0 else x.clone()
    made.shape, made.strides, made.block_shape = shape, strides, [1, 1, rows, columns]
    return made


@triton.jit
def capped(g):
    """Log decays; those whose e^g is 0 no larger than that takes, or their sums would cost the digits of the others. NaN stays NaN."""
    return tl.maximum(g, LEAST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def plus_product(acc, a, b):
    """acc + a b. Of operands as wide as their sums the product is summed by itself first: one float32 sum of 256 products errs more than sums
    of its parts do; an "imprecise" accumulator, which float32 products know nothing of, keeps the compiler from making one of them again."""
    if a.dtype == acc.dtype:
        acc += tl.dot(a, b, input_precision="ieee", max_num_imprecise_acc=1, out_dtype=acc.dtype)
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=acc.dtype)
    return acc


@triton.jit
def load_tile(x, i_b, i_t, i_h, i_d, T, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, TMA: tl.constexpr):
    """[C BD] of x [B T H D], zeros past T and D. x: a pointer, or a descriptor of its [B H T D] view."""
    if TMA:
        b = tl.reshape(x.load([i_b, i_h, i_t, i_d]), [C, BD])
    else:
        o_t = i_t + tl.arange(0, C)
        o_d = i_d + tl.arange(0, BD)
        row = (tl.cast(i_b, tl.int64) * T + o_t) * H + i_h
        b = tl.load(x + row[:, None] * D + o_d[None, :], mask=(o_t < T)[:, None] & (o_d < D)[None, :], other=0.0)
    return b


@triton.jit
def store_tile(
    x, b, i_b, i_t, i_h, i_d, T, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """The inverse of `load_tile`, in x's dtype: nothing is written past T and D."""
    if TMA:
        x.store([i_b, i_h, i_t, i_d], tl.reshape(b.to(x.dtype), [1, 1, C, BD]))
    else:
        o_t = i_t + tl.arange(0, C)
        o_d = i_d + tl.arange(0, BD)
        row = (tl.cast(i_b, tl.int64) * T + o_t) * H + i_h
        tl.store(x + row[:, None] * D + o_d[None, :], b, mask=(o_t < T)[:, None] & (o_d < D)[None, :])
