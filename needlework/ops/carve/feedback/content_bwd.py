"""What CARVE's backward does outside the delta engine's kernels: gates before and after, the content's gradient between chunks.

    p = b + u,   l = −exp(A) ⊙ softplus(f + τ) − softplus(p)                                  `retention_kernel`, all rows at once
    do ← (do + dtotal) / power,   dS ← dS / power,   then the engine's adjoint                 `enter_kernel`, a content chunk's start
    dcontent = −Σ_t σ(p) ⊙ dl,   dz = (dcontent W₂)(1 − z²),   dm += dz W₁                    `leave_kernel`, its end
    db = −σ(p) ⊙ dl,   df = −exp(A) σ(f + τ) ⊙ dl,   dτ = Σ df,   dA = Σ g ⊙ dl               `activation_kernel`, all rows at once

u = τ_b + W₂ z, z = tanh(W₁ m) of each content chunk are given. Rows of a gap hold f = b = −∞: l = 0, and no gradient passes. In half
mode gradients inside a content chunk are float16 operands, scaled by a power of two of their own: dS and dtotal may grow or vanish
from one content chunk to the next.
"""

import triton
import triton.language as tl

from needlework.ops.carve.feedback.intra import softplus2
from needlework.ops.common.kernels.parts import largest, load_transposed, store_transposed, times
from needlework.ops.common.kernels.tile import load_tile, store_tile
from needlework.ops.delta.channel.scan_bwd import descend, store_state

# numbers from a content chunk's power of two, and its largest gradient, to the next one's: pointers to them are aligned as tensors are
STEP = tl.constexpr(4)


@triton.jit
def _softplus(x, ASM: tl.constexpr):
    """log(1 + e^x)."""
    return softplus2(x * 1.4426950408889634, ASM) * 0.6931471805599453


@triton.jit
def _stride(N):
    """Sequences of a row of spans or slots."""
    return tl.cdiv(N, 4) * 4


@triton.jit
def _row_range(p_span, g, T, C: tl.constexpr, GROUP: tl.constexpr):
    """Batch row, and first and last row of the g-th group of kernel chunks in a span."""
    first, end = tl.load(p_span), tl.load(p_span + 1)
    NC = tl.cdiv(T, C)
    b = first // tl.maximum(NC, 1)
    start = first + g * GROUP
    stop = tl.minimum(start + GROUP, end)
    return tl.cast(b, tl.int64), (start - b * NC) * C, tl.minimum((stop - b * NC) * C, T)


