"""CCQ in Triton: `clean`, which picks a launch plan, and the custom ops needlework::ccq_triton_fwd and _bwd behind it.

The forward saves Σq, the scores of q and the chunks' means; the backward recomputes k'. The state's gradient in C is symmetric,
as C is.
"""

import json
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from needlework.ops.ccq import triton_intra
from needlework.ops.ccq.state import CurvatureState
from needlework.ops.ccq.triton_intra import TYPES
from needlework.ops.ccq.triton_reverse import reverse
from needlework.ops.ccq.triton_scan import scan
from needlework.ops.common import launch
from needlework.ops.common.alignment import Alignment
from needlework.ops.common.packing import check_cu_seqlens

ENGINE = "ccq/curvature"


def unsupported(q: Tensor, k: Tensor, eta: Tensor, g: Tensor | None, cu_seqlens: Tensor | None) -> str | None:
    """Why `clean` cannot take these tensors, None if it can."""
    if q.device.type != "cuda" and not launch.interpreted():
        return f"Triton needs a GPU, the tensors are on {q.device}"
    if q.dtype == torch.float64 and not launch.interpreted():
        return "float64 is computed in torch"
    if g is not None and g.requires_grad and torch.is_grad_enabled():
        return "g's gradient is a suffix sum here, whose rounding exceeds the error budget next to strong gates"
    try:
        launch.plan(ENGINE, q.device, q.dtype, q.shape[-1], q.shape[-1])
    except launch.Unsupported as e:
        return str(e)
    return None


def clean(
    q: Tensor, k: Tensor, eta: Tensor, g: Tensor | None, state: CurvatureState, cu_seqlens: Tensor | None
) -> tuple[Tensor, CurvatureState]:
    """q, k [B T H K], eta [B T HV], g [B T H] or None, the state float32 (float64 in the interpreter) -> q̃ [B T HV K], state."""
    plan = launch.plan(ENGINE, q.device, q.dtype, q.shape[-1], q.shape[-1])
    settings = json.dumps({"TMA": int(plan.tma), **plan.launch})
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, eta, g, *state))
    cleaned, *final = torch.ops.needlework.ccq_triton_fwd(
        q, k, eta, g, *state, cu_seqlens, settings, plan.launch["shared"]["C"], save
    )
    return cleaned, CurvatureState(*final[:3])


class _Sizes(NamedTuple):
    """What every launch is given; `at` the sequences as chunks, NCB the chunks of a batch row."""

    at: Alignment
    rows: int
    NCB: int
    H: int
    HV: int
    K: int
    C: int
    launch: dict[str, dict[str, int]]
    tma: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, q: Tensor, HV: int, cu_seqlens: Tensor | None, settings: str, C: int) -> "_Sizes":
        B, T, H, K = q.shape
        at = Alignment.of(cu_seqlens, B, T, C, q.device)
        options = json.loads(settings)
        return cls(at, B, -(-at.T // C), H, HV, K, C, options, bool(options.pop("TMA")), q.dtype)

    @property
    def chunks(self) -> int:
        return self.rows * self.NCB

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def BK(self) -> int:
        return max(16, 1 << (self.K - 1).bit_length())

    def common(self, kernel: str, *names: str, **flags: Any) -> dict[str, Any]:
        """The keyword arguments of one kernel: its sizes by name, its types, its row of the plan."""
        sizes = {"T": self.at.T, "NCB": self.NCB, "H": self.H, "K": self.K, "C": self.C, "BK": self.BK, "ACC": TYPES[self.wide]}
        sizes |= {name: {"HV": self.HV, "OT": TYPES[self.dtype], "TMA": self.tma}[name] for name in names}
        options = self.launch[kernel]
        if "BV" in options:
            options = options | {"BV": min(options["BV"], self.BK)}
        return sizes | flags | options

    def tile(self, x: Tensor, BD: int) -> Tensor | TensorDescriptor:
        """x [B T H D] as the scans take it: tiles of a chunk and BD columns."""
        if not self.tma:
            return x
        x = x.transpose(1, 2)
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, self.C, BD])

    def empty(self, *sizes: int) -> Tensor:
        return torch.empty(self.chunks, self.H, *sizes, dtype=self.wide, device=self.at.cum.device)

    def fill(self, cu_seqlens: Tensor | None) -> Tensor:
        """[chunks] int32: real tokens of each chunk."""
        chunk = torch.arange(self.chunks, device=self.at.cum.device)
        if cu_seqlens is None:
            left = self.at.T - chunk % self.NCB * self.C
        else:
            n = torch.searchsorted(self.at.cum, chunk, right=True) - 1
            lengths = torch.nn.functional.pad(cu_seqlens.to(chunk).diff(), (0, 1))  # chunks past the last sequence: 0
            left = lengths[n] - (chunk - self.at.cum[n]) * self.C
        return left.clamp(0, self.C).to(torch.int32)

    def prefix(self, g: Tensor | None) -> Tensor | None:
        """[chunks H C] float64: gates summed from each chunk's start, in log2 units."""
        if g is None:
            return None
        g = torch.nn.functional.pad(g.double(), (0, 0, 0, self.NCB * self.C - self.at.T))
        return (g.reshape(self.chunks, self.C, self.H).cumsum(1) * math.log2(math.e)).transpose(1, 2).contiguous()


