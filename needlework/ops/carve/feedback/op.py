"""CARVE in Triton as an operator: layout, R rows a token, and what the backward keeps."""

import torch
from torch import Tensor

from needlework.ops.carve.arguments import check_position
from needlework.ops.carve.feedback.backward import backward
from needlework.ops.carve.feedback.forward import forward
from needlework.ops.carve.layout import Layout
from needlework.ops.carve.state import CarveOutput, CarveState
from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.common.shapes import width
from needlework.ops.delta.channel.operands import Saved
from needlework.ops.delta.inputs import solve_dtype
from needlework.ops.runtime.custom_op import backward_operator, differentiable, operator
from needlework.ops.runtime.launch_configs import launch_config
from needlework.ops.runtime.precompile import kind, meta, precompile

ENGINE = "delta/channel"  # whose recurrence it is


def carve(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, w: Tensor, A_log: Tensor, dt_bias: Tensor, w1: Tensor, w2: Tensor,
    b_bias: Tensor, initial_state: CarveState | None, cu_seqlens: Tensor | None, *, content_chunk: int, prediction: str, scale: float,
) -> CarveOutput:  # fmt: skip
    """o [B T H V] in q's dtype and the state, for arguments that `checked` has passed: k [B T H R K], v [B T H R V]."""
    S, m, total, position = (None,) * 4 if initial_state is None else initial_state
    R = k.shape[3]
    if R > 1:
        # the gate lies on a token's first row and the query on its last
        q, f, b = _one_row(q, R, R - 1, 0.0), _one_row(f, R, 0, -torch.inf), _one_row(b, R, 0, -torch.inf)
        w = w.repeat_interleave(R, 1)
    k, v = (x.transpose(2, 3).flatten(1, 2) for x in (k, v))
    tensors = q, k, v, f, b, w, A_log, dt_bias, w1, w2, b_bias, S, m, total
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
    *state, _ = _state(q, v, S, m, total, position, cu_seqlens)
    tokens = *aligned(layout, q, k, v, f, b, w), *(x.contiguous() for x in (A_log, dt_bias, w1, w2, b_bias))
    settings = {"prediction": prediction, "scale": scale, "R": R, "config": config}
    facts = m is not None, save, content_chunk
    key = "carve", config.name, kind(*tokens), w1.shape, prediction, scale, R, *facts
    precompile(q.device, key, lambda: _launches(meta(*tokens), meta(*state), layout, *facts, settings))
    o, kept_S, kept_m, saved = forward(*tokens, *state, layout, resumed=m is not None, save=save, **settings)
    kept = (kept_S, kept_m, *saved) if save else [q.new_empty(0) for _ in range(9)]
    return layout.restore(o), *state, layout.ends % layout.L // R, *kept


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


def _launches(tokens, state, layout: Layout, resumed: bool, save: bool, content_chunk: int, settings: dict) -> None:
    """What a call and its backward launch."""
    layout = Layout(*(x.to("meta") if isinstance(x, Tensor) else x for x in layout))
    o, kept_S, kept_m, saved = forward(*tokens, *state, layout, resumed=resumed, save=save, **settings)
    if save:
        backward(torch.empty_like(o), *state, *tokens, layout, kept_S, kept_m, saved, content_chunk=content_chunk, **settings)


def placed(q: Tensor, v: Tensor, position: Tensor | None, cu_seqlens: Tensor | None, content_chunk: int, R: int):
    """Where rows go, and the launch config."""
    config = launch_config(ENGINE, q.device, q.dtype, q.shape[-1], v.shape[-1])
    position, cu_seqlens = (None if x is None else x * R for x in (position, cu_seqlens))
    C = config.launch["shared"]["C"]
    return Layout.of(position, cu_seqlens, *q.shape[:2], content_chunk * R, C, q.device), config


def aligned(layout: Layout, q, k, v, f, b, w) -> list[Tensor]:
    """A row of no token writes nothing, reads nothing and keeps all."""
    keep_all = -torch.inf
    return [*map(layout.align, (q, k, v)), layout.align(f, keep_all), layout.align(b, keep_all), layout.align(w)]


def _state(q, v, S, m, total, position, cu_seqlens) -> list[Tensor]:
    """S, m, total in the computing dtype and position, in memory of their own: an operator may not return what it was given."""
    (B, _, H, V), K = v.shape, q.shape[-1]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    if S is None:
        state = [q.new_zeros(N, H, *rest, dtype=width(q)) for rest in ((K, V), (V,), (V,))]
        return [*state, q.new_zeros(N, dtype=torch.int64)]
    own = {"copy": True, "memory_format": torch.contiguous_format}
    return [*(x.to(width(q), **own) for x in (S, m, total)), position.to(torch.int64, **own)]


@backward_operator
def carve_triton_bwd(
    do: Tensor, dS: Tensor, dm: Tensor, dtotal: Tensor,
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, w: Tensor, A_log: Tensor, dt_bias: Tensor, w1: Tensor, w2: Tensor,
    b_bias: Tensor, position: Tensor | None, cu_seqlens: Tensor | None, kept_S: Tensor, kept_m: Tensor, saved: list[Tensor],
    content_chunk: int, prediction: str, scale: float, R: int,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q … w2 and b_bias, then of the S, m and total carried in."""
    inputs = q, k, v, f, b, w, A_log, dt_bias, w1, w2, b_bias
    state = [dx.to(width(q), copy=True, memory_format=torch.contiguous_format) for dx in (dS, dm, dtotal)]
    if not v.numel():
        return [*map(torch.zeros_like, inputs), *state]
    layout, config = placed(q, v, position, cu_seqlens, content_chunk, R)
    parameters = (x.contiguous() for x in inputs[6:])
    gradients = backward(
        layout.align(do), *state, *aligned(layout, *inputs[:6]), *parameters, layout, kept_S, kept_m, Saved(*saved),
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
    ctx.save_for_backward(*tensors, position, cu_seqlens, *output[5:])
    ctx.settings = content_chunk, prediction, scale, R
    ctx.state_dtypes = [None if x is None else x.dtype for x in (S, m, total)]
    ctx.set_materialize_grads(False)  # they would be zeros for all that is kept, too


def _backward(ctx, *given):
    *tensors, position, cu_seqlens, kept_S, kept_m = ctx.saved_tensors[:15]
    q, _, v = tensors[:3]
    zeros = torch.zeros_like(v) if given[0] is None else None, *_state(q, v, None, None, None, None, cu_seqlens)[:3]
    cotangents = (zero if dx is None else dx for dx, zero in zip(given[:4], zeros, strict=True))
    gradients = carve_triton_bwd(
        *cotangents, *tensors, position, cu_seqlens, kept_S, kept_m, list(ctx.saved_tensors[15:]), *ctx.settings
    )
    state = [None if kind is None else dx.to(kind) for dx, kind in zip(gradients[11:], ctx.state_dtypes, strict=True)]
    return *gradients[:11], *state, None, None, None, None, None, None, None


differentiable(carve_triton_fwd, _backward, _save)
