"""Mamba-3 with one row a token on Triton: the rows that the additive engine reads, its kernels, and what is added to what it gives.

`siso` picks needlework::mamba3_siso, _fwd with its _bwd, `siso_on_table` the one that advances a table of states in place.
"""

import torch
from torch import Tensor

from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.delta.additive.operands import Saved as AdditiveSaved
from needlework.ops.delta.scalar.operands import Saved as ScalarSaved
from needlework.ops.mamba3.edges import Edges
from needlework.ops.mamba3.siso.engine import Engine, Saved
from needlework.ops.mamba3.siso.launches import NO_STATE, Inputs, Kept, gradients, made, with_own
from needlework.ops.mamba3.siso.powers import powers
from needlework.ops.mamba3.siso.tiles import Tiles
from needlework.ops.mamba3.state import Mamba3State
from needlework.ops.runtime.custom_op import differentiable, fake, step_operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import widths
from needlework.ops.runtime.recorded import recorded_backward_operator, recorded_operator
from needlework.ops.slots.rows import Slots
from needlework.ops.slots.table import check_contiguous, start_anew


def siso(
    inputs: Inputs, initial_state: Mamba3State | None, cu_seqlens: Tensor | None, *, halves: bool, final: bool
) -> tuple[Tensor, Mamba3State | None]:
    """o [B T HV V] in q's dtype and, if it is wanted, the final state; T >= 1. Differentiable in every tensor."""
    q, K, V = inputs.q, inputs.q.shape[-1], inputs.v.shape[-1]
    wide = widths(Engine.of(q, inputs.v).name, q.device, q.dtype, K, V)
    if wide != (K, V) and not (halves and wide[0] != K):  # halves are of all K
        start = None if initial_state is None else initial_state.widened(*wide)
        o, state = siso(inputs.widened(*wide), start, cu_seqlens, halves=halves, final=final)
        return o[..., :V], None if state is None else state.narrowed(K, V)
    given = *inputs, *(initial_state or NO_STATE)
    o, S, k_end, angle_end = mamba3_siso(*given, cu_seqlens, halves, final)
    if not final:
        return o, None
    v0 = S.new_zeros(len(S), *inputs.v.shape[2:]) if initial_state is None else initial_state.v
    v_end = Edges.of(cu_seqlens, inputs.v.shape[1]).newest(v0, inputs.v.to(S.dtype))
    return o, Mamba3State(S, k_end, v_end, angle_end)


