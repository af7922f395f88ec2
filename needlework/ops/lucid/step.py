"""A few new tokens of many sequences against their pages, in place: LUCID's decoding, on a block table or on a table of slots.

    u_i = v_i − Σ_j A_ij y_j over the pages' rows, read once for all new rows of a sequence       (read_pages, a share each)
    y_i = β_i (u_i − Σ_{j<i} A_ij y_j) over the new rows themselves; y and k into the pages       (finish)

On slots (take_rows first) a slot is a sequence's one page.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.lucid.arguments import LucidInputs
from needlework.ops.lucid.past import (
    constants_of,
    exponents,
    highest,
    less_past,
    new_keys,
    norms,
    read_pages,
    shares_of,
    store_rows,
    tile_of,
)
from needlework.ops.lucid.solve.operands import scale
from needlework.ops.lucid.state import LucidState, PageRows
from needlework.ops.paged.placement import Placement
from needlework.ops.runtime.custom_op import fake, step_operator
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig, launch_config, split
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import NAMES, TYPES, accumulator, padded

ENGINE = "lucid/step"
ROWS = 16  # new tokens of a sequence at most: the height of a tensor core's product
NO_ROW = tl.constexpr(-2)  # of a token for which a slot has no room


@triton.jit(do_not_specialize=["R", "P", "PG", "W"])
def take_rows(p_slots, p_length, p_held, p_rows, R, P, PG, W, M: tl.constexpr):
    """R tokens more in a slot: how many it then holds, and the rows of the new ones. A padded row: −1. W > 0: P = W rows are a ring."""
    i_b = tl.program_id(0)
    slot = tl.load(p_slots + i_b).to(tl.int64)
    o_r = tl.arange(0, M)
    held = tl.full([], -1, tl.int64)
    row = tl.full([M], -1, tl.int64)
    if slot >= 0:
        length = tl.load(p_length + slot)
        tl.debug_barrier()  # every warp has read length
        held = length + R
        tl.store(p_length + slot, held)
        row = length + o_r
        if W > 0:
            row = row % P
        row = tl.where(row < P, slot * PG + row, NO_ROW)
    tl.store(p_held + i_b, held)
    tl.store(p_rows + i_b * R + o_r, row, mask=o_r < R)


@triton.jit(do_not_specialize=["sequences", "shares", "R", "PG", "W"])
def finish(
    p_k, p_v, p_beta, p_page_k, p_page_y, p_length, p_rows, p_sum, p_max, p_out, sequences, shares, R, PG, W, page_k, page_y,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, M: tl.constexpr,
    SCALE: tl.constexpr, ROWMAX: tl.constexpr, BETA: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The new rows of one sequence and head, in order. Row −1: nothing is written there; NO_ROW: y is NaN too."""
    i_n = tl.program_id(0) // H
    i_h = tl.program_id(0) % H
    o_r = tl.arange(0, M)
    o_v = tl.arange(0, VB)
    _, first, count, _, _ = tile_of(p_length, p_length, p_length, i_n, sequences, sequences, R, M, 0)
    token = (tl.cast(first, tl.int64) + o_r) * H + i_h
    real_v = (o_r < R)[:, None] & (o_v < V)[None, :]
    y = tl.zeros([M, VB], ACC)
    if count > 0:
        b_k = new_keys(p_k, first, count, i_h, H, K, KB, M)
        k_norm = norms(b_k, ACC)
        e = exponents(b_k, k_norm, b_k, k_norm, SCALE, ROWMAX, ACC)
        seen = o_r[:, None] >= o_r[None, :]
        if W > 0:
            seen = seen & (o_r[:, None] - o_r[None, :] < W)
        mu = tl.zeros([M], ACC)
        if ROWMAX:
            mu = tl.max(tl.where(seen, e, float("-inf")), 1)
            mu = highest(mu, p_max, i_n, i_h, shares, count, H, M)
        u = tl.load(p_v + token[:, None] * V + o_v[None, :], mask=real_v, other=0.0).to(ACC)
        u = less_past(u, mu, p_sum, p_max, i_n, i_h, shares, count, H, VB, M, ROWMAX)
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
        row = tl.load(p_rows + first + o_r, mask=o_r < R, other=-1)
        y = tl.where((row == NO_ROW)[:, None], float("nan"), y)
        store_rows(p_page_k, b_k, row, page_k, PG, i_h, H, K, KB)
        store_rows(p_page_y, y.to(p_out.dtype.element_ty), row, page_y, PG, i_h, H, V, VB)
    tl.store(p_out + token[:, None] * V + o_v[None, :], y.to(p_out.dtype.element_ty), mask=real_v)


