"""LUCID-PaTH on pages shared by many sequences, as serving wants it: the solve by block table, before `paged_path` reads, or both at once.
No gradient."""

from typing import Any

import torch
from torch import Tensor

from needlework.ops.api import Impl, resolve
from needlework.ops.common.shapes import check, check_tensor, width
from needlework.ops.paged.placement import Placement, check_placement_data
from needlework.ops.path.arguments import NewTokens, PathKeys, check_keys, check_queries, check_read
from needlework.ops.path.chunk import History
from needlework.ops.path.paged import Gathered, check_tables, for_kernels, paged_path
from needlework.ops.path.solve import chunk
from needlework.ops.path.solve.arguments import TINY, unit
from needlework.ops.path.state import Tables
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import misfit


@torch.no_grad()
def solve_path_pages(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    w: Tensor,
    *,
    k_pages: Tensor,
    norm_pages: Tensor,
    y_pages: Tensor,
    w_slots: Tensor,
    beta_slots: Tensor,
    slots: Tensor,
    block_table: Tensor,
    length: Tensor,
    rows: Tensor,
    cu_seqlens: Tensor | None = None,
    window: int | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """`chunk_lucid_path` of the newest tokens of N sequences, after what their pages hold: the values that `paged_path` is to read next.

    It writes the new keys' norms alone. `paged_path` with the same arguments, y for v and y_pages for v_pages, writes the rest.

    k: [T Hkv K], v: [T Hkv V], beta: [T Hkv], w: [T Hkv K], of unit norm: the new tokens, as `chunk_lucid_path` takes them.
    k_pages: [n PG Hkv K], norm_pages: [n PG Hkv] float32 (float64 for float64), y_pages: [n PG Hkv V]: all pages, PG a multiple of 16.
    The other arguments, dtypes, errors and impl as in `paged_path`; "triton" decodes as it prefills, by whole blocks (`paged_lucid_path` by
    rows).
    Returns y [T Hkv V] in v's dtype; zeros in padded rows.

    >>> import torch
    >>> from torch.nn.functional import normalize
    >>> from needlework.ops.path import chunk_lucid_path, paged_path, solve_path_pages
    >>> q, k, v = torch.randn(100, 4, 32), torch.randn(100, 2, 32), torch.randn(100, 2, 32)  # [T heads channels]: one sequence
    >>> beta, w = 2 * torch.rand(100, 2), normalize(torch.randn(100, 2, 32), dim=-1)
    >>> pages = {"k_pages": torch.zeros(7, 16, 2, 32), "w_slots": torch.zeros(4, 64, 2, 32), "beta_slots": torch.zeros(4, 64, 2)}
    >>> norm_pages, y_pages, table = torch.zeros(7, 16, 2), torch.zeros(7, 16, 2, 32), torch.arange(7, dtype=torch.int32)[None]
    >>> y = []
    >>> for start, end in ((0, 60), (60, 100)):  # a prompt in two calls
    ...     where = {"block_table": table, "length": torch.tensor([end]), "rows": torch.arange(start, end)}
    ...     where |= pages | {"slots": torch.tensor([2]), "cu_seqlens": torch.tensor([0, end - start])}
    ...     q_, k_, v_, beta_, w_ = (x[start:end] for x in (q, k, v, beta, w))
    ...     y.append(solve_path_pages(k_, v_, beta_, w_, norm_pages=norm_pages, y_pages=y_pages, **where))
    ...     _ = paged_path(q_, k_, y[-1], beta_, w_, v_pages=y_pages, **where)
    >>> torch.allclose(torch.cat(y), chunk_lucid_path(*(x[None] for x in (k, v, beta, w))).y[0], atol=1e-5)
    True
    """
    check_tensor("k", k, "T Hkv K")
    check_keys(k, v, beta, w, "T Hkv")
    check_read(window, None)
    tables, where = Tables(k_pages, y_pages, w_slots, beta_slots), Placement(block_table, length, rows, cu_seqlens)
    check_tables(k, v, tables, slots, where, values="y_pages")
    _check_norms(norm_pages, k, k_pages)
    unsupported = lambda: misfit("path/engine", k.device, k.dtype, k.shape[-1], v.shape[-1])
    if resolve("lucid-path", impl, k.device, unsupported) == "triton":
        from needlework.ops.path.solve.engine.pages import lucid_path_prefill

        tokens = PathKeys(*each(Tensor.contiguous, k, v, beta.to(width(k)), w))
        placed = for_kernels(where._replace(cu_seqlens=where.ends(len(k))))
        return lucid_path_prefill(*tokens, *tables, norm_pages, *placed, slots.contiguous(), window)
    check_placement_data(where, len(k), *k_pages.shape[:2])
    found = Gathered.of(k, tables, slots, where, window)
    y = torch.zeros_like(v)
    if not found.some:
        return y
    past = found.history
    scales = found.rows(norm_pages).clamp(min=TINY)[..., None]
    past = History(past.page_k / scales, *past[1:])
    k_, v_, beta_, w_ = found.tokens(k, v, beta, w)
    direction, norm = unit(k_)
    with torch.autocast(k.device.type, enabled=False):
        solved = chunk.forward(direction, v_, beta_, w_, past, chunk_size=64)
    found.put(y, solved)
    found.write(norm, norm_pages)
    return y


@torch.no_grad()
def paged_lucid_path(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    w: Tensor,
    *,
    k_pages: Tensor,
    norm_pages: Tensor,
    y_pages: Tensor,
    w_slots: Tensor,
    beta_slots: Tensor,
    slots: Tensor,
    block_table: Tensor,
    length: Tensor,
    rows: Tensor,
    cu_seqlens: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """`chunk_path` of the newest tokens of N sequences on values that `chunk_lucid_path` has solved, after what their pages hold: what
    `solve_path_pages` and, with its y, `paged_path` return and write. The kernels' decoding reads the pages once for both.

    Arguments, dtypes and errors as in those two; impl: "triton" takes heads that both have kernels for.
    Returns o [T Hq V] in q's dtype; zeros in padded rows.

    >>> import torch
    >>> from torch.nn.functional import normalize
    >>> from needlework.ops.path import chunk_lucid_path, chunk_path, paged_lucid_path
    >>> q, k, v = torch.randn(100, 4, 32), torch.randn(100, 2, 32), torch.randn(100, 2, 32)  # [T heads channels]: one sequence
    >>> beta, w = 2 * torch.rand(100, 2), normalize(torch.randn(100, 2, 32), dim=-1)
    >>> pages = {"k_pages": torch.zeros(7, 16, 2, 32), "norm_pages": torch.zeros(7, 16, 2), "y_pages": torch.zeros(7, 16, 2, 32)}
    >>> slot = {"w_slots": torch.zeros(4, 64, 2, 32), "beta_slots": torch.zeros(4, 64, 2), "slots": torch.tensor([2])}
    >>> o, table = [], torch.arange(7, dtype=torch.int32)[None]
    >>> for start, end in ((0, 99), (99, 100)):  # a prompt, then a token
    ...     where = {"block_table": table, "length": torch.tensor([end]), "rows": torch.arange(start, end)}
    ...     where |= {} if end == 100 else {"cu_seqlens": torch.tensor([0, end])}
    ...     o.append(paged_lucid_path(*(x[start:end] for x in (q, k, v, beta, w)), **pages, **slot, **where))
    >>> q, k, v, beta, w = (x[None] for x in (q, k, v, beta, w))
    >>> torch.allclose(torch.cat(o), chunk_path(q, k, chunk_lucid_path(k, v, beta, w).y, beta, w).o[0], atol=1e-5)
    True
    """
    held = {"k_pages": k_pages, "w_slots": w_slots, "beta_slots": beta_slots, "slots": slots}
    held |= {"block_table": block_table, "length": length, "rows": rows}
    unsupported = lambda: misfit("path/step", k.device, k.dtype, k.shape[-1], v.shape[-1])
    if cu_seqlens is not None or resolve("lucid-path", impl, k.device, unsupported) != "triton":
        settings: dict[str, Any] = held | {"cu_seqlens": cu_seqlens, "window": window, "impl": impl}
        y = solve_path_pages(k, v, beta, w, norm_pages=norm_pages, y_pages=y_pages, **settings)
        return paged_path(q, k, y, beta, w, v_pages=y_pages, scale=scale, **settings)
    from needlework.ops.path.engine.decode import path_decode

    check_tensor("q", q, "T Hq K")
    check_keys(k, v, beta, w, "T Hkv")
    check_queries(q, k, "T Hq")
    check_read(window, scale)
    tables = Tables(k_pages, y_pages, w_slots, beta_slots)
    where = Placement(block_table, length, rows, None)
    check_tables(k, v, tables, slots, where, values="y_pages")
    _check_norms(norm_pages, k, k_pages)
    tokens, placed = NewTokens.of(q, k, v, beta, w), (*for_kernels(where), slots.contiguous())
    rows_held, scale = block_table.shape[1] * k_pages.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    return path_decode(*tokens, *tables, norm_pages, *placed, rows_held, window, scale)


def _check_norms(norm_pages: Tensor, k: Tensor, k_pages: Tensor) -> None:
    check("norm_pages", norm_pages, "n PG Hkv", n=len(k_pages), PG=k_pages.shape[1], Hkv=k.shape[1])
    if norm_pages.dtype != width(k):
        raise ValueError(f"norm_pages: expected {width(k)} beside tokens of {k.dtype}, got {norm_pages.dtype}")
