"""Segments: a long sequence of few heads is split into segments that are computed side by side, with the same result; a short one is one.

Over a segment the state goes by  S_end = M S_start + N,  its gradient by  dS_start = Mᵀ dS_end + N',  M [K K] the product of its
transitions; where nothing is erased M is diagonal, and held as its decays [K], or as the one [1] of all channels. An engine finds N from v
and no state, M from no v and the identity, N' from do alone; `fix_up` goes from segment to segment; then every kernel walks all segments at once, a segment being one more sequence of an `Alignment`, with an initial
state and a final state's gradient of its own. A segment's length in chunks is bounded, and with it the count of segments, by sizes that
the host knows: lengths of packed sequences are not read back, but by an operator that returns nothing of a segment. Knows no engine.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.common.alignment import Alignment
from needlework.ops.delta.inputs import NO_TABLE, OF_TABLE, SlotTable
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import cdiv, next_power_of_2
from needlework.ops.slots.kernels import power_of, slot_of

SLOTS = {name: OF_TABLE[name] for name in ("p_slots", "p_fresh", "p_power", "slot_stride")}
SHORTEST, MOST = 16, 64  # chunks of a segment that are worth a state; segments of a sequence
SEGMENTS, SEQUENCES = 64, 64  # of a program of `segments_kernel`
COPIES = 8  # columns of a walk that finds a diagonal, each all of it: 16 bytes of half precision
LAUNCHES = 20  # what the launches for segments cost, in chunks of a chain


Slower = Callable[[float], float]  # of chains at once: the time of each ÷ alone


def at_one_pace(chains: float) -> float:
    return 1.0


def step_cost(columns: int) -> int:
    """What a step from segment to segment costs, in chunks of a chain: of decays, of M in one tile as on Hopper, of M through memory
    (`fix_up`)."""
    return 1 if columns == 0 else 2 if columns <= 128 else 5


def segment_count(
    chains: int, longest: int, columns: int, V: int, slots: int, slower: Slower = at_one_pace, chunks: Sequence[int] = (),
    most: int = MOST,
) -> int:  # fmt: skip
    """How many segments make a sequence, at most `most`, 1: none. Only facts that the host has; time in chunks that one chain walks.

    A walk of `chains` chains over `slots` places takes as long as the longest chain, or as all chunks over all places:
    walk(chains, L) = max(L, chains·L/slots), each times `slower`, what so many chains take from each
    other. Whole sequences take walk(chains, L). P segments take

        walk(P·chains, L/P)                     the walk itself
        + ¾ walk(P·chains·(V + columns)/V, L/P) M and N: `columns` more, K, or none where M is diagonal; no output
        + step_cost P + LAUNCHES                segment to segment

    so that chains that fill the machine are left alone. slots 0: 1. chunks: of each packed sequence, `chains` being those of one, where the
    host has read them: the walk's places are taken by all, those of M and N by what is longer than a segment.
    """
    if not slots:
        return 1
    walk = lambda many, P, work: max(longest / P * slower(many * P), many * work / slots * slower(slots))
    ordered = sorted(chunks)
    sums = list(accumulate(ordered, initial=0))
    cut = lambda P: sums[-1] - sums[bisect_right(ordered, longest / P)] or longest
    whole = sums[-1] or longest
    best, least, step = 1, walk(chains, 1, whole), step_cost(columns)
    # bounded, so that a symbolic length is compared and not fixed
    for P in range(2, MOST + 1):
        if P > most or P * SHORTEST > longest or step * P >= least:
            break
        time = walk(chains, P, whole) + 0.75 * walk(chains * (V + columns) / V, P, cut(P)) + step * P + LAUNCHES
        if time < least:
            best, least = P, time
    return best


def segment_length(
    N: int, packed: bool, T: int, C: int, chains: int, K: int, V: int, slots: int, diagonal: bool,
    slower: Slower = at_one_pace, chunks: Sequence[int] = (),
) -> int:  # fmt: skip
    """Chunks of C that a segment of a call has at most, of N sequences, `chains` each, of T tokens, or packed in as many together; 0:
    sequences stay whole. diagonal: M is. The longest of packed ones, unless `chunks` tells, is taken to have half of the tokens, or all, if
    there is but one beside it: a server's padding. Those that are no longer than a segment stay whole, and cost but two states each:
    where these would take half the memory of the tokens, there are fewer segments of lengths that were read, and none of others."""
    longest = max(chunks, default=-(-T // C) // (2 if packed and N > 2 else 1))
    most = (T // (2 * K) - N) // 2 if chunks else MOST
    count = segment_count(chains if packed else N * chains, longest, 0 if diagonal else K, V, slots, slower, chunks, most)
    if count == 1 or (packed and (N + 2 * count) * 2 * K > T):
        return 0
    return -(-longest // count)


def segments_in_all(N: int, packed: bool, T: int, C: int, length: int) -> int:
    """At most, of N sequences of T aligned tokens each, or packed in as many together."""
    return N + T // C // length if packed else N * cdiv(cdiv(T, C), length)


class SegmentStates(NamedTuple):
    """What the backward takes of a forward in segments."""

    initial_state: Tensor  # [R HV K V]: before every segment
    M: Tensor  # [R HV K K], or its diagonal (`fix_up`)


class Segments(NamedTuple):
    """R segments: those of sequence n are first[n] … first[n+1) − 1, in order, at least one, and equal to a chunk. Those past first[N] are
    empty and of no sequence."""

    align: Alignment  # each is a sequence of it
    first: Tensor  # [N+1] int32
    of: Tensor  # [R+1] int32: the sequence of each; N: none
    split: Tensor  # [R 2] int32: `Alignment.spans`, without chunks where a sequence is one segment

    def begun(self, x: Tensor) -> Tensor:
        """[N ...] of x [R ...]: of the sequences' first segments."""
        return _rows(x, self.first[:-1])

    def ended(self, x: Tensor) -> Tensor:
        """[N ...] of x [R ...]: of the sequences' last segments."""
        return _rows(x, self.first[1:] - 1)

    def each(self, x: Tensor) -> Tensor:
        """[R ...] of x [N ...]: what each segment's sequence has."""
        return _rows(x, self.of[:-1].clamp(max=len(x) - 1))


