"""PaTH attention as operators of Triton kernels, forward and backward; their constants are in engine.launch.json.

`walk.py` has the sizes of a call, `prepare.py` makes what a query meets on its way, `forward.py` walks, `sweep.py` walks back and returns,
`keys.py` and `blocks.py` have the gradients of what it met. What is saved: q, k, v, β, w, o and the softmax's denominators; the rest is
made again.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from triton import JITFunction

from needlework.ops.common.alignment import Alignment
from needlework.ops.path.arguments import PathInputs
from needlework.ops.path.engine.blocks import group, release, spread, turn, unwind
from needlework.ops.path.engine.forgets import NO_GATE, Decays, Forgets, by_head
from needlework.ops.path.engine.forward import attend
from needlework.ops.path.engine.keys import keys, near, transfers
from needlework.ops.path.engine.prepare import compose, prepare
from needlework.ops.path.engine.sweep import sweep
from needlework.ops.path.engine.walk import ENGINE, Walk, constants
from needlework.ops.runtime.custom_op import differentiable, fake
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig, absent, launch_config, split
from needlework.ops.runtime.precompile import kind, meta, precompile
from needlework.ops.runtime.recorded import recorded_backward_operator, recorded_operator
from needlework.ops.runtime.triton_types import NAMES, accumulator, cdiv

KERNELS = prepare, compose, by_head, attend, sweep, keys, near, transfers, spread, group, turn, unwind, release
# flag -> arguments that kernels read with it alone
ONLY_WITH = {
    "SOFT": ("p_o", "p_dv", "p_sum_v"),
    "KEEP": ("p_X",),
    "PAGES": ("p_start", "p_table", "p_page_k", "p_page_v", "p_page_decay", "p_given"),
    "DECAY": ("p_decay", "p_edges", "p_page_decay", "p_row", "p_column"),
}
SUMS = dict.fromkeys(("p_sums", "p_decay", "p_page_decay", "p_row", "p_column"), "*fp64")
# bytes of x and y that a panel of the backward keeps; up to MOST, where SCRATCH would leave the GPU without programs
SCRATCH, MOST = 1 << 30, 1 << 33


class Prepared(NamedTuple):
    """What prepare.py makes; B HK first."""

    U: Tensor  # [NR KB]
    R: Tensor  # [NR C]
    k1: Tensor  # [NR KB]
    k2: Tensor  # [NR KB]
    H: Tensor  # [blocks KB KB]
    H2: Tensor  # [blocks KB KB]
    Ho: Tensor  # H and H2 as walks take them, as operands
    H2o: Tensor
    X: Tensor | None  # [NR C], for the backward

    @property
    def met(self) -> tuple[Tensor, ...]:
        """What queries meet on their way."""
        return self.U, self.R, self.k1, self.k2, self.Ho, self.H2o


def prepared(walk: Walk, x: PathInputs, keep: bool = False) -> Prepared:
    """keep: with what the backward wants."""
    B, HK, rows, blocks, (KB, _) = walk.B, walk.HK, walk.rows, walk.blocks, walk.widths
    U, k2 = (x.k.new_empty(B, HK, rows, KB) for _ in range(2))
    k1 = walk.number(x.k, B, HK, rows, KB) if walk.pages and walk.soft else torch.empty_like(U)
    R = x.k.new_empty(B, HK, rows, walk.C)
    H, H2 = (walk.number(x.k, B, HK, blocks, KB, KB) for _ in range(2))
    Ho, H2o = (torch.empty_like(H, dtype=walk.dtype) for _ in range(2))
    X = walk.number(x.k, B, HK, rows, walk.C) if keep else None
    grid, (cum, N) = (B * HK * blocks,), walk.align[:2]
    walk.launch(prepare, grid, x.k, x.w, x.beta, U, R, k1, H, Ho, X, walk.T, rows, KEEP=int(keep))
    walk.launch(compose, (B * HK * blocks * cdiv(KB, 64),), k1, H, k2, H2, H2o, cum, rows, N, walk.M)
    return Prepared(U, R, k1, k2, H, H2, Ho, H2o, X)


def forward(walk: Walk, x: PathInputs) -> tuple[Tensor, Tensor]:
    """o, and log2 of each softmax's denominator [B H NR]."""
    o = x.q.new_empty(walk.B, walk.T, walk.H, walk.V)
    lse = walk.number(x.q, walk.B, walk.H, walk.rows)
    if o.numel():
        made, decays = prepared(walk, x), Decays.of(walk, x.decay) or NO_GATE
        walk.launch(
            attend, (walk.programs(attend), walk.blocks), x.q, x.k, x.v, x.w, *decays, *made.met, walk.align.cum, o, lse,
            None, None, None, None, None, walk.T, walk.rows, walk.align.N, walk.M, walk.window or 0, 0, 0, 0, 0, 0,
        )  # fmt: skip
    return o, lse


