"""What the arguments of attention over pages must be. The values of block tables, lengths and cu_seqlens are data, never read here."""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.common.packing import sequences
from needlework.ops.common.shapes import check, check_count, check_dtypes, check_tensor, given

LEAST = 16  # rows of a page are a multiple of it: a tile of keys has whole pages, or a page whole tiles
INTEGERS = (torch.int32, torch.int64)


class Pages(NamedTuple):
    """Where the keys and values of N sequences lie, and which of their tokens ask."""

    k: Tensor  # [n PG Hkv d]
    v: Tensor  # [n PG Hkv V]
    block_table: Tensor  # [N NB] int32
    length: Tensor  # [N]
    cu_seqlens: Tensor | None  # [N+1]; None: one query a sequence
    window: int | None


class Bias(NamedTuple):
    """What is added to the scores, −slope_h (i − j) + G_i − G_j; None for what is not."""

    slopes: Tensor | None = None  # [Hq]
    decay: Tensor | None = None  # [T Hq] G of the queries
    pages: Tensor | None = None  # [n PG Hq] G of the keys


class Rows(NamedTuple):
    """What a token has in its row: of new tokens [T ...], or of all pages [n PG ...]."""

    k: Tensor  # [.. Hkv d]
    v: Tensor  # [.. Hkv V]
    decay: Tensor | None = None  # [.. Hq] G


def check_page_tensors(k_pages: Tensor, v_pages: Tensor) -> None:
    """ValueError unless they are pages of the same number of rows and heads, each page contiguous in itself."""
    check("k_pages", k_pages, "n PG Hkv d")
    check("v_pages", v_pages, "n PG Hkv V", n=len(k_pages), PG=k_pages.shape[1], Hkv=k_pages.shape[2])
    if k_pages.shape[1] % LEAST:
        raise ValueError(f"k_pages: axis 1 (PG) has size {k_pages.shape[1]}, expected a multiple of {LEAST}")
    for name, x in {"k_pages": k_pages, "v_pages": v_pages}.items():
        if x[:1].numel() and not x[0].is_contiguous():
            raise ValueError(f"{name}: expected pages that are contiguous in themselves, got strides {x.stride()}")


def check_pages(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, length: Tensor, cu_seqlens: Tensor | None, window: int | None
) -> Pages:  # fmt: skip
    """The pages of a call; ValueError for what does not fit."""
    check("q", q, "T Hq d")
    T, Hq, d = q.shape
    check_page_tensors(k_pages, v_pages)
    Hkv = k_pages.shape[2]
    check("k_pages", k_pages, "n PG Hkv d", d=d)
    if Hq % Hkv:
        raise ValueError(f"q: axis 1 (Hq) has size {Hq}, expected a multiple of the {Hkv} key-value heads of k_pages")
    check_dtypes(q=q, k_pages=k_pages, v_pages=v_pages)
    check("block_table", block_table, "N NB", N=T if cu_seqlens is None else sequences(cu_seqlens, 1))
    if block_table.dtype != torch.int32:
        raise ValueError(f"block_table: expected int32, got {block_table.dtype}")
    check("length", length, "N", N=len(block_table))
    if length.dtype not in INTEGERS:
        raise ValueError(f"length: expected int32 or int64, got {length.dtype}")
    if window is not None:
        check_count("window", window, " (the query's own key)")
    return Pages(k_pages, v_pages, block_table, length, cu_seqlens, window)


def check_new(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, rows: Tensor) -> None:
    """ValueError unless new keys and values fit the pages."""
    check_page_tensors(k_pages, v_pages)
    _, _, Hkv, d = k_pages.shape
    check("k", k, "T Hkv d", Hkv=Hkv, d=d)
    check("v", v, "T Hkv V", T=len(k), Hkv=Hkv, V=v_pages.shape[3])
    check("rows", rows, "T", T=len(k))
    if rows.dtype != torch.int64:
        raise ValueError(f"rows: expected int64, got {rows.dtype}")


def check_decay(decay: Tensor | None, decay_pages: Tensor | None, T: int, Hq: int | None, pages: Tensor) -> None:
    """ValueError unless decays are given for queries and pages alike, float64, each page contiguous in itself."""
    if (decay is None) != (decay_pages is None):
        raise ValueError("decay and decay_pages: one is given without the other")
    if decay is None or decay_pages is None:
        return
    check("decay", decay, "T Hq", T=T, **({} if Hq is None else {"Hq": Hq}))
    check("decay_pages", decay_pages, "n PG Hq", n=len(pages), PG=pages.shape[1], Hq=decay.shape[1])
    for name, x in {"decay": decay, "decay_pages": decay_pages}.items():
        if x.dtype != torch.float64:
            raise ValueError(f"{name}: expected float64, of which differences keep their digits, got {x.dtype}")
    if decay_pages[:1].numel() and not decay_pages[0].is_contiguous():
        raise ValueError(f"decay_pages: expected pages that are contiguous in themselves, got strides {decay_pages.stride()}")


def check_bias(bias: Bias, T: int, Hq: int, pages: Pages) -> Bias | None:
    """None where nothing is added; ValueError for what does not fit."""
    if bias.slopes is not None:
        check("slopes", bias.slopes, "Hq", Hq=Hq)
    check_decay(bias.decay, bias.pages, T, Hq, pages.k)
    return None if bias == Bias() else bias


def check_lam(lam: Tensor, Hq: int) -> None:
    """ValueError unless λ is a number, or one a query head."""
    check_tensor("lam", lam, "Hq")
    if lam.dim():
        check("lam", lam, "Hq", Hq=Hq)


def check_scale(scale: float | None) -> None:
    if scale is not None and not (isinstance(scale, int | float) and scale > 0):
        raise ValueError(f"scale: expected a number above 0, got {given(scale)}")
