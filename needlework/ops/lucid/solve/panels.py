"""The solve of scan.py without waiting, for where a program may not count on others to run: panels of S blocks, two launches each."""

import triton
import triton.language as tl

from needlework.ops.common.kernels.runs import chain_of, row_pointers
from needlework.ops.lucid.solve.operands import exponent, load_rows, power_of_two
from needlework.ops.lucid.solve.scan import first_seen, gathered, inverted, neighbour, operands, right_side, solved, write


@triton.jit(do_not_specialize=["T", "NR", "W", "given", "start"])
def before_panel(
    x_k, p_mu, p_rhs, p_y, p_rest, p_peak, p_cum, T, NR, W, given, start,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, NS: tl.constexpr, S: tl.constexpr,
    SCALE: tl.constexpr, TMA: tl.constexpr, ROWMAX: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
    GIVEN: tl.constexpr, REV: tl.constexpr, HALF: tl.constexpr, ACC: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """What the blocks before a panel, which begins at block `start` of each sequence, leave of one of its right sides."""
    i_chain = tl.program_id(0) // S
    at = start + tl.program_id(0) % S
    i_b, first, end = chain_of(p_cum, i_chain // H, NR // C, PACKED)
    if at < end - first:
        i_bh = i_b * H + i_chain % H
        i_block = neighbour(first, end, at, REV)
        acc, _ = right_side(p_rhs, p_peak, i_bh, i_block, T, H, V, C, VB, HALF, ACC)
        b_x = load_rows(x_k, i_bh, i_block * C, NR, C, KB, TMA)
        last = start
        if GIVEN and not REV:
            last = tl.where(i_block - first < given, 0, start)
        acc = gathered(
            acc, first_seen(i_block, first, end, W, C, WINDOW, REV), last, b_x, x_k, p_mu, p_y, i_bh, i_block, first, end, NR, W,
            C, KB, VB, NS, SCALE, TMA, ROWMAX, WINDOW, REV, ACC, ST,
        )  # fmt: skip
        tl.store(row_pointers(p_rest, tl.program_id(0), 0, C, C, VB), acc)


@triton.jit(do_not_specialize=["T", "NR", "W", "given", "start"])
def panel(
    x_k, p_mu, p_I, p_beta, p_rest, p_y, p_r, p_out, p_v, p_zv, p_peak, p_row_peak, p_cum, T, NR, W, given, start,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, NS: tl.constexpr, S: tl.constexpr,
    SCALE: tl.constexpr, TMA: tl.constexpr, ROWMAX: tl.constexpr, BETA: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
    GIVEN: tl.constexpr, REV: tl.constexpr, SAVE_R: tl.constexpr, HALF: tl.constexpr, ACC: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """A panel of one sequence and head, block by block."""
    i_b, first, end = chain_of(p_cum, tl.program_id(0) // H, NR // C, PACKED)
    i_bh = i_b * H + tl.program_id(0) % H
    for at in range(start, tl.minimum(start + S, end - first)):
        i_block = neighbour(first, end, at, REV)
        is_given = False
        if GIVEN:
            is_given = i_block - first < given
        b_x = load_rows(x_k, i_bh, i_block * C, NR, C, KB, TMA)
        acc = tl.load(row_pointers(p_rest, tl.program_id(0) * S + at - start, 0, C, C, VB))
        last = at
        if GIVEN and not REV:
            last = tl.where(is_given, start, at)
        acc = gathered(
            acc, tl.maximum(start, first_seen(i_block, first, end, W, C, WINDOW, REV)), last, b_x, x_k, p_mu, p_y, i_bh, i_block,
            first, end, NR, W, C, KB, VB, NS, SCALE, TMA, ROWMAX, WINDOW, REV, ACC, ST,
        )  # fmt: skip
        b_I, beta = operands(p_I, p_beta, i_bh, i_block, T, NR, H, C, BETA, REV, ACC)
        u = inverted(acc, b_I, beta, is_given, BETA, REV, ST)
        y, kept = solved(u, beta, is_given, BETA, REV)
        tl.store(row_pointers(p_y, i_bh, i_block * C, NR, C, VB), kept.to(ST))
        tl.debug_barrier()
        down = 1.0
        if HALF:
            down = power_of_two(exponent(p_peak, i_bh))
        write(
            y, u, kept, down, p_out, p_r, p_v, p_zv, p_row_peak, i_bh, i_block, T, NR,
            H, V, C, VB, SAVE_R, REV and ROWMAX, HALF, ACC, ST,
        )  # fmt: skip
