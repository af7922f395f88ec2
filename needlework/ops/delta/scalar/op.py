"""The scalar-gate engine: DeltaNet, Gated DeltaNet, Q-Delta and their additive kin, as two operators of Triton kernels.

    S_t = e^{g_t} S_{t-1} + β_t k_t (v_t − (e^{g_t} S_{t-1})ᵀ x_t)ᵀ,   x = k + λq        o_t = scale · S_tᵀ r_t

beta None: nothing is erased, S_t = e^{g_t} S_{t-1} + k_t v_tᵀ. lam None: x = k. r = q_read, or q where there is none.
`intra.py` makes what each chunk needs, `scan.py` walks the chunks; their constants are in scalar.launch.json.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from needlework.ops.common.alignment import Alignment
from needlework.ops.common.kernels.tile import token_tile
from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.delta.inputs import NO_TABLE, OF_TABLE, DeltaInputs, SlotTable, solve_dtype
from needlework.ops.delta.scalar.backward import backward
from needlework.ops.delta.scalar.intra import intra
from needlework.ops.delta.scalar.operands import (
    ENGINE,
    Saved,
    flags,
    forms,
    inverse,
    inverse_constants,
    scan_constants,
    slots_of,
)
from needlework.ops.delta.scalar.scan import scan
from needlework.ops.delta.scalar.transitions import transitions
from needlework.ops.delta.segments import fix_up, segment_count, segmented
from needlework.ops.delta.table import on_table
from needlework.ops.runtime.custom_op import backward_operator, differentiable, fake, operator, step_operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig, launch_config
from needlework.ops.runtime.precompile import kind, meta, precompile, run
from needlework.ops.runtime.triton_types import NAMES, TYPES, accumulator, padded


def scalar(inputs: DeltaInputs, cu_seqlens: Tensor | None, *, scale: float) -> tuple[Tensor, Tensor]:
    """o [B T HV V] in q's dtype, final state [N HV K V] in float32 or wider; differentiable in every tensor. No erase, no write."""
    if inputs.lam is None and inputs.q_read is not None:
        inputs = inputs._replace(q=inputs.q_read, q_read=None)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return delta_scalar_fwd(*inputs, cu_seqlens, scale)[:2]
    return delta_scalar(*inputs, cu_seqlens, scale)


