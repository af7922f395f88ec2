"""CARVE forward: two launches a content chunk, one for what no state enters (`intra.py`), one for its recurrence
(`scan.py`). Content goes from one to the next in memory of the device; the host reads nothing back.
"""

import torch
from torch import Tensor

from needlework.ops.carve.arguments import CarveInputs
from needlework.ops.carve.feedback.intra import gates_kernel
from needlework.ops.carve.feedback.layout import PLACES, SEQUENCES, Layout, layout_kernel
from needlework.ops.carve.feedback.repeated import VARIES, Repeated, launch_all
from needlework.ops.carve.feedback.scan import content_kernel, walk_kernel
from needlework.ops.common.shapes import width
from needlework.ops.delta.channel.intra import intra_constants
from needlework.ops.delta.channel.operands import Saved, case, operands, triton_dtype
from needlework.ops.delta.channel.scan import scan_constants
from needlework.ops.delta.inputs import solve_dtype
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig, interpreted
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import cdiv, next_power_of_2, padded
from needlework.ops.slots.rows import OF_TABLE, Slots


def forward(
    inputs: CarveInputs, b_bias: Tensor, S: Tensor, m: Tensor, total: Tensor, layout: Layout, *,
    resumed: bool, prediction: str, scale: float, R: int, config: LaunchConfig, save: bool, slots: Slots | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Saved]:  # fmt: skip
    """o, kept_S, kept_m (None without `save`) and Saved, for aligned rows, T > 0. S, m, total advance in place, in `width(q)`.

    resumed: m is not known to be zero. slots: S is a table, and advances in these.
    """
    (q, k, v, f, b, w), (A_log, dt_bias, w1, w2) = inputs.tokens, inputs.parameters
    (B, T, H, K), V, N = q.shape, v.shape[-1], layout.N
    ST, ACC, C = solve_dtype(q.dtype), width(q), config.launch["shared"]["C"]
    NC = -(-T // C)

    def empty(*shape: int, dtype: torch.dtype = ST) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    saved = Saved(
        q_hat=empty(B, T, H, K),
        e_hat=empty(B, T, H, K),
        k_hat=empty(B, T, H, K),
        Tp=empty(B, H, NC * C, C),
        Pp=empty(B, H, NC * C, C),
        whole=empty(B, H, NC, K, dtype=ACC),
        W=empty(B, T, H, V) if save else None,
    )
    o, beta = torch.empty_like(v), torch.sigmoid(w.to(ACC))
    kept_S, kept_m = (empty(layout.slots, *x.shape[1:], dtype=ACC) if save else None for x in (S, m))
    # one that owns no slot hands S on from content chunk to content chunk, too
    spare = None if slots is None else empty(N, *S.shape[1:], dtype=ACC)
    p_slots, p_fresh = (None, None) if slots is None else (slots.slots, slots.fresh)
    u = (b_bias.to(ACC) * 1.4426950408889634).repeat(N, 1, 1)  # to every bit what `content` makes of m = 0
    done = torch.zeros(N, H, dtype=torch.int32, device=q.device)

    gates, walk = _constants(config, q.dtype, H=H, K=K, V=V, rank=len(w1), L=layout.L, R=R, scale=scale, prediction=prediction)
    walk |= {"SAVE": int(save), "STRIDE": None if slots is None else slots.stride}
    rows, square, _ = operands(config)
    if resumed:
        sizes = {name: walk[name] for name in ("H", "K", "V", "RANK", "KP", "BM", "BR", "ACC")}
        run(content_kernel, (N * H,), m, u, w1, w2, b_bias, **sizes, num_warps=walk["num_warps"])
    BK, BV = walk["BK"], walk["BV"]
    gates_args = q, k, f, b, u, A_log, dt_bias, beta, *saved[:6], layout.spans, T, N, layout.parts
    walk_args = (
        *(rows(x, BK) for x in saved[:3]), square(saved.Tp), square(saved.Pp), saved.whole, rows(saved.W, BV), rows(v, BV),
        beta, rows(o, BV), S, m, total, kept_S, kept_m, u, done, w1, w2, b_bias, layout.spans, layout.bases, layout.ends,
        p_slots, p_fresh, spare, T, N,
    )  # fmt: skip
    launch_gates = Repeated(gates_kernel, (N * H * layout.parts, 1, 1), gates, *gates_args, VARIES)
    launch_walk = Repeated(walk_kernel, (N * H * cdiv(V, BV), 1, 1), walk, *walk_args, VARIES)

    def every_chunk() -> None:
        for i in range(layout.longest):
            launch_gates(i)
            launch_walk(i)

    launch_all(every_chunk, (launch_gates, launch_walk), layout.spans)
    return o, kept_S, kept_m, saved


def _constants(
    config: LaunchConfig,
    dtype: torch.dtype,
    *,
    H: int,
    K: int,
    V: int,
    rank: int,
    L: int,
    R: int,
    scale: float,
    prediction: str,
) -> tuple[Constants, Constants]:
    """The constexprs and options of `gates_kernel`, and of `walk_kernel` but SAVE and STRIDE."""
    gates = intra_constants(config, dtype, 1, H=H, HV=H, K=K, scale=scale, prediction=prediction, R=R)
    walk = scan_constants(config, dtype, 1, HV=H, K=K, V=V)
    del gates["HV"], gates["RULE"], gates["GIVEN"], walk["HV"], walk["RULE"]
    sizes = {"KP": padded(K), "BM": padded(V), "BR": next_power_of_2(rank), "L": L, "R": R}
    both = {"H": H} | overlapping(config)
    return gates | both, walk | sizes | both | {"RANK": rank}


def overlapping(config: LaunchConfig) -> Constants:
    """The constexpr and option of launches that may begin before the one ahead of them is done: where there is a copy engine."""
    overlap = config.tma and not interpreted()
    return {"PDL": int(overlap), "launch_pdl": overlap}


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Every kernel, with the backward's tensors asked for, and where rows go, of packed sequences that resume."""
    own, solves, wide = (str(triton_dtype(x)) for x in (dtype, solve_dtype(dtype), width(torch.empty(0, dtype=dtype))))
    settings = {"H": 2, "K": K, "V": V, "rank": 32, "L": 128, "R": 1, "scale": K**-0.5}
    types = dict.fromkeys(("p_q", "p_k", "p_f", "p_b"), f"*{own}") | dict.fromkeys(("T", "N", "parts", "i"), "i32")
    types |= dict.fromkeys(("p_q_hat", "p_e_hat", "p_k_hat", "p_Tp", "p_Pp"), f"*{solves}") | {"p_ends": "*i64"}
    types |= dict.fromkeys(("p_spans", "p_bases", "p_done"), "*i32") | OF_TABLE
    names = (*gates_kernel.arg_names, *walk_kernel.arg_names)
    types |= {name: f"*{wide}" for name in names if name.startswith("p_") and name not in types}
    cases = []
    for prediction in ("previous", "decayed"):
        gates, walk = _constants(config, dtype, prediction=prediction, **settings)
        cases.append(case(gates_kernel, types, gates, ()))
    C, BK, BV = (walk[name] for name in ("C", "BK", "BV"))
    blocks = {name: (solves, BK) for name in ("q_hat", "e_hat", "k_hat")} | {name: (solves, C) for name in ("Tp", "Pp")}
    for name, (kind, columns) in (blocks | {"W": (solves, BV), "v": (own, BV), "o": (own, BV)}).items():
        types[name] = f"tensordesc<{kind}[1, 1, {C}, {columns}]>" if config.tma else f"*{kind}"
    table, kept = (*OF_TABLE, "p_spare"), ("W", "p_kept_S", "p_kept_m")
    cases.append(case(walk_kernel, types, walk | {"SAVE": 0, "STRIDE": 2 * K * V}, kept))
    cases.append(case(walk_kernel, types, walk | {"SAVE": 0, "STRIDE": None}, kept + table))
    cases.append(case(walk_kernel, types, walk | {"SAVE": 1, "STRIDE": None}, table))
    sizes = {name: walk[name] for name in ("H", "K", "V", "RANK", "KP", "BM", "BR", "ACC", "num_warps")}
    cases.append(case(content_kernel, types, sizes, ()))
    types |= dict.fromkeys(("p_cu_seqlens", "p_position"), "*i64") | dict.fromkeys(("p_sources", "p_places"), "*i32")
    types |= dict.fromkeys(("given", "rows", "longest"), "i32")
    places = {"L": settings["L"], "C": C, "R": settings["R"], "PARTS": cdiv(settings["L"], C), "BLK": PLACES, "BN": SEQUENCES}
    return [*cases, case(layout_kernel, types, places, ())]
