"""Mamba-3 with one row a token on Triton: the rows that the additive engine reads, its kernels, and what is added to what it gives.

`siso` picks needlework::mamba3_siso, _fwd with its _bwd, `siso_on_table` the one that advances a table of states in place.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from needlework.ops.common.kernels.slot_rows import Slots
from needlework.ops.common.kernels.slots import largest_of_slots
from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.common.slots import Sequences, check_contiguous, start_anew
from needlework.ops.delta.scalar.op import delta_scalar, delta_scalar_bwd, delta_scalar_fwd, delta_scalar_on_table
from needlework.ops.delta.scaling import PowersOfTwo
from needlework.ops.mamba3.line import Line
from needlework.ops.mamba3.siso.launches import Inputs, Kept, gradients, made, with_own
from needlework.ops.mamba3.siso.tiles import Tiles
from needlework.ops.mamba3.state import Mamba3State
from needlework.ops.runtime.custom_op import backward_operator, differentiable, operator, step_operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.triton_types import accumulator

KEPT = len(Kept._fields)  # before what the engine keeps


def siso(given: Inputs, cu_seqlens: Tensor | None, *, halves: bool, final: bool) -> tuple[Tensor, Mamba3State | None]:
    """o [B T HV V] in q's dtype and, if it is wanted, the final state; T >= 1. Differentiable in every tensor."""
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    o, S, k_end, angle_end, *_ = (mamba3_siso_fwd if wanted else mamba3_siso)(*given, cu_seqlens, halves, final)
    if not final:
        return o, None
    v0 = S.new_zeros(len(S), *given.v.shape[2:]) if given.v0 is None else given.v0
    v_end = Line.of(cu_seqlens, given.v.shape[1]).newest(v0, given.v.to(S.dtype))
    return o, Mamba3State(S, k_end, v_end, angle_end)


@operator
def mamba3_siso(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, dt: Tensor, lam: Tensor, rate: Tensor, q_bias: Tensor | None, k_bias: Tensor | None,
    S: Tensor | None, k0: Tensor | None, v0: Tensor | None, angle0: Tensor | None, cu_seqlens: Tensor | None,
    halves: bool, final: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """o, and the final S, k and angle: without numbers but for S where they are not wanted."""
    given, tiles = _checked(q, k, v, g, dt, lam, rate, q_bias, k_bias, S, k0, v0, angle0, cu_seqlens=cu_seqlens, final=final)
    return _call(given, tiles, halves, delta_scalar)[0]


@operator
def mamba3_siso_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, dt: Tensor, lam: Tensor, rate: Tensor, q_bias: Tensor | None, k_bias: Tensor | None,
    S: Tensor | None, k0: Tensor | None, v0: Tensor | None, angle0: Tensor | None, cu_seqlens: Tensor | None,
    halves: bool, final: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
]:  # fmt: skip
    """The same, the tensors of `Kept`, empty where there is none, and those that the engine keeps."""
    given, tiles = _checked(q, k, v, g, dt, lam, rate, q_bias, k_bias, S, k0, v0, angle0, cu_seqlens=cu_seqlens, final=final)
    results, kept, saved = _call(given, tiles, halves, delta_scalar_fwd)
    found: Any = *results, *(kept.same.new_empty(0) if x is None else x for x in kept), *saved
    return found


