"""The channel-gate engine in Triton: GLA, KDA, GDN-2 and, with gates given, CARVE, as two operators.

    S_t = Diag(e^{g_t}) S_{t-1} + k_t (u_t − S_{t-1}ᵀ e_t)ᵀ        o_t = scale · S_tᵀ q_t        g [K] a head

The kernels are `intra.py` (per chunk), `scan.py` (chunks in order), `backward.py`.
"""

import torch
from torch import Tensor

from needlework.ops.common.alignment import Alignment
from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.common.shapes import width
from needlework.ops.delta.channel.backward import backward
from needlework.ops.delta.channel.intra import intra
from needlework.ops.delta.channel.operands import ENGINE, Saved, rule_of
from needlework.ops.delta.channel.scan import scan
from needlework.ops.delta.inputs import DeltaInputs, SlotTable, in_whole_rows, solve_dtype
from needlework.ops.delta.segments import (
    SegmentStates,
    Slower,
    at_one_pace,
    fix_up,
    segment_length,
    segmented,
    segments_in_all,
    transitions,
)
from needlework.ops.delta.table import on_table
from needlework.ops.runtime.constant import constant
from needlework.ops.runtime.custom_op import differentiable, fake, step_operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import LaunchConfig, launch_config
from needlework.ops.runtime.precompile import kind, meta, precompile
from needlework.ops.runtime.recorded import recorded_backward_operator, recorded_operator

SHARED = 1.36  # time of a chain that has a multiprocessor with another one ÷ alone, of more than 64 keys on an H200


