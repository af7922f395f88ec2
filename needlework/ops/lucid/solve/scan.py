"""The causal solve, left to right, and its transpose, right to left (REV), by blocks of C rows of a sequence and head.

    Y_i = I_i (V_i − Σ_{j<i} A_ij Y_j)        REV: Z_i = I_iᵀ (dY_i − Σ_{j>i} A_jiᵀ Z_j)
    "beta": U_i = I_i (…), Y_i = β U_i        REV: Z_i = I_iᵀ β (…)

x and I are those of operands.py, which gives I − 1: I a is a + (I − 1) a, so that a itself is not rounded. The newest neighbour's
part, I_i A_{i,i−1} Y_{i−1}, is formed as (I_i A_{i,i−1}) Y_{i−1}: what is left of a block once its neighbour is known is one product,
so that the chain of blocks is short.

A sequence's first `given` blocks, its pages, are not solved: their Y is V, their Z is 0, and what is written out for them is dY − ….

Y is kept in half precision, head by head, times a power of two that brings the largest |V| of a row and head into [1, 2).

In float32 each product is summed before it is added: V is often much larger than Σ A Y, and one chain of sums that begins with V
rounds at V's size at every key (2.5 times the error of the blocked form at 300 keys), not at every block.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.runs import row_pointers, sequence_of
from needlework.ops.common.kernels.tile import plus_product
from needlework.ops.lucid.solve.operands import (
    exponent,
    exponentials,
    hidden_in_window,
    load_rows,
    power_of_two,
    token_pointers,
)


@triton.jit
def neighbour(first, end, q, REV: tl.constexpr):
    """The block that is solved q-th in its sequence."""
    if REV:
        i = end - 1 - q
    else:
        i = first + q
    return i


@triton.jit
def entries(
    b_x, x_k, p_mu, i_bh, i_row, j_row, NR, W,
    C: tl.constexpr, KB: tl.constexpr, SCALE: tl.constexpr, TMA: tl.constexpr, ROWMAX: tl.constexpr, WINDOW: tl.constexpr,
    REV: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A between rows from i_row and columns from j_row; REV: Aᵀ, where the columns come later."""
    b_j = load_rows(x_k, i_bh, j_row, NR, C, KB, TMA)
    s = tl.dot(b_x, tl.trans(b_j), input_precision="ieee", out_dtype=ACC)
    o = tl.arange(0, C)
    if ROWMAX:
        p = p_mu + tl.cast(i_bh, tl.int64) * NR
        if REV:
            a = exponentials(s, tl.load(p + j_row + o)[None, :], SCALE, ROWMAX)
        else:
            a = exponentials(s, tl.load(p + i_row + o)[:, None], SCALE, ROWMAX)
    else:
        a = exponentials(s, 0.0, SCALE, ROWMAX)
    gap = i_row - j_row + (o[:, None] - o[None, :])
    if REV:
        gap = -gap
    return hidden_in_window(a, gap, W, WINDOW)


