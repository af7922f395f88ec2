"""The channel-gate engine in Triton: GLA, KDA, GDN-2 and, with gates given, CARVE, as two operators.

    S_t = Diag(e^{g_t}) S_{t-1} + k_t (u_t − S_{t-1}ᵀ e_t)ᵀ        o_t = scale · S_tᵀ q_t        g [K] a head

The kernels are `intra.py` (per chunk), `scan.py` (chunks in order), `backward.py`.
"""

import torch
from torch import Tensor

from needlework.ops.common.alignment import Alignment
from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.common.shapes import width
from needlework.ops.delta.channel.intra import Saved, intra, rule_of, solve_dtype
from needlework.ops.delta.channel.scan import scan
from needlework.ops.delta.segments import fix_up, parts_of, segments, transitions
from needlework.ops.runtime.constant import constant
from needlework.ops.runtime.custom_op import backward_operator, differentiable, operator
from needlework.ops.runtime.launch_configs import LaunchConfig, launch_config
from needlework.ops.runtime.precompile import kind, meta, precompile

ENGINE = "delta/channel"
KEPT = len(Saved._fields) + 2  # tensors that the forward leaves: also the segments' starts and M


def channel(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, erase: Tensor | None, write: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, *, scale: float, prediction: str, R: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o [B T HV V] in q's dtype and the final state [N HV K V], float32 or wider.

    q [B T H K], g [B T HV K]. R = 1: k [B T H K], v [B T HV V], beta [B T HV] or erase [B T HV K] and write [B T HV V] or none
    of them. R = 2, 4 rows a token, which do not see each other: the rows' tensors have an axis R after T: k [B T R H K], …
    """
    tensors = q, k, v, g, beta, erase, write, initial_state
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if R == 1:
        return delta_channel_fwd(*tensors, cu_seqlens, scale, prediction, 1, save)[:2]
    q, g = _one_row(q, R, R - 1), _one_row(g, R, 0)
    k, v, beta, erase, write = (None if x is None else x.flatten(1, 2) for x in (k, v, beta, erase, write))
    cu_rows = None if cu_seqlens is None else cu_seqlens * R
    o, state, *_ = delta_channel_fwd(q, k, v, g, beta, erase, write, initial_state, cu_rows, scale, prediction, R, save)
    return o[:, R - 1 :: R], state


def _one_row(x: Tensor, R: int, row: int) -> Tensor:
    """[B T ...] -> [B T·R ...]: x in one row of each token, zeros in the others."""
    zeros = torch.zeros_like(x)
    return torch.stack([x if i == row else zeros for i in range(R)], 2).flatten(1, 2)


def _launches(inputs: list[Tensor | None], alignment: Alignment, save: bool, parts: int, settings: dict) -> None:
    """What a call and its backward launch."""
    from needlework.ops.delta.channel.backward import backward

    o, _, saved, *cut = forward(*inputs, alignment, save=save, parts=parts, **settings)
    if save:
        starts, M = cut or (None, None)
        backward(torch.empty_like(o), None, *inputs, saved, alignment, **settings, starts=starts, M=M)


def forward(
    q, k, v, g, beta, erase, write, initial_state, alignment: Alignment, *,
    scale: float, prediction: str, R: int, config: LaunchConfig, save: bool, parts: int = 1,
) -> tuple[Tensor | Saved, ...]:  # fmt: skip
    """o [B T HV V], the final state and what the backward takes, for aligned contiguous tensors of R rows a token, T > 0.

    Of sequences cut into parts also their starts and M (`segments.py`).
    """
    saved = intra(q, k, g, beta, erase, scale=scale, prediction=prediction, R=R, config=config)
    cut = ()
    if parts > 1:
        alignment = segments(alignment, parts)
        # columns that are not values have no write gate
        gate = lambda x: write if write is None or x is v else x
        run = lambda x, state: scan(saved, x, beta, gate(x), state, alignment, config=config, save=False)[1]
        N, M = transitions(run, v, q.shape[3])
        cut = initial_state, _ = fix_up(M, N, initial_state, parts, reverse=False), M
    o, state, W = scan(saved, v, beta, write, initial_state, alignment, config=config, save=save)
    return o, state if parts == 1 else state[parts - 1 :: parts].clone(), saved._replace(W=W), *cut


@operator
def delta_channel_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, erase: Tensor | None, write: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float, prediction: str, R: int, save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """o, the final state, the tensors of `Saved`, starts and M: empty where there is none, all of them without `save`."""
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *q.shape[:2])
    config, alignment = _placed(q, v, cu_seqlens)
    if not v.numel():
        return _nothing(q, k, v, g, beta, erase, write, initial_state, cu_seqlens, scale, prediction, R, save)
    tokens = _aligned(alignment, q, k, v, g, beta, erase, write)
    state = None if initial_state is None else initial_state.contiguous()
    parts = _parts(q, v, alignment.N, cu_seqlens, config)
    settings = {"scale": scale, "prediction": prediction, "R": R, "config": config}
    key = ENGINE, config.name, kind(*tokens, state), scale, prediction, R, parts > 1, save
    precompile(q.device, key, lambda: _launches(meta(*tokens, state), alignment, save, parts, settings))
    o, final, saved, *cut = forward(*tokens, state, alignment, save=save, parts=parts, **settings)
    saved = (*saved, *(cut or (None, None))) if save else [None] * KEPT
    return alignment.restore(o), final, *(q.new_empty(0) if x is None else x for x in saved)


@backward_operator
def delta_channel_bwd(
    do: Tensor, dstate: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor,
    beta: Tensor | None, erase: Tensor | None, write: Tensor | None, initial_state: Tensor | None,
    saved: list[Tensor], cu_seqlens: Tensor | None, scale: float, prediction: str, R: int,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, g, beta, erase, write and the initial state, empty where there is none."""
    from needlework.ops.delta.channel.backward import backward

    inputs = q, k, v, g, beta, erase, write, initial_state
    if not v.numel():
        dtokens = [q.new_empty(0) if x is None else torch.zeros_like(x) for x in inputs[:-1]]
        return [*dtokens, q.new_empty(0) if initial_state is None else _passed(dstate, initial_state)]
    config, alignment = _placed(q, v, cu_seqlens)
    do, *tokens = _aligned(alignment, do, *inputs[:-1])
    state = None if initial_state is None else initial_state.contiguous()
    *saved, starts, M = (x if x.numel() else None for x in saved)
    *dtokens, dinitial = backward(
        do, None if dstate is None else dstate.contiguous(), *tokens, state, Saved(*saved), alignment,
        scale=scale, prediction=prediction, R=R, config=config, starts=starts, M=M,
    )  # fmt: skip
    dtokens = [q.new_empty(0) if dx is None else alignment.restore(dx) for dx in dtokens]
    return [*dtokens, q.new_empty(0) if dinitial is None else dinitial]


def _passed(dstate: Tensor | None, initial_state: Tensor) -> Tensor:
    """The gradient of a state that no token has changed."""
    return torch.zeros_like(initial_state) if dstate is None else dstate.to(initial_state.dtype, copy=True)


def _placed(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[LaunchConfig, Alignment]:
    config = launch_config(ENGINE, q.device, q.dtype, q.shape[-1], v.shape[-1])
    return config, Alignment.of(cu_seqlens, *q.shape[:2], config.launch["shared"]["C"], q.device)


def _parts(q: Tensor, v: Tensor, N: int, cu_seqlens: Tensor | None, config: LaunchConfig) -> int:
    """Into how many segments sequences are cut; packed ones are taken as equally long: their lengths are not read back."""
    launch, (HV, V) = config.launch["scan"], v.shape[2:]
    chunks = -(-v.shape[1] // config.launch["shared"]["C"])
    # eight warps a multiprocessor, for the registers of the state
    slots = multiprocessors(v.device) * (8 // launch["num_warps"])
    return parts_of(N * HV * -(-V // launch["BV"]), chunks if cu_seqlens is None else chunks // max(N, 1), q.shape[3], V, slots)


@constant
def multiprocessors(device: torch.device) -> int:
    """0 in the interpreter: nothing is cut."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def _aligned(alignment: Alignment, *tokens: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else alignment.align(x) for x in tokens]


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
    C, parts = config.launch["shared"]["C"], _parts(q, v, N, cu_seqlens, config)
    T = T if cu_seqlens is None else (T // C + N) * C
    NC = -(-T // C)
    ST, solves = solve_dtype(q.dtype), rule_of(beta, erase) > 0
    rows = lambda D: q.new_empty(B, T, HV, D, dtype=ST)
    square = lambda: q.new_empty(B, HV, NC * C, C, dtype=ST)
    e_hat, Tp = (rows(K), square()) if solves else (q.new_empty(0), q.new_empty(0))
    kept = rows(K), e_hat, rows(K), Tp, square(), q.new_empty(B, HV, NC, K, dtype=width(q)), rows(V)
    cut = (q.new_empty(0) if parts == 1 else q.new_empty(N * parts, HV, K, D, dtype=width(q)) for D in (V, K))
    return o, state, *kept, *cut


@torch.library.register_fake(delta_channel_bwd)
def _(do, dstate, q, k, v, g, beta, erase, write, initial_state, *_):
    return [q.new_empty(0) if x is None else torch.empty_like(x) for x in (q, k, v, g, beta, erase, write, initial_state)]


def _save(ctx, inputs, output) -> None:
    *tensors, scale, prediction, R, _ = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.settings = scale, prediction, R
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dstate, *_):
    *inputs, cu_seqlens = ctx.saved_tensors[:9]
    do = torch.zeros_like(inputs[2]) if do is None else do
    gradients = delta_channel_bwd(do, dstate, *inputs, list(ctx.saved_tensors[9:]), cu_seqlens, *ctx.settings)
    return *(None if x is None else dx for x, dx in zip(inputs, gradients, strict=True)), *[None] * 5


differentiable(delta_channel_fwd, _backward, _save)
