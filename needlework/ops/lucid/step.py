"""A few new tokens of many sequences against their pages, in place: LUCID's decoding.

    u_i = v_i − Σ_j A_ij y_j over the pages' rows, read once for all new rows of a sequence       (read_pages, a share each)
    y_i = β_i (u_i − Σ_{j<i} A_ij y_j) over the new rows themselves; y and k into the pages       (finish)

Keys are normalised as they are read. "rowmax": every share has its own maximum m, Σ_j e^{s_ij − m} y_j, and finish the row's.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.common.kernels.tile import plus_product
from needlework.ops.lucid.solve.operands import TINY
from needlework.ops.runtime.custom_op import step_operator
from needlework.ops.runtime.launch_configs import Case, LaunchConfig, launch_config, split
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import NAMES, TYPES, accumulator, cdiv, padded

ENGINE = "lucid/step"
ROWS = 16  # new tokens of a sequence at most: the height of a tensor core's product


@triton.jit
def new_keys(p_k, i_b, i_h, R, H: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, M: tl.constexpr, ACC: tl.constexpr):
    """[M KB] of k [B R H K], zeros past R and K, and their norms."""
    o_r = tl.arange(0, M)
    o_k = tl.arange(0, KB)
    at = p_k + (tl.cast(i_b, tl.int64) * R + o_r[:, None]) * (H * K) + i_h * K + o_k[None, :]
    b_k = tl.load(at, mask=(o_r < R)[:, None] & (o_k < K)[None, :], other=0.0)
    return b_k, norms(b_k, ACC)


@triton.jit
def norms(b_k, ACC: tl.constexpr):
    b = b_k.to(ACC)
    return tl.maximum(tl.sqrt(tl.sum(b * b, 1)), TINY)


@triton.jit
def exponents(b_a, a_norm, b_b, b_norm, SCALE: tl.constexpr, ROWMAX: tl.constexpr, ACC: tl.constexpr):
    """log2 A, for "rowmax" before its maximum is taken off. Half keys are operands as they are; of others k̂, as the definition has it:
    where all keys are one, what the sum of their product was rounded by does not average out."""
    if not ROWMAX:
        if b_a.dtype == ACC:
            b_a = b_a / a_norm[:, None]
            b_b = b_b / b_norm[:, None]
    s = tl.dot(b_a, tl.trans(b_b), input_precision="ieee", out_dtype=ACC)
    if ROWMAX:
        e = s * SCALE
    else:
        if b_a.dtype != ACC:
            s = s * (1.0 / a_norm)[:, None] * (1.0 / b_norm)[None, :]
        e = (s - 1.0) * SCALE
    return e


@triton.jit(do_not_specialize=["R", "P", "W", "shares"])
def read_pages(
    p_k, p_page_k, p_page_y, p_length, p_slots, p_sum, p_max, R, P, W, shares, slot_k, slot_y,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    NS: tl.constexpr, SCALE: tl.constexpr, ROWMAX: tl.constexpr, HALF: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Σ_j A_ij y_j over one share of the pages' rows. W > 0: the pages are a ring, row j holds the newest token j (mod W)."""
    i_share = tl.program_id(0) % shares
    i_bh = tl.program_id(0) // shares
    i_b = i_bh // H
    i_h = i_bh % H
    slot = tl.load(p_slots + i_b)
    if slot >= 0:
        length = tl.load(p_length + slot).to(tl.int32)
        held = tl.minimum(length, P)
        per = ((held + shares - 1) // shares + N - 1) // N * N
        lo = tl.minimum(i_share * per, held)
        hi = tl.minimum(lo + per, held)
        o_r = tl.arange(0, M)
        o_n = tl.arange(0, N)
        o_k = tl.arange(0, KB)
        o_v = tl.arange(0, VB)
        b_k, k_norm = new_keys(p_k, i_b, i_h, R, H, K, KB, M, ACC)
        p_rows_k = p_page_k + slot * slot_k + i_h * K + o_k[None, :]
        p_rows_y = p_page_y + slot * slot_y + i_h * V + o_v[None, :]
        acc = tl.zeros([M, VB], ACC)
        top = tl.full([M], float("-inf"), ACC)
        for i in tl.range(lo, hi, N, num_stages=NS):
            row = i + o_n
            real = row < hi
            b_j = tl.load(p_rows_k + row[:, None] * (H * K), mask=real[:, None] & (o_k < K)[None, :], other=0.0)
            b_y = tl.load(p_rows_y + row[:, None] * (H * V), mask=real[:, None] & (o_v < V)[None, :], other=0.0)
            e = exponents(b_k, k_norm, b_j, norms(b_j, ACC), SCALE, ROWMAX, ACC)
            seen = real[None, :] & (o_r < R)[:, None]
            if W > 0:
                position = length - 1 - (length - 1 - row + W) % W
                seen = seen & (length + o_r[:, None] - position[None, :] < W)
            e = tl.where(seen, e, float("-inf"))
            if ROWMAX:
                newer = tl.maximum(top, tl.max(e, 1))
                shift = tl.where(newer > float("-inf"), newer, 0.0)
                acc *= tl.exp2(top - shift)[:, None]
                a = tl.exp2(e - shift[:, None])
                top = newer
            else:
                a = tl.exp2(e)
            b_a = a.to(b_y.dtype)
            acc = plus_product(acc, b_a, b_y, not HALF)
            if HALF:
                # what the rounding left: the products cost nothing beside the reading
                acc = tl.dot((a - b_a.to(ACC)).to(b_y.dtype), b_y, acc, input_precision="ieee", out_dtype=ACC)
        share = tl.cast(tl.program_id(0), tl.int64) * M + o_r
        tl.store(p_sum + share[:, None] * VB + o_v[None, :], acc)
        if ROWMAX:
            tl.store(p_max + share, top)


@triton.jit(do_not_specialize=["R", "P", "W", "shares"])
def finish(
    p_k, p_v, p_beta, p_page_k, p_page_y, p_length, p_slots, p_sum, p_max, p_out, R, P, W, shares, slot_k, slot_y,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, M: tl.constexpr,
    SCALE: tl.constexpr, ROWMAX: tl.constexpr, BETA: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The new rows of one sequence and head, in order. Without a row left in the pages y is NaN, and nothing is written there."""
    i_b = tl.program_id(0) // H
    i_h = tl.program_id(0) % H
    o_r = tl.arange(0, M)
    o_k = tl.arange(0, KB)
    o_v = tl.arange(0, VB)
    token = (tl.cast(i_b, tl.int64) * R + o_r) * H + i_h
    real_v = (o_r < R)[:, None] & (o_v < V)[None, :]
    slot = tl.load(p_slots + i_b)
    y = tl.zeros([M, VB], ACC)
    if slot >= 0:
        length = tl.load(p_length + slot).to(tl.int32)
        b_k, k_norm = new_keys(p_k, i_b, i_h, R, H, K, KB, M, ACC)
        e = exponents(b_k, k_norm, b_k, k_norm, SCALE, ROWMAX, ACC)
        seen = o_r[:, None] >= o_r[None, :]
        if W > 0:
            seen = seen & (o_r[:, None] - o_r[None, :] < W)
        share = tl.cast(tl.program_id(0), tl.int64) * shares * M + o_r
        mu = tl.zeros([M], ACC)
        if ROWMAX:
            mu = tl.max(tl.where(seen, e, float("-inf")), 1)
            for i in range(0, shares):
                mu = tl.maximum(mu, tl.load(p_max + share + i * M))
        u = tl.load(p_v + token[:, None] * V + o_v[None, :], mask=real_v, other=0.0).to(ACC)
        for i in range(0, shares):
            part = tl.load(p_sum + (share + i * M)[:, None] * VB + o_v[None, :])
            if ROWMAX:
                part *= tl.exp2(tl.load(p_max + share + i * M) - mu)[:, None]
            u -= part
        A = tl.where(seen, tl.exp2(e - mu[:, None]), 0.0)
        beta = tl.full([M], 1.0, ACC)
        if BETA:
            beta = tl.load(p_beta + token, mask=o_r < R, other=0.0).to(ACC)
        if ROWMAX:
            beta = 1.0 / tl.sum(tl.where(o_r[:, None] == o_r[None, :], A, 0.0), 1)
        y = u
        for i in range(0, R):
            # row i is whole; later rows lose its part
            y = tl.where((o_r == i)[:, None], y * beta[:, None], y)
            mine = tl.sum(tl.where((o_r == i)[:, None], y, 0.0), 0)
            column = tl.sum(tl.where((o_r == i)[None, :], A, 0.0), 1)
            y -= tl.where((o_r > i)[:, None], column[:, None] * mine[None, :], 0.0)
        row = length + o_r
        if W > 0:
            row = row % P
        y = tl.where((row < P)[:, None], y, float("nan"))
        fits = (o_r < R) & (row < P)
        at_k = p_page_k + slot * slot_k + (row[:, None] * H + i_h) * K + o_k[None, :]
        tl.store(at_k, b_k.to(p_page_k.dtype.element_ty), mask=fits[:, None] & (o_k < K)[None, :])
        at_y = p_page_y + slot * slot_y + (row[:, None] * H + i_h) * V + o_v[None, :]
        tl.store(at_y, y.to(p_out.dtype.element_ty).to(p_page_y.dtype.element_ty), mask=fits[:, None] & (o_v < V)[None, :])
    tl.store(p_out + token[:, None] * V + o_v[None, :], y.to(p_out.dtype.element_ty), mask=real_v)


@step_operator("page_k", "page_y", "length")
def lucid_step(
    k: Tensor, v: Tensor, beta: Tensor | None, page_k: Tensor, page_y: Tensor, length: Tensor, slots: Tensor,
    rowmax: bool, window: int | None,
) -> Tensor:  # fmt: skip
    """y [B R H V] for k, v [B R H ·] and the tables page_k, page_y [slots P H ·], length [slots], which change in place.

    All contiguous; the tables within a slot.
    """
    B, R, H, V = v.shape
    P = page_k.shape[1] if window is None else min(page_k.shape[1], window)
    chosen = launch_config(ENGINE, k.device, k.dtype, k.shape[-1], V)
    c = constants(chosen, k.dtype, H, k.shape[-1], V, rowmax, beta is not None)
    shares = max(1, min(chosen.launch["read_pages"]["NP"] // max(B * H, 1), cdiv(P, 4 * c["read_pages"]["N"])))
    wide = accumulator(k.dtype)
    sums = torch.empty(B * H * shares, ROWS, c["finish"]["VB"], dtype=wide, device=k.device)
    tops = torch.empty(B * H * shares if rowmax else 0, ROWS, dtype=wide, device=k.device)
    y = torch.empty_like(v)
    if not y.numel():
        return y
    tops = tops if rowmax else sums
    # of fewer rows than the window, the pages are no ring: it hides none of them
    sizes = R, P, window if window == P else 0, shares, page_k.stride(0), page_y.stride(0)
    run(read_pages, (B * H * shares,), k, page_k, page_y, length, slots, sums, tops, *sizes, **c["read_pages"])
    tables = v, sums if beta is None else beta, page_k, page_y, length, slots, sums, tops
    run(finish, (B * H,), k, *tables, y, *sizes, **c["finish"])
    length.index_add_(0, slots.clamp(min=0), (slots >= 0).to(length.dtype) * R)
    return y


@torch.library.register_fake(lucid_step)
def _(k, v, beta, page_k, page_y, length, slots, rowmax, window):
    return torch.empty_like(v)


def constants(
    config: LaunchConfig, dtype: torch.dtype, H: int, K: int, V: int, rowmax: bool, beta: bool
) -> dict[str, dict[str, object]]:
    """Kernel -> its constants, num_warps and the like."""
    root = math.sqrt(K)
    everything = dict(
        H=H, K=K, V=V, KB=padded(K), VB=padded(V), M=ROWS, ROWMAX=int(rowmax), BETA=int(beta),
        SCALE=math.log2(math.e) * (1 / root if rowmax else root), HALF=int(dtype.itemsize == 2),
        ACC=TYPES[accumulator(dtype)],
    )  # fmt: skip
    own = {name: dict(row) for name, row in config.launch.items()}
    own["read_pages"].pop("NP")
    for name, kernel in (("read_pages", read_pages), ("finish", finish)):
        own[name] |= {key: x for key, x in everything.items() if key in kernel.arg_names}
    return own


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Both kernels, with β and with a maximum a row."""
    own, acc = NAMES[dtype], NAMES[accumulator(dtype)]
    types = dict.fromkeys(("p_sum", "p_max", "p_beta"), f"*{acc}") | dict.fromkeys(("p_length", "p_slots"), "*i64")
    cases = []
    for rowmax in (False, True):
        for kernel, c in zip((read_pages, finish), constants(config, dtype, 2, K, V, rowmax, not rowmax).values(), strict=True):
            c, options = split(c)
            of = lambda arg: types.get(arg, f"*{own}") if arg.startswith("p_") else "i32"
            cases.append(Case(kernel, {arg: of(arg) for arg in kernel.arg_names if arg not in c}, c, options))
    return cases
