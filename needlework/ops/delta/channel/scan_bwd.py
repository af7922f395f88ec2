"""The channel gate's backward in order of time: walks over the chunks, on operands that are already gated.

    dW = Pᵀ do + k̂ dS    dr = T'ᵀ dW      dS ← e^{GC} ⊙ dS + q̂ᵀ do − êᵀ (β ⊙ dr)            `adjoint`, last chunk first
    dq̂ = do S₀ᵀ          dê = −dr S₀ᵀ      S₀ ← e^{GC} ⊙ S₀ + k̂ᵀ W                            `replay_forward`
    dk̂ = W dSᵀ           x = e^{GC} ⊙ Σ_v S₀ ⊙ dS                                             `replay_reverse`

or, if dS at the end of every chunk is kept, as over spans of few chunks, the last two in one, `replay`.

Only the first couples rows of the state, through the solve: it owns columns of S. The replays own rows of S and sum over V
themselves, so S and dS of every chunk need not be stored; where V is more than one tile holds, they sum over one each, and leave NS sums. States lie so that a register tile is always the first operand as it is.
q̂ holds the scale; r is what the solve starts from, β v − β ê S₀, so dê here is the gradient of β ê. β is 1 where there is none.
Every ANCHOR-th chunk of a sequence, counted from its last, is an anchor: S₀ is stored there and x measured. x lies by place among
all chunks; so do the anchors, unless `most` says how many a sequence has at most: a walk over short spans of long rows needs few.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.parts import cast, load_parts, load_transposed, plus_products, scores, store_transposed
from needlework.ops.common.kernels.tile import load_tile, store_tile
from needlework.ops.delta.channel.scan import decayed, load_square


@triton.jit
def load_beta(p_beta, b, h, t, T, H, C: tl.constexpr):
    """[C] of [B T H], zeros past T."""
    i_t = t + tl.arange(0, C)
    return tl.load(p_beta + (tl.cast(b, tl.int64) * T + i_t) * H + h, mask=i_t < T, other=0.0)


@triton.jit
def descend(
    dS, b_doT, q_hat, e_hat, k_hat, P, inverse, p_whole, p_beta, dr, c, b, h, i_v,
    T, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr,
    ERASE: tl.constexpr, BETA: tl.constexpr, TMA: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dS, NK tiles [BV KP], at the start of chunk c from that at its end; dr of its tokens."""
    t, NC = c * C, tl.cdiv(T, C)
    b_k = load_parts(k_hat, b, t, h, T, H, K, C, KP, NK, TMA)
    OT: tl.constexpr = b_k[0].dtype
    dW = scores(cast(dS, OT, NK), b_k, NK, ACC)
    dW = tl.dot(b_doT, load_square(P, b, h, c, NC, H, C, TMA), dW, input_precision="ieee", out_dtype=ACC)
    dS = decayed(dS, p_whole + ((tl.cast(b, tl.int64) * H + h) * NC + c) * K, K, KP, NK)
    dS = plus_products(dS, b_doT, load_parts(q_hat, b, t, h, T, H, K, C, KP, NK, TMA), NK)
    if ERASE:
        dW = tl.dot(dW.to(OT), load_square(inverse, b, h, c, NC, H, C, TMA), input_precision="ieee", out_dtype=ACC)
        b_e = load_parts(e_hat, b, t, h, T, H, K, C, KP, NK, TMA)
        du = -dW
        if BETA:
            du *= load_beta(p_beta, b, h, t, T, H, C)[None, :].to(ACC)
        dS = plus_products(dS, du.to(OT), b_e, NK)
    store_tile(dr, tl.trans(dW.to(OT)), b, t, h, i_v, T, H, V, C, BV, TMA)
    return dS


