"""LUCID's decoding in one pass over the pages: the newest row's solve and its queries' softmax read the same tiles of k and y.

A program has one sequence, one key-value head and one split of the earlier keys. Its tile has a row for each of the group's G queries and,
as one query more, k itself, whose weights are LUCID's:

    rows h < G    a_j = scale · q_h·k_j                         M = max a,  L = Σ 2^{a − M},  S = Σ 2^{a − M} y_j
    row G         a_j = √d k̂·k̂_j, "rowmax": k·k_j / √d          the same, and Σ_j A_j y_j = 2^{M − μ} S, μ = √d or the row's maximum
    row G + 1     half precision: as row G, of what rounding left of its weights

A tile of keys is RUNS runs of C keys, a warp each, with sums of their own until the end of the loop: no warp waits for another's maximum.
Page numbers are held in registers (`paged/engine/rows.py`), so that the loop over tiles loads nothing but k and y.

The token itself is no key of the loop: `newest.py` adds it once its y is known, and writes its row. That is done here where there is one
split, else by `merge`. Grids follow from shapes and loops end with the live length, which is read here: a captured graph serves any
lengths.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.softmax import NONE, soften
from needlework.ops.common.kernels.tile import plus_product
from needlework.ops.lucid.decode.newest import finished, queries, row_of, write_row
from needlework.ops.lucid.decode.runs import page_numbers, rows_of, scores
from needlework.ops.lucid.solve.operands import TINY
from needlework.ops.paged.engine.readout import LOG2E
from needlework.ops.paged.engine.rows import held_numbers, keys_of, picked


@triton.jit
def earlier(live, W, splits, BN: tl.constexpr, LEAST: tl.constexpr):
    """Of the newest of `live` tokens: the oldest and the newest earlier key that it sees, the first tile of keys, the one after the last,
    and how many a split has."""
    # as the token before would see them behind a window of W − 1
    _, oldest, newest, begin, end, each = keys_of(0, 1, live - 1, W - 1, splits, 1, BN, LEAST)
    return oldest, newest, begin, tl.where(newest >= oldest, end, begin), each


@triton.jit
def factors(solving, SCALE: tl.constexpr, SOLVE: tl.constexpr, ACC: tl.constexpr):
    """What a row's scores are multiplied by, for base 2."""
    zeros = tl.zeros([solving.shape[0]], ACC)
    return tl.where(solving, zeros + SOLVE, zeros + SCALE * LOG2E)


