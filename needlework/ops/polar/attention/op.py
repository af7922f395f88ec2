"""Polar attention as operators of Triton kernels, forward and backward; their constants are in attention.launch.json.

`forward.py` streams keys past tiles of queries, `backward.py` has the backward. What is saved: q, k, v, the keys' mean in 16
bits a number (float32 and float64 as they are), and three numbers a query and head.
"""

import torch
from torch import Tensor

from needlework.ops.common.alignment import Alignment
from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.common.remembered import remembered
from needlework.ops.common.shapes import behind
from needlework.ops.polar.arguments import Parameters, Tokens
from needlework.ops.polar.attention.launches import ENGINE, KERNELS, Saved, Walk, backward, forward
from needlework.ops.polar.custom_op import polar_checked
from needlework.ops.polar.state import PolarState, after_pages
from needlework.ops.runtime.custom_op import differentiable, fake
from needlework.ops.runtime.launch_configs import launch_config, widths
from needlework.ops.runtime.precompile import kind, meta, precompile
from needlework.ops.runtime.recorded import recorded_backward_operator, recorded_operator


def _walk(
    tokens: Tokens, cu_seqlens: Tensor | None, held: Tensor | None, window: int | None, numbers: int
) -> tuple[Walk, Alignment]:  # fmt: skip
    """The walk over tokens as the alignment lays them, and that."""
    q, _, v = tokens
    (B, T, H, K), (HK, V) = q.shape, v.shape[2:]
    chosen = launch_config(ENGINE, q.device, q.dtype, K, V)
    C = chosen.launch["shared"]["C"]
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, B, T)
    align = Alignment.of(cu_seqlens, B, T, C, q.device)
    spans = None
    if cu_seqlens is not None:
        spans = _spans(cu_seqlens, T, C, q.device) if held is None else _asked(cu_seqlens, T, C, q.device, held)
    return Walk(chosen, q.dtype, B, align.T, H, HK, K, V, window, spans, numbers), align


