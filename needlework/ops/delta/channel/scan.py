"""The recurrence over chunks of the channel-gate engine: the state stays in registers, transposed, a block of value columns each, as
tiles of its keys (`parts.py`).

    r = beta ∘ (v − ê S)   or   write ∘ v − ê S        W = T' r        o = q̂ S + P' W        S <- e^{GC} ∘ S + k̂ᵀ W

An additive rule has W = v. With powers (`powers.py`) v is v/c, and abc o is written.

Every product is formed transposed (Sᵀ êᵀ, Wᵀ = rᵀ T'ᵀ, …): no accumulator is ever transposed into a first operand.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.common.kernels.parts import (
    cast,
    load_parts,
    load_transposed,
    parts_of,
    plus_products,
    scores,
    store_transposed,
    times,
    zeros,
)
from needlework.ops.common.kernels.tile import load_tile, store_tile
from needlework.ops.common.shapes import width
from needlework.ops.delta.channel.operands import Saved, case, operands, rule_of, scales, triton_dtype
from needlework.ops.delta.inputs import NO_TABLE, OF_TABLE, SlotTable, solve_dtype
from needlework.ops.delta.powers import divisor_of_v, product
from needlework.ops.delta.segments import sequence_of
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import cdiv, padded
from needlework.ops.slots.kernels import power_of, slot_of


@triton.jit
def load_square(x, b, h, i, NC, H: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr):
    """[C C] of chunk i of x [B H NC·C C]."""
    if TMA:
        y = tl.reshape(x.load([b, h, i * C, 0]), [C, C])
    else:
        o_c = tl.arange(0, C)
        y = tl.load(x + ((tl.cast(b, tl.int64) * H + h) * NC + i) * C * C + o_c[:, None] * C + o_c[None, :])
    return y


@triton.jit
def decayed(S, p_chunk, K: tl.constexpr, BK: tl.constexpr, NK: tl.constexpr):
    """e^{GC} ∘ S, of Sᵀ in NK tiles [BV BK]; p_chunk: e^{GC} [K]."""
    found = ()
    for n in tl.static_range(NK):
        o_k = n * BK + tl.arange(0, BK)
        found += (S[n] * tl.load(p_chunk + o_k, mask=o_k < K, other=0.0)[None, :],)
    return found


@triton.jit
def walk(
    S, total, q_hat, e_hat, k_hat, Tp, Pp, p_whole, W, v, p_beta, write, p_abc, o, first, last, j, i_v, T,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RULE: tl.constexpr, SAVE: tl.constexpr, SUM: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr, NS: tl.constexpr, ST: tl.constexpr, ACC: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Sᵀ, NK tiles [BV BK], after chunks first … last − 1 of value head j, and with SUM total [BV] + their outputs, before rounding."""
    NC = tl.cdiv(T, C)
    b = first // tl.maximum(NC, 1)
    o_c = tl.arange(0, C)
    if p_abc is not None:
        of_v, of_o = divisor_of_v(p_abc, b * HV + j, first < last), product(p_abc, b * HV + j, first < last)
    for i in tl.range(first - b * NC, last - b * NC, num_stages=NS):
        t = i * C
        St = cast(S, ST, NK)
        QS = scores(St, load_parts(q_hat, b, t, j, T, HV, K, C, BK, NK, TMA), NK, ACC)
        r = load_tile(v, b, t, j, i_v, T, HV, V, C, BV, TMA).T
        if RULE == 0:
            if p_abc is not None:
                r = r.to(ACC) * of_v[:, None]
            Wt = r.to(ST)
        else:
            r = r.to(ACC)
            if RULE == 2:
                r *= load_tile(write, b, t, j, i_v, T, HV, V, C, BV, TMA).T.to(ACC)
            r -= scores(St, load_parts(e_hat, b, t, j, T, HV, K, C, BK, NK, TMA), NK, ACC)
            if RULE == 1:
                o_t = t + o_c
                beta = tl.load(p_beta + (tl.cast(b, tl.int64) * T + o_t) * HV + j, mask=o_t < T, other=0.0)
                r *= beta.to(ACC)[None, :]
            inverse = load_square(Tp, b, j, i, NC, HV, C, TMA)
            Wt = tl.dot(r.to(ST), inverse.T, input_precision="ieee", out_dtype=ACC).to(ST)
        if SAVE:
            store_tile(W, Wt.T, b, t, j, i_v, T, HV, V, C, BV, TMA)
        S = decayed(S, p_whole + ((tl.cast(b, tl.int64) * HV + j) * NC + i) * K, K, BK, NK)
        S = plus_products(S, Wt, load_parts(k_hat, b, t, j, T, HV, K, C, BK, NK, TMA), NK)
        # after the state, whose chain is what the next chunk waits for
        ot = tl.dot(Wt, load_square(Pp, b, j, i, NC, HV, C, TMA).T, QS, input_precision="ieee", out_dtype=ACC)
        if p_abc is not None:
            ot *= of_o
        store_tile(o, ot.T, b, t, j, i_v, T, HV, V, C, BV, TMA)
        if SUM:
            total += tl.sum(ot, 1)
    return S, total


