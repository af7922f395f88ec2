"""x Wᵀ + b of few rows by sums. A program reads some rows of W once, whole, before it waits for x.

Bound by the bytes of W: matrix units want 16 rows or more, and a tile of them that is loaded, awaited and multiplied in a loop leaves memory idle
between two loads. Here a program asks for all of its bytes at once, and where kernels may overlap while the one that makes x still runs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.runtime.custom_op import operator
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
def product(p_x, tiles, p_bias, o_n, in_n, o_d, D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, ACC: tl.constexpr):
    """x W^T + b of one row. x is read in the layout of W's tiles, as often as they have rows: it would be moved there."""
    same = tl.zeros([BN, 1], tl.int32) + o_d[None, :]
    y = tl.zeros([BN, BD], ACC)
    for i in tl.static_range(0, D, BD):
        y += tl.load(p_x + i + same, mask=same < D - i, other=0).to(ACC) * tiles[i // BD].to(ACC)
    y = tl.sum(y, 1)
    if p_bias is not None:
        y += tl.load(p_bias + o_n, mask=in_n, other=0).to(ACC)
    return y


@triton.jit(do_not_specialize=["rows", "N"])
def few_rows_kernel(
    p_x, p_w, p_bias, p_up, p_up_bias, p_y, rows, N,
    D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, GLU: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN columns of y [rows N], x [rows D]: x W^T + b, or by GLU silu or squared ReLU of it times x U^T + c."""
    o_n, o_d = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BD)
    in_n = o_n < N
    tiles = rows_of(p_w, o_n, in_n, o_d, D, BD)
    ups = tiles
    if GLU is not None:
        ups = rows_of(p_up, o_n, in_n, o_d, D, BD)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for _ in range(rows):
        y = product(p_x, tiles, p_bias, o_n, in_n, o_d, D, BN, BD, ACC)
        if GLU is not None:
            if GLU == "silu":
                y = y / (1 + tl.exp(-y))
            else:
                y = tl.maximum(y, 0) * tl.maximum(y, 0)
            y *= product(p_x, ups, p_up_bias, o_n, in_n, o_d, D, BN, BD, ACC)
        tl.store(p_y + o_n, y.to(p_y.dtype.element_ty), mask=in_n)
        p_x += D
        p_y += N


@operator
def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y [rows N] of x [rows D], weight [N D] with contiguous rows."""
    return _launch(x, weight, bias, None, None, None)


@operator
def few_rows_glu(
    x: Tensor, gate: Tensor, gate_bias: Tensor | None, up: Tensor, up_bias: Tensor | None, activation: str
) -> Tensor:
    """The same of two maps: y [rows N]."""
    return _launch(x, gate, gate_bias, up, up_bias, activation)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, up: Tensor | None, up_bias: Tensor | None, activation: str | None
) -> Tensor:
    (rows, D), N = x.shape, len(weight)
    y = x.new_empty(rows, N)
    if y.numel():
        known = _constants(launch_config(ENGINE, x.device, x.dtype, D, N), x.dtype, D, activation)
        biases = (None if one is None else one.contiguous() for one in (bias, up_bias))
        run(
            few_rows_kernel,
            (cdiv(N, known["BN"]),),
            x.contiguous(),
            weight,
            next(biases),
            up,
            next(biases),
            y,
            rows,
            N,
            **known,
        )
    return y


@torch.library.register_fake(few_rows)
@torch.library.register_fake(few_rows_glu)
def _(x, weight, *_):
    return x.new_empty(len(x), len(weight))


def _constants(config: LaunchConfig, dtype: torch.dtype, D: int, activation: str | None) -> Constants:
    launch = config.launch["few_rows" if activation is None else "glu"]
    return {**launch, "BD": min(launch["BD"], next_power_of_2(D)), "D": D, "GLU": activation, "ACC": TYPES[accumulator(dtype)]}


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Of K columns of W: with a bias and without, and of two maps."""
    own = f"*{NAMES[dtype]}"
    every = ("p_x", "p_w", "p_bias", "p_up", "p_up_bias", "p_y")
    cases = []
    for activation, absent in ((None, every[3:5]), (None, every[2:5]), ("silu", (every[2], every[4])), ("relu2", ())):
        known, options = split(_constants(config, dtype, K, activation))
        signature = {name: own for name in every if name not in absent} | {"rows": "i32", "N": "i32"}
        cases.append(Case(few_rows_kernel, signature, known | dict.fromkeys(absent), options))
    return cases