def channel(
    inputs: DeltaInputs, cu_seqlens: Tensor | None, *, scale: float, prediction: str, R: int = 1
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o [B T HV V] in q's dtype and the final state [N HV K V], float32 or wider.

    q [B T H K] reads, g [B T HV K]. R = 1: k [B T H K], v [B T HV V], beta [B T HV] or erase [B T HV K] and write [B T HV V] or none
    of them. R = 2, 4 rows a token, which do not see each other: the rows' tensors have an axis R after T: k [B T R H K], …
    """
    call = lambda cu_seqlens: lambda inputs: delta_channel(*inputs, cu_seqlens, scale, prediction, R)
    if R == 1:
        return in_whole_rows(ENGINE, inputs, call(cu_seqlens))
    assert inputs.g is not None  # of every channel
    q, g = _one_row(inputs.q, R, R - 1), _one_row(inputs.g, R, 0)
    rows = inputs.k, inputs.v, inputs.beta, inputs.erase, inputs.write
    k, v, beta, erase, write = each(lambda x: x.flatten(1, 2), *rows)
    inputs = inputs._replace(q=q, k=k, v=v, g=g, beta=beta, erase=erase, write=write)
    o, state = in_whole_rows(ENGINE, inputs, call(None if cu_seqlens is None else cu_seqlens * R))
    return o[:, R - 1 :: R], state


def channel_on_table(
    inputs: DeltaInputs, table: SlotTable, cu_seqlens: Tensor | None, *, scale: float, prediction: str
) -> Tensor:  # fmt: skip
    """o alone, R = 1: states start from slots of the table, and end there. The values of cu_seqlens are not checked."""
    return delta_channel_on_table(*inputs, *table, cu_seqlens, scale, prediction)


def _one_row(x: Tensor, R: int, row: int) -> Tensor:
    """[B T ...] -> [B T·R ...]: x in one row of each token, zeros in the others."""
    zeros = torch.zeros_like(x)
    return torch.stack([x if i == row else zeros for i in range(R)], 2).flatten(1, 2)


def _launches(inputs: DeltaInputs, alignment: Alignment, save: bool, table: SlotTable | None, settings: dict) -> None:
    """What a call and its backward launch."""
    o, _, saved, states = forward(inputs, alignment, save=save, table=table, **settings)
    if save:
        backward(torch.empty_like(o), None, inputs, saved, states, alignment, **settings)


def forward(
    inputs: DeltaInputs, alignment: Alignment, *,
    scale: float, prediction: str, R: int, config: LaunchConfig, save: bool, length: int = 0, table: SlotTable | None = None,
) -> tuple[Tensor, Tensor, Saved, SegmentStates | None]:  # fmt: skip
    """o [B T HV V], the final state and what the backward takes, for aligned contiguous tensors of R rows a token, T > 0, in segments of
    `length` chunks (0: none).

    table: has the states of sequences with tokens, before and after, and is returned for the final state.
    """
    q, v, beta, write, initial_state = inputs.q, inputs.v, inputs.beta, inputs.write, inputs.initial_state
    assert inputs.g is not None  # of every channel
    with_powers = {"config": config, "powers": inputs.powers}
    saved = intra(q, inputs.k, inputs.g, beta, inputs.erase, scale=scale, prediction=prediction, R=R, **with_powers)
    states = segments = None
    if length:
        segments = segmented(alignment, config.launch["shared"]["C"], length)
        alignment, split = segments.align, segments.split
        # columns that are not values have no write gate
        gate = lambda x: write if write is None or x is v else x
        run = lambda x, state: scan(saved, x, beta, gate(x), state, split, save=False, **with_powers)[1]
        N, M = transitions(run, v, q.shape[3], diagonal=rule_of(beta, inputs.erase) == 0)
        initial_state = fix_up(M, N, initial_state, segments.first, config=config, reverse=False, table=table)
        states = SegmentStates(initial_state, M)
    of = None if segments is None else segments.of
    o, state, W = scan(
        saved, v, beta, write, initial_state, alignment.spans, save=save, table=table, of=of, **with_powers
    )  # fmt: skip
    return o, state if segments is None or table else segments.ended(state), saved._replace(W=W), states


@recorded_operator
def delta_channel(
    inputs: DeltaInputs, cu_seqlens: Tensor | None, scale: float, prediction: str, R: int
) -> tuple[Tensor, Tensor]:
    """o and the final state."""
    return _checked(inputs, cu_seqlens, scale, prediction, R, save=False)[:2]


@recorded_operator
def delta_channel_fwd(
    inputs: DeltaInputs, cu_seqlens: Tensor | None, scale: float, prediction: str, R: int
) -> tuple[Tensor, Tensor, Saved, SegmentStates | None]:
    """o, the final state, and what the backward takes."""
    return _checked(inputs, cu_seqlens, scale, prediction, R, save=True)


def _checked(
    inputs: DeltaInputs, cu_seqlens: Tensor | None, scale: float, prediction: str, R: int, *, save: bool
) -> tuple[Tensor, Tensor, Saved, SegmentStates | None]:
    """`_call` of any cu_seqlens and any number of tokens."""
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *inputs.q.shape[:2])
    if not inputs.v.numel():
        return _nothing(inputs, cu_seqlens, scale, prediction, R)
    return _call(inputs, cu_seqlens, scale, prediction, R, save)


@step_operator("table.state")
def delta_channel_on_table(
    inputs: DeltaInputs, table: SlotTable, cu_seqlens: Tensor | None, scale: float, prediction: str
) -> Tensor:
    """o, without an initial state in `inputs`. Nothing is read back to the host."""
    walk = lambda table: _call(inputs, cu_seqlens, scale, prediction, 1, False, table)[0]
    return on_table(inputs, table, cu_seqlens, walk)


def _call(
    inputs: DeltaInputs,
    cu_seqlens: Tensor | None,
    scale: float,
    prediction: str,
    R: int,
    save: bool,
    table: SlotTable | None = None,
) -> tuple[Tensor, Tensor, Saved, SegmentStates | None]:
    """`forward` of tokens that lie as the caller has them."""
    config, alignment = _placed(inputs, cu_seqlens)
    aligned = inputs.aligned(alignment)
    length = _segment_length(inputs, alignment.N, cu_seqlens, config, save)
    settings = {"scale": scale, "prediction": prediction, "R": R, "config": config, "length": length}
    key = ENGINE, config.name, kind(*aligned), scale, prediction, R, length > 0, save, table and kind(*table)
    on_meta = table and SlotTable(*meta(*table))
    precompile(inputs.q.device, key, lambda: _launches(DeltaInputs(*meta(*aligned)), alignment, save, on_meta, settings))
    o, state, saved, states = forward(aligned, alignment, save=save, table=table, **settings)
    return *alignment.restore(o), state, saved, states


@recorded_backward_operator
def delta_channel_bwd(
    do: Tensor | None, dstate: Tensor | None, inputs: DeltaInputs, saved: Saved, states: SegmentStates | None,
    cu_seqlens: Tensor | None, scale: float, prediction: str, R: int,
) -> DeltaInputs:  # fmt: skip
    """Gradients of `inputs`."""
    initial_state = inputs.initial_state
    if not inputs.v.numel():
        found = DeltaInputs(*each(torch.zeros_like, *inputs))._replace(powers=None)
        return found if initial_state is None else found._replace(initial_state=_passed(dstate, initial_state))
    config, alignment = _placed(inputs, cu_seqlens)
    do = torch.zeros_like(inputs.v) if do is None else do
    dstate = None if dstate is None else dstate.contiguous()
    do, aligned = inputs.aligned_with(do, alignment)
    length = _segment_length(inputs, alignment.N, cu_seqlens, config, True)
    return backward(
        do, dstate, aligned, saved, states, alignment, scale=scale, prediction=prediction, R=R, config=config, length=length
    ).restored(alignment)  # fmt: skip


def _passed(dstate: Tensor | None, initial_state: Tensor) -> Tensor:
    """The gradient of a state that no token has changed."""
    return torch.zeros_like(initial_state) if dstate is None else dstate.to(initial_state.dtype, copy=True)


def _placed(inputs: DeltaInputs, cu_seqlens: Tensor | None) -> tuple[LaunchConfig, Alignment]:
    q, v = inputs.q, inputs.v
    config = launch_config(ENGINE, q.device, q.dtype, q.shape[-1], v.shape[-1])
    B, T = q.shape[:2]
    return config, Alignment.of(cu_seqlens, B, T, config.launch["shared"]["C"], q.device)


def _segment_length(inputs: DeltaInputs, N: int, cu_seqlens: Tensor | None, config: LaunchConfig, save: bool) -> int:
    """`segment_length` of the call. A backward gains from segments what its forward may lose: its replays have fewer chains."""
    (_, T, HV, V), K, launch = inputs.v.shape, inputs.q.shape[3], config.launch["scan"]
    C, chains = config.launch["shared"]["C"], HV * -(-V // launch["BV"])
    # warps of a multiprocessor whose registers hold states: of narrow keys more
    warps, processors = 24 if K <= 64 else 8, multiprocessors(inputs.v.device)
    slots = processors * warps // launch["num_warps"]
    slower = sharing(processors) if processors < slots and K > 64 and not save else at_one_pace
    diagonal = rule_of(inputs.beta, inputs.erase) == 0
    return segment_length(N, cu_seqlens is not None, T, C, chains, K, V, slots, diagonal, slower)


def sharing(processors: int) -> Slower:
    """Where there are more chains than multiprocessors two share one."""
    return lambda chains: SHARED if chains > processors else 1.0


@constant
def multiprocessors(device: torch.device) -> int:
    """0 in the interpreter: sequences stay whole."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


@fake(delta_channel_on_table)
def _(inputs: DeltaInputs, *_):
    return torch.empty_like(inputs.v)


@fake(delta_channel)
def _results(inputs: DeltaInputs, cu_seqlens: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
    """Their shapes; without tokens also their values."""
    v, K = inputs.v, inputs.q.shape[-1]
    N = len(v) if cu_seqlens is None else len(cu_seqlens) - 1
    state = v.new_zeros(N, v.shape[2], K, v.shape[-1], dtype=width(v))
    if inputs.initial_state is not None:
        state.copy_(inputs.initial_state)
    return torch.empty_like(v), state


@fake(delta_channel_fwd)
def _nothing(
    inputs: DeltaInputs, cu_seqlens: Tensor | None, scale: float, prediction: str, R: int
) -> tuple[Tensor, Tensor, Saved, SegmentStates | None]:
    """The same, and what the backward takes."""
    q, (B, T, HV, V), K = inputs.q, inputs.v.shape, inputs.q.shape[-1]
    o, state = _results(inputs, cu_seqlens)
    N = len(state)
    config = launch_config(ENGINE, q.device, q.dtype, K, V)
    C, length = config.launch["shared"]["C"], _segment_length(inputs, N, cu_seqlens, config, True)
    _, T = Alignment.sizes(cu_seqlens, B, T, C)
    NC = -(-T // C)
    ST, solves = solve_dtype(q.dtype), rule_of(inputs.beta, inputs.erase) > 0
    rows = lambda D: q.new_empty(B, T, HV, D, dtype=ST)
    square = lambda: q.new_empty(B, HV, NC * C, C, dtype=ST)
    saved = Saved(
        q_hat=rows(K),
        e_hat=rows(K) if solves else None,
        k_hat=rows(K),
        Tp=square() if solves else None,
        Pp=square(),
        whole=q.new_empty(B, HV, NC, K, dtype=width(q)),
        W=rows(V),
    )
    if not length:
        return o, state, saved, None
    R = segments_in_all(N, cu_seqlens is not None, T, C, length)
    shapes = (K, V), (K, K) if solves else (K,)
    return o, state, saved, SegmentStates(*(q.new_empty(R, HV, *shape, dtype=width(q)) for shape in shapes))


@fake(delta_channel_bwd)
def _(do: Tensor | None, dstate: Tensor | None, inputs: DeltaInputs, *_):
    return DeltaInputs(*each(torch.empty_like, *inputs))._replace(powers=None)


def _save(ctx, inputs, output) -> None:
    given, cu_seqlens, *ctx.settings = inputs
    _, _, saved, states = output
    ctx.save_for_backward(*given, *saved, *states, cu_seqlens)
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dstate, *_):
    found = delta_channel_bwd(do, dstate, *ctx.saved_tensors, *ctx.settings)
    return *(dx if needed else None for dx, needed in zip(found, ctx.needs_input_grad, strict=False)), *[None] * 4


differentiable(delta_channel, _backward, _save, delta_channel_fwd)