@triton.jit(do_not_specialize=["slot_stride", "T"])
def scan_kernel(
    q_hat, e_hat, k_hat, Tp, Pp, p_whole, W, v, p_beta, write, p_abc, p_initial_state, o, p_final_state, p_spans,
    p_slots, p_fresh, p_power, slot_stride, p_of, T,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RULE: tl.constexpr, INIT: tl.constexpr, SAVE: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr, NS: tl.constexpr, ST: tl.constexpr, ACC: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """One sequence, value head and block of BV value columns.

    With slot_stride p_final_state is a slot table (`SlotTable`); of the segments of a sequence, p_of, the last one leaves the state. INIT 1: start from p_initial_state [N HV K V]; 2: from the table, whose block no other program has.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV * BV
    i_nh = tl.program_id(0) // NV
    n, j = i_nh // HV, i_nh % HV
    first, last = tl.load(p_spans + 2 * n), tl.load(p_spans + 2 * n + 1)
    o_state = tl.cast(i_nh, tl.int64) * K * V
    S = zeros(BV, BK, NK, ACC)
    if INIT == 1:
        S = load_transposed(p_initial_state + o_state, True, i_v, K, V, BK, NK, BV, ACC)
    if slot_stride is not None:
        i_s, ends = sequence_of(p_of, n)
        i_s = tl.where(first < last, i_s, 0)  # an empty segment may be of none
        slot, resumed = slot_of(p_slots, p_fresh, i_s)
        power, inverse = power_of(p_power, i_s * HV + j)
        p_slot = p_final_state + slot * slot_stride + j * (K * V)
    if INIT == 2:
        S = times(load_transposed(p_slot, resumed, i_v, K, V, BK, NK, BV, ACC), inverse, NK)
    S, _ = walk(
        S, 0, q_hat, e_hat, k_hat, Tp, Pp, p_whole, W, v, p_beta, write, p_abc, o, first, last, j, i_v, T,
        HV, K, V, RULE, SAVE, 0, C, BK, NK, BV, NS, ST, ACC, TMA,
    )  # fmt: skip
    if slot_stride is None:
        store_transposed(p_final_state + o_state, S, True, i_v, K, V, BK, NK, BV)
    else:
        leaves = (first < last) & ends & (slot >= 0)
        # a number that two threads hold is read by both before one of them writes it
        tl.debug_barrier()
        store_transposed(p_slot, times(S, power, NK), leaves, i_v, K, V, BK, NK, BV)


def scan(
    saved: Saved, v: Tensor, beta: Tensor | None, write: Tensor | None, initial_state: Tensor | None, spans: Tensor, *,
    config: LaunchConfig, save: bool, powers: Tensor | None = None, table: SlotTable | None = None, of: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """o [B T HV V], the final state [N HV K V] and W, for aligned tensors and sequences, or segments, at `spans` [N 2].

    table: where each sequence leaves its state, returned for the final state; without an initial state it starts there. of: `Segments.of`.
    """
    (_, T, HV, V), K = v.shape, saved.q_hat.shape[-1]
    rule = rule_of(beta, write)
    constants = scan_constants(config, v.dtype, rule, HV=HV, K=K, V=V)
    init = int(initial_state is not None) if table is None or initial_state is not None else 2
    constants |= {"INIT": init, "SAVE": int(save)}
    BK, BV = constants["BK"], constants["BV"]
    o = torch.empty_like(v)
    final = v.new_empty(len(spans), HV, K, V, dtype=width(v)) if table is None else table.state
    W = v.new_empty(v.shape, dtype=solve_dtype(v.dtype)) if save else None
    rows, square, _ = operands(config)
    run(
        scan_kernel, (len(spans) * HV * cdiv(V, BV),),
        rows(saved.q_hat, BK), rows(saved.e_hat, BK), rows(saved.k_hat, BK), square(saved.Tp), square(saved.Pp), saved.whole,
        rows(W, BV), rows(v, BV), beta, rows(write, BV), powers, initial_state, rows(o, BV), final, spans,
        *(NO_TABLE if table is None else table.arguments(of)), T, **constants,
    )  # fmt: skip
    return o, final, W


def scan_constants(config: LaunchConfig, dtype: torch.dtype, rule: int, *, HV: int, K: int, V: int) -> Constants:
    """The constexprs and options of `scan_kernel`, but INIT and SAVE."""
    constants, (BK, NK) = dict(config.launch["scan"]), parts_of(K)
    constants |= {
        "C": config.launch["shared"]["C"],
        "BK": BK,
        "NK": NK,
        "BV": min(constants["BV"], padded(V)),
        "TMA": int(config.tma),
    }
    constants |= {"ST": triton_dtype(solve_dtype(dtype)), "ACC": tl.float64 if dtype == torch.float64 else tl.float32}
    return constants | {"HV": HV, "K": K, "V": V, "RULE": rule}


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """The kernel as each rule launches it, with a state to start from and the backward's tensors asked for, and on a slot table."""
    own, solves, wide = (str(triton_dtype(x)) for x in (dtype, solve_dtype(dtype), width(torch.empty(0, dtype=dtype))))
    types = dict.fromkeys(("p_whole", "p_initial_state", "p_final_state"), f"*{wide}") | {
        "p_beta": f"*{own}",
        "p_spans": "*i32",
        "p_abc": "*fp32",
        "T": "i32",
    }
    types |= OF_TABLE
    cases = []
    for rule in (0, 1, 2):
        constants = scan_constants(config, dtype, rule, HV=2, K=K, V=V)
        C, BK, BV = (constants[name] for name in ("C", "BK", "BV"))
        blocks = dict.fromkeys(("q_hat", "e_hat", "k_hat"), (solves, BK)) | dict.fromkeys(("v", "write", "o"), (own, BV))
        blocks |= {"Tp": (solves, C), "Pp": (solves, C), "W": (solves, BV)}
        for name, (kind, columns) in blocks.items():
            types[name] = f"tensordesc<{kind}[1, 1, {C}, {columns}]>" if config.tma else f"*{kind}"
        absent = {0: ("e_hat", "Tp", "p_beta", "write"), 1: ("write",), 2: ("p_beta",)}[rule]
        absent += () if scales(rule, dtype) else ("p_abc",)
        wide_gate = {"write": types["v"].replace(own, wide)}  # callers give it so, or in v's dtype
        cases.append(case(scan_kernel, types | wide_gate, constants | {"INIT": 1, "SAVE": 1}, (*absent, *OF_TABLE)))
        scaled = () if rule == 0 else ("p_power",)
        in_place, by_segment = ("p_initial_state", "p_of"), ()
        for init, more in ((2, in_place), (1, by_segment)):
            cases.append(case(scan_kernel, types, constants | {"INIT": init, "SAVE": 0}, (*absent, "W", *scaled, *more)))
    return cases