@operator
def delta_scalar(inputs: DeltaInputs, cu_seqlens: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """o and the final state. An operator of its own: results that are not there cost the host as much as a launch."""
    o, state, _ = _call(inputs, cu_seqlens, scale, save=False)
    return o, state


def scalar_on_table(inputs: DeltaInputs, table: SlotTable, cu_seqlens: Tensor | None, *, scale: float) -> Tensor:
    """o alone: states start from slots of the table, and end there. The values of cu_seqlens are not checked."""
    if inputs.lam is None and inputs.q_read is not None:
        inputs = inputs._replace(q=inputs.q_read, q_read=None)
    return delta_scalar_on_table(*inputs, *table, cu_seqlens, scale)


@step_operator("table.state")
def delta_scalar_on_table(inputs: DeltaInputs, table: SlotTable, cu_seqlens: Tensor | None, scale: float) -> Tensor:
    """o, without an initial state in `inputs`. Nothing is read back to the host."""
    walk = lambda table: _call(inputs, cu_seqlens, scale, save=False, table=table)[0]
    return on_table(inputs, table, cu_seqlens, walk)


@operator
def delta_scalar_fwd(inputs: DeltaInputs, cu_seqlens: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Saved]:
    """o, the final state, and what the backward takes."""
    return _call(inputs, cu_seqlens, scale, save=True)


def _call(
    inputs: DeltaInputs, cu_seqlens: Tensor | None, scale: float, *, save: bool, table: SlotTable | None = None
) -> tuple[Tensor, Tensor, Saved]:
    """`forward` of tokens that lie as the caller has them."""
    chosen = _config(inputs)
    alignment = _alignment(inputs, cu_seqlens, chosen, check=table is None)
    aligned = inputs.aligned(alignment)
    segments = _segments(inputs, alignment.N, cu_seqlens, chosen)
    settings = {"scale": scale, "config": chosen}
    key = ENGINE, chosen.name, kind(*aligned), segments > 1, save, table and kind(*table)
    on_meta = table and SlotTable(*meta(*table))
    precompile(
        inputs.q.device, key, lambda: _launches(DeltaInputs(*meta(*aligned)), alignment, save, segments, on_meta, settings)
    )
    o, state, saved = forward(aligned, alignment, save=save, segments=segments, table=table, **settings)
    return alignment.restore(o).contiguous(), state, saved


@backward_operator
def delta_scalar_bwd(
    do: Tensor | None, dstate: Tensor | None, saved: Saved, inputs: DeltaInputs, cu_seqlens: Tensor | None, scale: float
) -> DeltaInputs:
    """Gradients of `inputs`."""
    chosen, initial_state = _config(inputs), inputs.initial_state
    chunk = saved.Pp.shape[-1]
    if chunk != chosen.launch["shared"]["C"]:
        raise RuntimeError(f"{ENGINE}: the forward ran with chunks of {chunk}, the config for the backward has others")
    if not inputs.v.numel():
        found = DeltaInputs(*each(torch.zeros_like, *inputs))
        if initial_state is not None and dstate is not None:
            found = found._replace(initial_state=dstate.to(initial_state.dtype, copy=True))
    else:
        alignment = _alignment(inputs, cu_seqlens, chosen)
        do = torch.zeros_like(inputs.v) if do is None else do.contiguous()
        dstate = None if dstate is None else dstate.contiguous()
        found = backward(
            alignment.align(do), dstate, inputs.aligned(alignment), saved, alignment, scale=scale, config=chosen
        ).restored(alignment)  # fmt: skip
    return found.like(inputs)


def _launches(
    inputs: DeltaInputs, alignment: Alignment, save: bool, segments: int, table: SlotTable | None, settings: dict
) -> None:
    """What a call and its backward launch."""
    o, _, saved = forward(inputs, alignment, save=save, segments=segments, table=table, **settings)
    if save:
        backward(torch.empty_like(o), None, inputs, saved, alignment, **settings)


def forward(
    inputs: DeltaInputs, alignment: Alignment, *,
    scale: float, config: LaunchConfig, save: bool, segments: int = 1, table: SlotTable | None = None,
) -> tuple[Tensor, Tensor, Saved]:  # fmt: skip
    """o, the final state and `Saved` of aligned tokens, each sequence in `segments`; without `save` neither W nor A is made.

    table: has the states of sequences with tokens, before and after, and is returned for the final state.
    """
    (_, T, HV, V), K, acc = inputs.v.shape, inputs.k.shape[3], accumulator(inputs.q.dtype)
    o, launched = torch.empty_like(inputs.v), forms(inputs.q.dtype, inputs.lam is not None)
    saved = Saved.empty(inputs, T, config.launch["shared"]["C"], save=save)
    if o.numel():
        launch_intra(inputs, saved, scale=scale, config=config)
    operands = saved.operands(inputs)
    by_segment = None
    if segments > 1:
        alignment = segmented(alignment, segments)
        N, M = by_segment = transitions(operands, saved, alignment, segments, config=config, save=save)
        saved = saved._replace(initial_state=fix_up(M, N, inputs.initial_state, segments, reverse=False, table=table), M=M)
        operands = operands._replace(initial_state=saved.initial_state)
    # no chunk: the kernels do not touch the state
    untouched = alignment.place is not None or T == 0
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
            if by_segment is not None and form == 2:
                N, M = transitions(operands, saved, alignment, segments, by_segment, config=config, save=save)
                into = saved.initial_state
                assert into is not None  # of segments
                # FORM 1 has written the table; the first segments' states are what it held
                start = table and SlotTable(into[::segments], None, None)
                fix_up(M, N, inputs.initial_state, segments, reverse=False, into=into, when=saved.overflow, table=start)
            walk(form)
    return o, state if segments == 1 or table else state[segments - 1 :: segments].clone(), saved


def launch_intra(inputs: DeltaInputs, saved: Saved, *, scale: float, config: LaunchConfig) -> None:
    """T, P' and the decay of every chunk; A where it is given a place; copies of q, k and q_read as operands, likewise."""
    q, k, q_read = inputs.q, inputs.k, inputs.q_read
    (B, T, HV, _), NR = inputs.v.shape, saved.Pp.shape[2]
    r, r_copy = (q, saved.q) if q_read is None else (q_read, saved.q_read)
    copies, saves = saved.k is not None, saved.A is not None
    constants = intra_constants(config, q.dtype, k.shape[2], r.shape[2], HV, k.shape[3], *flags(inputs), copies, saves)
    run(
        intra, (-(-NR // constants["R"]) * B * HV,),
        r, q, k, inputs.g, inputs.beta, inputs.lam, saved.Tp, saved.Pp, saved.A, saved.G, saved.E, r_copy, saved.q, saved.k,
        scale, T, NR, **constants,
    )  # fmt: skip


def walk_of(
    operands: DeltaInputs, saved: Saved, o: Tensor, state: Tensor, alignment: Alignment,
    table: SlotTable | None = None, segments: int = 1, *, scale: float, config: LaunchConfig,
) -> Callable[[int], None]:  # fmt: skip
    """What launches the scan in a FORM: o, the final state and, where it is given a place, W. q, k, q_read are operands; o and v share
    the caller's type. table: what `state` is a part of; without segments the states to start from lie there too."""
    q, k, v, initial_state = operands.q, operands.k, operands.v, operands.initial_state
    first, *others = forms(v.dtype, operands.lam is not None)
    in_place = table is not None and segments == 1
    if in_place and others:
        # the first FORM writes the table: what it starts from is kept for the next one
        initial_state = state.new_empty(alignment.N, *state.shape[1:])
    init = lambda form: 2 if in_place and form == first else int(initial_state is not None)
    T, HV, V = v.shape[1:]
    (H, K), (NR, C) = k.shape[2:], saved.Pp.shape[2:]
    r = q if operands.q_read is None else operands.q_read
    _, *given = flags(operands)
    constants_of = lambda form: scan_constants(
        config, v.dtype, H, r.shape[2], HV, K, V, *given, init(form), saved.W is not None, form
    )
    BV, KB, NK = (constants_of(0)[name] for name in ("BV", "KB", "NK"))
    slots, flag = slots_of(config, "scan", alignment, HV * -(-V // BV), len(v) * (NR // C))
    hand = q.new_empty(slots, BV, NK * KB, dtype=state.dtype)
    tile = lambda x, D: token_tile(x, C, D) if config.tma and x is not None else x
    pairs = lambda x: None if x is None else tile(x.view(-1, NR, 1, C), C)
    arguments = (
        tile(r, KB), tile(q, KB), tile(k, KB), tile(v, BV), pairs(saved.Tp), pairs(saved.Pp), saved.E,
        tile(o, BV), tile(saved.W, BV), initial_state, state, alignment.cum, hand, flag, saved.overflow,
        *(NO_TABLE if table is None else table.arguments(segments)), scale, T, NR, alignment.N,
    )  # fmt: skip
    return lambda form: run(scan, (slots,), *arguments, **constants_of(form))


@cache
def intra_constants(
    config: LaunchConfig, dtype: torch.dtype, H: int, HR: int, HV: int, K: int,
    gate: int, erase: int, lam: int, read: int, copy: int, save: int,
) -> Constants:  # fmt: skip
    own = {**config.launch["intra"], "BK": min(config.launch["intra"]["BK"], padded(K))}
    return dict(
        H=H, HR=HR, HV=HV, K=K, C=config.launch["shared"]["C"], ACC=TYPES[accumulator(dtype)], ST=TYPES[solve_dtype(dtype)],
        COPY=int(copy), SAVE=int(save), GATE=gate, ERASE=erase, LAM=lam, READ=read, **inverse_constants(dtype), **own,
    )  # fmt: skip


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Both kernels as Q-Delta launches them, the scan in each FORM, with a state to start from and the backward's tensors asked for; and
    on a slot table, where the first FORM starts from it and keeps that start for the next one."""
    own, st, acc = NAMES[dtype], NAMES[solve_dtype(dtype)], NAMES[accumulator(dtype)]
    cases = []
    scans = lambda init, save, form: scan_constants(config, dtype, 2, 2, 2, K, V, 1, 1, 0, init, save, form)
    plain, on_table = dict.fromkeys(OF_TABLE), {"p_power": None, "x_w": None}
    for kernel, constants, absent in (
        (intra, intra_constants(config, dtype, 2, 2, 2, K, 1, 1, 1, 0, solve_dtype(dtype) != dtype, 1), {}),
        *((scan, scans(1, 1, form), plain) for form in forms(dtype, True)),
        *((scan, scans(1 if form == 2 else 2, 0, form), on_table) for form in forms(dtype, True)),
    ):
        constants: Constants = {**constants, **absent}
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in constants}
        types = dict.fromkeys(("p_r", "p_q", "p_k"), f"*{own}") | {"p_T": f"*{NAMES[inverse(dtype)]}"}
        types |= dict.fromkeys(("p_P", "p_A", "p_r_copy", "p_q_copy", "p_k_copy"), f"*{st}")
        types |= dict.fromkeys(
            ("p_g", "p_beta", "p_lam", "p_G", "p_E", "p_initial_state", "p_final_state", "p_hand"), f"*{acc}"
        )
        types |= OF_TABLE | {
            "p_cum": "*i32",
            "p_flag": "*i32",
            "p_overflow": "*i32",
            "scale": "fp32",
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


def _config(inputs: DeltaInputs) -> LaunchConfig:
    return launch_config(ENGINE, inputs.q.device, inputs.q.dtype, inputs.q.shape[-1], inputs.v.shape[-1])


def _alignment(inputs: DeltaInputs, cu_seqlens: Tensor | None, chosen: LaunchConfig, check: bool = True) -> Alignment:
    B, T = inputs.q.shape[:2]
    if cu_seqlens is not None and check:
        check_cu_seqlens(cu_seqlens, B, T)
    return Alignment.of(cu_seqlens, B, T, chosen.launch["shared"]["C"], inputs.q.device)


def _segments(inputs: DeltaInputs, N: int, cu_seqlens: Tensor | None, chosen: LaunchConfig) -> int:
    """How many segments make a sequence; packed ones are taken as equally long: their lengths are not read back."""
    (_, T, HV, V), K = inputs.v.shape, inputs.k.shape[-1]
    launch = chosen.launch["scan"]
    longest = -(-T // chosen.launch["shared"]["C"]) // (1 if cu_seqlens is None else max(N, 1))
    return segment_count(N * HV * -(-V // launch["BV"]), longest, K, V, launch["NP"])


@fake(delta_scalar)
def _results(inputs: DeltaInputs, cu_seqlens: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    v, K = inputs.v, inputs.k.shape[-1]
    N = len(v) if cu_seqlens is None else len(cu_seqlens) - 1
    return torch.empty_like(v), v.new_empty(N, v.shape[2], K, v.shape[-1], dtype=accumulator(inputs.q.dtype))


@fake(delta_scalar_on_table)
def _(inputs: DeltaInputs, *_):
    return torch.empty_like(inputs.v)


@fake(delta_scalar_fwd)
def _(inputs: DeltaInputs, cu_seqlens: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Saved]:
    (B, T, HV, V), K, chosen = inputs.v.shape, inputs.k.shape[-1], _config(inputs)
    C = chosen.launch["shared"]["C"]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    saved = Saved.empty(inputs, T if cu_seqlens is None else (T // C + N) * C, C, save=True)
    segments = _segments(inputs, N, cu_seqlens, chosen)
    if segments > 1:
        initial_state, M = (saved.G.new_empty(N * segments, HV, K, D) for D in (V, K))
        saved = saved._replace(initial_state=initial_state, M=M)
    return *_results(inputs, cu_seqlens, scale), saved


@fake(delta_scalar_bwd)
def _(do: Tensor | None, dstate: Tensor | None, saved: Saved, inputs: DeltaInputs, *_):
    return DeltaInputs(*each(torch.empty_like, *inputs))


def _save(ctx, inputs, output) -> None:
    given, cu_seqlens, ctx.scale = inputs
    ctx.save_for_backward(*output[2], *given, cu_seqlens)
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dstate, *_):
    found = delta_scalar_bwd(do, dstate, *ctx.saved_tensors, ctx.scale)
    return *(dx if needed else None for dx, needed in zip(found, ctx.needs_input_grad, strict=False)), None, None


differentiable(delta_scalar_fwd, _backward, _save)