@triton.jit(do_not_specialize=["NB", "W", "WR", "splits"])
def attend(
    p_q, p_k, p_v, p_beta, p_k_pages, p_y_pages, p_table, p_length, p_rows, p_o, p_stats, p_S, NB, W, WR, splits,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PG: tl.constexpr, SK: tl.constexpr, SV: tl.constexpr,
    TQ: tl.constexpr, TK: tl.constexpr, TV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    RUNS: tl.constexpr, HELD: tl.constexpr, NS: tl.constexpr, LEAST: tl.constexpr, SPLIT: tl.constexpr, APART: tl.constexpr, ROWMAX: tl.constexpr,
    BETA: tl.constexpr, SCALE: tl.constexpr, SOLVE: tl.constexpr, HALF: tl.constexpr, ACC: tl.constexpr,
    OT: tl.constexpr,
):  # fmt: skip
    """One split of the keys before a sequence's newest token, for the queries of one key-value head.

    W: of the solve; WR: of the read, with APART alone. TQ, TK, TV: from token to token; SK, SV: from page to page.
    p_stats [N HK splits G+1 2]: M, L; p_S [N HK splits G+1 V], row G what is taken off v; both with SPLIT alone.
    """
    G: tl.constexpr = H // HK
    C: tl.constexpr = BN // RUNS
    # heads of a row of the pages lie side by side, and so do the programs that read them
    i_kv = tl.program_id(0) % HK
    i_s = tl.program_id(0) // HK % splits
    i_n = (tl.program_id(0) // HK // splits).to(tl.int64)
    live = tl.load(p_length + i_n).to(tl.int32)
    oldest, newest, begin, end, each = earlier(live, W, splits, BN, LEAST)
    lo = begin + i_s * each
    hi = tl.minimum(lo + each, end)
    if SPLIT:
        if lo >= hi:
            return

    o_r = tl.arange(0, BM)
    o_v = tl.arange(0, BV)
    i_h = i_kv * G + o_r % G
    ours = o_r < G
    solving = (o_r >= G) & (o_r <= G + HALF)
    b_k = row_of(p_k, i_n * TK, i_kv, K, BK)
    norm = tl.maximum(tl.sqrt(tl.sum(b_k.to(ACC) * b_k.to(ACC), 0)), TINY)
    as_query = b_k
    if not ROWMAX and not HALF:
        as_query = b_k / norm
    b_q = tl.where(solving[:, None], as_query[None, :], queries(p_q, i_n * TQ, i_h, ours, K, BK))
    tile = tl.broadcast_to(b_q[None], [RUNS, BM, BK])

    # rows of all runs, one after the other
    o_m = tl.arange(0, RUNS * BM) % BM
    sc = factors((o_m >= G) & (o_m <= G + HALF), SCALE, SOLVE, ACC)
    m = tl.full([RUNS * BM], NONE, ACC)
    l = tl.zeros([RUNS * BM], ACC)
    acc = tl.zeros([RUNS * BM, BV], ACC)
    o_run = tl.arange(0, RUNS) * C
    p_table += i_n * NB
    TILES: tl.constexpr = HELD * (PG // BN) if PG % BN == 0 else HELD
    for i in range(lo // TILES * TILES, hi, TILES):
        held = held_numbers(p_table, i * BN // PG, oldest, newest, PG, HELD)
        for j in tl.range(tl.maximum(i, lo), tl.minimum(i + TILES, hi), num_stages=NS):
            first = j * BN + o_run
            o_t = first[:, None] + tl.arange(0, C)[None, :]
            inside = (o_t >= oldest) & (o_t <= newest)
            if PG % BN == 0:
                pages = picked(held, (j - i) * BN // PG) + tl.zeros([1, 1], tl.int64)
            else:
                pages = page_numbers(p_table, first, oldest, newest, PG, C)
            b_j = rows_of(p_k_pages, pages, first, inside, i_kv, SK, PG, C, HK, K, BK)
            b_y = rows_of(p_y_pages, pages, first, inside, i_kv, SV, PG, C, HK, V, BV)
            s = scores(tile, b_j, norm, solving, ROWMAX, HALF, ACC)
            seen = inside[:, None, :]
            if APART:
                seen = seen & (solving[None, :, None] | (o_t > newest + 1 - WR)[:, None, :])
            s = tl.reshape(tl.where(seen, s, float("-inf")), [RUNS * BM, C])
            p, m, l, _, acc = soften(s, sc, m, l, l, acc, False)
            p = tl.reshape(p, [RUNS, BM, C])
            b_p = p.to(b_y.dtype)
            if HALF:
                b_p = tl.where((o_r == G + 1)[None, :, None], (p - b_p.to(ACC)).to(b_y.dtype), b_p)
            acc = tl.reshape(plus_product(tl.reshape(acc, [RUNS, BM, BV]), b_p, b_y), [RUNS * BM, BV])

    m_runs = tl.reshape(m, [RUNS, BM])
    top = tl.max(m_runs, 0)
    # exactly 1 in the run of the maximum, also of no key: as in `soften`, products of each would leave their rounding
    rows_sc = factors(solving, SCALE, SOLVE, ACC)
    share = tl.exp2((m_runs - top[None, :]) * rows_sc[None, :])
    M = top * rows_sc
    L = tl.sum(tl.reshape(l, [RUNS, BM]) * share, 0)
    S = tl.sum(tl.reshape(acc, [RUNS, BM, BV]) * share[:, :, None], 0)
    if SPLIT:
        past = tl.sum(tl.where(solving[:, None], S, 0.0), 0)
        S = tl.where(ours[:, None], S, past[None, :])
        part = ((i_n * HK + i_kv) * splits + i_s) * (G + 1) + o_r
        tl.store(p_stats + part * 2, M, mask=o_r <= G)
        tl.store(p_stats + part * 2 + 1, L, mask=o_r <= G)
        tl.store(p_S + part[:, None] * V + o_v[None, :], S, mask=(o_r <= G)[:, None] & (o_v < V)[None, :])
    else:
        # again, so that the loop had its registers
        b_q = queries(p_q, i_n * TQ, i_h, ours, K, BK)
        b_k = row_of(p_k, i_n * TK, i_kv, K, BK)
        b_v = row_of(p_v, i_n * TV, i_kv, V, BV)
        beta = 1.0
        if BETA:
            beta = tl.load(p_beta + i_n * HK + i_kv).to(ACC)
        o, b_y = finished(S, M, L, b_q, rows_sc, solving, b_k, b_v, beta, SOLVE, ROWMAX, ACC, OT)
        o = tl.where(live > 0, o, 0.0).to(OT)
        tl.store(p_o + (i_n * H + i_h)[:, None] * V + o_v[None, :], o, mask=ours[:, None] & (o_v < V)[None, :])
        row = tl.where(live > 0, tl.load(p_rows + i_n), -1)
        write_row(p_k_pages, b_k, row, i_kv, SK, PG, HK, K, BK)
        write_row(p_y_pages, b_y, row, i_kv, SV, PG, HK, V, BV)


@triton.jit(do_not_specialize=["W", "splits"])
def merge(
    p_q, p_k, p_v, p_beta, p_k_pages, p_y_pages, p_length, p_rows, p_o, p_stats, p_S, W, splits,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PG: tl.constexpr, SK: tl.constexpr, SV: tl.constexpr,
    TQ: tl.constexpr, TK: tl.constexpr, TV: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr,
    LEAST: tl.constexpr, ROWMAX: tl.constexpr, BETA: tl.constexpr, SCALE: tl.constexpr, SOLVE: tl.constexpr, ACC: tl.constexpr,
    OT: tl.constexpr,
):  # fmt: skip
    """A query head: its splits' sums, BS at a time, and again those of the row that solves, which its group's first head writes."""
    G: tl.constexpr = H // HK
    i_h = tl.program_id(0) % H
    i_n = (tl.program_id(0) // H).to(tl.int64)
    i_kv = i_h // G
    live = tl.load(p_length + i_n).to(tl.int32)
    _, _, begin, end, each = earlier(live, W, splits, BN, LEAST)
    used = tl.cdiv(end - begin, each)

    o_a = tl.arange(0, 2)
    o_v = tl.arange(0, BV)
    first = (i_n * HK + i_kv) * splits * (G + 1) + tl.where(o_a == 0, i_h % G, G)
    M = tl.full([2, BS], NONE, ACC)
    for i in range(0, used, BS):
        o_s = i + tl.arange(0, BS)
        part = first[:, None] + (o_s * (G + 1))[None, :]
        M = tl.maximum(M, tl.load(p_stats + part * 2, mask=(o_s < used)[None, :], other=NONE))
    m = tl.max(M, 1)
    l = tl.zeros([2], ACC)
    S = tl.zeros([2, BV], ACC)
    for i in range(0, used, BS):
        o_s = i + tl.arange(0, BS)
        part = first[:, None] + (o_s * (G + 1))[None, :]
        inside = (o_s < used)[None, :]
        share = tl.exp2(tl.load(p_stats + part * 2, mask=inside, other=NONE) - m[:, None])
        l += tl.sum(share * tl.load(p_stats + part * 2 + 1, mask=inside, other=0.0), 1)
        at = part[:, :, None] * V + o_v[None, None, :]
        b_S = tl.load(p_S + at, mask=inside[:, :, None] & (o_v < V)[None, None, :], other=0.0)
        S += tl.sum(share[:, :, None] * b_S, 1)

    b_q = queries(p_q, i_n * TQ, i_h + 0 * o_a, o_a == 0, K, BK)
    b_k = row_of(p_k, i_n * TK, i_kv, K, BK)
    b_v = row_of(p_v, i_n * TV, i_kv, V, BV)
    beta = 1.0
    if BETA:
        beta = tl.load(p_beta + i_n * HK + i_kv).to(ACC)
    sc = factors(o_a == 1, SCALE, SOLVE, ACC)
    o, b_y = finished(S, m, l, b_q, sc, o_a == 1, b_k, b_v, beta, SOLVE, ROWMAX, ACC, OT)
    o = tl.where(live > 0, o, 0.0).to(OT)
    at = (i_n * H + i_h) * V + o_v
    tl.store(p_o + at[None, :] + 0 * o_a[:, None], o, mask=(o_a == 0)[:, None] & (o_v < V)[None, :])
    row = tl.where((live > 0) & (i_h % G == 0), tl.load(p_rows + i_n), -1)
    write_row(p_k_pages, b_k, row, i_kv, SK, PG, HK, K, BK)
    write_row(p_y_pages, b_y, row, i_kv, SV, PG, HK, V, BV)
