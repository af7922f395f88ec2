"""The order of the forward's kernels: sums and means of every chunk, the centred keys and scores, the covariance before each segment, where
sequences are cut, the walk of the covariance. Tokens are aligned."""

import torch
from torch import Tensor

from needlework.ops.ccq.arguments import CcqInputs
from needlework.ops.ccq.curvature.intra import ROWS, arguments, intra, means, sums
from needlework.ops.ccq.curvature.operands import NO_STATE, Saved, Task
from needlework.ops.ccq.curvature.scan import walk
from needlework.ops.ccq.curvature.segments import starts
from needlework.ops.ccq.state import CurvatureState
from needlework.ops.runtime.each import each
from needlework.ops.runtime.precompile import run
from needlework.ops.slots.rows import Slots


def forward(
    tokens: CcqInputs, initial_state: CurvatureState | None, task: Task, save: bool, own: Slots | None
) -> tuple[Tensor, CurvatureState, Saved | None]:
    q, k, eta, g = tokens
    H, K, N = task.H, task.K, task.at.N
    settings = task.constants("sums")
    total, mass = task.empty(K), task.empty()
    G = task.empty(2, task.C) if task.gated else None
    tiles = -(-K // settings["BD"])
    task.launch(sums, settings, k, g, task.fill, total, mass, G, each=tiles)

    wide = {"dtype": task.wide, "device": task.device}
    initial_C, *initial_rows = initial_state or NO_STATE
    final_rows = torch.empty(N, H, K, **wide), torch.empty(N, H, **wide)
    mean0, step, n0 = task.empty(K), task.empty(K), task.empty()
    settings = task.constants("means", INIT=initial_state is not None)
    programs = N * H * -(-K // settings["BD"])
    chunks = mean0, step, n0
    given = total, mass, G, *initial_rows, *chunks, *final_rows, task.at.cum
    run(means, (programs,), *given, **arguments(means, settings))

    kc, P, E = torch.empty_like(k), task.empty(task.C, task.C, dtype=task.dtype), task.empty(ROWS.value, task.C)
    eta_chunks = task.empty(task.HV // H, task.C)
    task.launch(intra, task.constants("intra"), q, k, eta, G, task.fill, mean0, step, n0, mass, kc, P, E, eta_chunks)

    cleaned = q.new_empty(*eta.shape, K)
    Sq = torch.empty_like(q) if save else None
    at, segments = task.at, task.segments()
    if segments is not None:
        if own is not None and initial_C is not None:
            initial_C = own.read(initial_C)
        at, initial_C = segments.align, starts(task, segments, kc, E, G, initial_C)
    if own is None or segments is not None or initial_C is None:
        of_table, stride, final_C = (None, None), None, _final_place(task, at.N, initial_C)
    else:
        of_table, stride, final_C = (own.slots, own.fresh), own.stride, initial_C
    settings = task.constants("walk", INIT=initial_C is not None, SAVE=save, STRIDE=stride)
    KB, BV = settings["KB"], settings["BV"]
    slots = min(settings["NP"], at.N * H * -(-K // BV))
    run(
        walk, (slots,),
        task.tile(q, KB), task.tile(kc, KB), task.tile(kc, BV), task.tile(q, BV), task.block(P, task.C, task.C), task.tile(cleaned, BV),
        None if Sq is None else task.tile(Sq, BV), E, eta_chunks, G, n0, step, initial_C, final_C, *of_table, at.cum,
        *task.hands(settings, slots), at.T, task.NCB, at.N, **arguments(walk, settings),
    )  # fmt: skip
    if segments is not None:
        final_C = segments.ended(final_C)
        if own is not None and initial_state is not None:
            own.write(initial_state.C, final_C)
    final = CurvatureState(final_C, *final_rows)
    if Sq is None:
        return cleaned, final, None
    kept = Saved(Sq=Sq, kc=kc, P=P, E=E, mean=mean0, step=step, n=n0, mass=mass, G=G)
    return cleaned, final, kept


def _final_place(task: Task, N: int, C: Tensor | None) -> Tensor:
    """Where the final C of N sequences goes; a packed one may be empty, and no chain writes its own."""
    if task.packed and C is not None:
        return C.to(task.wide, copy=True)
    make = torch.zeros if task.packed else torch.empty
    return make(N, task.H, task.K, task.K, dtype=task.wide, device=task.device)


def untouched(task: Task, state: CurvatureState | None) -> CurvatureState:
    """The final state where there is no token."""
    if state is not None:
        return CurvatureState(*each(lambda x: x.to(task.wide, copy=True), *state))
    sizes = (task.K, task.K), (task.K,), ()
    C, mean, n = (torch.zeros(task.at.N, task.H, *size, dtype=task.wide, device=task.device) for size in sizes)
    return CurvatureState(C, mean, n)


def no_chunk(q: Tensor, task: Task) -> Saved:
    """What is kept where there is no token."""
    K, C = task.K, task.C
    Sq, kc = (q.new_empty(task.B, task.at.T, task.H, K) for _ in range(2))
    return Saved(
        Sq=Sq,
        kc=kc,
        P=task.empty(C, C, dtype=task.dtype),
        E=task.empty(ROWS.value, C),
        mean=task.empty(K),
        step=task.empty(K),
        n=task.empty(),
        mass=task.empty(),
        G=task.empty(2, C) if task.gated else None,
    )
