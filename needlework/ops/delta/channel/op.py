"""The channel-gate engine in Triton: GLA, KDA, GDN-2 and, with gates given, CARVE, as two operators.

    S_t = Diag(e^{g_t}) S_{t-1} + k_t (u_t − S_{t-1}ᵀ e_t)ᵀ        o_t = scale · S_tᵀ q_t        g [K] a head

The kernels are `intra.py` (per chunk), `scan.py` (chunks in order), `backward.py`.
"""

import torch
from torch import Tensor

from needlework.ops.common.alignment import Alignment
from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.common.shapes import width
from needlework.ops.delta.channel.backward import backward
from needlework.ops.delta.channel.intra import intra
from needlework.ops.delta.channel.operands import ENGINE, TENSORS, Saved, rule_of
from needlework.ops.delta.channel.scan import scan
from needlework.ops.delta.inputs import DeltaInputs, solve_dtype
from needlework.ops.delta.segments import SegmentStates, fix_up, segment_count, segmented, transitions
from needlework.ops.runtime.constant import constant
from needlework.ops.runtime.custom_op import backward_operator, differentiable, operator
from needlework.ops.runtime.launch_configs import LaunchConfig, launch_config
from needlework.ops.runtime.precompile import kind, meta, precompile

KEPT = len(Saved._fields) + len(SegmentStates._fields)  # tensors that the forward leaves


