"""What the rows that pages hold take from new ones, Σ_j A_ij y_j, by tiles of M new tokens of a sequence: for decoding and for prefill.

Token t of a sequence lies in row r = t mod P of its pages, which is row r mod PG of page table[r // PG]. P is as many rows as the
table has, or a ring of W: a slot of a state table is a sequence's one page. The keys of a tile are split into shares, a program each.

Keys are normalised as they are read. "rowmax": every share has its own maximum m, Σ_j e^{s_ij − m} y_j; who sums them has the row's.
"""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from needlework.ops.common.kernels.runs import sequence_of
from needlework.ops.common.kernels.tile import plus_product
from needlework.ops.lucid.solve.operands import TINY
from needlework.ops.runtime.launch_configs import Constants, LaunchConfig
from needlework.ops.runtime.triton_types import cdiv


@triton.jit
def tile_of(p_length, p_cum, p_ends, i_tile, tiles, sequences, R, M: tl.constexpr, PACKED: tl.constexpr):
    """A tile's sequence and first token, how many tokens it has, none in a padded row, and the sequence's tokens before: those that lie
    in pages, and new ones. PACKED: p_ends [sequences + 1] are tokens, p_cum tiles; else a tile has the R new tokens of a sequence."""
    i_n = i_tile
    token = i_tile * R
    new = R
    at = 0
    real = True
    if PACKED:
        i_n, first, end = sequence_of(p_cum, sequences, 0, i_tile, tiles, PACKED)
        at = (i_tile - first) * M
        start = tl.load(p_ends + i_n).to(tl.int32)
        new = tl.load(p_ends + i_n + 1).to(tl.int32) - start
        token = start + at
        real = i_tile < end
    length = tl.load(p_length + i_n).to(tl.int32)
    count = tl.where(real & (length >= 0), tl.minimum(new - at, M), 0)
    return i_n, token, count, length - new, at


@triton.jit
def new_keys(p_k, token, count, i_h, H: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, M: tl.constexpr):
    """[M KB] of k [T H K], zeros past `count` and K."""
    o_r = tl.arange(0, M)
    o_k = tl.arange(0, KB)
    at = p_k + (tl.cast(token, tl.int64) + o_r[:, None]) * (H * K) + i_h * K + o_k[None, :]
    return tl.load(at, mask=(o_r < count)[:, None] & (o_k < K)[None, :], other=0.0)


@triton.jit
def norms(b_k, ACC: tl.constexpr):
    b = b_k.to(ACC)
    return tl.maximum(tl.sqrt(tl.sum(b * b, 1)), TINY)


@triton.jit
def exponents(b_a, a_norm, b_b, b_norm, SCALE: tl.constexpr, ROWMAX: tl.constexpr, ACC: tl.constexpr):
    """log2 A, for "rowmax" before its maximum is taken off. Half keys are operands as they are; of others k̂, as the definition has it:
    where all keys are one, what the sum of their product was rounded by does not average out."""
    if not ROWMAX:
        if b_a.dtype == ACC:
            b_a = b_a / a_norm[:, None]
            b_b = b_b / b_norm[:, None]
    s = tl.dot(b_a, tl.trans(b_b), input_precision="ieee", out_dtype=ACC)
    if ROWMAX:
        e = s * SCALE
    else:
        if b_a.dtype != ACC:
            s = s * (1.0 / a_norm)[:, None] * (1.0 / b_norm)[None, :]
        e = (s - 1.0) * SCALE
    return e


