"""Chains of chunks shared out among programs that stay on the device for a whole launch (persistent programs).

A chain is the chunks of one sequence that one program must walk in order. Chains are laid end to end and cut into equal runs, one a
slot, one slot a program (McNaughton's wrap-around rule): a chain is cut at most once; its first chunks run first in one slot, its
last chunks run last in the slot before. A slot has a number that falls as the program id rises, so that a program only waits for
one that was started earlier.

Chains that read the same tokens, as the tiles of one state do, are walked side by side by a team of slots, each its own member: what
one of them has fetched the others find in L2. A run is then a team's, and the slot before is that of the team before.
"""

import triton
import triton.language as tl


@triton.jit
def longest_sequence(p_cum, N):
    """Chunks of the longest sequence."""
    longest = 0
    for i in range(0, N, 512):
        n = i + tl.arange(0, 512)
        counts = tl.load(p_cum + n + 1, mask=n < N, other=0) - tl.load(p_cum + n, mask=n < N, other=0)
        longest = tl.maximum(longest, tl.max(counts, 0))
    return longest


@triton.jit
def chain_at(p_cum, N, position, PER: tl.constexpr):
    """Number of the chain that holds a position of the line; PER chains a sequence."""
    i_n = 0
    for i in range(0, N, 512):
        n = i + tl.arange(0, 512)
        ends = PER * tl.load(p_cum + n + 1, mask=n < N, other=0)
        i_n += tl.sum(((n < N) & (ends <= position)).to(tl.int32), 0)
    start = tl.load(p_cum + i_n)
    return i_n * PER + (position - PER * start) // tl.maximum(tl.load(p_cum + i_n + 1) - start, 1)


@triton.jit
def run_of(p_cum, N, i_slot, slots, PER: tl.constexpr):
    """Positions [lo, hi) of a slot, and its first and last chain."""
    total = PER * tl.load(p_cum + N)
    length = tl.maximum((total + slots - 1) // slots, longest_sequence(p_cum, N))
    lo = tl.minimum(i_slot * length, total)
    hi = tl.minimum(lo + length, total)
    first = 0
    last = -1
    if lo < hi:
        first = chain_at(p_cum, N, lo, PER)
        last = chain_at(p_cum, N, hi - 1, PER)
    return lo, hi, first, last


@triton.jit
def part_here(p_cum, i_n, i_own, lo, hi, PER: tl.constexpr):
    """Of sequence i_n and its chain number i_own: what lies at positions [lo, hi) of a slot.

    The sequence's first chunk, and how many it has; how many of them the slot before takes; whether they began in the slot after;
    the first chunk here and the one after the last, counted from the sequence's first.
    """
    start = tl.load(p_cum + i_n)
    count = tl.load(p_cum + i_n + 1) - start
    at = PER * start + i_own * count
    # the line's end is where the chain's first chunks run
    begin = tl.maximum(lo - at, 0)
    end = tl.minimum(hi - at, count)
    late = end < count
    c_from = tl.where(late, count - end, 0)
    c_to = tl.where(begin > 0, count - begin, count)
    return start, count, begin, late, c_from, c_to


@triton.jit
def slot_here(p_cum, N, PER: tl.constexpr, TEAM: tl.constexpr):
    """This program's slot and its place in its team; the team's positions [lo, hi) and its first and last chain."""
    slots = tl.num_programs(0)
    i_slot = slots - 1 - tl.program_id(0)
    lo, hi, first, last = run_of(p_cum, N, i_slot // TEAM, slots // TEAM, PER)
    return i_slot, i_slot % TEAM, lo, hi, first, last


@triton.jit
def chain_here(p_cum, i_chain, lo, hi, chunks_of_row, PER: tl.constexpr):
    """The chain's sequence, its batch row and, in that row, its first chunk; then what `part_here` says of it."""
    i_n = i_chain // PER
    start, count, begin, late, c_from, c_to = part_here(p_cum, i_n, i_chain % PER, lo, hi, PER)
    i_b = start // chunks_of_row
    return i_n, i_b, start - i_b * chunks_of_row, start, count, begin, late, c_from, c_to


@triton.jit
def wait_for(p_flag, FORM: tl.constexpr = 0):
    """Wait until the slot that has the chain's first chunks has stored its state. FORM 2: launched after FORM 1, which left the flags at
    1."""
    while tl.atomic_add(p_flag, 0, sem="acquire") < (2 if FORM == 2 else 1):
        pass
    tl.debug_barrier()


@triton.jit
def tell(p_flag, FORM: tl.constexpr = 0):
    """The state of a cut chain is stored: the slot that waits for it may read it."""
    tl.debug_barrier()
    tl.atomic_xchg(p_flag, 2 if FORM == 2 else 1, sem="release")
