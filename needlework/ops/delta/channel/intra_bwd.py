"""The channel gate's backward inside a chunk: gradients of q, k, e, v, the gates and β, once nothing waits for another chunk.

    dP = tril(do Wᵀ)    dA = −tril₋₁(dr Wᵀ)    o = q̂ S₀ + P W,  r = W + A W,  A of β e

`couplings` makes dP + dPᵀ and dA + dAᵀ of every chunk, and what else comes of the values; `pairs` the rest. Apart each needs half
the registers, and twice the warps hide what a chunk waits for.

At a dyadic level the rows (second half of a block) and the keys (first half) hold one factor F = e^D each, D the sum of their own
gates up to the end of the first half: a 0/1 matrix times g, never above 0 (`decay.py`). A token is there either a row or a key:
with z = F ⊙ (q of a row, k of a key) and M = dP + dPᵀ of the level's pairs, M z is the gradient of both, and so with e and dA.
dg is the transposed matrices times the elementwise products, so every term of it holds its e^D and nothing cancels. What enters and
leaves the chunk comes as dq̂, dê, dk̂ from `scan_bwd.py`, and x = e^{GC} ⊙ Σ_v S₀ ⊙ dS from its last anchor:
Φ = Σ_v S ⊙ dS telescopes from chunk to chunk.

Tiles are channels by tokens: what one product leaves in registers is then the next one's first operand as it is. The 0/1 matrices
are read: made anew they would be a third of all instructions.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.common.kernels.tile import capped
from needlework.ops.delta.inputs import DeltaInputs
from needlework.ops.delta.powers import divisors
from needlework.ops.runtime.launch_configs import Constants, interpreted
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import cdiv

# its numpy knows no bfloat16
INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def _sums(y, m, acc, HALF: tl.constexpr, ASM: tl.constexpr, ACC: tl.constexpr):
    """acc + y times a 0/1 matrix. In half mode two bfloat16 of y: 16 bits and the range of float32, straight from registers."""
    if ASM:
        hi, lo = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b;
            cvt.rn.bf16x2.f32 $0, $3, $2;
            shl.b32 a, $0, 16; sub.f32 a, $2, a; and.b32 b, $0, 0xffff0000; sub.f32 b, $3, b;
            cvt.rn.bf16x2.f32 $1, b, a; }""",
            "=&r,=r,r,r", [y], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
        acc = tl.dot(hi, m, acc, input_precision="ieee", out_dtype=ACC)
        acc = tl.dot(lo, m, acc, input_precision="ieee", out_dtype=ACC)
    elif HALF and not INTERPRETED:
        hi = y.to(tl.bfloat16)
        acc = tl.dot(hi, m, acc, input_precision="ieee", out_dtype=ACC)
        acc = tl.dot((y - hi.to(ACC)).to(tl.bfloat16), m, acc, input_precision="ieee", out_dtype=ACC)
    else:
        acc = tl.dot(y, m, acc, input_precision="ieee", out_dtype=ACC)
    return acc


@triton.jit
def _sum_of(x, m, ACC: tl.constexpr):
    """Of the gates that a column of `which` names; x as the forward rounds it."""
    return tl.dot(x, m, input_precision="ieee", out_dtype=ACC)


@triton.jit
def _factor(d, ASM: tl.constexpr):
    """2^d."""
    if ASM:
        f = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [d], dtype=tl.float32, is_pure=True, pack=1)
    else:
        f = tl.exp2(d)
    return f


@triton.jit
def _gated(d, row, x, y, ASM: tl.constexpr):
    """F = 2^d, and F times x in rows, y elsewhere."""
    if ASM:
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


@triton.jit
def _matrix(p, which, C: tl.constexpr):
    """One of `Matrices`."""
    i = tl.arange(0, C)
    return tl.load(p + which * C * C + i[:, None] * C + i[None, :])


@triton.jit
def _placed(x, one, ACC: tl.constexpr):
    """x as a product's result, times 1: it comes to lie where the other results do, in fewer instructions than by being moved."""
    if INTERPRETED:
        x, one = x.to(ACC), one.to(ACC)
    return tl.dot(x, one, input_precision="ieee", out_dtype=ACC)


