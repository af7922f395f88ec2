"""One new token of many sequences against their pages, in place: PaTH's decoding, on a block table or on a table of slots.

    enter   the query meets the keys of the open block and passes its factors, token by token from the newest on; x is what is left
    read    x meets the keys of the pages, which are as the open block's start sees them, a share of them each
    merge   the shares' softmax; the new token's k, v, w, β and sum of gates into their places
    carry   where the token ends a block: every key of the sequence passes the block's 64 factors

A token's factor takes one number a query and two products of vectors: less than the solve of a block that is 32 tokens long at the mean.
On slots a slot is a sequence's one page.

LUCID-PaTH's solve of the token goes along (SOLVE): its k̂ is one query more of its group, whose weights are e^{√d (x·k̃_j / ‖k_j‖ − 1)}: it
is not divided by their sum, and its maximum is taken back. Pages hold y. The new token's own y is there when all has been summed, in merge,
and its queries read it then.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.softmax import NONE
from needlework.ops.path.engine.tiles import LN2, over_scale, row_at
from needlework.ops.path.solve.engine.directions import TINY


@triton.jit
def overlap(product, norm, ROOT: tl.constexpr):
    """The solve's exponent in base 2 of a product with a key that came with this norm."""
    return (product / tl.maximum(norm, TINY) - 1) * ROOT


@triton.jit
def without(x, w, beta):
    """x H of rows x [rows KB]: x − β (x·w) w."""
    return x - (beta * tl.sum(x * w[None, :], 1))[:, None] * w[None, :]


