"""Tiles of keys as runs of C, a warp each: their pages, their rows, and the scores of a tile of queries with them.

A run lies in one page where PG is a multiple of C. Its rows' offsets in the page are then the same in every step, and its page is one
number.
"""

import triton
import triton.language as tl

from needlework.ops.lucid.solve.operands import TINY


@triton.jit
def page_numbers(p_table, first, oldest, newest, PG: tl.constexpr, C: tl.constexpr):
    """The page of each run [RUNS 1], or of each of its rows [RUNS C]; 0 where nothing is read. first: of each run, a position."""
    if PG % C == 0:
        some = (first <= newest) & (first + C > oldest)
        pages = tl.load(p_table + first // PG, mask=some, other=0)[:, None]
    else:
        o_t = first[:, None] + tl.arange(0, C)[None, :]
        pages = tl.load(p_table + o_t // PG, mask=(o_t >= oldest) & (o_t <= newest), other=0)
    return pages.to(tl.int64)


@triton.jit
def rows_of(
    p, pages, first, inside, i_kv, apart, PG: tl.constexpr, C: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """[RUNS C BD] of one head, zeros past D and where not `inside` [RUNS C]. Pages lie `apart`, and may be slots of any length."""
    o_n = tl.arange(0, C)[None, :]
    o_d = tl.arange(0, BD)
    if PG % C == 0:
        at = pages * apart + (first % PG).to(tl.int64)[:, None] * (HK * D)
        within = o_n * (HK * D)
    else:
        at = pages * apart + ((first[:, None] + o_n) % PG).to(tl.int64) * (HK * D)
        within = 0 * o_n
    real = inside[:, :, None] & (o_d < D)[None, None, :]
    return tl.load((p + i_kv * D + at)[:, :, None] + (within[:, :, None] + o_d[None, None, :]), mask=real, other=0.0)


@triton.jit
def scores(b_q, b_k, norm, solving, ROWMAX: tl.constexpr, HALF: tl.constexpr, ACC: tl.constexpr):
    """q kᵀ [RUNS BM C] before the factors of rows; of rows that solve k̂ k̂ᵀ, with the `norm` of their own. Half keys are operands as they
    are, others are k̂: where all keys are one, what the sum of their product was rounded by does not average out."""
    if ROWMAX:
        s = products(b_q, b_k, ACC)
    elif HALF:
        # ‖k‖² as the diagonal of k kᵀ: one product more takes fewer instructions than sums of squares, and has them where s has its columns
        o_n = tl.arange(0, b_k.shape[1])
        squares = tl.sum(tl.where((o_n[:, None] == o_n[None, :])[None], products(b_k, b_k, ACC), 0.0), 1)
        inverse = tl.rsqrt(tl.maximum(squares, TINY * TINY)) / norm
        s = products(b_q, b_k, ACC)
        s = tl.where(solving[None, :, None], s * inverse[:, None, :], s)
    else:
        b = b_k.to(ACC)
        norms = tl.maximum(tl.sqrt(tl.sum(b * b, 2)), TINY)
        s = products(b_q, b_k / norms[:, :, None], ACC)
        s = tl.where(solving[None, :, None], s, s * norms[:, None, :])
    return s


@triton.jit
def products(b_q, b_k, ACC: tl.constexpr):
    """In float32 by runs of 64 numbers, as products of one query are summed elsewhere: one chain of 256 errs more."""
    R: tl.constexpr = b_q.shape[0]
    M: tl.constexpr = b_q.shape[1]
    C: tl.constexpr = b_k.shape[1]
    n: tl.constexpr = b_q.shape[2] // 64
    if b_q.dtype == ACC and n > 1:
        b_q = tl.reshape(tl.permute(tl.reshape(b_q, [R, M, n, 64]), (0, 2, 1, 3)), [R * n, M, 64])
        b_k = tl.reshape(tl.permute(tl.reshape(b_k, [R, C, n, 64]), (0, 2, 3, 1)), [R * n, 64, C])
        s = tl.sum(tl.reshape(tl.dot(b_q, b_k, input_precision="ieee", out_dtype=ACC), [R, n, M, C]), 1)
    else:
        s = tl.dot(b_q, tl.permute(b_k, (0, 2, 1)), input_precision="ieee", out_dtype=ACC)
    return s