class _Within(NamedTuple):
    """What `intra` computes: k', ω_C (k' − δ), and the chunk's numbers."""

    kc: Tensor
    kd: Tensor
    P: Tensor
    bar: Tensor
    decay: Tensor
    left: Tensor
    inv: Tensor
    d: Tensor
    pairs: Tensor


def _within(sizes: _Sizes, x: Tensor, k: Tensor, G: Tensor | None, fill: Tensor, mean: Tensor, n: Tensor, pairs=()) -> _Within:
    """`intra` on x. pairs: q, q̄ and y·Σq where the gates want a gradient."""
    C, K = sizes.C, sizes.K
    kc, out = torch.empty_like(k), [sizes.empty(C) for _ in range(5)]
    kd = torch.empty_like(k)
    P = torch.empty(sizes.chunks, sizes.H, C, C, dtype=sizes.dtype, device=k.device)
    d, (bar, decay, left, inv, within) = sizes.empty(K), out
    q, qbar, ysq = pairs or (x, bar, bar)
    flags = {"GATED": G is not None, "PAIRS": bool(pairs)}
    triton_intra.intra[(sizes.chunks, sizes.H)](
        x, k, fill if G is None else G, fill, mean, n, q, qbar, ysq, kc, kd, P, bar, decay, left, inv, d, within,
        **sizes.common("intra", "OT", **flags),
    )  # fmt: skip
    return _Within(kc, kd, P, bar, decay, left, inv, d, within)


