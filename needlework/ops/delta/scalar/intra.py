"""What a chunk needs that does not depend on the state, for all chunks at once: T, P' and the decay inside the chunk.

    A_ts = β_t Γ_ts k_sᵀ(k_t + λ_t q_t), s < t    T = (I + A)⁻¹    P'_ts = scale · Γ_ts k_sᵀ r_t, s <= t
    Γ_ts = 2^{G_t − G_s}, G the sum of the chunk's gates up to t, in log2; r reads (r = q unless another query is given)

A program holds R rows, whole chunks of C <= R tokens of one value head; masks keep chunks apart, so that the products keep
the 64 rows that Hopper's tensor cores want. x = k + λq is never formed: x·k = k·k + λ q·k.

Every operand of a product here and in the kernels that follow is float16 in half precision: inputs of another half type are
copied as they are read, and the copies are what follows takes.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.tile import capped, plus_product
from needlework.ops.delta.powers import divisors
from needlework.ops.delta.scalar.operands import ROWS

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def operand_rows(
    p, p_copy, first, keep, mine, i_d, STEP: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BD: tl.constexpr,
    ST: tl.constexpr, COPY: tl.constexpr, by=None,
):  # fmt: skip
    """R rows of [rows D], times `by`, as operands, every STEP-th from `first`, columns from i_d; zeros where not `keep` and past D.
    COPY: where they are `mine` they are also stored as such."""
    o_d = i_d + tl.arange(0, BD)
    # a 64-bit base and 32-bit offsets: a tile of 64-bit ones is dear in registers
    o = tl.arange(0, R)[:, None] * (STEP * D) + o_d[None, :]
    inside = keep[:, None] & (o_d < D)[None, :]
    b = tl.load(p + first * D + o, mask=inside, other=0.0)
    if by is not None:
        b = b.to(tl.float32) * by
    b = b.to(ST)
    if COPY:
        tl.store(p_copy + first * D + o, b, mask=inside & mine)
    return b


@triton.jit
def prefixes(p_g, o_value, live, R: tl.constexpr, C: tl.constexpr, GATE: tl.constexpr):
    """Gates of R // C chunks and their inclusive sums, in log2 and float64: |G| reaches hundreds where a difference of 1e-3 counts."""
    gate = tl.zeros([R], tl.float64)
    if GATE:
        gate = capped(tl.load(p_g + o_value, mask=live, other=0.0)).to(tl.float64) * LOG2E
    return gate, tl.reshape(tl.cumsum(tl.reshape(gate, [R // C, C]), 1), [R])


@triton.jit
def around(G, R: tl.constexpr, C: tl.constexpr):
    """What the gates of R // C chunks sum to from each one's second token on, and after each token."""
    chunks = tl.reshape(G, [R // C, C])
    t = tl.arange(0, C)[None, :]
    first, last = tl.sum(tl.where(t == 0, chunks, 0.0), 1), tl.sum(tl.where(t == C - 1, chunks, 0.0), 1)
    return tl.reshape(chunks - first[:, None], [R]), tl.reshape(last[:, None] - chunks, [R])


@triton.jit
def power(x, ACC: tl.constexpr):
    """2^x of float64. A narrow exponent of −43 would be rounded by more than a result is."""
    whole = tl.floor(x)
    return tl.exp2(whole.to(ACC)) * tl.exp2((x - whole).to(ACC))


@triton.jit
def two_narrow(x, ACC: tl.constexpr):
    """float64 as a sum: differences are as good as float64's once rounded, and cost no wide registers."""
    high = x.to(ACC)
    return high, (x - high.to(tl.float64)).to(ACC)


@triton.jit
def decay_between(to, since, seen, ACC: tl.constexpr):
    """2^{to_t − since_s} where `seen`, 1 elsewhere."""
    high, low = two_narrow(to, ACC)
    high_since, low_since = two_narrow(since, ACC)
    between = (high[:, None] - high_since[None, :]) + (low[:, None] - low_since[None, :])
    return tl.exp2(tl.where(seen, tl.minimum(between, 0.0), 0.0))


@triton.jit
def decays(
    p_g, p_G, p_E, o_value, o_row, o_t, i_bh, live, scale, NR, C: tl.constexpr, R: tl.constexpr, ACC: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    """Gates, G and e^G of R rows of one value head; G and the factors that follow from it are stored."""
    gate, G = prefixes(p_g, o_value, live, R, C, GATE)
    since, left = around(G, R, C)
    tl.store(p_G + o_row, G.to(ACC), mask=o_t < NR)
    p_factor = p_E + tl.cast(i_bh, tl.int64) * (ROWS * NR) + (o_t // C) * (ROWS * C) + o_t % C
    e_start = power(G, ACC)
    tl.store(p_factor + 4 * C, -e_start, mask=o_t < NR)
    tl.store(p_factor + 3 * C, e_start * scale, mask=o_t < NR)
    # two ways to sum may leave a last digit above 0
    tl.store(p_factor + 5 * C, tl.exp2(tl.minimum(left, 0.0).to(ACC)), mask=o_t < NR)
    tl.store(p_factor + 6 * C, tl.exp2(since.to(ACC)), mask=o_t < NR)
    tl.store(p_factor + 7 * C, power(gate, ACC), mask=o_t < NR)
    return gate, G, e_start


@triton.jit(do_not_specialize=["scale", "T", "NR", "heads"])
def intra(
    p_r, p_q, p_k, p_g, p_beta, p_lam, p_T, p_P, p_A, p_G, p_E, p_r_copy, p_q_copy, p_k_copy, p_abc, scale, T, NR, heads,
    H: tl.constexpr, HR: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
    ACC: tl.constexpr, ST: tl.constexpr, TT: tl.constexpr, SOLVE: tl.constexpr, COPY: tl.constexpr, SAVE: tl.constexpr,
    GATE: tl.constexpr, ERASE: tl.constexpr, LAM: tl.constexpr, READ: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """NR rows of T, P', G and NR // C chunks of E [8 C] a value head: T rounded up to whole chunks. READ: r is not q (which then
    only enters x). SAVE: also A without β, for the backward, and beside it, where q both reads and enters x, Q = Γ⁻∘(q kᵀ).

    SHARED: an additive rule, of whose value heads a program has `heads` that read with one query and have one key.
    E holds the factors of a chunk's tokens: β, −β e^G, λ, scale e^G, −e^G, e^{G_C − G}, e^{G − G_1}, e^g. T is of type TT.
    """
    tiles = (NR + R - 1) // R
    i_t = (tl.program_id(0) % tiles) * R
    i_bh = tl.program_id(0) // tiles
    if SHARED:
        i_bh *= heads
    i_b = i_bh // HV
    i_h = i_bh % HV
    o_t = i_t + tl.arange(0, R)
    live = o_t < T
    token = tl.cast(i_b, tl.int64) * T + o_t
    o_value = token * HV + i_h
    o_row = tl.cast(i_bh, tl.int64) * NR + o_t
    start = tl.cast(i_b, tl.int64) * T + i_t
    o_k = start * H + i_h // (HV // H)
    o_r = start * HR + i_h // (HV // HR)

    gate, G, e_start = decays(p_g, p_G, p_E, o_value, o_row, o_t, i_bh, live, scale, NR, C, R, ACC, GATE)

    kk = tl.zeros([R, R], ACC)
    rk = tl.zeros([R, R], ACC)
    qk = tl.zeros([R, R], ACC)
    by_q, by_k = None, None
    if p_abc is not None:
        by_q, by_k, _ = divisors(p_abc, i_bh)
    first_k = i_h % (HV // H) == 0
    first_r = i_h % (HV // HR) == 0
    for i_d in tl.static_range(0, K, BK):
        b_k = operand_rows(p_k, p_k_copy, o_k, live, first_k, i_d, H, K, R, BK, ST, COPY, by_k)
        b_kT = tl.trans(b_k)
        b_r = operand_rows(p_r, p_r_copy, o_r, live, first_r, i_d, HR, K, R, BK, ST, COPY, by_q)
        rk = plus_product(rk, b_r, b_kT)
        if ERASE:
            kk = plus_product(kk, b_k, b_kT)
        if READ:
            b_q = operand_rows(p_q, p_q_copy, o_k, live, first_k, i_d, H, K, R, BK, ST, COPY)
            qk = plus_product(qk, b_q, b_kT)

    t = tl.arange(0, R)[:, None]
    s = tl.arange(0, R)[None, :]
    same = t // C == s // C
    seen = same & (t >= s)
    decay = decay_between(G, G, seen, ACC)
    o_pair = o_row[:, None] * C + s % C
    keep = same & (o_t < NR)[:, None]
    tl.store(p_P + o_pair, tl.where(seen, rk * decay * scale, 0.0).to(ST), mask=keep)
    if SHARED:
        for i in range(1, heads):
            decayed = decays(p_g, p_G, p_E, o_value + i, o_row + i * NR, o_t, i_bh + i, live, scale, NR, C, R, ACC, GATE)
            decay_next = decay_between(decayed[1], decayed[1], seen, ACC)
            o_next = o_pair + tl.cast(i, tl.int64) * NR * C
            tl.store(p_P + o_next, tl.where(seen, rk * decay_next * scale, 0.0).to(ST), mask=keep)
    if ERASE:
        p_factor = p_E + tl.cast(i_bh, tl.int64) * (ROWS * NR) + (o_t // C) * (ROWS * C) + o_t % C
        beta = tl.load(p_beta + o_value, mask=live, other=0.0).to(ACC)
        tl.store(p_factor, beta, mask=o_t < NR)
        tl.store(p_factor + C, -beta * e_start, mask=o_t < NR)
        x = kk
        if LAM:
            lam = tl.load(p_lam + o_value, mask=live, other=0.0).to(ACC)
            tl.store(p_factor + 2 * C, lam, mask=o_t < NR)
            if READ:
                x += lam[:, None] * qk
            else:
                x += lam[:, None] * rk
        A = tl.where(seen & (t > s), x * decay, 0.0)
        if SAVE:
            BOTH: tl.constexpr = LAM and not READ
            p_saved = p_A + o_row[:, None] * (2 * C if BOTH else C) + s % C
            tl.store(p_saved, A.to(ST), mask=keep)
            if BOTH:
                between = decay_between(G - gate, G, seen & (t > s), ACC)
                tl.store(p_saved + C, (rk * between).to(ST), mask=keep)
        A *= beta[:, None]
        # blocks of 2, 4, …, C: the inverse of a block from those of its halves
        X = tl.where(t == s, 1.0, 0.0) - tl.where(t // 2 == s // 2, A, 0.0)
        for j in tl.static_range(1, 7):
            if (1 << j) < C:
                corner = tl.where((t >> (j + 1) == s >> (j + 1)) & (t >> j != s >> j), A, 0.0)
                b_X = X.to(TT)
                b_U = tl.dot(corner.to(TT), b_X, input_precision=SOLVE, out_dtype=ACC).to(TT)
                X -= tl.dot(b_X, b_U, input_precision=SOLVE, out_dtype=ACC)
        tl.store(p_T + o_pair, X.to(TT), mask=keep)
