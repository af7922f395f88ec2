"""Gradients inside a chunk, and the sums that end the backward: pairs, combine, gate.

    E = Γ ⊙ tril(scale do Wᵀ)    D = −Γ ⊙ tril₋₁(du Wᵀ)    dx/β += D k
    dr += E k   dk += Eᵀ r + Dᵀ(βx) + dx   dq = λ dx   dλ = q·dx   dβ = v·du + x·dx/β

Γ_ts = 2^{G_t − G_s}, x = k + λq, r reads; without q_read r is q and dq is both. dβ divides by nothing: β may be 0.
dg sums only terms that hold e^g (spec: dg without cancellation): of each token r·dr and x·dx before E and D are added, of
each key k·dk, of each pair inside the chunk E_ts r_t·k_s and β_t D_ts x_t·k_s, and X of the chunk (`triton_replay`).
"""

import triton
import triton.language as tl

from needlework.ops.delta.triton_adjoint import gradient_factor
from needlework.ops.delta.triton_intra import LOG2E
from needlework.ops.delta.triton_scan import load_tile, store_tile


@triton.jit(do_not_specialize=["scale", "T", "NR"])
def pairs(
    x_do, x_du, x_w, x_v, p_g, x_scaled, p_E, p_D, p_written, p_max, scale, T, NR,
    HV: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, NS: tl.constexpr, NM: tl.constexpr,
    TMA: tl.constexpr, HALF: tl.constexpr, COPY: tl.constexpr, ACC: tl.constexpr, OT: tl.constexpr,
    GATE: tl.constexpr, ERASE: tl.constexpr,
):  # fmt: skip
    """E, D and v·du of one chunk of one value head; COPY: also do times the factor that du holds."""
    chunks = NR // C
    i_t = (tl.program_id(0) % chunks) * C
    i_bh = tl.program_id(0) // chunks
    i_b = i_bh // HV
    i_h = i_bh % HV
    factor = gradient_factor(p_max, NM, HALF)
    o_t = i_t + tl.arange(0, C)
    E = tl.zeros([C, C], ACC)
    D = tl.zeros([C, C], ACC)
    written = tl.zeros([C], ACC)
    for i_v in tl.range(0, V, BV, num_stages=NS):
        b_do = load_tile(x_do, i_b, i_t, i_h, i_v, T, HV, V, C, BV, TMA)
        b_w = load_tile(x_w, i_b, i_t, i_h, i_v, T, HV, V, C, BV, TMA)
        if COPY:
            b_do = (b_do.to(ACC) * factor).to(OT)
            store_tile(x_scaled, b_do, i_b, i_t, i_h, i_v, T, HV, V, C, BV, TMA)
        E = tl.dot(b_do, tl.trans(b_w), E, input_precision="ieee", out_dtype=ACC)
        if ERASE:
            b_du = load_tile(x_du, i_b, i_t, i_h, i_v, T, HV, V, C, BV, TMA)
            D = tl.dot(b_du, tl.trans(b_w), D, input_precision="ieee", out_dtype=ACC)
            b_v = load_tile(x_v, i_b, i_t, i_h, i_v, T, HV, V, C, BV, TMA)
            written += tl.sum(b_du.to(ACC) * b_v.to(ACC), 1)
    if not COPY:
        E *= factor

    r = tl.arange(0, C)[:, None]
    c = tl.arange(0, C)[None, :]
    decay = tl.full([C, C], 1.0, ACC)
    if GATE:
        o_value = (tl.cast(i_b, tl.int64) * T + o_t) * HV + i_h
        # in float64, as in the forward: the difference counts, not the prefix
        G = tl.cumsum(tl.load(p_g + o_value, mask=o_t < T, other=0.0).to(tl.float64) * LOG2E, 0)
        decay = tl.exp2(tl.where(r >= c, G[:, None] - G[None, :], 0.0).to(ACC))
    o_row = tl.cast(i_bh, tl.int64) * NR + o_t
    o_pair = o_row[:, None] * C + c
    tl.store(p_E + o_pair, tl.where(r >= c, E * decay * scale, 0.0).to(p_E.dtype.element_ty))
    if ERASE:
        tl.store(p_D + o_pair, tl.where(r > c, -D * decay, 0.0).to(p_D.dtype.element_ty))
        tl.store(p_written + o_row, written)


