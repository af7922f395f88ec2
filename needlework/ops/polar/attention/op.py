"""Polar attention as operators of Triton kernels, forward and backward; their constants are in attention.launch.json.

`forward.py` streams keys past tiles of queries, `backward.py` has the backward. What is saved: q, k, v, the keys' mean in 16
bits a number (float32 and float64 as they are), and three numbers a query and head.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from needlework.ops.common.alignment import Alignment
from needlework.ops.common.kernels.tile import token_tile
from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.polar.arguments import Parameters
from needlework.ops.polar.attention.backward import keys, prepare, queries, totals
from needlework.ops.polar.attention.forward import attend
from needlework.ops.polar.custom_op import polar_checked
from needlework.ops.polar.state import PolarState, after_pages
from needlework.ops.runtime.custom_op import backward_operator, differentiable, operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig, absent, launch_config, split
from needlework.ops.runtime.precompile import kind, meta, precompile, run
from needlework.ops.runtime.triton_types import NAMES, TYPES, accumulator, cdiv, padded

ENGINE = "polar/attention"
# flag -> arguments that kernels read with it alone
ONLY_WITH = {"PACKED": ("p_spans",), "SAVE": ("x_mean", "p_stats"), "SCALED": ("p_power", "p_ref")}
STEPS = 32767  # of an int16: the row's largest number


class Walk(NamedTuple):
    """What every launch is given: sizes, the config, and the sequences as runs of whole chunks."""

    config: LaunchConfig
    dtype: torch.dtype
    B: int
    T: int
    H: int
    HK: int
    K: int
    V: int
    window: int | None
    spans: Tensor | None  # [chunks 3] int32 of a chunk's sequence: its first token, the first chunk that asks, its end

    @property
    def wide(self) -> torch.dtype:
        return accumulator(self.dtype)

    @property
    def mean(self) -> torch.dtype:
        return torch.int16 if self.dtype.itemsize == 2 else self.dtype

    @property
    def rows(self) -> int:
        """Tokens of a batch row, up to whole chunks."""
        C = self.config.launch["shared"]["C"]
        return cdiv(self.T, C) * C

    def tile(self, x: Tensor, rows: int, columns: int) -> Tensor | TensorDescriptor:
        return token_tile(x, rows, columns) if self.config.tma else x

    def launch(self, kernel: JITFunction, grid: tuple[int, int], *arguments: object, **flags: int) -> None:
        """Of a kernel over tiles, whose last arguments are the spans, T, rows and the window."""
        ends = self.spans, *((1.0,) if kernel is queries else ()), self.T, self.rows, self.window or 0
        run(kernel, grid, *arguments, *ends, **self.constants(kernel, **flags))

    def constants(self, kernel: JITFunction, **flags: int) -> Constants:
        packed = self.spans is not None
        return constants(self.config, kernel, self.dtype, self.H, self.HK, self.K, self.V, packed, self.window, **flags)


Tokens = tuple[Tensor, Tensor, Tensor]  # q, k, v


class Given(NamedTuple):
    """What a call's backward wants of its arguments, as the caller has them."""

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor
    beta: Tensor
    gamma: Tensor
    null_base: Tensor
    v_null: Tensor
    cu_seqlens: Tensor | None
    held: Tensor | None


class Saved(NamedTuple):
    """What the forward keeps for the backward, over aligned tokens."""

    mean: Tensor  # [B T Hq V] the keys' mean, in steps of the row's largest number where that is int16
    stats: Tensor  # [B Hq 3 rows] lse, n_eff and the mean's step


def constants(
    config: LaunchConfig, kernel: JITFunction, dtype: torch.dtype, H: int, HK: int, K: int, V: int, packed: bool,
    window: int | None, **flags: int,
) -> Constants:  # fmt: skip
    """All that a kernel is compiled for; what it does not take is left out."""
    half = dtype.itemsize == 2
    known = dict(
        H=H, HK=HK, K=K, V=V, C=config.launch["shared"]["C"], BK=padded(K), BV=padded(V), TMA=int(config.tma),
        ACC=TYPES[accumulator(dtype)], OT=TYPES[dtype], ST=TYPES[dtype],
        MT=tl.int16 if half else TYPES[dtype], STEPS=STEPS if half else 1, SCALE=K**-0.5,
        SCALED=int(dtype == torch.float16), PACKED=int(packed), WINDOW=int(window is not None), **flags,
    )  # fmt: skip
    own = config.launch[kernel.__name__]
    return {name: x for name, x in known.items() if name in kernel.arg_names} | dict(own)


