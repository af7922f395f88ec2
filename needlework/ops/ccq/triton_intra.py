"""What CCQ's chunks need before any of them is scanned: the running mean at every chunk's start, then, chunk by chunk, the keys
seen from it and their centred scores. With k' = k − μ₀, ω_ts = e^{G_t − G_s}, n_t = e^{G_t} n₀ + Σ_s ω_ts:

    P_ts = ω_ts (x_t·k'_s − x̄_t),   x̄_t = n_t⁻¹ Σ_s ω_ts x_t·k'_s,   δ = μ_C − μ₀ = n_C⁻¹ Σ_s ω_Cs k'_s

P is not divided by n_t: float16 would lose it. Tokens past a sequence's end (`fill` real ones a chunk) have weight 0.
Numbers of a token lie as [chunks H C], of a chunk as [chunks H ...]; tensors of the caller as [B T H K].
"""

import torch
import triton
import triton.language as tl

from needlework.ops.common.launch import Case, Plan

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}
POINTS = {"p_G": "*fp64", "p_fill": "*i32", "p_cum": "*i32", "T": "i32", "NCB": "i32", "chunks": "i32"}
OPERANDS = ("p_x", "p_k", "p_q", "p_kc", "p_kd", "p_P", "p_Pq", "p_Py", "p_dout", "p_eta", "p_Sq", "p_y", "p_yd")


@triton.jit
def load_tile(x, i, i_h, i_d, T, NCB, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, TMA: tl.constexpr):
    """[C BD] of chunk i of x [B T H D], zeros past T and D. x: a pointer, or a descriptor of its [B H T D] view."""
    i_b = i // NCB
    i_t = (i - i_b * NCB) * C
    if TMA:
        b = tl.reshape(x.load([i_b, i_h, i_t, i_d]), [C, BD])
    else:
        o_t = i_t + tl.arange(0, C)
        o_d = i_d + tl.arange(0, BD)
        row = (tl.cast(i_b, tl.int64) * T + o_t) * H + i_h
        b = tl.load(x + row[:, None] * D + o_d[None, :], mask=(o_t < T)[:, None] & (o_d < D)[None, :], other=0.0)
    return b


