"""What the scalar gate's segments do to a state, for `segments.py`: N from no state, M from the identity, in one launch.

    Rᵀ = β ⊙ (vᵀ − e^G ⊙ (Sᵀkᵀ + λ Sᵀqᵀ))    Wᵀ = Rᵀ Tᵀ    Sᵀ ← e^{G_C} Sᵀ + (e^{G_C − G} ⊙ W)ᵀ k

`scan.py` without what it writes a token: a program walks one segment for BV columns of N, or of M, whose values are zeros.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.common.kernels.parts import cast, load_parts, scores
from needlework.ops.common.kernels.tile import load_tile, token_tile
from needlework.ops.delta.inputs import DeltaInputs, solve_dtype
from needlework.ops.delta.powers import divisor_of_v
from needlework.ops.delta.scalar.operands import Saved, forms, inverse, scan_constants
from needlework.ops.delta.scalar.scan import continued, factors, flag_overflow, odd_of
from needlework.ops.delta.segments import Segments, only_one, sequence_of
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import NAMES, accumulator, cdiv


@triton.jit(do_not_specialize=["T", "NR"])
def transitions_kernel(
    x_q, x_k, x_v, x_T, p_E, p_N, p_M, p_cum, p_of, p_overflow, p_abc, T, NR,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    KB: tl.constexpr, NK: tl.constexpr, NS: tl.constexpr, TMA: tl.constexpr, ACC: tl.constexpr, ST: tl.constexpr,
    TT: tl.constexpr, SOLVE: tl.constexpr, ERASE: tl.constexpr, LAM: tl.constexpr, SAVE: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """Of a sequence's last segment nothing but M is made, and that with SAVE, for the backward; of one that is the only one nothing. Without
    ERASE M is one decay, which the first tile of N finds."""
    NV: tl.constexpr = (V + BV - 1) // BV
    PER: tl.constexpr = NV + (K + BV - 1) // BV * ERASE
    if FORM == 2:
        if tl.load(p_overflow) == 0:
            return
    i_nh = tl.program_id(0) // PER
    i_tile = tl.program_id(0) % PER
    i_n = i_nh // HV
    i_h = i_nh % HV
    i_k = i_h // (HV // H)
    of_values = i_tile < NV
    start = tl.load(p_cum + i_n)
    count = tl.load(p_cum + i_n + 1) - start
    _, last = sequence_of(p_of, i_n)
    makes_M = i_tile == 0
    if ERASE:
        makes_M = ~of_values
    wanted = (count > 0) & ~(only_one(p_of, i_n) | (last & ~makes_M))
    if not SAVE:
        wanted &= ~last
    if wanted:
        chunks_of_row = NR // C
        i_b = start // chunks_of_row
        c_row = start - i_b * chunks_of_row
        i_bh = i_b * HV + i_h
        if p_abc is not None:
            # a segment without chunks may lie past the last row
            by_v = divisor_of_v(p_abc, i_bh, count > 0)
        # past the last value there are zeros, which are not fetched
        i_v = tl.where(of_values, i_tile * BV, NV * BV)
        o_c, o_k = tl.arange(0, C), tl.arange(0, KB)
        o_v = tl.where(of_values, i_tile, i_tile - NV) * BV + tl.arange(0, BV)
        S = ()
        for n in tl.static_range(NK):
            S += (tl.where((o_v[:, None] == o_k[None, :] + n * KB) & (i_tile >= NV), 1.0, 0.0).to(ACC),)
        e_all = tl.full([], 1.0, ACC)
        for i in tl.range(0, count, num_stages=NS):
            i_t = (c_row + i) * C
            # all loads first: they share barriers
            b_k = cast(load_parts(x_k, i_b, i_t, i_k, T, H, K, C, KB, NK, TMA), ST, NK)
            if LAM:
                b_q = cast(load_parts(x_q, i_b, i_t, i_k, T, H, K, C, KB, NK, TMA), ST, NK)
            if ERASE:
                b_T = load_tile(x_T, i_bh, i_t, 0, 0, NR, 1, C, C, C, TMA).to(TT)
            b_v = load_tile(x_v, i_b, i_t, i_h, i_v, T, HV, V, C, BV, TMA)

            p_factor = factors(p_E, i_bh * chunks_of_row + c_row + i, C)
            w = tl.trans(b_v).to(ACC)
            if p_abc is not None:
                w *= by_v[None, :]
            if ERASE:
                b_S = cast(S, ST, NK)
                erased = scores(b_S, b_k, NK, ACC)
                if LAM:
                    asked = scores(b_S, b_q, NK, ACC)
                if LAM:
                    erased += tl.load(p_factor + 2 * C + o_c)[None, :] * asked
                beta = tl.load(p_factor + o_c)
                e_erased = tl.load(p_factor + C + o_c)
                b_rest = (beta[None, :] * w + e_erased[None, :] * erased).to(TT)
                w = tl.dot(b_rest, tl.trans(b_T), input_precision=SOLVE, out_dtype=ACC)
            b_left = (w * tl.load(p_factor + 5 * C + o_c)[None, :]).to(ST)
            e_whole = -tl.load(p_factor + 5 * C - 1)
            e_all *= e_whole
            S = continued(S, e_whole, b_left, b_k, NK, ACC)

        if FORM == 1:
            flag_overflow(p_overflow, odd_of(S, NK))
        for n in tl.static_range(NK):
            if of_values:
                _store(p_N, S[n], i_nh, n * KB, o_v, K, V, KB)
            elif ERASE:
                _store(p_M, S[n], i_nh, n * KB, o_v, K, K, KB)
        if not ERASE:
            tl.store(p_M + i_nh, e_all, mask=makes_M)


@triton.jit
def _store(p, b, i_nh, i_k, o_v, K: tl.constexpr, D: tl.constexpr, KB: tl.constexpr):
    """Sᵀ [BV KB] into [.. K D]."""
    o_k = i_k + tl.arange(0, KB)
    o = o_k[None, :] * D + o_v[:, None]
    tl.store(p + tl.cast(i_nh, tl.int64) * (K * D) + o, b, mask=(o_v < D)[:, None] & (o_k < K)[None, :])


def transitions(
    operands: DeltaInputs, saved: Saved, segments: Segments,
    found: tuple[Tensor, Tensor] | None = None, *, config: LaunchConfig, save: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """N [R HV K V] and M [R HV K K], of additive rules [R HV 1], of aligned tokens; q and k are operands.

    N of a sequence's last segment is left as it is, without `save` its M too: nothing follows it. So are both of a sequence's only one.
    found: both, to be found again by the bf16 fallback.
    """
    q, k, v, beta, lam = operands.q, operands.k, operands.v, operands.beta, operands.lam
    R, cum = segments.align.N, segments.align.cum
    (_, T, HV, V), K, NR = v.shape, k.shape[3], saved.G.shape[2]
    form = forms(v.dtype, lam is not None)[0] if found is None else 2
    constants = transitions_constants(config, v.dtype, k.shape[2], HV, K, V, beta is not None, lam is not None, save, form)
    C, BV, KB = (constants[name] for name in ("C", "BV", "KB"))
    tile = lambda x, D: token_tile(x, C, D) if config.tma else x
    N, M = found or places(saved.G, R, HV, K, V, erases=beta is not None)
    run(
        transitions_kernel, (R * HV * (cdiv(V, BV) + (0 if beta is None else cdiv(K, BV))),),
        None if lam is None else tile(q, KB), tile(k, KB), tile(v, BV),
        None if saved.Tp is None else tile(saved.Tp.view(-1, NR, 1, C), C), saved.E, N, M, cum, segments.of, saved.overflow,
        operands.powers, T, NR, **constants,
    )  # fmt: skip
    return N, M


def places(like: Tensor, R: int, HV: int, K: int, V: int, *, erases: bool) -> tuple[Tensor, Tensor]:
    """For N, or states of as many segments, and for M."""
    return like.new_empty(R, HV, K, V), like.new_empty(R, HV, *((K, K) if erases else (1,)))


def transitions_constants(
    config: LaunchConfig, dtype: torch.dtype, H: int, HV: int, K: int, V: int, erase: int, lam: int, save: int, form: int
) -> Constants:
    """`scan`'s, as far as they concern it."""
    constants = scan_constants(config, dtype, H, H, HV, K, V, erase, lam, False, False, save, form)
    used = (*transitions_kernel.arg_names, "num_warps", "num_stages", "maxnreg")
    return {name: x for name, x in constants.items() if name in used}


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """The kernel as Q-Delta launches it for training, in each FORM, and as a scaled additive rule does."""
    own, st, acc = NAMES[dtype], NAMES[solve_dtype(dtype)], NAMES[accumulator(dtype)]
    cases = []
    launched = [(1, form) for form in forms(dtype, True)] + [(0, 0)] * (dtype == torch.bfloat16)
    for erase, form in launched:
        constants = transitions_constants(config, dtype, 2, 2, K, V, erase, erase, 1, form)
        constants |= {"p_abc": None} if erase else {}
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in constants}
        C, BV, KB = (constants[name] for name in ("C", "BV", "KB"))
        types = dict.fromkeys(("p_E", "p_N", "p_M"), f"*{acc}")
        types |= {"p_cum": "*i32", "p_of": "*i32", "p_overflow": "*i32", "p_abc": "*fp32", "T": "i32", "NR": "i32"}
        for name, kind, width in (("x_q", st, KB), ("x_k", st, KB), ("x_v", own, BV), ("x_T", NAMES[inverse(dtype)], C)):
            types[name] = f"tensordesc<{kind}[1, 1, {C}, {width}]>" if config.tma else f"*{kind}"
        signature = {name: types[name] for name in transitions_kernel.arg_names if name not in constants}
        cases.append(Case(transitions_kernel, signature, constants, options))
    return cases