def _rows(x: Tensor, index: Tensor) -> Tensor:
    return x.new_empty(len(index), *x.shape[1:]) if x.is_meta else x.index_select(0, index)


def segmented(alignment: Alignment, C: int, length: int) -> Segments:
    """Each sequence in as few segments of at most `length` chunks of C as there can be."""
    N, packed = alignment.N, alignment.maps is not None
    R = segments_in_all(N, packed, alignment.T, C, length)
    cum, of, first, split = (alignment.cum.new_empty(n) for n in (R + 1, R + 1, N + 1, 2 * R))
    arguments = alignment.cum, cum, of, first, split, N, R, length
    run(segments_kernel, (cdiv(R + 1, SEGMENTS),), *arguments, BLK=SEGMENTS, BN=SEQUENCES, num_warps=4)
    return Segments(Alignment(cum, R, alignment.T, min(length, alignment.longest), alignment.maps), first, of, split.view(R, 2))


def transitions(
    walk: Callable[[Tensor, Tensor | None], Tensor], v: Tensor, K: int, diagonal: bool = False
) -> tuple[Tensor, Tensor]:
    """N [R HV K V] and M [R HV K K], or its diagonal [R HV K], from an engine's walk over all segments that need them:
    walk(v, initial state) -> final state."""
    N = walk(v, None)
    if diagonal:
        ones = N.new_ones(*N.shape[:3], COPIES)
        return N, walk(v.new_zeros(*v.shape[:3], COPIES), ones)[..., 0].contiguous()
    eye = torch.eye(K, dtype=N.dtype, device=N.device).expand(*N.shape[:2], K, K).contiguous()
    return N, walk(v.new_zeros(*v.shape[:3], K), eye)


def fix_up(
    M: Tensor, N: Tensor, initial_state: Tensor | None, first: Tensor,
    *, config: LaunchConfig, reverse: bool, into: Tensor | None = None, when: Tensor | None = None, table: SlotTable | None = None,
) -> Tensor:  # fmt: skip
    """S of every segment [R HV K V], `initial_state` (None: zeros) before each sequence's first: S_{p+1} = M_p S_p + N_p.

    M [R HV K K]; [R HV K] where it is diagonal, [R HV 1] where its decays are one. reverse: from each sequence's last,
    S_{p-1} = M_pᵀ S_p + N_p. into: where S is written; when: nothing is written while it is 0.
    table: has the initial states in slots, and is only read.
    """
    _, HV, K, V = N.shape
    S = torch.empty_like(N) if into is None else into
    slots = (NO_TABLE if table is None else table.arguments())[: len(SLOTS)]
    given, when = (None if x is None else x.contiguous() for x in (initial_state, when))
    given = given if table is None else table.state
    decays = 0 if M.dim() == 4 else M.shape[2]
    constants = fix_up_constants(config, N.dtype, K, V, decays) | {"GIVEN": int(given is not None), "REVERSE": int(reverse)}
    constants["WHEN"] = int(when is not None)
    programs = (len(first) - 1) * HV * cdiv(V, constants["BV"])
    if programs:
        run(fix_up_kernel, (programs,), M, N, given, S, when, first, *slots, HV, **constants)
    return S


