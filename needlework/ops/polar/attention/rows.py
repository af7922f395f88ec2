"""What Polar's kernels compute a query at a time: gains, the null's share, the magnitude, spans of keys. Logarithms of scores
are base 2.

    temp = 1 + softplus(α) ln n,  null = null_base + softplus(γ) √ln(n + 1)       n: keys that the query sees
    f = 2^{lse − a_N} / (1 + 2^{lse − a_N}),  a_N = temp null                     1 − f without the difference

temp carries the log2(e) of base 2 from the start: rounded once, it is the same factor of every score and of the null.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.parts import inner, times

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
CLAMP = tl.constexpr(1e-6)


@triton.jit
def log1p(x):
    """ln(1 + x), x >= 0, to its last digits also where 1 + x rounds."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def softplus(x):
    """In float64: a head's number is the same at every token, and its error does not average out."""
    x = x.to(tl.float64)
    return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
def tanh(x):
    """x >= 0: −expm1(−2x) / (2 + expm1(−2x)), expm1 to its last digits."""
    u = tl.exp(-2.0 * x)
    between = (u < 1.0) & (u > 0.0)
    exact = (u - 1.0) * (-2.0 * x / tl.log(tl.where(between, u, 0.5)))
    m = tl.where(between, exact, tl.where(u == 1.0, -2.0 * x, -1.0))
    return -m / (2.0 + m)


@triton.jit
def clamped(r):
    """max(r, 1e-6), of a constant in r's type: tl.maximum would make it a float32."""
    return r - tl.minimum(r - CLAMP, 0.0)


@triton.jit
def softplus_of_three(p_a, p_b, p_c, i_h):
    """Of three numbers of a head, side by side: one after another they take as long as a tile of keys."""
    i = tl.arange(0, 4)
    x = softplus(tl.where(i == 0, tl.load(p_a + i_h), tl.where(i == 1, tl.load(p_b + i_h), tl.load(p_c + i_h))))
    return tl.sum(tl.where(i == 0, x, 0.0), 0), tl.sum(tl.where(i == 1, x, 0.0), 0), tl.sum(tl.where(i == 2, x, 0.0), 0)


@triton.jit
def gains_of(alpha, gamma, base, n, ACC: tl.constexpr):
    """Of queries that see n keys: ln n, √ln(n + 1), log2(e) temp, null, a_N in float64; alpha, gamma: after softplus."""
    n = tl.maximum(n, 1).to(ACC)
    log_n = tl.log(n)
    root = tl.sqrt(tl.log(n + 1.0))
    # log2(e) in float32 would be off by as much at every token as a rounding
    temp = (1.0 + alpha * log_n) * LOG2E
    null = base + gamma * root
    return log_n, root, temp.to(ACC), null.to(ACC), temp * null


@triton.jit
def gains(p_alpha, p_gamma, p_base, i_h, n, ACC: tl.constexpr):
    """As gains_of, from a head's raw numbers, or those of heads i_h."""
    return gains_of(softplus(tl.load(p_alpha + i_h)), softplus(tl.load(p_gamma + i_h)), tl.load(p_base + i_h), n, ACC)


@triton.jit
def shares(lse, a_null):
    """f, what the keys get, and 1 − f, the null's: a dominant a_N, rounded to float32, would be the largest error of both."""
    gap = (lse - a_null).to(lse.dtype)
    return 1.0 / (1.0 + tl.exp2(-gap)), 1.0 / (1.0 + tl.exp2(gap))


@triton.jit
def read_out(acc, l, lse, n_eff, a_null, b_null, strength, N: tl.constexpr):
    """Direction and magnitude of rows with S = acc, from v_null and softplus(β); S, v_null and the direction are in N parts."""
    f, missed = shares(lse, a_null)
    s = ()
    for n in tl.static_range(N):
        s += (acc[n] * (f / l)[:, None] + missed[:, None] * b_null[n],)
    r = tl.sqrt(inner(s, s, N))
    return times(s, (1.0 / clamped(r))[:, None], N), tanh(strength * log1p(n_eff * f))


@triton.jit
def span(p_spans, i_b, i_t, T, C: tl.constexpr, PACKED: tl.constexpr):
    """Of the sequence that a tile at token i_t belongs to: its first token, its first chunk's that asks, and the one after its last."""
    first = 0
    asks = 0
    last = T
    if PACKED:
        p_spans += 3 * (i_b * tl.cdiv(T, C) + i_t // C)
        first = tl.load(p_spans)
        asks = tl.load(p_spans + 1)
        last = tl.load(p_spans + 2)
    return first, asks, last