@step_operator("table")
def lucid_step(tokens: LucidInputs, table: LucidState, slots: Tensor, rowmax: bool, window: int | None) -> Tensor:
    """y [B R H V] for tokens [B R H ·] and a table of slots, which changes in place. All contiguous; the table within a slot."""
    k, v, _ = tokens
    B, R = v.shape[:2]
    PG = table.k.shape[1]
    P = PG if window is None else min(PG, window)
    W = window if window == P else None  # of fewer rows than the window, the pages are no ring: it hides none of them
    held, rows = (torch.empty(*size, dtype=torch.int64, device=k.device) for size in ((B,), (B, R)))
    if not v.numel():
        return torch.empty_like(v)
    chosen = launch_config(ENGINE, k.device, k.dtype, k.shape[-1], v.shape[-1])
    run(take_rows, (B,), slots, table.length, held, rows, R, P, PG, W or 0, **chosen.launch["take_rows"], M=ROWS)
    where = Placement(slots.contiguous()[:, None], held, rows, None)
    return _decode(chosen, tokens, PageRows(*table[:2]), where, R, P, rowmax, W)


@step_operator("k_pages", "y_pages")
def lucid_decode(
    tokens: LucidInputs, k_pages: Tensor, y_pages: Tensor, where: Placement, rowmax: bool, window: int | None
) -> Tensor:
    """y [N H V] of one new token a sequence, `solve_pages` without cu_seqlens. All contiguous; the pages each by itself."""
    k, v, _ = tokens
    if not v.numel():
        return torch.empty_like(v)
    chosen = launch_config(ENGINE, k.device, k.dtype, k.shape[-1], v.shape[-1])
    P = where.block_table.shape[1] * k_pages.shape[1]
    return _decode(chosen, tokens, PageRows(k_pages, y_pages), where, 1, P, rowmax, window)


def _decode(
    chosen: LaunchConfig,
    tokens: LucidInputs,
    pages: PageRows,
    where: Placement,
    R: int,
    P: int,
    rowmax: bool,
    window: int | None,
) -> Tensor:
    """y of R new tokens of each sequence, whose pages hold P rows."""
    (k, v, beta), (page_k, page_y), (table, length, rows, _) = tokens, pages, where
    (N, NB), (H, V) = table.shape, v.shape[-2:]
    c = constants(chosen, k.dtype, H, k.shape[-1], V, rowmax, beta is not None)
    shares = shares_of(N * H, P, window, R, chosen.launch["read_pages"])
    wide = accumulator(k.dtype)
    sums = torch.empty(N * H * shares, ROWS, c["finish"]["VB"], dtype=wide, device=k.device)
    tops = torch.empty(N * H * shares, ROWS, dtype=wide, device=k.device) if rowmax else sums
    y = torch.empty_like(v)
    PG, W, apart = page_k.shape[1], window or 0, (page_k.stride(0), page_y.stride(0))
    sizes = N, N, shares, R, P, PG, NB, W
    tables = page_k, page_y, table, length, length, length
    run(read_pages, (N * H * shares,), k, *tables, sums, tops, *sizes, *apart, **c["read_pages"])
    given = k, v, sums if beta is None else beta, page_k, page_y, length, rows, sums, tops
    run(finish, (N * H,), *given, y, N, shares, R, PG, W, *apart, **c["finish"])
    return y


@fake(lucid_step)
def _(tokens: LucidInputs, *_):
    return torch.empty_like(tokens.v)


@fake(lucid_decode)
def _(tokens: LucidInputs, *_):
    return torch.empty_like(tokens.v)


KERNELS = {"take_rows": take_rows, "read_pages": read_pages, "finish": finish}


def constants(
    config: LaunchConfig, dtype: torch.dtype, H: int, K: int, V: int, rowmax: bool, beta: bool
) -> dict[str, Constants]:
    """Kernel -> its constants, num_warps and the like."""
    everything = dict(
        H=H, K=K, V=V, KB=padded(K), VB=padded(V), M=ROWS, ROWMAX=int(rowmax), BETA=int(beta), PACKED=0,
        SCALE=scale(K, rowmax), HALF=int(dtype.itemsize == 2),
        ACC=TYPES[accumulator(dtype)],
    )  # fmt: skip
    return constants_of(KERNELS, config, everything)


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Every kernel, with β and with a maximum a row."""
    own, acc = NAMES[dtype], NAMES[accumulator(dtype)]
    types = dict.fromkeys(("p_sum", "p_max", "p_beta"), f"*{acc}") | {"p_table": "*i32"}
    types |= dict.fromkeys(("p_length", "p_held", "p_slots", "p_rows", "p_cum", "p_ends"), "*i64")
    cases = []
    for rowmax in (False, True):
        for name, c in constants(config, dtype, 2, K, V, rowmax, not rowmax).items():
            kernel = KERNELS[name]
            c, options = split(c)
            of = lambda arg: types.get(arg, f"*{own}") if arg.startswith("p_") else "i32"
            cases.append(Case(kernel, {arg: of(arg) for arg in kernel.arg_names if arg not in c}, c, options))
    return cases