def forward(walk: Walk, tokens: Tokens, parameters: Parameters, save: bool) -> tuple[Tensor, Tensor, Saved | None]:
    """direction, magnitude and, with `save`, what the backward needs of q, k, v."""
    q, k, v = tokens
    B, T, H, V = walk.B, walk.T, walk.H, walk.V
    own = walk.config.launch["attend"]
    direction = q.new_empty(B, T, H, V)
    magnitude = q.new_empty(B, T, H, dtype=walk.wide)
    saved = None
    if save:
        saved = Saved(q.new_empty(B, T, H, V, dtype=walk.mean), q.new_empty(B, H, 3, walk.rows, dtype=walk.wide))
    if direction.numel():
        BM, BN, BK, BV = own["BM"], own["BN"], padded(walk.K), padded(V)
        x_mean, stats = (None, None) if saved is None else (walk.tile(saved.mean, BM, BV), saved.stats)
        walk.launch(
            attend, (B * H, walk.rows // BM),
            walk.tile(q, BM, BK), walk.tile(k, BN, BK), walk.tile(v, BN, BV), walk.tile(direction, BM, BV), x_mean,
            *parameters, magnitude, stats, SAVE=int(save),
        )  # fmt: skip
    return direction, magnitude, saved


def backward(
    walk: Walk, ddirection: Tensor, dmagnitude: Tensor, saved: Saved, tokens: Tokens, parameters: Parameters
) -> tuple[Tokens, Parameters]:
    """Gradients of q, k, v and of the parameters."""
    q, k, v = tokens
    mean, stats = saved
    B, H, HK, V, rows, launch = walk.B, walk.H, walk.HK, walk.V, walk.rows, walk.config.launch
    dtokens, dparameters = each(torch.empty_like, *tokens), parameters.map(torch.empty_like)
    if not ddirection.numel():
        return each(Tensor.zero_, *dtokens), dparameters.map(Tensor.zero_)
    dq, dk, dv = dtokens
    BK, BV = padded(walk.K), padded(V)
    number = lambda *sizes: q.new_empty(*sizes, dtype=walk.wide)

    e, numbers = torch.empty_like(ddirection), number(B, H, 2, rows, 2)
    scaled = walk.dtype == torch.float16
    power = number(B, H, rows) if scaled else None
    BM = launch["prepare"]["BM"]
    tiles = B * (rows // BM)
    sums, dnull = number(H, 4, tiles), number(H, tiles, V)
    walk.launch(
        prepare, (B * H, rows // BM), *(walk.tile(x, BM, BV) for x in (mean, ddirection, e)),
        *parameters, dmagnitude, stats, numbers, power, sums, dnull,
    )  # fmt: skip

    BM, BN = launch["queries"]["BM"], launch["queries"]["BN"]
    tiles_q = B * (rows // BM)
    dtemp = number(H, tiles_q)
    walk.launch(
        queries, (B * H, rows // BM), walk.tile(q, BM, BK), walk.tile(k, BN, BK), walk.tile(v, BN, BV), walk.tile(e, BM, BV),
        walk.tile(dq, BM, BK), stats, numbers, power, dtemp,
    )  # fmt: skip
    totals_constants = walk.constants(totals)
    alpha, beta, gamma, *_ = parameters
    run(totals, (H,), alpha, beta, gamma, sums, dtemp, dnull, *dparameters, tiles, tiles_q, **totals_constants)

    BM, BN = launch["keys"]["BM"], launch["keys"]["BN"]
    walk.launch(
        keys, (B * HK, rows // BN), walk.tile(q, BM, BK), walk.tile(k, BN, BK), walk.tile(v, BN, BV), walk.tile(e, BM, BV),
        walk.tile(dk, BN, BK), walk.tile(dv, BN, BV), numbers, power,
        None if power is None else power.amax().reshape(1),
    )  # fmt: skip
    return dtokens, dparameters


def _walk(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, held: Tensor | None, window: int | None
) -> tuple[Walk, Alignment]:
    """The walk over tokens as the alignment lays them, and that."""
    (B, T, H, K), (HK, V) = q.shape, v.shape[2:]
    chosen = launch_config(ENGINE, q.device, q.dtype, K, V)
    C = chosen.launch["shared"]["C"]
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, B, T)
    align = Alignment.of(cu_seqlens, B, T, C, q.device)
    spans = None if cu_seqlens is None else _spans(align, cu_seqlens, held, C)
    return Walk(chosen, q.dtype, B, align.T, H, HK, K, V, window, spans), align


def _spans(align: Alignment, cu_seqlens: Tensor, held: Tensor | None, C: int) -> Tensor:
    """Walk.spans of packed sequences; a chunk past the last one sees itself alone, and nothing sees it."""
    chunk = torch.arange(align.T // C, dtype=torch.int32, device=align.cum.device)
    n = torch.searchsorted(align.cum, chunk, right=True) - 1
    beyond = n >= align.N
    n = n.clamp(max=align.N - 1)
    start = torch.where(beyond, chunk * C, align.cum[n] * C)
    # by whole chunks, so that kernels of all tile sizes leave out the same rows
    asks = start if held is None else start + held.to(start)[n] // C * C
    end = torch.where(beyond, 0, start + cu_seqlens.to(start).diff()[n])
    return torch.stack((start, asks, end), 1).to(torch.int32)


@operator
def polar_triton(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor, null_base: Tensor, v_null: Tensor,
    cu_seqlens: Tensor | None, held: Tensor | None, window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """direction and magnitude. An operator of its own: results that are not there cost the host as much as a launch."""
    parameters = Parameters(alpha, beta, gamma, null_base, v_null)
    direction, magnitude, _ = _call((q, k, v), parameters, cu_seqlens, held, window, save=False)
    return direction, magnitude


@operator
def polar_triton_fwd(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor, null_base: Tensor, v_null: Tensor,
    cu_seqlens: Tensor | None, held: Tensor | None, window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """direction, magnitude (nothing for the first held [N] tokens of each sequence), and `Saved`."""
    parameters = Parameters(alpha, beta, gamma, null_base, v_null)
    direction, magnitude, saved = _call((q, k, v), parameters, cu_seqlens, held, window, save=True)
    assert saved is not None  # asked for
    return direction, magnitude, saved.mean, saved.stats


def _call(
    tokens: Tokens, parameters: Parameters, cu_seqlens: Tensor | None, held: Tensor | None, window: int | None, *, save: bool
) -> tuple[Tensor, Tensor, Saved | None]:
    walk, align = _walk(*tokens, cu_seqlens, held, window)
    tokens, parameters = each(align.align, *tokens), parameters.map(Tensor.contiguous)
    key = ENGINE, walk.config.name, kind(*tokens), cu_seqlens is not None, window is not None, save
    precompile(tokens[0].device, key, lambda: _launches(walk, meta(*tokens), Parameters(*meta(*parameters)), save))
    direction, magnitude, saved = forward(walk, tokens, parameters, save)
    return align.restore(direction).contiguous(), align.restore(magnitude).contiguous(), saved


def _launches(walk: Walk, tokens: Tokens, parameters: Parameters, save: bool) -> None:
    direction, magnitude, saved = forward(walk, tokens, parameters, save)
    if saved is not None:
        backward(walk, direction, magnitude, saved, tokens, parameters)


@torch.library.register_fake(polar_triton)
def _results(q, k, v, *_):
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=wide)


@torch.library.register_fake(polar_triton_fwd)
def _(q, k, v, alpha, beta, gamma, null_base, v_null, cu_seqlens, held, window):
    (B, T, H, K), V = q.shape, v.shape[3]
    C = launch_config(ENGINE, q.device, q.dtype, K, V).launch["shared"]["C"]
    aligned = T if cu_seqlens is None else (T // C + len(cu_seqlens) - 1) * C
    direction, magnitude = _results(q, k, v)
    mean = q.new_empty(B, aligned, H, V, dtype=torch.int16 if q.dtype.itemsize == 2 else q.dtype)
    return direction, magnitude, mean, magnitude.new_empty(B, H, 3, -(-aligned // C) * C)


@backward_operator
def polar_triton_bwd(
    ddirection: Tensor, dmagnitude: Tensor, mean: Tensor, stats: Tensor,
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor, null_base: Tensor, v_null: Tensor,
    cu_seqlens: Tensor | None, held: Tensor | None, window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of polar_triton_fwd's eight floating inputs, in their order."""
    walk, align = _walk(q, k, v, cu_seqlens, held, window)
    if stats.shape[-1] != walk.rows:
        raise RuntimeError(f"{ENGINE}: the forward walked {stats.shape[-1]} rows, the config for the backward has {walk.rows}")
    ddirection, dmagnitude, q, k, v = each(align.align, ddirection, dmagnitude, q, k, v)
    parameters = Parameters(alpha, beta, gamma, null_base, v_null).map(Tensor.contiguous)
    dtokens, dparameters = backward(walk, ddirection, dmagnitude, Saved(mean, stats), (q, k, v), parameters)
    dq, dk, dv = each(lambda x: align.restore(x).contiguous(), *dtokens)
    dalpha, dbeta, dgamma, dnull_base, dv_null = dparameters
    return dq, dk, dv, dalpha, dbeta, dgamma, dnull_base, dv_null


@torch.library.register_fake(polar_triton_bwd)
def _(ddirection, dmagnitude, mean, stats, *inputs):
    return tuple(x.new_empty(x.shape) for x in inputs[:8])


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.window = inputs
    ctx.save_for_backward(*Saved(*output[2:]), *Given(*tensors))
    ctx.set_materialize_grads(False)


def _backward(ctx, ddirection, dmagnitude, *_):
    count = len(Saved._fields)
    saved, given = Saved(*ctx.saved_tensors[:count]), Given(*ctx.saved_tensors[count:])
    if ddirection is None:
        ddirection = given.q.new_zeros(*given.q.shape[:3], given.v.shape[3])
    if dmagnitude is None:
        dmagnitude = saved.stats.new_zeros(given.q.shape[:3])
    found = polar_triton_bwd(ddirection.contiguous(), dmagnitude.contiguous(), *saved, *given, ctx.window)
    return *found, None, None, None


differentiable(polar_triton_fwd, _backward, _save)


def polar(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor, null_base: Tensor, v_null: Tensor,
    state: PolarState | None, cu_seqlens: Tensor | None, window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """direction [B T Hq V] in q's dtype, magnitude [B T Hq] in float32 or float64; parameters are of magnitude's dtype."""
    parameters = Parameters(alpha, beta, gamma, null_base, v_null)
    held, place, sizes = None, None, q.shape[:2]
    if state is not None:
        state = state._replace(length=polar_checked(state.length, state.k.shape[1], cu_seqlens, window, *sizes))
        q, k, v, cu_seqlens, held, place = after_pages(q, k, v, state, cu_seqlens, window)
    given = q, k, v, *parameters
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        found = polar_triton_fwd(*given, cu_seqlens, held, window)[:2]
    else:
        found = polar_triton(*given, cu_seqlens, held, window)
    return found if place is None else tuple(x[0, place].unflatten(0, sizes) for x in found)


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Every kernel as a training step over grouped heads launches it, without a window and with one over packed sequences."""
    own = NAMES[dtype]
    number = "*fp64" if dtype == torch.float64 else "*fp32"
    saved = "i16" if dtype.itemsize == 2 else own
    BK, BV = padded(K), padded(V)
    cases = []
    for packed, window in ((False, None), (True, 1)):
        for kernel in (attend, prepare, queries, keys, totals):
            known = constants(config, kernel, dtype, 8, 2, K, V, packed, window, **({"SAVE": 1} if kernel is attend else {}))
            known, options = split(known)
            known |= absent(kernel, known, ONLY_WITH)
            BM, BN = known.get("BM"), known.get("BN")
            x = lambda element, rows, columns: (
                f"tensordesc<{element}[1, 1, {rows}, {columns}]>" if config.tma else f"*{element}"
            )
            types = {"p_spans": "*i32", "one": "fp32"}
            types |= dict.fromkeys(("T", "NR", "W", "tiles", "tiles_q"), "i32")
            types |= {"x_q": x(own, BM, BK), "x_dq": x(own, BM, BK), "x_k": x(own, BN, BK), "x_dk": x(own, BN, BK)}
            types |= {name: x(own, BM, BV) for name in ("x_o", "x_dc", "x_e")} | {"x_mean": x(saved, BM, BV)}
            types |= {"x_v": x(own, BN, BV), "x_dv": x(own, BN, BV)}
            signature = {name: types.get(name, number) for name in kernel.arg_names if name not in known}
            cases.append(Case(kernel, signature, known, options))
    return cases
