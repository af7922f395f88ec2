"""The additive engine: rules with one decay a head that erase nothing, and whose value heads share keys, as Mamba-2's do; and Mamba-3's rows.

    S_t = e^{g_t} S_{t-1} + k_t v_tᵀ        o_t = scale · S_tᵀ q_t

`intra.py` makes what a chunk's gates come to, `scan.py` walks the chunks, both ways, `intra_bwd.py` ends the backward, or `alone.py`; `launches.py` has
the order. The constants are in additive.launch.json.
"""

import torch
from torch import Tensor

from needlework.ops.common.alignment import Alignment
from needlework.ops.common.packing import check_cu_seqlens, sequences
from needlework.ops.delta.additive.launches import backward, forward
from needlework.ops.delta.additive.operands import ENGINE, Saved
from needlework.ops.delta.inputs import DeltaInputs, in_whole_rows
from needlework.ops.delta.segments import segment_length
from needlework.ops.runtime.custom_op import differentiable, fake
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import LaunchConfig, launch_config
from needlework.ops.runtime.precompile import kind, meta, precompile
from needlework.ops.runtime.recorded import recorded_backward_operator, recorded_operator
from needlework.ops.runtime.triton_types import accumulator, cdiv


def additive(inputs: DeltaInputs, cu_seqlens: Tensor | None, *, scale: float) -> tuple[Tensor, Tensor]:
    """o [B T HV V] in q's dtype, final state [N HV K V] in float32 or wider; differentiable in every tensor. q, k, v, g and a state
    alone."""
    return in_whole_rows(ENGINE, inputs, lambda inputs: delta_additive(*inputs, cu_seqlens, scale))


@recorded_operator
def delta_additive(inputs: DeltaInputs, cu_seqlens: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """o and the final state."""
    o, state, _ = computed(inputs, cu_seqlens, scale, save=False)
    return o, state


@recorded_operator
def delta_additive_fwd(inputs: DeltaInputs, cu_seqlens: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Saved]:
    """o, the final state, and what the backward takes."""
    return computed(inputs, cu_seqlens, scale, save=True)


def computed(
    inputs: DeltaInputs, cu_seqlens: Tensor | None, scale: float, *, save: bool, check: bool = True
) -> tuple[Tensor, Tensor, Saved]:
    """`forward` of tokens that lie as the caller has them, within an operator; `check`: of the values of cu_seqlens."""
    chosen = _config(inputs)
    alignment = _alignment(inputs, cu_seqlens, chosen, check)
    aligned = inputs.aligned(alignment)
    settings = {"scale": scale, "config": chosen, "length": _segment_length(inputs, cu_seqlens, chosen)}
    key = ENGINE, chosen.name, kind(*aligned), settings["length"] > 0, save
    precompile(inputs.q.device, key, lambda: _launches(DeltaInputs(*meta(*aligned)), alignment, save, settings))
    o, state, saved = forward(aligned, alignment, save=save, **settings)
    return *alignment.restore(o), state, saved


@recorded_backward_operator
def delta_additive_bwd(
    do: Tensor | None, dstate: Tensor | None, saved: Saved, inputs: DeltaInputs, cu_seqlens: Tensor | None, scale: float
) -> DeltaInputs:
    """Gradients of `inputs`."""
    return gradients(do, dstate, saved, inputs, cu_seqlens, scale)


def gradients(
    do: Tensor | None, dstate: Tensor | None, saved: Saved, inputs: DeltaInputs, cu_seqlens: Tensor | None, scale: float
) -> DeltaInputs:
    """`backward` of tokens that lie as the caller has them, within an operator."""
    chosen, initial_state = _config(inputs), inputs.initial_state
    chunk = saved.E.shape[-1]
    if chunk != chosen.launch["shared"]["C"]:
        raise RuntimeError(f"{ENGINE}: the forward ran with chunks of {chunk}, the config for the backward has others")
    if not inputs.v.numel():
        found = DeltaInputs(*each(torch.zeros_like, *inputs))
        if initial_state is not None and dstate is not None:
            found = found._replace(initial_state=dstate.to(initial_state.dtype, copy=True))
    else:
        alignment = _alignment(inputs, cu_seqlens, chosen)
        do = torch.zeros_like(inputs.v) if do is None else do.contiguous()
        do, aligned = inputs.aligned_with(do, alignment)
        length = _segment_length(inputs, cu_seqlens, chosen)
        found = backward(
            do, dstate, aligned, saved, alignment, scale=scale, config=chosen, length=length
        ).restored(alignment)  # fmt: skip
    return found.like(inputs)


def _launches(inputs: DeltaInputs, alignment: Alignment, save: bool, settings: dict) -> None:
    """What a call and its backward launch."""
    o, _, saved = forward(inputs, alignment, save=save, **settings)
    if save:
        # without the final state's gradient, as a model is trained
        backward(torch.empty_like(o), None, inputs, saved, alignment, **settings)


def _config(inputs: DeltaInputs) -> LaunchConfig:
    return launch_config(ENGINE, inputs.q.device, inputs.q.dtype, inputs.q.shape[-1], inputs.v.shape[-1])


def _alignment(inputs: DeltaInputs, cu_seqlens: Tensor | None, chosen: LaunchConfig, check: bool = True) -> Alignment:
    B, T = inputs.q.shape[:2]
    if cu_seqlens is not None and check:
        check_cu_seqlens(cu_seqlens, B, T)
    return Alignment.of(cu_seqlens, B, T, chosen.launch["shared"]["C"], inputs.q.device)


def _segment_length(inputs: DeltaInputs, cu_seqlens: Tensor | None, chosen: LaunchConfig) -> int:
    """`segment_length` of the call."""
    (B, T, HV, V), K, launch = inputs.v.shape, inputs.k.shape[-1], chosen.launch["scan"]
    C, chains = chosen.launch["shared"]["C"], HV * cdiv(V, launch["BV"])
    return segment_length(sequences(cu_seqlens, B), cu_seqlens is not None, T, C, chains, K, V, launch["NP"], diagonal=True)


@fake(delta_additive)
def _results(inputs: DeltaInputs, cu_seqlens: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    v, K = inputs.v, inputs.k.shape[-1]
    N = len(v) if cu_seqlens is None else len(cu_seqlens) - 1
    return torch.empty_like(v), v.new_empty(N, v.shape[2], K, v.shape[-1], dtype=accumulator(inputs.q.dtype))


@fake(delta_additive_fwd)
def _(inputs: DeltaInputs, cu_seqlens: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Saved]:
    C = _config(inputs).launch["shared"]["C"]
    _, aligned = Alignment.sizes(cu_seqlens, *inputs.v.shape[:2], C=C)
    return *_results(inputs, cu_seqlens, scale), Saved.empty(inputs, aligned, C, save=True)


@fake(delta_additive_bwd)
def _(do: Tensor | None, dstate: Tensor | None, saved: Saved, inputs: DeltaInputs, *_):
    return DeltaInputs(*each(torch.empty_like, *inputs))


def _save(ctx, inputs, output) -> None:
    given, cu_seqlens, ctx.scale = inputs
    ctx.save_for_backward(*output[2], *given, cu_seqlens)
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dstate, *_):
    found = delta_additive_bwd(do, dstate, *ctx.saved_tensors, ctx.scale)
    return *(dx if needed else None for dx, needed in zip(found, ctx.needs_input_grad, strict=False)), None, None


differentiable(delta_additive, _backward, _save, delta_additive_fwd)
