"""Gradients of the channel-gate engine: three walks over the chunks (`scan_bwd.py`), then every chunk by itself
(`intra_bwd.py`). Tensors are aligned; those of the forward are `Saved`.

Of an additive rule with powers (`powers.py`) q, k and v are q/a, k/b and v/c here, and do is abc do.

In half mode everything that flows back is a float16 operand, so do and dstate are scaled by one power of two, from their largest
element, and the gradients are scaled back as they are stored.
"""

import torch
import triton.language as tl
from torch import Tensor

from needlework.ops.common.alignment import Alignment
from needlework.ops.common.kernels.groups import of_groups
from needlework.ops.common.kernels.parts import parts_of
from needlework.ops.common.shapes import width
from needlework.ops.delta.channel.intra_bwd import couplings, launch_pairs, pairs
from needlework.ops.delta.channel.operands import RULES, Saved, operands, predicted, rule_of, scales, wide_gates
from needlework.ops.delta.channel.scan_bwd import adjoint, replay_forward, replay_reverse
from needlework.ops.delta.gradient_scaling import divided
from needlework.ops.delta.inputs import DeltaInputs, solve_dtype
from needlework.ops.delta.powers import divided_rows
from needlework.ops.delta.segments import SegmentStates, fix_up, segmented
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig, interpreted
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import NAMES, cdiv, padded


