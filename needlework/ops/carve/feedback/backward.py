"""CARVE's backward: content chunks from the last to the first, each the delta engine's backward on its span of every sequence.

What waits for no content chunk is done for all rows at once: l before the chain, df and db after it. The chain is five launches a
content chunk: `enter_kernel` (the engine's adjoint in it), the engine's replay and pairs, `leave_kernel` (`content_bwd.py`).
Buffers, descriptors and constants are made once; from one content chunk to the next four pointers and a number change.

Launches begin before the one ahead of them is done where they can (PDL). What holds then: enter, replay, pairs and leave wait for
the launch before them before they read what the chain writes, and only when all their programs have waited does the next launch
begin: it finds everything done but the launch just before it. `couplings` needs no more than that, runs beside the replay and
ends after it, so that a program that waits for it has waited for the replay too. So nothing overtakes what it reads, and whatever is
written again for the next content chunk was read by launches that are done.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from needlework.ops.carve.arguments import CarveInputs
from needlework.ops.carve.feedback.content_bwd import STEP, activation_kernel, enter_kernel, leave_kernel, retention_kernel
from needlework.ops.carve.feedback.forward import overlapping
from needlework.ops.carve.feedback.layout import ByChunk, Layout
from needlework.ops.carve.feedback.repeated import VARIES, Repeated, launch_all
from needlework.ops.common.shapes import width
from needlework.ops.delta.channel.backward import argument_type, channel_constants
from needlework.ops.delta.channel.intra_bwd import couplings, launch_pairs, pairs
from needlework.ops.delta.channel.operands import Saved, case, operands, triton_dtype
from needlework.ops.delta.channel.scan_bwd import replay, replay_forward, replay_reverse
from needlework.ops.delta.inputs import DeltaInputs, solve_dtype
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig, interpreted
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import cdiv, next_power_of_2, padded

GROUP = 8  # kernel chunks of a program that passes over rows
FEW = 32  # kernel chunks of a content chunk that are all anchors: what is kept of each is small, and `pairs` is a program for each


class Made(NamedTuple):
    """What waits for no content chunk."""

    l: Tensor  # [B T H K]
    beta: Tensor  # [B T H]
    u: Tensor  # [slots H K] b_bias + W₂ z
    z: Tensor  # [slots H r] tanh(W₁ m)
    spans: Tensor  # [longest N.. 2], by content chunk from here on
    slots: Tensor  # [longest N..]
    do_peaks: Tensor  # [longest N H groups]


def backward(
    do: Tensor, dS: Tensor, dm: Tensor, dtotal: Tensor, inputs: CarveInputs, b_bias: Tensor,
    layout: Layout, by_chunk: ByChunk, kept_S: Tensor, kept_m: Tensor, saved: Saved,
    *, content_chunk: int, prediction: str, scale: float, R: int, config: LaunchConfig,
) -> tuple[CarveInputs, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the aligned inputs, of b_bias and of the S, m and total carried in.

    Tensors are contiguous, in rows as `layout` says, T > 0; dS, dm and dtotal, in `width(q)`, are used up.

    Of R rows a token, f and b lie in the first and q and do in the last; elsewhere, and in gaps, f = b = −∞ and the rest is 0. w are
    logits. kept_S [slots H K V], kept_m [slots H V]: what the forward started a content chunk from.
    """
    (q, _, v, f, b, w), (A_log, dt_bias, w1, w2) = inputs.tokens, inputs.parameters
    (T, H, K), V = q.shape[1:], v.shape[-1]
    N, rank, ACC = layout.N, len(w1), width(q)
    constants = _constants(config, q.dtype, H=H, K=K, V=V, rank=rank, prediction=prediction, R=R, parts=layout.parts)

    spans, slots, unused = by_chunk
    m = kept_m if unused is None else kept_m.masked_fill(unused, 0)
    z = torch.tanh(m @ w1.to(ACC).T)  # [slots H r]
    u = b_bias.to(ACC) + z @ w2.to(ACC).T
    beta = torch.sigmoid(w.to(ACC))

    groups = cdiv(layout.parts, GROUP)
    every = (layout.longest * groups, H, N)
    gates = spans, slots, f, b, A_log, dt_bias, u
    l, do_peaks = torch.empty_like(f, dtype=_gate_dtype(q.dtype)), q.new_empty(layout.longest, N, H, groups, dtype=ACC)
    run(retention_kernel, every, *gates, do, l, do_peaks, T, groups, **constants["retention"])
    made = Made(l, beta, u, z, spans, slots, do_peaks)
    dq, dk, dv, dl, dbeta, dcontent, dz, dS = _chain(
        do, dS, dm, dtotal, inputs, made, layout, kept_S, saved,
        content_chunk=content_chunk, scale=scale, config=config, constants=constants,
    )  # fmt: skip
    del l, made
    df, db = torch.empty_like(f), torch.empty_like(b)
    terms = q.new_empty(2, layout.longest * N * groups, H, K, dtype=ACC)
    run(activation_kernel, every, *gates, dl, df, db, *terms, T, groups, **constants["activation"])
    # in memory of their own: an operator's results may not share it
    dA_log, ddt_bias = (x.clone() for x in terms.sum(1))
    dw = (beta * (1 - beta) * dbeta).to(w.dtype)
    dw1, dw2 = dz.flatten(0, 1).T @ m.flatten(0, 1), dcontent.flatten(0, 1).T @ z.flatten(0, 1)
    pairs = zip((dA_log, ddt_bias, dw1, dw2), inputs.parameters, strict=True)
    gradients = CarveInputs(dq, dk, dv, df, db, dw, *(dx.to(x.dtype) for dx, x in pairs))
    return gradients, dcontent.sum(0).to(b_bias.dtype), dS, dm, dtotal