@triton.jit(do_not_specialize=["sequences", "tiles", "shares", "R", "P", "PG", "NB", "W"])
def read_pages(
    p_k, p_page_k, p_page_y, p_table, p_length, p_cum, p_ends, p_sum, p_max, sequences, tiles, shares, R, P, PG, NB, W, page_k, page_y,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    NS: tl.constexpr, SCALE: tl.constexpr, ROWMAX: tl.constexpr, PACKED: tl.constexpr, HALF: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Σ_j A_ij y_j of one tile and head over one share of the tokens in pages. p_table [sequences NB]; pages lie page_k and page_y
    numbers apart. p_sum [tiles H shares M VB]."""
    i_share = tl.program_id(0) % shares
    i_h = tl.program_id(0) // shares % H
    i_tile = tl.program_id(0) // shares // H
    i_n, token, count, past, at = tile_of(p_length, p_cum, p_ends, i_tile, tiles, sequences, R, M, PACKED)
    if count > 0:
        lo = 0
        hi = past
        if W > 0:
            lo = tl.minimum(tl.maximum(past + at - W + 1, 0), past)
        else:
            hi = tl.minimum(past, P)
        per = ((hi - lo + shares - 1) // shares + N - 1) // N * N
        lo = tl.minimum(lo + i_share * per, hi)
        hi = tl.minimum(lo + per, hi)
        o_r = tl.arange(0, M)
        o_n = tl.arange(0, N)
        o_k = tl.arange(0, KB)
        o_v = tl.arange(0, VB)
        b_k = new_keys(p_k, token, count, i_h, H, K, KB, M)
        k_norm = norms(b_k, ACC)
        p_table += tl.cast(i_n, tl.int64) * NB
        p_rows_k = p_page_k + i_h * K + o_k[None, :]
        p_rows_y = p_page_y + i_h * V + o_v[None, :]
        acc = tl.zeros([M, VB], ACC)
        top = tl.full([M], float("-inf"), ACC)
        for i in tl.range(lo, hi, N, num_stages=NS):
            o_t = i + o_n
            real = o_t < hi
            row = o_t % P
            page = tl.load(p_table + row // PG, mask=real, other=0).to(tl.int64)
            row = row % PG
            b_j = tl.load(
                p_rows_k + (page * page_k + row * (H * K))[:, None], mask=real[:, None] & (o_k < K)[None, :], other=0.0
            )
            b_y = tl.load(
                p_rows_y + (page * page_y + row * (H * V))[:, None], mask=real[:, None] & (o_v < V)[None, :], other=0.0
            )
            e = exponents(b_k, k_norm, b_j, norms(b_j, ACC), SCALE, ROWMAX, ACC)
            seen = real[None, :] & (o_r < count)[:, None]
            if W > 0:
                seen = seen & (past + at + o_r[:, None] - o_t[None, :] < W)
            e = tl.where(seen, e, float("-inf"))
            if ROWMAX:
                newer = tl.maximum(top, tl.max(e, 1))
                shift = tl.where(newer > float("-inf"), newer, 0.0)
                acc *= tl.exp2(top - shift)[:, None]
                a = tl.exp2(e - shift[:, None])
                top = newer
            else:
                a = tl.exp2(e)
            b_a = a.to(b_y.dtype)
            acc = plus_product(acc, b_a, b_y)
            if HALF:
                # what the rounding left: the products cost nothing beside the reading
                acc = tl.dot((a - b_a.to(ACC)).to(b_y.dtype), b_y, acc, input_precision="ieee", out_dtype=ACC)
        share = tl.cast(tl.program_id(0), tl.int64) * M + o_r
        tl.store(p_sum + share[:, None] * VB + o_v[None, :], acc, mask=(o_r < count)[:, None])
        if ROWMAX:
            tl.store(p_max + share, top, mask=o_r < count)


@triton.jit
def row_of_share(i_tile, i_h, i_share, shares, H: tl.constexpr, M: tl.constexpr):
    """[M] rows of p_sum and p_max."""
    return ((tl.cast(i_tile, tl.int64) * H + i_h) * shares + i_share) * M + tl.arange(0, M)


@triton.jit
def highest(mu, p_max, i_tile, i_h, shares, count, H: tl.constexpr, M: tl.constexpr):
    """μ [M] over the pages' rows too."""
    for i in range(0, shares):
        share = row_of_share(i_tile, i_h, i, shares, H, M)
        mu = tl.maximum(mu, tl.load(p_max + share, mask=tl.arange(0, M) < count, other=float("-inf")))
    return mu


@triton.jit
def less_past(
    u, mu, p_sum, p_max, i_tile, i_h, shares, count,
    H: tl.constexpr, VB: tl.constexpr, M: tl.constexpr, ROWMAX: tl.constexpr,
):  # fmt: skip
    """u [M VB] less what the shares have."""
    o_v = tl.arange(0, VB)
    real = tl.arange(0, M) < count
    for i in range(0, shares):
        share = row_of_share(i_tile, i_h, i, shares, H, M)
        part = tl.load(p_sum + share[:, None] * VB + o_v[None, :], mask=real[:, None], other=0.0)
        if ROWMAX:
            part *= tl.exp2(tl.load(p_max + share, mask=real, other=float("-inf")) - mu)[:, None]
        u -= part
    return u


@triton.jit
def store_rows(
    p_page, b, row, page_size, PG, i_h, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """[M BD] into the pages' rows, page · PG + row in the page, where these are not below 0."""
    o_d = tl.arange(0, BD)
    at = row // PG * page_size + row % PG * (H * D) + i_h * D
    tl.store(p_page + at[:, None] + o_d[None, :], b.to(p_page.dtype.element_ty), mask=(row >= 0)[:, None] & (o_d < D)[None, :])


def shares_of(tiles: int, P: int, window: int | None, R: int, launch: Mapping[str, int]) -> int:
    """How many shares `tiles` of R new tokens and P rows make: programs for the machine, and at least four products each."""
    return max(1, min(launch["NP"] // tiles, cdiv(min(P, (window or P) + R), 4 * launch["N"])))


def constants_of(kernels: Mapping[str, Any], config: LaunchConfig, everything: Mapping[str, Any]) -> dict[str, Constants]:
    """Kernel -> its row of the config, but for the number of programs, and what it takes of `everything`."""
    rows = {name: {key: x for key, x in row.items() if key != "NP"} for name, row in config.launch.items()}
    taken = lambda kernel: {key: x for key, x in everything.items() if key in kernel.arg_names}
    return {name: row | (taken(kernels[name]) if name in kernels else {}) for name, row in rows.items()}
