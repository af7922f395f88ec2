"""Contiguous tensors as the copy engine takes them: descriptors of blocks [1 1 rows columns]."""

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


def token_tile(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """`rows` tokens and `columns` of D of one head, of x [B T H D]: indexed [b, h, t, d], zeros past T and D."""
    B, T, H, D = x.shape
    return _descriptor(x, [B, H, T, D], [T * H * D, D, H * D, 1], rows, columns)


def block(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Of x [a b rows columns], indexed in this order."""
    _, b, m, n = x.shape
    return _descriptor(x, list(x.shape), [b * m * n, m * n, n, 1], rows, columns)


def _descriptor(x: Tensor, shape: list[int], strides: list[int], rows: int, columns: int) -> TensorDescriptor:
    # without __init__, whose checks cost more than a launch, dozens of times a call: the launch plan asks for rows of a multiple
    # of 16 bytes; the base may be a user's slice
    made = object.__new__(TensorDescriptor)
    made.base = x if x.data_ptr() % 16 == 0 else x.clone()
    made.shape, made.strides, made.block_shape = shape, strides, [1, 1, rows, columns]
    return made
