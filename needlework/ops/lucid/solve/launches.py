"""Which kernels LUCID launches, in which order, with which buffers and constants, for aligned tokens.

keys → (top) → inverses, peak → solve        peak → solve backwards → key_gradient
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from needlework.ops.common.alignment import Alignment
from needlework.ops.common.kernels.tile import block
from needlework.ops.common.remembered import remembered
from needlework.ops.lucid.arguments import LucidInputs
from needlework.ops.lucid.solve.intra_bwd import key_gradient
from needlework.ops.lucid.solve.operands import inverses, keys, peak, scale, top
from needlework.ops.lucid.solve.panels import before_panel, panel
from needlework.ops.lucid.solve.scan import solve
from needlework.ops.runtime.launch_configs import Constants, LaunchConfig, launch_config
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import TYPES, accumulator, cdiv, one_layout

ENGINE = "lucid/solve"
# keys and values of a group of heads: most of the 50 MB of a Hopper's L2 cache
GROUP_BYTES = 34_000_000
# waits of about a microsecond, for a block that takes a few: seconds
TURNS = 1 << 22


@dataclass(frozen=True)
class Task:
    """What a call solves, next to its tensors."""

    config: LaunchConfig
    align: Alignment
    packed: bool
    rowmax: bool
    window: int | None
    numbers: int  # of a key as the caller has it: similarities are scaled by their root
    given: int = 0  # blocks of pages in front of each sequence
    skip: Tensor | None = None  # [N] int32 rows there that hold no token

    @classmethod
    def of(
        cls, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, rowmax: bool, window: int | None, numbers: int
    ) -> "Task":  # fmt: skip
        """For sequences that have no pages."""
        chosen = launch_config(ENGINE, k.device, k.dtype, k.shape[-1], v.shape[-1])
        return cls(chosen, alignment(chosen, k, k.shape[1], cu_seqlens), cu_seqlens is not None, rowmax, window, numbers)

    @property
    def cum(self) -> Tensor | None:
        """The alignment's; None where it is not read."""
        return self.align.cum if self.packed else None

    def order(self, blocks: int, reverse: bool) -> Tensor:
        """[blocks] packed: which block is taken when, the nearest to its sequence's start (end) first, those of none last."""
        return _order(self.align.cum, blocks, reverse)


@remembered
def _order(cum: Tensor, blocks: int, reverse: bool) -> Tensor:
    c = torch.arange(blocks, dtype=cum.dtype, device=cum.device)
    n = torch.searchsorted(cum[1:-1], c, right=True)
    place = cum[n + 1] - 1 - c if reverse else c - cum[n]
    return torch.where(c < cum[-1], place, blocks).argsort(stable=True).to(torch.int32)


def alignment(config: LaunchConfig, k: Tensor, T: int, cu_seqlens: Tensor | None) -> Alignment:
    """Of rows of T tokens where k lies."""
    C = config.launch["shared"]["C"]
    if cu_seqlens is None:  # rows of a batch are alike: no table is read
        return Alignment(k.new_empty(0, dtype=torch.int32), len(k), T, cdiv(T, C), None)
    return Alignment.of(cu_seqlens, len(k), T, C, k.device)


class Saved(NamedTuple):
    """What the backward wants of the forward, head by head: [1 B·H NR ...] of aligned tokens."""

    x: Tensor
    row: Tensor  # ‖k‖; "rowmax": μ
    inverse: Tensor  # less the identity
    Y: Tensor
    counters: Tensor
    more: Tensor | None  # "beta": V − U; "rowmax": the row of x that μ is of

    @classmethod
    def of(cls, tokens: LucidInputs, rowmax: bool, save: bool, config: LaunchConfig, N: int) -> "Saved":
        """Places for N sequences of aligned tokens."""
        k, v, beta = tokens
        B, T, H, V = v.shape
        C, K = config.launch["shared"]["C"], k.shape[-1]
        NR, wide, operand = cdiv(T, C) * C, accumulator(k.dtype), operand_dtype(k.dtype)

        def new(*shape: int, dtype: torch.dtype = operand) -> Tensor:
            return k.new_empty(1, B * H, NR, *shape, dtype=dtype)

        x, Y = new(one_layout(K, k.dtype), dtype=k.dtype if rowmax else operand), new(one_layout(V, k.dtype))
        if rowmax:
            more = new(dtype=torch.int32)
        else:
            more = torch.empty_like(Y) if beta is not None and save else None
        return cls(x, new(dtype=wide), new(C), Y, counters(k, max(B, N) * H), more)


