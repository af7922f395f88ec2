"""The order of the backward's kernels: chunks, what segments begin and end with, where sequences are cut, the two walks, gates; and the
gradient of the state that the walks leave. Tokens are aligned."""

import torch
from torch import Tensor

from needlework.ops.ccq.arguments import CcqInputs
from needlework.ops.ccq.curvature.intra import arguments
from needlework.ops.ccq.curvature.intra_bwd import adjoint, fold, gate
from needlework.ops.ccq.curvature.operands import NO_STATE, Saved, Task
from needlework.ops.ccq.curvature.scan_bwd import backward
from needlework.ops.ccq.curvature.segments import ends, starts
from needlework.ops.ccq.state import CurvatureState
from needlework.ops.runtime.each import each
from needlework.ops.runtime.precompile import run


def gradients(
    dcleaned: Tensor, dC: Tensor | None, dmean: Tensor | None, dn: Tensor | None,
    tokens: CcqInputs, C: Tensor | None, n1: Tensor, kept: Saved, task: Task,
) -> tuple[CcqInputs, tuple[Tensor, Tensor, Tensor] | None, Tensor | float]:  # fmt: skip
    """Gradients of aligned tokens; N, r and z before the first where C is given, times the number returned."""
    q, k, eta, g = tokens
    H, K, width = task.H, task.K, task.C
    scale = _scale(dcleaned, dC, task) if task.scaled else 1.0
    p_scale = scale if task.scaled else None
    deta, y = torch.empty_like(eta), dcleaned
    sums = torch.empty_like(q, dtype=task.wide) if task.HV != H else None
    if sums is not None or task.scaled:
        y = torch.empty_like(q)
        task.launch(fold, task.constants("fold"), dcleaned, eta, kept.Sq, task.fill, p_scale, y, sums, deta)
    Py, Ey, rsum, zsum = torch.empty_like(kept.P), torch.empty_like(kept.E), task.empty(K), task.empty()
    task.launch(
        adjoint, task.constants("adjoint"),
        q, kept.kc, y, kept.Sq, eta, kept.E, kept.G, task.fill, kept.step, kept.n, kept.mass, Py, Ey, deta, rsum, zsum,
    )  # fmt: skip

    still = all(x is None for x in (dC, dmean, dn))
    given = None if still else _seeds(task, scale, dC, dmean, dn, n1)
    at, segments, C0 = task.at, task.segments(), C
    if segments is not None:
        at, C0 = segments.align, starts(task, segments, kept.kc, kept.E, kept.G, C)
        given = ends(task, segments, q, y, Ey, kept, rsum, zsum, given)
    settings = task.constants("backward", SEED=given is not None, INIT=C0 is not None)
    KB, BV, NP = (settings[name] for name in ("KB", "BV", "NP"))
    parts = -(-K // BV)
    chains = at.N * H * parts
    # a step of dk takes longer: of all programs, NR are its
    NR = min(chains, max(settings["ND"], NP - chains))
    slots = NR + min(chains, NP - NR)
    first = None if C0 is None else _first_place(task, at.N, given, parts)
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    reach = grown = z = each_C = each_N = x_C0 = x_N0 = None
    if task.gated:
        reach, grown, z = task.empty(parts, width), task.empty(parts, width), task.empty(parts)
        each_C, each_N = (task.empty(K, K, dtype=task.dtype) for _ in range(2))
        x_C0, x_N0 = task.block(each_C, BV, KB), task.block(each_N, BV, KB)
    run(
        backward, (slots,),
        task.tile(q, KB), task.tile(y, KB), task.tile(kept.kc, KB), task.tile(q, BV), task.tile(y, BV), task.tile(kept.kc, BV),
        task.tile(dcleaned if sums is None else sums, BV),
        task.block(kept.P, width, width), task.block(Py, width, width), task.tile(dq, BV), task.tile(dk, BV), x_C0, x_N0,
        Ey, kept.G, kept.n, kept.mass, kept.step, rsum, zsum, p_scale, C0, reach, *(given or NO_STATE), grown, z, *(first or NO_STATE),
        at.cum, *task.hands(settings, slots, side=2), at.T, task.NCB, at.N, NR, **arguments(backward, settings),
    )  # fmt: skip

    dg = None
    if g is not None:
        dg = torch.empty(task.B, task.at.T, H, dtype=task.wide, device=task.device)
        settings = task.constants("gate", NZ=parts)
        task.launch(gate, settings, Ey, kept.G, task.fill, kept.n, reach, grown, z, each_C, each_N, p_scale, dg)
    if first is not None and segments is not None:
        first = None if C is None else each(segments.begun, *first)
    return CcqInputs(dq, dk, deta, dg), first, scale


def _first_place(task: Task, N: int, given: tuple[Tensor, ...] | None, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where N, r and z before the first token go, of N sequences; no chain writes those of an empty packed one: they are the last's."""
    H, K = task.H, task.K
    wide = {"dtype": task.wide, "device": task.device}
    if task.packed and given is not None:
        z = torch.zeros(N, H, parts, **wide)
        z[..., 0] = given[2]
        return given[0].clone(), given[1].clone(), z
    make = torch.zeros if task.packed else torch.empty
    return make(N, H, K, K, **wide), make(N, H, K, **wide), make(N, H, parts, **wide)


def _scale(dcleaned: Tensor, dC: Tensor | None, task: Task) -> Tensor:
    """A power of two that brings float16 gradients into range."""
    # 64 above 1: y is divided by n, and the sums of its products stay far below 65504
    top = dcleaned.abs().amax().to(task.wide)
    top = top if dC is None else torch.maximum(top, dC.abs().amax())
    exponent = torch.where(top > 0, 6 - top.log2().ceil(), 0).clamp(-100, 100)
    return exponent.exp2().reshape(1)


def _seeds(
    task: Task, scale: Tensor | float, dC: Tensor | None, dmean: Tensor | None, dn: Tensor | None, n1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """N, r and z at the end: the final state's gradient in the form that the kernels carry."""
    zeros = lambda *sizes: torch.zeros(*n1.shape, *sizes, dtype=task.wide, device=n1.device)
    N = zeros(task.K, task.K) if dC is None else -scale * (dC + dC.mT)
    r = zeros(task.K) if dmean is None else scale * dmean / n1.clamp(min=1)[..., None]
    z = zeros() if dn is None else scale * dn
    return N.contiguous(), r.contiguous(), z.contiguous()


def of_first_state(
    task: Task, scale: Tensor | float, first: tuple[Tensor, Tensor, Tensor], mean0: Tensor, state: CurvatureState,
    dmean: Tensor | None,
) -> CurvatureState:  # fmt: skip
    """Gradients of the initial state."""
    (N, r, z), (_, mean, n) = first, state
    cum = task.at.cum
    still = (cum.diff() == 0)[:, None]
    # seen from the initial mean; the first chunk's is another where no mass is behind it
    origin = mean0[cum[:-1].long().clamp(max=len(mean0) - 1)]
    x = torch.where((n == 0)[..., None] & ~still[..., None], mean - origin, 0)
    dn = z.sum(-1) + (x * (r - (N @ x[..., None])[..., 0] / 2)).sum(-1)
    dmean0 = n[..., None] * r / scale
    if dmean is not None:
        # without a token the mean passes through, whatever its mass
        dmean0 = torch.where(still[..., None], dmean, dmean0)
    gradients = N / (-2 * scale), dmean0, dn / scale
    return CurvatureState(*(dx.to(x.dtype).contiguous() for dx, x in zip(gradients, state, strict=True)))


def nothing_read(
    state: CurvatureState | None, dC: Tensor | None, dmean: Tensor | None, dn: Tensor | None
) -> CurvatureState | None:
    """Gradients of the initial state where there is no token."""
    if state is None:
        return None
    dC = None if dC is None else (dC + dC.mT) / 2
    pairs = zip(state, (dC, dmean, dn), strict=True)
    return CurvatureState(*(torch.zeros_like(x) if dx is None else dx.to(x.dtype, copy=True) for x, dx in pairs))
