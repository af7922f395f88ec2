"""LUCID on pages shared by many sequences, as serving wants it: the solve by block table, for prefill and decoding, alone or with the
attention that reads it. No gradient."""

import torch
from torch import Tensor

from needlework.ops.api import Impl, resolve
from needlework.ops.lucid import reference
from needlework.ops.lucid.arguments import (
    Precondition,
    Solve,
    check_placement,
    check_tokens,
    solve_window,
)
from needlework.ops.lucid.custom_op import lucid_by_table
from needlework.ops.paged.arguments import check_pages, check_scale
from needlework.ops.paged.op import paged_attention
from needlework.ops.paged.placement import Placement, check_placement_data
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import misfit

GROUP = 30  # query heads that one pass takes a key-value head: with two rows that solve, two heights of a tensor core's product


@torch.no_grad()
def solve_pages(
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    *,
    k_pages: Tensor,
    y_pages: Tensor,
    block_table: Tensor,
    length: Tensor,
    rows: Tensor,
    cu_seqlens: Tensor | None = None,
    precondition: Precondition = "key",
    window: int | None = None,
    solve: Solve = "window",
    impl: Impl = "auto",
) -> Tensor:
    """`chunk_lucid` of the newest tokens of N sequences, after what their pages hold; the pages then hold the new tokens too.

        y_i = β_i (v_i − Σ_j A_ij y_j),  j over the sequence's tokens before i that the window shows: in pages, or new

    k: [T Hkv d], v: [T Hkv V], beta: [T Hkv] with precondition="beta" only: the new tokens, as `chunk_lucid` takes them.
    k_pages: [n PG Hkv d], y_pages: [n PG Hkv V]: all pages, in k's dtype, PG a multiple of 16; token t of sequence n lies in row
        t mod PG of page block_table[n, t // PG]. Each page is contiguous; pages may lie any distance apart.
    block_table: [N NB] int32. Entries past a sequence's length, and those wholly before the window of its first new token, are not read.
    length: [N] int32 or int64: tokens of each sequence, the new ones included, at most NB · PG; −1: a padded row, whose tokens
        are zeros, and which touches nothing.
    rows: [T] int64: the row that takes each new token's k and y, page · PG + row in the page; −1: none does.
    cu_seqlens: [N+1]: sequence n's new tokens are cu_seqlens[n] … cu_seqlens[n + 1); those from cu_seqlens[N] on belong to none, and
        zeros. None: decoding, one new token a sequence, T = N.
    precondition, window, solve: as in `chunk_lucid`; a global solve reads every row.
    Returns y [T Hkv V] in k's dtype; no gradient. Error as `chunk_lucid`: new rows are solved against new rows before these are
        rounded, and against rows of earlier calls as stored.
    impl: "triton" reads the pages through the table, splits long ones over programs, reads nothing back, and can be captured in a
        CUDA graph; with cu_seqlens every sequence takes whole blocks of 64 rows, so decoding is faster without. "torch" gathers
        the pages, "reference" solves row by row; "auto" takes the kernels on a CUDA device where they support the call.
    Raises ValueError for shapes or dtypes that do not fit; "torch" and "reference" also for values of the tables that do not.

    >>> import torch
    >>> from needlework.ops.lucid import chunk_lucid, solve_pages
    >>> k, v = torch.randn(100, 2, 32), torch.randn(100, 2, 32)  # [T Hkv d]: one sequence of 100 tokens
    >>> pages = {"k_pages": torch.zeros(9, 16, 2, 32), "y_pages": torch.zeros(9, 16, 2, 32)}  # [n PG Hkv d]
    >>> table = torch.tensor([[3, 0, 8, 5, 2, 7, 1]], dtype=torch.int32)
    >>> rows = (table[0, :, None] * 16 + torch.arange(16)).flatten()  # of the sequence's tokens, in order
    >>> y = []
    >>> for start, end in ((0, 60), (60, 99), (99, 100)):  # prefill in two calls, then a token
    ...     where = {"block_table": table, "length": torch.tensor([end]), "rows": rows[start:end]}
    ...     y.append(solve_pages(k[start:end], v[start:end], **pages, **where, cu_seqlens=torch.tensor([0, end - start])))
    >>> torch.allclose(torch.cat(y), chunk_lucid(k[None], v[None]).y[0], atol=1e-5)
    True
    """
    check_tokens(k, v, beta, "T Hkv", precondition)
    window = solve_window(window, solve)
    where = Placement(block_table, length, rows, cu_seqlens)
    check_placement(k, v, k_pages, y_pages, where)
    rowmax = precondition == "rowmax"
    path = resolve("lucid", impl, k.device, lambda: _misfit(k, v, cu_seqlens is None))
    if path == "triton":
        from needlework.ops.lucid.solve.by_table import lucid_prefill
        from needlework.ops.lucid.step import lucid_decode

        tokens = each(Tensor.contiguous, k, v, beta)
        solved = lucid_decode if cu_seqlens is None else lucid_prefill
        return solved(*tokens, k_pages, y_pages, *each(Tensor.contiguous, *where), rowmax, window)
    if path == "torch":
        return lucid_by_table(k, v, beta, k_pages, y_pages, *where, rowmax, window)
    check_placement_data(where, len(k), *k_pages.shape[:2])
    wide = torch.promote_types(k.dtype, torch.float32)
    tokens = each(lambda x: x.to(wide), k, v, beta)
    y = reference.recurrent_pages(*tokens, k_pages, y_pages, where, precondition=precondition, window=window)
    return y.to(k.dtype)