@backward_operator
def mamba3_siso_bwd(
    do: Tensor, dS: Tensor | None, dk_end: Tensor | None, dangle_end: Tensor | None, saved: list[Tensor],
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, dt: Tensor, lam: Tensor, rate: Tensor, q_bias: Tensor | None, k_bias: Tensor | None,
    S: Tensor | None, k0: Tensor | None, v0: Tensor | None, angle0: Tensor | None, cu_seqlens: Tensor | None,
    halves: bool, final: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the tensors of `Inputs`; an empty tensor for what was not given."""
    given, tiles = _checked(q, k, v, g, dt, lam, rate, q_bias, k_bias, S, k0, v0, angle0, cu_seqlens=cu_seqlens, final=final)
    kept = Kept(*saved[: KEPT - 2], *(x if x.numel() else None for x in saved[KEPT - 2 : KEPT]))
    engine = *kept.of_engine(given), _divided(given.S, kept.power)
    do_rows, dS = tiles.in_rows(do), None if dS is None else _by_a(dS, kept.power, multiply=False)
    dq, dk, du, dg, *_, dS0 = delta_scalar_bwd(do_rows, dS, saved[KEPT:], *engine, tiles.ends(), 1.0)
    ends = each(Tensor.contiguous, dk_end, dangle_end)
    found = gradients(do.contiguous(), (dq, dk, du, dg), *ends, given, kept, tiles, halves)
    found = found._replace(S=None if S is None else _by_a(dS0, kept.power, multiply=True))
    tensors = zip(given, found, strict=True)
    return [q.new_empty(0) if x is None or dx is None else dx.to(x.dtype).view(x.shape) for x, dx in tensors]


def siso_on_table(
    given: Inputs, table: Mamba3State, slots: Tensor | None, fresh: Tensor | None, cu_seqlens: Tensor | None, *, halves: bool
) -> Tensor:
    """o alone: states start from slots of the table, and end there. The values of cu_seqlens are not checked."""
    return mamba3_siso_on_table(*given[:9], *table, slots, fresh, cu_seqlens, halves)


@step_operator("S", "k_table", "v_table", "angle")
def mamba3_siso_on_table(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, dt: Tensor, lam: Tensor, rate: Tensor, q_bias: Tensor | None, k_bias: Tensor | None,
    S: Tensor, k_table: Tensor, v_table: Tensor, angle: Tensor, slots: Tensor | None, fresh: Tensor | None,
    cu_seqlens: Tensor | None, halves: bool,
) -> Tensor:  # fmt: skip
    """o. Nothing is read back to the host; the engine reads and writes S in its slots, what is small goes through rows."""
    table = Mamba3State(S, k_table, v_table, angle)
    check_contiguous(**table._asdict())
    B, T = q.shape[:2]
    if not v.numel():
        start_anew(table, slots, fresh, cu_seqlens, q)
        return torch.empty_like(v)
    own = Slots.of(S, slots, fresh, cu_seqlens, B)
    k0, v0, angle0 = (own.read(x) for x in table[1:])
    given = Inputs.of(q, k, v, g, dt, lam, rate, q_bias, k_bias, None, k0, v0, angle0)
    tiles = Tiles.of(v, q.shape[-1], cu_seqlens, True)
    largest = largest_of_slots(S, slots, fresh, cu_seqlens, own.N)[..., None, None] if v.dtype == torch.bfloat16 else None
    kept, k_end, angle_end = made(given, tiles, _powers(given, tiles, largest), halves)
    # every sequence has a row, an empty one too: its slot stays as it is, unless it is fresh
    places = Sequences.of(slots, fresh, own.N, T, cu_seqlens, q.device).slots
    power = None if kept.power is None else (kept.power[1] * kept.power[2]).expand(own.N, -1).contiguous()
    read = delta_scalar_on_table(*kept.of_engine(given), S, places, fresh, power, tiles.ends(), 1.0)
    for column, rows in zip(table[1:], (k_end, Line.of(cu_seqlens, T).newest(v0, v.to(S.dtype)), angle_end), strict=True):
        own.write(column, rows.contiguous())
    return with_own(read, given, kept, tiles)


def _call(given: Inputs, tiles: Tiles, halves: bool, engine: Callable[..., Any]) -> tuple[Any, Kept, list[Tensor]]:
    """o, S, k, angle; what was made for the engine; what it keeps."""
    kept, k_end, angle_end = made(given, tiles, _powers(given, tiles, given.S), halves)
    read, S, *saved = engine(*kept.of_engine(given), _divided(given.S, kept.power), tiles.ends(), 1.0)
    return (with_own(read, given, kept, tiles), _multiplied(S, kept.power), k_end, angle_end), kept, saved


def _checked(*tensors: Tensor | None, cu_seqlens: Tensor | None, final: bool) -> tuple[Inputs, Tiles]:
    given = Inputs.of(*tensors)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *given.q.shape[:2])
    return given, Tiles.of(given.v, given.q.shape[-1], cu_seqlens, final)


@torch.no_grad()
def _powers(given: Inputs, tiles: Tiles, states: Tensor | None) -> Tensor | None:
    """[3 B HV]: powers of two by which the rows of bfloat16 calls are divided, from bounds of them (`PowersOfTwo.bounding`).

    A turn makes a number √2 times larger at most; u' is at most 2 Δ |v|. Small steps make small values: theirs may be below 1.
    """
    q, k, v, _, dt, _, _, q_bias, k_bias, _, k0, v0, _ = given
    if v.dtype != torch.bfloat16:
        return None
    (B, _, H, K), HV, T = q.shape, v.shape[2], tiles.rows(len(q))[1]
    largest = lambda x, *axes: torch.linalg.vector_norm(x, torch.inf, axes, keepdim=True).float()
    of_state = lambda x: largest(x, *range(2, x.dim())).view(-1, 1, HV, 1) if len(x) == B else of_state(x.amax(0, True))

    def turned(x: Tensor, bias: Tensor | None) -> Tensor:
        bound = largest(x, 1, 3).repeat_interleave(HV // H, 2)
        return 2**0.5 * (bound if bias is None else bound + largest(bias, 1))

    keys, values = turned(k, k_bias), largest(v, 1, 3)
    if k0 is not None and v0 is not None:
        keys, values = torch.maximum(keys, of_state(k0.abs())), torch.maximum(values, of_state(v0.abs()))
    values = 2 * largest(dt, 1)[..., None] * values
    powers = PowersOfTwo.bounding(turned(q, q_bias), keys, values, states, T, K, 1.0, least=2.0**-24)
    return torch.stack([x.view(B, HV) for x in powers])


def _divided(S: Tensor | None, power: Tensor | None) -> Tensor | None:
    return S if S is None or power is None else S / _of_states(power[1] * power[2])


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


@torch.library.register_fake(mamba3_siso)
def _results(q, k, v, g, dt, lam, rate, q_bias, k_bias, S, k0, v0, angle0, cu_seqlens, halves, final):
    (B, _, HV, V), K, wide = v.shape, q.shape[-1], accumulator(q.dtype)
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    shapes = (N, HV, K, V), (N, HV, 1, K) if final else (0,), (N, HV, rate.shape[-1])
    return torch.empty_like(v), *(v.new_empty(shape, dtype=wide) for shape in shapes)


@torch.library.register_fake(mamba3_siso_on_table)
def _(q, k, v, *_):
    return torch.empty_like(v)


@torch.library.register_fake(mamba3_siso_fwd)
def _(*inputs):
    *tensors, cu_seqlens, _, final = inputs
    given = Inputs(*tensors)
    (B, T, HV, V), K, new = given.v.shape, given.q.shape[-1], given.new
    count, rows = Tiles.sizes(given.v, K, cu_seqlens, final)
    start, same = new(count, HV, given.rate.shape[-1], dtype=torch.float64), new(B, T, HV)
    made = [new(*rows, HV, D, dtype=given.q.dtype) for D in (K, K, V)]
    g = new(*rows, HV)
    power = new(3, B, HV, dtype=torch.float32) if given.v.dtype == torch.bfloat16 else new(0)
    ends = cu_seqlens if cu_seqlens is None or not final else cu_seqlens + 1
    saved = delta_scalar_fwd(*made, g, None, None, None, given.S, ends, 1.0)[2:]
    return *_results(*inputs), start, same, *made, g if final else new(0), power, *saved


@torch.library.register_fake(mamba3_siso_bwd)
def _(do, dS, dk_end, dangle_end, saved, *inputs):
    return [do.new_empty(0) if x is None else torch.empty_like(x) for x in inputs[: len(Inputs._fields)]]


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.halves, ctx.final = inputs
    ctx.kept = len(output) - 4
    ctx.save_for_backward(*output[4:], *tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dS, dk_end, dangle_end, *_):
    saved, tensors = ctx.saved_tensors[: ctx.kept], ctx.saved_tensors[ctx.kept :]
    do = torch.zeros_like(tensors[2]) if do is None else do
    ends = (dS, dk_end, dangle_end) if ctx.final else (None, None, None)
    found = mamba3_siso_bwd(do, *ends, list(saved), *tensors, ctx.halves, ctx.final)
    found = [dx if needed else None for dx, needed in zip(found, ctx.needs_input_grad, strict=False)]
    return *found, None, None, None


differentiable(mamba3_siso_fwd, _backward, _save)
