"""A content chunk's recurrence, and what the chunk leaves to the next one's gates: m, the mean of its outputs, and u from it.

    m = Σ o / L        u = τ_b + W₂ tanh(W₁ m)        o before it is rounded, scale included

Programs own blocks of value columns. The program that finishes a head last makes its u from the whole m: no program waits.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.parts import load_transposed, store_transposed
from needlework.ops.delta.channel.scan import walk
from needlework.ops.slots.kernels import slot_of


@triton.jit
def content(
    p_m, p_w1, p_w2, p_b_bias, K: tl.constexpr, V: tl.constexpr, RANK: tl.constexpr, KP: tl.constexpr, BM: tl.constexpr,
    BR: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """u = τ_b + W₂ tanh(W₁ m) of one head [KP], in base 2."""
    o_k, o_m, o_r = tl.arange(0, KP), tl.arange(0, BM), tl.arange(0, BR)
    in_k, in_m, in_r = o_k < K, o_m < V, o_r < RANK
    m = tl.load(p_m + o_m, mask=in_m, other=0.0, cache_modifier=".cg")
    w1 = tl.load(p_w1 + o_r[:, None] * V + o_m[None, :], mask=in_r[:, None] & in_m[None, :], other=0.0).to(ACC)
    z = 2 * tl.sigmoid(2 * tl.sum(w1 * m[None, :], 1)) - 1
    w2 = tl.load(p_w2 + o_k[:, None] * RANK + o_r[None, :], mask=in_k[:, None] & in_r[None, :], other=0.0).to(ACC)
    b_bias = tl.load(p_b_bias + o_k, mask=in_k, other=0.0).to(ACC)
    return (b_bias + tl.sum(w2 * z[None, :], 1)) * 1.4426950408889634


@triton.jit
def content_kernel(
    p_m, p_u, p_w1, p_w2, p_b_bias, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RANK: tl.constexpr, KP: tl.constexpr,
    BM: tl.constexpr, BR: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The u of a head that resumes with an m."""
    i_nh, o_k = tl.program_id(0).to(tl.int64), tl.arange(0, KP)
    u = content(p_m + i_nh * V, p_w1, p_w2, p_b_bias + i_nh % H * K, K, V, RANK, KP, BM, BR, ACC)
    tl.store(p_u + i_nh * K + o_k, u, mask=o_k < K)


@triton.jit(do_not_specialize=["T", "N", "i"])
def walk_kernel(
    q_hat, e_hat, k_hat, Tp, Pp, p_whole, W, v, p_beta, o, p_S, p_m, p_total, p_kept_S, p_kept_m, p_u, p_done, p_w1, p_w2,
    p_b_bias, p_spans, p_bases, p_ends, p_slots, p_fresh, p_spare, T, N, i,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RANK: tl.constexpr, L: tl.constexpr, R: tl.constexpr, SAVE: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr, KP: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
    NS: tl.constexpr, ST: tl.constexpr, STRIDE: tl.constexpr, ACC: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Content chunk i of one sequence, head and block of BV value columns. L: its rows, R of them a token.

    PDL: as in `gates_kernel`, but what the walk before this one left is there already, and taken up while the gates end.

    STRIDE: p_S is a table, with so many numbers from slot to slot; a sequence that owns none has its part of p_spare [N H K V]. A tile
    of S is read and written in place, in each content chunk by one program, and not by the same one: the gates between two walks begin
    when all that the first has stored is there.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV * BV
    i_nh = tl.program_id(0) // NV
    n, j = i_nh // H, i_nh % H
    p_span = p_spans + 2 * (i * N + n)
    first, last = tl.load(p_span), tl.load(p_span + 1)
    if first >= last:
        return
    end, slot = tl.load(p_ends + n), tl.load(p_bases + n) + i
    head, kept = tl.cast(i_nh, tl.int64), tl.cast(slot, tl.int64) * H + j
    o_v = i_v + tl.arange(0, BV)
    in_v = o_v < V
    # what is kept at the start of a content chunk is where the walk before left it, and where this one takes it up
    p_from, p_to = p_S + head * K * V, p_S + head * K * V
    known = True
    if STRIDE is not None:
        own, resumed = slot_of(p_slots, p_fresh, n)
        p_from = tl.where(own < 0, p_spare + head * K * V, p_S + own * STRIDE + j * K * V)
        p_to = p_from
        known = (i > 0) | resumed
    if SAVE:
        if i > 0:
            p_from = p_kept_S + kept * K * V
        if end > (i + 1) * L:
            p_to = p_kept_S + (kept + H) * K * V
    # by the second cache, as all that another multiprocessor may have written while this program was there already
    S = load_transposed(p_from, known, i_v, K, V, BK, NK, BV, ACC)
    total = tl.load(p_total + head * V + o_v, mask=in_v, other=0.0, cache_modifier=".cg")
    if SAVE:
        if i == 0:
            store_transposed(p_kept_S + kept * K * V, S, True, i_v, K, V, BK, NK, BV)
        m = tl.load(p_m + head * V + o_v, mask=in_v, other=0.0, cache_modifier=".cg")
        tl.store(p_kept_m + kept * V + o_v, m, mask=in_v)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    S, total = walk(
        S, total, q_hat, e_hat, k_hat, Tp, Pp, p_whole, W, v, p_beta, None, None, o, first, last, j, i_v, T,
        H, K, V, 1, SAVE, 1, C, BK, NK, BV, NS, ST, ACC, TMA,
    )  # fmt: skip
    if STRIDE is not None:
        tl.debug_barrier()  # a number that two threads hold is read by both before one of them writes it
    store_transposed(p_to, S, True, i_v, K, V, BK, NK, BV)
    if end >= (i + 1) * L:
        tl.store(p_m + head * V + o_v, total / (L // R), mask=in_v)
        total = tl.zeros([BV], ACC)
    tl.store(p_total + head * V + o_v, total, mask=in_v)
    if end > (i + 1) * L:
        tl.debug_barrier()  # every warp's part of m, before this program counts as done
        if tl.atomic_add(p_done + i_nh, 1, sem="acq_rel") % NV == NV - 1:
            tl.debug_barrier()
            u = content(p_m + head * V, p_w1, p_w2, p_b_bias + j * K, K, V, RANK, KP, BM, BR, ACC)
            o_k = tl.arange(0, KP)
            tl.store(p_u + head * K + o_k, u, mask=o_k < K)
