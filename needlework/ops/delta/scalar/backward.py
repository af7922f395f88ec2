"""The backward of the scalar-gate engine: which kernels run, in which order, with which buffers.

    amax → adjoint (du, dv, initial state) → pairs (E, D) → replay_forward, replay_reverse → combine → gate

Neither S nor dS is kept a chunk. Tensors are aligned. In half precision every operand is float16: r, q and k as the forward copied
them, do as pairs copies it, multiplied by a power of two. With powers q, k, v and do are q/a, k/b, v/c and abc do everywhere here;
pairs and combine divide dv, dr and dk by c, a and b as they store them.

Where there is a bf16 fallback (`scan.py`) all kernels but amax run in FORM 1, then all in FORM 2: p_overflow_bwd is the forward's
overflow flag, or FORM 1 sets it here. p_overflow, the forward's alone, says which FORM wrote W.
"""

from functools import cache, partial

import torch
from torch import Tensor

from needlework.ops.common.alignment import Alignment
from needlework.ops.common.kernels.groups import of_groups
from needlework.ops.common.kernels.tile import token_tile
from needlework.ops.delta.gradient_scaling import amax
from needlework.ops.delta.inputs import DeltaInputs, solve_dtype
from needlework.ops.delta.powers import TOKENS, amax_of_rows
from needlework.ops.delta.scalar.intra_bwd import combine, gate, pairs
from needlework.ops.delta.scalar.operands import (
    Saved,
    forms,
    group_of,
    heads_of_team,
    inverse,
    operand_types,
    slots_of,
    tiles_of_keys,
)
from needlework.ops.delta.scalar.replay import replay_forward, replay_reverse
from needlework.ops.delta.scalar.scan_bwd import adjoint
from needlework.ops.delta.segments import fix_up, segmented
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import NAMES, TYPES, accumulator, cdiv, padded

NO_ANCHOR = 1 << 30
OF_JOBS = "pairs", "combine"  # of whose bf16 fallback a program does one job after another