@triton.jit
def store_tile(
    x, b, i, i_h, i_d, T, NCB, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """The inverse of `load_tile`: nothing is written past T and D."""
    i_b = i // NCB
    i_t = (i - i_b * NCB) * C
    if TMA:
        x.store([i_b, i_h, i_t, i_d], tl.reshape(b, [1, 1, C, BD]))
    else:
        o_t = i_t + tl.arange(0, C)
        o_d = i_d + tl.arange(0, BD)
        row = (tl.cast(i_b, tl.int64) * T + o_t) * H + i_h
        tl.store(x + row[:, None] * D + o_d[None, :], b, mask=(o_t < T)[:, None] & (o_d < D)[None, :])


@triton.jit
def weights(p_G, o_ih, fill, C: tl.constexpr, GATED: tl.constexpr, ACC: tl.constexpr):
    """e^{G_s} and, for real tokens, e^{G_C − G_s} [C]. G is in log2 units and float64: a difference loses nothing."""
    o_c = tl.arange(0, C)
    if GATED:
        b_G = tl.load(p_G + o_ih * C + o_c)
        b_decay = tl.exp2(b_G.to(ACC))
        b_left = tl.exp2((tl.load(p_G + o_ih * C + C - 1) - b_G).to(ACC))
    else:
        b_decay = tl.full([C], 1.0, ACC)
        b_left = b_decay
    return b_decay, tl.where(o_c < fill, b_left, 0.0)


@triton.jit(do_not_specialize=["T", "NCB"])
def sums(
    p_k, p_G, p_fill, p_sum, p_mass, T, NCB,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Σ_s ω_Cs k_s and Σ_s ω_Cs of every chunk."""
    i, i_h = tl.program_id(0), tl.program_id(1)
    o_ih = tl.cast(i, tl.int64) * H + i_h
    o_k = tl.arange(0, BK)
    _, b_left = weights(p_G, o_ih, tl.load(p_fill + i), C, GATED, ACC)
    b_k = load_tile(p_k, i, i_h, 0, T, NCB, H, K, C, BK, 0).to(ACC)
    tl.store(p_sum + o_ih * K + o_k, tl.sum(b_left[:, None] * b_k, 0), mask=o_k < K)
    tl.store(p_mass + o_ih, tl.sum(b_left, 0))


@triton.jit(do_not_specialize=["T", "NCB"])
def means(
    p_k, p_G, p_sum, p_mass, p_cum, p_mean_in, p_n_in, p_mean, p_n, p_mean_out, p_n_out, T, NCB,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """(μ, n) before each chunk and after the last: one program a sequence, key head and BK columns."""
    i_n, i_h = tl.program_id(0), tl.program_id(1)
    o_nh = tl.cast(i_n, tl.int64) * H + i_h
    o_k = tl.program_id(2) * BK + tl.arange(0, BK)
    inside = o_k < K
    start, end = tl.load(p_cum + i_n), tl.load(p_cum + i_n + 1)
    n = tl.load(p_n_in + o_nh).to(ACC)
    b_mean = tl.load(p_mean_in + o_nh * K + o_k, mask=inside, other=0.0).to(ACC)
    # before the first token the mean has no mass: the first key is a better place to centre at
    if start < end:
        i_b = start // NCB
        first = ((tl.cast(i_b, tl.int64) * T + (start - i_b * NCB) * C) * H + i_h) * K + o_k
        b_first = tl.load(p_k + first, mask=inside, other=0.0).to(ACC)
        b_mean = tl.where(n > 0, b_mean, b_first)
    for i in tl.range(start, end, loop_unroll_factor=4):
        o_ih = tl.cast(i, tl.int64) * H + i_h
        tl.store(p_mean + o_ih * K + o_k, b_mean, mask=inside)
        tl.store(p_n + o_ih, n)
        m = tl.load(p_mass + o_ih)
        b_sum = tl.load(p_sum + o_ih * K + o_k, mask=inside, other=0.0)
        if GATED:
            n = n * tl.exp2(tl.load(p_G + o_ih * C + C - 1).to(ACC))
        n = n + m
        b_mean += (b_sum - m * b_mean) / tl.maximum(n, 1.0)
    tl.store(p_mean_out + o_nh * K + o_k, b_mean, mask=inside)
    tl.store(p_n_out + o_nh, n)


@triton.jit(do_not_specialize=["T", "NCB"])
def intra(
    p_x, p_k, p_G, p_fill, p_mean, p_n, p_q, p_qbar, p_ysq, p_kc, p_kd, p_P, p_xbar, p_decay, p_left, p_inv, p_d, p_pairs,
    T, NCB, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, PAIRS: tl.constexpr,
    ACC: tl.constexpr, OT: tl.constexpr,
):  # fmt: skip
    """k', ω_C (k' − δ), δ; P and x̄ of x; the numbers of the chunk's tokens.

    With PAIRS, x is y/n, and p_pairs gets Σ_t ω_ts (y·Σq/n − …) of every key: what its mass changes inside its chunk.
    """
    i, i_h = tl.program_id(0), tl.program_id(1)
    o_ih = tl.cast(i, tl.int64) * H + i_h
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    fill = tl.load(p_fill + i)
    b_decay, b_left = weights(p_G, o_ih, fill, C, GATED, ACC)
    b_mean = tl.load(p_mean + o_ih * K + o_k, mask=o_k < K, other=0.0)
    n = tl.load(p_n + o_ih)

    b_k = load_tile(p_k, i, i_h, 0, T, NCB, H, K, C, BK, 0).to(ACC) - b_mean[None, :]
    b_kc = tl.where((o_c < fill)[:, None], b_k, 0.0).to(OT)
    store_tile(p_kc, b_kc, i, i_h, 0, T, NCB, H, K, C, BK, 0)
    if GATED:
        a = tl.exp2(tl.load(p_G + o_ih * C + C - 1).to(ACC))
        n_end = a * n + tl.sum(b_left, 0)
    else:
        n_end = n + fill
    b_d = tl.sum(b_left[:, None] * b_kc.to(ACC), 0) / tl.maximum(n_end, 1.0)
    tl.store(p_d + o_ih * K + o_k, b_d, mask=o_k < K)
    b_kd = b_left[:, None] * (b_kc.to(ACC) - b_d[None, :])
    store_tile(p_kd, b_kd.to(OT), i, i_h, 0, T, NCB, H, K, C, BK, 0)

    b_x = load_tile(p_x, i, i_h, 0, T, NCB, H, K, C, BK, 0)
    b_s = tl.dot(b_x, tl.trans(b_kc), input_precision="ieee", out_dtype=ACC)
    seen = (o_c[:, None] >= o_c[None, :]) & (o_c < fill)[None, :]
    if GATED:
        b_G = tl.load(p_G + o_ih * C + o_c)
        b_w = tl.exp2(tl.where(seen, (b_G[:, None] - b_G[None, :]).to(ACC), -float("inf")))
    else:
        b_w = tl.where(seen, 1.0, 0.0).to(ACC)
    b_inv = 1.0 / tl.maximum(b_decay * n + tl.sum(b_w, 1), 1.0)
    b_xbar = tl.sum(b_w * b_s, 1) * b_inv
    b_s = b_s - b_xbar[:, None]
    tl.store(p_P + o_ih * (C * C) + o_c[:, None] * C + o_c[None, :], (b_w * b_s).to(OT))
    tl.store(p_xbar + o_ih * C + o_c, b_xbar)
    tl.store(p_decay + o_ih * C + o_c, b_decay)
    tl.store(p_left + o_ih * C + o_c, b_left)
    tl.store(p_inv + o_ih * C + o_c, b_inv)
    if PAIRS:
        b_q = load_tile(p_q, i, i_h, 0, T, NCB, H, K, C, BK, 0)
        b_sq = tl.dot(b_q, tl.trans(b_kc), input_precision="ieee", out_dtype=ACC)
        b_sq = b_sq - tl.load(p_qbar + o_ih * C + o_c)[:, None]
        b_ysq = tl.load(p_ysq + o_ih * C + o_c)
        tl.store(p_pairs + o_ih * C + o_c, tl.sum(b_w * (b_ysq[:, None] - b_sq * b_s), 0))


@triton.jit(do_not_specialize=["T", "NCB"])
def fold(
    p_dout, p_eta, p_Sq, p_decay, p_inv, p_scale, p_y, p_yd, p_ysq, p_deta, T, NCB,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr,
    ACC: tl.constexpr, OT: tl.constexpr,
):  # fmt: skip
    """y_t/n_t with y_t = scale Σ_j λ_tj dq̃_tj over the value heads of a key head, with gates also e^{G_t} y_t/n_t; dλ; y·Σq/n."""
    GROUP: tl.constexpr = HV // H
    i, i_h = tl.program_id(0), tl.program_id(1)
    o_ih = tl.cast(i, tl.int64) * H + i_h
    o_c = tl.arange(0, C)
    b_Sq = load_tile(p_Sq, i, i_h, 0, T, NCB, H, K, C, BK, 0).to(ACC)
    b_y = tl.zeros([C, BK], ACC)
    i_b = i // NCB
    o_t = (i - i_b * NCB) * C + o_c
    for j in tl.static_range(GROUP):
        o_eta = (tl.cast(i_b, tl.int64) * T + o_t) * HV + i_h * GROUP + j
        b_eta = tl.load(p_eta + o_eta, mask=o_t < T, other=0.0).to(ACC)
        b_do = load_tile(p_dout, i, i_h * GROUP + j, 0, T, NCB, HV, K, C, BK, 0).to(ACC)
        b_y += b_eta[:, None] * b_do
        tl.store(p_deta + o_eta, -tl.sum(b_do * b_Sq, 1), mask=o_t < T)
    b_y *= (tl.load(p_scale) * tl.load(p_inv + o_ih * C + o_c))[:, None]
    tl.store(p_ysq + o_ih * C + o_c, tl.sum(b_y * b_Sq, 1))
    store_tile(p_y, b_y.to(OT), i, i_h, 0, T, NCB, H, K, C, BK, 0)
    if GATED:
        b_yd = tl.load(p_decay + o_ih * C + o_c)[:, None] * b_y
        store_tile(p_yd, b_yd.to(OT), i, i_h, 0, T, NCB, H, K, C, BK, 0)


def case(kernel, name: str, plan: Plan, dtype: torch.dtype, K: int, **flags: bool) -> Case:
    """One launch of `kernel` under the row `name` of a plan, with one head and the flags given."""
    operand = str(TYPES[dtype])
    wide = torch.promote_types(dtype, torch.float32)
    options = dict(plan.launch[name])
    extra = {key: options.pop(key) for key in ("num_warps", "num_stages", "maxnreg") if key in options}
    C, BK = plan.launch["shared"]["C"], max(16, triton.next_power_of_2(K))
    options["BV"] = min(options.get("BV", BK), BK)
    values = {
        "H": 1,
        "HV": 1,
        "K": K,
        "C": C,
        "BK": BK,
        "TMA": plan.tma,
        "OT": TYPES[dtype],
        "ACC": TYPES[wide],
        **options,
        **flags,
    }
    signature = {}
    for argument in kernel.arg_names:
        if argument in values:
            signature[argument] = "constexpr"
        elif argument.startswith("x_"):
            width = options["BV"] if argument.endswith("v") or argument in ("x_out", "x_Sx", "x_dk", "x_kd") else BK
            signature[argument] = f"tensordesc<{operand}[1, 1, {C}, {width}]>" if plan.tma else f"*{operand}"
        else:
            signature[argument] = POINTS.get(argument, f"*{operand}" if argument in OPERANDS else f"*{TYPES[wide]}")
    return Case(kernel, signature, {key: values[key] for key in signature if key in values}, extra)


def compile_cases(plan: Plan, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    cases = []
    for gated in (False, True):
        cases += [case(kernel, kernel.__name__, plan, dtype, K, GATED=gated) for kernel in (sums, means, fold)]
        cases += [case(intra, "intra", plan, dtype, K, GATED=gated, PAIRS=pairs) for pairs in {False, gated}]
    return cases
