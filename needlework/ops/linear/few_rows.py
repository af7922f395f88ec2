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


@triton.jit(do_not_specialize=["rows", "N"])
def few_rows_kernel(
    p_x, p_w, p_bias, p_y, rows, N, D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN columns of y [rows N]; x [rows D]. x is read in the layout of W's tiles, as often as they have rows: it would be moved there."""
    o_n, o_d = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BD)
    in_n = o_n < N
    p_rows = p_w + o_n.to(tl.int64)[:, None] * D + o_d[None, :]
    tiles = ()
    for i in tl.static_range(0, D, BD):
        tiles += (tl.load(p_rows + i, mask=in_n[:, None] & (i + o_d < D)[None, :], other=0),)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    same = tl.zeros([BN, 1], tl.int32) + o_d[None, :]
    for _ in range(rows):
        y = tl.zeros([BN, BD], ACC)
        for i in tl.static_range(0, D, BD):
            x = tl.load(p_x + i + same, mask=same < D - i, other=0)
            y += x.to(ACC) * tiles[i // BD].to(ACC)
        b_y = tl.sum(y, 1)
        if p_bias is not None:
            b_y += tl.load(p_bias + o_n, mask=in_n, other=0).to(ACC)
        tl.store(p_y + o_n, b_y.to(p_y.dtype.element_ty), mask=in_n)
        p_x += D
        p_y += N


@operator
def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y [rows N] of x [rows D], weight [N D] with contiguous rows."""
    (rows, D), N = x.shape, len(weight)
    y = x.new_empty(rows, N)
    if y.numel():
        known = _constants(launch_config(ENGINE, x.device, x.dtype, D, N), x.dtype, D)
        bias = None if bias is None else bias.contiguous()
        run(few_rows_kernel, (cdiv(N, known["BN"]),), x.contiguous(), weight, bias, y, rows, N, **known)
    return y


@torch.library.register_fake(few_rows)
def _(x, weight, bias):
    return x.new_empty(len(x), len(weight))


def _constants(config: LaunchConfig, dtype: torch.dtype, D: int) -> Constants:
    launch = config.launch["few_rows"]
    return {**launch, "BD": min(launch["BD"], next_power_of_2(D)), "D": D, "ACC": TYPES[accumulator(dtype)]}


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Of K columns of W, with a bias and without."""
    own = f"*{NAMES[dtype]}"
    known, options = split(_constants(config, dtype, K))
    signature = dict.fromkeys(("p_x", "p_w", "p_y"), own) | {"rows": "i32", "N": "i32"}
    biased = Case(few_rows_kernel, signature | {"p_bias": own}, known, options)
    return [biased, Case(few_rows_kernel, signature, known | {"p_bias": None}, options)]
