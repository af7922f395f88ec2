"""One token of CCQ on a slot table, in place.

Two launches: the first advances C and cleans the query, a program for each [K BV] tile of columns of one key head's C. The
second advances mean and n, which every tile of the first reads whole.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.ccq.arguments import CcqInputs
from needlework.ops.ccq.state import CurvatureState
from needlework.ops.runtime.custom_op import fake, step_operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import Case, LaunchConfig, launch_config, split
from needlework.ops.runtime.triton_types import NAMES, TYPES, accumulator, cdiv, next_power_of_2
from needlework.ops.slots.table import check_contiguous

ENGINE = "ccq/step"


@triton.jit
def ccq_step_kernel(
    p_q, p_k, p_eta, p_g, p_C, p_mean, p_n, p_slots, p_o, C_stride, mean_stride, n_stride,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """δ = k − mean,   n' = e^g n + 1,   C' = e^g C + (1 − 1/n') δ δᵀ,   q̃ = q − η C' q / n';   p_g None: g = 0."""
    i = tl.program_id(0)
    i_v = i % tl.cdiv(K, BV)
    head = (i // tl.cdiv(K, BV)).to(tl.int64)  # of all rows, as every offset below: beyond 2^31 numbers
    row, h = head // H, head % H
    G: tl.constexpr = HV // H

    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    in_k, in_v = o_k < K, o_v < K
    slot = row
    if p_slots is not None:
        slot = tl.load(p_slots + row).to(tl.int64)
    if slot < 0:  # a padded row
        for j in tl.static_range(G):
            tl.store(p_o + (head * G + j) * K + o_v, tl.zeros([BV], ACC), mask=in_v)
        return
    p_mean += slot * mean_stride + h * K
    p_n += slot * n_stride + h
    p_tile = p_C + slot * C_stride + h * K * K + o_k[:, None] * K + o_v[None, :]
    in_tile = in_k[:, None] & in_v[None, :]
    C = tl.load(p_tile, mask=in_tile, other=0).to(ACC)

    n = tl.load(p_n).to(ACC)
    if p_g is not None:
        retained = tl.exp(tl.load(p_g + head).to(ACC))
        C, n = C * retained, n * retained
    n += 1
    d_k = tl.load(p_k + head * K + o_k, mask=in_k, other=0).to(ACC) - tl.load(p_mean + o_k, mask=in_k, other=0)
    d_v = tl.load(p_k + head * K + o_v, mask=in_v, other=0).to(ACC) - tl.load(p_mean + o_v, mask=in_v, other=0)
    C += (1 - 1 / n) * (d_k[:, None] * d_v[None, :])  # symmetric to the bit
    tl.store(p_tile, C, mask=in_tile)

    q_k = tl.load(p_q + head * K + o_k, mask=in_k, other=0).to(ACC)
    q_v = tl.load(p_q + head * K + o_v, mask=in_v, other=0).to(ACC)
    spread = tl.sum(C * q_k[:, None], 0) / n
    for j in tl.static_range(G):
        eta = tl.load(p_eta + head * G + j).to(ACC)
        tl.store(p_o + (head * G + j) * K + o_v, q_v - eta * spread, mask=in_v)


@triton.jit
def ccq_mean_kernel(
    p_k, p_g, p_mean, p_n, p_slots, mean_stride, n_stride, H: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """n' = e^g n + 1,   mean' = mean + (k − mean) / n'."""
    head = tl.program_id(0).to(tl.int64)
    row, h = head // H, head % H
    slot = row
    if p_slots is not None:
        slot = tl.load(p_slots + row).to(tl.int64)
    if slot < 0:
        return
    p_mean += slot * mean_stride + h * K
    p_n += slot * n_stride + h
    n = tl.load(p_n).to(ACC)
    if p_g is not None:
        n *= tl.exp(tl.load(p_g + head).to(ACC))
    n += 1
    o_k = tl.arange(0, BK)
    in_k = o_k < K
    k = tl.load(p_k + head * K + o_k, mask=in_k, other=0).to(ACC)
    mean = tl.load(p_mean + o_k, mask=in_k, other=0).to(ACC)
    tl.store(p_mean + o_k, mean + (k - mean) / n, mask=in_k)
    tl.debug_barrier()  # every warp has read n
    tl.store(p_n, n)


@step_operator("state")
def ccq_step(inputs: CcqInputs, state: CurvatureState, slots: Tensor | None) -> Tensor:
    """The cleaned query [B HV K]."""
    check_contiguous(state)
    q, k, eta, g = each(Tensor.contiguous, *inputs)
    C, mean, n = state
    (B, H, K), HV = q.shape, eta.shape[1]
    o = q.new_empty(B, HV, K)
    launch = launch_config(ENGINE, q.device, q.dtype, K, K).launch
    constants = _constants(launch["step"], K)
    sizes = {"H": H, "K": K, "ACC": TYPES[accumulator(q.dtype)], "BK": constants["BK"]}
    strides = [x.stride(0) for x in state]
    with torch.cuda.device_of(q):
        grid = (B * H * cdiv(K, constants["BV"]),)
        ccq_step_kernel[grid](q, k, eta, g, C, mean, n, slots, o, *strides, HV=HV, **sizes | constants)
        ccq_mean_kernel[(B * H,)](k, g, mean, n, slots, *strides[1:], **sizes, **launch["mean"])
    return o


@fake(ccq_step)
def _(inputs: CcqInputs, *_):
    return inputs.q.new_empty(*inputs.eta.shape, inputs.q.shape[-1])


def step(inputs: CcqInputs, state: CurvatureState, slots: Tensor | None) -> Tensor:
    """`step_ccq` on arguments that it has checked: the cleaned query [B HV K] in q's dtype, without gradients."""
    return ccq_step(*inputs, *state, slots)


def _constants(launch: Mapping[str, int], K: int) -> dict[str, int]:
    BK = next_power_of_2(K)
    return {**launch, "K": K, "BK": BK, "BV": min(launch["BV"], BK)}


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    half = f"*{NAMES[dtype]}"
    launch, options = split(config.launch["step"])
    constants = _constants(launch, K)
    signature = {"p_q": half, "p_k": half, "p_o": half, "p_slots": "*i64"}
    signature |= {name: "*fp32" for name in ("p_eta", "p_g", "p_C", "p_mean", "p_n")}
    signature |= dict.fromkeys(("C_stride", "mean_stride", "n_stride"), "i64")
    sizes = {"H": 2, "ACC": tl.float32}
    step = {**sizes, **constants, "HV": 4}
    mean = {**sizes, "K": K, "BK": constants["BK"]}
    names = ccq_mean_kernel.arg_names
    return [
        Case(ccq_step_kernel, signature, step, options),
        Case(ccq_mean_kernel, {n: x for n, x in signature.items() if n in names}, mean, split(config.launch["mean"])[1]),
    ]