def backward(
    do: Tensor, dstate: Tensor | None, inputs: DeltaInputs, saved: Saved, states: SegmentStates | None, alignment: Alignment, *,
    scale: float, prediction: str, R: int, config: LaunchConfig, length: int = 0,
) -> DeltaInputs:  # fmt: skip
    """Gradients of the inputs; None where the input is None. dstate None: zeros. states, length: of the forward's segments."""
    q, k, v, beta, erase = inputs.q, inputs.k, inputs.v, inputs.beta, inputs.erase
    (B, T, HV, V), (H, K) = v.shape, q.shape[2:]
    C, ST, ACC = config.launch["shared"]["C"], solve_dtype(q.dtype), width(q)
    sequences, initial_state = alignment.N, inputs.initial_state
    segments = None
    if states is not None and length:
        segments = segmented(alignment, C, length)
        alignment, initial_state = segments.align, states.initial_state
    N, spans = alignment.N, alignment.spans
    rule = rule_of(beta, erase)
    constants = channel_constants(config, q.dtype, rule, H=H, HV=HV, K=K, V=V, prediction=prediction, R=R)
    anchor = constants["replay_forward"]["ANCHOR"]
    slots = B * -(-T // C) // anchor + N + 1

    divisor = torch.ones(1, dtype=ACC, device=q.device)
    if ST == torch.float16:
        do, dstate, divisor = divided(do, dstate) if inputs.powers is None else divided_rows(do, dstate, inputs.powers)
    dstate = q.new_zeros(sequences, HV, K, V, dtype=ACC) if dstate is None else dstate.to(ACC)

    tokens = lambda D: q.new_empty(B, T, HV, D, dtype=ST)
    NS = constants["pairs"]["NS"]
    of_parts = lambda: q.new_empty(B, T, HV * NS, K, dtype=ST)
    dr, dq_hat, dk_hat = tokens(V), of_parts(), of_parts()
    de_hat = of_parts() if rule else None
    if initial_state is None:
        initial_state = q.new_zeros(N, HV, K, V, dtype=ACC)
    anchors, x = q.new_empty(slots, HV, K, V, dtype=ST), q.new_empty(slots, HV * NS, K, dtype=ACC)

    walk = constants["adjoint"]
    rows, square, state_tiles = operands(config)
    kp, bv = walk["KP"], walk["BV"]

    def reverse(dfinal: Tensor, spans: Tensor) -> Tensor:
        """The gradient of the initial states, and dr."""
        dinitial_state = torch.empty_like(dfinal)
        run(
            adjoint, (cdiv(V, bv), HV, N),
            spans, rows(do, bv), rows(saved.q_hat, kp), rows(saved.e_hat, kp), rows(saved.k_hat, kp), square(saved.Pp),
            square(saved.Tp), saved.whole, beta, dfinal, rows(dr, bv), dinitial_state, T, **constants["adjoint"],
        )  # fmt: skip
        return dinitial_state

    if states is not None and segments is not None:
        N_ = reverse(torch.zeros_like(initial_state), segments.split)
        dstate = fix_up(states.M, N_, dstate, segments.first, config=config, reverse=True)
    dinitial_state = reverse(dstate, spans)
    walk = constants["replay_forward"]
    bk, vp = walk["BK"], walk["VP"]
    run(
        replay_forward, (cdiv(K, bk) * NS, HV, N),
        spans, rows(saved.W, vp), rows(do, vp), rows(dr, vp), rows(saved.k_hat, bk), saved.whole, initial_state, None,
        rows(dq_hat, bk), rows(de_hat, bk), state_tiles(anchors, bk, vp), T, 0, **walk,
    )  # fmt: skip
    walk = constants["replay_reverse"]
    bk, vp = walk["BK"], walk["VP"]
    run(
        replay_reverse, (cdiv(K, bk) * NS, HV, N),
        spans, rows(saved.W, vp), rows(do, vp), rows(dr, vp), rows(saved.q_hat, bk), rows(saved.e_hat, bk), saved.whole, beta, dstate,
        state_tiles(anchors, bk, vp), rows(dk_hat, bk), x, T, 0, **walk,
    )  # fmt: skip

    # a group's heads are summed afterwards, from what is not yet rounded
    shared = lambda like: torch.empty(B, T, HV, K, dtype=like.dtype if H == HV else ACC, device=like.device)
    dq, dk = shared(q), shared(k)
    dv, dg, dbeta, derase, dwrite = each(torch.empty_like, v, inputs.g, beta, erase, inputs.write)
    found = DeltaInputs(dq, dk, dv, dg, dbeta, erase=derase, write=dwrite)
    launch_pairs(
        spans, do, dr, saved.W, inputs, dq_hat, de_hat, dk_hat, x, divisor, found,
        scale=scale, longest=alignment.longest, sequences=N, couple=constants["couplings"], channels=constants["pairs"],
    )  # fmt: skip
    dq, dk = of_groups(dq, H, q.dtype), of_groups(dk, H, k.dtype)
    given = inputs.initial_state
    dinitial_state = dinitial_state if segments is None else segments.begun(dinitial_state)
    dinitial_state = None if given is None else (dinitial_state * divisor).to(given.dtype)
    return found._replace(q=dq, k=dk, initial_state=dinitial_state)


def tiles_of_values(V: int) -> tuple[int, int]:
    """Columns of a replay's tile of values, and their count: states of more than 256 do not fit the registers."""
    if V <= 256:
        return padded(V), 1
    return (128, 3) if V <= 384 else (256, 2)


def channel_constants(
    config: LaunchConfig, dtype: torch.dtype, rule: int, *, H: int, HV: int, K: int, V: int, prediction: str, R: int
) -> dict[str, Constants]:
    """Kernel -> its constexprs and options."""
    C = config.launch["shared"]["C"]
    half = dtype.itemsize == 2
    facts = {"H": HV, "C": C, "ACC": tl.float64 if dtype == torch.float64 else tl.float32}
    channels, values = facts | {"K": K}, facts | {"V": V}
    walk = channels | values | {"ERASE": int(rule > 0), "TMA": int(config.tma)}
    gates, (KP, NK), (VP, NS) = {"BETA": int(rule == 1), "GATES": int(rule == 2)}, parts_of(K), tiles_of_values(V)
    values_of_one = {"VP": VP, "NS": NS}
    anchor = {"ANCHOR": config.launch["pairs"]["ANCHOR"]}
    size = {"adjoint": {"BV": padded(V)}, "replay_forward": {"BK": padded(K)}, "replay_reverse": {"BK": padded(K)}}
    size |= {"couplings": {"VB": padded(V)}, "pairs": {"KB": padded(K)}}
    launch = {
        kernel: {name: min(value, size[kernel].get(name, value)) for name, value in config.launch[kernel].items()}
        for kernel in size
    }
    if K > 64 and launch["pairs"]["KB"] > 16 and (rule == 2 or prediction == "previous"):
        # what these rules hold beside q and k spills with one warp on Hopper: up to 1,368 bytes a thread, and with two 184
        launch["pairs"]["num_warps"] *= 2
    return {
        "adjoint": launch["adjoint"] | walk | {"KP": KP, "NK": NK, "BETA": int(rule == 1)},
        "replay_forward": launch["replay_forward"] | walk | anchor | values_of_one,
        "replay_reverse": launch["replay_reverse"] | walk | anchor | values_of_one | {"BETA": int(rule == 1)},
        "couplings": launch["couplings"] | values | {"R": R, "PDL": 0} | gates,
        "pairs": launch["pairs"] | channels | anchor | gates | {
            "G": HV // H, "NS": NS, "LEVELS": C.bit_length() - 1, "PDL": 0, "HALF": int(half), "ASM": int(half and not interpreted()),
        } | predicted(prediction),
    }  # fmt: skip


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Every kernel as each rule launches it, one key head for two value heads."""
    given, operand = NAMES[dtype], NAMES[solve_dtype(dtype)]
    wide = "fp64" if dtype == torch.float64 else "fp32"
    kernels = {"adjoint": adjoint, "replay_forward": replay_forward, "replay_reverse": replay_reverse}
    kernels |= {"couplings": couplings, "pairs": pairs}
    cases = []
    for rule, prediction in RULES:
        absent = {0: ("beta", "erase", "write", "e_hat", "A", "part"), 1: ("erase", "write"), 2: ("beta", "part")}[rule]
        absent += ("slots", "peaks") if scales(rule, dtype) else ("slots", "peaks", "abc")
        gates = dict.fromkeys(("p_erase", "p_write", "p_derase", "p_dwrite"), f"*{wide if wide_gates(prediction) else given}")
        for kernel, launch in channel_constants(config, dtype, rule, H=1, HV=2, K=K, V=V, prediction=prediction, R=1).items():
            options = {name: launch.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in launch}
            columns = {"K": launch.get("KP", launch.get("BK")), "V": launch.get("VP", launch.get("BV")), "C": launch["C"]}
            signature = {}
            for name in kernels[kernel].arg_names:
                if any(name.removeprefix("p_").removeprefix("d") in (a, a.replace("e_", "de_")) for a in absent):
                    launch[name] = None
                elif name not in launch:
                    signature[name] = gates.get(name) or argument_type(
                        name, columns if config.tma else {}, given, operand, wide
                    )
            cases.append(Case(kernels[kernel], signature, launch, options))
    return cases


def argument_type(name: str, columns: dict[str, int], given: str, operand: str, wide: str) -> str:
    """The Triton type of a kernel argument; `columns` of a block by axis where walks take descriptors."""
    axes = {"P": "C", "inverse": "C", "W": "V", "do": "V", "dr": "V", "q_hat": "K", "e_hat": "K", "k_hat": "K"}
    axes |= {"dq_hat": "K", "de_hat": "K", "dk_hat": "K"}
    if name in ("T", "most", "scale"):
        return "fp32" if name == "scale" else "i32"
    if name in ("anchors", "kept"):
        return f"tensordesc<{operand}[1, 1, {columns['K']}, {columns['V']}]>" if columns else f"*{operand}"
    if name in axes and columns:
        return f"tensordesc<{operand}[1, 1, {columns['C']}, {columns[axes[name]]}]>"
    if name == "p_abc":
        return "*fp32"
    if name == "p_spans":
        return "*i32"
    if name == "p_back" and operand == "fp16":
        return "*bf16"
    if name.removeprefix("p_") in axes or name in ("p_A", "p_sums", "p_level"):
        return f"*{operand}"
    if name in (
        "p_whole",
        "p_g",
        "p_dg",
        "p_dfinal",
        "p_initial_state",
        "p_dinitial_state",
        "p_x",
        "p_divisor",
        "p_part",
        "p_back",
    ):
        return f"*{wide}"
    return f"*{given}"
