"""What the solve needs of each block of C tokens before it begins: its keys x as operands, head by head, and the inverse of its
diagonal block.

    "key", "beta"   x = k̂ = k / max(‖k‖, 1e-6)    A_ij = e^{√d (x_i·x_j − 1)}    I = (1 + stril(A) Diag(β))⁻¹
    "rowmax"        x = k                         A_ij = e^{x_i·x_j / √d − μ_i}  I = tril(A)⁻¹

Exponents are in log2: SCALE is √d log2 e, or log2 e / √d, and μ (top) is kept times log2 e. Keys are copied so that a head's rows
follow each other, KB wide and NR long a row of the batch, zeros in what is past K and T: the loops that read them need no mask.
"""

import math

import triton
import triton.language as tl

from needlework.ops.common.kernels.runs import row_pointers, sequence_of

TINY = tl.constexpr(1e-6)  # norms below it do not scale a key to 1


def scale(K: int, rowmax: bool) -> float:
    """SCALE, of the host."""
    root = math.sqrt(K)
    return math.log2(math.e) * (1 / root if rowmax else root)


@triton.jit
def load_rows(x, i_bh, i_row, NR, C: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr):
    """[C D] of [B·H NR D]. x: a pointer, or a descriptor of its [1 B·H NR D] view."""
    if TMA:
        b = tl.reshape(x.load([0, i_bh, i_row, 0]), [C, D])
    else:
        b = tl.load(row_pointers(x, i_bh, i_row, NR, C, D))
    return b