@recorded_operator
def mamba3_siso(
    inputs: Inputs, initial_state: Mamba3State | None, cu_seqlens: Tensor | None, halves: bool, final: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, and the final S, k and angle; where they are not wanted the last two have no numbers, and S is the engine's, divided by powers."""
    given, initial_state, tiles = _checked(inputs, initial_state, cu_seqlens, final)
    return _call(given, initial_state, tiles, halves, final, save=False)[0]


@recorded_operator
def mamba3_siso_fwd(
    inputs: Inputs, initial_state: Mamba3State | None, cu_seqlens: Tensor | None, halves: bool, final: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Kept, AdditiveSaved | None, ScalarSaved | None]:
    """The same, and what the backward and the engine's take."""
    given, initial_state, tiles = _checked(inputs, initial_state, cu_seqlens, final)
    results, kept, saved = _call(given, initial_state, tiles, halves, final, save=True)
    return *results, kept, saved.of_additive, saved.of_scalar


@recorded_backward_operator
def mamba3_siso_bwd(
    do: Tensor | None, dS: Tensor | None, dk_end: Tensor | None, dangle_end: Tensor | None, kept: Kept,
    of_additive: AdditiveSaved | None, of_scalar: ScalarSaved | None, inputs: Inputs, initial_state: Mamba3State | None,
    cu_seqlens: Tensor | None, halves: bool, final: bool,
) -> tuple[Inputs, Mamba3State | None]:  # fmt: skip
    """Gradients of `inputs` and `initial_state`."""
    given, initial_state, tiles = _checked(inputs, initial_state, cu_seqlens, final)
    do = torch.zeros_like(given.v) if do is None else do
    rows = kept.of_engine(given, _divided(initial_state, kept.power))
    do_rows, dS = tiles.in_rows(do), None if dS is None else _by_a(dS, kept.power, multiply=False)
    engine, saved = Engine.of(given.q, given.v), Saved(of_additive, of_scalar).own
    d = engine.gradients(do_rows, dS, saved, rows, tiles.ends(), 1.0)
    ends = each(Tensor.contiguous, dk_end, dangle_end)
    assert d.g is not None  # as the rows'
    found, before = gradients(do.contiguous(), (d.q, d.k, d.v, d.g), *ends, given, initial_state, kept, tiles, halves)
    if initial_state is None or before is None or d.initial_state is None:
        return found.like(given), None
    pairs = zip((_by_a(d.initial_state, kept.power, multiply=True), *before), initial_state, strict=True)
    return found.like(given), Mamba3State(*(dx.to(x.dtype).view(x.shape) for dx, x in pairs))


def siso_on_table(
    given: Inputs, table: Mamba3State, slots: Tensor | None, fresh: Tensor | None, cu_seqlens: Tensor | None, *, halves: bool
) -> Tensor:
    """o alone: states start from slots of the table, and end there. The values of cu_seqlens are not checked."""
    return mamba3_siso_on_table(*given, *table, slots=slots, fresh=fresh, cu_seqlens=cu_seqlens, halves=halves)


@step_operator("table")
def mamba3_siso_on_table(
    inputs: Inputs, table: Mamba3State, slots: Tensor | None, fresh: Tensor | None, cu_seqlens: Tensor | None, halves: bool
) -> Tensor:
    """o alone. Nothing is read back to the host; the states go through rows of their sequences."""
    check_contiguous(table)
    q, v, S = inputs.q, inputs.v, table.S
    B, T = q.shape[:2]
    if not v.numel():
        start_anew(table, slots, fresh, cu_seqlens, q)
        return torch.empty_like(v)
    own = Slots.of(S, slots, fresh, cu_seqlens, B)
    # every sequence has a row, an empty one too: its slot stays as it is, unless it is fresh
    given, initial_state = inputs.contiguous(), Mamba3State(*(own.read(x) for x in table))
    tiles = Tiles.of(v, q.shape[-1], cu_seqlens, True)
    (o, S, k_end, angle_end), *_ = _call(given, initial_state, tiles, halves, True, save=False)
    v_end = Edges.of(cu_seqlens, T).newest(initial_state.v, v.to(S.dtype))
    for column, rows in zip(table, (S, k_end, v_end, angle_end), strict=True):
        own.write(column, rows.contiguous())
    return o


def _call(
    given: Inputs, initial_state: Mamba3State | None, tiles: Tiles, halves: bool, final: bool, *, save: bool
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Kept, Saved]:
    """o, S, k, angle; what was made for the engine; what it keeps."""
    rows = tiles.rows(len(given.q))[1]
    engine = Engine.of(given.q, given.v)
    power = powers(given, initial_state, rows) if engine.scales else None
    kept, k_end, angle_end = made(given, initial_state, tiles, power, halves)
    inputs = kept.of_engine(given, _divided(initial_state, kept.power))
    read, S, saved = engine.computed(inputs, tiles.ends(), 1.0, save=save, check=False)
    o, S = with_own(read, given, kept, tiles), _multiplied(S, kept.power) if final else S
    return (o, S, k_end, angle_end), kept, engine.saved(saved)


def _checked(
    inputs: Inputs, initial_state: Mamba3State | None, cu_seqlens: Tensor | None, final: bool
) -> tuple[Inputs, Mamba3State | None, Tiles]:
    """Contiguous, and their tiles."""
    given = inputs.contiguous()
    if initial_state is not None:
        initial_state = Mamba3State(*each(Tensor.contiguous, *initial_state))
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *given.q.shape[:2])
    return given, initial_state, Tiles.of(given.v, given.q.shape[-1], cu_seqlens, final)


