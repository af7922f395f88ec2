"""The scalar-gate engine: DeltaNet, Gated DeltaNet, Q-Delta and their additive kin, as two operators of Triton kernels.

    S_t = e^{g_t} S_{t-1} + β_t k_t (v_t − (e^{g_t} S_{t-1})ᵀ x_t)ᵀ,   x = k + λq        o_t = scale · S_tᵀ r_t

beta None: nothing is erased, S_t = e^{g_t} S_{t-1} + k_t v_tᵀ; such a rule may have powers (`powers.py`): the kernels divide q, k
and v by them and multiply o, and the states, given and returned, are S/(bc). lam None: x = k. r = q_read, or q where there is none.
`intra.py` makes what each chunk needs, `scan.py` walks the chunks, `forward.py` and `backward.py` have the order of the kernels; their
constants are in scalar.launch.json.
"""

import torch
from torch import Tensor

from needlework.ops.common.alignment import Alignment
from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.delta.inputs import DeltaInputs, SlotTable, in_whole_rows
from needlework.ops.delta.scalar.backward import backward
from needlework.ops.delta.scalar.forward import forward
from needlework.ops.delta.scalar.operands import ENGINE, Saved
from needlework.ops.delta.scalar.transitions import places
from needlework.ops.delta.segments import segment_length, segments_in_all
from needlework.ops.delta.table import on_table
from needlework.ops.runtime.custom_op import differentiable, fake, step_operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import LaunchConfig, launch_config
from needlework.ops.runtime.precompile import kind, meta, precompile
from needlework.ops.runtime.recorded import recorded_backward_operator, recorded_operator
from needlework.ops.runtime.triton_types import accumulator


def scalar(inputs: DeltaInputs, cu_seqlens: Tensor | None, *, scale: float) -> tuple[Tensor, Tensor]:
    """o [B T HV V] in q's dtype, final state [N HV K V] in float32 or wider; differentiable in every tensor. No erase, no write."""
    if inputs.lam is None and inputs.q_read is not None:
        inputs = inputs._replace(q=inputs.q_read, q_read=None)
    return in_whole_rows(ENGINE, inputs, lambda inputs: delta_scalar(*inputs, cu_seqlens, scale))