@triton.jit
def tokens_at(p, row, keep, i_d, STEP: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """[C BD] of [rows D], every STEP-th row from `row`; zeros where not `keep` and past D."""
    o_d = i_d + tl.arange(0, BD)
    o = tl.arange(0, C)[:, None] * (STEP * D) + o_d[None, :]
    return tl.load(p + row * D + o, mask=keep[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def parts_at(
    p, row, keep, i_d, rows, STEP: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Sum over PARTS tensors of `rows` rows."""
    total = tokens_at(p, row, keep, i_d, STEP, D, C, BD).to(ACC)
    for i in tl.static_range(1, PARTS):
        total += tokens_at(p, row + i * rows, keep, i_d, STEP, D, C, BD).to(ACC)
    return total


@triton.jit
def put_tokens(p, b, row, keep, i_d, STEP: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    o_d = i_d + tl.arange(0, BD)
    o = tl.arange(0, C)[:, None] * (STEP * D) + o_d[None, :]
    tl.store(p + row * D + o, b.to(p.dtype.element_ty), mask=keep[:, None] & (o_d < D)[None, :])


@triton.jit(do_not_specialize=["T", "NR", "B"])
def combine(
    p_r, p_q, p_k, p_beta, p_lam, p_dr_part, p_dx_part, p_dk_part, p_E, p_D, p_written, p_dr, p_dq, p_dk, p_gate, p_sums, p_dlam,
    p_dbeta, p_max, T, NR, B,
    H: tl.constexpr, HR: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
    NM: tl.constexpr, HALF: tl.constexpr, ACC: tl.constexpr, OT: tl.constexpr,
    GATE: tl.constexpr, ERASE: tl.constexpr, LAM: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """One chunk, key head and tile of BK keys, over the value heads of the group; of the numbers a token, a part each tile.

    p_gate, p_dlam, p_dbeta [tiles B HV NR]; p_sums [tiles 2 B HV chunks]: what the chunk's tokens and its keys add to ⟨S, dS⟩.
    """
    TILES: tl.constexpr = (K + BK - 1) // BK
    G: tl.constexpr = HV // H
    i_tile = tl.program_id(0) % TILES
    chunks = NR // C
    i_c = (tl.program_id(0) // TILES) % chunks
    i_bk = tl.program_id(0) // (TILES * chunks)
    i_b = i_bk // H
    i_k = i_bk % H
    i_d = i_tile * BK
    rest = 1.0 / gradient_factor(p_max, NM, HALF)
    o_c = tl.arange(0, C)
    o_t = i_c * C + o_c
    live = o_t < T
    first = tl.cast(i_b, tl.int64) * T + i_c * C
    at_key = first * H + i_k
    rows = tl.cast(B, tl.int64) * T * HV
    b_k = tokens_at(p_k, at_key, live, i_d, H, K, C, BK)
    k = b_k.to(ACC)
    b_q = tokens_at(p_q, at_key, live, i_d, H, K, C, BK)
    t = o_c[:, None]
    s = o_c[None, :]
    dq_sum = tl.zeros([C, BK], ACC)
    dk_sum = tl.zeros([C, BK], ACC)
    for j in range(G):
        i_h = i_k * G + j
        i_bh = i_b * HV + i_h
        at_value = first * HV + i_h
        o_value = at_value + o_c * HV
        o_token = (tl.cast(i_tile, tl.int64) * B * HV + i_bh) * NR + o_t
        at_pair = (tl.cast(i_bh, tl.int64) * NR + i_c * C) * C
        b_r = b_q
        if READ:
            b_r = tokens_at(p_r, first * HR + i_h // (HV // HR), live, i_d, HR, K, C, BK)
        r = b_r.to(ACC)
        dr = parts_at(p_dr_part, at_value, live, i_d, rows, HV, K, C, BK, PARTS, ACC)
        dk = parts_at(p_dk_part, at_value, live, i_d, rows, HV, K, C, BK, PARTS, ACC)
        E = tl.load(p_E + at_pair + t * C + s)
        if GATE:
            from_start = tl.sum(r * dr, 1)
            to_end = tl.sum(k * dk, 1)
            rk = tl.dot(b_r, tl.trans(b_k), input_precision="ieee", out_dtype=ACC)
            held = E.to(ACC) * rk
        dr = tl.dot(E.to(OT), b_k, dr, input_precision="ieee", out_dtype=ACC)
        # the transpose comes from memory: none of a product in registers
        dk = tl.dot(tl.load(p_E + at_pair + s * C + t).to(OT), b_r, dk, input_precision="ieee", out_dtype=ACC)
        if ERASE:
            beta = tl.load(p_beta + o_value, mask=live, other=0.0).to(ACC)
            x = k
            if LAM:
                lam = tl.load(p_lam + o_value, mask=live, other=0.0).to(ACC)
                q = b_q.to(ACC)
                x = k + lam[:, None] * q
            D = tl.load(p_D + at_pair + t * C + s)
            dx = parts_at(p_dx_part, at_value, live, i_d, rows, HV, K, C, BK, PARTS, ACC)
            if GATE:
                from_start += beta * tl.sum(x * dx, 1)
                xk = tl.dot(b_k, tl.trans(b_k), input_precision="ieee", out_dtype=ACC)
                if LAM:
                    qk = tl.dot(b_q, tl.trans(b_k), input_precision="ieee", out_dtype=ACC)
                    xk += lam[:, None] * qk
                held += beta[:, None] * D.to(ACC) * xk
            dx = tl.dot(D.to(OT), b_k, dx, input_precision="ieee", out_dtype=ACC)
            b_wiped = (x * beta[:, None]).to(OT)
            dk = tl.dot(tl.load(p_D + at_pair + s * C + t).to(OT), b_wiped, dk, input_precision="ieee", out_dtype=ACC)
            dbeta = tl.sum(x * dx, 1)
            if i_tile == 0:
                dbeta += tl.load(p_written + tl.cast(i_bh, tl.int64) * NR + o_t)
            tl.store(p_dbeta + o_token, dbeta * rest)
            dx *= beta[:, None]
            dk += dx
            if LAM:
                tl.store(p_dlam + o_token, tl.sum(q * dx, 1) * rest)
                dq_sum += lam[:, None] * dx
        dk_sum += dk
        if READ:
            # [B T HV K]: where r has fewer heads, the caller sums
            put_tokens(p_dr, dr * rest, at_value, live, i_d, HV, K, C, BK)
        else:
            dq_sum += dr
        if GATE:
            # the gate of t stands between s and r for r >= t > s; it also decays what r reads, r >= t, and what s leaves, s < t
            held = tl.where(t > s, held, 0.0)
            # a sum without cancellation: in half the tensor cores' float32 is far more than the operands hold
            precision: tl.constexpr = "tf32" if HALF else "ieee"
            later = tl.dot((s >= t).to(ACC), held, input_precision=precision, out_dtype=ACC)
            gate = tl.sum(tl.where(s < t, later + to_end[None, :], from_start[None, :]), 1)
            tl.store(p_gate + o_token, gate)
            o_sum = (tl.cast(i_tile, tl.int64) * 2 * B * HV + i_bh) * chunks + i_c
            tl.store(p_sums + o_sum, tl.sum(from_start, 0))
            tl.store(p_sums + o_sum + tl.cast(B, tl.int64) * HV * chunks, tl.sum(to_end, 0))
    put_tokens(p_dq, dq_sum * rest, at_key, live, i_d, H, K, C, BK)
    put_tokens(p_dk, dk_sum * rest, at_key, live, i_d, H, K, C, BK)


@triton.jit(do_not_specialize=["T", "NR", "B", "N", "anchors"])
def gate(
    p_gate, p_sums, p_X, p_dg, p_cum, p_max, T, NR, B, N, anchors,
    HV: tl.constexpr, C: tl.constexpr, TILES: tl.constexpr, SLICES: tl.constexpr, EVERY: tl.constexpr, NM: tl.constexpr,
    HALF: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dg of the chunks from one anchor back to the next, of one sequence and value head. ⟨S, dS⟩ at a chunk's start is X and
    what its tokens read; at its end it is X and what its keys left."""
    i_n = tl.program_id(0) // (anchors * HV)
    i_h = (tl.program_id(0) // anchors) % HV
    i_anchor = tl.program_id(0) % anchors
    start = tl.load(p_cum + i_n)
    count = tl.load(p_cum + i_n + 1) - start
    chunks = NR // C
    i_b = start // chunks
    i_bh = tl.cast(i_b, tl.int64) * HV + i_h
    per_tile = tl.cast(B, tl.int64) * HV
    rest = 1.0 / gradient_factor(p_max, NM, HALF)
    first = i_anchor * EVERY
    if first < count:
        place = (tl.cast(start // EVERY + i_n + i_anchor, tl.int64)) * HV + i_h
        X = tl.load(p_X + place * SLICES)
        for i in tl.static_range(1, SLICES):
            X += tl.load(p_X + place * SLICES + i)
        for i in range(first, tl.minimum(first + EVERY, count)):
            i_c = start - i_b * chunks + count - 1 - i
            read = tl.zeros([1], ACC)
            left = tl.zeros([1], ACC)
            dg = tl.zeros([C], ACC)
            o_t = i_c * C + tl.arange(0, C)
            one = tl.arange(0, 1)
            for i_tile in tl.static_range(0, TILES):
                p_sum = p_sums + (2 * i_tile * per_tile + i_bh) * chunks + i_c + one
                read += tl.load(p_sum)
                left += tl.load(p_sum + per_tile * chunks)
                dg += tl.load(p_gate + (i_tile * per_tile + i_bh) * NR + o_t)
            if i > first:
                X -= tl.sum(left, 0)
            o_value = (tl.cast(i_b, tl.int64) * T + o_t) * HV + i_h
            tl.store(p_dg + o_value, (dg + X) * rest, mask=o_t < T)
            X += tl.sum(read, 0)
