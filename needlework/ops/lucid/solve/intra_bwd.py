"""The gradient of the keys (and of β), every block for itself: what reaches it as a row and as a column of A. No atomics.

    G_ij = −(z_i·y_j) A_ij, j < i      dx_i = Σ_{j<i} G_ij x_j + Σ_{j>i} G_ji x_j
    "key", "beta"   dk = √d (dx − x (x·dx) / (x·x)) / ‖k‖      "beta": dβ_i = dy_i·u_i − Σ_{j>i} A_ji (z_j·u_i)
    "rowmax"        j <= i, and where j is the row's maximum G_ij += z_i·v_i = Σ_j A_ij (z_i·y_j);    dk = dx / √d

A row of "rowmax" has Σ_j G_ij = 0, and where keys are alike little else remains of Σ_j G_ij x_j: the maximum's part of a row is
the sum of what was rounded, times its key, so that no rounding of G is left but between different keys.

In half precision y and z are those of scan.py, times a power of two, and G is multiplied by another, so that the largest
entry that the norms of their rows allow is a float16 number and small ones lose nothing.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.runs import row_pointers, sequence_of
from needlework.ops.common.kernels.tile import plus_product
from needlework.ops.lucid.solve.operands import (
    TINY,
    exponent,
    exponentials,
    hidden_in_window,
    load_rows,
    power_of_two,
    token_pointers,
)


@triton.jit
def coupled(
    acc, rho, b_x, b_z, x_k, x_y, p_mu, p_top, p_zv, i_bh, i_row, j_row, NR, W, up, up_zv,
    C: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, SCALE: tl.constexpr, TMA: tl.constexpr, ROWMAX: tl.constexpr,
    BETA: tl.constexpr, WINDOW: tl.constexpr, LATER: tl.constexpr, DIAGONAL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """acc − Σ_j G_ij x_j over one block of columns j, of earlier tokens or of LATER ones; b_z: z_i, or y_i where j is later.
    rho: also Σ_j A_ji (z_j·u_i) for β, and for a row's maximum −Σ_j G_ij without it."""
    b_j = load_rows(x_k, i_bh, j_row, NR, C, KB, TMA)
    b_y = load_rows(x_y, i_bh, j_row, NR, C, VB, TMA)
    s = tl.dot(b_x, tl.trans(b_j), input_precision="ieee", out_dtype=ACC)
    w = tl.dot(b_z, tl.trans(b_y), input_precision="ieee", out_dtype=ACC)
    o = tl.arange(0, C)
    p_row = p_mu + tl.cast(i_bh, tl.int64) * NR
    if ROWMAX:
        if LATER:
            a = exponentials(s, tl.load(p_row + j_row + o)[None, :], SCALE, ROWMAX)
        else:
            a = exponentials(s, tl.load(p_row + i_row + o)[:, None], SCALE, ROWMAX)
    else:
        a = exponentials(s, 0.0, SCALE, ROWMAX)
    gap = i_row - j_row + (o[:, None] - o[None, :])
    if LATER:
        gap = -gap
    a = hidden_in_window(a, gap, W, WINDOW)
    if DIAGONAL:
        a = tl.where((gap >= 0) if ROWMAX else (gap > 0), a, 0.0)
    g = a * w
    if BETA and LATER:
        rho += tl.sum(g, 1)
    g *= up
    if ROWMAX and LATER:
        best = tl.load(p_top + tl.cast(i_bh, tl.int64) * NR + j_row + o)
        zv = tl.load(p_zv + tl.cast(i_bh, tl.int64) * NR + j_row + o) * up_zv
        g -= tl.where(best[None, :] == (i_row + o)[:, None], zv[None, :], 0.0)
    b_g = g.to(b_j.dtype)
    if ROWMAX and not LATER:
        rho += tl.sum(b_g.to(ACC), 1)
    acc = plus_product(acc, b_g, b_j)
    return acc, rho


