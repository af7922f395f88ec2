"""k̂ of keys, and the gradient of keys from that of k̂, row by row.

k̂ = k / max(‖k‖, 1e-6)        dk = (dk̂ − k̂ (k̂·dk̂) / (k̂·k̂)) / ‖k‖
"""

import triton
import triton.language as tl

TINY = tl.constexpr(1e-6)  # norms below it do not scale a key to 1


@triton.jit
def row_tile(i_row, rows, K: tl.constexpr, KB: tl.constexpr, R: tl.constexpr):
    """Numbers, offsets and presence of R rows of K."""
    o_r = i_row + tl.arange(0, R)
    o_k = tl.arange(0, KB)
    return o_r, tl.cast(o_r, tl.int64)[:, None] * K + o_k[None, :], (o_r < rows)[:, None] & (o_k < K)[None, :]


@triton.jit(do_not_specialize=["rows"])
def directions(p_k, p_x, p_norm, rows, K: tl.constexpr, KB: tl.constexpr, R: tl.constexpr, ACC: tl.constexpr):
    """p_x: k̂ as an operand. p_norm [rows] in ACC."""
    o_r, at, real = row_tile(tl.program_id(0) * R, rows, K, KB, R)
    k = tl.load(p_k + at, mask=real, other=0.0).to(ACC)
    norm = tl.sqrt(tl.sum(k * k, 1))
    tl.store(p_norm + o_r, norm, mask=o_r < rows)
    tl.store(p_x + at, (k / tl.maximum(norm, TINY)[:, None]).to(p_x.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows"])
def tangents(
    p_x, p_norm, p_d_row, p_d_column, p_dk, rows, K: tl.constexpr, KB: tl.constexpr, R: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """p_dk, from dk̂ of a key as a row of P and as a column, both in ACC."""
    o_r, at, real = row_tile(tl.program_id(0) * R, rows, K, KB, R)
    d = tl.load(p_d_row + at, mask=real, other=0.0) + tl.load(p_d_column + at, mask=real, other=0.0)
    norm = tl.load(p_norm + o_r, mask=o_r < rows, other=0.0)
    # by k̂ as it was multiplied with: where all keys are one, what is left is exactly nothing
    x = tl.load(p_x + at, mask=real, other=0.0).to(ACC)
    radial = tl.sum(x * d, 1) / tl.maximum(tl.sum(x * x, 1), 1e-30)
    radial = tl.where(norm > TINY, radial, 0.0)
    d = (d - x * radial[:, None]) / tl.maximum(norm, TINY)[:, None]
    tl.store(p_dk + at, d.to(p_dk.dtype.element_ty), mask=real)
