"""LUCID-PaTH's solve as an operator that the compiler does not look into; `path_grow` makes its state. Tensors share one dtype, float32 or
float64; keys are of norm 1 when they come."""

from torch import Tensor

from needlework.ops.path.arguments import PathKeys, check_data
from needlework.ops.path.chunk import History
from needlework.ops.path.custom_op import StateGradients, batch, copies, like, packed
from needlework.ops.path.solve import chunk
from needlework.ops.path.state import PathState
from needlework.ops.runtime.custom_op import backward_operator, differentiable, fake, operator
from needlework.ops.runtime.precision import keep_precision


@operator
def lucid_path_fwd(
    keys: PathKeys, initial_state: PathState, cu_seqlens: Tensor | None, window: int | None, chunk_size: int
) -> Tensor:
    """y. initial_state: with y for v."""
    check_data(initial_state.length, initial_state.k.shape[1], window, cu_seqlens, *keys.k.shape[:2])
    y = chunk.forward(*batch(cu_seqlens, *keys), History(*initial_state[:5], window), chunk_size=chunk_size)
    (y,) = packed(cu_seqlens, y)
    return y


@fake(lucid_path_fwd)
def _(keys: PathKeys, *_):
    return keys.v.new_empty(keys.v.shape)


@backward_operator
def lucid_path_bwd(
    dy: Tensor,
    y: Tensor,
    keys: PathKeys,
    initial_state: PathState,
    cu_seqlens: Tensor | None,
    window: int | None,
    chunk_size: int,
) -> tuple[PathKeys, StateGradients]:
    """Gradients of `keys` and `initial_state`."""
    dy, k, y, beta, w = batch(cu_seqlens, dy, keys.k, y, keys.beta, keys.w)
    found = chunk.backward(dy, k, y, beta, w, History(*initial_state[:5], window), chunk_size=chunk_size)
    own = packed(cu_seqlens, found.k, found.v, found.beta, found.w)
    before = found.page_k, found.page_v, found.open_w, found.open_beta, None
    return PathKeys(*copies(*own)), StateGradients(*copies(*before))


@fake(lucid_path_bwd)
def _(dy: Tensor, y: Tensor, keys: PathKeys, initial_state: PathState, *_):
    return PathKeys(*like(*keys)), StateGradients(*like(*initial_state[:4]), None)


def _save(ctx, inputs, output) -> None:
    keys, initial_state, cu_seqlens, ctx.window, ctx.chunk_size = inputs
    ctx.save_for_backward(output, *keys, *initial_state, cu_seqlens)


def _backward(ctx, dy):
    *found, _ = lucid_path_bwd(dy, *ctx.saved_tensors, ctx.window, ctx.chunk_size)  # no gates
    return *found, None, None, None, None, None


differentiable(lucid_path_fwd, _backward, _save)

keep_precision(lucid_path_fwd, lucid_path_bwd)
