"""PaTH attention of new tokens against pages behind a block table: prefill, in parts or at once. No gradient, nothing read back.

    line      the new tokens, behind those of their open blocks, as a line of whole blocks (line.py)
    attend    PaTH's own walk of packed sequences, which goes on to the pages
    settle    k, v, w and β into their places: keys of blocks of 64 that are full carried to the last one's end, k̃ = H … H k¹
    carry_on  the pages' keys likewise, where a block of 64 has ended

The grids follow from shapes, the loops end with the lengths. Carried keys pass superblocks by H², in the sums' dtype.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.common.kernels.runs import row_pointers, sequence_of
from needlework.ops.common.kernels.tile import load_tile
from needlework.ops.paged.placement import Placement
from needlework.ops.path.arguments import NewTokens, PathInputs
from needlework.ops.path.engine.forgets import NO_GATE, Decays
from needlework.ops.path.engine.forward import attend
from needlework.ops.path.engine.line import Line
from needlework.ops.path.engine.op import SUMS, Prepared, compile_case, prepared
from needlework.ops.path.engine.prepare import compose, prepare
from needlework.ops.path.engine.tiles import product, row_at, square_pointers
from needlework.ops.path.engine.walk import ENGINE, Walk, constants
from needlework.ops.path.state import Tables
from needlework.ops.runtime.custom_op import fake, step_operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import Case, LaunchConfig, launch_config
from needlework.ops.runtime.precompile import kind, meta, precompile
from needlework.ops.runtime.triton_types import NAMES, accumulator, cdiv


@triton.jit
def closed_blocks(p_start, p_length, i_n, C: tl.constexpr, BLOCK: tl.constexpr):
    """Of a sequence: the tokens in pages that are carried, all of them after the call, and blocks of the line that are full blocks of
    64."""
    start = tl.load(p_start + i_n)
    length = tl.load(p_length + i_n)
    return start, length, (length // BLOCK * BLOCK - start) // C


@triton.jit
def carried_on(k, p_H, p_H2, i_bk, first, block, closed, blocks, KB: tl.constexpr, M: tl.constexpr, APART: tl.constexpr):
    """Keys [rows KB] at the start of a sequence's block, at the end of the closed ones."""
    sup = (block + M - 1) // M
    rest = tl.maximum(closed // M, sup) * M  # the first block after whole superblocks
    before = tl.maximum(tl.minimum(sup * M, closed) - block, 0)
    whole = rest // M - sup
    for n in tl.range(
        0, before + whole + tl.maximum(closed - rest, 0), num_stages=1
    ):  # one loop: three hold more than there are registers
        p = p_H
        j = block + n
        if n >= before:
            j = rest + n - before - whole
            if n < before + whole:
                p = p_H2
                j = (sup + n - before) * M
        k = product(k, tl.load(square_pointers(p, i_bk, first + j, blocks, KB, 1)), APART)
    return k


@triton.jit(do_not_specialize=["T", "NR", "N", "W", "PG", "NB", "page_k", "page_v", "slot_w", "slot_beta", "page_decay"])
def settle(
    p_k, p_v, p_w, p_beta, p_decay, p_k1, p_H, p_H2, p_cum, p_start, p_past, p_length, p_ends, p_rows, p_table, p_slots,
    p_page_k, p_page_v, p_open_w, p_open_beta, p_page_decay, T, NR, N, W, PG, NB, page_k, page_v, slot_w, slot_beta, page_decay,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, GB: tl.constexpr,
    C: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr, WINDOW: tl.constexpr,
    DECAY: tl.constexpr, APART: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """BN tokens of a block and key-value head of the line. Tokens of the open block that stays open are where they were."""
    blocks = NR // C
    i_bk = tl.program_id(0) // (C // BN) // blocks
    i_block = tl.program_id(0) // (C // BN) % blocks
    i_n, first, end = sequence_of(p_cum, N, 0, i_block, blocks, PACKED)
    if i_block >= end:
        return
    start, length, closed = closed_blocks(p_start, p_length, i_n, C, BLOCK)
    past = tl.load(p_past + i_n)
    block = i_block - first
    o = tl.program_id(0) % (C // BN) * BN + tl.arange(0, BN)
    i_t = i_block * C + tl.program_id(0) % (C // BN) * BN
    o_k = tl.arange(0, KB)
    if block < closed:
        k = tl.load(row_pointers(p_k1, i_bk, i_t, NR, BN, KB))
        k = carried_on(k, p_H, p_H2, i_bk, first, block + 1, closed, blocks, KB, M, APART)
    else:
        k = load_tile(p_k, 0, i_t, i_bk, 0, T, HK, K, BN, KB, 0).to(ACC)
    token = start + block * C + o
    new = (token >= past) & (token < length)
    row = tl.load(p_rows + tl.load(p_ends + i_n) + token - past, mask=new, other=-1)
    placed = row >= 0
    # tokens of the open block that it closed are where the table says
    held = (token < past) & (block < closed)
    if WINDOW:
        held = held & (token > past - W)
    at = row_at(p_table, i_n, token, NB * PG, PG, NB, page_k, HK * K, held)
    at = tl.where(held, at, row // PG * page_k + row % PG * (HK * K)) + i_bk * K
    tl.store(p_page_k + at[:, None] + o_k[None, :], k, mask=(placed | held)[:, None] & (o_k < K)[None, :])

    o_v = tl.arange(0, VB)
    b_v = load_tile(p_v, 0, i_t, i_bk, 0, T, HK, V, BN, VB, 0)
    at_v = row // PG * page_v + row % PG * (HK * V) + i_bk * V
    tl.store(p_page_v + at_v[:, None] + o_v[None, :], b_v, mask=placed[:, None] & (o_v < V)[None, :])
    if DECAY:
        o_g = tl.arange(0, GB)
        heads = i_bk * (H // HK) + o_g
        own = (o_g < H // HK)[None, :]
        sums = tl.load(p_decay + tl.cast(heads, tl.int64)[None, :] * NR + (i_block * C + o)[:, None], mask=own, other=0.0)
        at_g = row // PG * page_decay + row % PG * H
        tl.store(p_page_decay + at_g[:, None] + heads[None, :], sums, mask=placed[:, None] & own)
    if block >= closed:
        slot = tl.load(p_slots + i_n).to(tl.int64)
        place = token - start - closed * C
        there = new & (slot >= 0)
        b_w = load_tile(p_w, 0, i_t, i_bk, 0, T, HK, K, BN, KB, 0)
        at_w = slot * slot_w + (place[:, None] * HK + i_bk) * K + o_k[None, :]
        tl.store(p_open_w + at_w, b_w, mask=there[:, None] & (o_k < K)[None, :])
        beta = tl.load(p_beta + (i_block * C + o) * HK + i_bk, mask=there, other=0.0)
        tl.store(p_open_beta + slot * slot_beta + place * HK + i_bk, beta, mask=there)


@triton.jit(do_not_specialize=["NR", "W", "PG", "NB", "tiles", "page_k"])
def carry_on(
    p_H, p_H2, p_cum, p_start, p_past, p_length, p_table, p_page_k, NR, W, PG, NB, tiles, page_k,
    HK: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, APART: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """BN rows of one sequence and key-value head; those that no window shows again are left."""
    i_tile = tl.program_id(0) % tiles
    i_kv = tl.program_id(0) // tiles % HK
    i_n = tl.program_id(0) // tiles // HK
    start, _, closed = closed_blocks(p_start, p_length, i_n, C, BLOCK)
    lo = 0
    if WINDOW:
        lo = tl.maximum(tl.load(p_past + i_n) - W + 1, 0)
    lo += i_tile * BN
    if (closed > 0) & (lo < start):
        first = tl.load(p_cum + i_n)
        token = lo + tl.arange(0, BN)
        o_k = tl.arange(0, KB)
        real = token < start
        at = row_at(p_table, i_n, token, NB * PG, PG, NB, page_k, HK * K, real) + i_kv * K
        there = real[:, None] & (o_k < K)[None, :]
        at = p_page_k + at[:, None] + o_k[None, :]
        k = tl.load(at, mask=there, other=0.0)
        tl.store(at, carried_on(k, p_H, p_H2, i_kv, first, 0, closed, NR // C, KB, M, APART), mask=there)


@step_operator("tables")
def path_prefill(
    tokens: NewTokens, tables: Tables, where: Placement, slots: Tensor, window: int | None, scale: float
) -> Tensor:
    """o [T H V] of new tokens, `paged_path` with cu_seqlens. All contiguous; pages and slots each by itself."""
    (q, k, v, beta, w, g), (page_k, page_v, open_w, open_beta, page_decay), table = tokens, tables, where.block_table
    (T, H, K), (HK, V) = q.shape, v.shape[1:]
    if not q.numel() or not v.numel() or not table.numel():
        return q.new_zeros(T, H, V)
    config = launch_config(ENGINE, q.device, q.dtype, K, V)
    line = Line.of(where, T, config.launch["shared"]["C"])
    given = PathInputs(
        line.tokens(q), line.rows(k, page_k, table, window), line.rows(v, page_v, table, window), line.opened(beta, open_beta, slots),
        line.opened(w, open_w, slots),
    )  # fmt: skip
    if g is not None and page_decay is not None:
        sums = line.sums(g, page_decay, where.ends(T), table, window)
        given = given._replace(decay=line.rows(sums, page_decay, table, window))
    align = line.align(config.launch["shared"]["C"])
    walk = Walk(config, q.dtype, 1, align.T, H, HK, K, V, window, scale, align, pages=True, decay=g is not None)
    key = "path/pages", config.name, kind(*given, *each(lambda x: x[None], *tables)), window is not None, scale
    places = line, slots, where
    precompile(q.device, key, lambda: _launches(walk, PathInputs(*meta(*given)), Tables(*meta(*tables)), *places))
    return line.call(_launches(walk, given, tables, *places))


@fake(path_prefill)
def _(tokens: NewTokens, *_):
    return tokens.q.new_empty(*tokens.q.shape[:2], tokens.v.shape[2])


def _launches(walk: Walk, x: PathInputs, tables: Tables, line: Line, slots: Tensor, where: Placement) -> Tensor:
    """o on the line [1 R H V]; the tables change."""
    page_k, page_v, _, _, page_decay = tables
    made, decays = prepared(walk, x), Decays.of(walk, x.decay) or NO_GATE
    (cum, N), W, PG, NB = walk.align[:2], walk.window or 0, page_k.shape[1], where.block_table.shape[1]
    o = x.q.new_empty(1, walk.T, walk.H, walk.V)
    lse = walk.number(x.q, 1, walk.H, walk.rows)
    apart = page_k.stride(0), page_v.stride(0)
    walk.launch(
        attend, (walk.programs(attend), walk.blocks), x.q, x.k, x.v, x.w, *decays, *made.met, cum, o, lse, line.start,
        where.block_table, page_k, page_v, page_decay, walk.T, walk.rows, N, walk.M, W, PG, NB, *apart, apart_of(page_decay),
    )  # fmt: skip
    keep(walk, x, decays[0], made, tables, line, slots, where)
    return o


def apart_of(pages: Tensor | None) -> int:
    """Numbers from page to page."""
    return 0 if pages is None else pages.stride(0)


def keep(
    walk: Walk, x: PathInputs, decay: Tensor | None, made: Prepared, tables: Tables, line: Line, slots: Tensor, where: Placement
) -> None:  # fmt: skip
    """The tables after the call. decay: sums of gates on the line, head by head."""
    page_k, page_v, open_w, open_beta, page_decay = tables
    (cum, N), W, PG, NB = walk.align[:2], walk.window or 0, page_k.shape[1], where.block_table.shape[1]
    which, apart = (line.start, line.past, line.length), (page_k.stride(0), page_v.stride(0))
    parts = walk.C // walk.config.launch["settle"]["BN"]  # of a block
    walk.launch(
        settle, (walk.HK * walk.blocks * parts,), x.k, x.v, x.w, x.beta, decay, made.k1, made.H, made.H2, cum, *which,
        where.cu_seqlens, where.rows, where.block_table, slots, *tables, walk.T, walk.rows, N, W, PG, NB, *apart, open_w.stride(0),
        open_beta.stride(0), apart_of(page_decay),
    )  # fmt: skip
    tiles = cdiv(min(NB * PG, walk.window or NB * PG), walk.config.launch["carry_on"]["BN"])
    walk.launch(
        carry_on, (N * walk.HK * tiles,), made.H, made.H2, cum, *which, where.block_table, page_k, walk.rows, W, PG, NB, tiles, apart[0],
    )  # fmt: skip


KERNELS = prepare, compose, attend, settle, carry_on


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Of grouped heads, without a window and with one, and those that know of a forget gate with one."""
    own, wide = f"*{NAMES[dtype]}", f"*{NAMES[accumulator(dtype)]}"
    given = ("p_q", "p_k", "p_v", "p_w", "p_o", "p_U", "p_R", "p_k2", "p_Ho", "p_H2o", "p_page_v", "p_open_w")
    types = dict.fromkeys(given, own) | dict.fromkeys(("p_cum", "p_start", "p_past", "p_length", "p_table"), "*i32")
    types |= dict.fromkeys(("p_ends", "p_rows", "p_slots"), "*i64") | SUMS
    cases = []
    for window, decay in ((False, False), (True, False), (True, True)):
        of = partial(
            constants, config, dtype=dtype, H=8, HK=2, K=K, V=V, scale=K**-0.5, packed=True, window=window, pages=True, decay=decay
        )  # fmt: skip
        cases += [
            compile_case(kernel, types, wide, of(kernel)) for kernel in KERNELS if not decay or "DECAY" in kernel.arg_names
        ]
    return cases
