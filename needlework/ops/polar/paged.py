"""Polar attention on pages shared by many sequences, as serving wants it: decode and prefill over a block table. No gradient.

Token t of sequence n lies in row t mod PG of page block_table[n, t // PG]; a page belongs to any sequence. Who fills the pages is
not known here: the keys and values of the queries' own tokens already lie in them.
"""

import torch
from torch import Tensor

from needlework.ops.api import Impl, resolve
from needlework.ops.common.packing import check_cu_seqlens, lengths, pad, sequences, unpad
from needlework.ops.common.pages import positions
from needlework.ops.common.shapes import check, check_count, check_dtypes, check_tensor
from needlework.ops.polar import chunk
from needlework.ops.polar.arguments import Parameters
from needlework.ops.runtime.launch_configs import misfit


@torch.no_grad()
def decode_polar(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    gamma: Tensor,
    null_base: Tensor,
    v_null: Tensor,
    *,
    block_table: Tensor,
    length: Tensor,
    window: int | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """The newest token of each sequence: `chunk_polar`'s last query.

    q: [B Hq d]. k, v: [n PG Hkv d], [n PG Hkv V] all pages, contiguous. The parameters and window as in `chunk_polar`.
    block_table: [B NB] int32 pages of each sequence; entries past its length are not read.
    length: [B] int32 tokens of each, the newest included, at most NB · PG. 0: no key, direction is the null's and magnitude 0;
        −1: a padded row, zeros.

    Returns direction [B Hq V] in q's dtype, magnitude [B Hq] in float32 (float64 for float64).
    Error: as `chunk_polar`. impl: "triton" splits the keys over programs, reads nothing back, and can be captured in a CUDA graph;
    "torch" gathers the pages; "auto" takes the kernels on a CUDA device where they support the call.
    Raises ValueError for shapes or dtypes that do not fit.

    >>> import torch
    >>> from needlework.ops.polar import chunk_polar, decode_polar
    >>> q, k, v = torch.randn(1, 100, 4, 32), torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 64)  # [B T heads channels]
    >>> (alpha, beta, gamma, null_base), v_null = torch.zeros(4, 4), torch.randn(4, 64)
    >>> parameters = (alpha, beta, gamma, null_base, v_null)
    >>> k_pages, v_pages = k.unflatten(1, (5, 20))[0], v.unflatten(1, (5, 20))[0]  # [n PG Hkv d]: five pages of 20 tokens
    >>> where = {"block_table": torch.arange(5, dtype=torch.int32)[None], "length": torch.tensor([100], dtype=torch.int32)}
    >>> direction, magnitude = decode_polar(q[:, -1], k_pages, v_pages, *parameters, **where)
    >>> torch.allclose(direction, chunk_polar(q, k, v, *parameters).direction[:, -1], atol=1e-5)
    True
    """
    check("q", q, "B Hq d")
    parameters = _check(q, k, v, alpha, beta, gamma, null_base, v_null, block_table, length, window)
    check("block_table", block_table, "B NB", B=len(q))
    if _path(q, v, impl) == "triton":
        from needlework.ops.polar.serving.op import polar_decode

        return polar_decode(q, k, v, *parameters, block_table, length, window)
    none = (length <= 0)[:, None]
    before = (length - 1).clamp(min=0).long()
    table = torch.where(none, 0, block_table)
    found = _gathered(q[:, None], k, v, parameters, table, before, window)
    direction, magnitude = (x[:, 0] for x in found)
    of_null = parameters.v_null / parameters.v_null.norm(dim=-1, keepdim=True).clamp(min=chunk.CLAMP)
    of_null = torch.where((length == 0)[:, None, None], of_null.to(q.dtype), 0)
    return torch.where(none[..., None], of_null, direction), torch.where(none, 0, magnitude)


@torch.no_grad()
def prefill_polar(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    gamma: Tensor,
    null_base: Tensor,
    v_null: Tensor,
    *,
    block_table: Tensor,
    length: Tensor,
    cu_seqlens: Tensor,
    window: int | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """The newest tokens of many sequences, packed: what came before them, in this call or an earlier one, lies in the pages.

    q: [1 T Hq d]; sequence n's tokens cu_seqlens[n] … cu_seqlens[n + 1) are the last of its length[n].
    The other arguments, dtypes and errors as in `decode_polar`, with N sequences for B rows and length[n] at least its new tokens.

    Returns direction [1 T Hq V], magnitude [1 T Hq].

    >>> import torch
    >>> from needlework.ops.polar import chunk_polar, prefill_polar
    >>> q, k, v = torch.randn(1, 100, 4, 32), torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 64)  # [B T heads channels]
    >>> (alpha, beta, gamma, null_base), v_null = torch.zeros(4, 4), torch.randn(4, 64)
    >>> parameters = (alpha, beta, gamma, null_base, v_null)
    >>> k_pages, v_pages = k.unflatten(1, (5, 20))[0], v.unflatten(1, (5, 20))[0]  # [n PG Hkv d]: five pages of 20 tokens
    >>> where = {"block_table": torch.arange(5, dtype=torch.int32)[None], "length": torch.tensor([100], dtype=torch.int32)}
    >>> new = torch.tensor([0, 30])  # the last 30 of the sequence's 100 tokens
    >>> direction, _ = prefill_polar(q[:, 70:], k_pages, v_pages, *parameters, **where, cu_seqlens=new)
    >>> torch.allclose(direction, chunk_polar(q, k, v, *parameters).direction[:, 70:], atol=1e-5)
    True
    """
    check("q", q, "B T Hq d")
    parameters = _check(q, k, v, alpha, beta, gamma, null_base, v_null, block_table, length, window)
    check_tensor("cu_seqlens", cu_seqlens, "N+1")
    check("block_table", block_table, "N NB", N=sequences(cu_seqlens, len(q)))
    if _path(q, v, impl) == "triton":
        from needlework.ops.polar.serving.op import polar_prefill

        return polar_prefill(q, k, v, *parameters, block_table, length, cu_seqlens, window)
    check_cu_seqlens(cu_seqlens, *q.shape[:2])
    found = _gathered(pad(q, cu_seqlens), k, v, parameters, block_table, length.long() - lengths(cu_seqlens), window)
    return tuple(unpad(x, cu_seqlens) for x in found)


def _gathered(q, k, v, parameters: Parameters, block_table, before, window) -> tuple[Tensor, Tensor]:
    """q [N T Hq d] after `before [N]` tokens; keys are gathered, the window's alone."""
    wide = torch.promote_types(q.dtype, torch.float32)
    PG, T = k.shape[1], q.shape[1]
    rows = block_table.shape[1] * PG
    held = positions(before, min(rows, window or rows), window)
    new = before[:, None] + torch.arange(T, device=q.device)

    def take(x: Tensor, at: Tensor) -> Tensor:
        at = at.clamp(0, rows - 1)
        page = block_table.long().gather(1, at // PG)
        return x[page, at % PG].to(wide)

    tokens = q.to(wide), take(k, new), take(v, new)
    direction, magnitude, _ = chunk.forward(
        *tokens, *parameters, take(k, held), take(v, held), before, window=window, chunk_size=64
    )
    return direction.to(q.dtype), magnitude


def _path(q: Tensor, v: Tensor, impl: Impl) -> str:
    if impl == "reference":
        raise ValueError("impl='reference': the definition knows no pages; use chunk_polar's")
    fit = lambda: misfit("polar/paged", q.device, q.dtype, q.shape[-1], v.shape[-1])
    return resolve("polar", impl, q.device, fit)


def _check(q, k, v, alpha, beta, gamma, null_base, v_null, block_table, length, window) -> Parameters:
    """ValueError for what does not fit; the parameters in the precision of the computation."""
    Hq, d = q.shape[-2:]
    check("k", k, "n PG Hkv d", d=d)
    check("v", v, "n PG Hkv V", n=len(k), PG=k.shape[1], Hkv=k.shape[2])
    if Hq % k.shape[2]:
        raise ValueError(
            f"q: axis {q.dim() - 2} (Hq) has size {Hq}, expected a multiple of the {k.shape[2]} key-value heads of k"
        )
    given = {"alpha": alpha, "beta": beta, "gamma": gamma, "null_base": null_base}
    for name, x in given.items():
        check(name, x, "Hq", Hq=Hq)
    check("v_null", v_null, "Hq V", Hq=Hq, V=v.shape[3])
    check_dtypes(q=q, k=k, v=v)
    check_tensor("block_table", block_table, "B NB")
    check("length", length, "B", B=len(block_table))
    for name, x in {"k": k, "v": v}.items():
        if not x.is_contiguous():
            raise ValueError(f"{name}: pages must be contiguous, got strides {x.stride()}")
    if window is not None:
        check_count("window", window, " (the query's own key)")
    wide = torch.promote_types(q.dtype, torch.float32)
    return Parameters(alpha, beta, gamma, null_base, v_null).map(lambda x: x.to(wide))