@triton.jit
def _load_sums(p, i_k, o_row, inside, K: tl.constexpr, NS: tl.constexpr):
    """NS tiles [KB C] of p [B T H NS K], of rows o_row of [B T H]."""
    found = ()
    for s in tl.static_range(NS):
        found += (tl.load(p + i_k[:, None] + (o_row * NS + s)[None, :] * K, mask=inside, other=0.0),)
    return found


@triton.jit
def _placed_sum(parts, one, NS: tl.constexpr, ACC: tl.constexpr):
    """The sum of NS tiles, as `_placed` has one."""
    total = _placed(parts[0], one, ACC)
    for s in tl.static_range(1, NS):
        total += _placed(parts[s], one, ACC)
    return total


@triton.jit(do_not_specialize=["T"])
def couplings(
    p_spans, p_do, p_dr, p_W, p_v, p_beta, p_write, p_divisor, p_abc, p_dv, p_dwrite, p_part, p_P, p_A, T,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, VB: tl.constexpr, R: tl.constexpr, BETA: tl.constexpr, GATES: tl.constexpr,
    PDL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Of one chunk and value head: dP + dPᵀ and dA + dAᵀ, the gradients of v and write, and the values' part of that of β.

    PDL: the launch may begin while the one before it runs, of whose results it reads none. It must begin only when the launch
    before that is done, which makes do, dr and divisor: they are read by the second cache, as this multiprocessor may have met them
    before they were written. It is done only when that one is too, so that a program that waits for it has waited for all.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    LATE: tl.constexpr = ".cg" if PDL else ""
    j, h, n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end = tl.load(p_spans + 2 * n), tl.load(p_spans + 2 * n + 1)
    if first + j < end:
        NC = tl.cdiv(T, C)
        b = first // NC
        ERASE: tl.constexpr = BETA or GATES
        OT: tl.constexpr = p_dr.dtype.element_ty
        i = tl.arange(0, C)
        r, c = i[:, None], i[None, :]
        divisor = tl.load(p_divisor, cache_modifier=LATE).to(ACC)
        of_v = divisor
        if p_abc is not None:
            _, _, of_v = divisors(p_abc, b * H + h)
            of_v *= divisor
        i_t = (first + j - b * NC) * C + i
        live = i_t < T
        o_row = (tl.cast(b, tl.int64) * T + i_t) * H + h
        beta = tl.zeros([C], ACC) + 1
        dbeta = tl.zeros([C], ACC)
        if BETA:
            beta = tl.load(p_beta + o_row, mask=live, other=0.0).to(ACC)
        dP, dPT, dA, dAT = tl.zeros([C, C], ACC), tl.zeros([C, C], ACC), tl.zeros([C, C], ACC), tl.zeros([C, C], ACC)
        for v0 in tl.range(0, V, VB, num_stages=1):
            i_v = v0 + tl.arange(0, VB)
            o_v = o_row[:, None] * V + i_v[None, :]
            m_v = live[:, None] & (i_v < V)[None, :]
            b_do = tl.load(p_do + o_v, mask=m_v, other=0.0, cache_modifier=LATE)
            b_W = tl.load(p_W + o_v, mask=m_v, other=0.0).to(OT)
            b_dr = tl.load(p_dr + o_v, mask=m_v, other=0.0, cache_modifier=LATE)
            if ERASE:
                b_v = tl.load(p_v + o_v, mask=m_v, other=0.0)
            # both orders: a transposed accumulator must not become a first operand
            dP = tl.dot(b_do, tl.trans(b_W), dP, input_precision="ieee", out_dtype=ACC)
            dPT = tl.dot(b_W, tl.trans(b_do), dPT, input_precision="ieee", out_dtype=ACC)
            dr = b_dr.to(ACC) * of_v
            if ERASE:
                dA = tl.dot(b_dr, tl.trans(b_W), dA, input_precision="ieee", out_dtype=ACC)
                dAT = tl.dot(b_W, tl.trans(b_dr), dAT, input_precision="ieee", out_dtype=ACC)
                if BETA:
                    dbeta += tl.sum(b_v.to(ACC) * dr, 1)
                    dr *= beta[:, None]
                if GATES:
                    tl.store(p_dwrite + o_v, b_v.to(ACC) * dr, mask=m_v)
                    dr *= tl.load(p_write + o_v, mask=m_v, other=0.0).to(ACC)
            tl.store(p_dv + o_v, dr, mask=m_v)
        o_square = ((tl.cast(b, tl.int64) * H + h) * NC + first + j - b * NC) * C * C + r * C + c
        # the diagonal is kept once
        tl.store(p_P + o_square, (tl.where(c <= r, dP, 0.0) + tl.where(r < c, dPT, 0.0)).to(OT))
        if ERASE:
            A = -(tl.where(c // R < r // R, dA, 0.0) + tl.where(r // R < c // R, dAT, 0.0))
            tl.store(p_A + o_square, A.to(OT))
        if BETA:
            tl.store(p_part + o_row, dbeta, mask=live)
    if PDL:
        # one program is enough: without it the launch is not done; the others make room
        if j + h + n == 0:
            tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize=["T", "scale"])
def pairs(
    p_spans, p_P, p_A, p_q, p_k, p_g, p_beta, p_erase, p_dq_hat, p_de_hat, p_dk_hat, p_x, p_divisor, p_abc, p_part, p_sums, p_back, p_level, p_one,
    p_dq, p_dk, p_dg, p_dbeta, p_derase,
    scale, T, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, C: tl.constexpr, KB: tl.constexpr, LEVELS: tl.constexpr, NS: tl.constexpr,
    BETA: tl.constexpr, GATES: tl.constexpr, PREVIOUS: tl.constexpr, GIVEN: tl.constexpr, ANCHOR: tl.constexpr,
    PDL: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """All of an anchor's chunks, last first, for one value head, KB channels at a time. What enters and leaves the chunk, and x, come as NS
    sums over a part of the values each.

    PDL: the launch may begin while `couplings` ends, which is the last of all before it to be done.
    """
    j, h, n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end = tl.load(p_spans + 2 * n), tl.load(p_spans + 2 * n + 1)
    NC = tl.cdiv(T, C)
    b = first // tl.maximum(NC, 1)
    ERASE: tl.constexpr = BETA or GATES
    OT: tl.constexpr = p_P.dtype.element_ty
    i = tl.arange(0, C)
    r, c = i[:, None], i[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    divisor = tl.load(p_divisor).to(ACC)
    of_q, of_k = scale, 1.0
    if p_abc is not None:
        of_q, of_k, _ = divisors(p_abc, b * H + h)
        of_q *= scale
    p_x += (tl.cast(first // ANCHOR + n + j, tl.int64) * H + h) * NS * K
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
        o_square = ((tl.cast(b, tl.int64) * H + h) * NC + top - back - b * NC) * C * C + r * C + c
        P = tl.load(p_P + o_square)
        if ERASE:
            A = tl.load(p_A + o_square)
        if BETA:
            dbeta = tl.load(p_part + o_row, mask=live, other=0.0).to(ACC)
        for k0 in tl.range(0, K, KB, num_stages=2):
            i_k = k0 + tl.arange(0, KB)
            m_k = (i_k < K)[:, None] & live[None, :]
            o_k = i_k[:, None] + o_row[None, :] * K
            o_qk = i_k[:, None] + o_key[None, :] * K
            # all that is read is asked for before anything waits
            own, eye = _matrix(p_one, 0, C), _matrix(p_level, LEVELS, C)
            till, after, since = _matrix(p_sums, LEVELS, C), _matrix(p_sums, LEVELS + 1, C), _matrix(p_back, LEVELS, C)
            if PREVIOUS:
                till_e, since_e = _matrix(p_sums, LEVELS + 2, C), _matrix(p_back, LEVELS + 2, C)
            before = _matrix(p_back, tl.where(back > 0, 2 * LEVELS + 3, LEVELS + 1), C)
            b_q = tl.load(p_q + o_qk, mask=m_k, other=0.0)
            b_k = tl.load(p_k + o_qk, mask=m_k, other=0.0)
            dq_hat = _load_sums(p_dq_hat, i_k, o_row, m_k, K, NS)
            if ERASE:
                de_hat = _load_sums(p_de_hat, i_k, o_row, m_k, K, NS)
            dk_hat = _load_sums(p_dk_hat, i_k, o_row, m_k, K, NS)
            m_x = i_k < K
            phi = tl.load(p_x + i_k, mask=m_x, other=0.0)
            for s in tl.static_range(1, NS):
                # from the second chunk on the first one's has all
                phi += tl.load(p_x + s * K + i_k, mask=m_x & (back == 0), other=0.0)
            b_g = tl.load(p_g + o_k, mask=m_k, other=0.0)
            q = (_placed(b_q, own, ACC) * of_q).to(OT)
            k = _placed(b_k, own, ACC)
            if p_abc is not None:
                k *= of_k
            k = k.to(OT)
            x = (capped(b_g).to(ACC) * 1.4426950408889634).to(OT)
            e = k
            if BETA:
                e = (k * beta[None, :]).to(OT)
            if GATES:
                erase = tl.load(p_erase + o_k, mask=m_k, other=0.0).to(ACC)
                e = (erase if GIVEN else k * erase).to(OT)

            # the whole chunk: from its start, and to its end
            F = _factor(_sum_of(x, till, ACC), ASM)
            dq = F * _placed_sum(dq_hat, eye, NS, ACC)
            y = q * dq
            de = tl.zeros([KB, C], ACC)
            dg = tl.zeros([KB, C], ACC)
            passed = y
            if ERASE:
                if PREVIOUS:
                    F = _factor(_sum_of(x, till_e, ACC), ASM)
                de = F * _placed_sum(de_hat, eye, NS, ACC)
                passed += e * de
                if PREVIOUS:
                    dg = _sums(e * de, since_e, dg, HALF, ASM, ACC)
                else:
                    y = passed
            dg = _sums(y, since, dg, HALF, ASM, ACC)
            dk = _factor(_sum_of(x, after, ACC), ASM) * _placed_sum(dk_hat, eye, NS, ACC)
            # x was measured before the keys of the last chunk were added: from there on they count
            y = k * dk
            if back > 0:
                passed -= y
                y = -y
            dg = _sums(y, before, dg, HALF, ASM, ACC)
            dg += phi[:, None]
            if ANCHOR > 1:
                tl.store(p_x + i_k, phi + tl.sum(passed, 1), mask=m_x)

            # a token and itself: no gate between
            same = P * eye
            dq = tl.dot(k, same, dq, input_precision="ieee", out_dtype=ACC)
            dk = tl.dot(q, same, dk, input_precision="ieee", out_dtype=ACC)
            for level in tl.static_range(0, LEVELS):
                # tokens whose numbers differ first at this bit; row: the one that has it set
                pair, near, back_near = _matrix(p_level, level, C), _matrix(p_sums, level, C), _matrix(p_back, level, C)
                if PREVIOUS:
                    near_e, back_near_e = _matrix(p_sums, LEVELS + 3 + level, C), _matrix(p_back, LEVELS + 3 + level, C)
                else:
                    back_near_e = back_near
                row = (((i >> level) & 1) == 1)[None, :]
                queries = tl.where(row, 1.0, 0.0).to(ACC)
                keys = tl.where(row, 0.0, 1.0).to(ACC)
                d = _sum_of(x, near, ACC)
                F, z = _gated(d, row, q, k, ASM)
                w = tl.dot(z, P * pair, input_precision="ieee", out_dtype=ACC)
                y = z * w
                w = F * w
                dq += w * queries
                dk += w * keys
                if ERASE and PREVIOUS:
                    dg = _sums(y, back_near, dg, HALF, ASM, ACC)
                    y = tl.zeros([KB, C], ACC)
                    d = _sum_of(x, near_e, ACC)
                if ERASE:
                    F, z = _gated(d, row, e, k, ASM)
                    w = tl.dot(z, A * pair, input_precision="ieee", out_dtype=ACC)
                    y += z * w
                    w = F * w
                    de += w * queries
                    dk += w * keys
                dg = _sums(y, back_near_e, dg, HALF, ASM, ACC)

            if BETA:
                dbeta += tl.sum(k * de, 0) * divisor
                dk += beta[None, :] * de
            if GATES:
                tl.store(p_derase + o_k, (de if GIVEN else k * de) * divisor, mask=m_k)
                if not GIVEN:
                    dk += tl.load(p_erase + o_k, mask=m_k, other=0.0).to(ACC) * de
            tl.store(p_dq + o_k, dq * (of_q * divisor), mask=m_k)
            tl.store(p_dk + o_k, dk * (of_k * divisor), mask=m_k)
            tl.store(p_dg + o_k, dg * divisor, mask=m_k)
        if BETA:
            tl.store(p_dbeta + o_row, dbeta, mask=live)
        if ANCHOR > 1:
            # the next chunk's reader of what p_x was given is another thread
            tl.debug_barrier()


class Matrices(NamedTuple):
    """0/1, [· C C]; of `sums` a column names the gates, of `back` the products, that a token's sum is of."""

    sums: Tensor  # by level; from the chunk's start; to its end; from its start without the own token's; by level likewise
    back: Tensor  # their transposes; all but what comes before
    level: Tensor  # pairs by level; a token and itself
    one: Tensor  # a token and itself


_made: dict[tuple, Matrices] = {}


def matrices(C: int, R: int, dtype: torch.dtype, solves: torch.dtype, sums: torch.dtype, device: torch.device) -> Matrices:
    """Made once, on the CPU: on meta tensors PyTorch would compare in Python and load torch._dynamo for it."""
    key = C, R, dtype, solves, sums, device
    if key not in _made:
        i = torch.arange(C)
        r, c = i[:, None], i[None, :]
        levels = range(C.bit_length() - 1)
        half = torch.stack([(r >> level) == (c >> level) for level in levels])
        row = torch.stack([(c >> level) % 2 == 1 for level in levels])
        earlier = r // R < c // R
        own = half & (row == (r <= c)), torch.stack([r <= c, r > c, earlier]), half & torch.where(row, earlier, r > c)
        own = torch.cat(own)
        pair = torch.stack([(r ^ c) >> level == 1 for level in levels] + [r == c])
        back = torch.cat([own.mT, (r >= c)[None]])
        own, back, pair, one = own.to(solves), back.to(sums), pair.to(solves), (r == c).to(dtype)
        _made[key] = Matrices(*(x.contiguous().to(device) for x in (own, back, pair, one)))
    return _made[key]


def launch_pairs(
    spans: object, do: Tensor, dr: Tensor, W: Tensor | None, inputs: DeltaInputs, dq_hat: Tensor, de_hat: Tensor | None,
    dk_hat: Tensor, x: Tensor, divisor: object, d: DeltaInputs, *,
    scale: float, longest: int, sequences: int, couple: Constants, channels: Constants, launch: Callable[..., Any] = run,
) -> tuple[Any, Any]:  # fmt: skip
    """Both kernels, for sequences of up to `longest` chunks; what `launch` returns of each. d: where gradients of `inputs` go."""
    q, beta = inputs.q, inputs.beta
    (B, T, H), C, ACC = do.shape[:3], couple["C"], x.dtype
    P, A = (do.new_empty(B, H, -(-T // C), C, C, dtype=dr.dtype) if used else None for used in (True, de_hat is not None))
    part = None if beta is None else x.new_empty(B, T, H)
    sums = torch.bfloat16 if channels["HALF"] and not interpreted() else ACC
    made = matrices(C, couple["R"], q.dtype, dr.dtype, sums, q.device)
    return (
        launch(
            couplings, (longest, H, sequences),
            spans, do, dr, W, inputs.v, beta, inputs.write, divisor, inputs.powers, d.v, d.write, part, P, A, T, **couple,
        ),
        launch(
            pairs, (cdiv(longest, channels["ANCHOR"]), H, sequences),
            spans, P, A, q, inputs.k, inputs.g, beta, inputs.erase, dq_hat, de_hat, dk_hat, x, divisor, inputs.powers, part, *made,
            d.q, d.k, d.g, d.beta, d.erase, scale, T, **channels,
        ),
    )  # fmt: skip