@triton.jit(do_not_specialize=["T"])
def adjoint(
    p_spans, do, q_hat, e_hat, k_hat, P, inverse, p_whole, p_beta, p_dfinal, dr, p_dinitial_state,
    T, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr,
    ERASE: tl.constexpr, BETA: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dr of every token, and the gradient of the initial state; a program owns BV columns of dS,
    transposed in registers."""
    i_v, h, n = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    first, end = tl.load(p_spans + 2 * n), tl.load(p_spans + 2 * n + 1)
    NC = tl.cdiv(T, C)
    # an empty sequence after the last row: its row is never read
    b = first // tl.maximum(NC, 1)
    state = (tl.cast(n, tl.int64) * H + h) * K * V
    dS = load_transposed(p_dfinal + state, True, i_v, K, V, KP, NK, BV, ACC)
    for i in tl.range(0, end - first, num_stages=STAGES):
        c = end - 1 - i - b * NC
        b_doT = tl.trans(load_tile(do, b, c * C, h, i_v, T, H, V, C, BV, TMA))
        dS = descend(
            dS, b_doT, q_hat, e_hat, k_hat, P, inverse, p_whole, p_beta, dr, c, b, h, i_v,
            T, H, K, V, C, KP, NK, BV, ERASE, BETA, TMA, ACC,
        )  # fmt: skip
    store_transposed(p_dinitial_state + state, dS, True, i_v, K, V, KP, NK, BV)


@triton.jit
def load_state(
    x, n, h, o_k, o_v, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, VP: tl.constexpr, TMA: tl.constexpr
):
    """[BK VP] of x [N H K V], rows from o_k, columns from o_v; zeros outside."""
    if TMA:
        y = tl.reshape(x.load([n, h, o_k, o_v]), [BK, VP])
    else:
        i_k, i_v = o_k + tl.arange(0, BK), o_v + tl.arange(0, VP)
        o = ((tl.cast(n, tl.int64) * H + h) * K + i_k[:, None]) * V + i_v[None, :]
        y = tl.load(x + o, mask=(i_k < K)[:, None] & (i_v < V)[None, :], other=0.0)
    return y


@triton.jit
def store_state(
    x, y, n, h, o_k, o_v,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, VP: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Store y [BK VP] where `load_state` would read it."""
    if TMA:
        x.store([n, h, o_k, o_v], tl.reshape(y.to(x.dtype), [1, 1, BK, VP]))
    else:
        i_k, i_v = o_k + tl.arange(0, BK), o_v + tl.arange(0, VP)
        o = ((tl.cast(n, tl.int64) * H + h) * K + i_k[:, None]) * V + i_v[None, :]
        tl.store(x + o, y, mask=(i_k < K)[:, None] & (i_v < V)[None, :])


@triton.jit
def _slot(first, n, most, ANCHOR: tl.constexpr):
    """Where the anchors of a sequence start."""
    return tl.where(most > 0, n * most, first // ANCHOR + n)


@triton.jit(do_not_specialize=["T", "most"])
def replay_forward(
    p_spans, W, do, dr, k_hat, p_whole, p_initial_state, p_slots, dq_hat, de_hat, anchors,
    T, most, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, VP: tl.constexpr, NS: tl.constexpr,
    ERASE: tl.constexpr, ANCHOR: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dq̂ and dê of every token, [B T H·NS K], and S₀ of the anchors; a program owns BK rows and VP columns of S. It starts from state
    p_slots[n], or n."""
    i_s, o_k, h, n = tl.program_id(0) % NS, tl.program_id(0) // NS * BK, tl.program_id(1), tl.program_id(2)
    o_v = i_s * VP
    first, end = tl.load(p_spans + 2 * n), tl.load(p_spans + 2 * n + 1)
    b = first // tl.maximum(tl.cdiv(T, C), 1)
    c = first - b * tl.cdiv(T, C)
    start = n
    if p_slots is not None:
        start = tl.load(p_slots + n)
    S = load_state(p_initial_state, start, h, o_k, o_v, H, K, V, BK, VP, 0).to(ACC)
    slot = _slot(first, n, most, ANCHOR)
    if ANCHOR == 1:
        for i in tl.range(0, end - first, num_stages=STAGES):
            store_state(anchors, S, slot + end - first - 1 - i, h, o_k, o_v, H, K, V, BK, VP, TMA)
            S = _forward(W, do, dr, k_hat, p_whole, dq_hat, de_hat, S, c + i, b, h, o_k, i_s, T, H, K, V, C, BK, VP, NS, ERASE, TMA, ACC)  # fmt: skip
    else:
        groups = tl.cdiv(end - first, ANCHOR)
        for group in tl.range(0, groups, num_stages=1):
            # from an anchor to the next, the chunks before the first anchor apart
            left = (groups - 1 - group) * ANCHOR
            begin, stop = tl.maximum(end - left - ANCHOR, first), end - left - 1
            for i in tl.range(begin - first, stop - first, num_stages=STAGES):
                S = _forward(
                    W, do, dr, k_hat, p_whole, dq_hat, de_hat, S, c + i, b, h, o_k, i_s, T, H, K, V, C, BK, VP, NS, ERASE, TMA, ACC,
                )  # fmt: skip
            store_state(anchors, S, slot + groups - 1 - group, h, o_k, o_v, H, K, V, BK, VP, TMA)
            i = stop - first
            S = _forward(W, do, dr, k_hat, p_whole, dq_hat, de_hat, S, c + i, b, h, o_k, i_s, T, H, K, V, C, BK, VP, NS, ERASE, TMA, ACC)  # fmt: skip


@triton.jit
def _forward(
    W, do, dr, k_hat, p_whole, dq_hat, de_hat, S, c, b, h, o_k, i_s,
    T, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, VP: tl.constexpr, NS: tl.constexpr,
    ERASE: tl.constexpr, TMA: tl.constexpr, ACC: tl.constexpr, dS=None, dk_hat=None,
):  # fmt: skip
    """One chunk: what its tokens read of S, what its keys left in dS if that [BK VP] is given, then S at its end."""
    t = c * C
    b_W = load_tile(W, b, t, h, i_s * VP, T, H, V, C, VP, TMA)
    b_do = load_tile(do, b, t, h, i_s * VP, T, H, V, C, VP, TMA)
    b_kT = tl.trans(load_tile(k_hat, b, t, h, o_k, T, H, K, C, BK, TMA))
    OT: tl.constexpr = b_kT.dtype
    S_ = S.to(OT)
    dq = tl.dot(S_, tl.trans(b_do), input_precision="ieee", out_dtype=ACC)
    store_tile(dq_hat, tl.trans(dq.to(OT)), b, t, h * NS + i_s, o_k, T, H * NS, K, C, BK, TMA)
    if ERASE:
        b_dr = load_tile(dr, b, t, h, i_s * VP, T, H, V, C, VP, TMA)
        de = -tl.dot(S_, tl.trans(b_dr), input_precision="ieee", out_dtype=ACC)
        store_tile(de_hat, tl.trans(de.to(OT)), b, t, h * NS + i_s, o_k, T, H * NS, K, C, BK, TMA)
    if dS is not None:
        dk = tl.dot(dS, tl.trans(b_W), input_precision="ieee", out_dtype=ACC)
        store_tile(dk_hat, tl.trans(dk.to(OT)), b, t, h * NS + i_s, o_k, T, H * NS, K, C, BK, TMA)
    S *= _whole(p_whole, c, b, h, o_k, T, H, K, C, BK)[:, None].to(ACC)
    return tl.dot(b_kT, b_W, S, input_precision="ieee", out_dtype=ACC)


@triton.jit
def _whole(p_whole, c, b, h, o_k, T, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """e^{GC} of BK channels, [BK]."""
    i_k = o_k + tl.arange(0, BK)
    return tl.load(p_whole + ((tl.cast(b, tl.int64) * H + h) * tl.cdiv(T, C) + c) * K + i_k, mask=i_k < K, other=0.0)


@triton.jit(do_not_specialize=["T", "most"])
def replay_reverse(
    p_spans, W, do, dr, q_hat, e_hat, p_whole, p_beta, p_dfinal, anchors, dk_hat, p_x,
    T, most, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, VP: tl.constexpr, NS: tl.constexpr,
    ERASE: tl.constexpr, BETA: tl.constexpr, ANCHOR: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dk̂ of every token, [B T H·NS K], and x of the anchors, [· H NS K]; a program owns BK rows and VP columns of dS."""
    i_s, o_k, h, n = tl.program_id(0) % NS, tl.program_id(0) // NS * BK, tl.program_id(1), tl.program_id(2)
    o_v = i_s * VP
    first, end = tl.load(p_spans + 2 * n), tl.load(p_spans + 2 * n + 1)
    b = first // tl.maximum(tl.cdiv(T, C), 1)
    last = end - 1 - b * tl.cdiv(T, C)
    dS = load_state(p_dfinal, n, h, o_k, o_v, H, K, V, BK, VP, 0).to(ACC)
    slot, place = _slot(first, n, most, ANCHOR), first // ANCHOR + n
    if ANCHOR == 1:
        for i in tl.range(0, end - first, num_stages=STAGES):
            S = load_state(anchors, slot + i, h, o_k, o_v, H, K, V, BK, VP, TMA)
            _measure(S, dS, p_whole, p_x, place + i, last - i, b, h, o_k, i_s, T, H, K, C, BK, NS, ACC)
            dS = _reverse(W, do, dr, q_hat, e_hat, p_whole, p_beta, dk_hat, dS, last - i, b, h, o_k, i_s, T, H, K, V, C, BK, VP, NS, ERASE, BETA, TMA, ACC)  # fmt: skip
    else:
        for j in tl.range(0, tl.cdiv(end - first, ANCHOR), num_stages=1):
            top = last - j * ANCHOR
            S = load_state(anchors, slot + j, h, o_k, o_v, H, K, V, BK, VP, TMA)
            _measure(S, dS, p_whole, p_x, place + j, top, b, h, o_k, i_s, T, H, K, C, BK, NS, ACC)
            for i in tl.range(0, tl.minimum(ANCHOR, end - first - j * ANCHOR), num_stages=STAGES):
                dS = _reverse(W, do, dr, q_hat, e_hat, p_whole, p_beta, dk_hat, dS, top - i, b, h, o_k, i_s, T, H, K, V, C, BK, VP, NS, ERASE, BETA, TMA, ACC)  # fmt: skip


@triton.jit
def _measure(
    S, dS, p_whole, p_x, place, c, b, h, o_k, i_s,
    T, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, NS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """x of an anchor, from S [BK VP] at its start and dS at its end."""
    i_k = o_k + tl.arange(0, BK)
    x = tl.sum(S.to(ACC) * dS.to(ACC), 1) * _whole(p_whole, c, b, h, o_k, T, H, K, C, BK).to(ACC)
    tl.store(p_x + ((tl.cast(place, tl.int64) * H + h) * NS + i_s) * K + i_k, x, mask=i_k < K)


@triton.jit
def _reverse(
    W, do, dr, q_hat, e_hat, p_whole, p_beta, dk_hat, dS, c, b, h, o_k, i_s,
    T, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, VP: tl.constexpr, NS: tl.constexpr,
    ERASE: tl.constexpr, BETA: tl.constexpr, TMA: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One chunk: what its keys left in the state, then dS at its start."""
    t = c * C
    b_W = load_tile(W, b, t, h, i_s * VP, T, H, V, C, VP, TMA)
    b_do = load_tile(do, b, t, h, i_s * VP, T, H, V, C, VP, TMA)
    b_qT = tl.trans(load_tile(q_hat, b, t, h, o_k, T, H, K, C, BK, TMA))
    OT: tl.constexpr = b_qT.dtype
    dk = tl.dot(dS.to(OT), tl.trans(b_W), input_precision="ieee", out_dtype=ACC)
    store_tile(dk_hat, tl.trans(dk.to(OT)), b, t, h * NS + i_s, o_k, T, H * NS, K, C, BK, TMA)
    dS *= _whole(p_whole, c, b, h, o_k, T, H, K, C, BK)[:, None].to(ACC)
    dS = tl.dot(b_qT, b_do, dS, input_precision="ieee", out_dtype=ACC)
    if ERASE:
        b_eT = tl.trans(load_tile(e_hat, b, t, h, o_k, T, H, K, C, BK, TMA))
        b_dr = load_tile(dr, b, t, h, i_s * VP, T, H, V, C, VP, TMA)
        if BETA:
            b_eT = (b_eT * load_beta(p_beta, b, h, t, T, H, C)[None, :].to(ACC)).to(OT)
        dS = tl.dot(-b_eT, b_dr, dS, input_precision="ieee", out_dtype=ACC)
    return dS


@triton.jit(do_not_specialize=["T", "most"])
def replay(
    p_spans, W, do, dr, k_hat, p_whole, p_initial_state, p_slots, dq_hat, de_hat, kept, dk_hat, p_x,
    T, most, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, VP: tl.constexpr,
    ERASE: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dq̂, dê and dk̂ of every token and x of every chunk, all of them anchors; a program owns BK rows of S. dS at the end of
    chunk i of sequence n is kept at n·most + i. It starts from state p_slots[n].

    PDL: the launch may begin while the one before it, which makes dr and kept, ends. Once all of this one's programs have waited,
    the next launch begins, and may take the one before this as done.
    """
    o_k, h, n = tl.program_id(0) * BK, tl.program_id(1), tl.program_id(2)
    first, end = tl.load(p_spans + 2 * n), tl.load(p_spans + 2 * n + 1)
    b = first // tl.maximum(tl.cdiv(T, C), 1)
    c = first - b * tl.cdiv(T, C)
    S = load_state(p_initial_state, tl.load(p_slots + n), h, o_k, 0, H, K, V, BK, VP, 0).to(ACC)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for i in tl.range(0, end - first, num_stages=STAGES):
        dS = load_state(kept, n * most + i, h, o_k, 0, H, K, V, BK, VP, TMA)
        # places count from the last chunk
        _measure(S, dS, p_whole, p_x, n + end - 1 - i, c + i, b, h, o_k, 0, T, H, K, C, BK, 1, ACC)
        S = _forward(
            W, do, dr, k_hat, p_whole, dq_hat, de_hat, S, c + i, b, h, o_k, 0, T, H, K, V, C, BK, VP, 1, ERASE, TMA, ACC, dS, dk_hat,
        )  # fmt: skip
