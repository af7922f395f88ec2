"""The backward of the scalar-gate engine: which kernels run, in which order, with which buffers.

    amax → adjoint (du, dv, initial state) → pairs (E, D) → replay_forward, replay_reverse → combine → gate

Neither S nor dS is kept a chunk. Tensors are aligned; `saved` is `triton_scalar.forward`'s W, T, P', G, E.
"""

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from needlework.ops.common.alignment import Alignment
from needlework.ops.common.launch import Case, Plan
from needlework.ops.delta.triton_adjoint import adjoint, amax
from needlework.ops.delta.triton_combine import combine, gate, pairs
from needlework.ops.delta.triton_replay import replay_forward, replay_reverse
from needlework.ops.delta.triton_scalar import TYPES, accumulator, descriptor, solve

NO_ANCHOR = 1 << 30


def backward(
    do: Tensor, dstate: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None,
    lam: Tensor | None, q_read: Tensor | None, initial_state: Tensor | None, saved: tuple[Tensor, ...], alignment: Alignment,
    *, scale: float, plan: Plan,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of q, k, v, g, beta, lam, q_read and the initial state (None where there is none); numbers a token are wide."""
    W, Tp, Pp, G, E = saved
    B, T, HV, V = v.shape
    H, K = k.shape[2:]
    rows, C, N = Pp.shape[2], plan.launch["shared"]["C"], alignment.N
    r = q if q_read is None else q_read
    # what reads has a gradient of its own where q also enters x, and where its heads are not the keys'
    read = (lam is not None and q_read is not None) or r.shape[2] != H
    asks = r if not read else q if lam is not None else k
    c = constants(plan, q.dtype, H, r.shape[2], HV, K, V, g is not None, beta is not None, lam is not None,
                  read, initial_state is not None, dstate is not None)  # fmt: skip
    acc, st = accumulator(q.dtype), solve(q.dtype)
    new = lambda *shape, dtype=acc: torch.empty(shape, dtype=dtype, device=q.device)
    tile = lambda x, width: descriptor(x, C, width) if plan.tma else x
    or_G = lambda x: G if x is None else x
    chunks_in_all = B * (rows // C)

    half = q.dtype.itemsize == 2
    peaks = new(plan.launch["amax"]["NP"], dtype=torch.float32)
    if half:
        amax[(len(peaks),)](
            do, do if dstate is None else dstate, peaks, do.numel(), 0 if dstate is None else dstate.numel(), **c["amax"]
        )

    # a chain per sequence, value head and tile of values; what is left of it where it is cut
    BV, KB, NK = (c["adjoint"][name] for name in ("BV", "KB", "NK"))
    du = torch.empty_like(v)
    # additive, wide: one tensor is both
    dv = torch.empty_like(v) if half or beta is not None else du
    dinitial = new(N, HV, K, V)
    if dstate is not None and alignment.place is not None:
        dinitial.copy_(dstate)  # of an empty sequence, which no chain walks
    elif alignment.place is not None:
        dinitial.zero_()
    slots = _slots(plan, "adjoint", N * HV * cdiv(V, BV))
    couplings = lambda x: tile(x.view(-1, rows, 1, C), C)
    x_P = couplings(Pp)
    adjoint[(slots,)](
        tile(r, KB), tile(asks, KB), tile(k, KB), tile(do, BV), x_P if beta is None else couplings(Tp), x_P, G, E, or_G(beta),
        or_G(lam), tile(du, BV), tile(dv, BV), or_G(dstate), dinitial, alignment.cum, new(slots, BV, NK * KB),
        _flags(slots, q), peaks, scale, T, rows, N, **c["adjoint"],
    )  # fmt: skip

    BV = c["pairs"]["BV"]
    # float16 cannot hold do times the factor elsewhere than in a tensor of its own; bfloat16 takes the factor later
    do_ = torch.empty_like(do) if c["pairs"]["COPY"] else do
    E_, D_ = (new(B, HV, rows, C, dtype=st) for _ in range(2))
    written = new(B, HV, rows)
    pairs[(chunks_in_all * HV,)](
        tile(do, BV), tile(du, BV), tile(W, BV), tile(v, BV), or_G(g), tile(do_, BV), E_, D_, written, peaks,
        scale, T, rows, **c["pairs"],
    )  # fmt: skip

    KS, VB, NT, EVERY = (c["replay_forward"][name] for name in ("KS", "VB", "NT", "EVERY"))
    parts, slices = cdiv(V, VB * NT), cdiv(K, KS)
    dr_part, dx_part, dk_part = (new(parts * B, T, HV, K, dtype=st) for _ in range(3))
    places = (chunks_in_all // EVERY + N + 1) * HV if g is not None else 1
    anchors = new(places, K, V, dtype=st) if g is not None else G
    X = new(places, slices * parts)
    slots = _slots(plan, "replay_forward", N * HV * slices * parts)
    hand = new(slots, KS, VB * NT)
    replay_forward[(slots,)](
        tile(k, KS), tile(do_, VB), tile(du, VB), tile(W, VB), G, E, tile(dr_part, KS), tile(dx_part, KS), or_G(initial_state),
        anchors, alignment.cum, hand, _flags(slots, q), peaks, scale, T, rows, N, B, **c["replay_forward"],
    )  # fmt: skip
    replay_reverse[(slots,)](
        tile(r, KS), tile(asks, KS), tile(k, KS), tile(do_, VB), tile(du, VB), tile(W, VB), G, E, or_G(beta), or_G(lam),
        tile(dk_part, KS), or_G(dstate), anchors, X, alignment.cum, hand, _flags(slots, q), peaks,
        scale, T, rows, N, B, **c["replay_reverse"],
    )  # fmt: skip

    tiles = cdiv(K, c["combine"]["BK"])
    dq, dk = torch.empty_like(k), torch.empty_like(k)
    shared = r.shape[2] != HV
    dr = q.new_empty(B, T, HV, K, dtype=acc if shared else q.dtype) if read else dq
    of_token = lambda wanted: new(tiles, B, HV, rows) if wanted else G
    gates, dlam, dbeta = (of_token(x is not None) for x in (g, lam, beta))
    sums = new(tiles, 2, B, HV, rows // C)
    combine[(tiles * chunks_in_all * H,)](
        r, asks, k, or_G(beta), or_G(lam), dr_part, dx_part, dk_part, E_, D_, written, dr, dq, dk, gates, sums, dlam, dbeta, peaks,
        T, rows, B, **c["combine"],
    )  # fmt: skip
    dg = None
    if g is not None:
        dg = new(B, T, HV)
        runs = cdiv(alignment.longest, EVERY)
        gate[(runs * N * HV,)](gates, sums, X, dg, alignment.cum, peaks, T, rows, B, N, runs, **c["gate"])
    by_token = lambda x: x.sum(0).transpose(1, 2)[:, :T]
    if read and shared:
        dr = dr.unflatten(2, (r.shape[2], -1)).sum(3).to(q.dtype)
    dq_read = None
    if lam is None:
        dq = dr
    if q_read is not None:
        dq, dq_read = torch.zeros_like(q) if lam is None else dq, dr
    return (
        dq, dk, dv, dg, None if beta is None else by_token(dbeta), None if lam is None else by_token(dlam),
        dq_read, None if initial_state is None else dinitial,
    )  # fmt: skip


def constants(plan: Plan, dtype, H, HR, HV, K, V, gated, erase, lam, read, init, end) -> dict[str, dict[str, object]]:
    """Kernel -> its constants, num_warps and the like."""
    half = dtype.itemsize == 2
    types = dict(ACC=TYPES[accumulator(dtype)], OT=TYPES[dtype], ST=TYPES[solve(dtype)])
    everything = dict(
        H=H, HR=HR, HV=HV, K=K, V=V, C=plan.launch["shared"]["C"], NM=plan.launch["amax"]["NP"], TMA=int(plan.tma),
        HALF=int(half), COPY=int(dtype == torch.float16), SCALED=int(dtype == torch.bfloat16), **types,
        GATE=int(gated), ERASE=int(erase), LAM=int(lam), READ=int(read), INIT=int(init), END=int(end),
    )  # fmt: skip
    own = {name: dict(plan.launch[name]) for name in ("amax", "adjoint", "pairs", "replay_forward", "combine", "gate")}
    own["replay_reverse"] = {**own["replay_forward"], **plan.launch["replay_reverse"]}
    whole = lambda size: max(next_power_of_2(size), 16)
    own["adjoint"] |= dict(KB=min(whole(K), 128), NK=cdiv(K, 128))
    for name in ("replay_forward", "replay_reverse"):
        row = own[name]
        row |= dict(KS=min(row["KS"], whole(K)), VB=min(row["VB"], whole(V)))
        row |= dict(NT=row["NT"] if V > row["VB"] else 1)
        # an anchor a chunk cancels nothing; in half precision the operands' roundings are larger than what cancels
        row |= dict(EVERY=NO_ANCHOR if not gated else row["EVERY"] if half else 1)
    row = own["replay_forward"]
    own["combine"] |= dict(BK=min(own["combine"]["BK"], whole(K)), PARTS=cdiv(V, row["VB"] * row["NT"]))
    own["gate"] |= dict(
        TILES=cdiv(K, own["combine"]["BK"]), SLICES=cdiv(K, row["KS"]) * own["combine"]["PARTS"], EVERY=row["EVERY"]
    )
    for name, kernel in KERNELS.items():
        if name != "amax":
            own[name].pop("NP", None)
        own[name] |= {key: x for key, x in everything.items() if key in kernel.arg_names and key not in own[name]}
    return own


KERNELS = {
    "amax": amax,
    "adjoint": adjoint,
    "pairs": pairs,
    "replay_forward": replay_forward,
    "replay_reverse": replay_reverse,
    "combine": combine,
    "gate": gate,
}


def compile_cases(plan: Plan, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Every kernel as Q-Delta launches it, from a state and with the final state's gradient."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
    own, st, acc = names[dtype], names[solve(dtype)], names[accumulator(dtype)]
    of_type = {
        **dict.fromkeys(("p_r", "p_q", "p_k", "p_do", "p_dr", "p_dq", "p_dk"), own),
        **dict.fromkeys(("p_dr_part", "p_dx_part", "p_dk_part", "p_anchor"), st),
        **dict.fromkeys(("p_cum", "p_flag"), "i32"),
        "p_max": "fp32",
    }
    couplings = {"pairs": ("p_E", "p_D"), "combine": ("p_E", "p_D")}
    cases = []
    for name, kernel in KERNELS.items():
        c = constants(plan, dtype, 2, 2, 2, K, V, True, True, True, False, True, True)[name]
        options = {key: c.pop(key) for key in ("num_warps", "num_stages", "maxnreg") if key in c}
        widths = dict.fromkeys(("x_T", "x_P"), c.get("C"))
        widths |= dict.fromkeys(("x_r", "x_q", "x_k"), c.get("KB", c.get("KS")))
        widths |= dict.fromkeys(("x_do", "x_du", "x_dv", "x_w", "x_v", "x_scaled"), c.get("BV", c.get("VB")))
        widths |= dict.fromkeys(("x_dr", "x_dx", "x_dk"), c.get("KS"))
        signature = {}
        for arg in kernel.arg_names:
            if arg in c:
                continue
            if arg.startswith("x_"):
                kind = st if arg in ("x_T", "x_P", "x_dr", "x_dx", "x_dk") else own
                signature[arg] = f"tensordesc<{kind}[1, 1, {c['C']}, {widths[arg]}]>" if plan.tma else f"*{kind}"
            elif arg.startswith("p_"):
                signature[arg] = f"*{st if arg in couplings.get(name, ()) else of_type.get(arg, acc)}"
            else:
                signature[arg] = "fp32" if arg == "scale" else "i64" if arg.startswith("n_") else "i32"
        cases.append(Case(kernel, signature, c, options))
    return cases


def _slots(plan: Plan, kernel: str, chains: int) -> int:
    return min(plan.launch[kernel]["NP"], chains)


def _flags(slots: int, like: Tensor) -> Tensor:
    return torch.zeros(slots, dtype=torch.int32, device=like.device)
