"""The channel gate's backward inside a chunk: gradients of q, k, e, v, the gates and β, once nothing waits for another chunk.

    dP = tril(do Wᵀ)    dA = −tril₋₁(dr Wᵀ)    o = q̂ S₀ + P W,  r = W + A W,  A of β e

At a dyadic level the rows (second half of a block) and the keys (first half) hold one factor F = e^D each, D the sum of their own
gates up to the end of the first half: a 0/1 matrix times g, never above 0 (`decay.py`). dg is the transposed matrices times the
elementwise products, so every term of it holds its e^D and nothing cancels. What enters and leaves the chunk comes as dq̂, dê, dk̂
from `triton_channel_adjoint.py`, and x = e^{GC} ⊙ Σ_v S₀ ⊙ dS from its last anchor: Φ = Σ_v S ⊙ dS telescopes from chunk to chunk.
"""

import triton
import triton.language as tl


@triton.jit
def _sums(which, x, acc, TF32: tl.constexpr, ACC: tl.constexpr):
    """A 0/1 matrix times x. In half mode x is a product of operands already rounded: TF32 keeps their 11 bits and the range."""
    if TF32:
        return tl.dot(tl.where(which, 1.0, 0.0), x, acc, input_precision="tf32")
    return tl.dot(which.to(ACC), x, acc, input_precision="ieee", out_dtype=ACC)


@triton.jit
def _factor(which, x, ACC: tl.constexpr):
    """2^D of the gates that `which` names; x as the forward rounds it."""
    return tl.exp2(tl.dot(which.to(x.dtype), x, input_precision="ieee", out_dtype=ACC))


