"""LUCID-PaTH's solve of new tokens against pages behind a block table, prefill and decoding alike. No gradient, nothing read back.

    line      the new tokens, behind those of their open blocks with the y that they have, as PaTH's prefill has them (path/engine/line.py)
    take_past what the pages take from every right side: Σ e^{√d (x·k̃_j / ‖k_j‖ − 1)} y_j, x the row at its sequence's first block
    solve     by superblocks (scan.py); rows of the open block are given: they take nothing, so that what is solved is y itself
    keep_norms the new keys' norms; path_prefill or path_decode writes the rest

A few long sequences are cut into shares of their pages, summed after.
"""

from math import sqrt
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.common.kernels.runs import row_pointers, sequence_of
from needlework.ops.common.kernels.tile import plus_product
from needlework.ops.paged.placement import Placement
from needlework.ops.path.arguments import PathKeys
from needlework.ops.path.engine.line import Line
from needlework.ops.path.engine.op import compile_case
from needlework.ops.path.engine.tiles import oldest_row, product, row_at, square_pointers
from needlework.ops.path.engine.walk import ENGINE, Walk, constants
from needlework.ops.path.solve.engine.directions import TINY
from needlework.ops.path.solve.engine.op import Blocks, Keys, launch, launch_constants, solve
from needlework.ops.path.solve.engine.overlaps import exponentials, invert
from needlework.ops.path.solve.engine.scan import chain
from needlework.ops.path.state import Tables
from needlework.ops.runtime.custom_op import fake, step_operator
from needlework.ops.runtime.launch_configs import Case, LaunchConfig, launch_config
from needlework.ops.runtime.precompile import kind, meta, precompile
from needlework.ops.runtime.triton_types import NAMES, accumulator, cdiv


