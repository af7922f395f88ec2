"""The order of the additive engine's kernels, of tensors that are aligned.

    forward     intra (gates) → scan (o, final state; S of every chunk for a backward to come)
    backward    scan in reverse (dv, initial state, dS of every chunk) → intra_bwd, or alone where it would have one head (dr, dk, dg)

A long sequence of few heads is split into segments (`delta/segments.py`): a scan without outputs finds what each leaves of no state.
Operands have the type of q, k and v. bfloat16 has the range of float32, so that nothing is scaled.
"""

import torch
from torch import Tensor

from needlework.ops.common.alignment import Alignment
from needlework.ops.common.kernels.groups import of_groups
from needlework.ops.common.kernels.tile import token_tile
from needlework.ops.delta.additive.alone import alone
from needlework.ops.delta.additive.intra import intra
from needlework.ops.delta.additive.intra_bwd import intra_bwd
from needlework.ops.delta.additive.operands import Saved, constants, of_program, states
from needlework.ops.delta.additive.scan import scan
from needlework.ops.delta.inputs import DeltaInputs
from needlework.ops.delta.segments import fix_up, segmented
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig, split
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import NAMES, accumulator, cdiv


def forward(
    inputs: DeltaInputs, alignment: Alignment, *, scale: float, config: LaunchConfig, save: bool, length: int
) -> tuple[Tensor, Tensor, Saved]:
    """o, the final state, and what is saved; in segments of `length` chunks (0: none)."""
    (B, T, HV, _), o = inputs.v.shape, torch.empty_like(inputs.v)
    saved = Saved.empty(inputs, T, config.launch["shared"]["C"], save=save)
    if o.numel():
        c = _constants(inputs, config)["intra"]
        programs = B * saved.E.shape[2] * cdiv(HV, c["HB"])
        run(intra, (programs,), inputs.g, saved.E, T, saved.E.shape[2] * c["C"], **c)
    state = walk(
        (inputs.q, inputs.k, inputs.v), o, saved.S, inputs.initial_state, saved.E, inputs, alignment, length,
        scale=scale, config=config, reverse=False,
    )  # fmt: skip
    return o, state, saved


def backward(
    do: Tensor, dstate: Tensor | None, inputs: DeltaInputs, saved: Saved, alignment: Alignment,
    *, scale: float, config: LaunchConfig, length: int,
) -> DeltaInputs:  # fmt: skip
    """Gradients of the inputs, None where there is none; v has numbers."""
    q, k, v, g = inputs.q, inputs.k, inputs.v, inputs.g
    (B, T, HV, _), (H, K), E = v.shape, k.shape[2:], saved.E
    dv, dS = torch.empty_like(v), states(v, HV, E.shape[2], K)
    dinitial_state = walk((k, q, do), dv, dS, dstate, E, inputs, alignment, length, scale=scale, config=config, reverse=True)
    groups = HV // of_program(config, H, HV)
    kernel = alone if groups == HV else intra_bwd
    c = _constants(inputs, config)[kernel.__name__]
    dtype = q.dtype if groups == H else E.dtype
    dq, dk = (q.new_empty(B, T, groups, K, dtype=dtype) for _ in range(2))
    dg = None if g is None else E.new_empty(B, T, HV)
    C, KB = c["C"], c["KB"]
    keys, values = (lambda x, D=D: token_tile(x, C, D) if c["TMA"] else x for D in (KB, c["BV"]))
    run(
        kernel, (B * E.shape[2] * groups,),
        keys(q), keys(k), values(do), values(v), _by_chunk(saved.S, c), _by_chunk(dS, c), E, keys(dq), keys(dk), dg,
        scale, T, E.shape[2] * C, **c,
    )  # fmt: skip
    dq, dk = (of_groups(x, H, q.dtype) for x in (dq, dk))
    return DeltaInputs(dq, dk, dv, dg, initial_state=None if inputs.initial_state is None else dinitial_state)


