"""The order of the forward's kernels: chunks, the transitions of segments, the walk of the chunks; for half types with λ its bf16
fallback behind each. Tensors are aligned."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from needlework.ops.common.alignment import Alignment
from needlework.ops.common.kernels.tile import token_tile
from needlework.ops.delta.inputs import NO_TABLE, OF_TABLE, DeltaInputs, SlotTable, solve_dtype
from needlework.ops.delta.scalar.intra import intra
from needlework.ops.delta.scalar.operands import (
    Saved,
    flags,
    forms,
    group_of,
    inverse,
    inverse_constants,
    scan_constants,
    slots_of,
)
from needlework.ops.delta.scalar.scan import scan
from needlework.ops.delta.scalar.transitions import transitions
from needlework.ops.delta.segments import Segments, fix_up, segmented
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import NAMES, TYPES, accumulator, padded

LEAST_PROGRAMS = 2048  # of `intra`, two or three times as many as an H100 holds at once


def forward(
    inputs: DeltaInputs, alignment: Alignment, *,
    scale: float, config: LaunchConfig, save: bool, length: int = 0, table: SlotTable | None = None,
) -> tuple[Tensor, Tensor, Saved]:  # fmt: skip
    """o, the final state and `Saved` of aligned tokens, in segments of `length` chunks (0: none); without `save` neither W nor A is made.

    table: has the states of sequences with tokens, before and after, and is returned for the final state.
    """
    (_, T, HV, V), K, acc = inputs.v.shape, inputs.k.shape[3], accumulator(inputs.q.dtype)
    o, launched = torch.empty_like(inputs.v), forms(inputs.q.dtype, inputs.lam is not None)
    saved = Saved.empty(inputs, T, config.launch["shared"]["C"], save=save)
    if o.numel():
        launch_intra(inputs, saved, scale=scale, config=config)
    operands = saved.operands(inputs)
    segments, by_segment = None, None
    if length:
        segments = segmented(alignment, config.launch["shared"]["C"], length)
        alignment = segments.align
        N, M = by_segment = transitions(operands, saved, segments, config=config, save=save)
        saved = saved._replace(
            initial_state=fix_up(M, N, inputs.initial_state, segments.first, config=config, reverse=False, table=table), M=M
        )
        operands = operands._replace(initial_state=saved.initial_state)
    # no chunk: the kernels do not touch the state
    untouched = alignment.maps is not None or T == 0
    if table is not None:
        state = table.state
    elif operands.initial_state is not None:
        initial_state = operands.initial_state.contiguous()
        operands = operands._replace(initial_state=initial_state)
        state = initial_state.to(acc, copy=True) if untouched else torch.empty_like(initial_state, dtype=acc)
    else:
        state = (torch.zeros if untouched else torch.empty)(alignment.N, HV, K, V, dtype=acc, device=o.device)
    if o.numel():
        walk = walk_of(operands, saved, o, state, alignment, table, segments, scale=scale, config=config)
        for form in launched:
            if segments is not None and form == 2:
                N, M = transitions(operands, saved, segments, by_segment, config=config, save=save)
                into = saved.initial_state
                assert into is not None  # of segments
                # FORM 1 has written the table; the first segments' states are what it held
                start = table and SlotTable(segments.begun(into), None, None)
                fix_up(
                    M, N, inputs.initial_state, segments.first,
                    config=config, reverse=False, into=into, when=saved.overflow, table=start,
                )  # fmt: skip
            walk(form)
    return o, state if segments is None or table else segments.ended(state), saved


def launch_intra(inputs: DeltaInputs, saved: Saved, *, scale: float, config: LaunchConfig) -> None:
    """T, P' and the decay of every chunk; A where it is given a place; copies of q, k and q_read as operands, likewise."""
    q, k, q_read = inputs.q, inputs.k, inputs.q_read
    (B, T, HV, _), NR = inputs.v.shape, saved.Pp.shape[2]
    r, r_copy = (q, saved.q) if q_read is None else (q_read, saved.q_read)
    copies, saves = saved.k is not None, saved.A is not None
    assert copies or inputs.powers is None  # what follows reads the scaled rows, which are the copies
    constants = intra_constants(config, q.dtype, k.shape[2], r.shape[2], HV, k.shape[3], *flags(inputs), copies, saves)
    programs = -(-NR // constants["R"]) * B * HV
    heads = heads_of_program(group_of(k.shape[2], r.shape[2], HV), programs) if constants["SHARED"] else 1
    run(
        intra, (programs // heads,),
        r, q, k, inputs.g, inputs.beta, inputs.lam, saved.Tp, saved.Pp, saved.A, saved.G, saved.E, r_copy, saved.q, saved.k,
        inputs.powers, scale, T, NR, heads, **constants,
    )  # fmt: skip


def walk_of(
    operands: DeltaInputs, saved: Saved, o: Tensor, state: Tensor, alignment: Alignment,
    table: SlotTable | None = None, segments: Segments | None = None, *, scale: float, config: LaunchConfig,
) -> Callable[[int], None]:  # fmt: skip
    """What launches the scan in a FORM: o, the final state and, where it is given a place, W. q, k, q_read are operands; o and v share
    the caller's type. table: what `state` is a part of; without segments the states to start from lie there too."""
    q, k, v, initial_state = operands.q, operands.k, operands.v, operands.initial_state
    first, *others = forms(v.dtype, operands.lam is not None)
    in_place = table is not None and segments is None
    if in_place and others:
        # the first FORM writes the table: what it starts from is kept for the next one
        initial_state = state.new_empty(alignment.N, *state.shape[1:])
    init = lambda form: 2 if in_place and form == first else int(initial_state is not None)
    T, HV, V = v.shape[1:]
    (H, K), (NR, C) = k.shape[2:], saved.Pp.shape[2:]
    r = q if operands.q_read is None else operands.q_read
    _, *given = flags(operands)
    of = None if segments is None else segments.of
    constants_of = lambda form: scan_constants(
        config, v.dtype, H, r.shape[2], HV, K, V, *given, init(form), saved.W is not None, form
    )
    BV, KB, NK, heads = (constants_of(0)[name] for name in ("BV", "KB", "NK", "HEADS"))
    slots, flag = slots_of(config, "scan", alignment, HV // heads, heads * -(-V // BV), len(v) * (NR // C))
    hand = q.new_empty(slots, BV, NK * KB, dtype=state.dtype)
    tile = lambda x, D: token_tile(x, C, D) if config.tma and x is not None else x
    pairs = lambda x: None if x is None else tile(x.view(-1, NR, 1, C), C)
    arguments = (
        tile(r, KB), tile(q, KB), tile(k, KB), tile(v, BV), pairs(saved.Tp), pairs(saved.Pp), saved.E,
        tile(o, BV), tile(saved.W, BV), initial_state, state, alignment.cum, hand, flag, saved.overflow,
        operands.powers, *(NO_TABLE if table is None else table.arguments(of)), scale, T, NR, alignment.N,
    )  # fmt: skip
    return lambda form: run(scan, (slots,), *arguments, **constants_of(form))


def heads_of_program(group: int, programs: int) -> int:
    """Value heads of one key head for which a program of `intra` makes r kᵀ once: up to 8, while there are programs enough to fill a
    GPU."""
    heads = 8
    while heads > 1 and (group % heads or programs < heads * LEAST_PROGRAMS):
        heads //= 2
    return heads


@cache
def intra_constants(
    config: LaunchConfig, dtype: torch.dtype, H: int, HR: int, HV: int, K: int,
    gate: int, erase: int, lam: int, read: int, copy: int, save: int,
) -> Constants:  # fmt: skip
    own = dict(config.launch["intra"])
    # beside λ's products the registers hold 64 keys a step
    own["BK"] = min(own["BK"], 64 if lam else own["BK"], padded(K))
    return dict(
        H=H, HR=HR, HV=HV, K=K, C=config.launch["shared"]["C"], ACC=TYPES[accumulator(dtype)], ST=TYPES[solve_dtype(dtype)],
        COPY=int(copy), SAVE=int(save), GATE=gate, ERASE=erase, LAM=lam, READ=read,
        SHARED=int(not erase and H < HV and HR < HV), **inverse_constants(dtype), **own,
    )  # fmt: skip


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Both kernels as Q-Delta launches them, the scan in each FORM, with a state to start from and the backward's tensors asked for; and
    on a slot table, where the first FORM starts from it and keeps that start for the next one, or by segments; and of a scaled additive
    rule."""
    own, st, acc = NAMES[dtype], NAMES[solve_dtype(dtype)], NAMES[accumulator(dtype)]
    cases = []
    scans = lambda init, save, form: scan_constants(config, dtype, 2, 2, 2, K, V, 1, 1, 0, init, save, form)
    plain, on_table = dict.fromkeys(("p_abc", *OF_TABLE)), dict.fromkeys(("p_abc", "p_power", "x_w"))
    additive = (
        (intra, intra_constants(config, dtype, 1, 1, 2, K, 1, 0, 0, 0, 1, 0), {}),
        (scan, scan_constants(config, dtype, 1, 1, 2, K, V, 0, 0, 0, 1, 1, 0), dict.fromkeys(OF_TABLE)),
    )
    for kernel, constants, absent in (
        (intra, intra_constants(config, dtype, 2, 2, 2, K, 1, 1, 1, 0, solve_dtype(dtype) != dtype, 1), {"p_abc": None}),
        *((scan, scans(1, 1, form), plain) for form in forms(dtype, True)),
        *((scan, scans(1 if form == 2 else 2, 0, form), on_table | {"p_of": None}) for form in forms(dtype, True)),
        (scan, scans(1, 0, forms(dtype, True)[0]), on_table),
        *(additive if dtype == torch.bfloat16 else ()),
    ):
        constants: Constants = {**constants, **absent}
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in constants}
        types = dict.fromkeys(("p_r", "p_q", "p_k"), f"*{own}") | {"p_T": f"*{NAMES[inverse(dtype)]}"}
        types |= dict.fromkeys(("p_P", "p_A", "p_r_copy", "p_q_copy", "p_k_copy"), f"*{st}")
        types |= dict.fromkeys(
            ("p_g", "p_beta", "p_lam", "p_G", "p_E", "p_initial_state", "p_final_state", "p_hand"), f"*{acc}"
        )
        types |= OF_TABLE | {
            "p_abc": "*fp32",
            "p_cum": "*i32",
            "p_flag": "*i32",
            "p_overflow": "*i32",
            "scale": "fp32",
            "heads": "i32",
            "T": "i32",
            "NR": "i32",
            "N": "i32",
        }
        C, BV, KB = (constants.get(name) for name in ("C", "BV", "KB"))
        for name, element, width in (
            *((name, st, KB) for name in ("x_r", "x_q", "x_k")),
            *((name, own, BV) for name in ("x_v", "x_o")),
            ("x_w", st, BV),
            ("x_T", NAMES[inverse(dtype)], C),
            ("x_P", st, C),
        ):
            types[name] = f"tensordesc<{element}[1, 1, {C}, {width}]>" if config.tma else f"*{element}"
        cases.append(Case(kernel, {n: types[n] for n in kernel.arg_names if n not in constants}, constants, options))
    return cases
