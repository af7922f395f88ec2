"""CCQ in Triton: `clean`, and the custom ops needlework::ccq_triton_fwd and _bwd behind it.

The forward saves Σq, the covariance before every chunk, and a few numbers a token; the backward recomputes the scores. C is
symmetric by contract, and so is its gradient here.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from needlework.ops.ccq import triton_intra
from needlework.ops.ccq.state import CurvatureState
from needlework.ops.ccq.triton_reverse import keys, reverse
from needlework.ops.ccq.triton_scan import read, states
from needlework.ops.common.alignment import Alignment
from needlework.ops.common.launch import Plan, plan
from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.common.triton_tile import block, token_tile

ENGINE = "ccq/curvature"


def clean(
    q: Tensor, k: Tensor, eta: Tensor, g: Tensor | None, state: CurvatureState | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, CurvatureState]:
    """q, k [B T H K], eta [B T HV], g [B T H] or None, contiguous -> q̃ [B T HV K] and the final state, float32 or wider."""
    given = (q, k, eta, g, *(state or (None, None, None)))
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    cleaned, *final = torch.ops.needlework.ccq_triton_fwd(*given, cu_seqlens, save)
    return cleaned, CurvatureState(*final[:3])


class _Walk(NamedTuple):
    """What every launch is given: the sequences as chunks, the sizes, the plan, which tokens are real."""

    at: Alignment
    plan: Plan
    B: int
    NCB: int
    H: int
    HV: int
    K: int
    dtype: torch.dtype
    fill: Tensor
    gated: bool
    packed: bool

    @classmethod
    def of(cls, q: Tensor, HV: int, cu_seqlens: Tensor | None, gated: bool) -> "_Walk":
        B, T, H, K = q.shape
        chosen = plan(ENGINE, q.device, q.dtype, K, K)
        C = chosen.launch["shared"]["C"]
        at = Alignment.of(cu_seqlens, B, T, C, q.device)
        fill = at.cum if cu_seqlens is None else _fill(at, cu_seqlens, C)
        return cls(at, chosen, B, -(-at.T // C), H, HV, K, q.dtype, fill, gated, cu_seqlens is not None)

    @property
    def chunks(self) -> int:
        return self.B * self.NCB

    @property
    def C(self) -> int:
        return self.plan.launch["shared"]["C"]

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def scaled(self) -> bool:
        return self.dtype == torch.float16

    def constants(self, name: str, **flags: bool) -> dict[str, object]:
        flags = {"GATED": self.gated, "PACKED": self.packed, "HALF": self.dtype.itemsize == 2, "SCALED": self.scaled} | flags
        return triton_intra.constants(self.plan, name, self.dtype, self.H, self.HV, self.K, **flags)

    def parts(self, name: str) -> int:
        """Tiles of BV columns that make a state."""
        return -(-self.K // self.constants(name)["BV"])

    def tile(self, x: Tensor, rows: int, columns: int) -> Tensor | TensorDescriptor:
        """x [B T H D] as kernels take it: tiles of `rows` tokens and `columns` of D."""
        return token_tile(x, rows, columns) if self.plan.tma else x

    def state(self, x: Tensor, rows: int, columns: int) -> Tensor | TensorDescriptor:
        """x [chunks H K K], the same."""
        return block(x, rows, columns) if self.plan.tma else x

    def empty(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(self.chunks, self.H, *sizes, dtype=dtype or self.wide, device=self.at.cum.device)


def _fill(at: Alignment, cu_seqlens: Tensor, C: int) -> Tensor:
    """[chunks] int32: real tokens of each chunk; 0 past the last sequence."""
    chunk = torch.arange(at.T // C, device=at.cum.device)
    n = torch.searchsorted(at.cum, chunk, right=True) - 1
    lengths = torch.nn.functional.pad(cu_seqlens.to(chunk).diff(), (0, 1))
    return (lengths[n] - (chunk - at.cum[n]) * C).clamp(0, C).to(torch.int32)


def _launch(kernel, programs: int, walk: _Walk, constants: dict[str, object], *arguments) -> None:
    kernel[(programs,)](*arguments, walk.at.T, walk.NCB, **triton_intra.arguments(kernel, constants))


def _states(walk: _Walk, k: Tensor, g: Tensor | None, C: Tensor | None, mean: Tensor | None, n: Tensor | None):
    """The final C, mean, n; C/n, μ and n before each chunk; G."""
    N, H, K = walk.at.N, walk.H, walk.K
    wide = {"dtype": walk.wide, "device": k.device}
    settings = walk.constants("sums")
    total, mass = walk.empty(K), walk.empty()
    G = walk.empty(2, walk.C) if walk.gated else mass
    programs = walk.chunks * H * -(-K // settings["BD"])
    _launch(triton_intra.sums, programs, walk, settings, k, k if g is None else g, walk.fill, total, mass, G)

    settings = walk.constants("states", INIT=C is not None)
    BT, BV, BK = settings["BT"], settings["BV"], settings["BK"]
    final = torch.empty(N, H, K, K, **wide), torch.empty(N, H, K, **wide), torch.empty(N, H, **wide)
    C0, mean0, n0 = walk.empty(K, K, dtype=walk.dtype), walk.empty(K), walk.empty()
    initial = final if C is None else (C, mean, n)
    _launch(
        states, walk.parts("states") * H * N, walk, settings,
        walk.tile(k, BT, BK), walk.tile(k, BT, BV), k, walk.state(C0, BK, BV), G, walk.fill, total, mass, *initial, *final, mean0, n0,
        walk.at.cum,
    )  # fmt: skip
    return final, C0, mean0, n0, G


@torch.library.custom_op("needlework::ccq_triton_fwd", mutates_args=())
def ccq_triton_fwd(
    q: Tensor, k: Tensor, eta: Tensor, g: Tensor | None, C: Tensor | None, mean: Tensor | None, n: Tensor | None,
    cu_seqlens: Tensor | None, save: bool,
) -> list[Tensor]:  # fmt: skip
    """q̃, the final C, mean, n; with `save` also, of aligned tokens: Σq, before each chunk C/n, μ, n, then q·μ_t, q·(μ_t − μ₀),
    1/n_t, and G."""
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *q.shape[:2])
    walk = _Walk.of(q, eta.shape[2], cu_seqlens, g is not None)
    if C is not None:
        C, mean, n = (x.contiguous() for x in (C, mean, n))
    if q.numel() == 0:
        return [q.new_empty(*eta.shape, walk.K), *_untouched(walk, C, mean, n), *(_no_chunk(q, walk) if save else [])]
    q, k, eta = (walk.at.align(x) for x in (q, k, eta))
    g = None if g is None else walk.at.align(g)
    final, C0, mean0, n0, G = _states(walk, k, g, C, mean, n)

    cleaned = q.new_empty(*eta.shape, walk.K)
    Sq, bar, rel, inv = (torch.empty_like(q), *(walk.empty(walk.C) for _ in range(3))) if save else (q, n0, n0, n0)
    settings = walk.constants("read", BACKWARD=False, SAVE=save)
    wide, narrow = _read_tiles(walk, settings)
    _launch(
        read, walk.chunks * walk.H, walk, settings,
        narrow(q, "BD"), narrow(k, "BD"), narrow(q, "BD"), narrow(q, "BK"), narrow(k, "BV"), narrow(q, "BV"), narrow(q, "BV"),
        narrow(cleaned, "BV"), narrow(Sq, "BV"), wide(C0), eta, G, walk.fill, mean0, n0, bar, rel, inv,
        bar, rel, bar, bar, n0,
    )  # fmt: skip
    saved = [Sq, C0, mean0, n0, bar, rel, inv, G] if save else []
    return [walk.at.restore(cleaned), *final, *saved]


def _read_tiles(walk: _Walk, settings: dict):
    wide = lambda x: walk.state(x, settings["BK"], settings["BV"])
    narrow = lambda x, columns: walk.tile(x, walk.C, settings[columns])
    return wide, narrow


def _untouched(walk: _Walk, C, mean, n) -> list[Tensor]:
    """The final state where there is no token."""
    if C is not None:
        return [x.to(walk.wide, copy=True) for x in (C, mean, n)]
    sizes = (walk.K, walk.K), (walk.K,), ()
    return [torch.zeros(walk.at.N, walk.H, *size, dtype=walk.wide, device=walk.at.cum.device) for size in sizes]


def _no_chunk(q: Tensor, walk: _Walk) -> list[Tensor]:
    """What is saved where there is no token."""
    K, C = walk.K, walk.C
    G = walk.empty(2, C) if walk.gated else walk.empty()
    state = walk.empty(K, K, dtype=walk.dtype), walk.empty(K), walk.empty()
    return [q.new_empty(walk.B, walk.at.T, walk.H, K), *state, *(walk.empty(C) for _ in range(3)), G]


@ccq_triton_fwd.register_fake
def _(q, k, eta, g, C, mean, n, cu_seqlens, save):
    B, T, H, K = q.shape
    chunk = plan(ENGINE, q.device, q.dtype, K, K).launch["shared"]["C"]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    wide = torch.promote_types(q.dtype, torch.float32)
    number = lambda *sizes: q.new_empty(*sizes, dtype=wide)
    out = [q.new_empty(*eta.shape, K), number(N, H, K, K), number(N, H, K), number(N, H)]
    if save:
        aligned = T if cu_seqlens is None else (T // chunk + N) * chunk
        rows = B * (-(-aligned // chunk))
        G = number(rows, H) if g is None else number(rows, H, 2, chunk)
        out += [q.new_empty(B, aligned, H, K), q.new_empty(rows, H, K, K), number(rows, H, K), number(rows, H)]
        out += [number(rows, H, chunk), number(rows, H, chunk), number(rows, H, chunk), G]
    return out


@torch.library.custom_op("needlework::ccq_triton_bwd", mutates_args=())
def ccq_triton_bwd(
    dcleaned: Tensor, dC: Tensor | None, dmean: Tensor | None, dn: Tensor | None,
    q: Tensor, k: Tensor, eta: Tensor, g: Tensor | None, C: Tensor | None, mean: Tensor | None, n: Tensor | None,
    cu_seqlens: Tensor | None, mean1: Tensor, n1: Tensor, saved: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, eta, g, C, mean, n; an empty tensor for what was not given. mean1, n1: after the last token."""
    walk = _Walk.of(q, eta.shape[2], cu_seqlens, g is not None)
    at, H, K = walk.at, walk.H, walk.K
    Sq, C0, mean0, n0, qbar, qrel, inv, G = saved
    if qbar.shape[-1] != walk.C:
        raise RuntimeError(f"{ENGINE}: the forward ran with chunks of {qbar.shape[-1]}, the plan for the backward has others")
    if q.numel() == 0:
        tokens = [torch.zeros_like(x) if x is not None else q.new_empty(0) for x in (q, k, eta, g)]
        return [*tokens, *_nothing_read(q, C, mean, n, dC, dmean, dn)]
    q, k, eta, dcleaned = (at.align(x) for x in (q, k, eta, dcleaned))
    scale = _scale(dcleaned, dC, walk)

    y, ysq, deta = torch.empty_like(q), walk.empty(walk.C), torch.empty_like(eta)
    yd = torch.empty_like(q) if walk.gated else y
    settings = walk.constants("fold")
    programs = walk.chunks * H * (walk.C // settings["BT"])
    _launch(triton_intra.fold, programs, walk, settings, dcleaned, eta, Sq, G, inv, scale, y, yd, ysq, deta)

    dq, ybar, yrel = torch.empty_like(q), walk.empty(walk.C), walk.empty(walk.C)
    dG = walk.empty(walk.C) if walk.gated else ysq
    settings = walk.constants("read", BACKWARD=True, SAVE=False)
    wide, narrow = _read_tiles(walk, settings)
    _launch(
        read, walk.chunks * H, walk, settings,
        narrow(y, "BD"), narrow(k, "BD"), narrow(q, "BD"), narrow(y, "BK"), narrow(k, "BV"), narrow(q, "BV"),
        narrow(dcleaned, "BV"), narrow(dq, "BV"), narrow(dq, "BV"), wide(C0), eta, G, walk.fill, mean0, n0, ybar, yrel, inv,
        qbar, qrel, ysq, dG, scale,
    )  # fmt: skip

    seeds = dC is not None or dmean is not None or dn is not None
    settings = walk.constants("reverse", SEED=seeds, INIT=C is not None)
    BT, BV, BK, parts = settings["BT"], settings["BV"], settings["BK"], walk.parts("reverse")
    ends = _seeds(walk, scale, dC, dmean, dn, n1) if seeds else (mean0, mean0, mean0)
    rows = (at.N, H) if C is not None else (0, 0)
    first = q.new_empty(*rows, K, K, dtype=walk.wide), mean0.new_empty(*rows, K), mean0.new_empty(*rows, parts)
    Ns, r, far, z = walk.empty(K, K, dtype=walk.dtype), walk.empty(K), walk.empty(K), walk.empty(parts)
    _launch(
        reverse, parts * H * at.N, walk, settings,
        walk.tile(q, BT, BK), walk.tile(yd, BT, BK), walk.tile(q, BT, BV), walk.tile(yd, BT, BV), walk.state(Ns, BK, BV),
        G, qrel, yrel, ysq, mean0, mean1, *ends, r, far, z, *first, at.cum,
    )  # fmt: skip

    dk, dg = torch.empty_like(k), q.new_empty(0) if g is None else q.new_empty(walk.B, at.T, H, dtype=walk.wide)
    settings = walk.constants("keys", NZ=parts)
    wide, narrow = _read_tiles(walk, settings)
    _launch(
        keys, walk.chunks * H, walk, settings,
        narrow(q, "BD"), narrow(y, "BD"), narrow(k, "BD"), narrow(k, "BK"), narrow(k, "BV"), narrow(q, "BV"), narrow(y, "BV"),
        narrow(dk, "BV"), wide(Ns), wide(C0), G, walk.fill, mean0, n0, qbar, ybar, r, far, z, dG, dg, scale,
    )  # fmt: skip
    tokens = [at.restore(x) for x in (dq, dk, deta)]
    tokens.append(dg if g is None else at.restore(dg).to(g.dtype))
    if C is None:
        return [*tokens, *(q.new_empty(0) for _ in range(3))]
    return [*tokens, *_first_state(walk, scale, first, mean0, C, mean, n, dmean)]


@ccq_triton_bwd.register_fake
def _(dcleaned, dC, dmean, dn, q, k, eta, g, C, mean, n, cu_seqlens, mean1, n1, saved):
    return [q.new_empty(0) if x is None else torch.empty_like(x) for x in (q, k, eta, g, C, mean, n)]


def _scale(dcleaned: Tensor, dC: Tensor | None, walk: _Walk) -> Tensor:
    """A power of two that brings float16 gradients into range; 1 for every other type."""
    if not walk.scaled:
        return torch.ones(1, dtype=walk.wide, device=dcleaned.device)
    # 64 above 1: y is divided by n, and the sums of its products stay far below 65504
    top = dcleaned.abs().amax().to(walk.wide)
    top = top if dC is None else torch.maximum(top, dC.abs().amax())
    exponent = torch.where(top > 0, 6 - top.log2().ceil(), 0).clamp(-100, 100)
    return exponent.exp2().reshape(1)


def _seeds(walk: _Walk, scale: Tensor, dC, dmean, dn, n1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """N, r and z at the end: the final state's gradient in the form that the kernels carry."""
    zeros = lambda *sizes: torch.zeros(*n1.shape, *sizes, dtype=walk.wide, device=n1.device)
    N = zeros(walk.K, walk.K) if dC is None else -scale * (dC + dC.mT)
    r = zeros(walk.K) if dmean is None else scale * dmean / n1.clamp(min=1)[..., None]
    z = zeros() if dn is None else scale * dn
    return N.contiguous(), r.contiguous(), z.contiguous()


def _first_state(walk: _Walk, scale: Tensor, first: tuple[Tensor, ...], mean0: Tensor, C, mean, n, dmean) -> list[Tensor]:
    """Gradients of the initial state."""
    N, r, z = first
    cum = walk.at.cum
    still = (cum.diff() == 0)[:, None]
    # seen from the initial mean; the first chunk's is another where no mass is behind it
    origin = mean0[cum[:-1].long().clamp(max=walk.chunks - 1)]
    x = torch.where((n == 0)[..., None] & ~still[..., None], mean - origin, 0)
    dn = z.sum(-1) + (x * (r - (N @ x[..., None])[..., 0] / 2)).sum(-1)
    dmean0 = n[..., None] * r / scale
    if dmean is not None:
        # without a token the mean passes through, whatever its mass
        dmean0 = torch.where(still[..., None], dmean, dmean0)
    gradients = N / (-2 * scale), dmean0, dn / scale
    return [dx.to(x.dtype).contiguous() for dx, x in zip(gradients, (C, mean, n), strict=True)]


def _nothing_read(q, C, mean, n, dC, dmean, dn) -> list[Tensor]:
    """Gradients of the initial state where there is no token."""
    if C is None:
        return [q.new_empty(0) for _ in range(3)]
    dC = None if dC is None else (dC + dC.mT) / 2
    pairs = zip((C, mean, n), (dC, dmean, dn), strict=True)
    return [torch.zeros_like(x) if dx is None else dx.to(x.dtype, copy=True) for x, dx in pairs]


def _setup_context(ctx, inputs, output) -> None:
    *tensors, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[2:])


def _backward(ctx, gradients):
    dcleaned, dC, dmean, dn = gradients[:4]
    *tensors, mean1, n1 = ctx.saved_tensors[:10]
    q, eta = tensors[0], tensors[2]
    if dcleaned is None:
        dcleaned = q.new_zeros(*eta.shape, q.shape[-1])
    saved = list(ctx.saved_tensors[10:])
    found = torch.ops.needlework.ccq_triton_bwd(dcleaned.contiguous(), dC, dmean, dn, *tensors, mean1, n1, saved)
    found = [dx if needed else None for dx, needed in zip(found, ctx.needs_input_grad, strict=False)]
    return *found, None, None


ccq_triton_fwd.register_autograd(_backward, setup_context=_setup_context)
