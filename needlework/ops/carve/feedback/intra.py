"""CARVE's gates, made where they are used: no activation of f or b is ever in memory.

    l = −exp(A) ⊙ softplus(f + τ) − softplus(b + u),   u = τ_b + W₂ tanh(W₁ m)        − softplus(y) = log(1 − σ(y))

Rows that hold no token have f = b = −∞ and so l = 0: they change nothing.
"""

import triton
import triton.language as tl

from needlework.ops.delta.channel.intra import couple


@triton.jit
def softplus2(x, ASM: tl.constexpr):
    """log2(1 + 2^x), accurate to a small part of itself for every x: half-lives of thousands of tokens are tiny gates."""
    if ASM:
        # log2(1 + e) as e times a polynomial of relative error 1.4e-6 on [0, 1]: the unit of exp2 is the busier one, and its
        # log2 errs by 2^-22, not by a part of its result. Not pure: or it is computed once for each layout that wants it.
        y = tl.inline_asm_elementwise(
            """{ .reg .f32 e, s;
            abs.f32 e, $1; neg.f32 e, e; ex2.approx.ftz.f32 e, e;
            fma.rn.f32 s, e, 0f3CA7205C, 0fBDC4317E; fma.rn.f32 s, s, e, 0f3E5C738D; fma.rn.f32 s, s, e, 0fBEAD9D14;
            fma.rn.f32 s, s, e, 0f3EF490F3; fma.rn.f32 s, s, e, 0fBF389DE8; fma.rn.f32 s, s, e, 0f3FB8AA2C;
            max.f32 $0, $1, 0f00000000; fma.rn.f32 $0, s, e, $0; }""",
            "=&f,f", [x], dtype=tl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        e = tl.exp2(-tl.abs(x))
        near = (1.0 + e) - 1.0  # what the sum kept of e
        exact = tl.log2(1.0 + e) * (e / tl.where(near == 0, 1.0, near))
        y = tl.maximum(x, 0.0) + tl.where(near == 0, e * 1.4426950408889634, exact)
    return y


@triton.jit
def activated_gates(p_gates, at, inside, channel, in_K, ACC: tl.constexpr, ASM: tl.constexpr):
    """l in base 2, from (f, b, the head's u in base 2, A_log, dt_bias)."""
    p_f, p_b, p_u, p_A_log, p_dt_bias = p_gates
    f = tl.load(p_f + at, mask=inside, other=float("-inf")).to(ACC)
    b = tl.load(p_b + at, mask=inside, other=float("-inf")).to(ACC)
    slope = tl.exp(tl.load(p_A_log + channel, mask=in_K, other=0.0).to(ACC))
    bias = tl.load(p_dt_bias + channel, mask=in_K, other=0.0).to(ACC) * 1.4426950408889634
    u = tl.load(p_u + channel, mask=in_K, other=0.0, cache_modifier=".cg")  # made by the launch before
    x = -slope[None, :] * softplus2(f * 1.4426950408889634 + bias[None, :], ASM)
    # 2^-16384 is 0, and more would overflow float16
    x -= softplus2(b * 1.4426950408889634 + u[None, :], ASM)
    return tl.maximum(x, -16384.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["T", "N", "parts", "i"])
def gates_kernel(
    p_q, p_k, p_f, p_b, p_u, p_A_log, p_dt_bias, p_beta, p_q_hat, p_e_hat, p_k_hat, p_Tp, p_Pp, p_whole, p_spans, T, N, parts, i,
    SCALE: tl.constexpr, H: tl.constexpr, K: tl.constexpr, PREVIOUS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr, FIRST: tl.constexpr, KB: tl.constexpr, LO: tl.constexpr, ST: tl.constexpr, ACC: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One kernel chunk of content chunk i, of one sequence and head.

    PDL: the launch may begin while the one before it ends. This one waits first of all; so what comes after it may take the
    launch before it as done.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i_nh = tl.program_id(0) // parts
    n = i_nh // H
    p_span = p_spans + 2 * (i * N + n)
    chunk, last = tl.load(p_span) + tl.program_id(0) % parts, tl.load(p_span + 1)
    if chunk >= last:
        return
    NC = tl.cdiv(T, C)
    p_gates = (p_f, p_b, p_u + tl.cast(n, tl.int64) * H * K, p_A_log, p_dt_bias)
    couple(
        p_q, p_k, p_gates, p_beta, None, None, p_q_hat, p_e_hat, p_k_hat, p_Tp, p_Pp, p_whole,
        chunk // NC * H + i_nh % H, chunk % NC, T, activated_gates,
        SCALE, H, H, K, 1, PREVIOUS, False, R, C, LEVELS, FIRST, KB, LO, ST, ACC, ASM,
    )  # fmt: skip