@triton.jit(do_not_specialize=["N", "R", "length"])
def segments_kernel(p_cum, p_segments, p_of, p_first, p_split, N, R, length, BLK: tl.constexpr, BN: tl.constexpr):
    """Of R segments of at most `length` chunks. Every program goes over all sequences: those whose segments end at or before one are before
    its own."""
    i = tl.program_id(0) * BLK + tl.arange(0, BLK)
    o_n = tl.arange(0, BN)
    own = tl.zeros([BLK], tl.int32)
    row = tl.zeros([BLK], tl.int32)  # its sequence's first segment
    segments = 0
    for n in range(0, N, BN):
        inside = n + o_n < N
        begins = tl.load(p_cum + n + o_n, mask=inside, other=0)
        ends = tl.load(p_cum + n + o_n + 1, mask=inside, other=0)
        count = tl.maximum((ends - begins + length - 1) // length, 1)
        last = segments + tl.cumsum(tl.where(inside, count, 0), 0)
        if tl.program_id(0) == 0:
            tl.store(p_first + 1 + n + o_n, last, mask=inside)
        before = (last[None, :] <= i[:, None]) & inside[None, :]
        own += tl.sum(before.to(tl.int32), 1)
        row = tl.maximum(row, tl.max(tl.where(before, last[None, :], 0), 1))
        segments = tl.max(last, 0)
    if tl.program_id(0) == 0:
        tl.store(p_first, 0)
    begin = tl.load(p_cum + own)  # of none: where the last sequence ends
    chunks = tl.where(own < N, tl.load(p_cum + own + 1, mask=own < N, other=0) - begin, 0)
    P = tl.maximum((chunks + length - 1) // length, 1)
    wide = tl.cast(chunks, tl.int64)
    at = begin + ((wide * (i - row) + P - 1) // P).to(tl.int32)
    to = begin + ((wide * (i - row + 1) + P - 1) // P).to(tl.int32)
    tl.store(p_segments + i, at, mask=i <= R)
    tl.store(p_of + i, own, mask=i <= R)
    tl.store(p_split + 2 * i, at, mask=i < R)
    tl.store(p_split + 2 * i + 1, tl.where(P > 1, to, at), mask=i < R)


@triton.jit
def sequence_of(p_of, i):
    """The sequence of segment i, and whether it is the last of it (`Segments.of`); without p_of segments are sequences."""
    own = i
    last = own == i
    if p_of is not None:
        own = tl.load(p_of + i)
        last = tl.load(p_of + i + 1) != own
    return own, last


@triton.jit
def only_one(p_of, i):
    """Whether segment i is all of its sequence."""
    own, last = sequence_of(p_of, i)
    return last & (tl.load(p_of + i - 1, mask=i > 0, other=-1) != own)


@triton.jit
def load_state(p, i_k, o_v, K: tl.constexpr, V: tl.constexpr, KB: tl.constexpr):
    """Transposed, [BV KB] from row i_k of [K V]."""
    o_k = i_k + tl.arange(0, KB)
    return tl.load(p + o_k[None, :] * V + o_v[:, None], mask=(o_k < K)[None, :] & (o_v < V)[:, None], other=0.0)


@triton.jit
def store_state(p, b, i_k, o_v, K: tl.constexpr, V: tl.constexpr, KB: tl.constexpr):
    """The inverse of `load_state`."""
    o_k = i_k + tl.arange(0, KB)
    tl.store(p + o_k[None, :] * V + o_v[:, None], b, mask=(o_k < K)[None, :] & (o_v < V)[:, None])


@triton.jit(do_not_specialize=["slot_stride", "HV"])
def fix_up_kernel(
    p_M, p_N, p_initial_state, p_S, p_when, p_first, p_slots, p_fresh, p_power, slot_stride, HV,
    K: tl.constexpr, V: tl.constexpr, DECAYS: tl.constexpr, KB: tl.constexpr, BV: tl.constexpr, GIVEN: tl.constexpr,
    REVERSE: tl.constexpr, WHEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One sequence, value head and BV value columns. DECAYS: numbers of M, if it is diagonal. Where a tile of keys follows from itself, S
    stays in registers; else it passes through memory: rows of registers cannot be taken apart."""
    ALONE: tl.constexpr = DECAYS > 0 or KB >= K
    if WHEN:
        if tl.load(p_when) == 0:
            return
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV * BV
    i_nh = tl.program_id(0) // NV
    n, h = i_nh // HV, i_nh % HV
    ACC: tl.constexpr = p_S.dtype.element_ty
    o_v = i_v + tl.arange(0, BV)
    step = HV
    first = tl.load(p_first + n)
    P = tl.load(p_first + n + 1) - first
    i_sh = tl.cast(first, tl.int64) * HV + h
    if REVERSE:
        i_sh += tl.cast(P - 1, tl.int64) * HV
        step = -HV
    for i_k in tl.static_range(0, K, KB):
        S = tl.zeros([BV, KB], ACC)
        if GIVEN and slot_stride is None:
            S = load_state(p_initial_state + tl.cast(i_nh, tl.int64) * (K * V), i_k, o_v, K, V, KB).to(ACC)
        if slot_stride is not None:
            slot, resumed = slot_of(p_slots, p_fresh, n)
            _, inverse = power_of(p_power, i_nh)
            p_slot = p_initial_state + slot * slot_stride + h * (K * V)
            S = load_state(p_slot, i_k, tl.where(resumed, o_v, V), K, V, KB).to(ACC) * inverse
        store_state(p_S + i_sh * (K * V), S, i_k, o_v, K, V, KB)
        if ALONE:
            i = i_sh
            o_k = i_k + tl.arange(0, KB)
            for _ in tl.range(1, P, num_stages=2):
                b_N = load_state(p_N + i * (K * V), i_k, o_v, K, V, KB)
                if DECAYS:
                    o_decay = o_k if DECAYS > 1 else 0 * o_k
                    S = S * tl.load(p_M + i * DECAYS + o_decay, mask=o_k < K, other=0.0)[None, :] + b_N
                else:
                    o_M = o_k[:, None] * K + o_k[None, :]
                    b_M = tl.load(p_M + i * (K * K) + o_M, mask=(o_k < K)[:, None] & (o_k < K)[None, :], other=0.0)
                    S = tl.dot(S, b_M if REVERSE else tl.trans(b_M), b_N, input_precision=PRECISION, out_dtype=ACC)
                i += step
                store_state(p_S + i * (K * V), S, i_k, o_v, K, V, KB)
    if not ALONE:
        ALL: tl.constexpr = 256 if K > 128 else 128
        # loads of S must not be issued ahead of the stores that they read
        for _ in tl.range(1, P, num_stages=1):
            tl.debug_barrier()
            after = load_state(p_N + i_sh * (K * V), 0, o_v, K, V, ALL)
            for i_from in tl.static_range(0, K, KB):
                o_from, o_to = i_from + tl.arange(0, KB), tl.arange(0, ALL)
                p_here, b_S = p_M + i_sh * (K * K), load_state(p_S + i_sh * (K * V), i_from, o_v, K, V, KB)
                inside = (o_from < K)[:, None] & (o_to < K)[None, :]
                if REVERSE:
                    b_M = tl.load(p_here + o_from[:, None] * K + o_to[None, :], mask=inside, other=0.0)
                else:
                    b_M = tl.load(p_here + o_to[None, :] * K + o_from[:, None], mask=inside, other=0.0)
                after = tl.dot(b_S, b_M, after, input_precision=PRECISION, out_dtype=ACC)
            i_sh += step
            store_state(p_S + i_sh * (K * V), after, 0, o_v, K, V, ALL)


def fix_up_constants(config: LaunchConfig, dtype: torch.dtype, K: int, V: int, decays: int) -> Constants:
    """Tiles of 16 values: as many programs as there can be, and products that are not Hopper's asynchronous ones. All keys in one tile, up
    to 128 of float32 from Hopper on: 72 KiB on chip. What is wider takes the registers of eight warps."""
    # errors of M and S add up over the segments: float32 as three TF32 products
    precision = "ieee" if dtype == torch.float64 else "tf32x3"
    KB = max(next_power_of_2(K), 16)
    if decays or KB > 128 or dtype == torch.float64 or not config.tma:
        KB = min(KB, 64)
    tiles = {"KB": KB, "BV": 16, "PRECISION": precision, "num_warps": 8 if K > 64 and not decays else 4, "num_stages": 1}
    return {"K": K, "V": V, "DECAYS": decays, **tiles}


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """`segments_kernel`; `fix_up_kernel` forward and backward, of decays too, and forward from a slot table."""
    wide = "*fp64" if dtype == torch.float64 else "*fp32"
    signature = dict.fromkeys(("p_cum", "p_segments", "p_of", "p_first", "p_split"), "*i32")
    signature |= dict.fromkeys(("N", "R", "length"), "i32")
    cases = [Case(segments_kernel, signature, {"BLK": SEGMENTS, "BN": SEQUENCES}, {"num_warps": 4})]
    for decays, reverse in ((1, 0), (K, 1), (0, 0), (0, 1)):
        constants = fix_up_constants(config, torch.float64 if dtype == torch.float64 else torch.float32, K, V, decays)
        constants |= {"GIVEN": 1, "REVERSE": reverse, "WHEN": 1}
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
        signature = dict.fromkeys(("p_M", "p_N", "p_initial_state", "p_S"), wide)
        signature |= {"p_when": "*i32", "p_first": "*i32", "HV": "i32"}
        cases.append(Case(fix_up_kernel, signature, constants | dict.fromkeys(SLOTS), options))
    on_table = constants | {"REVERSE": 0}
    cases.append(Case(fix_up_kernel, signature | SLOTS, on_table, options))
    return cases
