"""Sequences as runs of whole blocks (`ops/common/alignment.py`), and tiles of what kernels keep of each block, head by head."""

import triton
import triton.language as tl


@triton.jit
def row_pointers(p, i_bh, i_row, NR, C: tl.constexpr, D: tl.constexpr):
    """Of [C D] from a row of p [B·H NR D]."""
    # a 64-bit base and 32-bit offsets: a tile of 64-bit ones is dear in registers
    return p + (tl.cast(i_bh, tl.int64) * NR + i_row) * D + tl.arange(0, C)[:, None] * D + tl.arange(0, D)[None, :]


@triton.jit
def sequence_of(p_cum, N, i_b, i_block, blocks, PACKED: tl.constexpr):
    """Number of the sequence that holds a block of row i_b, its first block and the one after its last, counted in the row.
    A block of no sequence: end <= i_block."""
    i_n = i_b
    first = 0
    end = blocks
    if PACKED:
        i_n = 0
        for i in range(0, N, 512):
            n = i + tl.arange(0, 512)
            ends = tl.load(p_cum + n + 1, mask=n < N, other=0)
            i_n += tl.sum(((n < N) & (ends <= i_block)).to(tl.int32), 0)
        i_n = tl.minimum(i_n, N - 1)
        first = tl.load(p_cum + i_n)
        end = tl.load(p_cum + i_n + 1)
    return i_n, first, end


@triton.jit
def chain_of(p_cum, i_n, blocks, PACKED: tl.constexpr):
    """Row of a sequence, its first block there and the one after its last."""
    i_b = i_n
    first = 0
    end = blocks
    if PACKED:
        i_b = 0
        first = tl.load(p_cum + i_n)
        end = tl.load(p_cum + i_n + 1)
    return i_b, first, end
