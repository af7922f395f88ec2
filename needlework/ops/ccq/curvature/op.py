"""CCQ in Triton: `clean`, and the custom ops needlework::ccq_triton, _fwd and _bwd behind it.

The forward saves Σq, the centred keys, their scores and a few numbers a token; the backward makes the covariances again. C is
symmetric by contract, and so is its gradient here.
"""

import torch
from torch import Tensor

from needlework.ops.ccq.arguments import CcqInputs
from needlework.ops.ccq.curvature.backward import gradients, nothing_read, of_first_state
from needlework.ops.ccq.curvature.forward import forward, no_chunk, untouched
from needlework.ops.ccq.curvature.intra import ROWS
from needlework.ops.ccq.curvature.operands import ENGINE, NO_STATE, Saved, Task, filled, task_of
from needlework.ops.ccq.state import CurvatureState
from needlework.ops.common.alignment import Alignment
from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.common.shapes import behind, behind_both
from needlework.ops.runtime.custom_op import differentiable, fake, step_operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import LaunchConfig, launch_config, widths
from needlework.ops.runtime.precompile import kind, meta, precompile
from needlework.ops.runtime.recorded import recorded_backward_operator, recorded_operator
from needlework.ops.slots.rows import Slots
from needlework.ops.slots.table import check_contiguous, start_anew


def clean(inputs: CcqInputs, initial_state: CurvatureState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, CurvatureState]:
    """q̃ [B T HV K] of contiguous tensors and the final state, float32 or wider."""
    q, K = inputs.q, inputs.q.shape[-1]
    wide, _ = widths(ENGINE, q.device, q.dtype, K, K)
    if wide != K:
        inputs = inputs._replace(q=behind(q, wide), k=behind(inputs.k, wide))
        if initial_state is not None:
            C, mean, n = initial_state
            initial_state = CurvatureState(behind_both(C, wide, wide), behind(mean, wide), n)
        cleaned, (C, mean, n) = clean(inputs, initial_state, cu_seqlens)
        return cleaned[..., :K], CurvatureState(C[..., :K, :K], mean[..., :K], n)
    given = (*inputs, *(initial_state or NO_STATE))
    cleaned, *final = ccq_triton(*given, cu_seqlens)
    return cleaned, CurvatureState(*final[:3])


@recorded_operator
def ccq_triton(
    inputs: CcqInputs, initial_state: CurvatureState | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, CurvatureState]:
    """q̃ and the final state."""
    return _call(inputs, initial_state, cu_seqlens, save=False)[:2]