def _scan(
    sizes: _Sizes, x: Tensor, tiles: Tensor, eta: Tensor, C0: Tensor, within: _Within, out: Tensor, Sx: Tensor, C1: Tensor,
    scale: Tensor, **flags: bool,
) -> None:  # fmt: skip
    settings = sizes.common("scan", "HV", "OT", "TMA", **flags)
    BK, BV = sizes.BK, settings["BV"]
    NV = -(-sizes.K // BV)
    scan[(NV * sizes.H * sizes.at.N,)](
        sizes.tile(x, BK), sizes.tile(within.kc, BK), sizes.tile(within.kc, BV), sizes.tile(within.kd, BV), sizes.tile(tiles, BV),
        sizes.tile(out, BV), sizes.tile(Sx, BV), eta, within.P, within.decay, within.inv, C0, C1, sizes.at.cum, scale,
        **settings,
    )  # fmt: skip


@torch.library.custom_op("needlework::ccq_triton_fwd", mutates_args=())
def ccq_triton_fwd(
    q: Tensor,
    k: Tensor,
    eta: Tensor,
    g: Tensor | None,
    C: Tensor,
    mean: Tensor,
    n: Tensor,
    cu_seqlens: Tensor | None,
    settings: str,
    chunk: int,
    save: bool,
) -> list[Tensor]:
    """q̃, the final C, mean, n; with `save` also Σq, P and q̄ of q, the chunks' μ₀ and n₀, e^{G_t}, 1/n_t (aligned)."""
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *q.shape[:2])
    if q.numel() == 0:
        return [q.new_empty(*eta.shape, q.shape[-1]), C.clone(), mean.clone(), n.clone()]
    sizes = _Sizes.of(q, eta.shape[2], cu_seqlens, settings, chunk)
    q, k, eta = (sizes.at.align(x) for x in (q, k, eta))
    G = None if g is None else sizes.prefix(sizes.at.align(g))
    fill = sizes.fill(cu_seqlens)
    C, mean, n = (x.contiguous() for x in (C, mean, n))
    C1, mean1, n1 = (torch.empty_like(x) for x in (C, mean, n))

    centre, mass, mean0, n0 = sizes.empty(sizes.K), sizes.empty(), sizes.empty(sizes.K), sizes.empty()
    gates = fill if G is None else G
    gated = {"GATED": G is not None}
    triton_intra.sums[(sizes.chunks, sizes.H)](k, gates, fill, centre, mass, **sizes.common("sums", **gated))
    settings_ = sizes.common("means", **gated)
    triton_intra.means[(sizes.at.N, sizes.H, -(-sizes.K // settings_["BK"]))](
        k, gates, centre, mass, sizes.at.cum, mean, n, mean0, n0, mean1, n1, **settings_
    )
    within = _within(sizes, q, k, G, fill, mean0, n0)
    cleaned = q.new_empty(*eta.shape, sizes.K)
    Sq = torch.empty_like(q) if save else q
    _scan(sizes, q, q, eta, C, within, cleaned, Sq, C1, n, BACKWARD=False, SAVE=save, **gated)
    saved = [Sq, within.P, within.bar, mean0, n0, within.decay, within.inv] if save else []
    return [sizes.at.restore(cleaned), C1, mean1, n1, *saved]


@ccq_triton_fwd.register_fake
def _(q, k, eta, g, C, mean, n, cu_seqlens, settings, chunk, save):
    out = [q.new_empty(*eta.shape, q.shape[-1]), *(torch.empty_like(x) for x in (C, mean, n))]
    if save and q.numel() != 0:
        B, T, H, K = q.shape
        chunks = B * (-(-T // chunk)) if cu_seqlens is None else T // chunk + len(cu_seqlens) - 1
        number = C.new_empty(chunks, H, chunk)
        Sq = torch.empty_like(q) if cu_seqlens is None else q.new_empty(1, chunks * chunk, H, K)
        means = C.new_empty(chunks, H, K), C.new_empty(chunks, H)
        P = q.new_empty(chunks, H, chunk, chunk)
        out += [Sq, P, number, *means, torch.empty_like(number), torch.empty_like(number)]
    return out


@torch.library.custom_op("needlework::ccq_triton_bwd", mutates_args=())
def ccq_triton_bwd(
    dcleaned: Tensor,
    dC: Tensor | None,
    dmean: Tensor | None,
    dn: Tensor | None,
    q: Tensor,
    k: Tensor,
    eta: Tensor,
    g: Tensor | None,
    C: Tensor,
    mean: Tensor,
    n: Tensor,
    cu_seqlens: Tensor | None,
    final: list[Tensor],
    saved: list[Tensor],
    settings: str,
    chunk: int,
) -> list[Tensor]:
    """Gradients of q, k, eta, g (no numbers without g), C, mean, n. final: C and n after the last token."""
    sizes = _Sizes.of(q, eta.shape[2], cu_seqlens, settings, chunk)
    at = sizes.at
    C, mean, n = (x.contiguous() for x in (C, mean, n))
    scale = _scale(dcleaned, dC, sizes)
    q, k, dcleaned = (at.align(x) for x in (q, k, dcleaned))
    eta_ = at.align(eta)
    G = None if g is None else sizes.prefix(at.align(g))
    gated = {"GATED": G is not None}
    fill = sizes.fill(cu_seqlens)
    Sq, Pq, qbar, mean0, n0, decay, inv = saved

    y, ysq, deta = torch.empty_like(q), sizes.empty(sizes.C), torch.empty_like(eta_)
    yd = y if G is None else torch.empty_like(q)
    triton_intra.fold[(sizes.chunks, sizes.H)](
        dcleaned, eta_, Sq, decay, inv, scale, y, yd, ysq, deta, **sizes.common("fold", "HV", "OT", **gated)
    )
    within = _within(sizes, y, k, G, fill, mean0, n0, () if G is None else (q, qbar, ysq))
    dq = torch.empty_like(q)
    _scan(sizes, y, dcleaned, eta_, C, within, dq, dq, C, scale, BACKWARD=True, SAVE=False, **gated)

    seeds = dC is not None or dmean is not None or dn is not None
    N1 = C if dC is None else -scale * (dC + dC.mT)
    r1 = torch.zeros_like(mean) if dmean is None else scale * dmean / final[1].clamp(min=1)[..., None]
    z1 = torch.zeros_like(n) if dn is None else scale * dn
    if seeds and dC is None:
        N1 = torch.zeros_like(C)
    settings_ = sizes.common("reverse", "OT", "TMA", SEED=seeds, **gated)
    BK, BV = sizes.BK, settings_["BV"]
    NV = -(-sizes.K // BV)
    dk, N, r, z = torch.empty_like(k), torch.empty_like(C), torch.empty_like(mean), n.new_empty(*n.shape, NV)
    mass = ysq if G is None else ysq.new_empty(NV, *ysq.shape)
    wide = [sizes.tile(x, BK) for x in (q, y, yd, within.kc)]
    tiles = [sizes.tile(x, BV) for x in (q, y, yd, within.kc, dk)]
    numbers = qbar, within.bar, ysq, within.decay, within.left, within.inv, within.d
    reverse[(NV * sizes.H * at.N,)](
        *wide, *tiles, Pq, within.P, *numbers, N1.contiguous(), r1, z1, N, r, z, mass, at.cum, scale, chunks=sizes.chunks,
        **settings_,
    )  # fmt: skip

    dg = q.new_empty(0)
    if G is not None:
        dg = _gate_gradient(sizes, within.pairs + within.left * mass.sum(0), final, dC, dn, scale).to(g.dtype)
    # seen from the initial mean; it is not the first chunk's centre where no mass is behind it
    first = mean0[at.cum[:-1].long().clamp(max=sizes.chunks - 1)]
    x = torch.where((n == 0)[..., None] & (at.cum.diff() > 0)[:, None, None], mean - first, 0)
    dn0 = z.sum(-1) + (x * (r + (N @ x[..., None])[..., 0] * -0.5)).sum(-1)
    dmean0 = n[..., None] * r / scale
    if dmean is not None:
        # without a token the mean passes through, whatever its mass
        dmean0 = torch.where((at.cum.diff() == 0)[:, None, None], dmean, dmean0)
    rows = (at.restore(t) for t in (dq, dk, deta))
    return [*rows, dg, N / (-2 * scale), dmean0, dn0 / scale]


@ccq_triton_bwd.register_fake
def _(dcleaned, dC, dmean, dn, q, k, eta, g, C, mean, n, cu_seqlens, final, saved, settings, chunk):
    dg = q.new_empty(0) if g is None else torch.empty_like(g)
    return [*(torch.empty_like(x) for x in (q, k, eta)), dg, *(torch.empty_like(x) for x in (C, mean, n))]


def _scale(dcleaned: Tensor, dC: Tensor | None, sizes: _Sizes) -> Tensor:
    """A power of two that brings float16 gradients into range; 1 for every other type."""
    if sizes.dtype != torch.float16:
        return torch.ones(1, dtype=sizes.wide, device=dcleaned.device)
    # 64 above 1: y is divided by n, and the sums of its products stay far below 65504
    top = dcleaned.abs().amax().to(sizes.wide)
    top = top if dC is None else torch.maximum(top, dC.abs().amax())
    exponent = torch.where(top > 0, 6 - top.log2().ceil(), 0).clamp(-100, 100)
    return exponent.exp2().reshape(1)


def _gate_gradient(sizes: _Sizes, mass: Tensor, final: list[Tensor], dC, dn, scale: Tensor) -> Tensor:
    """dg [B T H] from what each key's mass changes [chunks H C]: g_t scales every key before t for every reader from t on, and
    a reader does not see a scale of all its keys; but the final state does."""
    mass = mass.transpose(1, 2).reshape(sizes.rows, -1, sizes.H)[:, : sizes.at.T].double() / scale
    whole = torch.zeros_like(final[1], dtype=torch.float64)
    if dC is not None:
        whole = whole + (dC.double() * final[0]).sum((-2, -1))
    if dn is not None:
        whole = whole + dn.double() * final[1]
    after = mass.flip(1).cumsum(1).flip(1)
    if sizes.at.place is None:
        return whole[:, None] - after
    after = torch.nn.functional.pad(after, (0, 0, 0, 1))[0]
    sequence = torch.searchsorted(sizes.at.cum, sizes.at.place // sizes.C, right=True) - 1
    end = sizes.at.cum[sequence + 1].long() * sizes.C
    return (whole[sequence] - after[sizes.at.place] + after[end])[None]


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.settings, ctx.chunk, _ = inputs
    _, C, _, n, *saved = output
    ctx.count = len(tensors)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, C, n, *saved)


def _backward(ctx, grads):
    dcleaned, dC, dmean, dn = grads[:4]
    tensors, (C, n, *saved) = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
    q, _, eta, g, *_ = tensors
    if not saved:  # no tokens
        nothing = [None if x is None else torch.zeros_like(x) for x in tensors[:4]]
        return *nothing, dC, dmean, dn, None, None, None, None
    if dcleaned is None:
        dcleaned = q.new_zeros(*eta.shape, q.shape[-1])
    dq, dk, deta, dg, *dstate = ccq_triton_bwd(dcleaned, dC, dmean, dn, *tensors, [C, n], saved, ctx.settings, ctx.chunk)
    return dq, dk, deta, None if g is None else dg, *dstate, None, None, None, None


ccq_triton_fwd.register_autograd(_backward, setup_context=_setup_context)
