"""What a chunk's gates come to, for all chunks at once, and the coupling of two tokens of a chunk that follows from it."""

import triton
import triton.language as tl

from needlework.ops.common.kernels.tile import capped
from needlework.ops.delta.scalar.intra import LOG2E, power, two_narrow

ROWS = tl.constexpr(4)  # of E, the factors of a chunk's tokens


@triton.jit(do_not_specialize=["T", "NR"])
def intra(
    p_g, p_E, T, NR, HV: tl.constexpr, C: tl.constexpr, HB: tl.constexpr, ACC: tl.constexpr, GATE: tl.constexpr
):  # fmt: skip
    """One chunk of HB value heads. E [B HV NR/C 4 C]: of each token G, the chunk's gates up to it in log2, as a sum of two, e^G and
    e^{G_C − G}. NR: T rounded up to whole chunks."""
    GROUPS: tl.constexpr = (HV + HB - 1) // HB
    chunks = NR // C
    i_b = tl.program_id(0) // (GROUPS * chunks)
    i_c = tl.program_id(0) // GROUPS % chunks
    o_h = tl.program_id(0) % GROUPS * HB + tl.arange(0, HB)
    o_c = tl.arange(0, C)
    o_t = i_c * C + o_c
    # |G| reaches hundreds where a difference of 1e-3 counts
    G = tl.zeros([C, HB], tl.float64)
    if GATE:
        inside = (o_t < T)[:, None] & (o_h < HV)[None, :]
        o = (tl.cast(i_b, tl.int64) * T + o_t)[:, None] * HV + o_h[None, :]
        G = tl.cumsum(capped(tl.load(p_g + o, mask=inside, other=0.0)).to(tl.float64) * LOG2E, 0)
    whole = tl.sum(tl.where(o_c[:, None] == C - 1, G, 0.0), 0)
    high, low = two_narrow(G, ACC)
    p_factor = p_E + ((tl.cast(i_b, tl.int64) * HV + o_h)[None, :] * chunks + i_c) * (ROWS * C) + o_c[:, None]
    there = (o_c < C)[:, None] & (o_h < HV)[None, :]
    tl.store(p_factor, high, mask=there)
    tl.store(p_factor + C, low, mask=there)
    tl.store(p_factor + 2 * C, power(G, ACC), mask=there)
    # two ways to sum may leave a last digit above 0
    tl.store(p_factor + 3 * C, tl.exp2(tl.minimum(whole[None, :] - G, 0.0).to(ACC)), mask=there)


@triton.jit
def factors(p_E, i_bh, i_chunk, chunks, C: tl.constexpr):
    """A chunk's rows of C numbers, as `intra` wrote them."""
    return p_E + (tl.cast(i_bh, tl.int64) * chunks + i_chunk) * (ROWS * C)


@triton.jit
def decay_of(high, low, C: tl.constexpr, LATER: tl.constexpr):
    """2^{G_i − G_j} of tokens i >= j of a chunk, 0 elsewhere: rows i, or with LATER rows j."""
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    if LATER:
        seen = row <= column
        between = -between
    else:
        seen = row >= column
    return tl.where(seen, tl.exp2(tl.where(seen, tl.minimum(between, 0.0), 0.0)), 0.0)
