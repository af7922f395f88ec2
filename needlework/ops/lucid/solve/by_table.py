"""LUCID's solve of new tokens against pages behind a block table: prefill, in parts or at once. No gradient, nothing read back.

    place → keys → (top) → read_pages → remainder → inverses, peak → solve → hand_out

The new tokens are moved apart into blocks and solved as whole sequences are, by `launches.forward`; what the pages hold is taken off
the right sides before, by `past.read_pages`, block by block and in any order:

    V'_i = V_i − Σ_{j in pages} A_ij y_j        "rowmax": μ_i first, over the pages and the new rows

so the chain of blocks is as long as the new tokens alone. A visible row of the pages is read once for every block of C new tokens,
⌈T/C⌉ · H (K + V) numbers of the pages' dtype a row, most of them from the L2 cache. Copies of the pages in front of the tokens, which
`pages.py` makes where there are gradients, would be written and read on top, 2 H (K + V) numbers a row, and prepared again by every
call (k̂ as an operand, Y in float16, A's inverses: K + V + C more). Besides the new tokens' operands the scratch is
T' H V (1 + shares) float32 numbers, T' < T + N C, where shares > 1 only while all shares together are fewer than the config's programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.common.alignment import Alignment
from needlework.ops.lucid.arguments import LucidInputs
from needlework.ops.lucid.past import constants_of, highest, less_past, new_keys, read_pages, shares_of, store_rows, tile_of
from needlework.ops.lucid.solve.cases import compile_cases_of_sums
from needlework.ops.lucid.solve.launches import ENGINE as SOLVE
from needlework.ops.lucid.solve.launches import Task, forward, widths
from needlework.ops.lucid.solve.operands import scale
from needlework.ops.paged.placement import Placement
from needlework.ops.runtime.custom_op import fake, step_operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig, launch_config, rows, split
from needlework.ops.runtime.precompile import kind, meta, precompile, run
from needlework.ops.runtime.triton_types import NAMES, TYPES, accumulator, cdiv

ENGINE = "lucid/pages"


@triton.jit(do_not_specialize=["sequences", "tiles"])
def place(
    p_k, p_beta, p_length, p_cum, p_ends, p_to_k, p_to_beta, sequences, tiles,
    H: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, M: tl.constexpr, BETA: tl.constexpr,
):  # fmt: skip
    """k and β of one block and head moved apart [tiles M H ·], zeros past its tokens."""
    i_tile = tl.program_id(0) // H
    i_h = tl.program_id(0) % H
    _, token, count, _, _ = tile_of(p_length, p_cum, p_ends, i_tile, tiles, sequences, 0, M, 1)
    o_r = tl.arange(0, M)
    o_k = tl.arange(0, KB)
    b_k = new_keys(p_k, token, count, i_h, H, K, KB, M)
    to = (tl.cast(i_tile, tl.int64) * M + o_r) * H + i_h
    tl.store(p_to_k + to[:, None] * K + o_k[None, :], b_k, mask=(o_k < K)[None, :])
    if BETA:
        beta = tl.load(p_beta + (tl.cast(token, tl.int64) + o_r) * H + i_h, mask=o_r < count, other=0.0)
        tl.store(p_to_beta + to, beta)


@triton.jit(do_not_specialize=["sequences", "tiles", "shares"])
def remainder(
    p_v, p_length, p_cum, p_ends, p_sum, p_max, p_mu, p_to, sequences, tiles, shares,
    H: tl.constexpr, V: tl.constexpr, VB: tl.constexpr, M: tl.constexpr, ROWMAX: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """V less what the pages take from it, of one block and head, [tiles M H V], zeros past its tokens. "rowmax": μ [H tiles M], of the
    new rows before, is then of all."""
    i_tile = tl.program_id(0) // H
    i_h = tl.program_id(0) % H
    _, token, count, _, _ = tile_of(p_length, p_cum, p_ends, i_tile, tiles, sequences, 0, M, 1)
    o_r = tl.arange(0, M)
    o_v = tl.arange(0, VB)
    real = (o_r < count)[:, None] & (o_v < V)[None, :]
    own = (tl.cast(i_h, tl.int64) * tiles + i_tile) * M + o_r
    mu = tl.zeros([M], ACC)
    if ROWMAX:
        mu = highest(tl.load(p_mu + own), p_max, i_tile, i_h, shares, count, H, M)
        tl.store(p_mu + own, mu)
    at = ((tl.cast(token, tl.int64) + o_r) * H + i_h)[:, None] * V + o_v[None, :]
    u = tl.load(p_v + at, mask=real, other=0.0).to(ACC)
    u = less_past(u, mu, p_sum, p_max, i_tile, i_h, shares, count, H, VB, M, ROWMAX)
    to = ((tl.cast(i_tile, tl.int64) * M + o_r) * H + i_h)[:, None] * V + o_v[None, :]
    tl.store(p_to + to, u, mask=(o_v < V)[None, :])


@triton.jit(do_not_specialize=["sequences", "tiles", "PG"])
def hand_out(
    p_k, p_solved, p_length, p_cum, p_ends, p_rows, p_page_k, p_page_y, p_out, sequences, tiles, PG, page_k, page_y,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """y of one block and head to its tokens; k and y into the pages."""
    i_tile = tl.program_id(0) // H
    i_h = tl.program_id(0) % H
    _, token, count, _, _ = tile_of(p_length, p_cum, p_ends, i_tile, tiles, sequences, 0, M, 1)
    if count > 0:
        o_r = tl.arange(0, M)
        o_v = tl.arange(0, VB)
        real = (o_r < count)[:, None] & (o_v < V)[None, :]
        source = ((tl.cast(i_tile, tl.int64) * M + o_r) * H + i_h)[:, None] * V + o_v[None, :]
        y = tl.load(p_solved + source, mask=real, other=0.0).to(p_out.dtype.element_ty)
        at = ((tl.cast(token, tl.int64) + o_r) * H + i_h)[:, None] * V + o_v[None, :]
        tl.store(p_out + at, y, mask=real)
        row = tl.load(p_rows + token + o_r, mask=o_r < count, other=-1)
        b_k = new_keys(p_k, token, count, i_h, H, K, KB, M)
        store_rows(p_page_k, b_k, row, page_k, PG, i_h, H, K, KB)
        store_rows(p_page_y, y, row, page_y, PG, i_h, H, V, VB)


@step_operator("k_pages", "y_pages")
def lucid_prefill(
    tokens: LucidInputs, k_pages: Tensor, y_pages: Tensor, where: Placement, rowmax: bool, window: int | None
) -> Tensor:
    """y [T H V], `solve_pages` with cu_seqlens. All contiguous; the pages each by itself."""
    k, v, _ = tokens
    y = torch.zeros_like(v)
    if not y.numel():
        return y
    config = launch_config(ENGINE, k.device, k.dtype, k.shape[-1], v.shape[-1])
    task = _task(k, v, where, rowmax, window)
    results = k_pages, y_pages, y
    key = ENGINE, config.name, task.config.name, kind(*each(lambda x: x[None], *tokens, *results)), rowmax, bool(window)
    precompile(k.device, key, lambda: _launch(LucidInputs(*meta(*tokens)), *meta(*results), where, config, task))
    _launch(tokens, *results, where, config, task)
    return y


@fake(lucid_prefill)
def _(tokens: LucidInputs, *_):
    return torch.empty_like(tokens.v)


def _task(k: Tensor, v: Tensor, where: Placement, rowmax: bool, window: int | None) -> Task:
    """Blocks of sequences that have pages and those that have none alike; none of padded rows and of tokens of no sequence."""
    config = launch_config(SOLVE, k.device, k.dtype, k.shape[-1], v.shape[-1])
    C, T, N = config.launch["shared"]["C"], len(k), len(where.length)
    new = torch.where(where.length >= 0, where.ends(T).diff(), 0)
    cum = torch.zeros(N + 1, dtype=torch.int32, device=k.device)
    cum[1:] = ((new + C - 1) // C).cumsum(0)
    return Task(config, Alignment(cum, N, (T // C + N) * C, cdiv(T, C), None), True, rowmax, window, k.shape[-1])


def _launch(
    tokens: LucidInputs, k_pages: Tensor, y_pages: Tensor, y: Tensor, where: Placement, config: LaunchConfig, task: Task
) -> None:
    """y and the pages' new rows."""
    k, v, beta = tokens
    (_, H, K), V, align = k.shape, v.shape[2], task.align
    C, W = task.config.launch["shared"]["C"], task.window or 0
    tiles, sequences = align.T // C, align.N
    PG, NB = k_pages.shape[1], where.block_table.shape[1]
    apart = k_pages.stride(0), y_pages.stride(0)
    c = constants(config, C, k.dtype, H, K, V, task.rowmax, beta is not None)
    wide = accumulator(k.dtype)
    shares = shares_of(tiles * H, NB * PG, task.window, C, config.launch["read_pages"])

    def new(*shape: int, dtype: torch.dtype = wide) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=k.device)

    placed_k, rest = new(1, align.T, H, K, dtype=k.dtype), new(1, align.T, H, V)
    placed_beta = None if beta is None else new(1, align.T, H, dtype=beta.dtype)
    which = where.length, align.cum, where.cu_seqlens
    given = k, k if beta is None else beta, *which, placed_k, placed_k if beta is None else placed_beta
    run(place, (tiles * H,), *given, sequences, tiles, **c["place"])

    def take_off_past(mu: Tensor) -> None:
        sums = new(tiles * H * shares, C, c["remainder"]["VB"])
        tops = new(tiles * H * shares, C) if task.rowmax else sums
        sizes = sequences, tiles, shares, 0, NB * PG, PG, NB, W
        run(
            read_pages, (tiles * H * shares,), k, k_pages, y_pages, where.block_table, *which, sums, tops, *sizes, *apart,
            **c["read_pages"],
        )  # fmt: skip
        run(remainder, (tiles * H,), v, *which, sums, tops, mu, rest, sequences, tiles, shares, **c["remainder"])

    solved, _ = forward(LucidInputs(placed_k, rest, placed_beta), task, save=False, first=take_off_past)
    pages = k_pages, y_pages, y, sequences, tiles, PG, *apart
    run(hand_out, (tiles * H,), k, solved, *which, where.rows, *pages, **c["hand_out"])


