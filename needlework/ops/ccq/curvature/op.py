"""CCQ in Triton: `clean`, and the custom ops needlework::ccq_triton, _fwd and _bwd behind it.

The forward saves Σq, the centred keys, their scores and a few numbers a token; the backward makes the covariances again. C is
symmetric by contract, and so is its gradient here.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from needlework.ops.ccq.curvature.intra import ROWS, arguments, constants, intra, means, sums
from needlework.ops.ccq.curvature.scan import walk
from needlework.ops.ccq.state import CurvatureState
from needlework.ops.common.alignment import Alignment
from needlework.ops.common.kernels.tile import block, token_tile
from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.runtime.custom_op import backward_operator, differentiable, fake, operator, step_operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import Constants, LaunchConfig, launch_config
from needlework.ops.runtime.precompile import kind, meta, precompile, run
from needlework.ops.slots.rows import Slots
from needlework.ops.slots.table import check_contiguous, start_anew

ENGINE = "ccq/curvature"
NO_STATE = None, None, None


def clean(
    q: Tensor, k: Tensor, eta: Tensor, g: Tensor | None, state: CurvatureState | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, CurvatureState]:
    """q, k [B T H K], eta [B T HV], g [B T H] or None, contiguous -> q̃ [B T HV K] and the final state, float32 or wider."""
    given = (q, k, eta, g, *(state or NO_STATE))
    differentiable = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    cleaned, *final = (ccq_triton_fwd if differentiable else ccq_triton)(*given, cu_seqlens)
    return cleaned, CurvatureState(*final[:3])


class _Line(NamedTuple):
    """What every launch is given: the sequences as chunks, the sizes, the config, where tensors are made."""

    at: Alignment
    config: LaunchConfig
    B: int
    H: int
    HV: int
    K: int
    dtype: torch.dtype
    device: torch.device
    fill: Tensor | None  # [chunks] int32: real tokens of each; packed
    gated: bool
    packed: bool

    @property
    def C(self) -> int:
        return self.config.launch["shared"]["C"]

    @property
    def NCB(self) -> int:
        """Chunks of a batch row."""
        return -(-self.at.T // self.C)

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def scaled(self) -> bool:
        return self.dtype == torch.float16

    def constants(self, name: str, **flags: int | None) -> Constants:
        flags = {"GATED": self.gated, "PACKED": self.packed} | flags
        return constants(self.config, name, self.dtype, self.H, self.HV, self.K, **flags)

    def tile(self, x: Tensor, columns: int) -> Tensor | TensorDescriptor:
        """x [B T H D] as walks take it: tiles of a chunk's tokens and `columns` of D."""
        return token_tile(x, self.C, columns) if self.config.tma else x

    def block(self, x: Tensor, rows: int, columns: int) -> Tensor | TensorDescriptor:
        """x [chunks H M M], likewise."""
        return block(x, rows, columns) if self.config.tma else x

    def empty(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """Numbers of each chunk and key head."""
        return torch.empty(self.B * self.NCB, self.H, *sizes, dtype=dtype or self.wide, device=self.device)

    def launch(self, kernel: JITFunction, settings: Constants, *given: object, each: int = 1) -> None:
        """`kernel` over chunks and key heads, `each` programs for one."""
        run(kernel, (self.B * self.NCB * self.H * each,), *given, self.at.T, self.NCB, **arguments(kernel, settings))

    def hands(self, settings: Constants, slots: int, side: int = 0) -> tuple[Tensor, Tensor]:
        """Where a cut chain hands on BV rows of its state and `side` numbers more each, and whether it did."""
        sizes = slots, settings["BV"], settings["NK"] * settings["KB"] + side
        hand = torch.empty(sizes, dtype=self.wide, device=self.device)
        return hand, torch.zeros(slots, dtype=torch.int32, device=self.device)

    def chains(self, settings: Constants) -> int:
        return self.at.N * self.H * -(-self.K // settings["BV"])


class CcqInputs(NamedTuple):
    """A call's tensors of tokens; their gradients come back as `CcqInputs` too."""

    q: Tensor  # [B T H K]
    k: Tensor  # [B T H K]
    eta: Tensor  # [B T HV]
    g: Tensor | None  # [B T H]


class _Saved(NamedTuple):
    """What the forward keeps for the backward, over aligned tokens."""

    Sq: Tensor  # [B T H K] Σq
    kc: Tensor  # [B T H K] k*
    P: Tensor  # [chunks H C C]
    E: Tensor  # [chunks H ROWS C]: intra.py's `tokens`
    mean: Tensor  # [chunks H K] before each chunk
    step: Tensor  # [chunks H K] from it to the chunk's own
    n: Tensor  # [chunks H] before each chunk
    mass: Tensor  # [chunks H] of each chunk
    cum: Tensor
    G: Tensor | None = None  # [chunks H 2 C], gated
    fill: Tensor | None = None  # packed
    place: Tensor | None = None


def _line(inputs: CcqInputs, packed: bool, at: Alignment, fill: Tensor | None, chosen: LaunchConfig) -> _Line:
    q, HV, gated = inputs.q, inputs.eta.shape[2], inputs.g is not None
    B, _, H, K = q.shape
    return _Line(at, chosen, B, H, HV, K, q.dtype, q.device, fill, gated, packed)


def _fill(at: Alignment, cu_seqlens: Tensor, C: int) -> Tensor:
    """[chunks] int32: real tokens of each chunk; 0 past the last sequence."""
    chunk = torch.arange(at.T // C, device=at.cum.device)
    n = torch.searchsorted(at.cum, chunk, right=True) - 1
    lengths = torch.nn.functional.pad(cu_seqlens.to(chunk).diff(), (0, 1))
    return (lengths[n] - (chunk - at.cum[n]) * C).clamp(0, C).to(torch.int32)


@operator
def ccq_triton(
    inputs: CcqInputs, initial_state: CurvatureState | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, CurvatureState]:
    """q̃ and the final state. An operator of its own: results that are not there cost the host as much as a launch."""
    return _call(inputs, initial_state, cu_seqlens, save=False)[:2]


@step_operator("table")
def ccq_triton_slots(
    inputs: CcqInputs, table: CurvatureState, slots: Tensor | None, fresh: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """q̃; what the sequences hold in the table advances in place.

    The walk reads and writes C in its slots; kernels are given rows of mean and n, which are small. No number is read back: cu_seqlens
    rises from 0 to the tokens that there are, and C is symmetric, by contract.
    """
    check_contiguous(**table._asdict())
    q, (C, mean, n) = inputs.q, table
    if not q.numel():
        start_anew(table, slots, fresh, cu_seqlens, q)
        return q.new_empty(*inputs.eta.shape, q.shape[-1])
    own = Slots.of(C, slots, fresh, cu_seqlens, len(q))
    state = CurvatureState(C, own.read(mean), own.read(n))
    cleaned, final, _ = _call(inputs, state, cu_seqlens, save=False, own=own)
    own.clear(C)
    own.write(mean, final.mean)
    own.write(n, final.n)
    return cleaned


@operator
def ccq_triton_fwd(
    inputs: CcqInputs, initial_state: CurvatureState | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, CurvatureState, _Saved]:
    """q̃, the final state, and what the backward takes."""
    cleaned, final, kept = _call(inputs, initial_state, cu_seqlens, save=True)
    assert kept is not None  # saved
    return cleaned, final, kept


def _call(
    inputs: CcqInputs, state: CurvatureState | None, cu_seqlens: Tensor | None, *, save: bool, own: Slots | None = None
) -> tuple[Tensor, CurvatureState, _Saved | None]:
    """`_forward` of tokens that lie as the caller has them. own: C is a table."""
    q, eta = inputs.q, inputs.eta
    if cu_seqlens is not None and own is None:
        check_cu_seqlens(cu_seqlens, *q.shape[:2])
    B, T, _, K = q.shape
    chosen = launch_config(ENGINE, q.device, q.dtype, K, K)
    at = Alignment.of(cu_seqlens, B, T, chosen.launch["shared"]["C"], q.device)
    packed = cu_seqlens is not None
    fill = _fill(at, cu_seqlens, chosen.launch["shared"]["C"]) if packed else None
    line = _line(inputs, packed, at, fill, chosen)
    if state is not None and own is None:
        state = CurvatureState(*each(Tensor.contiguous, *state))
    if q.numel() == 0:
        return q.new_empty(*eta.shape, K), _untouched(line, state), _no_chunk(q, line)
    tokens = CcqInputs(*each(at.align, *inputs))
    key = ENGINE, chosen.name, kind(*tokens, *(state or NO_STATE)), packed, save, own and own.kind()
    precompile(q.device, key, lambda: _launches(tokens, state, line, save, own))
    cleaned, final, kept = _forward(tokens, state, line, save, own)
    return at.restore(cleaned), final, kept


def _launches(tokens: CcqInputs, state: CurvatureState | None, line: _Line, save: bool, own: Slots | None) -> None:
    """What a call and its backward launch, on meta tensors."""
    line, tokens = line._replace(device=torch.device("meta")), CcqInputs(*meta(*tokens))
    state, own = None if state is None else CurvatureState(*meta(*state)), None if own is None else own.meta()
    cleaned, final, kept = _forward(tokens, state, line, save, own)
    if kept is not None:
        C = None if state is None else state.C
        _backward_of(torch.empty_like(cleaned), None, None, None, tokens, C, final.n, kept, line)


def _forward(
    tokens: CcqInputs, state: CurvatureState | None, line: _Line, save: bool, own: Slots | None
) -> tuple[Tensor, CurvatureState, _Saved | None]:
    q, k, eta, g = tokens
    H, K, N = line.H, line.K, line.at.N
    settings = line.constants("sums")
    total, mass = line.empty(K), line.empty()
    G = line.empty(2, line.C) if line.gated else None
    tiles = -(-K // settings["BD"])
    line.launch(sums, settings, k, g, line.fill, total, mass, G, each=tiles)

    wide = {"dtype": line.wide, "device": line.device}
    if own is None or state is None:
        of_table, stride, final_C = (None, None), None, _final_place(line, None if state is None else state.C)
    else:
        of_table, stride, final_C = (own.slots, own.fresh), own.stride, state.C
    final = CurvatureState(final_C, torch.empty(N, H, K, **wide), torch.empty(N, H, **wide))
    initial = NO_STATE if state is None else state
    mean0, step, n0 = line.empty(K), line.empty(K), line.empty()
    settings = line.constants("means", INIT=state is not None)
    programs = N * H * -(-K // settings["BD"])
    chunks = mean0, step, n0
    given = total, mass, G, *initial[1:], *chunks, *final[1:], line.at.cum
    run(means, (programs,), *given, **arguments(means, settings))

    kc, P, E = torch.empty_like(k), line.empty(line.C, line.C, dtype=line.dtype), line.empty(ROWS.value, line.C)
    lam = line.empty(line.HV // H, line.C)
    line.launch(intra, line.constants("intra"), q, k, eta, G, line.fill, mean0, step, n0, mass, kc, P, E, lam)

    cleaned = q.new_empty(*eta.shape, K)
    Sq = torch.empty_like(q) if save else None
    settings = line.constants("walk", INIT=state is not None, SAVE=save, STRIDE=stride)
    KB, BV = settings["KB"], settings["BV"]
    slots = min(settings["NP"], line.chains(settings))
    run(
        walk, (slots,),
        line.tile(q, KB), line.tile(kc, KB), line.tile(kc, BV), line.tile(q, BV), line.block(P, line.C, line.C), line.tile(cleaned, BV),
        None if Sq is None else line.tile(Sq, BV), E, lam, G, n0, step, initial[0], final[0], *of_table, line.at.cum,
        *line.hands(settings, slots), line.at.T, line.NCB, N, **arguments(walk, settings),
    )  # fmt: skip
    fill, place = (line.fill, line.at.place) if line.packed else (None, None)
    kept = None if Sq is None else _Saved(Sq, kc, P, E, mean0, step, n0, mass, line.at.cum, G, fill, place)
    return cleaned, final, kept


def _final_place(line: _Line, C: Tensor | None) -> Tensor:
    """Where the final C goes; a packed sequence may be empty, and no chain writes its own."""
    if line.packed and C is not None:
        return C.to(line.wide, copy=True)
    make = torch.zeros if line.packed else torch.empty
    return make(line.at.N, line.H, line.K, line.K, dtype=line.wide, device=line.device)


def _untouched(line: _Line, state: CurvatureState | None) -> CurvatureState:
    """The final state where there is no token."""
    if state is not None:
        return CurvatureState(*each(lambda x: x.to(line.wide, copy=True), *state))
    sizes = (line.K, line.K), (line.K,), ()
    C, mean, n = (torch.zeros(line.at.N, line.H, *size, dtype=line.wide, device=line.device) for size in sizes)
    return CurvatureState(C, mean, n)


def _no_chunk(q: Tensor, line: _Line) -> _Saved:
    """What is kept where there is no token."""
    K, C = line.K, line.C
    Sq, kc = (q.new_empty(line.B, line.at.T, line.H, K) for _ in range(2))
    chunks = (
        line.empty(C, C, dtype=line.dtype),
        line.empty(ROWS.value, C),
        line.empty(K),
        line.empty(K),
        line.empty(),
        line.empty(),
    )
    G = line.empty(2, C) if line.gated else None
    fill, place = (line.fill, line.at.place) if line.packed else (None, None)
    return _Saved(Sq, kc, *chunks, line.at.cum, G, fill, place)


@fake(ccq_triton)
def _results(
    inputs: CcqInputs, initial_state: CurvatureState | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, CurvatureState]:
    q, (H, K) = inputs.q, inputs.q.shape[2:]
    N = len(q) if cu_seqlens is None else len(cu_seqlens) - 1
    number = lambda *sizes: q.new_empty(*sizes, dtype=torch.promote_types(q.dtype, torch.float32))
    state = CurvatureState(number(N, H, K, K), number(N, H, K), number(N, H))
    return q.new_empty(*inputs.eta.shape, K), state


@fake(ccq_triton_slots)
def _(inputs: CcqInputs, *_):
    return inputs.q.new_empty(*inputs.eta.shape, inputs.q.shape[-1])


@fake(ccq_triton_fwd)
def _(
    inputs: CcqInputs, initial_state: CurvatureState | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, CurvatureState, _Saved]:
    q, (B, T, H, K) = inputs.q, inputs.q.shape
    chunk = launch_config(ENGINE, q.device, q.dtype, K, K).launch["shared"]["C"]
    packed, N = cu_seqlens is not None, B if cu_seqlens is None else len(cu_seqlens) - 1
    wide = torch.promote_types(q.dtype, torch.float32)

    def number(*sizes: int, dtype: torch.dtype = wide) -> Tensor:
        return q.new_empty(*sizes, dtype=dtype)

    aligned = (T // chunk + N) * chunk if packed else T
    rows = B * (-(-aligned // chunk))
    kept = _Saved(
        Sq=q.new_empty(B, aligned, H, K),
        kc=q.new_empty(B, aligned, H, K),
        P=q.new_empty(rows, H, chunk, chunk),
        E=number(rows, H, ROWS.value, chunk),
        mean=number(rows, H, K),
        step=number(rows, H, K),
        n=number(rows, H),
        mass=number(rows, H),
        cum=number(N + 1, dtype=torch.int32),
        G=None if inputs.g is None else number(rows, H, 2, chunk),
        fill=number(rows, dtype=torch.int32) if packed else None,
        place=number(T, dtype=torch.int64) if packed else None,
    )
    return *_results(inputs, initial_state, cu_seqlens), kept


@backward_operator
def ccq_triton_bwd(
    dcleaned: Tensor | None, dC: Tensor | None, dmean: Tensor | None, dn: Tensor | None, inputs: CcqInputs,
    initial_state: CurvatureState | None, cu_seqlens: Tensor | None, n1: Tensor, kept: _Saved,
) -> tuple[CcqInputs, CurvatureState | None]:  # fmt: skip
    """Gradients of `inputs` and of the initial state. n1: n after the last token."""
    q, g, K = inputs.q, inputs.g, inputs.q.shape[-1]
    chosen = launch_config(ENGINE, q.device, q.dtype, K, K)
    if kept.P.shape[-1] != chosen.launch["shared"]["C"]:
        raise RuntimeError(
            f"{ENGINE}: the forward ran with chunks of {kept.P.shape[-1]}, the config for the backward has others"
        )
    if q.numel() == 0:
        return CcqInputs(*each(torch.zeros_like, *inputs)), _nothing_read(initial_state, dC, dmean, dn)
    at = Alignment(kept.cum, len(kept.cum) - 1, kept.Sq.shape[1], 0, kept.place)
    line = _line(inputs, cu_seqlens is not None, at, kept.fill, chosen)
    dcleaned = q.new_zeros(*inputs.eta.shape, K) if dcleaned is None else dcleaned.contiguous()
    # the kernels read sums of g that the forward has kept
    tokens = CcqInputs(*each(at.align, inputs.q, inputs.k, inputs.eta), g)
    state = None if initial_state is None else CurvatureState(*each(Tensor.contiguous, *initial_state))
    C = None if state is None else state.C
    found, first, scale = _backward_of(at.align(dcleaned), dC, dmean, dn, tokens, C, n1, kept, line)
    found = CcqInputs(*each(at.restore, *found))
    found = found if g is None or found.g is None else found._replace(g=found.g.to(g.dtype))
    return found, None if state is None or first is None else _first_state(line, scale, first, kept.mean, state, dmean)


def _backward_of(
    dcleaned: Tensor, dC: Tensor | None, dmean: Tensor | None, dn: Tensor | None,
    tokens: CcqInputs, C: Tensor | None, n1: Tensor, kept: _Saved, line: _Line,
) -> tuple[CcqInputs, tuple[Tensor, Tensor, Tensor] | None, Tensor | float]:  # fmt: skip
    """Gradients of aligned tokens; N, r and z before the first where C is given, times the number returned."""
    from needlework.ops.ccq.curvature.backward import adjoint, backward, fold, gate

    q, k, eta, g = tokens
    H, K, width = line.H, line.K, line.C
    scale = _scale(dcleaned, dC, line) if line.scaled else 1.0
    p_scale = scale if line.scaled else None
    deta, y = torch.empty_like(eta), dcleaned
    if line.HV != H or line.scaled:
        y = torch.empty_like(q)
        line.launch(fold, line.constants("fold"), dcleaned, eta, kept.Sq, line.fill, p_scale, y, deta)
    Py, Ey, rsum, zsum = torch.empty_like(kept.P), torch.empty_like(kept.E), line.empty(K), line.empty()
    line.launch(
        adjoint, line.constants("adjoint"),
        q, kept.kc, y, kept.Sq, eta, kept.E, kept.G, line.fill, kept.step, kept.n, kept.mass, Py, Ey, deta, rsum, zsum,
    )  # fmt: skip

    seeds = dC is not None or dmean is not None or dn is not None
    settings = line.constants("backward", SEED=seeds, INIT=C is not None)
    KB, BV, NP = (settings[name] for name in ("KB", "BV", "NP"))
    parts, chains = -(-K // BV), line.chains(settings)
    # a step of dk takes longer: of all programs, NR are its
    NR = min(chains, max(settings["ND"], NP - chains))
    slots = NR + min(chains, NP - NR)
    ends = _seeds(line, scale, dC, dmean, dn, n1) if seeds else None
    first = None if C is None else _first_place(line, ends, parts)
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    reach = grown = z = C0 = N0 = x_C0 = x_N0 = None
    if line.gated:
        reach, grown, z = line.empty(parts, width), line.empty(parts, width), line.empty(parts)
        C0, N0 = (line.empty(K, K, dtype=line.dtype) for _ in range(2))
        x_C0, x_N0 = line.block(C0, BV, KB), line.block(N0, BV, KB)
    run(
        backward, (slots,),
        line.tile(q, KB), line.tile(y, KB), line.tile(kept.kc, KB), line.tile(q, BV), line.tile(y, BV), line.tile(kept.kc, BV),
        line.tile(dcleaned, BV),
        line.block(kept.P, width, width), line.block(Py, width, width), line.tile(dq, BV), line.tile(dk, BV), x_C0, x_N0,
        Ey, kept.G, kept.n, kept.mass, kept.step, rsum, zsum, p_scale, C, reach, *(ends or NO_STATE), grown, z, *(first or NO_STATE),
        line.at.cum, *line.hands(settings, slots, side=2), line.at.T, line.NCB, line.at.N, NR, **arguments(backward, settings),
    )  # fmt: skip

    dg = None
    if g is not None:
        dg = torch.empty(line.B, line.at.T, H, dtype=line.wide, device=line.device)
        settings = line.constants("gate", NZ=parts)
        line.launch(gate, settings, Ey, kept.G, line.fill, kept.n, reach, grown, z, C0, N0, p_scale, dg)
    return CcqInputs(dq, dk, deta, dg), first, scale


def _first_place(line: _Line, ends: tuple[Tensor, ...] | None, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where N, r and z before the first token go; no chain writes those of an empty packed sequence: they are the last's."""
    N, H, K = line.at.N, line.H, line.K
    wide = {"dtype": line.wide, "device": line.device}
    if line.packed and ends is not None:
        z = torch.zeros(N, H, parts, **wide)
        z[..., 0] = ends[2]
        return ends[0].clone(), ends[1].clone(), z
    make = torch.zeros if line.packed else torch.empty
    return make(N, H, K, K, **wide), make(N, H, K, **wide), make(N, H, parts, **wide)


@fake(ccq_triton_bwd)
def _(dcleaned, dC, dmean, dn, inputs: CcqInputs, initial_state: CurvatureState | None, *_):
    state = None if initial_state is None else CurvatureState(*each(torch.empty_like, *initial_state))
    return CcqInputs(*each(torch.empty_like, *inputs)), state


def _scale(dcleaned: Tensor, dC: Tensor | None, line: _Line) -> Tensor:
    """A power of two that brings float16 gradients into range."""
    # 64 above 1: y is divided by n, and the sums of its products stay far below 65504
    top = dcleaned.abs().amax().to(line.wide)
    top = top if dC is None else torch.maximum(top, dC.abs().amax())
    exponent = torch.where(top > 0, 6 - top.log2().ceil(), 0).clamp(-100, 100)
    return exponent.exp2().reshape(1)


def _seeds(
    line: _Line, scale: Tensor | float, dC: Tensor | None, dmean: Tensor | None, dn: Tensor | None, n1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """N, r and z at the end: the final state's gradient in the form that the kernels carry."""
    zeros = lambda *sizes: torch.zeros(*n1.shape, *sizes, dtype=line.wide, device=n1.device)
    N = zeros(line.K, line.K) if dC is None else -scale * (dC + dC.mT)
    r = zeros(line.K) if dmean is None else scale * dmean / n1.clamp(min=1)[..., None]
    z = zeros() if dn is None else scale * dn
    return N.contiguous(), r.contiguous(), z.contiguous()


def _first_state(
    line: _Line, scale: Tensor | float, first: tuple[Tensor, Tensor, Tensor], mean0: Tensor, state: CurvatureState,
    dmean: Tensor | None,
) -> CurvatureState:  # fmt: skip
    """Gradients of the initial state."""
    (N, r, z), (_, mean, n) = first, state
    cum = line.at.cum
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


def _nothing_read(
    state: CurvatureState | None, dC: Tensor | None, dmean: Tensor | None, dn: Tensor | None
) -> CurvatureState | None:
    """Gradients of the initial state where there is no token."""
    if state is None:
        return None
    dC = None if dC is None else (dC + dC.mT) / 2
    pairs = zip(state, (dC, dmean, dn), strict=True)
    return CurvatureState(*(torch.zeros_like(x) if dx is None else dx.to(x.dtype, copy=True) for x, dx in pairs))


def _save(ctx, inputs, output) -> None:
    given, state, cu_seqlens = inputs
    _, final, kept = output
    ctx.save_for_backward(*given, *(NO_STATE if state is None else state), cu_seqlens, final.n, *kept)
    ctx.set_materialize_grads(False)


def _backward(ctx, dcleaned, dC, dmean, dn, *_):
    found = ccq_triton_bwd(dcleaned, dC, dmean, dn, *ctx.saved_tensors)
    return *(dx if needed else None for dx, needed in zip(found, ctx.needs_input_grad, strict=False)), None


differentiable(ccq_triton_fwd, _backward, _save)