def backward(
    do: Tensor, dstate: Tensor | None, inputs: DeltaInputs, saved: Saved, alignment: Alignment, *,
    scale: float, config: LaunchConfig, length: int = 0,
) -> DeltaInputs:  # fmt: skip
    """Gradients of the inputs (None where there is none), in the forward's segments; those of g, beta and lam are float32 or wider."""
    q, k, v, g, beta, lam = inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.lam
    B, T, HV, V = v.shape
    H, K = k.shape[2:]
    rows, C = saved.Pp.shape[2], config.launch["shared"]["C"]
    # segments have a state before and a gradient after them
    segments, initial_state = None, inputs.initial_state
    if length:
        segments = segmented(alignment, C, length)
        alignment, initial_state = segments.align, saved.initial_state
    N = alignment.N
    operands = saved.operands(inputs)
    q_, k_ = operands.q, operands.k
    r = q_ if operands.q_read is None else operands.q_read
    # what reads has a gradient of its own where q also enters x, and where its heads are not the keys'
    read = (lam is not None and inputs.q_read is not None) or r.shape[2] != H
    asks = r if not read else q_ if lam is not None else k_
    launched = forms(q.dtype, lam is not None)
    constants_of = partial(constants, config, q.dtype, H, r.shape[2], HV, K, V, g is not None, beta is not None, lam is not None,
                           read, initial_state is not None, dstate is not None or segments is not None)  # fmt: skip
    c = constants_of(launched[0])
    acc, st = accumulator(q.dtype), solve_dtype(q.dtype)

    def new(*shape: int, dtype: torch.dtype = acc) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    tile = lambda x, width, height=C: token_tile(x, height, width) if config.tma and x is not None else x
    chunks_in_all = B * (rows // C)

    half = q.dtype.itemsize == 2
    peaks = new(config.launch["amax"]["NP"], dtype=torch.float32)
    if half:
        ends = (do, 0) if dstate is None else (dstate, dstate.numel())
        if inputs.powers is None:
            run(amax, (len(peaks),), do, ends[0], peaks, do.numel(), ends[1], **c["amax"])
        else:
            sizes = dict(HV=HV, V=V, BV=padded(V), TS=TOKENS)
            run(amax_of_rows, (len(peaks),), do, ends[0], peaks, inputs.powers, B, T, ends[1], **c["amax"], **sizes)

    BV, KB, NK = (c["adjoint"][name] for name in ("BV", "KB", "NK"))
    BVP, R = (c["pairs"][name] for name in ("BV", "R"))
    tiled = cdiv(rows, R) * R
    du = torch.empty_like(v, dtype=st)
    do_ = torch.empty_like(do, dtype=st) if half else do
    # additive, not in half precision: one tensor is both
    dv = torch.empty_like(v) if half or beta is not None else du
    M, N_, D = (new(B * HV, tiled, 1, R, dtype=st) if wanted else None
                for wanted in (True, beta is not None, read and lam is not None))  # fmt: skip
    held, written, asked, from_start, to_end = new(5, B, HV, rows).unbind()
    KS, VB, NT, EVERY = (c["replay_forward"][name] for name in ("KS", "VB", "NT", "EVERY"))
    parts, slices = cdiv(V, VB * NT), cdiv(K, KS)
    dr_part, dx_part, dk_part = (new(parts * B, T, HV, K, dtype=st) for _ in range(3))
    places = (chunks_in_all // EVERY + N + 1) * HV if g is not None else 1
    anchors = new(places, K, V, dtype=st) if g is not None else None
    X = new(places, slices * parts)
    # a group's heads are summed afterwards, from what is not yet rounded
    BK = c["combine"]["BK"]
    keys = lambda: new(B, T, HV, K, dtype=q.dtype if H == HV else acc)
    dk, dr = keys(), keys()
    dq = keys() if read and lam is not None else dr
    dg, dlam, dbeta = (None if x is None else new(B, T, HV) for x in (g, lam, beta))
    dinitial_state = new(N, HV, K, V)
    if alignment.maps is not None:
        # of an empty sequence, which no chain walks
        dinitial_state.zero_() if dstate is None else dinitial_state.copy_(segments.each(dstate) if segments else dstate)
    overflow = saved.overflow.clone()

    x_P, x_T = (None if x is None else tile(x.view(-1, rows, 1, C), C) for x in (saved.Pp, saved.Tp))
    keys_at = lambda x: tile(x, BK, R)
    square = lambda x: tile(x, R, R)

    def walk(dstate: Tensor | None, dinitial_state: Tensor) -> tuple[int, tuple]:
        """Of adjoint: a chain per sequence and heads of a team, and what is left of it where it is cut."""
        heads = c["adjoint"]["HEADS"]
        slots, flag = slots_of(config, "adjoint", alignment, HV // heads, heads * cdiv(V, BV), chunks_in_all)
        return slots, (
            tile(r, KB), tile(asks, KB), tile(k_, KB), tile(do, BV), x_T, x_P, saved.E, tile(du, BV), dstate, dinitial_state,
            alignment.cum, new(slots, BV, NK * KB), flag, overflow, peaks, inputs.powers, scale, T, rows, N,
        )  # fmt: skip

    dlast, by_segment = dstate, None
    if segments is not None and saved.M is not None:
        found, dstate = torch.zeros_like(dinitial_state), torch.empty_like(dinitial_state)
        by_segment = saved.M, found, *walk(None, found)

    heads = c["replay_forward"]["HEADS"]
    replays = alignment, HV // heads, heads * slices * parts, chunks_in_all
    (slots, flag), (_, flag_back) = (slots_of(config, "replay_forward", *replays) for _ in range(2))
    hand, jobs, runs = new(slots, KS, VB * NT), tiled // R * B * HV, cdiv(alignment.longest, EVERY)
    # name, programs, arguments: the same in every FORM
    calls = [
        ("adjoint", *walk(dstate, dinitial_state)),
        ("pairs", jobs, (
            tile(do, BVP, R), tile(du, BVP, R), tile(saved.W, BVP, R), tile(v, BVP, R), g, saved.E, saved.Pp, saved.A,
            tile(do_, BVP, R),
            tile(dv, BVP, R), M, N_, D, held, written, asked, saved.overflow, overflow, peaks, inputs.powers, scale, T, rows, tiled,
            jobs,
        )),
        ("replay_forward", slots, (
            tile(k_, KS), tile(do_, VB), tile(du, VB), tile(saved.W, VB), saved.E, tile(dr_part, KS), tile(dx_part, KS),
            initial_state, anchors, alignment.cum, hand, flag, saved.overflow, overflow, scale, T, rows, N, B,
        )),
        ("replay_reverse", slots, (
            tile(r, KS), tile(asks, KS), tile(k_, KS), tile(do_, VB), tile(du, VB), tile(saved.W, VB), saved.G,
            saved.E,
            tile(dk_part, KS), dstate, anchors, X, alignment.cum, hand, flag_back, saved.overflow, overflow, peaks,
            scale, T, rows, N, B,
        )),
        ("combine", jobs, (
            keys_at(r), keys_at(asks), keys_at(k_), saved.E, keys_at(dr_part), keys_at(dx_part), keys_at(dk_part),
            square(M), square(N_), square(D), written, asked, keys_at(dr), keys_at(dq), keys_at(dk), from_start, to_end,
            dlam, dbeta, alignment.cum, overflow, peaks, inputs.powers, T, rows, N, tiled, B, jobs,
        )),
    ]  # fmt: skip
    if g is not None:
        starts = initial_state, dinitial_state
        arguments = held, from_start, to_end, X, saved.G, dg, *starts, alignment.cum, overflow, peaks, T, rows, N, runs
        calls.append(("gate", runs * N * HV, arguments))

    for form in launched:
        c = constants_of(form)
        if segments is not None and by_segment is not None:
            M_of, found, programs, arguments = by_segment
            run(adjoint, (programs,), *arguments, **c["adjoint"] | {"END": 0})
            when = overflow if form == 2 else None
            fix_up(M_of, found, dlast, segments.first, config=config, reverse=True, into=dstate, when=when)
        for name, programs, arguments in calls:
            if form == 2 and name in OF_JOBS:
                programs = min(programs, config.launch["scan"]["NP"])
            run(KERNELS[name], (programs,), *arguments, **c[name])
    dr = of_groups(dr, r.shape[2], q.dtype)
    if lam is None:
        dq = dr if inputs.q_read is None else torch.zeros_like(q)
    else:
        dq = of_groups(dq, H, q.dtype) if read else dr
    return DeltaInputs(
        q=dq, k=of_groups(dk, H, q.dtype), v=dv, g=dg, beta=dbeta, lam=dlam, q_read=None if inputs.q_read is None else dr,
        initial_state=None if inputs.initial_state is None else segments.begun(dinitial_state) if segments else dinitial_state,
    )  # fmt: skip


@cache
def constants(
    config: LaunchConfig, dtype: torch.dtype, H: int, HR: int, HV: int, K: int, V: int,
    gated: bool, erase: bool, lam: bool, read: bool, init: bool, end: bool, form: int,
) -> dict[str, Constants]:  # fmt: skip
    """Kernel -> its constants, num_warps and the like."""
    half = dtype.itemsize == 2
    types = dict(ACC=TYPES[accumulator(dtype)], OT=TYPES[dtype], **operand_types(dtype, form))
    everything = dict(
        H=H, HR=HR, HV=HV, K=K, V=V, C=config.launch["shared"]["C"], NM=config.launch["amax"]["NP"], TMA=int(config.tma),
        HALF=int(half), **types, DT=TYPES[dtype if H == HV else accumulator(dtype)],
        GATE=int(gated), ERASE=int(erase), LAM=int(lam), READ=int(read), INIT=int(init), END=int(end),
    )  # fmt: skip
    own: dict[str, Constants] = {
        name: dict(config.launch[name]) for name in ("amax", "adjoint", "pairs", "replay_forward", "combine", "gate")
    }
    own["replay_reverse"] = {**own["replay_forward"], **config.launch["replay_reverse"]}
    KB, NK = tiles_of_keys(K)
    group = group_of(H, HR, HV)
    own["adjoint"] |= dict(KB=KB, NK=NK, HEADS=heads_of_team(group, cdiv(V, own["adjoint"]["BV"]), own["adjoint"]["NP"]))
    for name in ("replay_forward", "replay_reverse"):
        row = own[name]
        row |= dict(KS=min(row["KS"], padded(K)), VB=min(row["VB"], padded(V)))
        row |= dict(NT=row["NT"] if V > row["VB"] else 1)
        # an anchor a chunk cancels nothing; in half precision the operands' roundings are larger than what cancels
        row |= dict(EVERY=NO_ANCHOR if not gated else row["EVERY"] if half else 1)
        tiles = cdiv(K, row["KS"]) * cdiv(V, row["VB"] * row["NT"])
        row |= dict(HEADS=heads_of_team(group, tiles, row["NP"]))
    row = own["replay_forward"]
    # R, a tile's rows, is one chunk: of chunks that no sequence has nothing is written, and NaN times 0 would be NaN
    own["pairs"] |= dict(BV=min(own["pairs"]["BV"], padded(V)), R=everything["C"])
    own["combine"] |= dict(R=own["pairs"]["R"], BK=min(own["combine"]["BK"], padded(K)), PARTS=cdiv(V, row["VB"] * row["NT"]))
    own["gate"] |= dict(SLICES=cdiv(K, row["KS"]) * own["combine"]["PARTS"], EVERY=row["EVERY"])
    for name, kernel in KERNELS.items():
        if name != "amax":
            own[name].pop("NP", None)
        own[name] |= {key: x for key, x in everything.items() if key in kernel.arg_names and key not in own[name]}
    return own


KERNELS = {
    "amax": amax,
    "adjoint": adjoint,
    "pairs": pairs,
    "replay_forward": replay_forward,
    "replay_reverse": replay_reverse,
    "combine": combine,
    "gate": gate,
}


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Every kernel as Q-Delta launches it, in each FORM, from a state and with the final state's gradient; those that scale, as a scaled
    additive rule does."""
    own, st, acc = NAMES[dtype], NAMES[solve_dtype(dtype)], NAMES[accumulator(dtype)]
    declared = dict.fromkeys(("x_r", "x_q", "x_k", "x_w", "x_du", "x_scaled", "x_P", "x_M", "x_N", "x_D"), st)
    declared |= {"x_T": NAMES[inverse(dtype)]}
    declared |= dict.fromkeys(("p_P", "p_A", "p_M", "p_N", "p_D", "p_anchor"), st)
    declared |= dict.fromkeys(("x_dr_part", "x_dx_part", "x_dk_part"), st)
    cases = []
    first, *others = forms(dtype, True)
    launched = [(name, first, True) for name in KERNELS]
    launched += [(name, form, True) for form in others for name in KERNELS if name != "amax"]
    scaled = [name for name, kernel in KERNELS.items() if "p_abc" in kernel.arg_names]
    launched += [(name, 0, False) for name in scaled if dtype == torch.bfloat16]
    for name, form, erase in launched:
        kernel = KERNELS[name]
        c = dict(constants(config, dtype, 2, 2, 2, K, V, True, erase, erase, False, True, True, form)[name])
        c |= {"p_abc": None} if erase and name in scaled else {}
        options = {key: c.pop(key) for key in ("num_warps", "num_stages", "maxnreg") if key in c}
        of_type = (
            declared
            | {"p_do": own, "p_max": "fp32", "p_abc": "fp32"}
            | dict.fromkeys(("p_cum", "p_flag", "p_overflow", "p_overflow_bwd"), "i32")
        )
        if name.startswith("replay"):
            of_type |= {"x_do": st, "x_dr": st, "x_dx": st, "x_dk": st}
        height = c.get("R", c.get("C"))
        widths = dict.fromkeys(("x_T", "x_P", "x_M", "x_N", "x_D"), height)
        widths |= dict.fromkeys(("x_do", "x_du", "x_dv", "x_w", "x_v", "x_scaled"), c.get("BV", c.get("VB")))
        signature = {}
        for arg in kernel.arg_names:
            if arg in c:
                continue
            if arg.startswith("x_"):
                kind, width = of_type.get(arg, own), widths.get(arg, c.get("KB", c.get("KS", c.get("BK"))))
                signature[arg] = f"tensordesc<{kind}[1, 1, {height}, {width}]>" if config.tma else f"*{kind}"
            elif arg.startswith("p_"):
                signature[arg] = f"*{of_type.get(arg, acc)}"
            else:
                signature[arg] = "fp32" if arg == "scale" else "i64" if arg.startswith("n_") else "i32"
        cases.append(Case(kernel, signature, c, options))
    return cases
