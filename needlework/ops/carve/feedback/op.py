"""CARVE in Triton as an operator: layout, R rows a token, and what the backward keeps."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from needlework.ops.carve.arguments import CarveInputs, check_position
from needlework.ops.carve.feedback.backward import backward
from needlework.ops.carve.feedback.forward import forward
from needlework.ops.carve.layout import Layout
from needlework.ops.carve.state import CarveOutput, CarveState
from needlework.ops.common.kernels.slot_rows import Slots
from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.common.shapes import width
from needlework.ops.common.slots import check_contiguous, start_anew
from needlework.ops.delta.channel.operands import Saved
from needlework.ops.delta.inputs import solve_dtype
from needlework.ops.runtime.custom_op import backward_operator, differentiable, operator, step_operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import LaunchConfig, launch_config
from needlework.ops.runtime.precompile import kind, meta, precompile

ENGINE = "delta/channel"  # whose recurrence it is


class Kept(NamedTuple):
    """What the backward is given beside the cotangents and `Saved`, in the order of its operator's arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    f: Tensor
    b: Tensor
    w: Tensor
    A_log: Tensor
    dt_bias: Tensor
    w1: Tensor
    w2: Tensor
    b_bias: Tensor
    position: Tensor | None
    cu_seqlens: Tensor | None
    S: Tensor  # [slots H K V], at the start of every content chunk
    m: Tensor  # [slots H V], likewise


def carve(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, w: Tensor, A_log: Tensor, dt_bias: Tensor, w1: Tensor, w2: Tensor,
    b_bias: Tensor, initial_state: CarveState | None, cu_seqlens: Tensor | None, *, content_chunk: int, prediction: str, scale: float,
    table: CarveState | None = None, slots: Tensor | None = None, fresh: Tensor | None = None,
) -> CarveOutput:  # fmt: skip
    """o [B T H V] in q's dtype and the state, for arguments that `checked` has passed: k [B T H R K], v [B T H R V].

    With a table, whose slots advance in place, the state is None.
    """
    S, m, total, position = (None,) * 4 if initial_state is None else initial_state
    R = k.shape[3]
    if R > 1:
        # the gate lies on a token's first row and the query on its last
        q, f, b = _one_row(q, R, R - 1, 0.0), _one_row(f, R, 0, -torch.inf), _one_row(b, R, 0, -torch.inf)
        w = w.repeat_interleave(R, 1)
    k, v = (x.transpose(2, 3).flatten(1, 2) for x in (k, v))
    inputs = q, k, v, f, b, w, A_log, dt_bias, w1, w2, b_bias
    if table is not None:
        o = carve_triton_slots(*inputs, *table, slots, fresh, cu_seqlens, content_chunk, prediction, scale, R)
        return CarveOutput(o[:, R - 1 :: R], None)
    tensors = *inputs, S, m, total
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    o, S, m, total, position, *_ = carve_triton_fwd(*tensors, position, cu_seqlens, content_chunk, prediction, scale, R, save)
    return CarveOutput(o[:, R - 1 :: R], CarveState(S, m, total, position))


def _one_row(x: Tensor, R: int, row: int, fill: float) -> Tensor:
    """[B T ...] -> [B T·R ...]: x in one row of each token, `fill` in the others."""
    others = torch.full_like(x, fill)
    return torch.stack([x if i == row else others for i in range(R)], 2).flatten(1, 2)


