"""Attention over pages as operators of Triton kernels, one for each read-out, and the write of new rows.

No gradient, nothing read back, and grids that follow from shapes: each can be captured in a CUDA graph. Constants are in
paged.launch.json.
"""

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from triton import JITFunction

from needlework.ops.paged.arguments import Bias, Pages, Rows
from needlework.ops.paged.engine import readout
from needlework.ops.paged.engine.attend import attend, merge
from needlework.ops.paged.engine.write import write
from needlework.ops.polar.arguments import Parameters
from needlework.ops.runtime.custom_op import fake, operator, step_operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig, absent, launch_config, split
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import NAMES, TYPES, accumulator, cdiv, next_power_of_2, padded

ENGINE = "paged/paged"
READS = SOFTMAX, DIFFERENTIAL, POLAR = tuple(x.value for x in (readout.SOFTMAX, readout.DIFFERENTIAL, readout.POLAR))
# what a kernel is compiled for -> arguments that it reads with it alone
ONLY_WITH = {
    "PACKED": ("p_ends",),
    "POLAR": ("p_alpha", "p_beta", "p_gamma", "p_base", "p_null", "p_mag"),
    "DIFFERENTIAL": ("p_lam",),
    "SPLIT": ("p_stats", "p_S"),
}
HELD = 32  # page numbers, a lane each and the same in every warp: the sum that picks one needs no other warp
ALL = 2**30  # a window that no sequence fills
NO_BIAS = Bias()


@step_operator("pages")
def paged_write(new: Rows, pages: Rows, rows: Tensor) -> None:
    if len(rows):
        k, v = (x if x[0].is_contiguous() else x.contiguous() for x in (new.k, new.v))
        decay = None if new.decay is None else new.decay.contiguous()
        known = write_constants(k, v, pages)
        run(write, (len(k),), k, v, pages.k, pages.v, rows.contiguous(), decay, pages.decay, **known)


@fake(paged_write)
def _(*_):
    return None


@operator
def paged_softmax(q: Tensor, pages: Pages, scale: float | None, bias: Bias) -> Tensor:
    """o [T Hq V]"""
    slopes, decay = each(Tensor.contiguous, bias.slopes, bias.decay)
    return _launch(q, pages, SOFTMAX, scale=scale, bias=Bias(slopes, decay, bias.pages))[0]


@operator
def paged_difference(q: Tensor, pages: Pages, lam: Tensor, scale: float | None) -> Tensor:
    """o [T Hq V]; lam: a number or [Hq]."""
    return _launch(q, pages, DIFFERENTIAL, lam=lam.contiguous(), scale=scale)[0]


