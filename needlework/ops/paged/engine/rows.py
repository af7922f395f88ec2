"""Which tokens and keys a program has, and rows of pages. Everything follows from block tables, lengths and cu_seqlens on the device.

A tile is BT new tokens of one sequence. Sequence n's tiles have the numbers cu_seqlens[n] // BT + n and up, whatever the others' lengths:
a tile's sequence is found by counting, and numbers past a sequence's last token are tiles of nothing. What lies past cu_seqlens[N] is
one more sequence, of length −1. Its splits share the tiles of BN keys that some token of the tile sees.
"""

import triton
import triton.language as tl


@triton.jit
def sequence_of(p_ends, x, N, BT: tl.constexpr, TILES: tl.constexpr):
    """The sequence, 0 … N, of token x, or of tile x with TILES: the last that begins there or before."""
    count = 0
    for i in range(0, N + 1, 128):
        n = i + tl.arange(0, 128)
        first = tl.load(p_ends + n, mask=n <= N, other=0).to(tl.int32)
        if TILES:
            first = first // BT + n
        count += tl.sum(((first <= x) & (n <= N)).to(tl.int32), 0)
    return count - 1


@triton.jit
def ends_of(p_ends, p_length, i_n, N, T):
    """A sequence's first new token, the one after its last, and its length."""
    first = tl.load(p_ends + i_n).to(tl.int32)
    last = tl.load(p_ends + i_n + 1, mask=i_n < N, other=T).to(tl.int32)
    return first, last, tl.load(p_length + i_n, mask=i_n < N, other=-1).to(tl.int32)


@triton.jit
def keys_of(token, last, live, W, splits, BT: tl.constexpr, BN: tl.constexpr, LEAST: tl.constexpr):
    """Of the tile whose first token is `token`: that token's position, the oldest and the newest key that the tile sees, the first tile
    of keys, the one after the last, and how many a split has. A split of fewer than LEAST would cost more than it saves."""
    own = live - (last - token)
    newest = own + tl.minimum(BT, last - token) - 1
    oldest = tl.maximum(own - W + 1, 0)
    begin = oldest // BN
    end = tl.maximum(tl.cdiv(tl.maximum(newest + 1, 0), BN), begin)
    return own, oldest, newest, begin, end, tl.maximum(tl.cdiv(end - begin, splits), LEAST)


@triton.jit
def page_numbers(p_table, j, hi, oldest, newest, PG: tl.constexpr, BN: tl.constexpr):
    """The page of tile j of keys, or of each of its rows where pages are not of whole tiles; 0 where nothing is to be read."""
    if PG % BN == 0:
        pages = tl.load(p_table + j * BN // PG, mask=j < hi, other=0)
    else:
        o_t = j * BN + tl.arange(0, BN)
        pages = tl.load(p_table + o_t // PG, mask=(j < hi) & (o_t >= oldest) & (o_t <= newest), other=0)
    return pages.to(tl.int64)


@triton.jit
def held_numbers(p_table, first, oldest, newest, PG: tl.constexpr, HELD: tl.constexpr):
    """HELD entries of a sequence's table from `first` on, 0 where nothing is to be read. A loop over tiles picks them out of registers: a
    number that it loaded to know an address would take stages of the pipeline, and loaded a tile ahead, with three stages or more, Triton
    3.6 waits in every step for all that is under way."""
    o_p = first + tl.arange(0, HELD)
    return tl.load(p_table + o_p, mask=(o_p * PG <= newest) & (o_p * PG + PG > oldest), other=0)


@triton.jit
def picked(held, i):
    """Number i of them."""
    return tl.sum(tl.where(tl.arange(0, held.shape[0]) == i, held, 0), 0).to(tl.int64)


@triton.jit
def page_rows(p_page, o_row, inside, i_kv, HK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, MASK: tl.constexpr):
    """Rows o_row of a page, or each of its own page [rows BD], zeros past D and, with MASK, where not `inside`."""
    o_d = tl.arange(0, BD)
    real = (o_d < D)[None, :]
    if MASK:
        real = real & inside[:, None]
    return tl.load((p_page + (o_row * HK + i_kv) * D)[:, None] + o_d[None, :], mask=real, other=0.0)