@triton.jit(do_not_specialize=["T", "scale"])
def pairs(
    p_spans, p_do, p_dr, p_W, p_q, p_k, p_v, p_g, p_beta, p_erase, p_write, p_dq_hat, p_de_hat, p_dk_hat, p_x, p_unit,
    p_dq, p_dk, p_dv, p_dg, p_dbeta, p_derase, p_dwrite,
    scale, T, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr,
    LEVELS: tl.constexpr, R: tl.constexpr, BETA: tl.constexpr, GATES: tl.constexpr, PREVIOUS: tl.constexpr, ANCHOR: tl.constexpr,
    HALF: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """All of an anchor's chunks, last first, for one value head; KB channels and VB values at a time."""
    j, h, n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end = tl.load(p_spans + 2 * n), tl.load(p_spans + 2 * n + 1)
    NC = tl.cdiv(T, C)
    b = first // tl.maximum(NC, 1)
    ERASE: tl.constexpr = BETA or GATES
    OT: tl.constexpr = p_dr.dtype.element_ty
    i = tl.arange(0, C)
    r, c = i[:, None], i[None, :]
    unit = tl.load(p_unit).to(ACC)
    p_x += (tl.cast(first // ANCHOR + n + j, tl.int64) * H + h) * K
    top = end - 1 - j * ANCHOR
    for back in tl.range(0, tl.minimum(ANCHOR, top - first + 1), num_stages=1):
        i_t = (top - back - b * NC) * C + i
        live = i_t < T
        o_row = (tl.cast(b, tl.int64) * T + i_t) * H + h
        o_key = (tl.cast(b, tl.int64) * T + i_t) * (H // G) + h // G
        beta = tl.zeros([C], ACC) + 1
        dbeta = tl.zeros([C], ACC)
        if BETA:
            beta = tl.load(p_beta + o_row, mask=live, other=0.0).to(ACC)
        dP, dPT, dA, dAT = tl.zeros([C, C], ACC), tl.zeros([C, C], ACC), tl.zeros([C, C], ACC), tl.zeros([C, C], ACC)
        for v0 in tl.range(0, V, VB, num_stages=1):
            i_v = v0 + tl.arange(0, VB)
            o_v = o_row[:, None] * V + i_v[None, :]
            m_v = live[:, None] & (i_v < V)[None, :]
            b_do = tl.load(p_do + o_v, mask=m_v, other=0.0)
            b_W = tl.load(p_W + o_v, mask=m_v, other=0.0).to(OT)
            b_dr = tl.load(p_dr + o_v, mask=m_v, other=0.0)
            # both orders: a transposed accumulator must not become a first operand
            dP = tl.dot(b_do, tl.trans(b_W), dP, input_precision="ieee", out_dtype=ACC)
            dPT = tl.dot(b_W, tl.trans(b_do), dPT, input_precision="ieee", out_dtype=ACC)
            dr = b_dr.to(ACC) * unit
            if ERASE:
                dA = tl.dot(b_dr, tl.trans(b_W), dA, input_precision="ieee", out_dtype=ACC)
                dAT = tl.dot(b_W, tl.trans(b_dr), dAT, input_precision="ieee", out_dtype=ACC)
                b_v = tl.load(p_v + o_v, mask=m_v, other=0.0).to(ACC)
                if BETA:
                    dbeta += tl.sum(b_v * dr, 1)
                    dr *= beta[:, None]
                if GATES:
                    tl.store(p_dwrite + o_v, b_v * dr, mask=m_v)
                    dr *= tl.load(p_write + o_v, mask=m_v, other=0.0).to(ACC)
            tl.store(p_dv + o_v, dr, mask=m_v)
        for k0 in tl.range(0, K, KB, num_stages=1):
            i_k = k0 + tl.arange(0, KB)
            m_k = live[:, None] & (i_k < K)[None, :]
            o_k = o_row[:, None] * K + i_k[None, :]
            o_qk = o_key[:, None] * K + i_k[None, :]
            q = (tl.load(p_q + o_qk, mask=m_k, other=0.0).to(ACC) * scale).to(OT)
            k = tl.load(p_k + o_qk, mask=m_k, other=0.0).to(OT)
            x = (tl.load(p_g + o_k, mask=m_k, other=0.0).to(ACC) * 1.4426950408889634).to(OT)
            e = k
            if BETA:
                e = (k * beta[:, None]).to(OT)
            if GATES:
                e = (k * tl.load(p_erase + o_k, mask=m_k, other=0.0).to(ACC)).to(OT)

            # the whole chunk: from its start, and to its end
            F = _factor(c <= r, x, ACC)
            dq = F * tl.load(p_dq_hat + o_k, mask=m_k, other=0.0).to(ACC)
            y = q * dq
            entered = tl.sum(y, 0)
            de = tl.zeros([C, KB], ACC)
            dg = tl.zeros([C, KB], ACC)
            if ERASE:
                if PREVIOUS:
                    F = _factor(c // R < r // R, x, ACC)
                de = F * tl.load(p_de_hat + o_k, mask=m_k, other=0.0).to(ACC)
                entered += tl.sum(e * de, 0)
                if PREVIOUS:
                    dg = _sums(r // R < c // R, e * de, dg, HALF, ACC)
                else:
                    y += e * de
            dg = _sums(r <= c, y, dg, HALF, ACC)
            dk = _factor(c > r, x, ACC) * tl.load(p_dk_hat + o_k, mask=m_k, other=0.0).to(ACC)
            y = k * dk
            dg = _sums(c < r, y, dg, HALF, ACC)
            m_x = i_k < K
            phi = tl.load(p_x + i_k, mask=m_x, other=0.0)
            if back > 0:
                phi -= tl.sum(y, 0)
            dg += phi[None, :]
            if ANCHOR > 1:
                tl.store(p_x + i_k, phi + entered, mask=m_x)
                tl.debug_barrier()

            # a token and itself: no gate between
            same = tl.sum(tl.where(r == c, dP, 0.0), 1)[:, None]
            dq += same * k
            dk += same * q
            for level in tl.range(0, LEVELS, num_stages=1):
                half, half_ = r >> level, c >> level
                second, second_ = (half & 1) == 1, (half_ & 1) == 1
                own, own_ = (half == half_) & (second == (c <= r)), (half == half_) & (second_ == (r <= c))
                pair, pair_ = second & (half == half_ + 1), second_ & (half_ == half + 1)
                F = _factor(own, x, ACC)
                k_, q_ = k * F.to(OT), q * F.to(OT)
                dq_ = tl.dot(tl.where(pair, dP, 0.0).to(OT), k_, input_precision="ieee", out_dtype=ACC)
                dk_ = tl.dot(tl.where(pair_, dPT, 0.0).to(OT), q_, input_precision="ieee", out_dtype=ACC)
                dq += F * dq_
                y = q_ * dq_
                if ERASE:
                    Fe = F
                    if PREVIOUS:
                        Fe = _factor((half == half_) & second & (c // R < r // R), x, ACC)
                    e_ = e * Fe.to(OT)
                    de_ = tl.dot(tl.where(pair & (c // R < r // R), -dA, 0.0).to(OT), k_, input_precision="ieee", out_dtype=ACC)
                    m_ = tl.where(pair_ & (r // R < c // R), -dAT, 0.0).to(OT)
                    dk_ = tl.dot(m_, e_, dk_, input_precision="ieee", out_dtype=ACC)
                    de += Fe * de_
                    if PREVIOUS:
                        dg = _sums((half == half_) & second_ & (r // R < c // R), e_ * de_, dg, HALF, ACC)
                    else:
                        y += e_ * de_
                dk += F * dk_
                dg = _sums(own_, y + k_ * dk_, dg, HALF, ACC)

            if BETA:
                dbeta += tl.sum(k * de, 1) * unit
                dk += beta[:, None] * de
            if GATES:
                tl.store(p_derase + o_k, k * de * unit, mask=m_k)
                dk += tl.load(p_erase + o_k, mask=m_k, other=0.0).to(ACC) * de
            tl.store(p_dq + o_k, dq * (scale * unit), mask=m_k)
            tl.store(p_dk + o_k, dk * unit, mask=m_k)
            tl.store(p_dg + o_k, dg * unit, mask=m_k)
        if BETA:
            tl.store(p_dbeta + o_row, dbeta, mask=live)
