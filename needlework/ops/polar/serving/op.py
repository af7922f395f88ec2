"""Polar attention while serving, as operators of Triton kernels: a step on a table of slots, decode and prefill on pages.

No gradient, nothing read back, and grids that follow from shapes: each can be captured in a CUDA graph. Constants are in
paged.launch.json.
"""

import torch
from torch import Tensor

from needlework.ops.common.alignment import Alignment
from needlework.ops.common.kernels.tile import token_tile
from needlework.ops.polar.arguments import Parameters
from needlework.ops.polar.serving.decode import append, decode, merge
from needlework.ops.polar.serving.prefill import prefill
from needlework.ops.polar.state import PolarState
from needlework.ops.runtime.custom_op import operator, step_operator
from needlework.ops.runtime.launch_configs import Case, LaunchConfig, launch_config, split
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import NAMES, TYPES, accumulator, cdiv, next_power_of_2, padded

ENGINE = "polar/paged"
ALL = 2**30  # a window that no sequence fills


@operator
def polar_decode(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor, null_base: Tensor, v_null: Tensor,
    block_table: Tensor, length: Tensor, window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """direction [B Hq V], magnitude [B Hq] of q [B Hq K] on pages [n PG Hkv K], [n PG Hkv V]."""
    (B, H, K), (HK, V) = q.shape, v.shape[2:]
    p = Parameters(alpha, beta, gamma, null_base, v_null).map(Tensor.contiguous)
    direction, magnitude = q.new_empty(B, H, V), q.new_empty(B, H, dtype=accumulator(q.dtype))
    if not direction.numel():
        return direction, magnitude
    chosen = launch_config(ENGINE, q.device, q.dtype, K, V)
    known = constants(chosen, decode, q.dtype, H, HK, K, V, k.shape[1])
    capacity = block_table.shape[1] * k.shape[1]
    # enough programs for the machine, and no split that could never have a tile
    splits = max(1, min(chosen.launch["shared"]["programs"] // (B * HK), cdiv(capacity, known["BN"])))
    stats, S = (q.new_empty(B, H, splits, D, dtype=accumulator(q.dtype)) for D in (3, V))
    table, length = block_table.contiguous(), length.contiguous()
    W = window or ALL
    run(
        decode, (splits, HK, B),
        q.contiguous(), k, v, table, length, p.alpha, p.gamma, p.null_base, stats, S, table.shape[1], W, **known,
    )  # fmt: skip
    known = constants(chosen, merge, q.dtype, H, HK, K, V, k.shape[1])
    known["BS"] = min(known["BS"], next_power_of_2(splits))
    run(
        merge, (B * H,), stats, S, length, *p, direction, magnitude, splits, W, **known,
    )  # fmt: skip
    return direction, magnitude


@torch.library.register_fake(polar_decode)
def _(q, k, v, *_):
    return q.new_empty(*q.shape[:2], v.shape[3]), q.new_empty(q.shape[:2], dtype=accumulator(q.dtype))


@step_operator("page_k", "page_v", "length")
def polar_append(
    k: Tensor, v: Tensor, page_k: Tensor, page_v: Tensor, length: Tensor, slots: Tensor, window: int | None
) -> Tensor:
    """A token a row written to its slot; [B] int32: how many rows of the slot hold tokens, −1 for a padded row."""
    P = page_k.shape[1]
    P = min(P, window or P)
    live = torch.empty(len(k), dtype=torch.int32, device=k.device)
    NK, NV = k[0].numel() if len(k) else 1, v[0].numel() if len(v) else 1
    if len(k):
        run(
            append, (len(k),), k.contiguous(), v.contiguous(), page_k, page_v, slots.contiguous(), length, live, P,
            page_k.stride(0), page_v.stride(0), NK=NK, NV=NV, BK=next_power_of_2(NK), BV=next_power_of_2(NV), num_warps=4,
        )  # fmt: skip
    return live


@torch.library.register_fake(polar_append)
def _(k, *_):
    return torch.empty(len(k), dtype=torch.int32, device=k.device)


def step(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor, null_base: Tensor, v_null: Tensor,
    state: PolarState, slots: Tensor, window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`step_polar` on arguments that it has checked: a slot is a sequence's one page."""
    P = min(state.k.shape[1], window or state.k.shape[1])
    if P != window and not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        held = torch.where(slots >= 0, state.length[slots], 0)
        if held.numel() and int(held.max()) >= P:
            raise ValueError(
                f"state.k: axis 1 (P) has capacity {P}, but a sequence of length {int(held.max())} needs a row more"
            )
    live = polar_append(k, v, state.k, state.v, state.length, slots, window)
    parameters = alpha, beta, gamma, null_base, v_null
    return polar_decode(q, state.k, state.v, *parameters, slots[:, None].to(torch.int32), live, None)


@operator
def polar_prefill(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor, null_base: Tensor, v_null: Tensor,
    block_table: Tensor, length: Tensor, cu_seqlens: Tensor, window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """direction [1 T Hq V], magnitude [1 T Hq] of q [1 T Hq K]; sequence n's are the newest of its length[n] tokens."""
    (_, T, H, K), (HK, V) = q.shape, v.shape[2:]
    chosen = launch_config(ENGINE, q.device, q.dtype, K, V)
    known = constants(chosen, prefill, q.dtype, H, HK, K, V, k.shape[1])
    C, BK, BV = known["BM"], known["BK"], known["BV"]
    align = Alignment.of(cu_seqlens, 1, T, C, q.device)
    q = align.align(q)
    direction, magnitude = q.new_empty(1, align.T, H, V), q.new_empty(1, align.T, H, dtype=accumulator(q.dtype))
    if direction.numel():
        chunk = torch.arange(align.T // C, device=q.device)
        n = torch.searchsorted(align.cum, chunk.to(torch.int32), right=True) - 1
        beyond = n >= align.N
        at = n.clamp(max=align.N - 1)
        start = length[at] - cu_seqlens.diff()[at] + (chunk - align.cum[at]) * C
        chunks = torch.stack((torch.where(beyond, -1, n), start), 1).to(torch.int32)
        tile = lambda x, columns: token_tile(x, C, columns) if chosen.tma else x
        table = block_table.contiguous()
        run(
            prefill, (H, align.T // C), tile(q, BK), tile(direction, BV), k, v, table, length.contiguous(), chunks,
            *Parameters(alpha, beta, gamma, null_base, v_null).map(Tensor.contiguous), magnitude, align.T, table.shape[1], window or ALL,
            **known,
        )  # fmt: skip
    return align.restore(direction).contiguous(), align.restore(magnitude).contiguous()


@torch.library.register_fake(polar_prefill)
def _(q, k, v, *_):
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))


def constants(config: LaunchConfig, kernel, dtype: torch.dtype, H: int, HK: int, K: int, V: int, PG: int) -> dict[str, object]:
    """All that a kernel is compiled for."""
    known = dict(
        H=H, HK=HK, K=K, V=V, PG=PG, BG=padded(H // HK), BK=padded(K), BV=padded(V), TMA=int(config.tma),
        ACC=TYPES[accumulator(dtype)], OT=TYPES[dtype], SCALE=K**-0.5,
    )  # fmt: skip
    return {name: x for name, x in known.items() if name in kernel.arg_names} | config.launch[kernel.__name__]


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Decode, its merge and prefill, four query heads a group and pages of 16 tokens."""
    own, number = NAMES[dtype], "*fp64" if dtype == torch.float64 else "*fp32"
    cases = []
    for kernel in (decode, merge, prefill):
        known = constants(config, kernel, dtype, 8, 2, K, V, 16)
        known, options = split(known)
        types = dict.fromkeys(("p_q", "p_k", "p_v", "p_o", "x_q", "x_o"), f"*{own}")
        types |= dict.fromkeys(("p_table", "p_length", "p_chunks"), "*i32") | dict.fromkeys(("T", "NB", "W", "splits"), "i32")
        if config.tma and kernel is prefill:
            types |= {x: f"tensordesc<{own}[1, 1, {known['BM']}, {known[D]}]>" for x, D in (("x_q", "BK"), ("x_o", "BV"))}
        signature = {name: types.get(name, number) for name in kernel.arg_names if name not in known}
        cases.append(Case(kernel, signature, known, options))
    return cases
