"""CARVE's fast path as two operators that the compiler does not look into: layout, dtypes and what backward keeps.

`Kept` has them of every content chunk that holds a token, sequence by sequence, in buffers as long as any layout of so many tokens may
need. Arguments have been checked, but for the values of cu_seqlens
and position, which are data.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.carve import chunk
from needlework.ops.carve.arguments import CarveInputs, check_position
from needlework.ops.carve.grid import Grid, gather, scatter
from needlework.ops.carve.state import CarveState
from needlework.ops.common.packing import check_cu_seqlens, lengths
from needlework.ops.common.shapes import width
from needlework.ops.runtime.custom_op import backward_operator, differentiable, fake, operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.precision import keep_precision


class Kept(NamedTuple):
    """State and content at the start of every content chunk."""

    S: Tensor
    m: Tensor


@operator
def carve_fwd(
    inputs: CarveInputs, initial_state: CarveState, cu_seqlens: Tensor | None,
    content_chunk: int, prediction: str, scale: float, chunk_size: int,
) -> tuple[Tensor, CarveState, Kept]:  # fmt: skip
    """o, the final state, and what the backward takes."""
    q, position = inputs.q, initial_state.position
    check_position(position, content_chunk)
    grid = _grid(q, position, cu_seqlens)
    S, m, total = (_copy(x, q) for x in initial_state[:3])
    o, S, m, total, starts = chunk.forward(
        _aligned(grid, inputs), S, m, total, grid.ends,
        content_chunk=content_chunk, prediction=prediction, scale=scale, chunk_size=chunk_size,
    )  # fmt: skip
    rows, live = _most_chunks(q, position, content_chunk), grid.chunks(content_chunk)
    kept_S, kept_m = S.new_zeros(rows, *S.shape[1:]), m.new_zeros(rows, *m.shape[1:])
    if starts:
        for kept, at_start in zip((kept_S, kept_m), zip(*starts, strict=True), strict=True):
            kept[: int(live.sum())] = gather(torch.stack(at_start, 1), live)
    final = CarveState(S, m, total, grid.ends % content_chunk)
    return grid.restore(o, like=q).to(q.dtype), final, Kept(kept_S, kept_m)


@backward_operator
def carve_bwd(
    do: Tensor, dS: Tensor, dm: Tensor, dtotal: Tensor, inputs: CarveInputs, position: Tensor, cu_seqlens: Tensor | None,
    kept: Kept, content_chunk: int, prediction: str, scale: float, chunk_size: int,
) -> tuple[CarveInputs, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of what the forward was given; S, m and total's float32 or wider."""
    q = inputs.q
    grid = _grid(q, position, cu_seqlens)
    live = grid.chunks(content_chunk)
    starts = [scatter(x[: int(live.sum())], live).unbind(1) for x in kept]
    do, (dS, dm, dtotal) = grid.align(do.to(width(q))), (_copy(x, q) for x in (dS, dm, dtotal))
    found, dS, dm, dtotal = chunk.backward(
        do, dS, dm, dtotal, _aligned(grid, inputs), list(zip(*starts, strict=True)), grid.ends,
        content_chunk=content_chunk, prediction=prediction, scale=scale, chunk_size=chunk_size,
    )  # fmt: skip
    tokens = (grid.restore(dx, like=q) for dx in found.tokens)
    given = (dx.to(x.dtype).contiguous() for dx, x in zip((*tokens, *found.parameters), inputs, strict=True))
    return CarveInputs(*given), dS, dm, dtotal


def _grid(q: Tensor, position: Tensor, cu_seqlens: Tensor | None) -> Grid:
    if cu_seqlens is None:
        return Grid.of(position, torch.full_like(position, q.shape[1]))
    check_cu_seqlens(cu_seqlens, *q.shape[:2])
    return Grid.of(position, lengths(cu_seqlens).to(position))


def _copy(state: Tensor, q: Tensor) -> Tensor:
    """A copy of a state in the computing dtype: an operator may not return its argument."""
    return state.to(width(q), copy=True, memory_format=torch.contiguous_format)


def _aligned(grid: Grid, inputs: CarveInputs) -> CarveInputs:
    """q … w2 in the computing dtype, tokens on the grid: a virtual token writes nothing, reads nothing and keeps all."""
    dtype = width(inputs.q)
    wide = CarveInputs(*each(lambda x: x.to(dtype), *inputs))
    q, k, v, f, b, w = wide.tokens
    keep_all = -torch.inf
    tokens = grid.align(q), grid.align(k), grid.align(v), grid.align(f, keep_all), grid.align(b, keep_all), grid.align(w)
    return CarveInputs(*tokens, *wide.parameters)


def _most_chunks(q: Tensor, position: Tensor, content_chunk: int) -> int:
    """Content chunks that the tokens of q touch at most, whatever the lengths and positions of their sequences."""
    return (q.shape[0] * q.shape[1] + 2 * len(position) * (content_chunk - 1)) // content_chunk


@fake(carve_fwd)
def _(inputs: CarveInputs, initial_state: CarveState, cu_seqlens: Tensor | None, content_chunk: int, *_):
    q, (S, m, total, position) = inputs.q, initial_state
    rows = _most_chunks(q, position, content_chunk)
    S, m, total = (x.new_empty(x.shape, dtype=width(q)) for x in (S, m, total))
    kept = Kept(*(x.new_empty(rows, *x.shape[1:], dtype=width(q)) for x in (S, m)))
    return q.new_empty(*q.shape[:3], inputs.v.shape[-1]), CarveState(S, m, total, torch.empty_like(position)), kept


@fake(carve_bwd)
def _(do, dS, dm, dtotal, inputs: CarveInputs, *_):
    states = (x.new_empty(x.shape, dtype=width(inputs.q)) for x in (dS, dm, dtotal))
    return CarveInputs(*(x.new_empty(x.shape) for x in inputs)), *states


def _save(ctx, inputs, output) -> None:
    given, state, cu_seqlens, *ctx.settings = inputs
    *_, kept = output
    ctx.save_for_backward(*given, state.position, cu_seqlens, *kept)
    ctx.state_dtypes = tuple(x.dtype for x in state[:3])


def _backward(ctx, do, dS, dm, dtotal, *_):
    *gradients, dS, dm, dtotal = carve_bwd(do, dS, dm, dtotal, *ctx.saved_tensors, *ctx.settings)
    state = (dx.to(dtype) for dx, dtype in zip((dS, dm, dtotal), ctx.state_dtypes, strict=True))
    return *gradients, *state, *[None] * 6


differentiable(carve_fwd, _backward, _save)
keep_precision(carve_fwd, carve_bwd)