@triton.jit
def gathered(
    acc, lo, hi, b_x, x_k, p_mu, p_y, i_bh, i_block, first, end, NR, W,
    C: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, NS: tl.constexpr, SCALE: tl.constexpr, TMA: tl.constexpr,
    ROWMAX: tl.constexpr, WINDOW: tl.constexpr, REV: tl.constexpr, ACC: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """acc + Σ A Y over the blocks solved lo-th to before hi-th. All of them are known: loads run ahead of the products."""
    for q in tl.range(lo, hi, num_stages=NS):
        j_row = neighbour(first, end, q, REV) * C
        a = entries(b_x, x_k, p_mu, i_bh, i_block * C, j_row, NR, W, C, KB, SCALE, TMA, ROWMAX, WINDOW, REV, ACC)
        b_y = tl.load(row_pointers(p_y, i_bh, j_row, NR, C, VB))
        acc = plus_product(acc, a.to(ST), b_y)
    return acc


@triton.jit
def first_seen(i_block, first, end, W, C: tl.constexpr, WINDOW: tl.constexpr, REV: tl.constexpr):
    """How many of the blocks solved before are outside the window of every row of this one."""
    q = 0
    if WINDOW:
        if REV:
            q = tl.maximum(0, end - 1 - (i_block * C + C - 1 + W - 1) // C)
        else:
            q = tl.maximum(0, (i_block - first) * C - W + 1) // C
    return q


@triton.jit
def operands(
    p_I, p_beta, i_bh, i_block, T, NR,
    H: tl.constexpr, C: tl.constexpr, BETA: tl.constexpr, REV: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """What a right side is multiplied by: I − 1, or its transpose; and β."""
    o = tl.arange(0, C)
    p = p_I + (tl.cast(i_bh, tl.int64) * NR + i_block * C) * C
    if REV:
        b_I = tl.load(p + o[None, :] * C + o[:, None])
    else:
        b_I = tl.load(p + o[:, None] * C + o[None, :])
    beta = tl.full([C], 1.0, ACC)
    if BETA:
        o_t = i_block * C + o
        beta = tl.load(p_beta + (tl.cast(i_bh // H, tl.int64) * T + o_t) * H + i_bh % H, mask=o_t < T, other=0.0).to(ACC)
    return b_I, beta


@triton.jit
def right_side(
    p_rhs, p_peak, i_bh, i_block, T,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, VB: tl.constexpr, HALF: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """−V of a block, scaled, and the way back."""
    up = 1.0
    down = 1.0
    if HALF:
        e = exponent(p_peak, i_bh)
        up = power_of_two(254 - e)
        down = power_of_two(e)
    at, real = token_pointers(p_rhs, i_bh // H, i_block * C, i_bh % H, T, H, V, C, VB)
    return tl.load(at, mask=real, other=0.0).to(ACC) * -up, down


@triton.jit
def inverted(acc, b_I, beta, is_given, BETA: tl.constexpr, REV: tl.constexpr, ST: tl.constexpr):
    """I times the right side that is left, −acc; of a given block the right side itself."""
    acc = -acc
    if is_given:
        u = acc
    else:
        if BETA and REV:
            acc *= beta[:, None]
        u = plus_product(acc, b_I, acc.to(ST))
    return u


@triton.jit
def solved(u, beta, is_given, BETA: tl.constexpr, REV: tl.constexpr):
    """Y, and what others gather of it."""
    y = u
    if BETA and not REV:
        y = u * beta[:, None]
    kept = y
    if REV:
        kept = tl.where(is_given, 0.0, y)
    return y, kept


@triton.jit
def write(
    y, u, z, down, p_out, p_r, p_v, p_zv, p_row_peak, i_bh, i_block, T, NR,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, VB: tl.constexpr, SAVE_R: tl.constexpr, ZV: tl.constexpr,
    HALF: tl.constexpr, ACC: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """What no program waits for: y as the caller's numbers, and of what is gathered, z, the largest norm of a row, which bounds the
    gradient of A. SAVE_R: also R = V − U. ZV: also z_i·v_i, the gradient of a row's maximum."""
    at, real = token_pointers(p_out, i_bh // H, i_block * C, i_bh % H, T, H, V, C, VB)
    tl.store(at, (y * down).to(p_out.dtype.element_ty), mask=real)
    square = tl.sum(z * z, 1)
    if SAVE_R or ZV:
        at, real = token_pointers(p_v, i_bh // H, i_block * C, i_bh % H, T, H, V, C, VB)
        b_v = tl.load(at, mask=real, other=0.0).to(ACC)
    if SAVE_R:
        tl.store(row_pointers(p_r, i_bh, i_block * C, NR, C, VB), (b_v / down - u).to(ST))
        square = tl.maximum(square, tl.sum(u * u, 1))
    if HALF:
        largest = tl.sqrt(tl.max(square, 0))
        tl.atomic_max(p_row_peak + i_bh, largest.to(tl.int32, bitcast=True), sem="relaxed")
    if ZV:
        zv = tl.sum(z * down * b_v, 1)
        tl.store(p_zv + tl.cast(i_bh, tl.int64) * NR + i_block * C + tl.arange(0, C), zv)


@triton.jit(do_not_specialize=["T", "NR", "N", "W", "given", "tiles", "G", "turns"])
def solve(
    x_k, p_mu, p_I, p_beta, p_rhs, p_y, p_r, p_out, p_v, p_zv, p_peak, p_row_peak, p_cum, p_order, p_done, p_ticket,
    T, NR, N, W, given, tiles, G, turns,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, NS: tl.constexpr,
    SCALE: tl.constexpr, TMA: tl.constexpr, ROWMAX: tl.constexpr, BETA: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
    GIVEN: tl.constexpr, REV: tl.constexpr, SAVE_R: tl.constexpr, HALF: tl.constexpr, ACC: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """All blocks in one launch: programs take blocks by ticket and wait for those solved before.

    A ticket's block follows, in its sequence, only blocks of earlier tickets, which have programs that run; p_done counts the
    solved blocks of a sequence and head. No wait is longer than `turns`: a block that has waited so long is NaN, and so is all
    that follows it in its sequence. Tickets go through G heads before the next G: what they read stays in the L2 cache.
    """
    blocks = NR // C
    ticket = tl.atomic_add(p_ticket, 1, sem="relaxed")
    while ticket < tiles * H:
        place = ticket % (tiles * G)
        i_h = ticket // (tiles * G) * G + place % G
        place = place // G
        if PACKED:
            i_b = 0
            i_block = tl.load(p_order + place)
        else:
            i_b = place % N
            i_block = neighbour(0, blocks, place // N, REV)
        i_n, first, end = sequence_of(p_cum, N, i_b, i_block, blocks, PACKED)
        if i_block < end:
            i_bh = i_b * H + i_h
            p_count = p_done + i_n * H + i_h
            at = end - 1 - i_block if REV else i_block - first
            is_given = False
            if GIVEN:
                is_given = i_block - first < given
            b_x = load_rows(x_k, i_bh, i_block * C, NR, C, KB, TMA)
            b_I, beta = operands(p_I, p_beta, i_bh, i_block, T, NR, H, C, BETA, REV, ACC)
            # with no neighbour it is a product that is not used
            j_row = neighbour(first, end, tl.maximum(at - 1, 0), REV) * C
            a = entries(b_x, x_k, p_mu, i_bh, i_block * C, j_row, NR, W, C, KB, SCALE, TMA, ROWMAX, WINDOW, REV, ACC)
            if BETA and REV:
                a *= beta[:, None]
            b_M = (-plus_product(a, b_I, a.to(ST))).to(ST)
            acc, down = right_side(p_rhs, p_peak, i_bh, i_block, T, H, V, C, VB, HALF, ACC)

            q = first_seen(i_block, first, end, W, C, WINDOW, REV)
            # a given block has no neighbour to wait for, or, backwards, no product to form with it
            last = at - 1
            if is_given:
                last = at if REV else 0
            turn = 0
            while (q < last) & (turn < turns):
                known = tl.minimum(tl.atomic_add(p_count, 0, sem="acquire"), last)
                acc = gathered(
                    acc, q, known, b_x, x_k, p_mu, p_y, i_bh, i_block, first, end, NR, W,
                    C, KB, VB, NS, SCALE, TMA, ROWMAX, WINDOW, REV, ACC, ST,
                )  # fmt: skip
                q = tl.maximum(q, known)
                turn += 1
            late = q < last  # never, unless a wait has run out
            u = inverted(acc, b_I, beta, is_given, BETA, REV, ST)
            known = 0
            while (known < at) & (turn < turns):
                known = tl.atomic_add(p_count, 0, sem="acquire")
                turn += 1
            late = late | (known < at)
            if (at > 0) & (not is_given):
                b_y = tl.load(row_pointers(p_y, i_bh, j_row, NR, C, VB))
                u = plus_product(u, b_M, b_y)
            u = tl.where(late, float("nan"), u)
            y, kept = solved(u, beta, is_given, BETA, REV)
            tl.store(row_pointers(p_y, i_bh, i_block * C, NR, C, VB), kept.to(ST))
            tl.debug_barrier()
            tl.atomic_max(p_count, at + 1, sem="release")
            write(
                y, u, kept, down, p_out, p_r, p_v, p_zv, p_row_peak, i_bh, i_block, T, NR,
                H, V, C, VB, SAVE_R, REV and ROWMAX, HALF, ACC, ST,
            )  # fmt: skip
        ticket = tl.atomic_add(p_ticket, 1, sem="relaxed")