@triton.jit
def token_pointers(p, i_b, i_t, i_h, T, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """Of C tokens of x [B T H D], and which of them are there."""
    o_t = tl.arange(0, C)[:, None]
    o_d = tl.arange(0, BD)[None, :]
    at = p + ((tl.cast(i_b, tl.int64) * T + i_t) * H + i_h) * D + o_t * (H * D) + o_d
    return at, (i_t + o_t < T) & (o_d < D)


@triton.jit
def exponentials(s, bias, SCALE: tl.constexpr, ROWMAX: tl.constexpr):
    """A from products of keys; bias: μ, spread over rows or columns as s is."""
    if ROWMAX:
        # two ways to sum may leave a last digit above 0
        a = tl.exp2(tl.minimum(s * SCALE - bias, 0.0))
    else:
        a = tl.exp2(s * SCALE - SCALE)
    return a


@triton.jit
def inverse_of(A, diagonal, b: tl.constexpr, ST: tl.constexpr, ACC: tl.constexpr):
    """Inverses of stril(A) + Diag(diagonal), [n b b]: of blocks of 2, 4, …, b from those of their halves, X₂₁ = −X₂₂ A₂₁ X₁₁."""
    t = tl.arange(0, b)[None, :, None]
    s = tl.arange(0, b)[None, None, :]
    own = 1.0 / diagonal
    pairs = tl.where((t > s) & (t // 2 == s // 2), A * own[:, :, None], 0.0)
    X = tl.where(t == s, own[:, None, :], -pairs * own[:, None, :])
    for j in tl.static_range(1, 8):
        if (1 << j) < b:
            corner = tl.where((t > s) & (t >> (j + 1) == s >> (j + 1)) & (t >> j != s >> j), A, 0.0)
            b_X = X.to(ST)
            b_U = tl.dot(corner.to(ST), b_X, input_precision="ieee", out_dtype=ACC).to(ST)
            X -= tl.dot(b_X, b_U, input_precision="ieee", out_dtype=ACC)
    return X


@triton.jit
def merged(X, A, n: tl.constexpr, b: tl.constexpr, ST: tl.constexpr, ACC: tl.constexpr):
    """[n 2b 2b] from the inverses of the diagonal blocks, [2n b b], and A below them, [n b b]: the same step once more."""
    X11, X22 = tl.split(tl.permute(tl.reshape(X, (n, 2, b, b)), (0, 2, 3, 1)))
    b_U = tl.dot(A.to(ST), X11.to(ST), input_precision="ieee", out_dtype=ACC).to(ST)
    X21 = -tl.dot(X22.to(ST), b_U, input_precision="ieee", out_dtype=ACC)
    rows = tl.join(tl.join(X11, X21), tl.join(tl.zeros_like(X22), X22))  # [n b b lower right]
    return tl.reshape(tl.permute(rows, (0, 3, 1, 4, 2)), (n, 2 * b, 2 * b))


@triton.jit
def hidden_in_window(A, gap, W, WINDOW: tl.constexpr):
    """A where a row is `gap` >= W tokens after the column: 0."""
    if WINDOW:
        A = tl.where(gap < W, A, 0.0)
    return A


@triton.jit(do_not_specialize=["T", "NR"])
def keys(
    p_k, p_x, p_norm, T, NR,
    H: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, ROWMAX: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """x and ‖k‖ of one block."""
    blocks = NR // C
    i_bh = tl.program_id(0) // blocks
    i_t = tl.program_id(0) % blocks * C
    at, real = token_pointers(p_k, i_bh // H, i_t, i_bh % H, T, H, K, C, KB)
    b_k = tl.load(at, mask=real, other=0.0)
    if not ROWMAX:
        b_k = b_k.to(ACC)
        norm = tl.sqrt(tl.sum(b_k * b_k, 1))
        tl.store(p_norm + tl.cast(i_bh, tl.int64) * NR + i_t + tl.arange(0, C), norm)
        b_k = b_k / tl.maximum(norm, TINY)[:, None]
    tl.store(row_pointers(p_x, i_bh, i_t, NR, C, KB), b_k.to(p_x.dtype.element_ty))


@triton.jit
def overlaps(
    p_x, p_mu, p_beta, live, W, n: tl.constexpr, b: tl.constexpr, LOWER: tl.constexpr, H: tl.constexpr, KB: tl.constexpr,
    SCALE: tl.constexpr, ROWMAX: tl.constexpr, BETA: tl.constexpr, WINDOW: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Of a block, which the pointers start at: A within each of n runs of b rows; LOWER: of n runs of 2b, between their halves.
    Columns times β, where they are before `live`."""
    first = tl.arange(0, n)[:, None] * (2 * b if LOWER else b)
    o_j = first + tl.arange(0, b)[None, :]
    o_i = o_j + (b if LOWER else 0)
    o_k = tl.arange(0, KB)[None, None, :]
    b_i = tl.load(p_x + o_i[:, :, None] * KB + o_k)
    b_j = tl.load(p_x + o_j[:, :, None] * KB + o_k)
    s = tl.dot(b_i, tl.permute(b_j, (0, 2, 1)), input_precision="ieee", out_dtype=ACC)
    if ROWMAX:
        A = exponentials(s, tl.load(p_mu + o_i)[:, :, None], SCALE, ROWMAX)
    else:
        A = exponentials(s, 0.0, SCALE, ROWMAX)
    A = hidden_in_window(A, o_i[:, :, None] - o_j[:, None, :], W, WINDOW)
    if BETA:
        A *= tl.load(p_beta + o_j * H, mask=o_j < live, other=0.0).to(ACC)[:, None, :]
    return A


@triton.jit(do_not_specialize=["T", "NR", "W"])
def inverses(
    p_x, p_mu, p_beta, p_I, T, NR, W,
    H: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, SCALE: tl.constexpr,
    ROWMAX: tl.constexpr, BETA: tl.constexpr, WINDOW: tl.constexpr, ACC: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """I − 1 of one block, from runs of 16 rows upwards: what the identity leaves as it is is not to be rounded with the rest."""
    blocks = NR // C
    i_bh = tl.program_id(0) // blocks
    i_t = tl.program_id(0) % blocks * C
    row = tl.cast(i_bh, tl.int64) * NR + i_t
    p_x += row * KB
    p_mu += row
    if BETA:
        p_beta += (tl.cast(i_bh // H, tl.int64) * T + i_t) * H + i_bh % H
    n: tl.constexpr = C // 16
    A = overlaps(p_x, p_mu, p_beta, T - i_t, W, n, 16, 0, H, KB, SCALE, ROWMAX, BETA, WINDOW, ACC)
    diagonal = tl.full([n, 16], 1.0, ACC)
    if ROWMAX:
        o = tl.arange(0, 16)
        diagonal = tl.sum(tl.where((o[:, None] == o[None, :])[None, :, :], A, 0.0), 2)
    X = inverse_of(A, diagonal, 16, ST, ACC)
    if C >= 32:
        A = overlaps(p_x, p_mu, p_beta, T - i_t, W, n // 2, 16, 1, H, KB, SCALE, ROWMAX, BETA, WINDOW, ACC)
        X = merged(X, A, n // 2, 16, ST, ACC)
    if C >= 64:
        A = overlaps(p_x, p_mu, p_beta, T - i_t, W, n // 4, 32, 1, H, KB, SCALE, ROWMAX, BETA, WINDOW, ACC)
        X = merged(X, A, n // 4, 32, ST, ACC)
    o = tl.arange(0, C)
    X = tl.reshape(X, (C, C)) - tl.where(o[:, None] == o[None, :], 1.0, 0.0).to(ACC)
    tl.store(p_I + row * C + o[:, None] * C + o[None, :], X.to(ST))


@triton.jit(do_not_specialize=["NR", "N", "W"])
def top(
    x_k, p_cum, p_skip, p_mu, p_top, NR, N, W,
    H: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, NS: tl.constexpr, SCALE: tl.constexpr, TMA: tl.constexpr,
    WINDOW: tl.constexpr, PACKED: tl.constexpr, GIVEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """ "rowmax": μ in log2 and the row of x that it comes from, for one block. Of a sequence's first rows, p_skip are no keys.
    A block of no sequence has the maxima of its own zeros: `inverses` reads them."""
    blocks = NR // C
    i_bh = tl.program_id(0) // blocks
    i_block = tl.program_id(0) % blocks
    i_n, first, end = sequence_of(p_cum, N, i_bh // H, i_block, blocks, PACKED)
    first = tl.where(i_block < end, first, i_block)
    o = tl.arange(0, C)
    o_i = i_block * C + o
    start = first * C
    if GIVEN:
        start += tl.load(p_skip + i_n)
    b_x = load_rows(x_k, i_bh, i_block * C, NR, C, KB, TMA)
    mu = tl.full([C], float("-inf"), ACC)
    best = o_i
    lo = first
    if WINDOW:
        lo = tl.maximum(first, (tl.maximum(i_block * C - W + 1, 0)) // C)
    for j in tl.range(lo, i_block + 1, num_stages=NS):
        b_j = load_rows(x_k, i_bh, j * C, NR, C, KB, TMA)
        s = tl.dot(b_x, tl.trans(b_j), input_precision="ieee", out_dtype=ACC)
        o_j = j * C + o
        gap = o_i[:, None] - o_j[None, :]
        seen = (gap >= 0) & ((o_j >= start)[None, :] | (gap == 0))
        if WINDOW:
            seen = seen & (gap < W)
        s = tl.where(seen, s, float("-inf"))
        m = tl.max(s, 1)
        # the first of equal ones
        at = tl.min(tl.where((s == m[:, None]) & seen, o_j[None, :], NR), 1)
        best = tl.where(m > mu, at, best)
        mu = tl.maximum(mu, m)
    row = tl.cast(i_bh, tl.int64) * NR + o_i
    tl.store(p_mu + row, mu * SCALE)
    tl.store(p_top + row, best)


@triton.jit(do_not_specialize=["T"])
def peak(p_x, p_peak, T, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr):
    """The largest |x| of each row and head, as the bits of a float32: an integer's maximum has no order."""
    tiles = (T + R - 1) // R
    i_bh = tl.program_id(0) // tiles
    i_t = tl.program_id(0) % tiles * R
    at, real = token_pointers(p_x, i_bh // H, i_t, i_bh % H, T, H, D, R, BD)
    largest = tl.max(tl.max(tl.abs(tl.load(at, mask=real, other=0.0).to(tl.float32)), 1), 0)
    tl.atomic_max(p_peak + i_bh, largest.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def exponent(p_peak, i_bh):
    """The biased exponent of a peak, kept where 2^±exponent are float32 numbers."""
    return tl.minimum(tl.maximum(tl.load(p_peak + i_bh) >> 23, 1), 253)


@triton.jit
def power_of_two(biased):
    """2^(biased − 127)"""
    return (biased << 23).to(tl.float32, bitcast=True)
