"""The map of few rows whose heads are normed and gated first, by sums: all that lies between a recurrent rule and the residual stream,
in one kernel.

As few_rows.py has it: a program reads its rows of W whole before it waits for the heads, and norms all of them by itself.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.linear.arguments import Maps, NormedHeads
from needlework.ops.linear.few_rows import ENGINE, biased
from needlework.ops.runtime.custom_op import fake, operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig, launch_config, split
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import NAMES, TYPES, accumulator, cdiv, next_power_of_2


@triton.jit(do_not_specialize=["rows", "N", "eps"])
def few_heads_kernel(
    p_x, p_norm, p_gate, eps, p_w, p_bias, p_y, rows, N,
    H: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN columns of y [rows N] = (RMSNorm(x) ⊙ norm ⊙ φ(gate)) W^T + b, each head of x [rows H·V] normed by itself; φ is GATE."""
    o_n, o_v = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BV)
    in_n, in_v = o_n < N, o_v < V
    p_rows = p_w + o_n.to(tl.int64)[:, None] * (H * V) + o_v[None, :]
    tiles = ()
    for h in tl.static_range(H):
        tiles += (tl.load(p_rows + h * V, mask=in_n[:, None] & in_v[None, :], other=0),)
    # read in the layout of W's tiles, as often as they have rows: they would be moved there
    same = tl.zeros([BN, 1], tl.int32) + o_v[None, :]
    inside = same < V
    norm = same
    if p_norm is not None:
        norm = tl.load(p_norm + same, mask=inside, other=0).to(ACC)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for _ in range(rows):
        y = tl.zeros([BN, BV], ACC)
        for h in tl.static_range(H):
            x = tl.load(p_x + h * V + same, mask=inside, other=0).to(ACC)
            x *= (1 / tl.sqrt(tl.sum(x * x, 1) / V + eps))[:, None]
            if p_norm is not None:
                x *= norm
            if p_gate is not None:
                gate = tl.load(p_gate + h * V + same, mask=inside, other=0).to(ACC)
                factor = 1 / (1 + tl.exp(-gate))
                if GATE == "silu":
                    factor *= gate
                x *= factor
            y += x * tiles[h].to(ACC)
        tl.store(p_y + o_n, biased(y, p_bias, o_n, in_n).to(p_y.dtype.element_ty), mask=in_n)
        p_x += H * V
        p_y += N
        if p_gate is not None:
            p_gate += H * V


@operator
def few_heads(x: NormedHeads, maps: Maps, activation: str) -> Tensor:
    """y [rows N] of x, and of a gate by its activation. The map's rows are contiguous."""
    (H, V), N = x.x.shape[-2:], len(maps.weight)
    heads, norm, gate = each(lambda one: one.contiguous(), x.x.reshape(-1, H * V), x.norm, x.gate)
    y = heads.new_empty(len(heads), N)
    if y.numel():
        known = _constants(launch_config(ENGINE, heads.device, heads.dtype, H * V, N), heads.dtype, H, V, activation)
        given = heads, norm, gate, x.eps, maps.weight, maps.bias
        run(few_heads_kernel, (cdiv(N, known["BN"]),), *given, y, len(heads), N, **known)
    return y


@fake(few_heads)
def _(x, maps, activation):
    return x.x.new_empty(x.x.shape[:-2].numel(), len(maps.weight))


def _constants(config: LaunchConfig, dtype: torch.dtype, H: int, V: int, activation: str) -> Constants:
    launch = {name: x for name, x in config.launch["few_rows"].items() if name != "BD"}
    return {**launch, "H": H, "V": V, "BV": next_power_of_2(V), "GATE": activation, "ACC": TYPES[accumulator(dtype)]}


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Of K columns of W: in heads of 256 with a norm and a gate, and with neither."""
    own, cases = f"*{NAMES[dtype]}", []
    for activation, none in (("silu", ("p_bias",)), ("sigmoid", ("p_norm", "p_gate"))):
        known, options = split(_constants(config, dtype, cdiv(K, 256), min(K, 256), activation))
        given = (name for name in ("p_x", "p_norm", "p_gate", "p_w", "p_bias", "p_y") if name not in none)
        signature = dict.fromkeys(given, own) | {"rows": "i32", "N": "i32", "eps": "fp32"}
        signature = {name: signature[name] for name in few_heads_kernel.arg_names if name in signature}
        cases.append(Case(few_heads_kernel, signature, known | dict.fromkeys(none), options))
    return cases
