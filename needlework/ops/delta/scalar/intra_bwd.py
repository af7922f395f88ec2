"""Gradients inside a chunk, and the sums that end the backward: pairs, combine, gate.

    F = do Wᵀ   U = du Wᵀ   E = scale Γ ∘ tril(F)   D = −β Γ ∘ tril₋₁(U)   x = k + λq
    dr = E k + dr₀   dx = D k + β dx₀   dk = dk₀ + Eᵀ r + Dᵀ x + dx   dq = λ dx   dλ = q·dx   dβ = v·du + x·dx/β

dr₀, dx₀, dk₀ passed through the state (`replay.py`). Where q reads, dq is both and x needs no product of its own:

    M = E + λD   N = D + Dᵀ      dq = M k + dr₀ + λβ dx₀      dk = N k + Mᵀ q + dk₀ + β dx₀

A token's own e^{g_t} multiplies all of its dx, and a gate of −30 would leave nothing of it in half precision. So it comes last, in
float32: dx₀ is held without it, and with Γ⁻_ts = e^{G_t − g_t − G_s}, 1 between neighbours, so are D where q does not read and
what makes dλ where it does. Products inside the chunk are the forward's: scale Γ∘(r kᵀ) = P', Γ∘(x kᵀ) = A, and where q both
reads and enters x, in place of P', Γ⁻∘(q kᵀ) = Q. dβ divides by nothing: β may be 0.
dg sums only terms that hold e^g (spec: dg without cancellation): of each token r·dr₀ and β x·dx₀, of each key k·dk₀, of each
pair inside the chunk (F∘P' − β U∘A)_ts, and X of the chunk.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.tile import load_tile, store_tile
from needlework.ops.delta.gradient_scaling import gradient_factor
from needlework.ops.delta.powers import divisors, product
from needlework.ops.delta.scalar.intra import decay_between, prefixes
from needlework.ops.delta.scalar.scan import factors, flag_overflow, written_as

# log2 of a decay below which nothing that half precision holds passes
NOTHING = tl.constexpr(-40.0)
STATE = tl.constexpr(2048)  # numbers of a state that one step multiplies


@triton.jit(do_not_specialize=["scale", "T", "NR", "NE", "jobs"])
def pairs(
    x_do, x_du, x_w, x_v, p_g, p_E, p_P, p_A, x_scaled, x_dv, p_M, p_N, p_D, p_held, p_written, p_asked, p_overflow, p_overflow_bwd, p_max, p_abc,
    scale, T, NR, NE, jobs,
    HV: tl.constexpr, V: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BV: tl.constexpr, NS: tl.constexpr, NM: tl.constexpr,
    TMA: tl.constexpr, HALF: tl.constexpr, ACC: tl.constexpr, OT: tl.constexpr, ST: tl.constexpr, BT: tl.constexpr,
    GATE: tl.constexpr, ERASE: tl.constexpr, LAM: tl.constexpr, READ: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """R rows, whole chunks of one value head, of what multiplies k and r (NE rows, R wide), dv, the pairs' part of dg, and of
    dβ and dλ what no state passed. HALF: also do times the factor that du holds."""
    turns = 1
    if FORM == 2:
        if tl.load(p_overflow_bwd) == 0:
            return
        # seldom wanted: a program a job would cost every call the start of thousands
        turns = tl.cdiv(jobs - tl.program_id(0), tl.num_programs(0))
    tiles = NE // R
    for i_turn in range(turns):
        i_job = tl.program_id(0) + i_turn * tl.num_programs(0)
        i_t = (i_job % tiles) * R
        i_bh = i_job // tiles
        i_b = i_bh // HV
        i_h = i_bh % HV
        factor = gradient_factor(p_max, NM, HALF)
        o_t = i_t + tl.arange(0, R)
        live = o_t < T
        o_value = (tl.cast(i_b, tl.int64) * T + o_t) * HV + i_h
        p_factor = factors(p_E, i_bh * (NR // C) + i_t // C, C) + tl.arange(0, R)
        beta = tl.full([R], 1.0, ACC)
        if ERASE:
            beta = tl.load(p_factor)
        by_v = beta / factor
        if p_abc is not None:
            _, _, by_c = divisors(p_abc, i_bh)
            by_v *= by_c
            by_o = product(p_abc, i_bh)
        F = tl.zeros([R, R], ACC)
        U = tl.zeros([R, R], ACC)
        written = tl.zeros([R], ACC)
        for i_v in tl.range(0, V, BV, num_stages=NS):
            b_do = load_tile(x_do, i_b, i_t, i_h, i_v, T, HV, V, R, BV, TMA)
            b_w = load_tile(x_w, i_b, i_t, i_h, i_v, T, HV, V, R, BV, TMA)
            if FORM == 2:
                b_w = written_as(b_w, p_overflow, ST)
            if HALF:
                do = b_do.to(ACC)
                if p_abc is not None:
                    do *= by_o
                b_do = (do * factor).to(ST)
                store_tile(x_scaled, b_do.to(BT, bitcast=True), i_b, i_t, i_h, i_v, T, HV, V, R, BV, TMA)
            F = tl.dot(b_do, tl.trans(b_w), F, input_precision="ieee", out_dtype=ACC)
            if ERASE or HALF:
                b_du = load_tile(x_du, i_b, i_t, i_h, i_v, T, HV, V, R, BV, TMA).to(ST, bitcast=True)
                du = b_du.to(ACC)
                store_tile(x_dv, (du * by_v[:, None]).to(OT), i_b, i_t, i_h, i_v, T, HV, V, R, BV, TMA)
            if ERASE:
                U = tl.dot(b_du, tl.trans(b_w), U, input_precision="ieee", out_dtype=ACC)
                b_v = load_tile(x_v, i_b, i_t, i_h, i_v, T, HV, V, R, BV, TMA)
                written += tl.sum(du * b_v.to(ACC), 1)

        t = tl.arange(0, R)[:, None]
        s = tl.arange(0, R)[None, :]
        seen = (t // C == s // C) & (t >= s)
        before = seen & (t > s)
        gate, G = prefixes(p_g, o_value, live, R, C, GATE)
        o_row = tl.cast(i_bh, tl.int64) * NR + o_t
        # 64-bit bases, 32-bit offsets: what is [R R] is dear in registers
        o_pair = t * C + s % C
        first = tl.cast(i_bh, tl.int64) * NR + i_t
        known = before & (i_t + t < NR)
        o_wide = t * R + s
        first_wide = tl.cast(i_bh, tl.int64) * NE + i_t
        if LAM and READ:
            D = tl.where(before, -beta[:, None] * (U * decay_between(G - gate, G, before, ACC)), 0.0)
            tl.store(p_D + first_wide * R + o_wide, D.to(ST).to(BT, bitcast=True))
        decay = decay_between(G, G, seen, ACC)
        M = tl.where(seen, F * decay * scale, 0.0)
        # beside a row of A lies one of Q
        BOTH: tl.constexpr = LAM and not READ
        if ERASE:
            p_known = p_A + first * (2 * C if BOTH else C)
        if BOTH:
            o_A = o_pair + t * C
            own = tl.load(p_factor + 7 * C)
            b_Q = tl.load(p_known + o_A + C, mask=known, other=0.0).to(ACC)
            held = F * (b_Q * (own * scale)[:, None])
        else:
            o_A = o_pair
            held = F * tl.load(p_P + first * C + o_pair, mask=known, other=0.0).to(ACC)
        if ERASE:
            D = tl.where(before, -beta[:, None] * (U * decay), 0.0)
            tl.store(p_N + first_wide * R + o_wide, (D + tl.trans(D)).to(ST).to(BT, bitcast=True))
            wiped = U * tl.load(p_known + o_A, mask=known, other=0.0).to(ACC)
            tl.store(p_written + o_row, written - tl.sum(wiped, 1), mask=o_t < NR)
            if GATE:
                held -= beta[:, None] * wiped
            if BOTH:
                M += tl.load(p_factor + 2 * C)[:, None] * D
                tl.store(p_asked + o_row, -beta * own * tl.sum(U * b_Q, 1), mask=o_t < NR)
        tl.store(p_M + first_wide * R + o_wide, M.to(ST).to(BT, bitcast=True))
        if GATE:
            # the gate of t lies between s and r for r >= t > s; a sum without cancellation: in half the tensor cores' float32 is
            # far more than the operands hold
            precision: tl.constexpr = "tf32" if HALF else "ieee"
            later = tl.dot((s >= t).to(ACC), held, input_precision=precision, out_dtype=ACC)
            tl.store(p_held + o_row, tl.sum(tl.where((t // C == s // C) & (s < t), later, 0.0), 1), mask=o_t < NR)


@triton.jit
def parts_at(
    x, i_b, i_t, i_h, i_d, T, B, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr,
    TMA: tl.constexpr, ACC: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """[C BD] of the sum of PARTS tensors [B T H D]."""
    total = load_tile(x, i_b, i_t, i_h, i_d, T, H, D, C, BD, TMA).to(ST, bitcast=True).to(ACC)
    for i in tl.static_range(1, PARTS):
        total += load_tile(x, i * B + i_b, i_t, i_h, i_d, T, H, D, C, BD, TMA).to(ST, bitcast=True).to(ACC)
    return total


@triton.jit(do_not_specialize=["T", "NR", "N", "NE", "B", "jobs"])
def combine(
    x_r, x_q, x_k, p_E, x_dr_part, x_dx_part, x_dk_part, x_M, x_N, x_D, p_written, p_asked, x_dr, x_dq, x_dk,
    p_from, p_to, p_dlam, p_dbeta, p_cum, p_overflow_bwd, p_max, p_abc, T, NR, N, NE, B, jobs,
    H: tl.constexpr, HR: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
    NS: tl.constexpr, NM: tl.constexpr, TMA: tl.constexpr, HALF: tl.constexpr, ACC: tl.constexpr, DT: tl.constexpr,
    ST: tl.constexpr, GATE: tl.constexpr, ERASE: tl.constexpr, LAM: tl.constexpr, READ: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """R tokens of one value head, BK keys at a time. p_from, p_to: what each token reads and leaves of ⟨S, dS⟩."""
    turns = 1
    if FORM == 2:
        if tl.load(p_overflow_bwd) == 0:
            return
        # seldom wanted: a program a job would cost every call the start of thousands
        turns = tl.cdiv(jobs - tl.program_id(0), tl.num_programs(0))
    tiles = NE // R
    for i_turn in range(turns):
        i_job = tl.program_id(0) + i_turn * tl.num_programs(0)
        i_t = (i_job % tiles) * R
        i_bh = i_job // tiles
        i_b = i_bh // HV
        i_h = i_bh % HV
        i_k = i_h // (HV // H)
        rest = 1.0 / gradient_factor(p_max, NM, HALF)
        by_r, by_k = rest, rest
        if p_abc is not None:
            by_a, by_b, _ = divisors(p_abc, i_bh)
            by_r *= by_a
            by_k *= by_b
        o_t = i_t + tl.arange(0, R)
        live = o_t < T
        o_value = (tl.cast(i_b, tl.int64) * T + o_t) * HV + i_h
        o_row = tl.cast(i_bh, tl.int64) * NR + o_t
        p_factor = factors(p_E, i_bh * (NR // R) + i_t // R, R) + tl.arange(0, R)
        read = tl.zeros([R], ACC)
        left = tl.zeros([R], ACC)
        wiped = tl.zeros([R], ACC)
        asked = tl.zeros([R], ACC)
        within = tl.zeros([R], ACC)
        odd = tl.zeros([R], ACC)
        for i_d in tl.range(0, K, BK, num_stages=NS):
            b_k = load_tile(x_k, i_b, i_t, i_k, i_d, T, H, K, R, BK, TMA).to(ST)
            b_r = load_tile(x_r, i_b, i_t, i_h // (HV // HR), i_d, T, HR, K, R, BK, TMA).to(ST)
            b_M = load_tile(x_M, i_bh, i_t, 0, 0, NE, 1, R, R, R, TMA).to(ST, bitcast=True)
            dr = parts_at(x_dr_part, i_b, i_t, i_h, i_d, T, B, HV, K, R, BK, PARTS, TMA, ACC, ST)
            dk = parts_at(x_dk_part, i_b, i_t, i_h, i_d, T, B, HV, K, R, BK, PARTS, TMA, ACC, ST)
            if GATE:
                read += tl.sum(b_r.to(ACC) * dr, 1)
                left += tl.sum(b_k.to(ACC) * dk, 1)
            if ERASE:
                own = tl.load(p_factor + 7 * R)
                beta = tl.load(p_factor)
                if LAM:
                    lam = tl.load(p_factor + 2 * R)
                dx = parts_at(x_dx_part, i_b, i_t, i_h, i_d, T, B, HV, K, R, BK, PARTS, TMA, ACC, ST) * own[:, None]
                wiped += tl.sum(b_k.to(ACC) * dx, 1)
                if LAM:
                    b_q = b_r
                if LAM and READ:
                    b_q = load_tile(x_q, i_b, i_t, i_k, i_d, T, H, K, R, BK, TMA).to(ST)
                if LAM:
                    asked += tl.sum(b_q.to(ACC) * dx, 1)
                dx *= beta[:, None]
                dk += dx
                if LAM and READ:
                    b_D = load_tile(x_D, i_bh, i_t, 0, 0, NE, 1, R, R, R, TMA).to(ST, bitcast=True)
                    in_chunk = tl.dot(b_D, b_k, input_precision="ieee", out_dtype=ACC) * own[:, None]
                    within += tl.sum(b_q.to(ACC) * in_chunk, 1)
                    b_by_lam = (b_q.to(ACC) * (lam * own)[:, None]).to(ST)
                    dk = tl.dot(tl.trans(b_D), b_by_lam, dk, input_precision="ieee", out_dtype=ACC)
                    dq = (dx + in_chunk) * (lam * rest)[:, None]
                    store_tile(x_dq, dq.to(DT), i_b, i_t, i_h, i_d, T, HV, K, R, BK, TMA)
                elif LAM:
                    dr += dx * lam[:, None]
                b_N = load_tile(x_N, i_bh, i_t, 0, 0, NE, 1, R, R, R, TMA).to(ST, bitcast=True)
                dk = tl.dot(b_N, b_k, dk, input_precision="ieee", out_dtype=ACC)
            dr = tl.dot(b_M, b_k, dr, input_precision="ieee", out_dtype=ACC)
            dk = tl.dot(tl.trans(b_M), b_r, dk, input_precision="ieee", out_dtype=ACC)
            if FORM == 1:
                odd += tl.sum((dr - dr) + (dk - dk), 1)
            store_tile(x_dr, (dr * by_r).to(DT), i_b, i_t, i_h, i_d, T, HV, K, R, BK, TMA)
            store_tile(x_dk, (dk * by_k).to(DT), i_b, i_t, i_h, i_d, T, HV, K, R, BK, TMA)
        if FORM == 1:
            # of a chunk that no sequence has nothing was written
            walked = i_b * (NR // R) + i_t // R < tl.load(p_cum + N)
            flag_overflow(p_overflow_bwd, tl.where(walked, odd, 0.0))
        if ERASE:
            beta = tl.load(p_factor)
            if LAM:
                wiped += tl.load(p_factor + 2 * R) * asked
            written = tl.load(p_written + o_row, mask=o_t < NR, other=0.0)
            tl.store(p_dbeta + o_value, (written + wiped) * rest, mask=live)
            if LAM:
                if not READ:
                    within = tl.load(p_asked + o_row, mask=o_t < NR, other=0.0)
                tl.store(p_dlam + o_value, (within + beta * asked) * rest, mask=live)
        if GATE:
            if ERASE:
                read += beta * wiped
            tl.store(p_from + o_row, read, mask=o_t < NR)
            tl.store(p_to + o_row, left, mask=o_t < NR)


@triton.jit
def _measured(p_X, SLICES: tl.constexpr):
    """X of all slices of a state."""
    X = tl.load(p_X)
    for i in tl.static_range(1, SLICES):
        X += tl.load(p_X + i)
    return X


@triton.jit
def _alike(p_a, p_b, SIZE: tl.constexpr, ACC: tl.constexpr):
    """⟨a, b⟩ of two states."""
    o = tl.arange(0, STATE)
    total = tl.zeros([STATE], ACC)
    for i in tl.range(0, SIZE, STATE, num_stages=4):
        inside = i + o < SIZE
        total += tl.load(p_a + i + o, mask=inside, other=0.0).to(ACC) * tl.load(p_b + i + o, mask=inside, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _before(
    p_X, p_to, p_initial_state, p_dinitial_state, o_state, rest, is_first, SIZE: tl.constexpr, SLICES: tl.constexpr,
    INIT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """⟨S, dS⟩ at a chunk's start, by the anchor before it; of a sequence's first chunk by its states."""
    found = tl.zeros([], ACC)
    if not is_first:
        found = _measured(p_X, SLICES) + tl.sum(tl.load(p_to), 0)
    elif INIT:
        found = _alike(p_initial_state + o_state, p_dinitial_state + o_state, SIZE, ACC) / rest
    return found


@triton.jit(do_not_specialize=["T", "NR", "N", "anchors"])
def gate(
    p_held, p_from, p_to, p_X, p_G, p_dg, p_initial_state, p_dinitial_state, p_cum, p_overflow_bwd, p_max, T, NR, N, anchors,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, SLICES: tl.constexpr, EVERY: tl.constexpr, NM: tl.constexpr,
    HALF: tl.constexpr, ACC: tl.constexpr, INIT: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """dg of the chunks from one anchor back to the next, of one sequence and value head. X = e^{G_C} ⟨S, dS⟩ of a chunk, S at
    its start and dS at its end, is what every one of its gates decays; ⟨S, dS⟩ at a chunk's start is X and what its tokens
    read, at its end X and what its keys left. With EVERY = 2 one chunk lies between two anchors, as near to the one as
    to the other: its X is the mean of what each gives, with half of each one's error. Where a sequence starts ⟨S, dS⟩ is that of its
    states."""
    if FORM == 2:
        if tl.load(p_overflow_bwd) == 0:
            return
    i_n = tl.program_id(0) // (anchors * HV)
    i_h = (tl.program_id(0) // anchors) % HV
    i_anchor = tl.program_id(0) % anchors
    start = tl.load(p_cum + i_n)
    count = tl.load(p_cum + i_n + 1) - start
    chunks = NR // C
    i_b = start // chunks
    i_bh = tl.cast(i_b, tl.int64) * HV + i_h
    rest = 1.0 / gradient_factor(p_max, NM, HALF)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    first = i_anchor * EVERY
    if first < count:
        place = (tl.cast(start // EVERY + i_n + i_anchor, tl.int64)) * HV + i_h
        X = _measured(p_X + place * SLICES, SLICES)
        # what a chunk needs is fetched chunks ahead: only X goes from one to the next
        for i in tl.range(first, tl.minimum(first + EVERY, count), num_stages=4):
            o_t = (start - i_b * chunks + count - 1 - i) * C + tl.arange(0, C)
            o_row = i_bh * NR + o_t
            read = tl.load(p_from + o_row)
            left = tl.load(p_to + o_row)
            if i > first:
                X -= tl.sum(left, 0)
                if EVERY == 2:
                    o_state = (tl.cast(i_n, tl.int64) * HV + i_h) * (K * V)
                    before = _before(
                        p_X + (place + HV) * SLICES, p_to + o_row - C, p_initial_state, p_dinitial_state, o_state, rest, i + 1 == count,
                        K * V, SLICES, INIT, ACC,
                    )  # fmt: skip
                    X = 0.5 * (X + before - tl.sum(read, 0))
                if not INIT and i + 1 == count:
                    X = 0.0  # S is 0
                if HALF:
                    # what was carried is rounding where nothing passes the chunk
                    X = tl.where(tl.load(p_G + i_bh * NR + tl.max(o_t, 0)) < NOTHING, 0.0, X)
            # the gate of t also decays what r reads, r >= t, and what s leaves, s < t
            through = tl.sum(tl.where(s < t, left[None, :], read[None, :]), 1)
            o_value = (tl.cast(i_b, tl.int64) * T + o_t) * HV + i_h
            tl.store(p_dg + o_value, (tl.load(p_held + o_row) + through + X) * rest, mask=o_t < T)
            X += tl.sum(read, 0)