def counters(k: Tensor, chains: int) -> Tensor:
    """[4 ·] zeros: |v|'s peak and |y|'s of each row and head, blocks solved of each sequence and head, the next ticket."""
    # every one starts at a multiple of 16 bytes
    return torch.zeros(4, cdiv(chains, 4) * 4, dtype=torch.int32, device=k.device)


def forward(
    tokens: LucidInputs, task: Task, *, save: bool, first: Callable[[Tensor], None] | None = None
) -> tuple[Tensor, Saved]:  # fmt: skip
    """y [B T H V] of aligned tokens. first: makes v, and "rowmax"'s μ [1 B·H NR] of these tokens one over more columns, before either is
    read; y then has v's dtype."""
    k, v, beta = tokens
    T, H, V = v.shape[1:]
    N, W = task.align.N, task.window or 0
    flagged = task.rowmax, beta is not None, bool(W), task.packed
    c = constants(task.config, k.dtype, H, k.shape[-1], V, task.numbers, *flagged)
    x, row, inverse, Y, counts, more = saved = Saved.of(tokens, task.rowmax, save, task.config, N)
    NR, C = inverse.shape[2:]
    y = torch.empty_like(v)
    if y.numel():
        programs, x_k = (inverse.shape[1] * (NR // C),), _tile(x, task.config)
        run(keys, programs, k, x, row, T, NR, **c["keys"])
        if task.rowmax:
            run(top, programs, x_k, task.cum, task.skip, row, more, NR, N, W, **c["top"], **flags("top", GIVEN=task.given > 0))
        if first is not None:
            first(row)
        run(inverses, programs, x, row, beta, inverse, T, NR, W, **c["inverses"])
        R = more if beta is not None and save else None
        launch_solve(x_k, row, inverse, beta, v, Y, R, y, v, None, counts.unbind(), task, c, REV=False)
    return y, saved


def backward(dy: Tensor, v: Tensor, beta: Tensor | None, saved: Saved, K: int, task: Task) -> LucidInputs:
    """Gradients of aligned tokens; v has the pages' y in front, and so has dv their gradient."""
    x, row, inverse, Y, counts, more = saved
    B, T, H, V = dy.shape
    c = constants(task.config, dy.dtype, H, K, V, task.numbers, task.rowmax, beta is not None, bool(task.window), task.packed)
    NR, C = inverse.shape[2:]
    Z, zv = torch.empty_like(Y), torch.empty_like(row) if task.rowmax else None
    dv, dk = torch.empty_like(dy), dy.new_empty(B, T, H, K)
    dbeta = None if beta is None else torch.empty_like(beta, dtype=accumulator(dy.dtype))
    if dv.numel():
        x_k = _tile(x, task.config)
        peak_y, rows_y, *_ = counts.unbind()
        peak_z, rows_z, *_ = new = torch.zeros_like(counts).unbind()
        launch_solve(x_k, row, inverse, beta, dy, Z, None, dv, v, zv, new, task, c, REV=True)
        R, best = (None if beta is None else more), (more if task.rowmax else None)
        run(
            key_gradient, (NR // C * B * H,),
            x_k, _tile(Y, task.config), _tile(Z, task.config), x, Y, R, Z, row, row, best, zv,
            beta, v, dy, dk, dbeta, peak_y, peak_z, rows_y, rows_z, task.cum,
            T, NR, task.align.N, task.window or 0, **c["key_gradient"],
        )  # fmt: skip
    return LucidInputs(dk, dv, dbeta)


def launch_solve(
    x_k: Tensor | TensorDescriptor, row: Tensor, inverse: Tensor, beta: Tensor | None, rhs: Tensor, Y: Tensor, R: Tensor | None,
    out: Tensor, v: Tensor, zv: Tensor | None, counts: tuple[Tensor, ...], task: Task, c: dict[str, Constants], *, REV: bool,
) -> None:  # fmt: skip
    """Y (and R where it has a place), out and the peaks: of the right side, and of the norms of Y's rows."""
    B, T, H = rhs.shape[:3]
    NR, C = inverse.shape[2:]
    N, blocks = task.align.N, NR // C
    of = lambda name: c[name] | flags(name, REV=REV, SAVE_R=R is not None, GIVEN=task.given > 0)
    peaks, rows, done, ticket = counts
    if c["solve"]["HALF"]:
        run(peak, (B * H * cdiv(T, c["peak"]["R"]),), rhs, peaks, T, **c["peak"])
    matrix = x_k, row, inverse, beta
    results = Y, R, out, v, zv, peaks, rows, task.cum
    W = task.window or 0
    if "panel" in c:
        S = c["panel"]["S"]
        rest = torch.empty(N * H * S, C, Y.shape[3], dtype=accumulator(rhs.dtype), device=rhs.device)
        for start in range(0, task.align.longest, S):
            sizes = T, NR, W, task.given, start
            run(before_panel, (len(rest),), *matrix[:2], rhs, Y, rest, peaks, results[-1], *sizes, **of("before_panel"))
            run(panel, (N * H,), *matrix, rest, *results, *sizes, **of("panel"))
        return
    tiles = B * blocks
    order = task.order(blocks, REV) if task.packed else None
    group = max(1, min(H, GROUP_BYTES // (tiles * C * (c["solve"]["KB"] + c["solve"]["VB"]) * Y.element_size())))
    while H % group:
        group -= 1
    run(
        solve, (min(task.config.launch["solve"]["NP"], tiles * H),),
        *matrix, rhs, *results, order, done, ticket, T, NR, N, W, task.given, tiles, group, TURNS, **of("solve"),
    )  # fmt: skip


@cache
def constants(
    config: LaunchConfig, dtype: torch.dtype, H: int, K: int, V: int, numbers: int,
    rowmax: bool, beta: bool, window: bool, packed: bool,
) -> dict[str, Constants]:  # fmt: skip
    """Kernel -> its constants, num_warps and the like; of a solve also its `flags`."""
    half = dtype.itemsize == 2
    own: dict[str, Constants] = {name: dict(row) for name, row in config.launch.items() if name != "shared"}
    KB, VB = widths(K, V, dtype)
    everything = dict(
        H=H, K=K, V=V, C=config.launch["shared"]["C"], KB=KB, VB=VB, TMA=int(config.tma), HALF=int(half),
        ROOT=math.sqrt(numbers), SCALE=scale(numbers, rowmax),
        ROWMAX=int(rowmax), BETA=int(beta), WINDOW=int(window), PACKED=int(packed),
        ACC=TYPES[accumulator(dtype)], ST=TYPES[operand_dtype(dtype)],
    )  # fmt: skip
    own["peak"] |= dict(D=V, BD=VB)
    own["solve"].pop("NP")
    if "panel" in own:
        own["panel"] |= own["solve"]
        own["before_panel"] = dict(own["panel"])
    for name, kernel in KERNELS.items():
        if name not in own:
            continue
        own[name] |= {key: x for key, x in everything.items() if key in kernel.arg_names and key not in own[name]}
    return own


def widths(K: int, V: int, dtype: torch.dtype) -> tuple[int, int]:
    """Columns of tiles of keys and of values."""
    return one_layout(K, dtype), one_layout(V, dtype)


KERNELS = {
    "keys": keys, "top": top, "inverses": inverses, "peak": peak, "solve": solve, "before_panel": before_panel, "panel": panel,
    "key_gradient": key_gradient,
}  # fmt: skip


def flags(kernel: str, **settings: bool) -> dict[str, int]:
    """REV: backwards in time. SAVE_R: for β's gradient. GIVEN: there are pages."""
    return {name: int(x) for name, x in settings.items() if name in KERNELS[kernel].arg_names}


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """float16 is eight times as near as bfloat16; A is at most 1, and Y is kept times a power of two."""
    return torch.float16 if dtype.itemsize == 2 else dtype


def _tile(x: Tensor, config: LaunchConfig):
    return block(x, config.launch["shared"]["C"], x.shape[-1]) if config.tma else x
