"""LUCID-PaTH's solve as operators of Triton kernels, forward and backward; their constants are in PaTH's engine.launch.json.

`directions.py` makes k̂, PaTH's `prepare.py` what it meets on its way, `overlaps.py` what each block needs, `scan.py` solves. Backward the
scan runs the other way, and the gradient of the products of keys is that of PaTH's scores: its kernels with k̂ as query and key, y for v,
z for dO, −√d for the scale of dA, a constant for the denominators. What is saved: k, β, w and y.

In half precision k̂, P between blocks and Y are operands of the inputs' dtype, sums and X are float32.
"""

from collections.abc import Iterator
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor
from triton import JITFunction

from needlework.ops.path.arguments import PathInputs, PathKeys
from needlework.ops.path.engine.blocks import group, release, spread, turn, unwind
from needlework.ops.path.engine.keys import keys, near, transfers
from needlework.ops.path.engine.op import Prepared, compile_case, descend, prepared
from needlework.ops.path.engine.sweep import sweep
from needlework.ops.path.engine.walk import LOG2E, Walk, constants
from needlework.ops.path.solve.engine.directions import directions, tangents
from needlework.ops.path.solve.engine.overlaps import invert, overlaps
from needlework.ops.path.solve.engine.scan import chain, onwards, take_off
from needlework.ops.runtime.custom_op import differentiable, fake
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig
from needlework.ops.runtime.precompile import kind, meta, precompile, run
from needlework.ops.runtime.recorded import recorded_backward_operator, recorded_operator
from needlework.ops.runtime.triton_types import NAMES, accumulator, cdiv

BOTH_WAYS = onwards, take_off, chain
SCRATCH = 1 << 28  # bytes of carried rows that a walk keeps, unless those of one superblock take more


class Keys(NamedTuple):
    """A call's aligned tokens: k̂, ‖k‖ [B T HK], β and w."""

    x: Tensor
    norm: Tensor
    beta: Tensor
    w: Tensor

    @classmethod
    def of(cls, walk: Walk, k: Tensor, beta: Tensor, w: Tensor) -> "Keys":
        x, norm = torch.empty_like(k), walk.number(k, *k.shape[:3])
        rows = norm.numel()
        launch(walk, directions, (cdiv(rows, walk.config.launch["directions"]["R"]),), k, x, norm, rows)
        return cls(x, norm, beta, w)

    def path(self, v: Tensor) -> PathInputs:
        """As PaTH's kernels take them: k̂ is query and key."""
        return PathInputs(self.x, self.x, v, self.beta, self.w)


class Blocks(NamedTuple):
    """What the scan reads: what prepare.py and overlaps.py make."""

    made: Prepared
    P: Tensor  # [B HK blocks M C C]
    X: Tensor  # [B HK NR C]
    x0: Tensor  # [B HK NR KB]

    @classmethod
    def of(cls, walk: Walk, own: Keys, *, keep: bool = False, given: Tensor | None = None) -> "Blocks":
        """keep: as in `prepared`. given: [N] int32 first rows of each sequence that are solved already; None: 0."""
        B, HK, rows, blocks, C, M, (KB, _) = walk.B, walk.HK, walk.rows, walk.blocks, walk.C, walk.M, walk.widths
        made = prepared(walk, own.path(own.x), keep)
        P = own.x.new_empty(B, HK, blocks, M, C, C)
        X, x0 = walk.number(P, B, HK, rows, C), walk.number(P, B, HK, rows, KB)
        cum, N = walk.align[:2]
        programs, W = (B * HK * blocks,), walk.window or 0
        launch(walk, invert, programs, own.x, own.w, made.U, made.R, cum, given, X, x0, walk.T, rows, N, W)
        launch(walk, overlaps, programs, made.k1, made.H, cum, P, x0, rows, N, W)
        return cls(made, P, X, x0)


