"""Rows of D numbers as N tiles, the parts, of BD columns each: products take no more columns than those.

Triton's tiles are powers of two wide. Rows of 160 or 192 are three parts of 64, where one tile would have 256 columns. All parts are as wide
as each other, so that shared memory has one layout. With N = 1 a row is one tile.
"""

import triton
import triton.language as tl

from needlework.ops.common.kernels.tile import load_tile, plus_product, store_tile
from needlework.ops.runtime.triton_types import padded

LEAST = 256  # columns of a tile from which on rows are taken in parts: three tiles of 32 took longer than one of 128


def parts_of(D: int) -> tuple[int, int]:
    """The columns of a part, and how many parts a row of D numbers has: three quarters of a tile, where they hold it."""
    whole = padded(D)
    return (whole // 4, 3) if whole >= LEAST and 4 * D <= 3 * whole else (whole, 1)


@triton.jit
def load_parts(
    x, i_b, i_t, i_h, T, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, N: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """N tiles [C BD] of x [B T H D], as `load_tile` has one."""
    found = ()
    for n in tl.static_range(N):
        found += (load_tile(x, i_b, i_t, i_h, n * BD, T, H, D, C, BD, TMA),)
    return found


@triton.jit
def load_row(x, D: tl.constexpr, BD: tl.constexpr, N: tl.constexpr):
    """N tiles [1 BD] of a row x [D]."""
    found = ()
    for n in tl.static_range(N):
        o_d = n * BD + tl.arange(0, BD)
        found += (tl.load(x + o_d, mask=o_d < D, other=0.0)[None, :],)
    return found


@triton.jit
def store_parts(
    x, parts, UNIT: tl.constexpr, OT: tl.constexpr, i_b, i_t, i_h, T, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    BD: tl.constexpr, N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The inverse of `load_parts`, of parts in a unit that is UNIT."""
    for n in tl.static_range(N):
        store_tile(x, (parts[n] * UNIT).to(OT), i_b, i_t, i_h, n * BD, T, H, D, C, BD, TMA)


@triton.jit
def load_transposed(
    p, there, i_v, K: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, N: tl.constexpr, BV: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """Of a state [K V] at p the transpose of BV columns from i_v, N tiles [BV BD]; zeros outside, and where it is not there. By the second
    cache: another multiprocessor may have written it since this program began, and nothing of it is read twice."""
    o_v = i_v + tl.arange(0, BV)
    found = ()
    for n in tl.static_range(N):
        o_k = n * BD + tl.arange(0, BD)
        inside = (o_k < K)[None, :] & (o_v < V)[:, None] & there
        found += (tl.load(p + o_k[None, :] * V + o_v[:, None], mask=inside, other=0.0, cache_modifier=".cg").to(ACC),)
    return found


@triton.jit
def store_transposed(p, S, here, i_v, K: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, N: tl.constexpr, BV: tl.constexpr):
    """The inverse of `load_transposed`, where `here`."""
    o_v = i_v + tl.arange(0, BV)
    for n in tl.static_range(N):
        o_k = n * BD + tl.arange(0, BD)
        tl.store(p + o_k[None, :] * V + o_v[:, None], S[n], mask=(o_k < K)[None, :] & (o_v < V)[:, None] & here)


@triton.jit
def zeros(C: tl.constexpr, BD: tl.constexpr, N: tl.constexpr, ACC: tl.constexpr):
    found = ()
    for _ in tl.static_range(N):
        found += (tl.zeros([C, BD], ACC),)
    return found


@triton.jit
def cast(parts, ST: tl.constexpr, N: tl.constexpr):
    found = ()
    for n in tl.static_range(N):
        found += (parts[n].to(ST),)
    return found


@triton.jit
def times(parts, by, N: tl.constexpr):
    """Each part times `by`, in its own dtype."""
    found = ()
    for n in tl.static_range(N):
        found += ((parts[n] * by).to(parts[n].dtype),)
    return found


@triton.jit
def scores(a, b, N: tl.constexpr, ACC: tl.constexpr):
    """a bᵀ [rows of a, rows of b]."""
    s = tl.dot(a[0], tl.trans(b[0]), input_precision="ieee", out_dtype=ACC)
    for n in tl.static_range(1, N):
        s = plus_product(s, a[n], tl.trans(b[n]))
    return s


@triton.jit
def plus_products(acc, p, b, N: tl.constexpr):
    """acc + p b, part by part."""
    found = ()
    for n in tl.static_range(N):
        found += (plus_product(acc[n], p, b[n]),)
    return found


@triton.jit
def continued(S, by, a, b, N: tl.constexpr, ACC: tl.constexpr):
    """by S + a b, one chain of sums from chunk to chunk; a part after the other, as both do not fit the registers twice."""
    found = ()
    for n in tl.static_range(N):
        found += (tl.dot(a, b[n], S[n] * by, input_precision="ieee", out_dtype=ACC),)
    return found


@triton.jit
def products(a, b, N: tl.constexpr, ACC: tl.constexpr):
    """a b, part by part."""
    found = ()
    for n in tl.static_range(N):
        found += (tl.dot(a, b[n], input_precision="ieee", out_dtype=ACC),)
    return found


@triton.jit
def plus_times(acc, parts, by, N: tl.constexpr):
    """acc + by parts."""
    found = ()
    for n in tl.static_range(N):
        found += (acc[n] + parts[n] * by,)
    return found


@triton.jit
def inner(a, b, N: tl.constexpr):
    """Σ a b of each row."""
    total = tl.sum(a[0] * b[0], 1)
    for n in tl.static_range(1, N):
        total += tl.sum(a[n] * b[n], 1)
    return total


@triton.jit
def largest(a, N: tl.constexpr):
    """max |a| of each row."""
    found = tl.max(tl.abs(a[0]), 1)
    for n in tl.static_range(1, N):
        found = tl.maximum(found, tl.max(tl.abs(a[n]), 1))
    return found