def _gate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of l: `pairs` rounds it to float16 in base 2, and once more before that is nothing to bfloat16; float16 would miss its budget."""
    return torch.float16 if dtype == torch.bfloat16 else width(torch.empty(0, dtype=dtype))


def _chain(
    do: Tensor, dS: Tensor, dm: Tensor, dtotal: Tensor, inputs: CarveInputs, made: Made, layout: Layout, kept_S: Tensor, saved: Saved,
    *, content_chunk: int, scale: float, config: LaunchConfig, constants: dict[str, Constants],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k, v, l, β, of every content chunk's u and W₁ m, and of S; dm and dtotal in place."""
    q, k, v, _, b, _ = inputs.tokens
    l, beta, u, z, spans, slots, do_peaks = made
    B, T, H, K = q.shape
    V, N, ST, C = v.shape[-1], layout.N, solve_dtype(q.dtype), config.launch["shared"]["C"]
    rows = lambda D: q.new_empty(B, T, H, D, dtype=ST)
    NS = constants["pairs"]["NS"]
    scaled, dr, dq_hat, de_hat, dk_hat = rows(V), rows(V), *(q.new_empty(B, T, H * NS, K, dtype=ST) for _ in range(3))
    dq, dk, dv, dbeta = (torch.empty_like(x) for x in (q, k, v, beta))
    dl = torch.empty_like(l, dtype=dS.dtype)
    dcontent, dz = torch.zeros_like(u), torch.zeros_like(z)
    x, powers = dS.new_empty(B * -(-T // C) + N, H * NS, K), dS.new_ones(layout.longest + 1, STEP.value)
    largest = torch.zeros_like(powers, dtype=torch.int32)

    joined, back = "replay" in constants, constants["enter"]
    tokens, square, states = operands(config)
    kp, bv = back["KP"], back["BV"]
    dS_peaks = dS.abs().amax((2, 3))[..., None].repeat(1, 1, cdiv(V, bv))
    # dS at the end of every kernel chunk; or S at the start of every anchor, and dS at the end of the content chunk
    most = cdiv(layout.parts, constants["pairs"]["ANCHOR"])
    kept, dfinal = q.new_empty(N * most, H, K, V, dtype=ST), None if joined else torch.empty_like(dS)
    enter_args = (
        tokens(do, bv), *(tokens(x, kp) for x in (saved.q_hat, saved.e_hat, saved.k_hat)), square(saved.Pp), square(saved.Tp),
        saved.whole, beta, dtotal, VARIES, VARIES, dS, dfinal, states(kept, kp, bv) if joined else None,
        tokens(scaled, bv), tokens(dr, bv), dS_peaks, T, most,
    )  # fmt: skip
    forth = constants["replay" if joined else "replay_forward"]
    bk, vp = forth["BK"], forth["VP"]
    read = tuple(tokens(x, vp) for x in (saved.W, scaled, dr))
    forth_args = (
        *read, tokens(saved.k_hat, bk), saved.whole, kept_S, VARIES, tokens(dq_hat, bk), tokens(de_hat, bk), states(kept, bk, vp),
        *((tokens(dk_hat, bk), x) if joined else ()), T, most,
    )  # fmt: skip
    feedback = (
        spans, slots, layout.ends, b, u, dl, z, inputs.w1, inputs.w2, do_peaks, dS_peaks, powers, dcontent, dz, dm, dtotal, largest,
        T, layout.L, layout.longest, content_chunk, do_peaks.shape[-1],
    )  # fmt: skip

    enter = Repeated(enter_kernel, (cdiv(V, bv), H, N), back, VARIES, *enter_args)
    replay_forth = Repeated(replay if joined else replay_forward, (cdiv(K, bk) * NS, H, N), forth, VARIES, *forth_args)
    launches = enter, replay_forth
    if not joined:
        again = constants["replay_reverse"]
        bk = again["BK"]
        again_args = (
            *read, tokens(saved.q_hat, bk), tokens(saved.e_hat, bk), saved.whole, beta, dfinal, states(kept, bk, vp),
            tokens(dk_hat, bk), x, T, most,
        )  # fmt: skip
        replay_back = Repeated(replay_reverse, (cdiv(K, bk) * NS, H, N), again, VARIES, *again_args)
        launches += (replay_back,)
    couple, pair = launch_pairs(
        VARIES, scaled, dr, saved.W, DeltaInputs(q, k, v, l, beta), dq_hat, de_hat, dk_hat, x, VARIES, DeltaInputs(dq, dk, dv, dl, dbeta),
        scale=scale, longest=layout.parts, sequences=N, couple=constants["couplings"], channels=constants["pairs"],
        launch=lambda kernel, grid, *args, **given: Repeated(kernel, grid, given, *args),
    )  # fmt: skip
    leave = Repeated(leave_kernel, (H, N, 1), constants["leave"], *feedback, VARIES)

    def every_chunk() -> None:
        leave(layout.longest)
        own_and_next = (x.unfold(0, 2, 1).unbind() for x in (powers, largest))
        each = list(zip(spans.unbind(), slots.unbind(), *own_and_next, strict=True))
        for i in reversed(range(layout.longest)):
            span, slot, power, bound = each[i]
            enter(span, bound, power)
            replay_forth(span, slot)
            if not joined:
                replay_back(span)
            couple(span, power)
            pair(span, power)
            leave(i)

    launch_all(every_chunk, (*launches, couple, pair, leave), spans, slots, powers, largest)
    return dq, dk, dv, dl, dbeta, dcontent, dz, dS * powers[0, 0]


def _constants(
    config: LaunchConfig, dtype: torch.dtype, *, H: int, K: int, V: int, rank: int, prediction: str, R: int, parts: int
) -> dict[str, Constants]:
    """Kernel -> its constexprs and options: the engine's, with every chunk an anchor where they are few, and the feedback's."""
    engine = channel_constants(config, dtype, 1, H=H, HV=H, K=K, V=V, prediction=prediction, R=R)
    enter, overlap = engine.pop("adjoint"), overlapping(config)
    if parts <= FEW:
        for name in ("replay_forward", "replay_reverse", "pairs"):
            engine[name]["ANCHOR"] = 1
        if V <= 256:  # more values of S and of dS are more than the registers hold
            engine["replay"] = engine.pop("replay_forward") | overlap
            del engine["replay_reverse"], engine["replay"]["ANCHOR"], engine["replay"]["NS"]
            # its memory keeps a third program off a multiprocessor: programs that begin early would crowd where room is first
            enter["STAGES"] += overlap["PDL"]
    for name in ("couplings", "pairs"):
        engine[name] |= overlap
    C, KP, VP = config.launch["shared"]["C"], padded(K), padded(V)
    half = {"HALF": int(solve_dtype(dtype) == torch.float16)}
    asm = {"ASM": int(half["HALF"] and not interpreted())}
    facts = {"H": H, "K": K, "C": C, "ACC": tl.float64 if dtype == torch.float64 else tl.float32}
    value, grouped = {"V": V, "VP": VP}, {"ROWS": 16, "GROUP": GROUP, "num_warps": 4 if K <= 128 else 8}
    # passes over rows at the memory's pace: on Hopper, whose shared memory is large, copied two steps ahead
    grouped |= {"STAGES": 3 if config.tma else 1}
    blocks = cdiv(V, enter["BV"])
    return engine | {
        "retention": facts | value | grouped | asm | {"KP": KP},
        "enter": enter | half | overlap,
        # in the chain, where a program waits for memory again and again: warps enough to ask for all of it at once
        "leave": facts | half | overlap | {
            "V": V, "KP": KP, "RANK": rank, "RP": next_power_of_2(rank), "VB": min(VP, 128), "ROWS": 128 if K <= 128 else 64,
            "BG": next_power_of_2(cdiv(parts, GROUP)), "BLOCKS": blocks, "BB": next_power_of_2(blocks),
            "num_warps": 16,
        },
        "activation": facts | grouped | asm | {"KP": KP},
    }  # fmt: skip


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """The feedback's kernels, and the engine's as they are launched here."""
    own, solves, wide = (str(triton_dtype(x)) for x in (dtype, solve_dtype(dtype), width(torch.empty(0, dtype=dtype))))
    constants = {
        parts: _constants(config, dtype, H=2, K=K, V=V, rank=32, prediction=prediction, R=1, parts=parts)
        for parts, prediction in ((8, "previous"), (FEW + 1, "decayed"))
    }
    types = dict.fromkeys(("p_f", "p_b", "p_do", "p_df", "p_db"), f"*{own}") | dict.fromkeys(("p_spans", "p_slots"), "*i32")
    gate = f"*{triton_dtype(_gate_dtype(dtype))}"
    types |= {"p_l": gate, "p_ends": "*i64", "p_largest": "*i32"}
    C, KP, BV = (constants[8]["enter"][name] for name in ("C", "KP", "BV"))
    blocks = {"do": (own, C, BV), **dict.fromkeys(("scaled", "dr"), (solves, C, BV)), "kept": (solves, KP, BV)}
    blocks |= dict.fromkeys(("P", "inverse"), (solves, C, C)) | dict.fromkeys(("q_hat", "e_hat", "k_hat"), (solves, C, KP))
    for name, (kind, rows, columns) in blocks.items():
        types[name] = f"tensordesc<{kind}[1, 1, {rows}, {columns}]>" if config.tma else f"*{kind}"
    kernels = {"retention": retention_kernel, "enter": enter_kernel, "leave": leave_kernel, "activation": activation_kernel}
    for kernel in kernels.values():
        types |= {name: f"*{wide}" if name.startswith("p_") else "i32" for name in kernel.arg_names if name not in types}
    joined = "replay" in constants[8]
    cases = [
        case(kernel, types, constants[8][name], ("p_dfinal",) if joined else ("kept",)) for name, kernel in kernels.items()
    ]
    if joined:
        cases.append(case(enter_kernel, types, constants[FEW + 1]["enter"], ("kept",)))
    ours = dict.fromkeys(("p_beta", "p_dbeta"), f"*{wide}") | {"p_slots": "*i32", "p_g": gate}
    for kernel in (replay, replay_forward, replay_reverse, couplings, pairs):
        for given in (constants[parts].get(kernel.__name__) for parts in constants):
            if given is not None:
                columns = {"K": given.get("BK", 0), "V": given.get("VP", 0), "C": C} if config.tma else {}
                types = {n: argument_type(n, columns, own, solves, wide) for n in kernel.arg_names} | ours
                cases.append(case(kernel, types, given, ("p_erase", "p_write", "p_dwrite", "p_derase")))
    return cases
