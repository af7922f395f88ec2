"""x Wᵀ + b of few rows by sums. A program reads some rows of W once, whole, before it waits for x.

Bound by the bytes of W: matrix units want 16 rows or more, and a tile of them that is loaded, awaited and multiplied in a loop leaves
memory idle between two loads. Here a program asks for all of its bytes at once, and where kernels may overlap while the one that makes x
still runs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.linear.arguments import Maps, Normed
from needlework.ops.runtime.custom_op import fake, operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig, launch_config, split
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import NAMES, TYPES, accumulator, cdiv, next_power_of_2

ENGINE = "linear/few_rows"


@triton.jit
def rows_of(p_w, o_n, in_n, o_d, D: tl.constexpr, BD: tl.constexpr):
    """Rows o_n of W in tiles [BN BD]: asked for here, awaited where they are used."""
    p_rows = p_w + o_n.to(tl.int64)[:, None] * D + o_d[None, :]
    tiles = ()
    for i in tl.static_range(0, D, BD):
        tiles += (tl.load(p_rows + i, mask=in_n[:, None] & (i + o_d < D)[None, :], other=0),)
    return tiles


@triton.jit
def biased(y, p_bias, o_n, in_n):
    y = tl.sum(y, 1)
    if p_bias is not None:
        y += tl.load(p_bias + o_n, mask=in_n, other=0).to(y.dtype)
    return y


@triton.jit(do_not_specialize=["rows", "N", "eps"])
def few_rows_kernel(
    p_x, p_more, p_norm, p_sum, eps, p_w, p_bias, p_up, p_up_bias, p_y, rows, N,
    D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, GLU: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN columns of y [rows N]: x W^T + b, or by GLU silu or squared ReLU of it times x U^T + c. x [rows D], or with p_norm the norm of
    what x and, if it is there, p_more add up to, which the first program leaves in p_sum.

    x is read in the layout of W's tiles, as often as they have rows: it would be moved there. Every program norms the row by itself: it has
    all of it anyway.
    """
    o_n, o_d = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BD)
    in_n = o_n < N
    tiles = rows_of(p_w, o_n, in_n, o_d, D, BD)
    ups = tiles
    if GLU is not None:
        ups = rows_of(p_up, o_n, in_n, o_d, D, BD)
    same = tl.zeros([BN, 1], tl.int32) + o_d[None, :]
    norms = ()
    if p_norm is not None:
        for i in tl.static_range(0, D, BD):
            norms += (tl.load(p_norm + i + same, mask=same < D - i, other=0),)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    leaves = (o_n == 0)[:, None]
    for _ in range(rows):
        y = tl.zeros([BN, BD], ACC)
        z = y
        squares = y
        for i in tl.static_range(0, D, BD):
            inside = same < D - i
            x = tl.load(p_x + i + same, mask=inside, other=0)
            if p_norm is not None:
                if p_more is not None:
                    x = (x.to(ACC) + tl.load(p_more + i + same, mask=inside, other=0).to(ACC)).to(x.dtype)
                    tl.store(p_sum + i + same, x, mask=inside & leaves)
                squares += x.to(ACC) * x.to(ACC)
                x = x.to(ACC) * norms[i // BD].to(ACC)
            y += x.to(ACC) * tiles[i // BD].to(ACC)
            if GLU is not None:
                z += x.to(ACC) * ups[i // BD].to(ACC)
        if p_norm is not None:
            r = 1 / tl.sqrt(tl.sum(squares, 1) / D + eps)
            y *= r[:, None]
            z *= r[:, None]
        y = biased(y, p_bias, o_n, in_n)
        if GLU is not None:
            if GLU == "silu":
                y = y / (1 + tl.exp(-y))
            else:
                y = tl.maximum(y, 0) * tl.maximum(y, 0)
            y *= biased(z, p_up_bias, o_n, in_n)
        tl.store(p_y + o_n, y.to(p_y.dtype.element_ty), mask=in_n)
        p_x += D
        p_y += N
        if p_more is not None:
            p_more += D
            p_sum += D


@operator
def few_rows(x: Tensor, maps: Maps, activation: str | None) -> Tensor:
    """y [rows N] of rows of x [.. D]. The maps' rows are contiguous."""
    return _launch(x.reshape(-1, x.shape[-1]), maps, activation)


@operator
def few_rows_normed(x: Normed, maps: Maps, activation: str | None) -> tuple[Tensor, Tensor]:
    """The same of the norm, and x + more; without `more` that is empty."""
    total = x.x.new_empty(0 if x.more is None else x.x.shape)
    return _launch(x.x.reshape(-1, len(x.norm)), maps, activation, x, total), total


def _launch(x: Tensor, maps: Maps, activation: str | None, normed: Normed | None = None, total: Tensor | None = None) -> Tensor:
    """y of x [rows D]; normed: x is the first part of it, whose sum goes to `total`."""
    (rows, D), N = x.shape, len(maps.weight)
    y = x.new_empty(rows, N)
    if y.numel():
        known = _constants(launch_config(ENGINE, x.device, x.dtype, D, N), x.dtype, D, activation)
        more, norm, eps = (None, None, 0.0) if normed is None else (normed.more, normed.norm, normed.eps)
        x, more, norm, bias, up_bias = each(lambda one: one.contiguous(), x, more, norm, maps.bias, maps.up_bias)
        given = x, more, norm, None if more is None else total, eps
        run(few_rows_kernel, (cdiv(N, known["BN"]),), *given, maps.weight, bias, maps.up, up_bias, y, rows, N, **known)
    return y


@fake(few_rows)
def _(x, maps, activation):
    return x.new_empty(x.shape[:-1].numel(), len(maps.weight))


@fake(few_rows_normed)
def _(x, maps, activation):
    rows = x.x.numel() // maps.weight.shape[1]
    return x.x.new_empty(rows, len(maps.weight)), x.x.new_empty(0 if x.more is None else x.x.shape)


def _constants(config: LaunchConfig, dtype: torch.dtype, D: int, activation: str | None) -> Constants:
    launch = config.launch["few_rows" if activation is None else "glu"]
    return {**launch, "BD": min(launch["BD"], next_power_of_2(D)), "D": D, "GLU": activation, "ACC": TYPES[accumulator(dtype)]}


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Of K columns of W: alone, with a bias, normed, and of two maps with all there is."""
    own = f"*{NAMES[dtype]}"
    inputs, maps = ("p_more", "p_norm", "p_sum"), ("p_bias", "p_up", "p_up_bias")
    cases = []
    for activation, none in (
        (None, inputs + maps),
        (None, inputs + maps[1:]),
        (None, maps),
        ("silu", maps[::2]),
        ("relu2", ()),
    ):
        known, options = split(_constants(config, dtype, K, activation))
        given = ("p_x", "p_w", "p_y", *(name for name in inputs + maps if name not in none))
        signature = dict.fromkeys(given, own) | {"rows": "i32", "N": "i32", "eps": "fp32"}
        signature = {name: signature[name] for name in few_rows_kernel.arg_names if name in signature}
        cases.append(Case(few_rows_kernel, signature, known | dict.fromkeys(none), options))
    return cases