def channel(
    inputs: DeltaInputs, cu_seqlens: Tensor | None, *, scale: float, prediction: str, R: int = 1
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o [B T HV V] in q's dtype and the final state [N HV K V], float32 or wider.

    q [B T H K] reads, g [B T HV K]. R = 1: k [B T H K], v [B T HV V], beta [B T HV] or erase [B T HV K] and write [B T HV V] or none
    of them. R = 2, 4 rows a token, which do not see each other: the rows' tensors have an axis R after T: k [B T R H K], …
    """
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if R == 1:
        return delta_channel_fwd(*inputs.flat(TENSORS), cu_seqlens, scale, prediction, 1, save)[:2]
    rows = {name: getattr(inputs, name) for name in ("k", "v", "beta", "erase", "write")}
    inputs = inputs._replace(
        q=_one_row(inputs.q, R, R - 1),
        g=_one_row(inputs.g, R, 0),
        **{name: None if x is None else x.flatten(1, 2) for name, x in rows.items()},
    )
    cu_rows = None if cu_seqlens is None else cu_seqlens * R
    o, state, *_ = delta_channel_fwd(*inputs.flat(TENSORS), cu_rows, scale, prediction, R, save)
    return o[:, R - 1 :: R], state


def _one_row(x: Tensor, R: int, row: int) -> Tensor:
    """[B T ...] -> [B T·R ...]: x in one row of each token, zeros in the others."""
    zeros = torch.zeros_like(x)
    return torch.stack([x if i == row else zeros for i in range(R)], 2).flatten(1, 2)


def _launches(inputs: DeltaInputs, alignment: Alignment, save: bool, segments: int, settings: dict) -> None:
    """What a call and its backward launch."""
    o, _, saved, states = forward(inputs, alignment, save=save, segments=segments, **settings)
    if save:
        backward(torch.empty_like(o), None, inputs, saved, states, alignment, **settings)


def forward(
    inputs: DeltaInputs, alignment: Alignment, *,
    scale: float, prediction: str, R: int, config: LaunchConfig, save: bool, segments: int = 1,
) -> tuple[Tensor, Tensor, Saved, SegmentStates | None]:  # fmt: skip
    """o [B T HV V], the final state and what the backward takes, for aligned contiguous tensors of R rows a token, T > 0."""
    q, v, beta, write, initial_state = inputs.q, inputs.v, inputs.beta, inputs.write, inputs.initial_state
    saved = intra(q, inputs.k, inputs.g, beta, inputs.erase, scale=scale, prediction=prediction, R=R, config=config)
    states = None
    if segments > 1:
        alignment = segmented(alignment, segments)
        # columns that are not values have no write gate
        gate = lambda x: write if write is None or x is v else x
        run = lambda x, state: scan(saved, x, beta, gate(x), state, alignment, config=config, save=False)[1]
        N, M = transitions(run, v, q.shape[3])
        initial_state = fix_up(M, N, initial_state, segments, reverse=False)
        states = SegmentStates(initial_state, M)
    o, state, W = scan(saved, v, beta, write, initial_state, alignment, config=config, save=save)
    return o, state if segments == 1 else state[segments - 1 :: segments].clone(), saved._replace(W=W), states


@operator
def delta_channel_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, erase: Tensor | None, write: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float, prediction: str, R: int, save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """o, the final state, the tensors of `Saved` and of `SegmentStates`: empty where there is none, all of them without `save`."""
    inputs = DeltaInputs.of(TENSORS, (q, k, v, g, beta, erase, write, initial_state))
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *q.shape[:2])
    config, alignment = _placed(inputs, cu_seqlens)
    if not v.numel():
        return _nothing(q, k, v, g, beta, erase, write, initial_state, cu_seqlens, scale, prediction, R, save)
    aligned = inputs.aligned(alignment)
    segments = _segments(inputs, alignment.N, cu_seqlens, config)
    settings = {"scale": scale, "prediction": prediction, "R": R, "config": config}
    key = ENGINE, config.name, kind(*aligned.flat(TENSORS)), scale, prediction, R, segments > 1, save
    precompile(q.device, key, lambda: _launches(DeltaInputs(*meta(*aligned)), alignment, save, segments, settings))
    o, final, saved, states = forward(aligned, alignment, save=save, segments=segments, **settings)
    return alignment.restore(o), final, *(_flat(q, saved, states) if save else (q.new_empty(0) for _ in range(KEPT)))


def _flat(q: Tensor, saved: Saved, states: SegmentStates | None) -> tuple[Tensor, ...]:
    """As an operator returns them: an empty tensor for None."""
    return tuple(q.new_empty(0) if x is None else x for x in (*saved, *(states or SegmentStates(None, None))))


def _named(kept: list[Tensor]) -> tuple[Saved, SegmentStates | None]:
    """The inverse of `_flat`."""
    found = [x if x.numel() else None for x in kept]
    saved, states = Saved(*found[: len(Saved._fields)]), SegmentStates(*found[len(Saved._fields) :])
    return saved, None if states.M is None else states


@backward_operator
def delta_channel_bwd(
    do: Tensor, dstate: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor,
    beta: Tensor | None, erase: Tensor | None, write: Tensor | None, initial_state: Tensor | None,
    saved: list[Tensor], cu_seqlens: Tensor | None, scale: float, prediction: str, R: int,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, g, beta, erase, write and the initial state, empty where there is none."""
    given = q, k, v, g, beta, erase, write, initial_state
    if not v.numel():
        dtokens = [q.new_empty(0) if x is None else torch.zeros_like(x) for x in given[:-1]]
        return [*dtokens, q.new_empty(0) if initial_state is None else _passed(dstate, initial_state)]
    inputs = DeltaInputs.of(TENSORS, given)
    config, alignment = _placed(inputs, cu_seqlens)
    dstate = None if dstate is None else dstate.contiguous()
    found = backward(
        alignment.align(do), dstate, inputs.aligned(alignment), *_named(saved), alignment,
        scale=scale, prediction=prediction, R=R, config=config,
    ).restored(alignment)  # fmt: skip
    return [q.new_empty(0) if dx is None else dx for dx in found.flat(TENSORS)]


def _passed(dstate: Tensor | None, initial_state: Tensor) -> Tensor:
    """The gradient of a state that no token has changed."""
    return torch.zeros_like(initial_state) if dstate is None else dstate.to(initial_state.dtype, copy=True)


def _placed(inputs: DeltaInputs, cu_seqlens: Tensor | None) -> tuple[LaunchConfig, Alignment]:
    q, v = inputs.q, inputs.v
    config = launch_config(ENGINE, q.device, q.dtype, q.shape[-1], v.shape[-1])
    return config, Alignment.of(cu_seqlens, *q.shape[:2], config.launch["shared"]["C"], q.device)


def _segments(inputs: DeltaInputs, N: int, cu_seqlens: Tensor | None, config: LaunchConfig) -> int:
    """How many segments make a sequence; packed ones are taken as equally long: their lengths are not read back."""
    (_, T, HV, V), K, launch = inputs.v.shape, inputs.q.shape[3], config.launch["scan"]
    chunks = -(-T // config.launch["shared"]["C"])
    # eight warps a multiprocessor, for the registers of the state
    slots = multiprocessors(inputs.v.device) * (8 // launch["num_warps"])
    longest = chunks if cu_seqlens is None else chunks // max(N, 1)
    return segment_count(N * HV * -(-V // launch["BV"]), longest, K, V, slots)


@constant
def multiprocessors(device: torch.device) -> int:
    """0 in the interpreter: sequences stay whole."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


@torch.library.register_fake(delta_channel_fwd)
def _nothing(q, k, v, g, beta, erase, write, initial_state, cu_seqlens, scale, prediction, R, save):
    """The results' shapes; without tokens also their values."""
    (B, T, HV, V), K = v.shape, q.shape[-1]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    o, state = torch.empty_like(v), v.new_zeros(N, HV, K, V, dtype=width(v))
    if initial_state is not None:
        state.copy_(initial_state)
    if not save:
        return o, state, *(q.new_empty(0) for _ in range(KEPT))
    config = launch_config(ENGINE, q.device, q.dtype, K, V)
    C, segments = config.launch["shared"]["C"], _segments(DeltaInputs(q, k, v), N, cu_seqlens, config)
    T = T if cu_seqlens is None else (T // C + N) * C
    NC = -(-T // C)
    ST, solves = solve_dtype(q.dtype), rule_of(beta, erase) > 0
    rows = lambda D: q.new_empty(B, T, HV, D, dtype=ST)
    square = lambda: q.new_empty(B, HV, NC * C, C, dtype=ST)
    saved = Saved(
        q_hat=rows(K),
        e_hat=rows(K) if solves else None,
        k_hat=rows(K),
        Tp=square() if solves else None,
        Pp=square(),
        whole=q.new_empty(B, HV, NC, K, dtype=width(q)),
        W=rows(V),
    )
    states = SegmentStates(*(q.new_empty(N * segments, HV, K, D, dtype=width(q)) for D in (V, K))) if segments > 1 else None
    return o, state, *_flat(q, saved, states)


@torch.library.register_fake(delta_channel_bwd)
def _(do, dstate, q, k, v, g, beta, erase, write, initial_state, *_):
    return [q.new_empty(0) if x is None else torch.empty_like(x) for x in (q, k, v, g, beta, erase, write, initial_state)]


def _save(ctx, inputs, output) -> None:
    *tensors, scale, prediction, R, _ = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.settings = scale, prediction, R
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dstate, *_):
    *tensors, cu_seqlens = ctx.saved_tensors[: len(TENSORS) + 1]
    saved = ctx.saved_tensors[len(TENSORS) + 1 :]
    do = torch.zeros_like(tensors[TENSORS.index("v")]) if do is None else do
    gradients = delta_channel_bwd(do, dstate, *tensors, list(saved), cu_seqlens, *ctx.settings)
    return *(None if x is None else dx for x, dx in zip(tensors, gradients, strict=True)), *[None] * 5


differentiable(delta_channel_fwd, _backward, _save)