@triton.jit(
    do_not_specialize=["P", "PG", "NB", "W", "shares", "page_k", "page_v", "slot_w", "slot_beta", "page_decay", "page_norm"]
)
def enter(
    p_q, p_k, p_v, p_beta, p_w, p_g, p_page_k, p_page_v, p_open_w, p_open_beta, p_page_decay, p_page_norm, p_table, p_slots, p_length,
    p_x, p_decay, p_sum, p_max, p_all, P, PG, NB, W, shares, page_k, page_v, slot_w, slot_beta, page_decay, page_norm,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, GB: tl.constexpr,
    BLOCK: tl.constexpr, SCALE: tl.constexpr, ROOT: tl.constexpr, DECAY: tl.constexpr, SOLVE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One sequence and key-value head. p_x [N HK GB KB]; the last share of p_sum [N HK shares GB VB], p_max and p_all [N HK shares GB].
    DECAY: p_decay [N HK GB] float64, the sum of gates up to the new token."""
    G: tl.constexpr = H // HK
    i_n = tl.program_id(0) // HK
    i_h = tl.program_id(0) % HK
    length = tl.load(p_length + i_n).to(tl.int32)
    if length <= 0:
        return
    o_g = tl.arange(0, GB)
    o_k = tl.arange(0, KB)
    o_v = tl.arange(0, VB)
    own = tl.cast(i_n, tl.int64) * HK + i_h
    x = tl.load(p_q + (own * G + o_g)[:, None] * K + o_k[None, :], mask=(o_g < G)[:, None] & (o_k < K)[None, :], other=0.0).to(
        ACC
    )
    k = tl.load(p_k + own * K + o_k, mask=o_k < K, other=0.0).to(ACC)
    acc = tl.zeros([GB, VB], ACC) + tl.load(p_v + own * V + o_v, mask=o_v < V, other=0.0).to(ACC)[None, :]
    m = tl.sum(x * k[None, :], 1) * SCALE
    if SOLVE:
        x = tl.where(o_g[:, None] == G, (k / tl.maximum(tl.sqrt(tl.sum(k * k)), TINY))[None, :], x)
        m = tl.where(o_g == G, 0.0, m)
        acc = tl.zeros([GB, VB], ACC)
    l = tl.full([GB], 1.0, ACC)
    w = tl.load(p_w + own * K + o_k, mask=o_k < K, other=0.0).to(ACC)
    x = without(x, w, tl.load(p_beta + own).to(ACC))
    slot = tl.load(p_slots + i_n).to(tl.int64)
    p_open_w += slot * slot_w + i_h * K
    p_open_beta += slot * slot_beta + i_h
    total = tl.zeros([GB], tl.float64)
    if DECAY:
        held = (length > 1) & (W != 1)  # a window of 1 may have lost it, and needs none
        at = row_at(p_table, i_n, length - 2, P, PG, NB, page_decay, H, held) + i_h * G
        total = tl.load(p_page_decay + at + o_g, mask=held & (o_g < G), other=0.0)
        total += tl.load(p_g + own * G + o_g, mask=o_g < G, other=0.0).to(tl.float64)
        tl.store(p_decay + own * GB + o_g, total)
    place = (length - 1) % BLOCK
    for n in range(0, place):
        t = place - 1 - n
        token = length - 1 - place + t
        seen = token >= 0
        if W > 0:
            seen = length - 1 - token < W
        at = row_at(p_table, i_n, token, P, PG, NB, page_k, HK * K, seen) + i_h * K
        k = tl.load(p_page_k + at + o_k, mask=seen & (o_k < K), other=0.0).to(ACC)
        at = row_at(p_table, i_n, token, P, PG, NB, page_v, HK * V, seen) + i_h * V
        v = tl.load(p_page_v + at + o_v, mask=seen & (o_v < V), other=0.0).to(ACC)
        product = tl.sum(x * k[None, :], 1)
        s = product * SCALE
        if SOLVE:
            at = row_at(p_table, i_n, token, P, PG, NB, page_norm, HK, seen) + i_h
            s = tl.where(o_g == G, overlap(product, tl.load(p_page_norm + at, mask=seen, other=1.0), ROOT), s)
        if DECAY:
            at = row_at(p_table, i_n, token, P, PG, NB, page_decay, H, seen) + i_h * G
            s += over_scale(total - tl.load(p_page_decay + at + o_g, mask=seen & (o_g < G), other=0.0), LN2, ACC)
        s = tl.where(seen, s, NONE)
        new = tl.maximum(m, s)
        p = tl.exp2(s - new)
        rescale = tl.exp2(m - new)
        l = l * rescale + p
        acc = acc * rescale[:, None] + p[:, None] * v[None, :]
        m = new
        w = tl.load(p_open_w + t * (HK * K) + o_k, mask=o_k < K, other=0.0).to(ACC)
        x = without(x, w, tl.load(p_open_beta + t * HK).to(ACC))
    tl.store(p_x + (own * GB + o_g)[:, None] * KB + o_k[None, :], x)
    share = (own * shares + shares - 1) * GB + o_g
    tl.store(p_sum + share[:, None] * VB + o_v[None, :], acc)
    tl.store(p_max + share, m)
    tl.store(p_all + share, l)


@triton.jit(do_not_specialize=["P", "PG", "NB", "W", "shares", "page_k", "page_v", "page_decay", "page_norm"])
def read(
    p_x, p_decay, p_page_k, p_page_v, p_page_decay, p_page_norm, p_table, p_length, p_sum, p_max, p_all,
    P, PG, NB, W, shares, page_k, page_v, page_decay, page_norm,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, GB: tl.constexpr,
    BN: tl.constexpr, NS: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, ROOT: tl.constexpr, DECAY: tl.constexpr,
    SOLVE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One share, of all but the last, of the pages' keys of one sequence and key-value head."""
    parts = shares - 1
    i_share = tl.program_id(0) % parts
    i_h = tl.program_id(0) // parts % HK
    i_n = tl.program_id(0) // parts // HK
    length = tl.load(p_length + i_n).to(tl.int32)
    if length <= 0:
        return
    hi = (length - 1) // BLOCK * BLOCK
    lo = 0
    if W > 0:
        lo = tl.minimum(tl.maximum(length - W, 0), hi)
    per = ((hi - lo + parts - 1) // parts + BN - 1) // BN * BN
    lo = tl.minimum(lo + i_share * per, hi)
    hi = tl.minimum(lo + per, hi)
    o_g = tl.arange(0, GB)
    o_n = tl.arange(0, BN)
    o_k = tl.arange(0, KB)
    o_v = tl.arange(0, VB)
    own = tl.cast(i_n, tl.int64) * HK + i_h
    b_x = tl.load(p_x + (own * GB + o_g)[:, None] * KB + o_k[None, :]).to(p_page_v.dtype.element_ty)
    total = tl.zeros([GB], tl.float64)
    if DECAY:
        total = tl.load(p_decay + own * GB + o_g)
    acc = tl.zeros([GB, VB], ACC)
    m = tl.full([GB], NONE, ACC)
    l = tl.zeros([GB], ACC)
    for i in tl.range(lo, hi, BN, num_stages=NS):
        token = i + o_n
        real = token < hi
        at = row_at(p_table, i_n, token, P, PG, NB, page_k, HK * K, real) + i_h * K
        b_k = tl.load(p_page_k + at[:, None] + o_k[None, :], mask=real[:, None] & (o_k < K)[None, :], other=0.0)
        at = row_at(p_table, i_n, token, P, PG, NB, page_v, HK * V, real) + i_h * V
        b_v = tl.load(p_page_v + at[:, None] + o_v[None, :], mask=real[:, None] & (o_v < V)[None, :], other=0.0)
        product = tl.dot(b_x, tl.trans(b_k.to(b_v.dtype)), input_precision="ieee", out_dtype=ACC)
        s = product * SCALE
        if SOLVE:
            at = row_at(p_table, i_n, token, P, PG, NB, page_norm, HK, real) + i_h
            norm = tl.load(p_page_norm + at, mask=real, other=1.0)
            s = tl.where(o_g[:, None] == H // HK, overlap(product, norm[None, :], ROOT), s)
        if DECAY:
            at = row_at(p_table, i_n, token, P, PG, NB, page_decay, H, real) + i_h * (H // HK)
            there = real[None, :] & (o_g < H // HK)[:, None]
            s += over_scale(
                total[:, None] - tl.load(p_page_decay + at[None, :] + o_g[:, None], mask=there, other=0.0), LN2, ACC
            )
        s = tl.where(real[None, :], s, NONE)
        new = tl.maximum(m, tl.max(s, 1))
        p = tl.where(real[None, :], tl.exp2(s - new[:, None]), 0.0)
        rescale = tl.exp2(m - new)
        l = l * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(b_v.dtype), b_v, acc * rescale[:, None], input_precision="ieee", out_dtype=ACC)
        m = new
    share = (own * shares + i_share) * GB + o_g
    tl.store(p_sum + share[:, None] * VB + o_v[None, :], acc)
    tl.store(p_max + share, m)
    tl.store(p_all + share, l)


@triton.jit(do_not_specialize=["PG", "shares", "page_k", "page_v", "slot_w", "slot_beta", "page_decay", "page_norm"])
def merge(
    p_q, p_k, p_v, p_beta, p_w, p_decay, p_page_k, p_page_v, p_open_w, p_open_beta, p_page_decay, p_page_norm, p_slots, p_length, p_rows,
    p_sum, p_max, p_all, p_out, PG, shares, page_k, page_v, slot_w, slot_beta, page_decay, page_norm,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, GB: tl.constexpr,
    BLOCK: tl.constexpr, SCALE: tl.constexpr, DECAY: tl.constexpr, SOLVE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """p_out [N H V]: zeros of a padded row."""
    G: tl.constexpr = H // HK
    i_n = tl.program_id(0) // HK
    i_h = tl.program_id(0) % HK
    length = tl.load(p_length + i_n).to(tl.int32)
    o_g = tl.arange(0, GB)
    o_k = tl.arange(0, KB)
    o_v = tl.arange(0, VB)
    own = tl.cast(i_n, tl.int64) * HK + i_h
    m = tl.full([GB], NONE, ACC)
    l = tl.zeros([GB], ACC)
    acc = tl.zeros([GB, VB], ACC)
    if length > 0:
        for i in range(0, shares):
            share = (own * shares + i) * GB + o_g
            part = tl.load(p_max + share)
            new = tl.maximum(m, part)
            old = tl.exp2(m - new)
            part = tl.exp2(part - new)
            l = l * old + tl.load(p_all + share) * part
            acc = acc * old[:, None] + tl.load(p_sum + share[:, None] * VB + o_v[None, :]) * part[:, None]
            m = new
        row = tl.load(p_rows + i_n)
        k = tl.load(p_k + own * K + o_k, mask=o_k < K, other=0.0).to(ACC)
        v = tl.load(p_v + own * V + o_v, mask=o_v < V, other=0.0)
        page = row // PG
        if SOLVE:
            solved = v.to(ACC) - tl.sum(acc * tl.exp2(tl.where(o_g == G, m, NONE))[:, None], 0)
            v = solved.to(v.dtype)
            at = (own * G + o_g)[:, None] * K + o_k[None, :]
            q = tl.load(p_q + at, mask=(o_g < G)[:, None] & (o_k < K)[None, :], other=0.0).to(ACC)
            acc += tl.exp2(tl.sum(q * k[None, :], 1) * SCALE - m)[:, None] * v.to(ACC)[None, :]
            tl.store(p_page_norm + page * page_norm + row % PG * HK + i_h, tl.sqrt(tl.sum(k * k)), mask=row >= 0)
        tl.store(p_page_k + page * page_k + row % PG * (HK * K) + i_h * K + o_k, k, mask=(row >= 0) & (o_k < K))
        tl.store(p_page_v + page * page_v + row % PG * (HK * V) + i_h * V + o_v, v, mask=(row >= 0) & (o_v < V))
        if DECAY:
            at = page * page_decay + row % PG * H + i_h * G + o_g
            tl.store(p_page_decay + at, tl.load(p_decay + own * GB + o_g), mask=(row >= 0) & (o_g < G))
        slot = tl.load(p_slots + i_n).to(tl.int64)
        place = (length - 1) % BLOCK
        w = tl.load(p_w + own * K + o_k, mask=o_k < K, other=0.0)
        tl.store(p_open_w + slot * slot_w + (place * HK + i_h) * K + o_k, w, mask=(slot >= 0) & (o_k < K))
        tl.store(p_open_beta + slot * slot_beta + place * HK + i_h, tl.load(p_beta + own).to(ACC), mask=slot >= 0)
        acc = acc / l[:, None]
    tl.store(
        p_out + (own * G + o_g)[:, None] * V + o_v[None, :],
        acc.to(p_out.dtype.element_ty),
        mask=(o_g < G)[:, None] & (o_v < V)[None, :],
    )


@triton.jit(do_not_specialize=["P", "PG", "NB", "W", "tiles", "page_k", "slot_w", "slot_beta"])
def carry(
    p_page_k, p_open_w, p_open_beta, p_table, p_slots, p_length, P, PG, NB, W, tiles, page_k, slot_w, slot_beta,
    HK: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """BN rows of one sequence and key-value head, where its block has ended."""
    i_tile = tl.program_id(0) % tiles
    i_h = tl.program_id(0) // tiles % HK
    i_n = tl.program_id(0) // tiles // HK
    length = tl.load(p_length + i_n).to(tl.int32)
    lo = 0
    if W > 0:
        lo = tl.maximum(length - W, 0)
    token = lo + i_tile * BN + tl.arange(0, BN)
    if (length > 0) & (length % BLOCK == 0) & (lo + i_tile * BN < length):
        o_k = tl.arange(0, KB)
        real = token < length
        at = p_page_k + row_at(p_table, i_n, token, P, PG, NB, page_k, HK * K, real)[:, None] + i_h * K + o_k[None, :]
        there = real[:, None] & (o_k < K)[None, :]
        k = tl.load(at, mask=there, other=0.0).to(ACC)
        slot = tl.load(p_slots + i_n).to(tl.int64)
        p_open_w += slot * slot_w + i_h * K
        p_open_beta += slot * slot_beta + i_h
        for t in range(0, BLOCK):
            w = tl.load(p_open_w + t * (HK * K) + o_k, mask=o_k < K, other=0.0).to(ACC)
            beta = tl.load(p_open_beta + t * HK).to(ACC)
            # a key's own factor, and those before it, are not its own
            k = without(k, w, tl.where(token < length - BLOCK + t, beta, 0.0))
        tl.store(at, k, mask=there)