def _misfit(k: Tensor, v: Tensor, decoding: bool) -> str | None:
    """Why the kernels cannot take a call, None if they can."""
    engines = ("lucid/step",) if decoding else ("lucid/pages", "lucid/solve")
    return next(filter(None, (misfit(engine, k.device, k.dtype, k.shape[-1], v.shape[-1]) for engine in engines)), None)


@torch.no_grad()
def paged_lucid(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    *,
    k_pages: Tensor,
    y_pages: Tensor,
    block_table: Tensor,
    length: Tensor,
    rows: Tensor,
    cu_seqlens: Tensor | None = None,
    precondition: Precondition = "key",
    window: int | None = None,
    solve: Solve = "window",
    scale: float | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """`solve_pages` and the attention that reads it, `paged_attention`: in one pass over the pages where sequences decode.

        y_i as in `solve_pages`,    o_i = Σ_j softmax_j(scale · q_i·k_j) y_j,    j up to i, in the window

    q: [T Hq d], in k's dtype; query head h reads key-value head h // (Hq // Hkv).
    scale: of the scores, above 0; None: d^-1/2.
    The other arguments as in `solve_pages`: k, v and beta of the new tokens, the pages, which then hold them too, and the tables. With
        precondition="qk" q and k are as they score. A global solve is read in the window.
    rows: −1 in padded rows alone: several new tokens of a sequence find each other in the pages.
    Returns o [T Hq V] in q's dtype; zeros for padded rows and for tokens of no sequence; no gradient.
    Error: within 2 × the larger of the definition's, the blocked form's and the output rounding's own.
    impl: as in `solve_pages`. Without cu_seqlens the kernels read each row of the pages once, for the solve and for up to 30 query heads a
        key-value head; with it, or with more heads, they solve and then attend, as the other forms always do.
    Raises ValueError for shapes or dtypes that do not fit; "torch" and "reference" also for values of the tables that do not.

    >>> import torch
    >>> from needlework.ops.lucid import paged_lucid, solve_pages
    >>> from needlework.ops.paged import paged_attention
    >>> q, k, v = torch.randn(3, 4, 32), torch.randn(3, 2, 32), torch.randn(3, 2, 32)  # [T heads d]: one sequence of 3 tokens
    >>> k_pages, y_pages = torch.zeros(2, 16, 2, 32), torch.zeros(2, 16, 2, 32)  # [n PG Hkv d]
    >>> where = {"block_table": torch.tensor([[1]], dtype=torch.int32), "length": torch.tensor([3])}
    >>> new = where | {"rows": torch.tensor([16, 17, 18]), "cu_seqlens": torch.tensor([0, 3])}
    >>> o = paged_lucid(q, k, v, k_pages=k_pages, y_pages=y_pages, **new)
    >>> read = paged_attention(q, k_pages, y_pages, **where, cu_seqlens=torch.tensor([0, 3]))
    >>> torch.equal(o, read)
    True
    """
    check_tokens(k, v, beta, "T Hkv", precondition)
    solved_in = solve_window(window, solve)
    placement = Placement(block_table, length, rows, cu_seqlens)
    check_placement(k, v, k_pages, y_pages, placement)
    check_pages(q, k_pages, y_pages, block_table, length, cu_seqlens, window)
    check_scale(scale)
    fit = lambda: misfit("lucid/decode", k.device, k.dtype, k.shape[-1], v.shape[-1])
    if refusal(q, k, cu_seqlens) is None and resolve("lucid", impl, k.device, fit) == "triton":
        from needlework.ops.lucid.decode.op import lucid_attend

        rowmax = precondition == "rowmax"
        return lucid_attend(q, k, v, beta, k_pages, y_pages, *placement, rowmax, solved_in, window, scale)
    where = {"block_table": block_table, "length": length, "cu_seqlens": cu_seqlens, "window": window, "impl": impl}
    settings = {"precondition": precondition, "solve": solve, "rows": rows}
    solve_pages(k, v, beta, k_pages=k_pages, y_pages=y_pages, **settings, **where)
    return paged_attention(q, k_pages, y_pages, **where, scale=scale)


def refusal(q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> str | None:
    """Why a call of `paged_lucid` takes two passes, None if one can serve it."""
    if cu_seqlens is not None:
        return "several new tokens of a sequence are solved block by block"
    group = q.shape[1] // max(k.shape[1], 1)
    return None if group <= GROUP else f"{group} query heads a key-value head, at most {GROUP}"