def solve(
    walk: Walk, blocks: Blocks, right: Tensor, *, reverse: bool, gone: Tensor | None = None, given: Tensor | None = None
) -> Tensor:
    """Y of right sides V [B T HK V], or with `reverse` Z of dY. gone: [B HK NR VB], taken off already; added to. given: as in `Blocks`."""
    B, HK, rows, (KB, VB) = walk.B, walk.HK, walk.rows, walk.widths
    (cum, N), W = walk.align[:2], walk.window or 0
    made, P, X, x0 = blocks
    y, gone = torch.empty_like(right), walk.number(right, B, HK, rows, VB, zeros=True) if gone is None else gone
    own, moved = (made.k2, x0) if reverse else (x0, made.k2)
    places = cdiv(walk.blocks, walk.M)
    supers = cdiv(walk.align.longest, walk.M)
    one = B * HK * places * walk.M * walk.C * KB
    panel = max(1, min(supers, SCRATCH // (one * right.element_size())))
    tiles = right.new_empty(one * panel)
    by_block = (B * HK * walk.blocks,)
    by_chain = (N * HK * (VB // _columns(walk.config, VB)),)
    for start, turns in _panels(supers, panel, reverse):
        where = start, panel, places
        if supers > 1:
            launch(walk, onwards, by_block, moved, made.H2, cum, tiles, rows, N, W, *where, REV=reverse)
        for now in turns:
            launch(walk, chain, by_chain, P, X, right, gone, cum, given, y, walk.T, rows, W, now, REV=reverse)
            if now != (0 if reverse else supers - 1):
                launch(walk, take_off, by_block, own, tiles, y, cum, gone, walk.T, rows, N, W, now, *where, REV=reverse)
    return y


def _panels(supers: int, panel: int, reverse: bool) -> Iterator[tuple[int, list[int]]]:
    """(first superblock, its superblocks in the order that they are solved in)"""
    for start in list(range(0, supers, panel))[:: -1 if reverse else 1]:
        turns = list(range(start, min(start + panel, supers)))
        yield start, turns[::-1] if reverse else turns


def forward(walk: Walk, given: PathKeys) -> Tensor:
    """y"""
    k, v, beta, w = given
    if not v.numel():
        return torch.zeros_like(v)
    return solve(walk, Blocks.of(walk, Keys.of(walk, k, beta, w)), v, reverse=False)


def backward(walk: Walk, dy: Tensor, solved: PathKeys) -> PathKeys:
    """Gradients of what the forward was given. solved: the same with y for v."""
    k, y, beta, w = solved
    if not dy.numel():
        return PathKeys(*each(torch.zeros_like, k, dy, beta, w))
    own = Keys.of(walk, k, beta, w)
    blocks = Blocks.of(walk, own, keep=True)
    z = solve(walk, blocks, dy, reverse=True)
    lse = walk.number(dy, walk.B, walk.HK, walk.rows).fill_(walk.scale * LOG2E)
    row, column = (torch.empty_like(k, dtype=lse.dtype) for _ in range(2))
    found = PathInputs(row, column, y, torch.empty_like(beta), torch.empty_like(w))
    descend(walk, z, None, lse, own.path(y), blocks.made, found)
    dk, rows = torch.empty_like(k), own.norm.numel()
    launch(walk, tangents, (cdiv(rows, walk.config.launch["tangents"]["R"]),), own.x, own.norm, row, column, dk, rows)
    return PathKeys(dk, z, found.beta, found.w)


def launch(walk: Walk, kernel: JITFunction, grid: tuple[int, ...], *arguments: object, **flags: bool) -> None:
    run(kernel, grid, *arguments, **launch_constants(walk.constants(kernel), **flags))


def launch_constants(known: Constants, **flags: bool) -> Constants:
    columns = {"BV": min(known["BV"], known["VB"])} if "BV" in known else {}
    return known | columns | {name: int(x) for name, x in flags.items()}


def _columns(config: LaunchConfig, VB: int) -> int:
    """Of the values that a chain has."""
    return min(config.launch["chain"]["BV"], VB)


def _walk(given: PathKeys, cu_seqlens: Tensor | None, window: int | None) -> Walk:
    k = given.k
    return Walk.of(PathInputs(k, *given), cu_seqlens, window, sqrt(k.shape[-1]))._replace(soft=False)


def _launches(walk: Walk, given: PathKeys, save: bool) -> None:
    y = forward(walk, given)
    if save:
        backward(walk, y, given._replace(v=y))


@recorded_operator
def lucid_path_triton(given: PathKeys, cu_seqlens: Tensor | None, window: int | None, save: bool) -> Tensor:
    """y. save: whether a backward will follow, whose kernels are compiled beside the forward's."""
    walk = _walk(given, cu_seqlens, window)
    aligned = PathKeys(*walk.align.align(*given))
    key = "path/solve", walk.config.name, kind(*aligned), cu_seqlens is not None, window is not None, save
    precompile(given.k.device, key, lambda: _launches(walk, PathKeys(*meta(*aligned)), save))
    return walk.align.restore(forward(walk, aligned))[0]


@fake(lucid_path_triton)
def _(given: PathKeys, *_):
    return torch.empty_like(given.v)


@recorded_backward_operator
def lucid_path_triton_bwd(dy: Tensor, solved: PathKeys, cu_seqlens: Tensor | None, window: int | None) -> PathKeys:
    """Gradients of what lucid_path_triton was given. solved: the same with y for v."""
    walk = _walk(solved, cu_seqlens, window)
    dy, *aligned = walk.align.align(dy, *solved)
    found = backward(walk, dy, PathKeys(*aligned))
    return PathKeys(*walk.align.restore(*found))


@fake(lucid_path_triton_bwd)
def _(dy: Tensor, solved: PathKeys, *_):
    return PathKeys(*each(torch.empty_like, *solved))


def _save(ctx, inputs, output) -> None:
    given, cu_seqlens, ctx.window, _ = inputs
    ctx.save_for_backward(*given._replace(v=output), cu_seqlens)


def _backward(ctx, dy):
    return *lucid_path_triton_bwd(dy.contiguous(), *ctx.saved_tensors, ctx.window), None, None, None


differentiable(lucid_path_triton, _backward, _save)


def lucid_path(given: PathKeys, cu_seqlens: Tensor | None, window: int | None) -> Tensor:
    """y [B T Hkv V] in v's dtype, of contiguous tensors; β is of the sums' dtype."""
    save = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    return lucid_path_triton(*given, cu_seqlens, window, save)


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """The solve's own kernels, both ways, and PaTH's as it launches them: without a window, and with one over packed sequences."""
    own, wide = f"*{NAMES[dtype]}", f"*{NAMES[accumulator(dtype)]}"
    given = ("p_q", "p_k", "p_v", "p_w", "p_do", "p_dw", "p_U", "p_R", "p_k1", "p_k2", "p_x1", "p_y1", "p_x2", "p_y2", "p_dq0")
    given += ("p_Ho", "p_H2o", "p_S", "p_L", "p_dA")
    types = dict.fromkeys((*given, "p_x", "p_P", "p_tiles", "p_y", "p_rhs"), own) | dict.fromkeys(("p_cum", "p_given"), "*i32")
    cases = []
    for several in (False, True):
        of = lambda kernel, several=several: launch_constants(
            constants(config, kernel, dtype, 2, 2, K, V, sqrt(K), several, several, soft=False)
        )
        for kernel in (directions, invert, overlaps, tangents):
            more = {"p_dk": own} if kernel is tangents else {}
            cases.append(compile_case(kernel, types | more, wide, of(kernel)))
        for kernel in BOTH_WAYS:
            for reverse in (False, True):
                more = {"p_from": wide if reverse else own, "p_own": own if reverse else wide}
                cases.append(compile_case(kernel, types | more, wide, of(kernel) | {"REV": int(reverse)}))
        for kernel in (sweep, keys, near, transfers, spread, group, turn, unwind, release):
            # a gradient of k̂ is summed with another one
            more = {"p_dk": wide} if kernel is release else {}
            cases.append(compile_case(kernel, types | more, wide, of(kernel)))
    return cases