@triton.jit(do_not_specialize=["NR", "N", "W", "PG", "NB", "shares", "page_k", "page_norm", "page_y"])
def take_past(
    p_x0, p_H2, p_cum, p_start, p_table, p_page_k, p_page_norm, p_page_y, p_sum,
    NR, N, W, PG, NB, shares, page_k, page_norm, page_y,
    HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, C: tl.constexpr, M: tl.constexpr,
    BN: tl.constexpr, SCALE: tl.constexpr, PACKED: tl.constexpr, WINDOW: tl.constexpr, APART: tl.constexpr, ACC: tl.constexpr,
    ST: tl.constexpr,
):  # fmt: skip
    """One share of the pages and one block. p_sum [shares HK NR VB] in ACC; a block of no sequence leaves its own as it is."""
    blocks = NR // C
    i_block = tl.program_id(0) % blocks
    i_bk = tl.program_id(0) // blocks % HK
    i_share = tl.program_id(0) // blocks // HK
    i_n, first, end = sequence_of(p_cum, N, 0, i_block, blocks, PACKED)
    if i_block >= end:
        return
    held = tl.load(p_start + i_n)
    block = i_block - first
    acc = tl.zeros([C, VB], ACC)
    lo = oldest_row(held, block, W, C, WINDOW)
    per = ((held - lo + shares - 1) // shares + BN - 1) // BN * BN
    lo = tl.minimum(lo + i_share * per, held)
    hi = tl.minimum(lo + per, held)
    if lo < hi:
        x = tl.load(row_pointers(p_x0, i_bk, i_block * C, NR, C, KB))
        for n in tl.range(0, block // M, num_stages=1):
            sup = block // M - 1 - n
            x = product(x, tl.load(square_pointers(p_H2, i_bk, first + sup * M, blocks, KB, 0)), APART)
        b_x = x.to(ST)
        own = held + block * C + tl.arange(0, C)
        o_k = tl.arange(0, KB)
        o_v = tl.arange(0, VB)
        for j in tl.range(lo, hi, BN, num_stages=1):
            token = j + tl.arange(0, BN)
            real = token < hi
            at = row_at(p_table, i_n, token, NB * PG, PG, NB, page_k, HK * K, real) + i_bk * K
            b_k = tl.load(p_page_k + at[:, None] + o_k[None, :], mask=real[:, None] & (o_k < K)[None, :], other=0.0)
            at = row_at(p_table, i_n, token, NB * PG, PG, NB, page_norm, HK, real) + i_bk
            norm = tl.load(p_page_norm + at, mask=real, other=1.0)
            b_k = (b_k / tl.maximum(norm, TINY)[:, None]).to(ST)
            at = row_at(p_table, i_n, token, NB * PG, PG, NB, page_y, HK * V, real) + i_bk * V
            b_y = tl.load(p_page_y + at[:, None] + o_v[None, :], mask=real[:, None] & (o_v < V)[None, :], other=0.0)
            a = exponentials(tl.dot(b_x, tl.trans(b_k), input_precision="ieee", out_dtype=ACC), SCALE)
            seen = real[None, :]
            if WINDOW:
                seen = seen & (own[:, None] - token[None, :] < W)
            acc = plus_product(acc, tl.where(seen, a, 0.0).to(ST), b_y)
    p_sum += tl.cast(i_share, tl.int64) * HK * NR * VB
    tl.store(row_pointers(p_sum, i_bk, i_block * C, NR, C, VB), acc)


@triton.jit(do_not_specialize=["rows", "PG", "page_norm"])
def keep_norms(p_k, p_rows, p_page_norm, rows, PG, page_norm, HK: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, R: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """Norms of k [rows HK K] into the pages."""
    o_r = tl.program_id(0) // HK * R + tl.arange(0, R)
    i_kv = tl.program_id(0) % HK
    o_k = tl.arange(0, KB)
    row = tl.load(p_rows + o_r, mask=o_r < rows, other=-1)
    at = (tl.cast(o_r, tl.int64) * HK + i_kv)[:, None] * K + o_k[None, :]
    k = tl.load(p_k + at, mask=(o_r < rows)[:, None] & (o_k < K)[None, :], other=0.0).to(ACC)
    tl.store(p_page_norm + row // PG * page_norm + row % PG * HK + i_kv, tl.sqrt(tl.sum(k * k, 1)), mask=row >= 0)


class Past(NamedTuple):
    """The pages that new tokens are solved against."""

    k: Tensor  # [n PG HK K]
    norm: Tensor  # [n PG HK]
    y: Tensor  # [n PG HK V]


@step_operator("norm_pages")
def lucid_path_prefill(
    tokens: PathKeys, tables: Tables, norm_pages: Tensor, where: Placement, slots: Tensor, window: int | None
) -> Tensor:
    """y [T HK V] of new tokens, `solve_path_pages`; v_pages holds y. All contiguous; pages and slots each by itself."""
    (k, v, beta, w), (page_k, page_y, open_w, open_beta, _), table = tokens, tables, where.block_table
    (T, HK, K), V = k.shape, v.shape[2]
    if not k.numel() or not v.numel() or not table.numel():
        return torch.zeros_like(v)
    config = launch_config(ENGINE, k.device, k.dtype, K, V)
    C = config.launch["shared"]["C"]
    line = Line.of(where, T, C)
    given = PathKeys(
        line.rows(k, page_k, table, window), line.rows(v, page_y, table, window), line.opened(beta, open_beta, slots),
        line.opened(w, open_w, slots),
    )  # fmt: skip
    align = line.align(C)
    walk = Walk(config, k.dtype, 1, align.T, HK, HK, K, V, window, sqrt(K), align, soft=False, pages=True)
    past = Past(page_k, norm_pages, page_y)
    key = "path/solve/pages", config.name, kind(*given, *(x[None] for x in past)), window is not None
    precompile(k.device, key, lambda: _launches(walk, PathKeys(*meta(*given)), *meta(k), Past(*meta(*past)), line, where))
    return line.call(_launches(walk, given, k, past, line, where))


@fake(lucid_path_prefill)
def _(tokens: PathKeys, *_):
    return torch.empty_like(tokens.v)


def _launches(walk: Walk, x: PathKeys, of_call: Tensor, past: Past, line: Line, where: Placement) -> Tensor:
    """y on the line [1 R HK V]; the norms of the call's keys are written. of_call: its keys [T HK K]."""
    (cum, N), W, own = walk.align[:2], walk.window or 0, walk.config.launch["take_past"]
    PG, NB = past.k.shape[1], where.block_table.shape[1]
    given = line.past - line.start
    blocks = Blocks.of(walk, Keys.of(walk, x.k, x.beta, x.w), given=given)
    programs = walk.HK * walk.blocks
    shares = max(1, min(own["NP"] // programs, cdiv(min(NB * PG, walk.window or NB * PG), 4 * own["BN"])))
    sums = walk.number(x.v, shares, walk.HK, walk.rows, walk.widths[1])
    apart = [pages.stride(0) for pages in past]
    launch(
        walk, take_past, (programs * shares,), blocks.x0, blocks.made.H2, cum, line.start, where.block_table, *past, sums,
        walk.rows, N, W, PG, NB, shares, *apart,
    )  # fmt: skip
    R = walk.config.launch["keep_norms"]["R"]
    launch(walk, keep_norms, (cdiv(len(of_call), R) * walk.HK,), of_call, where.rows, past.norm, len(of_call), PG, apart[1])
    return solve(walk, blocks, x.v, reverse=False, gone=sums.sum(0), given=given)


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """The kernels of pages, and those that know of given rows, without a window and with one."""
    own, wide = f"*{NAMES[dtype]}", f"*{NAMES[accumulator(dtype)]}"
    types = dict.fromkeys(("p_k", "p_w", "p_U", "p_R", "p_page_y", "p_P", "p_rhs", "p_y"), own) | {"p_rows": "*i64"}
    types |= dict.fromkeys(("p_cum", "p_start", "p_table", "p_given"), "*i32")
    cases = []
    for window in (False, True):
        for kernel in (invert, take_past, keep_norms, chain):
            known = constants(config, kernel, dtype, 2, 2, K, V, sqrt(K), True, window, soft=False, pages=True)
            flags = {"REV": False} if kernel is chain else {}
            cases.append(compile_case(kernel, types, wide, launch_constants(known, **flags)))
    return cases