@triton.jit(do_not_specialize=["T", "groups"])
def retention_kernel(
    p_spans, p_slots, p_f, p_b, p_A_log, p_dt_bias, p_u, p_do, p_l, p_do_peaks, T, groups,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """l of the rows, and the largest |do|, of a group of one content chunk."""
    i, g = tl.program_id(0) // groups, tl.program_id(0) % groups
    h, n, N = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    b, start, stop = _row_range(p_spans + 2 * (i * _stride(N) + n), g, T, C, GROUP)
    i_k, i_v = tl.arange(0, KP), tl.arange(0, VP)
    in_k, in_v = i_k < K, i_v < V
    decay = tl.exp(tl.load(p_A_log + h * K + i_k, mask=in_k, other=0.0).to(ACC))[None, :]
    bias = tl.load(p_dt_bias + h * K + i_k, mask=in_k, other=0.0).to(ACC)[None, :]
    slot = tl.cast(tl.load(p_slots + i * _stride(N) + n), tl.int64)
    u = tl.load(p_u + (slot * H + h) * K + i_k, mask=in_k, other=0.0)[None, :]
    peak = tl.zeros([ROWS, VP], ACC)
    for t in tl.range(start, stop, ROWS, num_stages=STAGES):
        i_t = t + tl.arange(0, ROWS)
        row, live = (b * T + i_t) * H + h, i_t < stop
        at, inside = row[:, None] * K + i_k[None, :], live[:, None] & in_k[None, :]
        f = tl.load(p_f + at, mask=inside, other=0.0).to(ACC) + bias
        p = tl.load(p_b + at, mask=inside, other=0.0).to(ACC) + u
        # e^{-11,356} is 0, and the engine's operand would overflow in base 2
        l = tl.maximum(-decay * _softplus(f, ASM) - _softplus(p, ASM), -11356.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(p_l + at, l, mask=inside)
        do = tl.load(p_do + row[:, None] * V + i_v[None, :], mask=live[:, None] & in_v[None, :], other=0.0)
        peak = tl.maximum(peak, tl.abs(do.to(ACC)))
    tl.store(p_do_peaks + ((tl.cast(i, tl.int64) * N + n) * H + h) * groups + g, tl.max(tl.max(peak, 1), 0))


@triton.jit
def _power(largest):
    """The power of two above the largest number, exactly, and its inverse; 1 where all is zero."""
    # from the smallest normal number to one whose double has an inverse
    bits = tl.minimum(tl.maximum(largest & 0x7F800000, 0x00800000), 0x7E000000) + 0x00800000
    bits = tl.where(largest > 0, bits, 0x3F800000)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["T", "most"])
def enter_kernel(
    p_spans, do, q_hat, e_hat, k_hat, P, inverse, p_whole, p_beta, p_dtotal, p_largest, p_power, p_dS, p_dfinal, kept, scaled, dr,
    p_peaks, T, most, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, NK: tl.constexpr,
    BV: tl.constexpr, ERASE: tl.constexpr, BETA: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
    HALF: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The engine's `adjoint` of a content chunk, whose gradients are divided by a power of two of its own, left at p_power: those that it
    leaves at `scaled`, and dS at the end, at p_dfinal, or at the end of the i-th kernel chunk, at n·most + i of `kept`. p_dS comes divided
    by the power of the content chunk after it; a program owns BV columns.

    PDL: the launch may begin while the one before it, `leave_kernel`, ends; all before that is done, and dS is taken up already,
    by the second cache, as all that another multiprocessor may have written since this one read there.
    """
    i_v, h, n = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    head = tl.cast(n, tl.int64) * H + h
    first, end = tl.load(p_spans + 2 * n), tl.load(p_spans + 2 * n + 1)
    b = first // tl.maximum(tl.cdiv(T, C), 1)
    o_v = i_v + tl.arange(0, BV)
    in_v = o_v < V
    state = head * K * V
    dS = load_transposed(p_dS + state, True, i_v, K, V, KP, NK, BV, ACC)
    if HALF:
        # by way of its true size: the quotient of two powers may overflow
        dS = times(dS, tl.load(p_power + STEP, cache_modifier=".cg"), NK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dtotal = tl.load(p_dtotal + head * V + o_v, mask=in_v, other=0.0, cache_modifier=".cg")
    inverse_power = tl.full([], 1, ACC)
    if HALF:
        power, inverse_power = _power(tl.load(p_largest + STEP, cache_modifier=".cg"))
        dS = times(dS, inverse_power, NK)
        if (tl.program_id(0) == 0) & (head == 0):
            tl.store(p_power, power)
    if p_dfinal is not None:
        store_transposed(p_dfinal + state, dS, True, i_v, K, V, KP, NK, BV)
    for i in tl.range(0, end - first, num_stages=STAGES):
        j = end - 1 - first - i
        c = first + j - b * tl.cdiv(T, C)
        b_doT = tl.trans(load_tile(do, b, c * C, h, i_v, T, H, V, C, BV, TMA)).to(ACC)
        b_doT = ((b_doT + dtotal[:, None]) * inverse_power).to(scaled.dtype if TMA else scaled.dtype.element_ty)
        store_tile(scaled, tl.trans(b_doT), b, c * C, h, i_v, T, H, V, C, BV, TMA)
        if kept is not None:
            for m in tl.static_range(NK):
                store_state(kept, tl.trans(dS[m].to(b_doT.dtype)), n * most + j, h, m * KP, i_v, H, K, V, KP, BV, TMA)
        dS = descend(
            dS, b_doT, q_hat, e_hat, k_hat, P, inverse, p_whole, p_beta, dr, c, b, h, i_v,
            T, H, K, V, C, KP, NK, BV, ERASE, BETA, TMA, ACC,
        )  # fmt: skip
    store_transposed(p_dS + state, dS, True, i_v, K, V, KP, NK, BV)
    tl.store(p_peaks + head * tl.num_programs(0) + tl.program_id(0), tl.max(largest(dS, NK), 0))


@triton.jit(do_not_specialize=["T", "i", "L", "longest", "content_chunk", "groups"])
def leave_kernel(
    p_spans, p_slots, p_ends, p_b, p_u, p_dl, p_z, p_w1, p_w2, p_do_peaks, p_dS_peaks, p_powers,
    p_dcontent, p_dz, p_dm, p_dtotal, p_largest, T, L, longest, content_chunk, groups, i,
    RANK: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, RP: tl.constexpr,
    VB: tl.constexpr, ROWS: tl.constexpr, BG: tl.constexpr, BLOCKS: tl.constexpr, BB: tl.constexpr, PDL: tl.constexpr,
    HALF: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Of content chunk i: dm, which reaches the chunk before as dtotal, and how large that one's gradients are at most, over all
    heads, as the bits of a float32.

    i = longest is no chunk: what follows the last one. PDL: the launch may begin while `pairs` ends; until it waits, it reads what
    the chain does not write, or `leave_kernel` before it did, which is done.
    """
    h, n, N = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    head = tl.cast(n, tl.int64) * H + h
    i_k, i_r, i_g, i_b = tl.arange(0, KP), tl.arange(0, RP), tl.arange(0, BG), tl.arange(0, BB)
    in_k, in_r = i_k < K, i_r < RANK
    # all that the rows do not decide is asked for first: the chain waits for this program
    closed = (i > 0) & (tl.load(p_ends + n) >= tl.cast(i, tl.int64) * L)
    w2 = tl.load(p_w2 + i_k[:, None] * RANK + i_r[None, :], mask=in_k[:, None] & in_r[None, :], other=0.0).to(ACC)
    w1, dm, dtotal = (), (), ()
    for v in tl.static_range(0, V, VB):
        i_v = v + tl.arange(0, VB)
        in_v = i_v < V
        w1 += (tl.load(p_w1 + i_r[:, None] * V + i_v[None, :], mask=in_r[:, None] & in_v[None, :], other=0.0).to(ACC),)
        dm += (tl.load(p_dm + head * V + i_v, mask=in_v, other=0.0, cache_modifier=".cg"),)
        dtotal += (tl.load(p_dtotal + head * V + i_v, mask=in_v, other=0.0, cache_modifier=".cg"),)
    row = tl.minimum(i, longest - 1) * _stride(N) + n
    first, end = tl.load(p_spans + 2 * row), tl.load(p_spans + 2 * row + 1)
    end = tl.where(i < longest, end, first)
    slot = tl.cast(tl.load(p_slots + row), tl.int64) * H + h
    u = tl.load(p_u + slot * K + i_k, mask=in_k, other=0.0)[None, :]
    z = tl.load(p_z + slot * RANK + i_r, mask=in_r, other=0.0)
    NC = tl.cdiv(T, C)
    b = tl.cast(first // tl.maximum(NC, 1), tl.int64)
    start, stop = (first - b * NC) * C, tl.minimum((end - b * NC) * C, T)
    i_t = start + tl.arange(0, ROWS)
    at = ((b * T + i_t) * H + h)[:, None] * K + i_k[None, :]
    p = tl.load(p_b + at, mask=(i_t < stop)[:, None] & in_k[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if HALF:
        p_do_peaks += ((tl.cast(tl.maximum(i - 1, 0), tl.int64) * N + n) * H + h) * groups
        do_peaks = tl.load(p_do_peaks + i_g, mask=i_g < groups, other=0.0)
        dS_peaks = tl.load(p_dS_peaks + head * BLOCKS + i_b, mask=i_b < BLOCKS, other=0.0) * tl.load(p_powers + i * STEP)
    dcontent = tl.zeros([KP], ACC)
    for t in tl.range(start, stop, ROWS):
        i_t = t + tl.arange(0, ROWS)
        at = ((b * T + i_t) * H + h)[:, None] * K + i_k[None, :]
        dl = tl.load(p_dl + at, mask=(i_t < stop)[:, None] & in_k[None, :], other=0.0)
        dcontent -= tl.sum(tl.sigmoid(p.to(ACC) + u) * dl, 0)
        if t + ROWS < stop:
            inside = (i_t + ROWS < stop)[:, None] & in_k[None, :]
            p = tl.load(p_b + at + ROWS * H * K, mask=inside, other=0.0)
    dz = tl.sum(w2 * dcontent[:, None], 0) * (1 - z * z)
    if first < end:
        tl.store(p_dcontent + slot * K + i_k, dcontent, mask=in_k)
        tl.store(p_dz + slot * RANK + i_r, dz, mask=in_r)
    peak = tl.zeros([VB], ACC)
    for v in tl.static_range(0, V, VB):
        i_v = v + tl.arange(0, VB)
        in_v = i_v < V
        dm_ = dm[v // VB] + tl.sum(w1[v // VB] * dz[:, None], 0)
        # every output of the chunk is a term of its sum, and so of the next chunk's m
        dtotal_ = tl.where(closed, dm_ / content_chunk, dtotal[v // VB])
        tl.store(p_dm + head * V + i_v, tl.where(closed, 0.0, dm_), mask=in_v)
        tl.store(p_dtotal + head * V + i_v, dtotal_, mask=in_v)
        peak = tl.maximum(peak, tl.abs(dtotal_))
    if HALF:
        # as bits: of numbers that are not negative the larger has the larger ones, and the order of arrival does not matter
        largest = tl.maximum(tl.max(do_peaks, 0) + tl.max(peak, 0), tl.max(dS_peaks, 0))
        tl.atomic_max(p_largest + i * STEP, largest.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit(do_not_specialize=["T", "groups"])
def activation_kernel(
    p_spans, p_slots, p_f, p_b, p_A_log, p_dt_bias, p_u, p_dl, p_df, p_db, p_dA_log, p_ddt_bias, T, groups,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """df and db of the rows of a group of one content chunk, and its terms of the gradients of A_log and dt_bias."""
    i, g = tl.program_id(0) // groups, tl.program_id(0) % groups
    h, n, N = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    b, start, stop = _row_range(p_spans + 2 * (i * _stride(N) + n), g, T, C, GROUP)
    i_k = tl.arange(0, KP)
    in_k = i_k < K
    decay = tl.exp(tl.load(p_A_log + h * K + i_k, mask=in_k, other=0.0).to(ACC))[None, :]
    bias = tl.load(p_dt_bias + h * K + i_k, mask=in_k, other=0.0).to(ACC)[None, :]
    slot = tl.cast(tl.load(p_slots + i * _stride(N) + n), tl.int64)
    u = tl.load(p_u + (slot * H + h) * K + i_k, mask=in_k, other=0.0)[None, :]
    dA_log, ddt_bias = tl.zeros([ROWS, KP], ACC), tl.zeros([ROWS, KP], ACC)
    for t in tl.range(start, stop, ROWS, num_stages=STAGES):
        i_t = t + tl.arange(0, ROWS)
        at = ((b * T + i_t) * H + h)[:, None] * K + i_k[None, :]
        inside = (i_t < stop)[:, None] & in_k[None, :]
        f = tl.load(p_f + at, mask=inside, other=0.0).to(ACC) + bias
        p = tl.load(p_b + at, mask=inside, other=0.0).to(ACC) + u
        dl = tl.load(p_dl + at, mask=inside, other=0.0)
        df = -decay * tl.sigmoid(f) * dl
        tl.store(p_df + at, df.to(p_df.dtype.element_ty), mask=inside)
        tl.store(p_db + at, (-tl.sigmoid(p) * dl).to(p_db.dtype.element_ty), mask=inside)
        dA_log -= decay * _softplus(f, ASM) * dl
        ddt_bias += df
    at = (((tl.cast(i, tl.int64) * N + n) * groups + g) * H + h) * K + i_k
    tl.store(p_dA_log + at, tl.sum(dA_log, 0), mask=in_k)
    tl.store(p_ddt_bias + at, tl.sum(ddt_bias, 0), mask=in_k)
