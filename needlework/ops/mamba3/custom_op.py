"""The rows of `chunk.py` as two operators that the compiler does not look into; what cu_seqlens holds is data and checked here."""

from torch import Tensor

from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.mamba3 import chunk
from needlework.ops.mamba3.chunk import RowInputs, Rows
from needlework.ops.mamba3.edges import Edges
from needlework.ops.runtime.custom_op import backward_operator, differentiable, fake, operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.precision import keep_precision


@operator
def mamba3_rows_fwd(inputs: RowInputs, cu_seqlens: Tensor | None, halves: bool) -> Rows:
    return chunk.forward(inputs, _edges(cu_seqlens, inputs.q), halves)


@backward_operator
def mamba3_rows_bwd(d: Rows, inputs: RowInputs, cu_seqlens: Tensor | None, halves: bool) -> RowInputs:
    """Gradients of `inputs`, from those of the rows."""
    return RowInputs(*each(Tensor.contiguous, *chunk.backward(d, inputs, _edges(cu_seqlens, inputs.q), halves)))


def _edges(cu_seqlens: Tensor | None, q: Tensor) -> Edges:
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *q.shape[:2])
    return Edges.of(cu_seqlens, q.shape[1])


@fake(mamba3_rows_fwd)
def _(inputs: RowInputs, cu_seqlens: Tensor | None, halves: bool) -> Rows:
    q, k0, angle0 = inputs.q, inputs.k0, inputs.angle0
    (B, T, H, R, K), V = q.shape, inputs.v.shape[-1]
    rows = (B, T + (1 if cu_seqlens is None else len(k0)), H, R)
    pairs = q.new_empty(B, T, H, R, R)
    later = q.new_empty(pairs.shape if R > 1 else 0)
    ends = k0.new_empty(k0.shape), angle0.new_empty(angle0.shape)
    return Rows(q.new_empty(*rows, K), q.new_empty(*rows, K), q.new_empty(*rows, V), pairs, later, *ends)


@fake(mamba3_rows_bwd)
def _(d: Rows, inputs: RowInputs, *_):
    return RowInputs(*(x.new_empty(x.shape) for x in inputs))


def _save(ctx, inputs, output) -> None:
    given, cu_seqlens, ctx.halves = inputs
    ctx.save_for_backward(*given, cu_seqlens)


def _backward(ctx, *gradients):
    return *mamba3_rows_bwd(*gradients, *ctx.saved_tensors, ctx.halves), None, None


differentiable(mamba3_rows_fwd, _backward, _save)
keep_precision(mamba3_rows_fwd, mamba3_rows_bwd)
