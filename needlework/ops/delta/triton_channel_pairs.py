"""The channel gate's backward inside a chunk: gradients of q, k, e, v, the gates and β, once nothing waits for another chunk.

    dP = tril(do Wᵀ)    dA = −tril₋₁(dr Wᵀ)    o = q̂ S₀ + P W,  r = W + A W,  A of β e

At a dyadic level the rows (second half of a block) and the keys (first half) hold one factor F = e^D each, D the sum of their own
gates up to the end of the first half: a 0/1 matrix times g, never above 0 (`decay.py`). A token is there either a row or a key:
with z = F ⊙ (q of a row, k of a key) and M = dP + dPᵀ of the level's pairs, M z is the gradient of both, and so with e and dA.
dg is the transposed matrices times the elementwise products, so every term of it holds its e^D and nothing cancels. What enters and
leaves the chunk comes as dq̂, dê, dk̂ from `triton_channel_adjoint.py`, and x = e^{GC} ⊙ Σ_v S₀ ⊙ dS from its last anchor:
Φ = Σ_v S ⊙ dS telescopes from chunk to chunk.

Tiles are channels by tokens: what one product leaves in registers is then the next one's first operand as it is.
"""

import triton
import triton.language as tl

from needlework.ops.common.launch import interpreted

# its numpy knows no bfloat16
INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def _sums(y, which, acc, HALF: tl.constexpr, ACC: tl.constexpr):
    """acc + y times a 0/1 matrix. In half mode two bfloat16 of y: 16 bits and the range of float32, straight from registers."""
    if HALF and not INTERPRETED:
        m = tl.where(which, 1.0, 0.0).to(tl.bfloat16)
        hi, lo = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b;
            cvt.rn.bf16x2.f32 $0, $3, $2;
            shl.b32 a, $0, 16; sub.f32 a, $2, a; and.b32 b, $0, 0xffff0000; sub.f32 b, $3, b;
            cvt.rn.bf16x2.f32 $1, b, a; }""",
            "=&r,=r,r,r", [y], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
        acc = tl.dot(hi, m, acc, input_precision="ieee", out_dtype=ACC)
        acc = tl.dot(lo, m, acc, input_precision="ieee", out_dtype=ACC)
    else:
        acc = tl.dot(y, which.to(ACC), acc, input_precision="ieee", out_dtype=ACC)
    return acc


@triton.jit
def _sum_of(x, which, ACC: tl.constexpr):
    """Of the gates that a column of `which` names; x as the forward rounds it."""
    return tl.dot(x, which.to(x.dtype), input_precision="ieee", out_dtype=ACC)


@triton.jit
def _factor(d, HALF: tl.constexpr):
    """2^d."""
    if HALF and not INTERPRETED:
        f = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [d], dtype=tl.float32, is_pure=True, pack=1)
    else:
        f = tl.exp2(d)
    return f


@triton.jit
def _gated(d, row, x, y, HALF: tl.constexpr):
    """F = 2^d, and F times x in rows, y elsewhere."""
    if HALF and not INTERPRETED:
        bits = tl.where(row, -1, 0).to(tl.int16)
        f, z = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b;
            ex2.approx.ftz.f32 $0, $3; ex2.approx.ftz.f32 $1, $4; cvt.rn.f16x2.f32 a, $1, $0;
            lop3.b32 b, $5, $6, $7, 0xe4; mul.rn.f16x2 $2, a, b; }""",
            "=&r,=&r,=r,r,r,r,r,r", [d, x, y, bits + tl.zeros(x.shape, tl.int16)],
            dtype=(tl.float32, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        f = tl.exp2(d)
        z = f.to(x.dtype) * tl.where(row, x, y)
    return f, z


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
        # a token and itself: no gate between
        same = tl.sum(tl.where(r == c, dP, 0.0), 0)[None, :]
        # symmetric: of a row and of a key
        P = (tl.where(c < r, dP, 0.0) + tl.where(r < c, dPT, 0.0)).to(OT)
        A = -(tl.where(c // R < r // R, dA, 0.0) + tl.where(r // R < c // R, dAT, 0.0)).to(OT)
        for k0 in tl.range(0, K, KB, num_stages=1):
            i_k = k0 + tl.arange(0, KB)
            m_k = (i_k < K)[:, None] & live[None, :]
            o_k = i_k[:, None] + o_row[None, :] * K
            o_qk = i_k[:, None] + o_key[None, :] * K
            q = (tl.load(p_q + o_qk, mask=m_k, other=0.0).to(ACC) * scale).to(OT)
            k = tl.load(p_k + o_qk, mask=m_k, other=0.0).to(OT)
            x = (tl.load(p_g + o_k, mask=m_k, other=0.0).to(ACC) * 1.4426950408889634).to(OT)
            e = k
            if BETA:
                e = (k * beta[None, :]).to(OT)
            if GATES:
                e = (k * tl.load(p_erase + o_k, mask=m_k, other=0.0).to(ACC)).to(OT)

            # the whole chunk: from its start, and to its end
            F = _factor(_sum_of(x, r <= c, ACC), HALF)
            dq = F * tl.load(p_dq_hat + o_k, mask=m_k, other=0.0).to(ACC)
            y = q * dq
            de = tl.zeros([KB, C], ACC)
            dg = tl.zeros([KB, C], ACC)
            passed = y
            if ERASE:
                if PREVIOUS:
                    F = _factor(_sum_of(x, r // R < c // R, ACC), HALF)
                de = F * tl.load(p_de_hat + o_k, mask=m_k, other=0.0).to(ACC)
                passed += e * de
                if PREVIOUS:
                    dg = _sums(e * de, c // R < r // R, dg, HALF, ACC)
                else:
                    y = passed
            dg = _sums(y, c <= r, dg, HALF, ACC)
            dk = _factor(_sum_of(x, r > c, ACC), HALF) * tl.load(p_dk_hat + o_k, mask=m_k, other=0.0).to(ACC)
            # x was measured before the keys of the last chunk were added: from there on they count
            y = k * dk
            before = r < c
            if back > 0:
                passed -= y
                y = -y
                before = r >= c
            dg = _sums(y, before, dg, HALF, ACC)
            m_x = i_k < K
            phi = tl.load(p_x + i_k, mask=m_x, other=0.0)
            dg += phi[:, None]
            if ANCHOR > 1:
                tl.store(p_x + i_k, phi + tl.sum(passed, 1), mask=m_x)
                tl.debug_barrier()

            dq += same * k
            dk += same * q
            for level in tl.static_range(0, LEVELS):
                # tokens whose numbers differ first at this bit; row: the one that has it set
                pair = ((r ^ c) >> level) == 1
                row = ((i >> level) & 1) == 1
                row_r, row_c = row[:, None], row[None, :]
                queries = row_c.to(ACC)
                keys = 1 - queries
                half = (r >> level) == (c >> level)
                F, z = _gated(_sum_of(x, half & (row_c == (r <= c)), ACC), row_c, q, k, HALF)
                w = tl.dot(z, tl.where(pair, P, 0.0).to(OT), input_precision="ieee", out_dtype=ACC)
                y = z * w
                w = F * w
                dq += w * queries
                dk += w * keys
                if ERASE:
                    d = _sum_of(x, half & (row_c == (r <= c)), ACC)
                    if PREVIOUS:
                        dg = _sums(y, half & (row_r == (c <= r)), dg, HALF, ACC)
                        y = tl.zeros([KB, C], ACC)
                        d = _sum_of(x, half & tl.where(row_c, r // R < c // R, r > c), ACC)
                    F, z = _gated(d, row_c, e, k, HALF)
                    w = tl.dot(z, tl.where(pair, A, 0.0).to(OT), input_precision="ieee", out_dtype=ACC)
                    y += z * w
                    w = F * w
                    de += w * queries
                    dk += w * keys
                if PREVIOUS:
                    dg = _sums(y, half & tl.where(row_r, c // R < r // R, c > r), dg, HALF, ACC)
                else:
                    dg = _sums(y, half & (row_r == (c <= r)), dg, HALF, ACC)

            if BETA:
                dbeta += tl.sum(k * de, 0) * unit
                dk += beta[None, :] * de
            if GATES:
                tl.store(p_derase + o_k, k * de * unit, mask=m_k)
                dk += tl.load(p_erase + o_k, mask=m_k, other=0.0).to(ACC) * de
            tl.store(p_dq + o_k, dq * (scale * unit), mask=m_k)
            tl.store(p_dk + o_k, dk * unit, mask=m_k)
            tl.store(p_dg + o_k, dg * unit, mask=m_k)
        if BETA:
            tl.store(p_dbeta + o_row, dbeta, mask=live)
