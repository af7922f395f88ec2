"""A long sequence of few heads in segments, which the walks take side by side: what each begins with, forward, and ends with, backward.

From a segment's start to its end the covariance goes by

    C_end = a C_start + N,   a = Π_c e^{G_C}

and N is walked from nothing. On the way back a gradient is z + r·x − ½ xᵀN x of a place x seen from the mean. With Δ from the mean at a
segment's start to that at its end,

    N_start = a N_end + N    r_start = a (r_end + N_end Δ) + r    z_start = a (z_end − Δ·(r_end + ½ N_end Δ)) + z

where N, r and z are walked from nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.ccq.curvature.intra import add_product, arguments, case, merge_of, numbers, tokens, whole_of
from needlework.ops.ccq.curvature.operands import NO_STATE, Saved, Task
from needlework.ops.ccq.curvature.scan import columns
from needlework.ops.common.kernels.tile import load_tile
from needlework.ops.delta.segments import Segments, fix_up
from needlework.ops.runtime.launch_configs import Case, LaunchConfig
from needlework.ops.runtime.precompile import run


@triton.jit
def place_of(p_split, H: tl.constexpr, NV: tl.constexpr, BV: tl.constexpr):
    """Of a program: its segment and key head as one number, the head, its first row, and the segment's chunks; none of a sequence that is
    one segment."""
    i_v = tl.program_id(0) % NV * BV
    i_nh = tl.program_id(0) // NV
    i_n = i_nh // H
    return tl.cast(i_nh, tl.int64), i_nh % H, i_v, tl.load(p_split + 2 * i_n), tl.load(p_split + 2 * i_n + 1)


@triton.jit
def store_square(p, M, o_nh, i_v, i_k, K: tl.constexpr, BV: tl.constexpr, KB: tl.constexpr):
    """Rows from i_v and columns from i_k of [rows K K]."""
    o_v, o_k = i_v + tl.arange(0, BV), i_k + tl.arange(0, KB)
    tl.store(p + o_nh * (K * K) + o_v[:, None] * K + o_k[None, :], M, mask=(o_v < K)[:, None] & (o_k < K)[None, :])


@triton.jit(do_not_specialize=["T", "NCB"])
def growth(
    x_kc_k, x_kc_v, p_E, p_G, p_N, p_a, p_split, T, NCB,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, KB: tl.constexpr, NK: tl.constexpr, NS: tl.constexpr,
    TMA: tl.constexpr, GATED: tl.constexpr, ACC: tl.constexpr, OT: tl.constexpr,
):  # fmt: skip
    """N and a of BV rows of a segment and key head, as `read_chains` has its state."""
    NV: tl.constexpr = (K + BV - 1) // BV
    OWN: tl.constexpr = BV == KB
    APART: tl.constexpr = OT == ACC
    o_nh, i_h, i_v, start, end = place_of(p_split, H, NV, BV)
    i_b = start // NCB
    i_k0, i_k1 = columns(i_v, KB, NK, OWN)
    M0 = tl.zeros([BV, KB], ACC)
    if NK == 2:
        M1 = tl.zeros([BV, KB], ACC)
    whole = 1.0 + tl.sum(tl.zeros([BV], ACC), 0)
    for i in tl.range(start, end, num_stages=NS):
        i_t = (i - i_b * NCB) * C
        o_ih = tl.cast(i, tl.int64) * H + i_h
        b_k0 = load_tile(x_kc_k, i_b, i_t, i_h, i_k0, T, H, K, C, KB, TMA)
        if NK == 2:
            b_k1 = load_tile(x_kc_k, i_b, i_t, i_h, i_k1, T, H, K, C, KB, TMA)
        if OWN:
            b_kv = b_k0
        else:
            b_kv = load_tile(x_kc_v, i_b, i_t, i_h, i_v, T, H, K, C, BV, TMA)
        b_left = tl.trans(b_kv)
        if GATED:
            b_left = (b_left.to(ACC) * tl.load(tokens(p_E, o_ih, 5, C))[None, :]).to(OT)
            a = whole_of(p_G, o_ih, C, GATED)
            whole *= a
            M0 *= a
        M0 = add_product(M0, b_left, b_k0, ACC, APART)
        if NK == 2:
            if GATED:
                M1 *= a
            M1 = add_product(M1, b_left, b_k1, ACC, APART)
    store_square(p_N, M0, o_nh, i_v, i_k0, K, BV, KB)
    if NK == 2:
        store_square(p_N, M1, o_nh, i_v, i_k1, K, BV, KB)
    if i_v == 0:
        tl.store(p_a + o_nh, whole)


@triton.jit(do_not_specialize=["T", "NCB"])
def growth_back(
    x_q_k, x_y_k, x_q_v, x_y_v, p_Ey, p_G, p_n, p_mass, p_step, p_rsum, p_zsum, p_N, p_r, p_share, p_shift, p_a, p_split, T, NCB,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, KB: tl.constexpr, NK: tl.constexpr, NS: tl.constexpr,
    TMA: tl.constexpr, GATED: tl.constexpr, ACC: tl.constexpr, OT: tl.constexpr,
):  # fmt: skip
    """N, r, Δ, and this tile's share of z, of BV rows of a segment and key head, as `reverse_chains` has its state; a."""
    NV: tl.constexpr = (K + BV - 1) // BV
    OWN: tl.constexpr = BV == KB
    APART: tl.constexpr = OT == ACC
    o_nh, i_h, i_v, start, end = place_of(p_split, H, NV, BV)
    i_b = start // NCB
    i_k0, i_k1 = columns(i_v, KB, NK, OWN)
    N0 = tl.zeros([BV, KB], ACC)
    if NK == 2:
        N1 = tl.zeros([BV, KB], ACC)
    b_r = tl.zeros([BV], ACC)
    b_shift = tl.zeros([BV], ACC)
    z = tl.sum(b_r, 0)
    whole = 1.0 + z
    for i_c in tl.range(0, end - start, num_stages=NS):
        i = end - 1 - i_c
        i_t = (i - i_b * NCB) * C
        o_ih = tl.cast(i, tl.int64) * H + i_h
        b_q0 = load_tile(x_q_k, i_b, i_t, i_h, i_k0, T, H, K, C, KB, TMA)
        b_y0 = load_tile(x_y_k, i_b, i_t, i_h, i_k0, T, H, K, C, KB, TMA)
        if NK == 2:
            b_q1 = load_tile(x_q_k, i_b, i_t, i_h, i_k1, T, H, K, C, KB, TMA)
            b_y1 = load_tile(x_y_k, i_b, i_t, i_h, i_k1, T, H, K, C, KB, TMA)
        if OWN:
            b_qv, b_yv = b_q0, b_y0
        else:
            b_qv = load_tile(x_q_v, i_b, i_t, i_h, i_v, T, H, K, C, BV, TMA)
            b_yv = load_tile(x_y_v, i_b, i_t, i_h, i_v, T, H, K, C, BV, TMA)

        a = whole_of(p_G, o_ih, C, GATED)
        _, _, share = merge_of(p_n, p_mass, o_ih, a)
        b_moved = tl.sum(N0 * numbers(p_step, o_ih, i_k0, K, KB)[None, :], 1)
        if NK == 2:
            b_moved += tl.sum(N1 * numbers(p_step, o_ih, i_k1, K, KB)[None, :], 1)
        b_moved *= share
        b_d = share * numbers(p_step, o_ih, i_v, K, BV)
        z = a * (z - tl.sum(b_d * (b_r + 0.5 * b_moved), 0)) + tl.where(i_v == 0, tl.load(p_zsum + o_ih), 0.0)
        b_r = a * (b_r + b_moved) + numbers(p_rsum, o_ih, i_v, K, BV)
        b_shift += b_d

        b_factor = tl.load(tokens(p_Ey, o_ih, 1, C))[None, :]
        if GATED:
            b_factor *= tl.load(tokens(p_Ey, o_ih, 6, C))[None, :]
            whole *= a
            N0 *= a
        b_qf = (tl.trans(b_qv).to(ACC) * b_factor).to(OT)
        b_yf = (tl.trans(b_yv).to(ACC) * b_factor).to(OT)
        N0 = add_product(N0, b_qf, b_y0, ACC, APART)
        N0 = add_product(N0, b_yf, b_q0, ACC, APART)
        if NK == 2:
            if GATED:
                N1 *= a
            N1 = add_product(N1, b_qf, b_y1, ACC, APART)
            N1 = add_product(N1, b_yf, b_q1, ACC, APART)
    store_square(p_N, N0, o_nh, i_v, i_k0, K, BV, KB)
    if NK == 2:
        store_square(p_N, N1, o_nh, i_v, i_k1, K, BV, KB)
    o_v = i_v + tl.arange(0, BV)
    tl.store(p_r + o_nh * K + o_v, b_r, mask=o_v < K)
    tl.store(p_shift + o_nh * K + o_v, b_shift, mask=o_v < K)
    tl.store(p_share + o_nh * NV + i_v // BV, z)
    if i_v == 0:
        tl.store(p_a + o_nh, whole)


def starts(task: Task, segments: Segments, kc: Tensor, E: Tensor, G: Tensor | None, C: Tensor | None) -> Tensor:
    """C before every segment [R H K K], of sequences that begin with C."""
    settings = task.constants("walk")
    N, a = _of_each(task, segments, task.K, task.K), _of_each(task, segments, 1)
    tiles = task.tile(kc, settings["KB"]), task.tile(kc, settings["BV"])
    programs = segments.align.N * task.H * -(-task.K // settings["BV"])
    run(growth, (programs,), *tiles, E, G, N, a, segments.split, task.at.T, task.NCB, **arguments(growth, settings))
    return fix_up(a, N, C, segments.first, config=task.config, reverse=False)


def ends(
    task: Task, segments: Segments, q: Tensor, y: Tensor, Ey: Tensor, kept: Saved, rsum: Tensor, zsum: Tensor,
    given: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """N [R H K K], r [R H K] and z [R H] after every segment, of sequences that end with `given`."""
    settings = task.constants("backward")
    parts = -(-task.K // settings["BV"])
    N, a, z = _of_each(task, segments, task.K, task.K), _of_each(task, segments, 1), _of_each(task, segments, parts)
    r, shift = _of_each(task, segments, task.K), _of_each(task, segments, task.K)
    tiles = (task.tile(x, settings[width]) for width in ("KB", "BV") for x in (q, y))
    programs = segments.align.N * task.H * parts
    run(
        growth_back, (programs,), *tiles, Ey, kept.G, kept.n, kept.mass, kept.step, rsum, zsum, N, r, z, shift, a,
        segments.split, task.at.T, task.NCB, **arguments(growth_back, settings),
    )  # fmt: skip
    back = lambda own, last: fix_up(a, own, last, segments.first, config=task.config, reverse=True)
    N1, r1, z1 = given or NO_STATE
    N = back(N, N1)
    # by elements: a product would be rounded to TF32 where the caller lets PyTorch do so
    moved = (N * shift[..., None, :]).sum(-1)
    r = back((r + a * moved)[..., None], None if r1 is None else r1[..., None])[..., 0]
    z = z.sum(-1) - a[..., 0] * (shift * (r + 0.5 * moved)).sum(-1)
    return N, r.contiguous(), back(z[..., None, None], None if z1 is None else z1[..., None, None])[..., 0, 0]


def _of_each(task: Task, segments: Segments, *sizes: int) -> Tensor:
    return torch.empty(segments.align.N, task.H, *sizes, dtype=task.wide, device=task.device)


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    kernels = (growth, "walk"), (growth_back, "backward")
    return [case(kernel, name, config, dtype, K, GATED=gated) for gated in (False, True) for kernel, name in kernels]
