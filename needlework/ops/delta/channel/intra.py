"""What a chunk of the channel-gate engine needs that no state enters: gated rows, couplings and the inverse.

Dyadic references, as in `decay.py`: at each level the exponents of all rows are one 0/1 matrix times the gates, on the tensor
cores. One warp takes a chunk of 16 rows, so that nothing waits at a barrier.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.common.kernels.tile import capped
from needlework.ops.common.shapes import width
from needlework.ops.delta.channel.operands import RULES, Saved, case, predicted, rule_of, scales, triton_dtype, wide_gates
from needlework.ops.delta.inputs import solve_dtype
from needlework.ops.delta.powers import divisors
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig, interpreted
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import padded


@triton.jit
def _gated(d, x, ASM: tl.constexpr):
    """x · 2^d, d <= 0, in x's dtype."""
    if ASM:
        y = tl.inline_asm_elementwise(
            """{ .reg .f32 a, b; .reg .b32 f;
            ex2.approx.ftz.f32 a, $1; ex2.approx.ftz.f32 b, $2; cvt.rn.f16x2.f32 f, b, a;
            mul.rn.f16x2 $0, $3, f; }""",
            "=r,r,r,r", [d, x], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        y = x * tl.exp2(d).to(x.dtype)
    return y


@triton.jit
def _gated_pair(d, x, y, ASM: tl.constexpr):
    """x · 2^d, y · 2^d and 2^d in their dtype."""
    if ASM:
        x, y, f = tl.inline_asm_elementwise(
            """{ .reg .f32 a, b;
            ex2.approx.ftz.f32 a, $3; ex2.approx.ftz.f32 b, $4; cvt.rn.f16x2.f32 $2, b, a;
            mul.rn.f16x2 $0, $5, $2; mul.rn.f16x2 $1, $6, $2; }""",
            "=&r,=&r,=&r,r,r,r,r", [d, x, y], dtype=(tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        f = tl.exp2(d).to(x.dtype)
        x, y = x * f, y * f
    return x, y, f


@triton.jit
def _moved(moves, f, x, ASM: tl.constexpr, ACC: tl.constexpr):
    """x times the rows of f that the 0/1 matrix `moves` names: cheaper than exponentials of the same sums again."""
    f = tl.dot(moves, f, input_precision="ieee", out_dtype=ACC)
    if ASM:
        y = tl.inline_asm_elementwise(
            "{ .reg .b32 f; cvt.rn.f16x2.f32 f, $2, $1; mul.rn.f16x2 $0, $3, f; }",
            "=r,r,r,r", [f, x], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        y = x * f.to(x.dtype)
    return y


@triton.jit
def gate_sums(which, hi, lo, LO: tl.constexpr, ACC: tl.constexpr):
    """Σ of the gates that each row of the 0/1 matrix `which` names, on the tensor cores: never a difference of prefixes."""
    m = tl.where(which, 1.0, 0.0).to(hi.dtype)
    d = tl.dot(m, hi, input_precision="ieee", out_dtype=ACC)
    if LO:
        d = tl.dot(m, lo, d, input_precision="ieee", out_dtype=ACC)
    return d


@triton.jit
def split_gates(x, ST: tl.constexpr, LO: tl.constexpr):
    """x as operand, and what it lost (the operand again where that is not asked for)."""
    hi = x.to(ST)
    lo = hi
    if LO:
        lo = (x - hi.to(x.dtype)).to(ST)
    return hi, lo


@triton.jit
def _inverse(A, r, c, LEVELS: tl.constexpr, ST: tl.constexpr, ACC: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular A, block by block of doubling size."""
    X = tl.where(r == c, 1.0, 0.0).to(ACC) - tl.where(r // 2 == c // 2, A, 0.0)
    for j in tl.static_range(1, LEVELS):
        below = ((r >> (j + 1)) == (c >> (j + 1))) & ((r >> j) != (c >> j))
        M = tl.where(below, A, 0.0).to(ST)
        U = tl.dot(M, X.to(ST), input_precision="ieee", out_dtype=ACC)
        X -= tl.dot(X.to(ST), U.to(ST), input_precision="ieee", out_dtype=ACC)
    return X


@triton.jit
def given_gates(p_gates, at, inside, channel, in_K, ACC: tl.constexpr, ASM: tl.constexpr):
    """Base-2 gates at these offsets, from a tensor that holds them."""
    return capped(tl.load(p_gates[0] + at, mask=inside, other=0.0)).to(ACC) * 1.4426950408889634


@triton.jit
def couple(
    p_q, p_k, p_gates, p_beta, p_erase, p_abc, p_q_hat, p_e_hat, p_k_hat, p_Tp, p_Pp, p_whole, i_bh, i_c, T, GATES: tl.constexpr,
    SCALE: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, RULE: tl.constexpr, PREVIOUS: tl.constexpr,
    GIVEN: tl.constexpr, R: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, FIRST: tl.constexpr, KB: tl.constexpr, LO: tl.constexpr,
    ST: tl.constexpr, ACC: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """All that chunk i_c of row and value head i_bh needs. GATES: base-2 gates from p_gates (`given_gates`). p_abc: powers of two by which
    q and k are divided (`powers.py`).

    C = 2^LEVELS, R = 2^FIRST.
    """
    NC = tl.cdiv(T, C)
    b, j = i_bh // HV, i_bh % HV
    o_c = tl.arange(0, C)
    r, c = o_c[:, None], o_c[None, :]
    in_T = i_c * C + o_c < T
    token = tl.cast(b, tl.int64) * T + i_c * C + o_c
    if PREVIOUS:
        moves = tl.where(c == r // R * R - 1, 1.0, 0.0).to(ST)
    A = tl.zeros([C, C], ACC)
    P = tl.zeros([C, C], ACC)
    if p_abc is not None:
        of_q, of_k, _ = divisors(p_abc, i_bh)
    for k0 in tl.range(0, K, KB, num_stages=1):
        o_k = k0 + tl.arange(0, KB)
        inside = in_T[:, None] & (o_k < K)[None, :]
        o_head = (token * H + j // (HV // H))[:, None] * K + o_k[None, :]
        o_value = (token * HV + j)[:, None] * K + o_k[None, :]
        k = tl.load(p_k + o_head, mask=inside, other=0.0)
        q = tl.load(p_q + o_head, mask=inside, other=0.0).to(ACC) * SCALE
        if p_abc is not None:
            k, q = k.to(ACC) * of_k, q * of_q
        k, q = k.to(ST), q.to(ST)
        x = GATES(p_gates, o_value, inside, j * K + o_k, o_k < K, ACC, ASM)
        hi, lo = split_gates(x, ST, LO)
        e = k
        if RULE == 2:
            erase = tl.load(p_erase + o_value, mask=inside, other=0.0).to(ACC)
            e = (erase if GIVEN else k.to(ACC) * erase).to(ST)
        for level in tl.static_range(FIRST, LEVELS):
            # pairs of a row in the second and a key in the first half of a block refer to the first half's end
            half_r, half_c = r >> level, c >> level
            second = (half_r & 1) == 1
            d = gate_sums((half_r == half_c) & ((second & (c <= r)) | ((half_r & 1 == 0) & (c > r))), hi, lo, LO, ACC)
            kf, qf, f = _gated_pair(d, k, q, ASM)
            pairs = (half_r == half_c + 1) & second
            kt = tl.trans(kf)
            P += tl.where(pairs, tl.dot(qf, kt, input_precision="ieee", out_dtype=ACC), 0.0)
            if RULE > 0:
                ef = kf
                if PREVIOUS:
                    # the row before has all but the own gate behind it; of the key at the reference that is nothing, 2^0
                    ef = _moved(moves, f, e, ASM, ACC)
                elif RULE == 2:
                    ef = e * f
                A += tl.where(pairs, tl.dot(ef, kt, input_precision="ieee", out_dtype=ACC), 0.0)
        P += tl.where((r // R == c // R) & (c <= r), tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=ACC), 0.0)
        d = gate_sums(c <= r, hi, lo, LO, ACC)
        k_start, q_hat, f = _gated_pair(d, k, q, ASM)
        tl.store(p_q_hat + o_value, q_hat, mask=inside)
        if RULE > 0:
            e_hat = k_start
            if PREVIOUS:
                e_hat = _gated(gate_sums(c // R < r // R, hi, lo, LO, ACC), e, ASM)
            elif RULE == 2:
                e_hat = e * f
            tl.store(p_e_hat + o_value, e_hat, mask=inside)
        tl.store(p_k_hat + o_value, _gated(gate_sums(c > r, hi, lo, LO, ACC), k, ASM), mask=inside)
        whole = tl.exp2(tl.sum(x, 0))
        tl.store(p_whole + (tl.cast(i_bh, tl.int64) * NC + i_c) * K + o_k, whole, mask=o_k < K)
    o_square = (tl.cast(i_bh, tl.int64) * NC + i_c) * C * C + r * C + c
    tl.store(p_Pp + o_square, P.to(ST))
    if RULE > 0:
        if RULE == 1:
            A *= tl.load(p_beta + token * HV + j, mask=in_T, other=0.0).to(ACC)[:, None]
        tl.store(p_Tp + o_square, _inverse(A, r, c, LEVELS, ST, ACC).to(ST))


@triton.jit(do_not_specialize=["T"])
def intra_kernel(
    p_q, p_k, p_g, p_beta, p_erase, p_abc, p_q_hat, p_e_hat, p_k_hat, p_Tp, p_Pp, p_whole, T,
    SCALE: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, RULE: tl.constexpr, PREVIOUS: tl.constexpr,
    GIVEN: tl.constexpr, R: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, FIRST: tl.constexpr, KB: tl.constexpr, LO: tl.constexpr,
    ST: tl.constexpr, ACC: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head, gates given."""
    NC = tl.cdiv(T, C)
    couple(
        p_q, p_k, (p_g,), p_beta, p_erase, p_abc, p_q_hat, p_e_hat, p_k_hat, p_Tp, p_Pp, p_whole,
        tl.program_id(0) // NC, tl.program_id(0) % NC, T, given_gates,
        SCALE, H, HV, K, RULE, PREVIOUS, GIVEN, R, C, LEVELS, FIRST, KB, LO, ST, ACC, ASM,
    )  # fmt: skip


def intra(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor | None, erase: Tensor | None, *,
    scale: float, prediction: str, R: int, config: LaunchConfig, powers: Tensor | None = None,
) -> Saved:  # fmt: skip
    """Saved without W, for aligned tensors."""
    (B, T, H, K), HV = q.shape, g.shape[2]
    C = config.launch["shared"]["C"]
    NC = -(-T // C)
    ST, ACC = solve_dtype(q.dtype), width(q)
    square = lambda: q.new_empty(B, HV, NC * C, C, dtype=ST)
    gated = lambda: q.new_empty(B, T, HV, K, dtype=ST)
    rule = rule_of(beta, erase)
    saved = Saved(
        q_hat=gated(),
        e_hat=gated() if rule else None,
        k_hat=gated(),
        Tp=square() if rule else None,
        Pp=square(),
        whole=q.new_empty(B, HV, NC, K, dtype=ACC),
        W=None,
    )
    run(
        intra_kernel, (B * HV * NC,),
        q, k, g, beta, erase, powers, saved.q_hat, saved.e_hat, saved.k_hat, saved.Tp, saved.Pp, saved.whole, T,
        **intra_constants(config, q.dtype, rule, H=H, HV=HV, K=K, scale=scale, prediction=prediction, R=R),
    )  # fmt: skip
    return saved


def intra_constants(
    config: LaunchConfig, dtype: torch.dtype, rule: int, *,
    H: int, HV: int, K: int, scale: float, prediction: str, R: int,
) -> Constants:  # fmt: skip
    """The constexprs and options of `intra_kernel`."""
    C = config.launch["shared"]["C"]
    constants = dict(config.launch["intra"])
    half = dtype.itemsize == 2
    constants |= {"KB": min(constants["KB"], padded(K)), "ASM": int(half and constants["ASM"] and not interpreted())}
    constants |= {
        "LO": int(half and constants["LO"]),
        "C": C,
        "LEVELS": C.bit_length() - 1,
        "R": R,
        "FIRST": R.bit_length() - 1,
    }
    constants |= {"ST": triton_dtype(solve_dtype(dtype)), "ACC": tl.float64 if dtype == torch.float64 else tl.float32}
    return constants | {"SCALE": scale, "H": H, "HV": HV, "K": K, "RULE": rule} | predicted(prediction)


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """The kernel as each rule launches it, one key head for two value heads."""
    own, solves, wide = (f"*{triton_dtype(x)}" for x in (dtype, solve_dtype(dtype), width(torch.empty(0, dtype=dtype))))
    types = dict.fromkeys(("p_q", "p_k", "p_beta", "p_erase"), own) | {"p_g": wide, "p_whole": wide, "T": "i32"}
    types |= dict.fromkeys(("p_q_hat", "p_e_hat", "p_k_hat", "p_Tp", "p_Pp"), solves)
    types |= {"p_abc": "*fp32"}
    cases = []
    for rule, prediction in RULES:
        constants = intra_constants(config, dtype, rule, H=1, HV=2, K=K, scale=K**-0.5, prediction=prediction, R=1)
        absent = {0: ("p_beta", "p_erase", "p_e_hat", "p_Tp"), 1: ("p_erase",), 2: ("p_beta",)}[rule]
        absent += () if scales(rule, dtype) else ("p_abc",)
        gates = {"p_erase": wide if wide_gates(prediction) else own}
        cases.append(case(intra_kernel, types | gates, constants, absent))
    return cases