def backward(walk: Walk, do: Tensor, o: Tensor, lse: Tensor, x: PathInputs) -> PathInputs:
    """Gradients of q, k, v, β, w and, with a forget gate, of the gates' sums."""
    found = PathInputs(*each(torch.empty_like, *x))
    if not do.numel():
        return PathInputs(*each(Tensor.zero_, *found))
    decays = Decays.of(walk, x.decay)
    forgets = None if decays is None else Forgets.of(decays)
    descend(walk, do, o, lse, x, prepared(walk, x, keep=True), found, forgets)
    return found if forgets is None else found._replace(decay=forgets.ddecay(walk.scale, walk.T))


def descend(
    walk: Walk, do: Tensor, o: Tensor | None, lse: Tensor, x: PathInputs, made: Prepared, found: PathInputs,
    forgets: Forgets | None = None,
) -> None:  # fmt: skip
    """Fill `found` with the gradients of x, from weights 2^{A − lse} and the scores' gradient, RATE times these times (do·v − D). The
    solve's D is 0 and its values have their gradients already: o is None, found.v is not read. What the gates' sums have goes to
    `forgets`."""
    B, T, Hq, HK, rows, blocks, C, (KB, VB) = walk.B, walk.T, walk.H, walk.HK, walk.rows, walk.blocks, walk.C, walk.widths
    (cum, N), W = walk.align[:2], walk.window or 0
    U, R, k1, k2, H, _, Ho, _, X = made
    dk1, dk2 = (walk.number(do, B, HK, rows, KB, zeros=True) for _ in range(2))
    dv = walk.number(do, B, HK, rows, VB, zeros=True) if walk.soft else None
    dH, dH2 = (torch.zeros_like(H) for _ in range(2))
    dq0, LD = do.new_empty(B, Hq, rows, KB), walk.number(lse, *lse.shape, 2)

    M, supers = walk.M, cdiv(walk.align.longest, walk.M)
    held = 2 * (M + supers) * B * Hq * C * KB * do.element_size()  # of a block
    least = cdiv(walk.config.launch["sweep"]["NP"], walk.programs(sweep))
    panel = max(1, min(blocks, max(SCRATCH // held, min(least, MOST // held))))
    panel = cdiv(blocks, cdiv(blocks, panel))  # of like sizes
    decays, row, columns = NO_GATE, None, None
    if forgets is not None:
        decays, row, columns = forgets.decays, forgets.row, forgets.columns(panel, walk.dtype)
    kept = [do.new_empty(B * Hq * panel * many * C, KB) for many in (M, M, supers, supers)]
    x1, y1, x2, y2 = kept
    by_block = (B * HK * blocks,)
    for start in range(0, blocks, panel):
        where = rows, N, M, W, start, panel, supers
        walk.launch(
            sweep, (walk.programs(sweep), min(panel, blocks - start)), x.q, x.k, x.v, x.w, *made.met, cum, o, do, lse, LD,
            x1, y1, x2, y2, found.q, dq0, *decays, row, columns, T, *where,
        )  # fmt: skip
        walk.launch(keys, by_block, x.v, k2, cum, do, LD, x2, dk2, dv, *decays, columns, T, *where)
        walk.launch(near, by_block, x.v, k1, cum, do, LD, x1, dk1, dv, *decays, columns, T, *where[:-1])
        walk.launch(transfers, by_block, cum, x1, y1, x2, y2, dH, dH2, *where)
        if forgets is not None and columns is not None:
            forgets.add(columns)
    walk.launch(spread, by_block, k1, Ho, cum, dk1, dk2, dH, dH2, torch.empty_like(Ho), rows, N, M)
    sum_k, sum_w, dU = (torch.empty_like(dk1) for _ in range(3))
    dR = walk.number(do, B, HK, rows, C)
    L, dA = (do.new_empty(B, Hq, rows, C) for _ in range(2))
    walk.launch(
        group, by_block, x.q, x.k, x.v, x.w, U, R, cum, do, LD, dq0, sum_k, sum_w, dv, dR, dU,
        found.v if walk.soft else None, L, dA, decays[0], lse, T, rows, N, W,
    )  # fmt: skip
    walk.launch(turn, by_block, x.w, U, R, dk1, dH, dR, dU, sum_k, sum_w, T, rows)
    left = [torch.empty_like(dR) for _ in range(3)]
    walk.launch(unwind, by_block, x.k, x.w, x.beta, X, cum, dR, dU, *left, found.beta, T, rows, N)
    walk.launch(release, by_block, x.k, x.w, cum, dU, *left, sum_k, sum_w, found.k, found.w, T, rows, N)


def _forward(x: PathInputs, cu_seqlens: Tensor | None, window: int | None, scale: float, save: bool) -> tuple[Tensor, Tensor]:
    walk = Walk.of(x, cu_seqlens, window, scale)
    x = PathInputs(*walk.align.align(*x))
    key = ENGINE, walk.config.name, kind(*x), cu_seqlens is not None, window is not None, scale, save
    precompile(x.q.device, key, lambda: _launches(walk, PathInputs(*meta(*x)), save))
    o, lse = forward(walk, x)
    return *walk.align.restore(o), lse


def _launches(walk: Walk, x: PathInputs, save: bool) -> None:
    o, lse = forward(walk, x)
    if save:
        backward(walk, o, o, lse, x)


@recorded_operator
def path_triton(inputs: PathInputs, cu_seqlens: Tensor | None, window: int | None, scale: float) -> Tensor:
    """o."""
    return _forward(inputs, cu_seqlens, window, scale, save=False)[0]


@fake(path_triton)
def _result(inputs: PathInputs, *_):
    return inputs.q.new_empty(*inputs.q.shape[:3], inputs.v.shape[3])


@recorded_operator
def path_triton_fwd(inputs: PathInputs, cu_seqlens: Tensor | None, window: int | None, scale: float) -> tuple[Tensor, Tensor]:
    """o, and log2 of the denominators [B H NR] over aligned tokens."""
    return _forward(inputs, cu_seqlens, window, scale, save=True)


@fake(path_triton_fwd)
def _(inputs: PathInputs, cu_seqlens: Tensor | None, *_):
    q = inputs.q
    (B, T, H), C = q.shape[:3], block(q, inputs.v)
    _, aligned = Alignment.sizes(cu_seqlens, B, T, C)
    lse = q.new_empty(B, H, -(-aligned // C) * C, dtype=torch.promote_types(q.dtype, torch.float32))
    return _result(inputs), lse


@recorded_backward_operator
def path_triton_bwd(
    do: Tensor, o: Tensor, lse: Tensor, inputs: PathInputs, cu_seqlens: Tensor | None, window: int | None, scale: float
) -> PathInputs:
    """Gradients of `inputs`."""
    walk = Walk.of(inputs, cu_seqlens, window, scale)
    if lse.shape[-1] != walk.rows:
        raise RuntimeError(f"{ENGINE}: the forward walked {lse.shape[-1]} rows, the config for the backward has {walk.rows}")
    aligned = walk.align.align(do, o, *inputs)
    found = backward(walk, *aligned[:2], lse, PathInputs(*aligned[2:]))
    return PathInputs(*walk.align.restore(*found))


@fake(path_triton_bwd)
def _(do: Tensor, o: Tensor, lse: Tensor, inputs: PathInputs, *_):
    return PathInputs(*each(lambda x: x.new_empty(x.shape), *inputs))


def _save(ctx, inputs, output) -> None:
    given, cu_seqlens, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*output, *given, cu_seqlens)


def _backward(ctx, do, *_):
    found = path_triton_bwd(do.contiguous(), *ctx.saved_tensors, ctx.window, ctx.scale)
    return *(dx if needed else None for dx, needed in zip(found, ctx.needs_input_grad, strict=False)), None, None, None


differentiable(path_triton, _backward, _save, path_triton_fwd)


def path(x: PathInputs, cu_seqlens: Tensor | None, window: int | None, scale: float) -> Tensor:
    """o [B T Hq V] in q's dtype; β is of the sums' dtype."""
    return path_triton(*x, cu_seqlens, window, scale)


def block(q: Tensor, v: Tensor) -> int:
    """Tokens of a block, under the config that a call takes."""
    return launch_config(ENGINE, q.device, q.dtype, q.shape[-1], v.shape[-1]).launch["shared"]["C"]


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Every kernel as a training step over grouped heads launches it, without a window and with one over packed sequences, and those that
    know of a forget gate with one."""
    own, wide = f"*{NAMES[dtype]}", f"*{NAMES[accumulator(dtype)]}"
    given = ("p_q", "p_k", "p_v", "p_w", "p_o", "p_do", "p_dq", "p_dk", "p_dw", "p_U", "p_R", "p_k1", "p_k2")
    given += ("p_x1", "p_y1", "p_x2", "p_y2", "p_dq0", "p_Ho", "p_H2o", "p_S", "p_L", "p_dA")
    types = dict.fromkeys(given, own) | {"p_cum": "*i32"} | SUMS | {"p_column": "*fp32" if dtype.itemsize == 2 else "*fp64"}
    cases = []
    for several, decay in ((False, False), (True, False), (True, True)):
        of = partial(
            constants, config, dtype=dtype, H=8, HK=2, K=K, V=V, scale=K**-0.5, packed=several, window=several, decay=decay
        )
        cases += [
            compile_case(kernel, types, wide, of(kernel)) for kernel in KERNELS if not decay or "DECAY" in kernel.arg_names
        ]
    return cases


def compile_case(kernel: JITFunction, types: dict[str, str], wide: str, known: Constants) -> Case:
    """types: of arguments that are no pointers to `wide` numbers."""
    known, options = split(known)
    if "KEEP" in kernel.arg_names:
        known |= {"KEEP": known.get("KEEP", 1)}
    known |= absent(kernel, known, ONLY_WITH)
    # a dV of later queries is summed; dV itself is written
    types = types | ({"p_dv": types["p_do"]} if kernel is group else {})
    of = lambda arg: types.get(arg, wide) if arg.startswith("p_") else "i32"
    return Case(kernel, {arg: of(arg) for arg in kernel.arg_names if arg not in known}, known, options)
