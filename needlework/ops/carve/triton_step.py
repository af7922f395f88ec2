"""One token of CARVE on a slot table, in place.

Two launches: the first advances S and total, a program for each [K BV] tile of one head's memory. The second ends content
chunks: every tile reads the whole m, and all heads of a slot share its position, so neither may change under the first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.carve.arguments import Prediction
from needlework.ops.carve.state import CarveState
from needlework.ops.common.launch import Case, Plan, plan
from needlework.ops.delta.arguments import width

ENGINE = "carve/step"


@triton.jit
def carve_step_kernel(
    p_q, p_k, p_v, p_f, p_b, p_w, p_A_log, p_dt_bias, p_w1, p_w2, p_S, p_m, p_total, p_slots, p_o,
    scale: tl.constexpr, H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RANK: tl.constexpr,
    PREVIOUS: tl.constexpr, ACC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BRANK: tl.constexpr,
):  # fmt: skip
    """S' = a S + σ(w) Σ_r k_r (v_r − Sᵀ e_r)ᵀ,   o = scale · S'ᵀ q,   e = k (PREVIOUS) or a k,   total' = total + o

    a = exp(−exp(A_log) softplus(f + dt_bias)) (1 − σ(b + w2 tanh(w1 m))).   RANK rows of w1; BM covers the whole of m.
    """
    i = tl.program_id(0)
    i_v = i % tl.cdiv(V, BV)
    head = (i // tl.cdiv(V, BV)).to(tl.int64)  # of all rows, as every offset below: beyond 2^31 numbers
    row, h = head // H, head % H

    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    in_k, in_v = o_k < K, o_v < V
    slot = row
    if p_slots is not None:
        slot = tl.load(p_slots + row)
    if slot < 0:  # a padded row
        tl.store(p_o + head * V + o_v, tl.zeros([BV], ACC), mask=in_v)
        return
    held = slot * H + h
    p_tile = p_S + held * K * V + o_k[:, None] * V + o_v[None, :]
    in_tile = in_k[:, None] & in_v[None, :]

    o_m, o_r = tl.arange(0, BM), tl.arange(0, BRANK)
    m = tl.load(p_m + held * V + o_m, mask=o_m < V, other=0).to(ACC)
    in_w1 = (o_r < RANK)[:, None] & (o_m < V)[None, :]
    w1 = tl.load(p_w1 + o_r[:, None] * V + o_m[None, :], mask=in_w1, other=0).to(ACC)
    content = 2 * tl.sigmoid(2 * tl.sum(w1 * m[None, :], 1)) - 1  # tanh
    in_w2 = in_k[:, None] & (o_r < RANK)[None, :]
    w2 = tl.load(p_w2 + o_k[:, None] * RANK + o_r[None, :], mask=in_w2, other=0).to(ACC)
    b = tl.load(p_b + head * K + o_k, mask=in_k, other=0).to(ACC) + tl.sum(w2 * content[None, :], 1)
    f = tl.load(p_f + head * K + o_k, mask=in_k, other=0).to(ACC)
    f += tl.load(p_dt_bias + h * K + o_k, mask=in_k, other=0).to(ACC)
    decay = tl.exp(tl.load(p_A_log + h * K + o_k, mask=in_k, other=0).to(ACC))
    softplus = tl.maximum(f, 0) + tl.log(1 + tl.exp(-tl.abs(f)))
    a = tl.exp(-decay * softplus) * tl.sigmoid(-b)

    S = tl.load(p_tile, mask=in_tile, other=0).to(ACC)  # after w1 and w2: their registers are free again
    strength = tl.sigmoid(tl.load(p_w + head).to(ACC))
    writes = ()  # the rows of a token do not see each other
    for r in tl.static_range(R):
        erase = tl.load(p_k + (head * R + r) * K + o_k, mask=in_k, other=0).to(ACC)
        if not PREVIOUS:
            erase *= a
        v = tl.load(p_v + (head * R + r) * V + o_v, mask=in_v, other=0).to(ACC)
        writes += (strength * (v - tl.sum(S * erase[:, None], 0)),)
    S *= a[:, None]
    for r in tl.static_range(R):
        k = tl.load(p_k + (head * R + r) * K + o_k, mask=in_k, other=0).to(ACC)
        S += k[:, None] * writes[r][None, :]
    tl.store(p_tile, S, mask=in_tile)

    q = tl.load(p_q + head * K + o_k, mask=in_k, other=0).to(ACC)
    o = scale * tl.sum(S * q[:, None], 0)
    tl.store(p_o + head * V + o_v, o, mask=in_v)
    p_total += held * V + o_v
    tl.store(p_total, tl.load(p_total, mask=in_v, other=0) + o, mask=in_v)


@triton.jit(do_not_specialize=["content_chunk"])
def carve_close_kernel(
    p_m, p_total, p_position, p_slots, content_chunk, HV: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr
):
    """A row's position; where a content chunk ends, m = total / content_chunk, total = 0.   HV: numbers of all its heads."""
    slot = tl.program_id(0).to(tl.int64)
    if p_slots is not None:
        slot = tl.load(p_slots + slot)
    if slot < 0:
        return
    position = tl.load(p_position + slot) + 1
    if position == content_chunk:
        position = tl.zeros_like(position)
        for start in range(0, HV, BLOCK):
            o_v = start + tl.arange(0, BLOCK)
            in_v = o_v < HV
            total = tl.load(p_total + slot * HV + o_v, mask=in_v, other=0).to(ACC)
            tl.store(p_m + slot * HV + o_v, total / content_chunk, mask=in_v)
            tl.store(p_total + slot * HV + o_v, tl.zeros([BLOCK], ACC), mask=in_v)
    tl.debug_barrier()  # every warp has read the position
    tl.store(p_position + slot, position)


