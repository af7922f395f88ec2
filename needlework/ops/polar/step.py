"""One token of Polar attention on a table of slots, by Triton kernels: it is appended to its slot, and read over the slot as one page.

Nothing is read back while a CUDA graph is captured. The kernels that read are those of ops/paged.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.paged.arguments import Pages
from needlework.ops.paged.engine.op import paged_direction
from needlework.ops.polar.arguments import Parameters, Tokens
from needlework.ops.polar.state import PolarState
from needlework.ops.runtime.custom_op import fake, step_operator
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import next_power_of_2


@triton.jit(do_not_specialize=["P", "stride_k", "stride_v"])
def append(
    p_new_k, p_new_v, p_k, p_v, p_slots, p_length, p_live, P, stride_k, stride_v,
    NK: tl.constexpr, NV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A token's keys [NK] and values [NV] of all heads at row length mod P of its slot, which then holds one token more.

    p_live [B]: rows of the slot that hold a token; −1 for a padded row.
    """
    i_b = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_slots + i_b)
    if slot < 0:
        tl.store(p_live + i_b, -1)
        return
    length = tl.load(p_length + slot)
    row = length % P
    o_k = tl.arange(0, BK)
    o_v = tl.arange(0, BV)
    b_k = tl.load(p_new_k + i_b * NK + o_k, mask=o_k < NK, other=0.0)
    b_v = tl.load(p_new_v + i_b * NV + o_v, mask=o_v < NV, other=0.0)
    tl.store(p_k + slot * stride_k + row * NK + o_k, b_k.to(p_k.dtype.element_ty), mask=o_k < NK)
    tl.store(p_v + slot * stride_v + row * NV + o_v, b_v.to(p_v.dtype.element_ty), mask=o_v < NV)
    tl.debug_barrier()  # every warp has read length
    tl.store(p_length + slot, length + 1)
    tl.store(p_live + i_b, tl.minimum(length + 1, P))


@step_operator("state")
def polar_append(k: Tensor, v: Tensor, state: PolarState, slots: Tensor, window: int | None) -> Tensor:
    """A token a row written to its slot; [B] int32: how many rows of the slot hold tokens, −1 for a padded row."""
    P = state.k.shape[1]
    P = min(P, window or P)
    live = torch.empty(len(k), dtype=torch.int32, device=k.device)
    NK, NV = k[0].numel() if len(k) else 1, v[0].numel() if len(v) else 1
    if len(k):
        run(
            append, (len(k),), k.contiguous(), v.contiguous(), state.k, state.v, slots.contiguous(), state.length, live, P,
            state.k.stride(0), state.v.stride(0), NK=NK, NV=NV, BK=next_power_of_2(NK), BV=next_power_of_2(NV), num_warps=4,
        )  # fmt: skip
    return live


@fake(polar_append)
def _(k, *_):
    return torch.empty(len(k), dtype=torch.int32, device=k.device)


def step(tokens: Tokens, parameters: Parameters, state: PolarState, slots: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """`step_polar` on arguments that it has checked."""
    q, k, v = tokens
    P = min(state.k.shape[1], window or state.k.shape[1])
    if P != window and not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        held = torch.where(slots >= 0, state.length[slots], 0)
        if held.numel() and int(held.max()) >= P:
            raise ValueError(
                f"state.k: axis 1 (P) has capacity {P}, but a sequence of length {int(held.max())} needs a row more"
            )
    live = polar_append(k, v, *state, slots, window)
    # a softmax does not mind in which order a ring holds its keys
    pages = Pages(state.k, state.v, slots[:, None].to(torch.int32), live, None, None)
    return paged_direction(q, *pages, *parameters)