@operator
def paged_direction(q: Tensor, pages: Pages, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """direction [T Hq V], magnitude [T Hq]."""
    direction, magnitude = _launch(q, pages, POLAR, parameters=parameters.map(Tensor.contiguous))
    assert magnitude is not None  # of Polar
    return direction, magnitude


@fake(paged_softmax)
def _(q: Tensor, pages: Pages, *_):
    return q.new_empty(*q.shape[:2], pages.v.shape[3])


@fake(paged_difference)
def _(q: Tensor, pages: Pages, *_):
    return q.new_empty(*q.shape[:2], pages.v.shape[3])


@fake(paged_direction)
def _(q: Tensor, pages: Pages, *_):
    return q.new_empty(*q.shape[:2], pages.v.shape[3]), q.new_empty(q.shape[:2], dtype=accumulator(q.dtype))


class Shape(NamedTuple):
    """Sizes that kernels are compiled for."""

    H: int
    HK: int
    K: int
    V: int
    PG: int
    SK: int  # numbers from page to page
    SV: int

    @classmethod
    def of(cls, q: Tensor, pages: Pages) -> "Shape":
        _, PG, HK, V = pages.v.shape
        return cls(q.shape[1], HK, q.shape[2], V, PG, pages.k.stride(0), pages.v.stride(0))


class Tile(NamedTuple):
    """BT tokens of one sequence are BM rows; `own`: whose constants in the launch table."""

    own: str
    BM: int
    BT: int

    @classmethod
    def of(cls, config: LaunchConfig, shape: Shape, read: int, T: int, N: int | None) -> "Tile":
        """Decode's, N None, has one token. Packed tokens take its few rows too where sequences have no more on average."""
        G = shape.H // shape.HK
        vectors = 2 if read == DIFFERENTIAL else 1
        few = max(vectors * next_power_of_2(G), 16)
        tokens = few // vectors // G
        if N is None:
            return cls("decode", few, 1)
        if T <= N * tokens:
            return cls("decode", few, tokens)
        many = max(config.launch["prefill"]["BM"], few)
        return cls("prefill", many, many // vectors // G)


def _launch(
    q: Tensor,
    pages: Pages,
    read: int,
    parameters: Parameters | None = None,
    lam: Tensor | None = None,
    scale: float | None = None,
    bias: Bias = NO_BIAS,
) -> tuple[Tensor, Tensor | None]:
    """Outputs and magnitudes, which are Polar's alone."""
    shape, T, wide = Shape.of(q, pages), len(q), accumulator(q.dtype)
    vectors = 2 if read == DIFFERENTIAL else 1
    o = q.new_empty(T, shape.H, shape.V)
    magnitude = q.new_empty(T, shape.H, dtype=wide) if read == POLAR else None
    if not o.numel():
        return o, magnitude
    packed = pages.cu_seqlens is not None
    N = len(pages.block_table)
    config = launch_config(ENGINE, q.device, q.dtype, shape.K, shape.V)
    tile = Tile.of(config, shape, read, T, N if packed else None)
    tiles = T // tile.BT + N + 1 if packed else T
    known = constants(config, attend, q.dtype, shape, tile, read, packed=packed, lam=lam, scale=scale)
    BN, least = known["BN"], known["LEAST"]
    NB, W = pages.block_table.shape[1], pages.window or ALL
    room = min(NB * shape.PG, W + tile.BT + BN)  # keys that a tile may see
    # enough programs for the machine, and no split that could never have keys
    splits = max(1, min(config.launch["shared"]["programs"] // (tiles * shape.HK), cdiv(cdiv(room, BN), least)))
    known |= {"SPLIT": int(splits > 1), "SG": 0 if bias.pages is None else bias.pages.stride(0)}
    stats, S = (q.new_empty(T, shape.H, vectors, splits, D, dtype=wide) if splits > 1 else None for D in (3, shape.V))
    q, table, length = q.contiguous(), pages.block_table.contiguous(), pages.length.contiguous()
    ends = None if pages.cu_seqlens is None else pages.cu_seqlens.contiguous()
    extra = *(parameters or (None,) * len(Parameters._fields)), lam
    run(
        attend, (tiles * shape.HK * splits,), q, pages.k, pages.v, table, length, ends, *extra, o, magnitude, stats, S, *bias, N, T,
        NB, W, splits, **known,
    )  # fmt: skip
    if splits > 1:
        known = constants(config, merge, q.dtype, shape, tile, read, packed=packed, lam=lam, scale=scale)
        known["BS"] = max(min(known["BS"] // vectors, next_power_of_2(splits)), 1)
        run(merge, (T * shape.H,), stats, S, length, ends, *extra, o, magnitude, N, T, W, splits, **known)
    return o, magnitude


def constants(
    config: LaunchConfig, kernel: JITFunction, dtype: torch.dtype, shape: Shape, tile: Tile, read: int, *, packed: bool,
    lam: Tensor | None = None, scale: float | None = None,
) -> Constants:  # fmt: skip
    """All that a kernel is compiled for, but whether it is split."""
    own = config.launch[tile.own]
    d = shape.K // 2 if read == DIFFERENTIAL else shape.K
    known = dict(
        shape._asdict(), BM=tile.BM, BT=tile.BT, BK=padded(shape.K), BV=padded(shape.V), READ=read, PACKED=int(packed),
        LAM=int(lam is not None and lam.dim() == 1), SCALE=float(scale or d**-0.5), ACC=TYPES[accumulator(dtype)], OT=TYPES[dtype],
        BN=own["BN"], LEAST=own["LEAST"], HELD=HELD,
    )  # fmt: skip
    launch = {name: x for name, x in own.items() if name != "BM"} if kernel is attend else config.launch["merge"]
    return {name: x for name, x in known.items() if name in kernel.arg_names} | dict(launch)


def write_constants(k: Tensor, v: Tensor, pages: Rows) -> Constants:
    NK, NV = k[0].numel(), v[0].numel()
    NG, SG = (0, 0) if pages.decay is None else (pages.decay.shape[2], pages.decay.stride(0))
    return dict(
        PG=pages.k.shape[1], NK=NK, NV=NV, TK=k.stride(0), TV=v.stride(0), SK=pages.k.stride(0), SV=pages.v.stride(0),
        BK=next_power_of_2(NK), BV=next_power_of_2(NV), NG=NG, SG=SG, BG=next_power_of_2(max(NG, 1)), num_warps=4,
    )  # fmt: skip


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Of four query heads a group, by every read-out, softmax with a bias too: decode and prefill, in splits on pages of 16 tokens and
    unsplit on those of whole tiles; and the write."""
    own, number = NAMES[dtype], "*fp64" if dtype == torch.float64 else "*fp32"
    cases = []
    integers = dict.fromkeys(("p_table", "p_length"), "*i32") | dict.fromkeys(("p_ends", "p_rows"), "*i64")
    integers |= dict.fromkeys(("N", "T", "NB", "W", "splits"), "i32")
    types = dict.fromkeys(("p_q", "p_k", "p_v", "p_o", "p_k_pages", "p_v_pages"), f"*{own}") | integers
    types |= {"p_decay": "*fp64", "p_held": "*fp64"}
    plain, decays = {"p_slopes": None, "p_decay": None, "p_held": None}, {"p_decay": None, "p_held": None}

    def case(kernel, known: Constants) -> None:
        known, options = split(known)
        reads = {"POLAR": known.get("READ") == POLAR, "DIFFERENTIAL": known.get("READ") == DIFFERENTIAL}
        known |= absent(kernel, known | reads, ONLY_WITH)
        signature = {name: types.get(name, number) for name in kernel.arg_names if name not in known}
        cases.append(Case(kernel, signature, known, options))

    reads = *((read, plain) for read in READS), (SOFTMAX, {})
    for (read, bias), packed, (PG, SPLIT) in product(reads, (False, True), ((16, 1), (64, 0))):
        shape = Shape(8, 2, K, V, PG, PG * 2 * K, PG * 2 * V)
        tile = Tile.of(config, shape, read, 4096, 1 if packed else None)
        case(attend, constants(config, attend, dtype, shape, tile, read, packed=packed) | {"SPLIT": SPLIT, "SG": PG * 8} | bias)
        if SPLIT:
            case(merge, constants(config, merge, dtype, shape, tile, read, packed=packed))
    k, v, *pages = (
        torch.empty(*sizes, device="meta") for sizes in ((1, 2, K), (1, 2, V), (1, 16, 2, K), (1, 16, 2, V), (1, 16, 8))
    )
    case(write, write_constants(k, v, Rows(*pages[:2])) | decays)
    case(write, write_constants(k, v, Rows(*pages)))
    return cases
