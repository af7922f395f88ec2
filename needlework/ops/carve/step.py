"""One token of CARVE on a slot table, in place, in one launch: a program for each [K BV] tile of one head's memory.

The tiles of a slot need each other twice: each reads the whole m, and a content chunk ends for all heads at once. So the last
tile of a slot to finish moves its position on, and ends the chunk where it is full.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.carve.arguments import CarveInputs, Settings
from needlework.ops.carve.state import CarveState
from needlework.ops.runtime.custom_op import fake, step_operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import Case, LaunchConfig, launch_config, split
from needlework.ops.runtime.triton_types import NAMES, TYPES, accumulator, cdiv, next_power_of_2
from needlework.ops.slots.table import check_contiguous

ENGINE = "carve/step"


@triton.jit(do_not_specialize=["content_chunk"])
def carve_step_kernel(
    p_q, p_k, p_v, p_f, p_b, p_w, p_A_log, p_dt_bias, p_w1, p_w2, p_b_bias, p_S, p_m, p_total, p_position, p_slots, p_o,
    content_chunk,
    S_stride, m_stride, total_stride, position_stride,
    scale: tl.constexpr, H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RANK: tl.constexpr,
    PREVIOUS: tl.constexpr, ACC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """S' = a S + σ(w) Σ_r k_r (v_r − Sᵀ e_r)ᵀ,   o = scale · S'ᵀ q,   e = k (PREVIOUS) or a k,   total' = total + o

    a = exp(−exp(A_log) softplus(f + dt_bias)) (1 − σ(b + b_bias + w2 tanh(w1 m))).   RANK rows of w1, BR at a time; BM covers all of m.
    """
    if PDL:  # before the state is read, as in `delta_step_kernel`
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.program_id(0)
    i_v = i % tl.cdiv(V, BV)
    head = (i // tl.cdiv(V, BV)).to(tl.int64)  # of all rows, as every offset below: beyond 2^31 numbers
    row, h = head // H, head % H

    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    in_k, in_v = o_k < K, o_v < V
    slot = row
    if p_slots is not None:
        slot = tl.load(p_slots + row).to(tl.int64)
    if slot < 0:  # a padded row
        tl.store(p_o + head * V + o_v, tl.zeros([BV], ACC), mask=in_v)
        return
    # from here on the row's slot
    p_S, p_m, p_total = p_S + slot * S_stride, p_m + slot * m_stride, p_total + slot * total_stride
    p_position += slot * position_stride
    # while a token runs, the upper half of its slot's position counts the tiles that are done
    position = (tl.load(p_position) & 0xFFFFFFFF) + 1

    # loads are asked for together, well before they are used: a token is one read of memory after another otherwise.
    # The state passes by the first cache, which keeps w1 and w2 for the programs to come.
    p_tile = p_S + h * K * V + o_k[:, None] * V + o_v[None, :]
    in_tile = in_k[:, None] & in_v[None, :]
    o_m, o_r = tl.arange(0, BM), tl.arange(0, BR)
    m = tl.load(p_m + h * V + o_m, mask=o_m < V, other=0).to(ACC)
    total = tl.load(p_total + h * V + o_v, mask=in_v, other=0).to(ACC)
    strength = tl.sigmoid(tl.load(p_w + head).to(ACC))
    keys, values = (), ()
    for r in tl.static_range(R):
        keys += (tl.load(p_k + (head * R + r) * K + o_k, mask=in_k, other=0).to(ACC),)
        values += (tl.load(p_v + (head * R + r) * V + o_v, mask=in_v, other=0).to(ACC),)
    content = tl.zeros([BK], ACC)
    for start in range(0, RANK, BR):
        in_r = start + o_r < RANK
        p_rows = p_w1 + (start + o_r)[:, None] * V + o_m[None, :]
        w1 = tl.load(p_rows, mask=in_r[:, None] & (o_m < V)[None, :], other=0).to(ACC)
        p_columns = p_w2 + o_k[:, None] * RANK + (start + o_r)[None, :]
        w2 = tl.load(p_columns, mask=in_k[:, None] & in_r[None, :], other=0).to(ACC)
        z = 2 * tl.sigmoid(2 * tl.sum(w1 * m[None, :], 1)) - 1  # tanh
        content += tl.sum(w2 * z[None, :], 1)

    # only now: the registers of w1 and w2 are free again, so twice as many programs share a multiprocessor
    S = tl.load(p_tile, mask=in_tile, other=0, cache_modifier=".cg").to(ACC)
    q = tl.load(p_q + head * K + o_k, mask=in_k, other=0).to(ACC)
    b = tl.load(p_b + head * K + o_k, mask=in_k, other=0).to(ACC) + content
    if p_b_bias is not None:
        b += tl.load(p_b_bias + h * K + o_k, mask=in_k, other=0).to(ACC)
    f = tl.load(p_f + head * K + o_k, mask=in_k, other=0).to(ACC)
    f += tl.load(p_dt_bias + h * K + o_k, mask=in_k, other=0).to(ACC)
    decay = tl.exp(tl.load(p_A_log + h * K + o_k, mask=in_k, other=0).to(ACC))
    softplus = tl.maximum(f, 0) + tl.log(1 + tl.exp(-tl.abs(f)))
    a = tl.exp(-decay * softplus) * tl.sigmoid(-b)

    writes = ()  # the rows of a token do not see each other
    for r in tl.static_range(R):
        erase = keys[r] if PREVIOUS else keys[r] * a
        writes += (strength * (values[r] - tl.sum(S * erase[:, None], 0)),)
    S *= a[:, None]
    for r in tl.static_range(R):
        S += keys[r][:, None] * writes[r][None, :]
    o = scale * tl.sum(S * q[:, None], 0)
    tl.store(p_o + head * V + o_v, o, mask=in_v)
    tl.store(p_total + h * V + o_v, total + o, mask=in_v)

    tl.debug_barrier()  # every warp has read m and position and written its part of total
    if position == content_chunk:
        done = tl.atomic_add(p_position, 1 << 32, sem="acq_rel", scope="gpu") >> 32
    else:  # no program reads what the other tiles wrote: no fence
        done = tl.atomic_add(p_position, 1 << 32, sem="relaxed", scope="gpu") >> 32
    tl.store(p_tile, S, mask=in_tile)  # after the count, whose fence waits for what is stored before it
    if done == H * tl.cdiv(V, BV) - 1:
        if position == content_chunk:
            position = position * 0
            for start in range(0, H * V, BLOCK):
                o_h = start + tl.arange(0, BLOCK)
                in_h = o_h < H * V
                every = tl.load(p_total + o_h, mask=in_h, other=0, cache_modifier=".cg").to(ACC)
                tl.store(p_m + o_h, every / content_chunk, mask=in_h)
                tl.store(p_total + o_h, tl.zeros([BLOCK], ACC), mask=in_h)
        tl.store(p_position, position)


@step_operator("state")
def carve_step(
    inputs: CarveInputs, b_bias: Tensor | None, state: CarveState, slots: Tensor | None, content_chunk: int, prediction: str,
    scale: float,
) -> Tensor:  # fmt: skip
    """o [B H V]."""
    q, (B, H, K), V = inputs.q, inputs.q.shape, inputs.v.shape[-1]
    check_contiguous(state)
    o = q.new_empty(B, H, V)
    constants = _constants(launch_config(ENGINE, q.device, q.dtype, K, V).launch["step"], K, V, len(inputs.w1))
    with torch.cuda.device_of(q):
        carve_step_kernel[(B * H * cdiv(V, constants["BV"]),)](
            *each(Tensor.contiguous, *inputs, b_bias),
            *state,
            slots,
            o,
            content_chunk,
            *(x.stride(0) for x in state),
            scale=scale,
            H=H,
            R=inputs.k.shape[2] if inputs.k.dim() == 4 else 1,
            PREVIOUS=prediction == "previous",
            ACC=TYPES[accumulator(q.dtype)],
            **constants,
        )
    return o


@fake(carve_step)
def _(inputs: CarveInputs, *_):
    return inputs.q.new_empty(*inputs.q.shape[:2], inputs.v.shape[-1])


def step(inputs: CarveInputs, b_bias: Tensor | None, state: CarveState, slots: Tensor | None, settings: Settings) -> Tensor:
    """`step_carve` on arguments that it has checked: o [B H V] in q's dtype, without gradients.

    The values of state.position are not read on the host: they must lie inside a content chunk.
    """
    return carve_step(*inputs, b_bias, *state, slots, *settings)


def _constants(launch: Mapping[str, int], K: int, V: int, rank: int) -> dict[str, int]:
    BM, BK = next_power_of_2(V), next_power_of_2(K)
    blocks = {"BK": BK, "BV": min(launch["BV"], BM), "BM": BM, "BR": min(launch["BR"], next_power_of_2(rank))}
    return {**launch, "K": K, "V": V, "RANK": rank, **blocks}


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    half = f"*{NAMES[dtype]}"
    launch, options = split(config.launch["step"])
    signature = {name: half for name in ("p_q", "p_k", "p_v", "p_f", "p_b", "p_w", "p_o")}
    signature |= {name: "*fp32" for name in ("p_A_log", "p_dt_bias", "p_w1", "p_w2", "p_b_bias", "p_S", "p_m", "p_total")}
    signature |= {"p_position": "*i64", "p_slots": "*i64", "content_chunk": "i32"}
    signature |= dict.fromkeys(("S_stride", "m_stride", "total_stride", "position_stride"), "i64")
    cases = []
    for R, previous in ((1, True), (1, False), (4, True)):
        flags = {"H": 2, "R": R, "PREVIOUS": previous, "ACC": tl.float32, "scale": K**-0.5}
        cases.append(Case(carve_step_kernel, signature, _constants(launch, K, V, 32) | flags, options))
    return cases
