"""Attention over pages: the public functions. Arguments, dtypes, which implementation; no gradient.

Token t of sequence n lies in row t mod PG of page block_table[n, t // PG]; a page may belong to any sequence. The scheduler decides
which: nothing here allocates a page or frees one. The mathematics is in reference.py and chunk.py, the kernels in engine/.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from needlework.ops.api import Impl, resolve
from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.common.shapes import check, width
from needlework.ops.paged import chunk, reference
from needlework.ops.paged.arguments import Bias, Pages, check_bias, check_decay, check_lam, check_new, check_pages, check_scale
from needlework.ops.polar.arguments import Parameters
from needlework.ops.runtime.launch_configs import misfit


@torch.no_grad()
def write_pages(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    rows: Tensor,
    *,
    decay: Tensor | None = None,
    decay_pages: Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """Write new keys and values into their rows of the pages, in place, and what else a token's row has.

    k: [T Hkv d]. v: [T Hkv V]. Any floating dtype; they are rounded to that of the pages.
    k_pages, v_pages: [n PG Hkv d], [n PG Hkv V]; PG is a multiple of 16. The first axis may have any stride.
    rows: [T] int64, page · PG + row of each token; −1 writes nothing. A row that two tokens name holds either.
    decay: [T Hq] float64, sums of log decays, with decay_pages [n PG Hq] float64, both or none (`paged_attention`).
    impl: "triton" is one kernel for all; "reference" and "torch" index. Nothing is returned, nothing is read back by "triton".
    Raises ValueError for shapes or dtypes that do not fit.

    >>> import torch
    >>> from needlework.ops.paged import write_pages
    >>> k_pages, v_pages = torch.zeros(4, 16, 2, 32), torch.zeros(4, 16, 2, 64)
    >>> k, v = torch.randn(3, 2, 32), torch.randn(3, 2, 64)  # [T heads channels]
    >>> write_pages(k, v, k_pages, v_pages, torch.tensor([16, 17, -1]))  # two rows of page 1
    >>> torch.equal(k_pages[1, :2], k[:2]), bool(k_pages[2:].any())
    (True, False)
    """
    check_new(k, v, k_pages, v_pages, rows)
    check_decay(decay, decay_pages, len(k), None, k_pages)
    if resolve("paged", impl, k.device, lambda: None) != "triton":
        more = () if decay is None or decay_pages is None else ((decay, decay_pages),)
        return chunk.write(rows, (k, k_pages), (v, v_pages), *more)
    from needlework.ops.paged.engine.op import paged_write

    return paged_write(k, v, decay, k_pages, v_pages, decay_pages, rows)


@torch.no_grad()
def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    block_table: Tensor,
    length: Tensor,
    cu_seqlens: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    slopes: Tensor | None = None,
    decay: Tensor | None = None,
    decay_pages: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Softmax attention of the newest tokens of N sequences, whose keys and values lie in pages.

        o_i = Σ_j softmax_j(scale · q_i·k_j − m (i − j) + G_i − G_j) v_j    over the keys with 0 <= i − j < window of the same sequence

    q: [T Hq d]. Without cu_seqlens one query a sequence, T = N: its newest token. With it sequence n's queries are the tokens
        cu_seqlens[n] … cu_seqlens[n + 1) − 1, the last of its length[n]. Rows past cu_seqlens[N] are padding.
    k_pages, v_pages: [n PG Hkv d], [n PG Hkv V], PG a multiple of 16; they hold the queries' own tokens already (`write_pages`). Query
        head h reads key-value head h // (Hq // Hkv). The first axis may have any stride: pages may be a view of one buffer.
    block_table: [N NB] int32, the pages of each sequence. Entries past its length are not read, nor those wholly before the window of
        its oldest query: their pages may be freed.
    length: [N] int32 or int64, tokens of each sequence, the new ones included, at most NB · PG. −1: a padded row.
    cu_seqlens: [N+1] int32 or int64 from 0, never falling, to at most T; None: decode.
    window: W >= 1 shows each query its newest W keys, its own included; None shows all.
    scale: of the scores, above 0; None: d^-1/2.
    slopes: m of each query head [Hq], ALiBi's; None: 0.
    decay: G of the queries [T Hq], float64: the sum of a head's log decays up to a token, forgetting attention's; only differences
        count, so that a sequence may begin at any number. decay_pages [n PG Hq]: of the keys, the queries' own included. Both or none.

    Returns o [T Hq V] in q's dtype; zeros in padded rows, in rows past cu_seqlens[N], and of a query without keys (length 0).
    Dtypes: q and the pages share one. float64 computes in float64, all else in float32; the kernels multiply operands as they are.
    State: none; the pages are the caller's.
    Error: within 2 × the larger of the definition's, its streamed form's and the output rounding's own.
    impl: "triton" splits the keys over programs, reads nothing back, and has grids that follow from shapes alone: a captured CUDA graph
        serves any lengths. "torch" gathers the rows; "reference" is the definition, one query at a time. "auto" takes the kernels on a
        CUDA device where they support the call.
    Raises ValueError for shapes or dtypes that do not fit; it names tensor, axis and both sizes.

    >>> import torch
    >>> from needlework.layers.softmax import softmax_attention
    >>> from needlework.ops.paged import paged_attention
    >>> q, k, v = torch.randn(1, 80, 4, 32), torch.randn(1, 80, 2, 32), torch.randn(1, 80, 2, 64)  # [B T heads channels]
    >>> k_pages, v_pages = k.unflatten(1, (5, 16))[0], v.unflatten(1, (5, 16))[0]  # [n PG Hkv d]: five pages of 16 tokens
    >>> where = {"block_table": torch.arange(5, dtype=torch.int32)[None], "length": torch.tensor([80], dtype=torch.int32)}
    >>> dense, _ = softmax_attention(q, k, v)
    >>> torch.allclose(paged_attention(q[:, -1], k_pages, v_pages, **where), dense[:, -1], atol=1e-5)
    True
    >>> new = torch.tensor([0, 30])  # the last 30 of the sequence's 80 tokens
    >>> torch.allclose(paged_attention(q[0, 50:], k_pages, v_pages, **where, cu_seqlens=new), dense[0, 50:], atol=1e-5)
    True
    """
    pages = check_pages(q, k_pages, v_pages, block_table, length, cu_seqlens, window)
    check_scale(scale)
    bias = check_bias(Bias(slopes, decay, decay_pages), len(q), q.shape[1], pages)
    path = _path(q, pages, impl)
    if path == "triton":
        from needlework.ops.paged.engine.op import paged_softmax

        return paged_softmax(q, *pages, scale, *(bias or Bias()))
    form = reference.paged_softmax if path == "reference" else chunk.softmax
    return _plain(form, q, pages, scale, bias).to(q.dtype)


