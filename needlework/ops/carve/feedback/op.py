"""CARVE in Triton as an operator: layout, R rows a token, and what the backward keeps."""

from collections.abc import Callable
from functools import partial, wraps
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from needlework.ops.carve.arguments import CarveInputs, Settings, check_position
from needlework.ops.carve.feedback.backward import backward
from needlework.ops.carve.feedback.forward import forward
from needlework.ops.carve.feedback.layout import ByChunk, Layout, of_packed, of_rows, stays
from needlework.ops.carve.state import CarveOutput, CarveState
from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.common.shapes import behind, width
from needlework.ops.delta.channel.operands import Saved
from needlework.ops.delta.inputs import solve_dtype
from needlework.ops.runtime.custom_op import differentiable, fake, operator, step_operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import LaunchConfig, launch_config, widths
from needlework.ops.runtime.precompile import kind, meta, precompile
from needlework.ops.runtime.recorded import recorded, recorded_backward_operator
from needlework.ops.slots.rows import Slots
from needlework.ops.slots.table import check_contiguous, start_anew

ENGINE = "delta/channel"  # whose recurrence it is


class Kept(NamedTuple):
    """State and content at the start of every content chunk."""

    S: Tensor  # [slots H K V]
    m: Tensor  # [slots H V]


def carve(
    inputs: CarveInputs, b_bias: Tensor, initial_state: CarveState | None, cu_seqlens: Tensor | None, settings: Settings,
    *, table: CarveState | None = None, slots: Tensor | None = None, fresh: Tensor | None = None,
) -> CarveOutput:  # fmt: skip
    """o [B T H V] in q's dtype and the state, for arguments that `checked` has passed: k [B T H R K], v [B T H R V].

    With a table, whose slots advance in place, the state is None. Without one kernels get a head's numbers in rows that their copy engine
    takes.
    """
    q, k, v, f, b, w = inputs.tokens
    K, V = q.shape[-1], v.shape[-1]
    wide = widths(ENGINE, q.device, q.dtype, K, V)
    if table is None and wide != (K, V):
        initial_state = None if initial_state is None else initial_state.widened(*wide)
        o, state = carve(inputs.widened(*wide), behind(b_bias, wide[0]), initial_state, cu_seqlens, settings)
        assert state is not None  # there is no table
        return CarveOutput(o[..., :V], state.narrowed(K, V))
    R = k.shape[3]
    if R > 1:
        # the gate lies on a token's first row and the query on its last
        q, f, b = _one_row(q, R, R - 1, 0.0), _one_row(f, R, 0, -torch.inf), _one_row(b, R, 0, -torch.inf)
        w = w.repeat_interleave(R, 1)
    k, v = (x.transpose(2, 3).flatten(1, 2) for x in (k, v))
    inputs = CarveInputs(q, k, v, f, b, w, *inputs.parameters)
    call = {"cu_seqlens": cu_seqlens, **settings._asdict(), "R": R}
    if table is not None:
        o = carve_triton_slots(*inputs, b_bias, *table, slots=slots, fresh=fresh, **call)
        return CarveOutput(o[:, R - 1 :: R], None)
    tensors = *inputs, b_bias, *((None,) * 4 if initial_state is None else initial_state)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    o, S, m, total, position, *_ = carve_triton_fwd(*tensors, **call, save=save)
    return CarveOutput(o[:, R - 1 :: R], CarveState(S, m, total, position))


def _one_row(x: Tensor, R: int, row: int, fill: float) -> Tensor:
    """[B T ...] -> [B T·R ...]: x in one row of each token, `fill` in the others."""
    others = torch.full_like(x, fill)
    return torch.stack([x if i == row else others for i in range(R)], 2).flatten(1, 2)


def _played(function: Callable) -> Callable:
    """`recorded`, behind the check of positions: that reads them on the host, which a recording would not do again."""
    names, play = list(signature(function).parameters), recorded(function)
    position, content_chunk = names.index("position"), names.index("content_chunk")

    @wraps(function)
    def call(*arguments: Any) -> Any:
        if (given := arguments[position]) is not None and given.numel():
            check_position(given, arguments[content_chunk])
        return play(*arguments)

    return call


