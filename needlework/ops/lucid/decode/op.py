"""LUCID's decoding as one operator: a token of each sequence is solved, attends, and goes into its row of the pages.

No gradient, nothing read back, and grids that follow from shapes: it can be captured in a CUDA graph. Constants are in decode.launch.json.
"""

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from triton import JITFunction

from needlework.ops.lucid.arguments import LucidInputs
from needlework.ops.lucid.decode.attend import attend, merge
from needlework.ops.lucid.solve.operands import scale as solve_scale
from needlework.ops.paged.arguments import Pages
from needlework.ops.paged.engine.op import HELD, Shape
from needlework.ops.paged.placement import Placement
from needlework.ops.runtime.custom_op import fake, step_operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig, absent, launch_config, split
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import NAMES, TYPES, accumulator, cdiv, next_power_of_2, padded

ENGINE = "lucid/decode"
ALL = 2**30  # a window that no sequence fills
ONLY_WITH = {"SPLIT": ("p_stats", "p_S"), "BETA": ("p_beta",)}


class Strides(NamedTuple):
    """Numbers from token to token."""

    TQ: int
    TK: int
    TV: int


class Rule(NamedTuple):
    """What is computed. `apart`: the read has a window of its own."""

    rowmax: bool
    beta: bool
    apart: bool
    scale: float


@step_operator("k_pages", "y_pages")
def lucid_attend(
    q: Tensor, tokens: LucidInputs, k_pages: Tensor, y_pages: Tensor, where: Placement, rowmax: bool, window: int | None,
    read: int | None, scale: float | None,
) -> Tensor:  # fmt: skip
    """o [N H V] of one new token a sequence, `paged_lucid` without cu_seqlens. window: of the solve; read: of the attention."""
    rule = Rule(rowmax, tokens.beta is not None, read != window, scale or q.shape[2] ** -0.5)
    return _launch(q, tokens, k_pages, y_pages, where, rule, window or ALL, read or ALL)


@fake(lucid_attend)
def _(q: Tensor, tokens: LucidInputs, *_):
    return q.new_empty(*q.shape[:2], tokens.v.shape[2])


def _launch(
    q: Tensor, new: LucidInputs, k_pages: Tensor, y_pages: Tensor, where: Placement, rule: Rule, W: int, WR: int
) -> Tensor:
    k, v, beta = new
    N, H, K = q.shape
    o = q.new_empty(N, H, v.shape[2])
    if not o.numel():
        return o
    q, k, v = (x if x[0].is_contiguous() else x.contiguous() for x in (q, k, v))
    table, length, rows, _ = each(Tensor.contiguous, *where)
    beta = None if beta is None else beta.contiguous()
    shape, NB = Shape.of(q, Pages(k_pages, y_pages, table, length, None, None)), table.shape[1]
    strides = Strides(q.stride(0), k.stride(0), v.stride(0))
    config = launch_config(ENGINE, q.device, q.dtype, K, shape.V)
    known = constants(config, attend, q.dtype, shape, strides, rule)
    tiles = cdiv(min(NB * shape.PG, W + known["BN"]), known["BN"])  # of keys that a token may see
    splits = splits_of(N * shape.HK, cdiv(tiles, known["LEAST"]), **config.launch["shared"])
    part = N * shape.HK * splits * (H // shape.HK + 1)
    stats, S = (q.new_empty(part, D, dtype=accumulator(q.dtype)) if splits > 1 else None for D in (2, shape.V))
    tokens = q, k, v, beta, k_pages, y_pages
    run(
        attend, (N * shape.HK * splits,), *tokens, table, length, rows, o, stats, S, NB, W, WR, splits,
        **known, SPLIT=int(splits > 1),
    )  # fmt: skip
    if splits > 1:
        known = constants(config, merge, q.dtype, shape, strides, rule)
        known["BS"] = min(known["BS"], next_power_of_2(splits))
        run(merge, (N * H,), *tokens, length, rows, o, stats, S, W, splits, **known)
    return o


def splits_of(pairs: int, tiles: int, programs: int, dense: int, LONG: int) -> int:
    """Of each of so many pairs of a sequence and a key-value head: enough programs for the machine, as many as it holds at a time where
    splits then have LONG tiles, and no split that could never have keys. Nothing of it depends on a sequence's length."""
    return max(1, min(max(programs // pairs, min(dense // pairs, tiles // LONG)), tiles))


def constants(
    config: LaunchConfig, kernel: JITFunction, dtype: torch.dtype, shape: Shape, strides: Strides, rule: Rule
) -> Constants:
    """All that a kernel is compiled for, but whether it is split."""
    half, own = dtype.itemsize == 2, config.launch["attend"]
    known = dict(
        shape._asdict(), **strides._asdict(), BM=tile(shape.H // shape.HK, half), BK=padded(shape.K), BV=padded(shape.V), APART=int(rule.apart),
        ROWMAX=int(rule.rowmax), BETA=int(rule.beta), SCALE=rule.scale, SOLVE=solve_scale(shape.K, rule.rowmax), HALF=int(half),
        HELD=HELD, ACC=TYPES[accumulator(dtype)], OT=TYPES[dtype], BN=own["BN"], LEAST=own["LEAST"],
    )  # fmt: skip
    return {name: x for name, x in known.items() if name in kernel.arg_names} | dict(config.launch[kernel.__name__])


def tile(G: int, half: bool) -> int:
    """Rows of a program's tile: G queries and those that solve, 16 at least, a tensor core's."""
    return max(16, next_power_of_2(G + 1 + half))


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Of four query heads a group, with β and with a maximum a row: in splits on pages of 16 tokens, the windows apart, and unsplit on
    pages of whole tiles."""
    own, acc = NAMES[dtype], NAMES[accumulator(dtype)]
    types = dict.fromkeys(("p_table", "p_length"), "*i32") | {"p_rows": "*i64"}
    types |= dict.fromkeys(("p_beta", "p_stats", "p_S"), f"*{acc}") | dict.fromkeys(("NB", "W", "WR", "splits"), "i32")
    cases = []
    for rowmax, (PG, SPLIT) in product((False, True), ((16, 1), (64, 0))):
        shape, strides = Shape(8, 2, K, V, PG, PG * 2 * K, PG * 2 * V), Strides(8 * K, 2 * K, 2 * V)
        rule = Rule(rowmax, not rowmax, bool(SPLIT), K**-0.5)
        for kernel in (attend, merge) if SPLIT else (attend,):
            known, options = split(constants(config, kernel, dtype, shape, strides, rule))
            if kernel is attend:
                known["SPLIT"] = SPLIT
            known |= absent(kernel, known, ONLY_WITH)
            signature = {name: types.get(name, f"*{own}") for name in kernel.arg_names if name not in known}
            cases.append(Case(kernel, signature, known, options))
    return cases