def _divided(initial_state: Mamba3State | None, power: Tensor | None) -> Tensor | None:
    if initial_state is None or power is None:
        return None if initial_state is None else initial_state.S
    return initial_state.S / _of_states(power[1] * power[2])


def _multiplied(S: Tensor, power: Tensor | None) -> Tensor:
    return S if power is None else S * _of_states(power[1] * power[2])


def _by_a(dS: Tensor, power: Tensor | None, *, multiply: bool) -> Tensor:
    """The engine is given do in place of abc do: the final S's gradient divided by a, and gives the initial one's, to be multiplied."""
    if power is None:
        return dS
    a = _of_states(power[0])
    return dS * a if multiply else dS / a


def _of_states(power: Tensor) -> Tensor:
    """[B HV] of what broadcasts with [N HV K V]."""
    return power[:, :, None, None]


@fake(mamba3_siso)
def _results(
    given: Inputs, initial_state: Mamba3State | None, cu_seqlens: Tensor | None, halves: bool, final: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (B, _, HV, V), K = given.v.shape, given.q.shape[-1]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    S, k_end = given.new(N, HV, K, V), given.new(*((N, HV, 1, K) if final else (0,)))
    return torch.empty_like(given.v), S, k_end, given.new(N, HV, given.rate.shape[-1])


@fake(mamba3_siso_on_table)
def _(inputs: Inputs, *_):
    return torch.empty_like(inputs.v)


@fake(mamba3_siso_fwd)
def _(
    given: Inputs, initial_state: Mamba3State | None, cu_seqlens: Tensor | None, halves: bool, final: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Kept, AdditiveSaved | None, ScalarSaved | None]:
    (B, T, HV, V), K, new, engine = given.v.shape, given.q.shape[-1], given.new, Engine.of(given.q, given.v)
    count, rows = Tiles.sizes(given.v, K, cu_seqlens, final)
    q, k, u = (new(*rows, HV, D, dtype=given.q.dtype) for D in (K, K, V))
    kept = Kept(
        start=new(count, HV, given.rate.shape[-1], dtype=torch.float64),
        same=new(B, T, HV),
        q=q,
        k=k,
        u=u,
        g=new(*rows, HV) if final else None,
        power=new(3, B, HV, dtype=torch.float32) if engine.scales and given.v.dtype == torch.bfloat16 else None,
    )
    inputs = kept.of_engine(given, _divided(initial_state, None))._replace(g=new(*rows, HV))
    ends = cu_seqlens if cu_seqlens is None or not final else cu_seqlens + 1
    saved = engine.saved(engine.kept(*engine.fwd(*inputs, ends, 1.0)[2:]))
    return *_results(given, initial_state, cu_seqlens, halves, final), kept, saved.of_additive, saved.of_scalar


@fake(mamba3_siso_bwd)
def _(do, dS, dk_end, dangle_end, kept, of_additive, of_scalar, inputs: Inputs, initial_state: Mamba3State | None, *_):
    before = None if initial_state is None else Mamba3State(*each(torch.empty_like, *initial_state))
    return Inputs(*each(torch.empty_like, *inputs)), before


def _save(ctx, inputs, output) -> None:
    given, initial_state, cu_seqlens, ctx.halves, ctx.final = inputs
    *_, kept, of_additive, of_scalar = output
    ctx.save_for_backward(*kept, *of_additive, *of_scalar, *given, *(initial_state or NO_STATE), cu_seqlens)
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dS, dk_end, dangle_end, *_):
    ends = (dS, dk_end, dangle_end) if ctx.final else (None, None, None)
    found = mamba3_siso_bwd(do, *ends, *ctx.saved_tensors, ctx.halves, ctx.final)
    return *(dx if needed else None for dx, needed in zip(found, ctx.needs_input_grad, strict=False)), None, None, None


differentiable(mamba3_siso, _backward, _save, mamba3_siso_fwd)
