"""Queries against keys and values in pages: decode and prefill, split over keys, and the merge of the splits.

A program has one tile of new tokens, all query heads of one key-value head, and one split of the keys: a page's rows are read once for
them all. Decode is a tile of one token. A split keeps M, L, Q₂ and S of its keys; they merge exactly:

    M = max M_s,  L = Σ 2^{M_s − M} L_s,  S = Σ 2^{M_s − M} S_s,  Q₂ = Σ 4^{M_s − M} Q₂_s

Splits without keys write nothing, and the merge reads none of them. With one split the first kernel reads out by itself. Grids follow from
shapes alone and loops end with the live length, which is read where the kernels run: a captured graph serves any lengths.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.softmax import NONE, soften
from needlework.ops.paged.engine.readout import DIFFERENTIAL, POLAR, gain_of, read_out
from needlework.ops.paged.engine.rows import ends_of, held_numbers, keys_of, page_numbers, page_rows, picked, sequence_of


@triton.jit
def scores(b_q, b_k, ACC: tl.constexpr):
    """q kᵀ [BM BN]. In float32 by runs of 64 numbers, as products of one query are summed elsewhere: one chain of 256 errs more."""
    n: tl.constexpr = b_q.shape[1] // 64
    if b_q.dtype == ACC and n > 1:
        b_q = tl.permute(tl.reshape(b_q, [b_q.shape[0], n, 64]), (1, 0, 2))
        b_k = tl.permute(tl.reshape(b_k, [b_k.shape[0], n, 64]), (1, 2, 0))
        s = tl.sum(tl.dot(b_q, b_k, input_precision="ieee", out_dtype=ACC), 0)
    else:
        s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee", out_dtype=ACC)
    return s


@triton.jit
def _added(
    s, slope, gone, p_pages, o_row, o_t, inside, own, i_h, SCALE: tl.constexpr, H: tl.constexpr, MASK: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """Scores with −m (i − j) + G_i − G_j, all in units of SCALE. slope: m of each row; gone: G_i, float64 as p_pages; None for none."""
    if slope is not None:
        s -= slope[:, None] / SCALE * (own[:, None] - o_t[None, :]).to(ACC)
    if gone is not None:
        # a difference of float64, or the digits of a long past would be lost
        there = inside if MASK else o_t >= 0
        b_G = tl.load((p_pages + o_row * H)[None, :] + i_h[:, None], mask=there[None, :], other=0.0)
        s += ((gone[:, None] - b_G) / SCALE).to(ACC)
    return s


@triton.jit
def _over_pages(
    m, l, q2, acc, b_q, p_k, p_v, p_table, held, begin, i_kv, lo, hi, oldest, newest, own, sc, W, slope, gone, p_held, i_h,
    H: tl.constexpr, SG: tl.constexpr, SCALE: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PG: tl.constexpr, SK: tl.constexpr, SV: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, NS: tl.constexpr, READ: tl.constexpr, ACC: tl.constexpr, ALONE: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """Tiles lo … hi − 1 of keys. With MASK each row sees those up to its own, the newest W; ALONE: all rows are of one token. held: page
    numbers from tile `begin` on, or None."""
    ahead = None
    if not ALONE:
        ahead = page_numbers(p_table, lo, hi, oldest, newest, PG, BN)
    for j in tl.range(lo, hi, num_stages=NS):
        o_t = j * BN + tl.arange(0, BN)
        inside = (o_t >= oldest) & (o_t <= newest)
        o_row = o_t % PG
        if PG * HK * (K + V) >= 2**31:
            o_row = o_row.to(tl.int64)  # a page may be a slot of any length
        if held is not None:
            pages = picked(held, (j - begin) * BN // PG)
        elif ALONE:
            pages = page_numbers(p_table, j, hi, oldest, newest, PG, BN)
        else:
            pages = ahead
        b_k = page_rows(p_k + pages * SK, o_row, inside, i_kv, HK, K, BK, MASK).to(b_q.dtype)
        b_v = page_rows(p_v + pages * SV, o_row, inside, i_kv, HK, V, BV, MASK).to(b_q.dtype)
        if gone is not None:
            p_own = p_held + pages * SG
        else:
            p_own = p_held
        if not ALONE:
            # asked for a tile ahead: two stages then hold the next tile's rows
            ahead = page_numbers(p_table, j + 1, hi, oldest, newest, PG, BN)
        s = _added(scores(b_q, b_k, ACC), slope, gone, p_own, o_row, o_t, inside, own, i_h, SCALE, H, MASK, ACC)
        if MASK:
            if ALONE:
                s = tl.where(inside[None, :], s, float("-inf"))
            else:
                behind = own[:, None] - o_t[None, :]
                s = tl.where((behind >= 0) & (behind < W), s, float("-inf"))
        p, m, l, q2, acc = soften(s, sc, m, l, q2, acc, READ == POLAR)
        acc = tl.dot(p.to(b_v.dtype), b_v, acc, input_precision="ieee", out_dtype=ACC)
    return m, l, q2, acc


@triton.jit(do_not_specialize=["N", "T", "NB", "W", "splits"])
def attend(
    p_q, p_k, p_v, p_table, p_length, p_ends, p_alpha, p_beta, p_gamma, p_base, p_null, p_lam, p_o, p_mag, p_stats, p_S,
    p_slopes, p_decay, p_held, N, T, NB, W, splits,
    SG: tl.constexpr, H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PG: tl.constexpr, SK: tl.constexpr, SV: tl.constexpr,
    BM: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NS: tl.constexpr,
    HELD: tl.constexpr, LEAST: tl.constexpr, LAM: tl.constexpr, READ: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr, SCALE: tl.constexpr,
    ACC: tl.constexpr, OT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One split of a tile of BT tokens and a key-value head: BM rows, of a token and a query head, or one of its two vectors.

    p_slopes [H], p_decay [T H] of the queries and p_held of the keys' pages: None where nothing is added to the scores.
    p_stats [T H vectors splits 3]: M, L, Q₂; p_S [T H vectors splits V]; both with SPLIT alone.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    G: tl.constexpr = H // HK
    VECTORS: tl.constexpr = 2 if READ == DIFFERENTIAL else 1
    QUERIES: tl.constexpr = BM // VECTORS
    pid = tl.program_id(0)
    i_s = pid % splits
    i_kv = pid // splits % HK
    i_t = pid // (splits * HK)
    if PACKED:
        # of long prompts the longest rows first
        i_t = tl.num_programs(0) // (splits * HK) - 1 - i_t
        i_n = sequence_of(p_ends, i_t, N, BT, True)
        first, last, live = ends_of(p_ends, p_length, i_n, N, T)
        token = first + (i_t - first // BT - i_n) * BT
        if token >= last:
            return
    else:
        i_n = i_t
        token = i_t
        last = i_t + 1
        live = tl.load(p_length + i_t).to(tl.int32)
    own, oldest, newest, begin, end, each = keys_of(token, last, live, W, splits, BT, BN, LEAST)
    lo = begin + i_s * each
    hi = tl.minimum(lo + each, end)
    if SPLIT:
        if lo >= hi:
            return

    o_r = tl.arange(0, BM)
    second = o_r >= QUERIES
    o_q = o_r % QUERIES
    i_h = i_kv * G + o_q % G
    o_t = token + o_q // G
    ours = (o_q < BT * G) & (o_t < last)
    o_own = own + o_q // G
    o_k = tl.arange(0, BK)
    real = ours[:, None] & (o_k < K)[None, :]
    if READ == DIFFERENTIAL:
        # a row of one vector has zeros in place of the other: keys are read whole, once
        real = real & ((o_k >= K // 2)[None, :] == second[:, None])
    row = o_t.to(tl.int64) * H + i_h
    b_q = tl.load(p_q + row[:, None] * K + o_k[None, :], mask=real, other=0.0)
    seen = tl.minimum(o_own + 1, W)
    sc = gain_of(p_alpha, p_gamma, p_base, i_h, seen, SCALE, READ, ACC)
    slope = None
    if p_slopes is not None:
        slope = tl.load(p_slopes + i_h).to(ACC)
    gone = None
    if p_decay is not None:
        gone = tl.load(p_decay + row, mask=ours, other=0.0)

    m = tl.full([BM], NONE, ACC)
    l = tl.zeros([BM], ACC)
    q2 = tl.zeros([BM], ACC)
    acc = tl.zeros([BM, BV], ACC)
    p_table += tl.cast(i_n, tl.int64) * NB
    if BT == 1:
        if PG % BN == 0:
            TILES: tl.constexpr = HELD * (PG // BN)
            for i in range(lo // TILES * TILES, hi, TILES):
                held = held_numbers(p_table, i * BN // PG, oldest, newest, PG, HELD)
                m, l, q2, acc = _over_pages(
                    m, l, q2, acc, b_q, p_k, p_v, p_table, held, i, i_kv, tl.maximum(i, lo), tl.minimum(i + TILES, hi), oldest, newest,
                    o_own, sc, W, slope, gone, p_held, i_h, H, SG, SCALE, HK, K, V, PG, SK, SV, BN, BK, BV, NS, READ, ACC, True, True,
                )  # fmt: skip
        else:
            # rows whose numbers the step loads too are one tile ahead for every two stages
            m, l, q2, acc = _over_pages(
                m, l, q2, acc, b_q, p_k, p_v, p_table, None, 0, i_kv, lo, hi, oldest, newest, o_own, sc, W, slope, gone, p_held, i_h,
                H, SG, SCALE, HK, K, V, PG, SK, SV, BN, BK, BV, 2 * NS - 1, READ, ACC, True, True,
            )  # fmt: skip
    else:
        # before `full` a token of the tile does not see all of a tile of keys because of its window, from `diagonal` on because of the
        # future
        full = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(newest - W + 1, 0), BN), lo), hi)
        diagonal = tl.minimum(tl.maximum((own + 1) // BN, full), hi)
        m, l, q2, acc = _over_pages(
            m, l, q2, acc, b_q, p_k, p_v, p_table, None, 0, i_kv, lo, full, oldest, newest, o_own, sc, W, slope, gone, p_held, i_h,
            H, SG, SCALE, HK, K, V, PG, SK, SV, BN, BK, BV, NS, READ, ACC, False, True,
        )  # fmt: skip
        m, l, q2, acc = _over_pages(
            m, l, q2, acc, b_q, p_k, p_v, p_table, None, 0, i_kv, full, diagonal, oldest, newest, o_own, sc, W, slope, gone, p_held, i_h,
            H, SG, SCALE, HK, K, V, PG, SK, SV, BN, BK, BV, NS, READ, ACC, False, False,
        )  # fmt: skip
        m, l, q2, acc = _over_pages(
            m, l, q2, acc, b_q, p_k, p_v, p_table, None, 0, i_kv, diagonal, hi, oldest, newest, o_own, sc, W, slope, gone, p_held, i_h,
            H, SG, SCALE, HK, K, V, PG, SK, SV, BN, BK, BV, NS, READ, ACC, False, True,
        )  # fmt: skip

    o_v = tl.arange(0, BV)
    if SPLIT:
        part = (row * VECTORS + second.to(tl.int32)) * splits + i_s
        tl.store(p_stats + part * 3, m * sc, mask=ours)
        tl.store(p_stats + part * 3 + 1, l, mask=ours)
        tl.store(p_stats + part * 3 + 2, q2, mask=ours)
        tl.store(p_S + part[:, None] * V + o_v[None, :], acc, mask=ours[:, None] & (o_v < V)[None, :])
    else:
        b_o, magnitude = read_out(
            acc, m * sc, l, q2, i_h, second, seen, p_alpha, p_beta, p_gamma, p_base, p_null, p_lam, V, BV, LAM, READ, ACC
        )
        real_row = live >= 0
        if READ == POLAR:
            tl.store(p_mag + row, tl.where(real_row, magnitude, 0.0), mask=ours)
        o_q = tl.arange(0, QUERIES)
        o_t = token + o_q // G
        row = o_t.to(tl.int64) * H + i_kv * G + o_q % G
        ours = (o_q < BT * G) & (o_t < last)
        b_o = tl.where(real_row, b_o, 0.0).to(OT)
        tl.store(p_o + row[:, None] * V + o_v[None, :], b_o, mask=ours[:, None] & (o_v < V)[None, :])


@triton.jit(do_not_specialize=["N", "T", "W", "splits"])
def merge(
    p_stats, p_S, p_length, p_ends, p_alpha, p_beta, p_gamma, p_base, p_null, p_lam, p_o, p_mag, N, T, W, splits,
    H: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, BV: tl.constexpr, LEAST: tl.constexpr,
    LAM: tl.constexpr, READ: tl.constexpr, PACKED: tl.constexpr, ACC: tl.constexpr, OT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A token and query head: the splits that have keys, BS at a time, are read out as one."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    VECTORS: tl.constexpr = 2 if READ == DIFFERENTIAL else 1
    i_q = tl.program_id(0).to(tl.int64)
    token = (i_q // H).to(tl.int32)
    if PACKED:
        i_n = sequence_of(p_ends, token, N, BT, False)
        first, last, live = ends_of(p_ends, p_length, i_n, N, T)
        tile = first + (token - first) // BT * BT
    else:
        tile = token
        last = token + 1
        live = tl.load(p_length + token).to(tl.int32)
    _, _, _, begin, end, each = keys_of(tile, last, live, W, splits, BT, BN, LEAST)
    used = tl.cdiv(end - begin, each)

    o_a = tl.arange(0, VECTORS)
    o_v = tl.arange(0, BV)
    M = tl.full([VECTORS, BS], NONE, ACC)
    for i in range(0, used, BS):
        o_s = i + tl.arange(0, BS)
        part = ((i_q * VECTORS + o_a) * splits)[:, None] + o_s[None, :]
        M = tl.maximum(M, tl.load(p_stats + part * 3, mask=(o_s < used)[None, :], other=NONE))
    m = tl.max(M, 1)
    L = tl.zeros([VECTORS], ACC)
    Q2 = tl.zeros([VECTORS], ACC)
    S = tl.zeros([VECTORS, BV], ACC)
    for i in range(0, used, BS):
        o_s = i + tl.arange(0, BS)
        part = ((i_q * VECTORS + o_a) * splits)[:, None] + o_s[None, :]
        inside = (o_s < used)[None, :]
        share = tl.exp2(tl.load(p_stats + part * 3, mask=inside, other=NONE) - m[:, None])
        L += tl.sum(share * tl.load(p_stats + part * 3 + 1, mask=inside, other=0.0), 1)
        if READ == POLAR:
            Q2 += tl.sum(share * share * tl.load(p_stats + part * 3 + 2, mask=inside, other=0.0), 1)
        at = part[:, :, None] * V + o_v[None, None, :]
        b_S = tl.load(p_S + at, mask=inside[:, :, None] & (o_v < V)[None, None, :], other=0.0)
        S += tl.sum(share[:, :, None] * b_S, 1)
    i_h = (i_q % H).to(tl.int32) + 0 * o_a
    own = live - (last - token)
    seen = tl.minimum(own + 1, W) + 0 * o_a
    b_o, magnitude = read_out(
        S, m, L, Q2, i_h, o_a > 0, seen,
        p_alpha, p_beta, p_gamma, p_base, p_null, p_lam, V, BV, LAM, READ, ACC,
    )  # fmt: skip
    real_row = live >= 0
    if READ == POLAR:
        tl.store(p_mag + i_q + o_a, tl.where(real_row, magnitude, 0.0))
    b_o = tl.where(real_row, b_o, 0.0).to(OT)
    tl.store(p_o + i_q * V + tl.zeros([1], tl.int32)[:, None] + o_v[None, :], b_o, mask=(o_v < V)[None, :])