def walk(
    tokens: tuple[Tensor, Tensor, Tensor], o: Tensor, S: Tensor | None, start: Tensor | None, E: Tensor, inputs: DeltaInputs,
    alignment: Alignment, length: int, *, scale: float, config: LaunchConfig, reverse: bool,
) -> Tensor:  # fmt: skip
    """The final state. tokens: what reads, what is written along, and the values. o and, where it is given, S are written."""
    (_, T, HV, V), K, N = inputs.v.shape, inputs.k.shape[3], alignment.N
    c = _constants(inputs, config)["scan"]
    start = None if start is None else start.contiguous()
    if not o.numel():
        zeros = o.new_zeros(N, HV, K, V, dtype=E.dtype)
        return zeros if start is None else start.to(E.dtype, copy=True)
    keys, values = (lambda x, D=D: token_tile(x, c["C"], D) if config.tma else x for D in (c["KB"], c["BV"]))
    reads, writes, x_v, x_o = keys(tokens[0]), keys(tokens[1]), values(tokens[2]), values(o)
    x_S = None if S is None else _by_chunk(S, c)

    def scanned(start: Tensor | None, align: Alignment, M: Tensor | None, of: Tensor | None = None) -> Tensor:
        """With M, without outputs; of: `Segments.of`."""
        end = E.new_empty(align.N, HV, K, V)
        flags = dict(
            INIT=int(start is not None), OUT=int(M is None), SAVE=int(M is None and S is not None), REVERSE=int(reverse)
        )
        run(
            scan, (align.N * HV * cdiv(V, c["BV"]),),
            reads, writes, x_v, E, x_o, x_S, start, end, M, align.cum, of, scale, T, E.shape[2] * c["C"], **c, **flags,
        )  # fmt: skip
        return end

    if not length:
        return scanned(start, alignment, None)
    segments = segmented(alignment, c["C"], length)
    M = E.new_empty(segments.align.N, HV, 1)
    left = scanned(None, segments.align, M, segments.of)
    end = scanned(fix_up(M, left, start, segments.first, config=config, reverse=reverse), segments.align, None)
    return segments.begun(end) if reverse else segments.ended(end)


def _by_chunk(S: Tensor | None, c: Constants) -> object:
    """Of Sᵀ, tiles of BV values of one chunk."""
    if S is None:
        return None
    x = S.view(-1, S.shape[3], 1, S.shape[4])
    return token_tile(x, c["BV"], c["KB"]) if c["TMA"] else x


def _constants(inputs: DeltaInputs, config: LaunchConfig) -> dict[str, Constants]:
    (HV, V), (H, K) = inputs.v.shape[2:], inputs.k.shape[2:]
    return constants(config, inputs.v.dtype, H, HV, K, V, inputs.g is not None)


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Every kernel as a gated rule of four value heads launches it for training, from a state; the scan without outputs, and in reverse;
    `alone` with as many keys."""
    own, acc = NAMES[dtype], NAMES[accumulator(dtype)]
    c, one = constants(config, dtype, 2, 4, K, V, True), constants(config, dtype, 4, 4, K, V, True)
    scans = [
        c["scan"] | dict(INIT=int(out), OUT=out, SAVE=out, REVERSE=reverse) | ({"p_M": None, "p_of": None} if out else {})
        for out, reverse in ((1, 0), (1, 1), (0, 0), (0, 1))
    ]
    cases = []
    for kernel, given in ((intra, c["intra"]), *((scan, x) for x in scans), (intra_bwd, c["intra_bwd"]), (alone, one["alone"])):
        fixed, options = split(given)
        C, KB, BV = (fixed.get(name) for name in ("C", "KB", "BV"))
        types = {name: f"*{acc}" for name in kernel.arg_names if name.startswith("p_")} | {"p_cum": "*i32", "p_of": "*i32"}
        types |= {"scale": "fp32", "T": "i32", "NR": "i32"}
        blocks = dict.fromkeys(("x_reads", "x_writes", "x_r", "x_k"), (own, C, KB))
        blocks |= dict.fromkeys(("x_v", "x_o", "x_do"), (own, C, BV)) | dict.fromkeys(("x_S", "x_dS"), (own, BV, KB))
        of_sum = own if fixed.get("DT") == fixed.get("ST") else acc
        blocks |= dict.fromkeys(("x_dr", "x_dk"), (of_sum, C, KB))
        types |= {
            name: f"tensordesc<{kind}[1, 1, {rows}, {columns}]>" if config.tma else f"*{kind}"
            for name, (kind, rows, columns) in blocks.items()
        }
        cases.append(Case(kernel, {name: types[name] for name in kernel.arg_names if name not in fixed}, fixed, options))
    return cases