@operator
def carve_triton_fwd(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, w: Tensor, A_log: Tensor, dt_bias: Tensor, w1: Tensor, w2: Tensor,
    b_bias: Tensor, S: Tensor | None, m: Tensor | None, total: Tensor | None, position: Tensor | None, cu_seqlens: Tensor | None,
    content_chunk: int, prediction: str, scale: float, R: int, save: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """o, S, m, total, position, kept_S, kept_m and `Saved`, the last nine empty without `save`.

    T counts rows, R a token; position and content_chunk count tokens. S, m, total, position: all or none, None as zeros.
    """
    if position is not None:
        check_position(position, content_chunk)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q.shape[0], q.shape[1] // R)
    if not v.numel():
        return _nothing(
            q, k, v, f, b, w, A_log, dt_bias, w1, w2, b_bias, S, m, total, position, cu_seqlens, content_chunk, "", 0.0, R, save
        )
    layout, config = placed(q, v, position, cu_seqlens, content_chunk, R)
    resumed, state = m is not None, _state(q, v, S, m, total, position, cu_seqlens)[:3]
    tokens, b_bias = aligned(layout, CarveInputs(q, k, v, f, b, w, A_log, dt_bias, w1, w2)), b_bias.contiguous()
    settings = {"prediction": prediction, "scale": scale, "R": R, "config": config}
    facts = resumed, save, content_chunk
    key = "carve", config.name, kind(*tokens, b_bias), w1.shape, prediction, scale, R, *facts
    precompile(q.device, key, lambda: _launches(CarveInputs(*meta(*tokens)), *meta(b_bias, *state), layout, *facts, settings))
    o, kept_S, kept_m, saved = forward(*tokens, b_bias, *state, layout, resumed=resumed, save=save, **settings)
    found = layout.restore(o), *state, layout.ends % layout.L // R
    if kept_S is None or kept_m is None:
        return *found, *each(lambda x: x.new_empty(0), q, q, q, q, q, q, q, q, q)
    assert saved.e_hat is not None and saved.Tp is not None and saved.W is not None  # w erases, and W is kept with the others
    return *found, kept_S, kept_m, saved.q_hat, saved.e_hat, saved.k_hat, saved.Tp, saved.Pp, saved.whole, saved.W


@step_operator("S", "m", "total", "position")
def carve_triton_slots(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, w: Tensor, A_log: Tensor, dt_bias: Tensor, w1: Tensor, w2: Tensor,
    b_bias: Tensor, S: Tensor, m: Tensor, total: Tensor, position: Tensor, slots: Tensor | None, fresh: Tensor | None,
    cu_seqlens: Tensor | None, content_chunk: int, prediction: str, scale: float, R: int,
) -> Tensor:  # fmt: skip
    """o; what the sequences hold in the table S, m, total, position advances in place. T counts rows, as in `carve_triton_fwd`.

    The recurrence reads and writes S in its slots, and is given rows of m, total and position, which are small. No number is read back:
    `position` lies inside a content chunk, and cu_seqlens rises from 0 to the tokens that there are, by contract.
    """
    check_contiguous(S=S, m=m, total=total, position=position)
    if not v.numel():
        start_anew(CarveState(S, m, total, position), slots, fresh, cu_seqlens, q)
        return torch.empty_like(v, memory_format=torch.contiguous_format)
    own = Slots.of(S, slots, fresh, cu_seqlens, len(q))
    state = S, own.read(m), own.read(total)
    layout, config = placed(q, v, own.read(position), cu_seqlens, content_chunk, R)
    tokens, b_bias = aligned(layout, CarveInputs(q, k, v, f, b, w, A_log, dt_bias, w1, w2)), b_bias.contiguous()
    settings = {"prediction": prediction, "scale": scale, "R": R, "config": config}
    key = "carve slots", config.name, kind(*tokens, b_bias), own.kind(), w1.shape, prediction, scale, R, content_chunk
    facts = True, False, content_chunk
    precompile(
        q.device,
        key,
        lambda: _launches(CarveInputs(*meta(*tokens)), *meta(b_bias, *state), layout, *facts, settings, own.meta()),
    )
    o, *_ = forward(*tokens, b_bias, *state, layout, resumed=True, save=False, slots=own, **settings)
    own.clear(S)
    for column, x in zip((m, total, position), (*state[1:], layout.ends % layout.L // R), strict=True):
        own.write(column, x)
    return layout.restore(o)


@torch.library.register_fake(carve_triton_slots)
def _(q, k, v, *_):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@torch.library.register_fake(carve_triton_fwd)
def _nothing(
    q, k, v, f, b, w, A_log, dt_bias, w1, w2, b_bias, S, m, total, position, cu_seqlens, content_chunk, prediction, scale, R, save
):  # fmt: skip
    """The results' shapes; without tokens also their values."""
    o, state = torch.empty_like(v, memory_format=torch.contiguous_format), _state(q, v, S, m, total, position, cu_seqlens)
    if not save:
        return o, *state, *(q.new_empty(0) for _ in range(9))
    (B, T, H, V), K, N = v.shape, q.shape[-1], len(state[0])
    C = launch_config(ENGINE, q.device, q.dtype, K, V).launch["shared"]["C"]
    _, _, slots, T = Layout.sizes(position is not None, cu_seqlens is not None, N, T, content_chunk * R, C)
    ST, ACC = solve_dtype(q.dtype), width(q)
    rows = lambda D: q.new_empty(B, T, H, D, dtype=ST)
    chunks = -(-T // C)
    square = lambda: q.new_empty(B, H, chunks * C, C, dtype=ST)
    kept = q.new_empty(slots, H, K, V, dtype=ACC), q.new_empty(slots, H, V, dtype=ACC)
    saved = Saved(rows(K), rows(K), rows(K), square(), square(), q.new_empty(B, H, chunks, K, dtype=ACC), rows(V))
    return o, *state, *kept, *saved


def _launches(
    tokens: CarveInputs, b_bias: Tensor, S: Tensor, m: Tensor, total: Tensor, layout: Layout,
    resumed: bool, save: bool, content_chunk: int, settings: dict[str, Any], own: Slots | None = None,
) -> None:  # fmt: skip
    """What a call and its backward launch."""
    layout = Layout(*meta(*layout))
    o, kept_S, kept_m, saved = forward(*tokens, b_bias, S, m, total, layout, resumed=resumed, save=save, slots=own, **settings)
    if kept_S is not None and kept_m is not None:
        backward(
            torch.empty_like(o), S, m, total, *tokens, b_bias, layout, kept_S, kept_m, saved,
            content_chunk=content_chunk, **settings,
        )  # fmt: skip


def placed(
    q: Tensor, v: Tensor, position: Tensor | None, cu_seqlens: Tensor | None, content_chunk: int, R: int
) -> tuple[Layout, LaunchConfig]:
    """Where rows go, and the launch config."""
    config = launch_config(ENGINE, q.device, q.dtype, q.shape[-1], v.shape[-1])
    position, cu_seqlens = (None if x is None else x * R for x in (position, cu_seqlens))
    (B, T), C = q.shape[:2], config.launch["shared"]["C"]
    return Layout.of(position, cu_seqlens, B, T, content_chunk * R, C, q.device), config


def aligned(layout: Layout, inputs: CarveInputs) -> CarveInputs:
    """A row of no token writes nothing, reads nothing and keeps all; all contiguous."""
    keep_all = -torch.inf
    q, k, v, f, b, w, *_ = inputs
    tokens = *each(layout.align, q, k, v), layout.align(f, keep_all), layout.align(b, keep_all), layout.align(w)
    return CarveInputs(*tokens, *each(Tensor.contiguous, *inputs[6:]))


def _state(
    q: Tensor, v: Tensor, S: Tensor | None, m: Tensor | None, total: Tensor | None, position: Tensor | None,
    cu_seqlens: Tensor | None,
) -> CarveState:  # fmt: skip
    """S, m, total in the computing dtype and position, in memory of their own: an operator may not return what it was given."""
    (B, _, H, V), K = v.shape, q.shape[-1]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    if S is None or m is None or total is None or position is None:
        S, m, total = (q.new_zeros(N, H, *rest, dtype=width(q)) for rest in ((K, V), (V,), (V,)))
        return CarveState(S, m, total, q.new_zeros(N, dtype=torch.int64))
    own = lambda x, dtype: x.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return CarveState(own(S, width(q)), own(m, width(q)), own(total, width(q)), own(position, torch.int64))


@backward_operator
def carve_triton_bwd(
    do: Tensor, dS: Tensor, dm: Tensor, dtotal: Tensor,
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, w: Tensor, A_log: Tensor, dt_bias: Tensor, w1: Tensor, w2: Tensor,
    b_bias: Tensor, position: Tensor | None, cu_seqlens: Tensor | None, kept_S: Tensor, kept_m: Tensor, saved: list[Tensor],
    content_chunk: int, prediction: str, scale: float, R: int,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q … w2 and b_bias, then of the S, m and total carried in."""
    inputs = q, k, v, f, b, w, A_log, dt_bias, w1, w2, b_bias
    state = each(lambda dx: dx.to(width(q), copy=True, memory_format=torch.contiguous_format), dS, dm, dtotal)
    if not v.numel():
        return [*map(torch.zeros_like, inputs), *state]
    layout, config = placed(q, v, position, cu_seqlens, content_chunk, R)
    gradients = backward(
        layout.align(do), *state, *aligned(layout, CarveInputs(*inputs[:-1])), b_bias.contiguous(), layout, kept_S, kept_m, Saved(*saved),
        content_chunk=content_chunk, prediction=prediction, scale=scale, R=R, config=config,
    )  # fmt: skip
    tokens = (layout.restore(dx).to(x.dtype) for dx, x in zip(gradients[:6], inputs[:6], strict=True))
    return [*tokens, *(dx.to(x.dtype) for dx, x in zip(gradients[6:11], inputs[6:], strict=True)), *gradients[11:]]


@torch.library.register_fake(carve_triton_bwd)
def _(do, dS, dm, dtotal, *tensors):
    return [torch.empty_like(x) for x in tensors[:11]] + [
        x.new_empty(x.shape, dtype=width(tensors[0])) for x in (dS, dm, dtotal)
    ]


def _save(ctx, inputs, output) -> None:
    *tensors, S, m, total, position, cu_seqlens, content_chunk, prediction, scale, R, _ = inputs
    kept = Kept(*tensors, position=position, cu_seqlens=cu_seqlens, S=output[5], m=output[6])
    ctx.save_for_backward(*kept, *output[7:])
    ctx.settings = content_chunk, prediction, scale, R
    ctx.state_dtypes = [None if x is None else x.dtype for x in (S, m, total)]
    ctx.set_materialize_grads(False)  # they would be zeros for all that is kept, too


def _backward(ctx, *given):
    tensors, fields = ctx.saved_tensors, len(Kept._fields)
    kept, saved = Kept(*tensors[:fields]), list(tensors[fields:])
    zeros = torch.zeros_like(kept.v) if given[0] is None else None, *_state(kept.q, kept.v, *(None,) * 4, kept.cu_seqlens)[:3]
    cotangents = (zero if dx is None else dx for dx, zero in zip(given[:4], zeros, strict=True))
    gradients = carve_triton_bwd(*cotangents, *kept, saved, *ctx.settings)
    state = [None if kind is None else dx.to(kind) for dx, kind in zip(gradients[11:], ctx.state_dtypes, strict=True)]
    return *gradients[:11], *state, None, None, None, None, None, None, None


differentiable(carve_triton_fwd, _backward, _save)