@step_operator("table")
def ccq_triton_slots(
    inputs: CcqInputs, table: CurvatureState, slots: Tensor | None, fresh: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """q̃; what the sequences hold in the table advances in place.

    The walk reads and writes C in its slots, except of sequences that are cut; kernels are given rows of mean and n, which are small. No
    number is read back: cu_seqlens rises from 0 to the tokens that there are, and C is symmetric, by contract.
    """
    check_contiguous(table)
    q, (C, mean, n) = inputs.q, table
    if not q.numel():
        start_anew(table, slots, fresh, cu_seqlens, q)
        return q.new_empty(*inputs.eta.shape, q.shape[-1])
    own = Slots.of(C, slots, fresh, cu_seqlens, len(q))
    state = CurvatureState(C, own.read(mean), own.read(n))
    cleaned, final, _ = _call(inputs, state, cu_seqlens, save=False, own=own)
    own.clear(C)
    own.write(mean, final.mean)
    own.write(n, final.n)
    return cleaned


@recorded_operator
def ccq_triton_fwd(
    inputs: CcqInputs, initial_state: CurvatureState | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, CurvatureState, Saved]:
    """q̃, the final state, and what the backward takes."""
    cleaned, final, kept = _call(inputs, initial_state, cu_seqlens, save=True)
    assert kept is not None  # saved
    return cleaned, final, kept


def _call(
    inputs: CcqInputs, initial_state: CurvatureState | None, cu_seqlens: Tensor | None, *, save: bool, own: Slots | None = None
) -> tuple[Tensor, CurvatureState, Saved | None]:
    """`forward` of tokens that lie as the caller has them. own: C is a table."""
    q, eta = inputs.q, inputs.eta
    if cu_seqlens is not None and own is None:
        check_cu_seqlens(cu_seqlens, *q.shape[:2])
    K, packed = q.shape[-1], cu_seqlens is not None
    chosen = launch_config(ENGINE, q.device, q.dtype, K, K)
    task, at = _task(inputs, cu_seqlens, chosen, own)
    if initial_state is not None and own is None:
        initial_state = CurvatureState(*each(Tensor.contiguous, *initial_state))
    if q.numel() == 0:
        return q.new_empty(*eta.shape, K), untouched(task, initial_state), no_chunk(q, task)
    tokens = CcqInputs(*at.align(*inputs))
    key = ENGINE, chosen.name, kind(*tokens, *(initial_state or NO_STATE)), packed, save, task.length > 0, own and own.kind()
    precompile(q.device, key, lambda: _launches(tokens, initial_state, task, save, own))
    cleaned, final, kept = forward(tokens, initial_state, task, save, own)
    return *at.restore(cleaned), final, kept


def _task(
    inputs: CcqInputs, cu_seqlens: Tensor | None, chosen: LaunchConfig, own: Slots | None = None
) -> tuple[Task, Alignment]:
    """A call's task, and where its tokens go."""
    (B, T), device, C = inputs.q.shape[:2], inputs.q.device, chosen.launch["shared"]["C"]
    at = Alignment.of(cu_seqlens, B, T, C, device)
    fill = None if cu_seqlens is None else filled(cu_seqlens, T, C, device)
    return task_of(inputs, cu_seqlens, at, fill, chosen, own), at


def _launches(tokens: CcqInputs, initial_state: CurvatureState | None, task: Task, save: bool, own: Slots | None) -> None:
    """What a call and its backward launch, on meta tensors."""
    task, tokens = task._replace(device=torch.device("meta")), CcqInputs(*meta(*tokens))
    initial_state = None if initial_state is None else CurvatureState(*meta(*initial_state))
    cleaned, final, kept = forward(tokens, initial_state, task, save, None if own is None else own.meta())
    if kept is not None:
        C = None if initial_state is None else initial_state.C
        gradients(torch.empty_like(cleaned), None, None, None, tokens, C, final.n, kept, task)


@fake(ccq_triton)
def _results(
    inputs: CcqInputs, initial_state: CurvatureState | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, CurvatureState]:
    q, (H, K) = inputs.q, inputs.q.shape[2:]
    N = len(q) if cu_seqlens is None else len(cu_seqlens) - 1
    number = lambda *sizes: q.new_empty(*sizes, dtype=torch.promote_types(q.dtype, torch.float32))
    state = CurvatureState(number(N, H, K, K), number(N, H, K), number(N, H))
    return q.new_empty(*inputs.eta.shape, K), state


@fake(ccq_triton_slots)
def _(inputs: CcqInputs, *_):
    return inputs.q.new_empty(*inputs.eta.shape, inputs.q.shape[-1])


@fake(ccq_triton_fwd)
def _(
    inputs: CcqInputs, initial_state: CurvatureState | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, CurvatureState, Saved]:
    q, (B, T, H, K) = inputs.q, inputs.q.shape
    chunk = launch_config(ENGINE, q.device, q.dtype, K, K).launch["shared"]["C"]
    wide = torch.promote_types(q.dtype, torch.float32)

    def number(*sizes: int) -> Tensor:
        return q.new_empty(*sizes, dtype=wide)

    _, aligned = Alignment.sizes(cu_seqlens, B, T, chunk)
    rows = B * (-(-aligned // chunk))
    kept = Saved(
        Sq=q.new_empty(B, aligned, H, K),
        kc=q.new_empty(B, aligned, H, K),
        P=q.new_empty(rows, H, chunk, chunk),
        E=number(rows, H, ROWS.value, chunk),
        mean=number(rows, H, K),
        step=number(rows, H, K),
        n=number(rows, H),
        mass=number(rows, H),
        G=None if inputs.g is None else number(rows, H, 2, chunk),
    )
    return *_results(inputs, initial_state, cu_seqlens), kept


@recorded_backward_operator
def ccq_triton_bwd(
    dcleaned: Tensor | None, dC: Tensor | None, dmean: Tensor | None, dn: Tensor | None, inputs: CcqInputs,
    initial_state: CurvatureState | None, cu_seqlens: Tensor | None, n1: Tensor, kept: Saved,
) -> tuple[CcqInputs, CurvatureState | None]:  # fmt: skip
    """Gradients of `inputs` and of the initial state. n1: n after the last token."""
    q, g, K = inputs.q, inputs.g, inputs.q.shape[-1]
    chosen = launch_config(ENGINE, q.device, q.dtype, K, K)
    if kept.P.shape[-1] != chosen.launch["shared"]["C"]:
        raise RuntimeError(
            f"{ENGINE}: the forward ran with chunks of {kept.P.shape[-1]}, the config for the backward has others"
        )
    if q.numel() == 0:
        return CcqInputs(*each(torch.zeros_like, *inputs)), nothing_read(initial_state, dC, dmean, dn)
    task, at = _task(inputs, cu_seqlens, chosen)
    dcleaned = q.new_zeros(*inputs.eta.shape, K) if dcleaned is None else dcleaned.contiguous()
    # the kernels read sums of g that the forward has kept
    dcleaned, q, k, eta = at.align(dcleaned, inputs.q, inputs.k, inputs.eta)
    tokens = CcqInputs(q, k, eta, g)
    if initial_state is not None:
        initial_state = CurvatureState(*each(Tensor.contiguous, *initial_state))
    C = None if initial_state is None else initial_state.C
    found, first, scale = gradients(dcleaned, dC, dmean, dn, tokens, C, n1, kept, task)
    found = CcqInputs(*at.restore(*found))
    found = found if g is None or found.g is None else found._replace(g=found.g.to(g.dtype))
    if initial_state is None or first is None:
        return found, None
    return found, of_first_state(task, scale, first, kept.mean, initial_state, dmean)


@fake(ccq_triton_bwd)
def _(dcleaned, dC, dmean, dn, inputs: CcqInputs, initial_state: CurvatureState | None, *_):
    state = None if initial_state is None else CurvatureState(*each(torch.empty_like, *initial_state))
    return CcqInputs(*each(torch.empty_like, *inputs)), state


def _save(ctx, inputs, output) -> None:
    given, initial_state, cu_seqlens = inputs
    _, final, kept = output
    ctx.save_for_backward(*given, *(initial_state or NO_STATE), cu_seqlens, final.n, *kept)
    ctx.set_materialize_grads(False)


def _backward(ctx, dcleaned, dC, dmean, dn, *_):
    found = ccq_triton_bwd(dcleaned, dC, dmean, dn, *ctx.saved_tensors)
    return *(dx if needed else None for dx, needed in zip(found, ctx.needs_input_grad, strict=False)), None


differentiable(ccq_triton, _backward, _save, ccq_triton_fwd)
