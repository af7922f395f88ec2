"""The order of the forward's kernels: sums and means of every chunk, the centred keys and scores, the walk of the covariance. Tokens are
aligned."""

import torch
from torch import Tensor

from needlework.ops.ccq.arguments import CcqInputs
from needlework.ops.ccq.curvature.intra import ROWS, arguments, intra, means, sums
from needlework.ops.ccq.curvature.operands import NO_STATE, Line, Saved
from needlework.ops.ccq.curvature.scan import walk
from needlework.ops.ccq.state import CurvatureState
from needlework.ops.runtime.each import each
from needlework.ops.runtime.precompile import run
from needlework.ops.slots.rows import Slots


def forward(
    tokens: CcqInputs, initial_state: CurvatureState | None, line: Line, save: bool, own: Slots | None
) -> tuple[Tensor, CurvatureState, Saved | None]:
    q, k, eta, g = tokens
    H, K, N = line.H, line.K, line.at.N
    settings = line.constants("sums")
    total, mass = line.empty(K), line.empty()
    G = line.empty(2, line.C) if line.gated else None
    tiles = -(-K // settings["BD"])
    line.launch(sums, settings, k, g, line.fill, total, mass, G, each=tiles)

    wide = {"dtype": line.wide, "device": line.device}
    if own is None or initial_state is None:
        of_table, stride, final_C = (None, None), None, _final_place(line, None if initial_state is None else initial_state.C)
    else:
        of_table, stride, final_C = (own.slots, own.fresh), own.stride, initial_state.C
    final = CurvatureState(final_C, torch.empty(N, H, K, **wide), torch.empty(N, H, **wide))
    initial_C, *initial_rows = initial_state or NO_STATE
    mean0, step, n0 = line.empty(K), line.empty(K), line.empty()
    settings = line.constants("means", INIT=initial_state is not None)
    programs = N * H * -(-K // settings["BD"])
    chunks = mean0, step, n0
    given = total, mass, G, *initial_rows, *chunks, *final[1:], line.at.cum
    run(means, (programs,), *given, **arguments(means, settings))

    kc, P, E = torch.empty_like(k), line.empty(line.C, line.C, dtype=line.dtype), line.empty(ROWS.value, line.C)
    eta_chunks = line.empty(line.HV // H, line.C)
    line.launch(intra, line.constants("intra"), q, k, eta, G, line.fill, mean0, step, n0, mass, kc, P, E, eta_chunks)

    cleaned = q.new_empty(*eta.shape, K)
    Sq = torch.empty_like(q) if save else None
    settings = line.constants("walk", INIT=initial_state is not None, SAVE=save, STRIDE=stride)
    KB, BV = settings["KB"], settings["BV"]
    slots = min(settings["NP"], line.chains(settings))
    run(
        walk, (slots,),
        line.tile(q, KB), line.tile(kc, KB), line.tile(kc, BV), line.tile(q, BV), line.block(P, line.C, line.C), line.tile(cleaned, BV),
        None if Sq is None else line.tile(Sq, BV), E, eta_chunks, G, n0, step, initial_C, final.C, *of_table, line.at.cum,
        *line.hands(settings, slots), line.at.T, line.NCB, N, **arguments(walk, settings),
    )  # fmt: skip
    fill, maps = (line.fill, line.at.maps) if line.packed else (None, None)
    if Sq is None:
        return cleaned, final, None
    kept = Saved(Sq=Sq, kc=kc, P=P, E=E, mean=mean0, step=step, n=n0, mass=mass, cum=line.at.cum, G=G, fill=fill, maps=maps)
    return cleaned, final, kept


def _final_place(line: Line, C: Tensor | None) -> Tensor:
    """Where the final C goes; a packed sequence may be empty, and no chain writes its own."""
    if line.packed and C is not None:
        return C.to(line.wide, copy=True)
    make = torch.zeros if line.packed else torch.empty
    return make(line.at.N, line.H, line.K, line.K, dtype=line.wide, device=line.device)


def untouched(line: Line, state: CurvatureState | None) -> CurvatureState:
    """The final state where there is no token."""
    if state is not None:
        return CurvatureState(*each(lambda x: x.to(line.wide, copy=True), *state))
    sizes = (line.K, line.K), (line.K,), ()
    C, mean, n = (torch.zeros(line.at.N, line.H, *size, dtype=line.wide, device=line.device) for size in sizes)
    return CurvatureState(C, mean, n)


def no_chunk(q: Tensor, line: Line) -> Saved:
    """What is kept where there is no token."""
    K, C = line.K, line.C
    Sq, kc = (q.new_empty(line.B, line.at.T, line.H, K) for _ in range(2))
    return Saved(
        Sq=Sq,
        kc=kc,
        P=line.empty(C, C, dtype=line.dtype),
        E=line.empty(ROWS.value, C),
        mean=line.empty(K),
        step=line.empty(K),
        n=line.empty(),
        mass=line.empty(),
        cum=line.at.cum,
        G=line.empty(2, C) if line.gated else None,
        fill=line.fill if line.packed else None,
        maps=line.at.maps if line.packed else None,
    )