@torch.library.custom_op("needlework::carve_step", mutates_args=("S", "m", "total", "position"))
def carve_step(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, w: Tensor,
    A_log: Tensor, dt_bias: Tensor, w1: Tensor, w2: Tensor,
    S: Tensor, m: Tensor, total: Tensor, position: Tensor, slots: Tensor | None,
    content_chunk: int, prediction: str, scale: float,
) -> Tensor:  # fmt: skip
    """o [B H V]."""
    (B, H, K), V = q.shape, v.shape[-1]
    for name, x in (("S", S), ("m", m), ("total", total), ("position", position)):
        if not x.is_contiguous():
            raise ValueError(f"state.{name}: must be contiguous, got strides {x.stride()}")
    o = q.new_empty(B, H, V)
    tensors = [x.contiguous() for x in (q, k, v, f, b, w, A_log, dt_bias, w1, w2)]
    ACC = tl.float64 if width(q) == torch.float64 else tl.float32
    launch = plan(ENGINE, q.device, q.dtype, K, V).launch
    constants = _constants(launch["step"], K, V, w1.shape[0])
    with torch.cuda.device_of(q):
        carve_step_kernel[(B * H * triton.cdiv(V, constants["BV"]),)](
            *tensors,
            S,
            m,
            total,
            slots,
            o,
            scale=scale,
            H=H,
            R=k.shape[2] if k.dim() == 4 else 1,
            PREVIOUS=prediction == "previous",
            ACC=ACC,
            **constants,
        )
        carve_close_kernel[(B,)](m, total, position, slots, content_chunk, HV=H * V, ACC=ACC, **launch["close"])
    return o


@carve_step.register_fake
def _(q, k, v, *_):
    return q.new_empty(*q.shape[:2], v.shape[-1])


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    w: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    w1: Tensor,
    w2: Tensor,
    state: CarveState,
    slots: Tensor | None,
    *,
    content_chunk: int,
    prediction: Prediction,
    scale: float,
) -> Tensor:
    """`step_carve` on arguments that it has checked: o [B H V] in q's dtype, without gradients.

    The values of state.position are not read on the host: they must lie inside a content chunk.
    """
    return carve_step(q, k, v, f, b, w, A_log, dt_bias, w1, w2, *state, slots, content_chunk, prediction, scale)


def _constants(launch: dict[str, int], K: int, V: int, rank: int) -> dict[str, int]:
    BM = triton.next_power_of_2(V)
    blocks = {"BK": triton.next_power_of_2(K), "BV": min(launch["BV"], BM), "BM": BM, "BRANK": triton.next_power_of_2(rank)}
    return {**launch, "K": K, "V": V, "RANK": rank, **blocks}


def compile_cases(plan: Plan, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    half = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
    options = {kernel: {n: x for n, x in launch.items() if n.startswith("num_")} for kernel, launch in plan.launch.items()}
    launch = {kernel: {n: x for n, x in plan.launch[kernel].items() if n not in options[kernel]} for kernel in plan.launch}
    state = {"p_m": "*fp32", "p_total": "*fp32", "p_slots": "*i64"}
    signature = {name: half for name in ("p_q", "p_k", "p_v", "p_f", "p_b", "p_w", "p_o")}
    signature |= {name: "*fp32" for name in ("p_A_log", "p_dt_bias", "p_w1", "p_w2", "p_S")} | state
    cases = []
    for R, previous in ((1, True), (1, False), (4, True)):
        flags = {"H": 2, "R": R, "PREVIOUS": previous, "ACC": tl.float32, "scale": K**-0.5}
        cases.append(Case(carve_step_kernel, signature, _constants(launch["step"], K, V, 32) | flags, options["step"]))
    signature = {**state, "p_position": "*i64", "content_chunk": "i32"}
    sizes = {"HV": 2 * V, "ACC": tl.float32, **launch["close"]}
    return [*cases, Case(carve_close_kernel, signature, sizes, options["close"])]
