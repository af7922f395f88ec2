"""What a chunk needs that does not depend on the state, for all chunks at once: T, P' and the decay inside the chunk.

    A_ts = β_t Γ_ts k_sᵀ(k_t + λ_t q_t), s < t    T = (I + A)⁻¹    P'_ts = scale · Γ_ts k_sᵀ r_t, s <= t
    Γ_ts = 2^{G_t − G_s}, G the sum of the chunk's gates up to t, in log2; r reads (r = q unless another query is given)

A program holds R rows, whole chunks of C <= R tokens of one value head; masks keep chunks apart, so that the products keep
the 64 rows that Hopper's tensor cores want. x = k + λq is never formed: x·k = k·k + λ q·k.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(p, o_row, keep, i_d, D: tl.constexpr, BD: tl.constexpr):
    """Rows o_row of [rows D], columns from i_d; zeros where not `keep` and past D."""
    o_d = i_d + tl.arange(0, BD)
    return tl.load(p + o_row[:, None] * D + o_d[None, :], mask=keep[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit(do_not_specialize=["scale", "T", "NR"])
def intra(
    p_r, p_q, p_k, p_g, p_beta, p_lam, p_T, p_P, p_G, p_E, scale, T, NR,
    H: tl.constexpr, HR: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
    ACC: tl.constexpr, ST: tl.constexpr, GATE: tl.constexpr, ERASE: tl.constexpr, LAM: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """NR rows of T, P', G, E a value head: T rounded up to whole chunks. READ: r is not q (which then only enters x)."""
    tiles = (NR + R - 1) // R
    i_t = (tl.program_id(0) % tiles) * R
    i_bh = tl.program_id(0) // tiles
    i_b = i_bh // HV
    i_h = i_bh % HV
    o_t = i_t + tl.arange(0, R)
    live = o_t < T
    token = tl.cast(i_b, tl.int64) * T + o_t
    o_value = token * HV + i_h
    o_k = token * H + i_h // (HV // H)
    o_r = token * HR + i_h // (HV // HR)

    # prefixes and their differences in float64: |G| reaches hundreds where a difference of 1e-3 counts
    gate = tl.zeros([R], tl.float64)
    if GATE:
        gate = tl.load(p_g + o_value, mask=live, other=0.0).to(tl.float64) * LOG2E
    chunks = tl.reshape(gate, [R // C, C])
    prefix = tl.cumsum(chunks, 1)
    G = tl.reshape(prefix, [R])
    E = tl.reshape(tl.sum(chunks, 1)[:, None] - prefix, [R])
    o_row = tl.cast(i_bh, tl.int64) * NR + o_t
    tl.store(p_G + o_row, G.to(ACC), mask=o_t < NR)
    # two ways to sum may leave a last digit above 0
    tl.store(p_E + o_row, tl.minimum(E, 0.0).to(ACC), mask=o_t < NR)

    kk = tl.zeros([R, R], ACC)
    rk = tl.zeros([R, R], ACC)
    qk = tl.zeros([R, R], ACC)
    for i_d in tl.static_range(0, K, BK):
        b_k = load_rows(p_k, o_k, live, i_d, K, BK)
        b_kT = tl.trans(b_k)
        rk = tl.dot(load_rows(p_r, o_r, live, i_d, K, BK), b_kT, rk, input_precision="ieee", out_dtype=ACC)
        if ERASE:
            kk = tl.dot(b_k, b_kT, kk, input_precision="ieee", out_dtype=ACC)
        if READ:
            qk = tl.dot(load_rows(p_q, o_k, live, i_d, K, BK), b_kT, qk, input_precision="ieee", out_dtype=ACC)

    t = tl.arange(0, R)[:, None]
    s = tl.arange(0, R)[None, :]
    same = t // C == s // C
    seen = same & (t >= s)
    # a prefix as two narrow numbers: their difference is as good as float64's once rounded, and costs no wide registers
    high = G.to(ACC)
    low = (G - high.to(tl.float64)).to(ACC)
    between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    decay = tl.exp2(tl.where(seen, tl.minimum(between, 0.0), 0.0))
    o_pair = o_row[:, None] * C + s % C
    keep = same & (o_t < NR)[:, None]
    tl.store(p_P + o_pair, tl.where(seen, rk * decay * scale, 0.0).to(ST), mask=keep)
    if ERASE:
        beta = tl.load(p_beta + o_value, mask=live, other=0.0).to(ACC)
        x = kk
        if LAM:
            lam = tl.load(p_lam + o_value, mask=live, other=0.0).to(ACC)
            if READ:
                x += lam[:, None] * qk
            else:
                x += lam[:, None] * rk
        A = tl.where(seen & (t > s), beta[:, None] * x * decay, 0.0)
        # blocks of 2, 4, …, C: the inverse of a block from those of its halves
        X = tl.where(t == s, 1.0, 0.0) - tl.where(t // 2 == s // 2, A, 0.0)
        for j in tl.static_range(1, 7):
            if (1 << j) < C:
                corner = tl.where((t >> (j + 1) == s >> (j + 1)) & (t >> j != s >> j), A, 0.0)
                b_X = X.to(ST)
                b_U = tl.dot(corner.to(ST), b_X, input_precision="ieee", out_dtype=ACC).to(ST)
                X -= tl.dot(b_X, b_U, input_precision="ieee", out_dtype=ACC)
        tl.store(p_T + o_pair, X.to(ST), mask=keep)