KERNELS = {"place": place, "read_pages": read_pages, "remainder": remainder, "hand_out": hand_out}


def constants(
    config: LaunchConfig, C: int, dtype: torch.dtype, H: int, K: int, V: int, rowmax: bool, beta: bool
) -> dict[str, Constants]:
    """Kernel -> its constants, num_warps and the like; blocks of C tokens."""
    KB, VB = widths(K, V, dtype)
    everything = dict(
        H=H, K=K, V=V, KB=KB, VB=VB, M=C, ROWMAX=int(rowmax), BETA=int(beta), PACKED=1, SCALE=scale(K, rowmax),
        HALF=int(dtype.itemsize == 2), ACC=TYPES[accumulator(dtype)],
    )  # fmt: skip
    return constants_of(KERNELS, config, everything)


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Every kernel, with β and with a maximum a row, and what the first solve that is taken where this config is does with them."""
    solve = next(row for row in rows(SOLVE) if row.misfit(config.arch, str(dtype).removeprefix("torch."), K, V) is None)
    own, acc = NAMES[dtype], NAMES[accumulator(dtype)]
    types = dict.fromkeys(("p_sum", "p_max", "p_mu", "p_beta", "p_to_beta", "p_solved"), acc)
    types |= dict.fromkeys(("p_table", "p_cum"), "i32") | dict.fromkeys(("p_length", "p_ends", "p_rows"), "i64")
    cases = compile_cases_of_sums(solve, dtype, K, V)
    for rowmax in (False, True):
        found = constants(config, solve.launch["shared"]["C"], dtype, 2, K, V, rowmax, not rowmax)
        for name, c in found.items():
            kernel, (c, options) = KERNELS[name], split(c)
            of = types | ({"p_to": acc} if kernel is remainder else {})
            signature = {
                arg: f"*{of.get(arg, own)}" if arg.startswith("p_") else "i32" for arg in kernel.arg_names if arg not in c
            }
            cases.append(Case(kernel, signature, c, options))
    return cases