@partial(operator, around=_played)
def carve_triton_fwd(
    inputs: CarveInputs, b_bias: Tensor, initial_state: CarveState | None, cu_seqlens: Tensor | None,
    content_chunk: int, prediction: str, scale: float, R: int, save: bool,
) -> tuple[Tensor, CarveState, Kept | None, Saved | None]:  # fmt: skip
    """o, the final state and, if `save`, what the backward takes. T counts rows, R a token; position and content_chunk count tokens."""
    q, v, position = inputs.q, inputs.v, None if initial_state is None else initial_state.position
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q.shape[0], q.shape[1] // R)
    if not v.numel():
        return _nothing(inputs, b_bias, initial_state, cu_seqlens, content_chunk, "", 0.0, R, save)
    layout, _, config = placed(q, v, position, cu_seqlens, content_chunk, R)
    state = _state(inputs, initial_state, cu_seqlens)[:3]
    tokens, b_bias = aligned(layout, inputs), b_bias.contiguous()
    settings = {"prediction": prediction, "scale": scale, "R": R, "config": config}
    facts = initial_state is not None, save, content_chunk
    key = "carve", config.name, kind(*tokens, b_bias), inputs.w1.shape, prediction, scale, R, *facts
    precompile(q.device, key, lambda: _launches(CarveInputs(*meta(*tokens)), *meta(b_bias, *state), layout, *facts, settings))
    o, kept_S, kept_m, saved = forward(tokens, b_bias, *state, layout, resumed=initial_state is not None, save=save, **settings)
    final = CarveState(*state, layout.ends % layout.L // R)
    if kept_S is None or kept_m is None:
        return *layout.restore(o), final, None, None
    return *layout.restore(o), final, Kept(kept_S, kept_m), saved


@step_operator("table")
def carve_triton_slots(
    inputs: CarveInputs, b_bias: Tensor, table: CarveState, slots: Tensor | None, fresh: Tensor | None, cu_seqlens: Tensor | None,
    content_chunk: int, prediction: str, scale: float, R: int,
) -> Tensor:  # fmt: skip
    """o; what the sequences hold in the table advances in place. T counts rows, as in `carve_triton_fwd`.

    The recurrence reads and writes S in its slots, and is given rows of m, total and position, which are small. No number is read back:
    `position` lies inside a content chunk, and cu_seqlens rises from 0 to the tokens that there are, by contract.
    """
    check_contiguous(table)
    q, v, (S, m, total, position) = inputs.q, inputs.v, table
    if not v.numel():
        start_anew(table, slots, fresh, cu_seqlens, q)
        return torch.empty_like(v, memory_format=torch.contiguous_format)
    own = Slots.of(S, slots, fresh, cu_seqlens, len(q))
    state = S, own.read(m), own.read(total)
    layout, _, config = placed(q, v, own.read(position), cu_seqlens, content_chunk, R)
    tokens, b_bias = aligned(layout, inputs), b_bias.contiguous()
    settings = {"prediction": prediction, "scale": scale, "R": R, "config": config}
    key = "carve slots", config.name, kind(*tokens, b_bias), own.kind(), inputs.w1.shape, prediction, scale, R, content_chunk
    facts = True, False, content_chunk
    precompile(
        q.device,
        key,
        lambda: _launches(CarveInputs(*meta(*tokens)), *meta(b_bias, *state), layout, *facts, settings, own.meta()),
    )
    o, *_ = forward(tokens, b_bias, *state, layout, resumed=True, save=False, slots=own, **settings)
    own.clear(S)
    for column, x in zip((m, total, position), (*state[1:], layout.ends % layout.L // R), strict=True):
        own.write(column, x)
    (o,) = layout.restore(o)
    return o


@fake(carve_triton_slots)
def _(inputs: CarveInputs, *_):
    return torch.empty_like(inputs.v, memory_format=torch.contiguous_format)


@fake(carve_triton_fwd)
def _nothing(
    inputs: CarveInputs, b_bias: Tensor, initial_state: CarveState | None, cu_seqlens: Tensor | None,
    content_chunk: int, prediction: str, scale: float, R: int, save: bool,
) -> tuple[Tensor, CarveState, Kept | None, Saved | None]:  # fmt: skip
    """The results' shapes; without tokens also their values."""
    q, v = inputs.q, inputs.v
    o, state = torch.empty_like(v, memory_format=torch.contiguous_format), _state(inputs, initial_state, cu_seqlens)
    if not save:
        return o, state, None, None
    (B, T, H, V), K, N = v.shape, q.shape[-1], len(state[0])
    C = launch_config(ENGINE, q.device, q.dtype, K, V).launch["shared"]["C"]
    _, _, slots, T = Layout.sizes(initial_state is not None, cu_seqlens is not None, N, T, content_chunk * R, C)
    ST, ACC = solve_dtype(q.dtype), width(q)
    rows = lambda D: q.new_empty(B, T, H, D, dtype=ST)
    chunks = -(-T // C)
    square = lambda: q.new_empty(B, H, chunks * C, C, dtype=ST)
    kept = q.new_empty(slots, H, K, V, dtype=ACC), q.new_empty(slots, H, V, dtype=ACC)
    saved = Saved(rows(K), rows(K), rows(K), square(), square(), q.new_empty(B, H, chunks, K, dtype=ACC), rows(V))
    return o, state, Kept(*kept), saved


def _launches(
    tokens: CarveInputs, b_bias: Tensor, S: Tensor, m: Tensor, total: Tensor, layout: Layout,
    resumed: bool, save: bool, content_chunk: int, settings: dict[str, Any], own: Slots | None = None,
) -> None:  # fmt: skip
    """What a call and its backward launch."""
    layout = Layout(*meta(*layout))
    o, kept_S, kept_m, saved = forward(tokens, b_bias, S, m, total, layout, resumed=resumed, save=save, slots=own, **settings)
    if kept_S is not None and kept_m is not None:
        backward(
            torch.empty_like(o), S, m, total, tokens, b_bias, layout, layout.by_chunk(), kept_S, kept_m, saved,
            content_chunk=content_chunk, **settings,
        )  # fmt: skip


def placed(
    q: Tensor, v: Tensor, position: Tensor | None, cu_seqlens: Tensor | None, content_chunk: int, R: int
) -> tuple[Layout, ByChunk | None, LaunchConfig]:
    """Where rows go, the same by content chunk where it is found already, and the launch config."""
    config = launch_config(ENGINE, q.device, q.dtype, q.shape[-1], v.shape[-1])
    (B, T), C = q.shape[:2], config.launch["shared"]["C"]
    if position is None and cu_seqlens is not None:
        return *of_packed(cu_seqlens, T, content_chunk * R, C, R, q.device), config
    if position is None and stays(T, content_chunk * R, C):
        return *of_rows(q.device, B, T, content_chunk * R, C), config
    return Layout.of(position, cu_seqlens, B, T, content_chunk * R, C, R, q.device), None, config


def aligned(layout: Layout, inputs: CarveInputs) -> CarveInputs:
    """A row of no token writes nothing, reads nothing and keeps all; all contiguous."""
    q, k, v, f, b, w = inputs.tokens
    q, k, v, w = layout.align(q, k, v, w)
    f, b = layout.align(f, b, fill=-torch.inf)
    return CarveInputs(q, k, v, f, b, w, *each(Tensor.contiguous, *inputs.parameters))


def _state(inputs: CarveInputs, initial_state: CarveState | None, cu_seqlens: Tensor | None) -> CarveState:
    """S, m, total in the computing dtype and position, in memory of their own: an operator may not return what it was given."""
    q, (B, _, H, V), K = inputs.q, inputs.v.shape, inputs.q.shape[-1]
    if initial_state is None:
        N = B if cu_seqlens is None else len(cu_seqlens) - 1
        S, m, total = (q.new_zeros(N, H, *rest, dtype=width(q)) for rest in ((K, V), (V,), (V,)))
        return CarveState(S, m, total, q.new_zeros(N, dtype=torch.int64))
    S, m, total = each(lambda x: _own(x, width(q)), *initial_state[:3])
    return CarveState(S, m, total, _own(initial_state.position, torch.int64))


def _own(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


@recorded_backward_operator
def carve_triton_bwd(
    do: Tensor | None, dS: Tensor | None, dm: Tensor | None, dtotal: Tensor | None, inputs: CarveInputs, b_bias: Tensor,
    position: Tensor | None, cu_seqlens: Tensor | None, kept: Kept, saved: Saved,
    content_chunk: int, prediction: str, scale: float, R: int,
) -> tuple[CarveInputs, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of what the forward was given; S, m and total's float32 or wider."""
    q, v = inputs.q, inputs.v
    pairs = zip((dS, dm, dtotal), _state(inputs, None, cu_seqlens)[:3], strict=True)
    dS, dm, dtotal = (zero if dx is None else _own(dx, width(q)) for dx, zero in pairs)
    if not v.numel():
        return CarveInputs(*each(torch.zeros_like, *inputs)), torch.zeros_like(b_bias), dS, dm, dtotal
    do = torch.zeros_like(v) if do is None else do
    layout, by_chunk, config = placed(q, v, position, cu_seqlens, content_chunk, R)
    (do,) = layout.align(do)
    found, db_bias, dS, dm, dtotal = backward(
        do, dS, dm, dtotal, aligned(layout, inputs), b_bias.contiguous(), layout, by_chunk or layout.by_chunk(), *kept, saved,
        content_chunk=content_chunk, prediction=prediction, scale=scale, R=R, config=config,
    )  # fmt: skip
    given = (*layout.restore(*found.tokens), *found.parameters)
    gradients = CarveInputs(*(dx.to(x.dtype) for dx, x in zip(given, inputs, strict=True)))
    return gradients, db_bias.to(b_bias.dtype), dS, dm, dtotal


@fake(carve_triton_bwd)
def _(do, dS, dm, dtotal, inputs: CarveInputs, b_bias: Tensor, position, cu_seqlens: Tensor | None, *_):
    gradients = CarveInputs(*each(torch.empty_like, *inputs))
    return gradients, torch.empty_like(b_bias), *_state(inputs, None, cu_seqlens)[:3]


def _save(ctx, inputs, output) -> None:
    given, b_bias, state, cu_seqlens, *ctx.settings, _ = inputs
    *_, kept, saved = output
    ctx.save_for_backward(*given, b_bias, None if state is None else state.position, cu_seqlens, *kept, *saved)
    ctx.state_dtypes = (None,) * 3 if state is None else tuple(x.dtype for x in state[:3])
    ctx.set_materialize_grads(False)  # they would be zeros for all that is kept, too


def _backward(ctx, do, dS, dm, dtotal, *_):
    *gradients, dS, dm, dtotal = carve_triton_bwd(do, dS, dm, dtotal, *ctx.saved_tensors, *ctx.settings)
    pairs = zip((dS, dm, dtotal), ctx.state_dtypes, strict=True)
    return *gradients, *(None if kind is None else dx.to(kind) for dx, kind in pairs), *[None] * 7


differentiable(carve_triton_fwd, _backward, _save)