@torch.no_grad()
def paged_differential(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    lam: Tensor,
    *,
    block_table: Tensor,
    length: Tensor,
    cu_seqlens: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """The difference of two softmaxes over pages, as the Diff Transformer has it before its norm.

        o = (softmax(scale · q₁k₁ᵀ) − λ softmax(scale · q₂k₂ᵀ)) v,    q = [q₁ q₂],    k = [k₁ k₂]

    q: [T Hq d]; k_pages: [n PG Hkv d], d even: the halves of a head are its two vectors. v_pages: [n PG Hkv V].
    lam: λ, a number or [Hq], on q's device, any floating dtype.
    scale: of the scores, above 0; None: (d/2)^-1/2.
    The other arguments, dtypes, errors and `impl` as in `paged_attention`. "triton" reads keys and values once for both softmaxes.

    Returns o [T Hq V] in q's dtype; zeros where `paged_attention` has zeros.

    >>> import torch
    >>> from needlework.ops.paged import paged_attention, paged_differential
    >>> q, k_pages, v_pages = torch.randn(2, 4, 32), torch.randn(3, 16, 2, 32), torch.randn(3, 16, 2, 64)
    >>> where = {"block_table": torch.tensor([[0, 2], [1, -1]], dtype=torch.int32), "length": torch.tensor([20, 9])}
    >>> o = paged_differential(q, k_pages, v_pages, torch.tensor(0.0), **where)
    >>> first = q[..., :16], k_pages[..., :16].contiguous(), v_pages  # λ = 0 leaves the first softmax
    >>> torch.allclose(o, paged_attention(*first, **where), atol=1e-5)
    True
    """
    pages = check_pages(q, k_pages, v_pages, block_table, length, cu_seqlens, window)
    if q.shape[2] % 2:
        raise ValueError(f"q: axis 2 (d) has size {q.shape[2]}, expected an even number: two vectors side by side")
    check_lam(lam, q.shape[1])
    check_scale(scale)
    path = _path(q, pages, impl)
    if path == "triton":
        from needlework.ops.paged.engine.op import paged_difference

        return paged_difference(q, *pages, lam, scale)
    form = reference.paged_difference if path == "reference" else chunk.difference
    return _plain(form, q, pages, lam, scale).to(q.dtype)


@torch.no_grad()
def paged_polar(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    alpha: Tensor,
    beta: Tensor,
    gamma: Tensor,
    null_base: Tensor,
    v_null: Tensor,
    *,
    block_table: Tensor,
    length: Tensor,
    cu_seqlens: Tensor | None = None,
    window: int | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """Polar attention over pages: a direction, and the magnitude of what was found. `ops/polar` has the equation.

    alpha, beta, gamma, null_base: [Hq], v_null: [Hq V], as in `chunk_polar`.
    The other arguments, dtypes, errors and `impl` as in `paged_attention`; the scores' scale is d^-1/2.

    Returns direction [T Hq V] in q's dtype, magnitude [T Hq] in float32 (float64 for float64). A query without keys (length 0) has the
    null's direction and magnitude 0; padded rows and rows past cu_seqlens[N] are zeros.

    >>> import torch
    >>> from needlework.ops.paged import paged_polar
    >>> from needlework.ops.polar import chunk_polar
    >>> q, k, v = torch.randn(1, 80, 4, 32), torch.randn(1, 80, 2, 32), torch.randn(1, 80, 2, 64)  # [B T heads channels]
    >>> (alpha, beta, gamma, null_base), v_null = torch.zeros(4, 4), torch.randn(4, 64)
    >>> parameters = (alpha, beta, gamma, null_base, v_null)
    >>> k_pages, v_pages = k.unflatten(1, (5, 16))[0], v.unflatten(1, (5, 16))[0]  # [n PG Hkv d]: five pages of 16 tokens
    >>> where = {"block_table": torch.arange(5, dtype=torch.int32)[None], "length": torch.tensor([80], dtype=torch.int32)}
    >>> direction, magnitude = paged_polar(q[:, -1], k_pages, v_pages, *parameters, **where)
    >>> torch.allclose(direction, chunk_polar(q, k, v, *parameters).direction[:, -1], atol=1e-5)
    True
    """
    pages = check_pages(q, k_pages, v_pages, block_table, length, cu_seqlens, window)
    for name, x in {"alpha": alpha, "beta": beta, "gamma": gamma, "null_base": null_base}.items():
        check(name, x, "Hq", Hq=q.shape[1])
    check("v_null", v_null, "Hq V", Hq=q.shape[1], V=v_pages.shape[3])
    parameters = Parameters(alpha, beta, gamma, null_base, v_null).map(lambda x: x.to(width(q)))
    path = _path(q, pages, impl)
    if path == "triton":
        from needlework.ops.paged.engine.op import paged_direction

        return paged_direction(q, *pages, *parameters)
    form = reference.paged_direction if path == "reference" else chunk.direction
    direction, magnitude = _plain(form, q, pages, parameters)
    return direction.to(q.dtype), magnitude


def _plain(form: Callable[..., Any], q: Tensor, *settings: object) -> Any:
    """`form` in the precision that the contract states, also under the caller's autocast."""
    with torch.autocast(q.device.type, enabled=False):
        return form(q.to(width(q)), *settings)


def _path(q: Tensor, pages: Pages, impl: Impl) -> str:
    path = resolve("paged", impl, q.device, lambda: misfit("paged/paged", q.device, q.dtype, q.shape[-1], pages.v.shape[-1]))
    if path != "triton" and pages.cu_seqlens is not None:
        check_cu_seqlens(pages.cu_seqlens, 1, len(q), padded=True)
    return path