@recorded_operator
def delta_scalar(inputs: DeltaInputs, cu_seqlens: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """o and the final state."""
    o, state, _ = computed(inputs, cu_seqlens, scale, save=False)
    return o, state


def scalar_on_table(inputs: DeltaInputs, table: SlotTable, cu_seqlens: Tensor | None, *, scale: float) -> Tensor:
    """o alone: states start from slots of the table, and end there. The values of cu_seqlens are not checked."""
    if inputs.lam is None and inputs.q_read is not None:
        inputs = inputs._replace(q=inputs.q_read, q_read=None)
    return delta_scalar_on_table(*inputs, *table, cu_seqlens, scale)


@step_operator("table.state")
def delta_scalar_on_table(inputs: DeltaInputs, table: SlotTable, cu_seqlens: Tensor | None, scale: float) -> Tensor:
    """o, without an initial state in `inputs`. Nothing is read back to the host."""
    walk = lambda table: computed(inputs, cu_seqlens, scale, save=False, table=table, check=False)[0]
    return on_table(inputs, table, cu_seqlens, walk)


@recorded_operator
def delta_scalar_fwd(inputs: DeltaInputs, cu_seqlens: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Saved]:
    """o, the final state, and what the backward takes."""
    return computed(inputs, cu_seqlens, scale, save=True)


def computed(
    inputs: DeltaInputs, cu_seqlens: Tensor | None, scale: float,
    *, save: bool, table: SlotTable | None = None, check: bool = True,
) -> tuple[Tensor, Tensor, Saved]:  # fmt: skip
    """`forward` of tokens that lie as the caller has them, within an operator; `check`: of the values of cu_seqlens."""
    chosen = _config(inputs)
    alignment = _alignment(inputs, cu_seqlens, chosen, check)
    aligned = inputs.aligned(alignment)
    settings = {"scale": scale, "config": chosen, "length": _segment_length(inputs, alignment.N, cu_seqlens, chosen)}
    key = ENGINE, chosen.name, kind(*aligned), settings["length"] > 0, save, table and kind(*table)
    on_meta = table and SlotTable(*meta(*table))
    precompile(inputs.q.device, key, lambda: _launches(DeltaInputs(*meta(*aligned)), alignment, save, on_meta, settings))
    o, state, saved = forward(aligned, alignment, save=save, table=table, **settings)
    return *alignment.restore(o), state, saved


@recorded_backward_operator
def delta_scalar_bwd(
    do: Tensor | None, dstate: Tensor | None, saved: Saved, inputs: DeltaInputs, cu_seqlens: Tensor | None, scale: float
) -> DeltaInputs:
    """Gradients of `inputs`."""
    return gradients(do, dstate, saved, inputs, cu_seqlens, scale)


def gradients(
    do: Tensor | None, dstate: Tensor | None, saved: Saved, inputs: DeltaInputs, cu_seqlens: Tensor | None, scale: float
) -> DeltaInputs:
    """`backward` of tokens that lie as the caller has them, within an operator."""
    chosen, initial_state = _config(inputs), inputs.initial_state
    chunk = saved.Pp.shape[-1]
    if chunk != chosen.launch["shared"]["C"]:
        raise RuntimeError(f"{ENGINE}: the forward ran with chunks of {chunk}, the config for the backward has others")
    if not inputs.v.numel():
        found = DeltaInputs(*each(torch.zeros_like, *inputs))._replace(powers=None)
        if initial_state is not None and dstate is not None:
            found = found._replace(initial_state=dstate.to(initial_state.dtype, copy=True))
    else:
        alignment = _alignment(inputs, cu_seqlens, chosen)
        do = torch.zeros_like(inputs.v) if do is None else do.contiguous()
        dstate = None if dstate is None else dstate.contiguous()
        do, aligned = inputs.aligned_with(do, alignment)
        length = _segment_length(inputs, alignment.N, cu_seqlens, chosen)
        found = backward(
            do, dstate, aligned, saved, alignment, scale=scale, config=chosen, length=length
        ).restored(alignment)  # fmt: skip
    return found.like(inputs)


def _launches(inputs: DeltaInputs, alignment: Alignment, save: bool, table: SlotTable | None, settings: dict) -> None:
    """What a call and its backward launch."""
    o, _, saved = forward(inputs, alignment, save=save, table=table, **settings)
    if save:
        backward(torch.empty_like(o), None, inputs, saved, alignment, **settings)


def _config(inputs: DeltaInputs) -> LaunchConfig:
    return launch_config(ENGINE, inputs.q.device, inputs.q.dtype, inputs.q.shape[-1], inputs.v.shape[-1])


def _alignment(inputs: DeltaInputs, cu_seqlens: Tensor | None, chosen: LaunchConfig, check: bool = True) -> Alignment:
    B, T = inputs.q.shape[:2]
    if cu_seqlens is not None and check:
        check_cu_seqlens(cu_seqlens, B, T)
    return Alignment.of(cu_seqlens, B, T, chosen.launch["shared"]["C"], inputs.q.device)


def _segment_length(inputs: DeltaInputs, N: int, cu_seqlens: Tensor | None, chosen: LaunchConfig) -> int:
    """`segment_length` of the call."""
    (_, T, HV, V), K, launch = inputs.v.shape, inputs.k.shape[-1], chosen.launch["scan"]
    C, chains = chosen.launch["shared"]["C"], HV * -(-V // launch["BV"])
    return segment_length(N, cu_seqlens is not None, T, C, chains, K, V, launch["NP"], diagonal=inputs.beta is None)


@fake(delta_scalar)
def _results(inputs: DeltaInputs, cu_seqlens: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    v, K = inputs.v, inputs.k.shape[-1]
    N = len(v) if cu_seqlens is None else len(cu_seqlens) - 1
    return torch.empty_like(v), v.new_empty(N, v.shape[2], K, v.shape[-1], dtype=accumulator(inputs.q.dtype))


@fake(delta_scalar_on_table)
def _(inputs: DeltaInputs, *_):
    return torch.empty_like(inputs.v)


@fake(delta_scalar_fwd)
def _(inputs: DeltaInputs, cu_seqlens: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Saved]:
    (B, T, HV, V), K, chosen = inputs.v.shape, inputs.k.shape[-1], _config(inputs)
    C = chosen.launch["shared"]["C"]
    N, aligned = Alignment.sizes(cu_seqlens, B, T, C)
    saved = Saved.empty(inputs, aligned, C, save=True)
    if length := _segment_length(inputs, N, cu_seqlens, chosen):
        R = segments_in_all(N, cu_seqlens is not None, aligned, C, length)
        initial_state, M = places(saved.G, R, HV, K, V, erases=inputs.beta is not None)
        saved = saved._replace(initial_state=initial_state, M=M)
    return *_results(inputs, cu_seqlens, scale), saved


@fake(delta_scalar_bwd)
def _(do: Tensor | None, dstate: Tensor | None, saved: Saved, inputs: DeltaInputs, *_):
    return DeltaInputs(*each(torch.empty_like, *inputs))._replace(powers=None)


def _save(ctx, inputs, output) -> None:
    given, cu_seqlens, ctx.scale = inputs
    ctx.save_for_backward(*output[2], *given, cu_seqlens)
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dstate, *_):
    found = delta_scalar_bwd(do, dstate, *ctx.saved_tensors, ctx.scale)
    return *(dx if needed else None for dx, needed in zip(found, ctx.needs_input_grad, strict=False)), None, None


differentiable(delta_scalar, _backward, _save, delta_scalar_fwd)