@triton.jit(do_not_specialize=["T", "NR", "N", "W"])
def key_gradient(
    x_k, x_y, x_z, p_x, p_y, p_r, p_z, p_norm, p_mu, p_top, p_zv, p_beta, p_v, p_dy, p_dk, p_dbeta, p_peak_y, p_peak_z, p_rows_y, p_rows_z,
    p_cum,
    T, NR, N, W,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, NS: tl.constexpr,
    SCALE: tl.constexpr, ROOT: tl.constexpr, TMA: tl.constexpr, ROWMAX: tl.constexpr, BETA: tl.constexpr, WINDOW: tl.constexpr,
    PACKED: tl.constexpr, HALF: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dk of one block, and dβ."""
    blocks = NR // C
    i_bh = tl.program_id(0) // blocks
    i_b = i_bh // H
    i_h = i_bh % H
    i_block = tl.program_id(0) % blocks
    i_row = i_block * C
    o = tl.arange(0, C)
    _, first, end = sequence_of(p_cum, N, i_b, i_block, blocks, PACKED)
    if i_block < end:
        lo = first
        hi = end
        if WINDOW:
            lo = tl.maximum(first, tl.maximum(i_row - W + 1, 0) // C)
            hi = tl.minimum(end, (i_row + C - 1 + W - 1) // C + 1)
        up = 1.0
        down = 1.0
        up_zv = 1.0
        if HALF:
            e_y = exponent(p_peak_y, i_bh)
            e_z = exponent(p_peak_z, i_bh)
            # |y| < 2^(rows_y − 126), likewise z: of their product 2^15 remains
            e = tl.minimum(tl.maximum(394 - exponent(p_rows_y, i_bh) - exponent(p_rows_z, i_bh), 1), 253)
            up = power_of_two(e)
            down = power_of_two(254 - e) * power_of_two(e_y) * power_of_two(e_z)
            up_zv = up * power_of_two(254 - e_y) * power_of_two(254 - e_z)
        b_x = tl.load(row_pointers(p_x, i_bh, i_row, NR, C, KB))
        row = tl.cast(i_bh, tl.int64) * NR + i_row + o

        # as a column, of u. With β that is not y, and dβ may not divide by it: u = v − r, r of the forward, since what is rounded of
        # v itself, where keys have little in common, is more than all else that dβ errs by
        if BETA:
            at, real = token_pointers(p_v, i_b, i_row, i_h, T, H, V, C, VB)
            u = tl.load(at, mask=real, other=0.0).to(ACC)
            if HALF:
                u *= power_of_two(254 - e_y)
            u -= tl.load(row_pointers(p_r, i_bh, i_row, NR, C, VB)).to(ACC)
            b_u = u.to(b_x.dtype)
        else:
            b_u = tl.load(row_pointers(p_y, i_bh, i_row, NR, C, VB))
        acc = tl.zeros([C, KB], ACC)
        rho = tl.zeros([C], ACC)
        acc, rho = coupled(
            acc, rho, b_x, b_u, p_x, p_z, p_mu, p_top, p_zv, i_bh, i_row, i_row, NR, W, up, up_zv,
            C, KB, VB, SCALE, 0, ROWMAX, BETA, WINDOW, 1, 1, ACC,
        )  # fmt: skip
        for j in tl.range(i_block + 1, hi, num_stages=NS):
            acc, rho = coupled(
                acc, rho, b_x, b_u, x_k, x_z, p_mu, p_top, p_zv, i_bh, i_row, j * C, NR, W, up, up_zv,
                C, KB, VB, SCALE, TMA, ROWMAX, BETA, WINDOW, 1, 0, ACC,
            )  # fmt: skip
        if BETA:
            live = i_row + o < T
            token = (tl.cast(i_b, tl.int64) * T + i_row + o) * H + i_h
            beta = tl.load(p_beta + token, mask=live, other=0.0).to(ACC)
            acc *= beta[:, None]
            at, real = token_pointers(p_dy, i_b, i_row, i_h, T, H, V, C, VB)
            own = tl.sum(tl.load(at, mask=real, other=0.0).to(ACC) * u, 1)
            if HALF:
                own *= power_of_two(e_y)
                rho = rho * power_of_two(e_y) * power_of_two(e_z)
            tl.store(p_dbeta + token, own - rho, mask=live)

        # as a row
        if ROWMAX:
            rho = tl.zeros([C], ACC)
        b_z = tl.load(row_pointers(p_z, i_bh, i_row, NR, C, VB))
        for j in tl.range(lo, i_block, num_stages=NS):
            acc, rho = coupled(
                acc, rho, b_x, b_z, x_k, x_y, p_mu, p_top, p_zv, i_bh, i_row, j * C, NR, W, up, up_zv,
                C, KB, VB, SCALE, TMA, ROWMAX, BETA, WINDOW, 0, 0, ACC,
            )  # fmt: skip
        acc, rho = coupled(
            acc, rho, b_x, b_z, p_x, p_y, p_mu, p_top, p_zv, i_bh, i_row, i_row, NR, W, up, up_zv,
            C, KB, VB, SCALE, 0, ROWMAX, BETA, WINDOW, 0, 1, ACC,
        )  # fmt: skip

        if ROWMAX:
            best = tl.load(p_top + row)
            p_best = p_x + (tl.cast(i_bh, tl.int64) * NR + best[:, None]) * KB + tl.arange(0, KB)[None, :]
            acc -= rho[:, None] * tl.load(p_best).to(ACC)
        dx = -acc * down
        if ROWMAX:
            dx = dx / ROOT
        else:
            # by x as it was multiplied with: where all keys are one, what is left is exactly nothing
            x = b_x.to(ACC)
            norm = tl.load(p_norm + row)
            radial = tl.sum(x * dx, 1) / tl.maximum(tl.sum(x * x, 1), 1e-30)
            radial = tl.where(norm > TINY, radial, 0.0)
            dx = (dx - x * radial[:, None]) * (ROOT / tl.maximum(norm, TINY))[:, None]
        at, real = token_pointers(p_dk, i_b, i_row, i_h, T, H, K, C, KB)
        tl.store(at, dx.to(p_dk.dtype.element_ty), mask=real)