def _asked(cu_seqlens: Tensor, T: int, C: int, device: torch.device, held: Tensor | None = None) -> Tensor:
    """Walk.spans of packed sequences; a chunk past the last one sees itself alone, and nothing sees it."""
    align = Alignment.of(cu_seqlens, 1, T, C, device)
    chunk = torch.arange(align.T // C, dtype=torch.int32, device=align.cum.device)
    n = torch.searchsorted(align.cum, chunk, right=True) - 1
    beyond = n >= align.N
    n = n.clamp(max=align.N - 1)
    start = torch.where(beyond, chunk * C, align.cum[n] * C)
    # by whole chunks, so that kernels of all tile sizes leave out the same rows
    asks = start if held is None else start + held.to(start)[n] // C * C
    end = torch.where(beyond, 0, start + cu_seqlens.to(start).diff()[n])
    return torch.stack((start, asks, end), 1).to(torch.int32)


_spans = remembered(_asked)


@recorded_operator
def polar_triton(
    tokens: Tokens, parameters: Parameters, cu_seqlens: Tensor | None, held: Tensor | None, window: int | None, numbers: int
) -> tuple[Tensor, Tensor]:
    """direction and magnitude, of keys that were so many numbers wide before zeros came behind."""
    direction, magnitude, _ = _call(tokens, parameters, cu_seqlens, held, window, numbers, save=False)
    return direction, magnitude


@recorded_operator
def polar_triton_fwd(
    tokens: Tokens, parameters: Parameters, cu_seqlens: Tensor | None, held: Tensor | None, window: int | None, numbers: int
) -> tuple[Tensor, Tensor, Saved]:
    """direction, magnitude (nothing for the first held [N] tokens of each sequence), and what the backward takes."""
    direction, magnitude, saved = _call(tokens, parameters, cu_seqlens, held, window, numbers, save=True)
    assert saved is not None  # asked for
    return direction, magnitude, saved


def _call(
    tokens: Tokens, parameters: Parameters, cu_seqlens: Tensor | None, held: Tensor | None, window: int | None, numbers: int,
    *, save: bool,
) -> tuple[Tensor, Tensor, Saved | None]:  # fmt: skip
    walk, align = _walk(tokens, cu_seqlens, held, window, numbers)
    tokens, parameters = Tokens(*align.align(*tokens)), parameters.map(Tensor.contiguous)
    tiles = (tuple(walk.own(kernel).items()) for kernel in KERNELS.values())
    key = ENGINE, walk.config.name, *tiles, kind(*tokens), numbers, cu_seqlens is not None, window is not None, save
    precompile(
        tokens.q.device, key, lambda: _launches(walk, Tokens(*meta(*tokens)), parameters.map(lambda x: meta(x)[0]), save)
    )
    direction, magnitude, saved = forward(walk, tokens, parameters, save)
    return *align.restore(direction, magnitude), saved


def _launches(walk: Walk, tokens: Tokens, parameters: Parameters, save: bool) -> None:
    direction, magnitude, saved = forward(walk, tokens, parameters, save)
    if saved is not None:
        backward(walk, direction, magnitude, saved, tokens, parameters)


@fake(polar_triton)
def _results(tokens: Tokens, *_) -> tuple[Tensor, Tensor]:
    q, V = tokens.q, tokens.v.shape[3]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(*q.shape[:3], V), q.new_empty(q.shape[:3], dtype=wide)


@fake(polar_triton_fwd)
def _(
    tokens: Tokens, parameters: Parameters, cu_seqlens: Tensor | None, held: Tensor | None, window: int | None, numbers: int
) -> tuple[Tensor, Tensor, Saved]:
    q, (B, T, H, K), V = tokens.q, tokens.q.shape, tokens.v.shape[3]
    C = launch_config(ENGINE, q.device, q.dtype, K, V).launch["shared"]["C"]
    _, aligned = Alignment.sizes(cu_seqlens, B, T, C)
    direction, magnitude = _results(tokens)
    mean = q.new_empty(B, aligned, H, V, dtype=torch.int16 if q.dtype.itemsize == 2 else q.dtype)
    return direction, magnitude, Saved(mean, magnitude.new_empty(B, H, 3, -(-aligned // C) * C))


@recorded_backward_operator
def polar_triton_bwd(
    ddirection: Tensor | None, dmagnitude: Tensor | None, saved: Saved, tokens: Tokens, parameters: Parameters,
    cu_seqlens: Tensor | None, held: Tensor | None, window: int | None, numbers: int,
) -> tuple[Tokens, Parameters]:  # fmt: skip
    """Gradients of the tokens and of the parameters."""
    walk, align = _walk(tokens, cu_seqlens, held, window, numbers)
    if saved.stats.shape[-1] != walk.rows:
        raise RuntimeError(
            f"{ENGINE}: the forward walked {saved.stats.shape[-1]} rows, the config for the backward has {walk.rows}"
        )
    direction, magnitude = _results(tokens)
    ddirection = direction.zero_() if ddirection is None else ddirection.contiguous()
    dmagnitude = magnitude.zero_() if dmagnitude is None else dmagnitude.contiguous()
    ddirection, dmagnitude, *aligned = align.align(ddirection, dmagnitude, *tokens)
    dtokens, dparameters = backward(walk, ddirection, dmagnitude, saved, Tokens(*aligned), parameters.map(Tensor.contiguous))
    return Tokens(*align.restore(*dtokens)), dparameters


@fake(polar_triton_bwd)
def _(ddirection, dmagnitude, saved: Saved, tokens: Tokens, parameters: Parameters, *_):
    return Tokens(*(x.new_empty(x.shape) for x in tokens)), parameters.map(lambda x: x.new_empty(x.shape))


def _save(ctx, inputs, output) -> None:
    tokens, parameters, cu_seqlens, held, *ctx.facts = inputs
    *_, saved = output
    ctx.save_for_backward(*saved, *tokens, *parameters, cu_seqlens, held)
    ctx.set_materialize_grads(False)


def _backward(ctx, ddirection, dmagnitude, *_):
    return *polar_triton_bwd(ddirection, dmagnitude, *ctx.saved_tensors, *ctx.facts), None, None, None, None


differentiable(polar_triton, _backward, _save, polar_triton_fwd)


def polar(
    tokens: Tokens, parameters: Parameters, initial_state: PolarState | None, cu_seqlens: Tensor | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """direction [B T Hq V] in q's dtype, magnitude [B T Hq] in float32 or float64; parameters are of magnitude's dtype."""
    held, place, sizes = None, None, tokens.q.shape[:2]
    if initial_state is not None:
        length = polar_checked(initial_state.length, initial_state.k.shape[1], cu_seqlens, window, *sizes)
        q, k, v, cu_seqlens, held, place = after_pages(*tokens, initial_state._replace(length=length), cu_seqlens, window)
        tokens = Tokens(q, k, v)
    q, k, v = tokens
    K, V = q.shape[-1], v.shape[-1]
    # a head's numbers in rows that the copy engine takes
    wide, wide_v = widths(ENGINE, q.device, q.dtype, K, V)
    tokens = Tokens(behind(q, wide), behind(k, wide), behind(v, wide_v))
    parameters = parameters._replace(v_null=behind(parameters.v_null, wide_v))
    direction, magnitude = polar_triton(*tokens, *parameters, cu_seqlens, held, window, K)
    if wide_v != V:
        direction = direction[..., :V]
    found = direction, magnitude
    return found if place is None else tuple(x[0, place].unflatten(0, sizes) for x in found)
