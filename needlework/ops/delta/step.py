"""One token of the delta family on a slot table, in place: every write rule, Q-Delta's included, in one kernel.

Bound by bandwidth: a program holds a [K BV] tile of one head's state in registers, reads it once and writes it once.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.delta.arguments import Prediction
from needlework.ops.delta.inputs import DeltaInputs
from needlework.ops.runtime.custom_op import fake, step_operator
from needlework.ops.runtime.launch_configs import Case, LaunchConfig, launch_config, split
from needlework.ops.runtime.triton_types import NAMES, TYPES, accumulator, cdiv, next_power_of_2

ENGINE = "delta/step"


@triton.jit
def delta_step_kernel(
    p_q, p_k, p_v, p_g, p_beta, p_lam, p_erase, p_write, p_read, p_state, p_slots, p_o, slot_stride,
    scale: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, HR: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    CHANNEL: tl.constexpr, PREVIOUS: tl.constexpr, GIVEN: tl.constexpr, ACC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """S' = Diag(e^g) S + k (write ⊙ v − Sᵀ Diag(e^g) e)ᵀ,   o = scale · S'ᵀ read;   pointers that are None have no part in it.

    beta: write = β, e = β (k + λ q). erase: e = erase ⊙ k, or erase if GIVEN. PREVIOUS drops e^g from the erase.
    UNIT: q and k are of unit norm from here on, read is as it is given.
    """
    if PDL:  # before the state is read: the kernel in front may be another step on it
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.program_id(0)
    i_v = i % tl.cdiv(V, BV)
    head = (i // tl.cdiv(V, BV)).to(tl.int64)  # of all rows, as every offset below: beyond 2^31 numbers
    row, h = head // HV, head % HV
    key = row * H + h // (HV // H)

    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    in_k, in_v = o_k < K, o_v < V
    slot = row
    if p_slots is not None:
        slot = tl.load(p_slots + row)
    if slot < 0:  # a padded row
        tl.store(p_o + head * V + o_v, tl.zeros([BV], ACC), mask=in_v)
        return

    p_tile = p_state + slot * slot_stride + h * K * V + o_k[:, None] * V + o_v[None, :]
    in_tile = in_k[:, None] & in_v[None, :]
    S = tl.load(p_tile, mask=in_tile, other=0).to(ACC)
    q = tl.load(p_q + key * K + o_k, mask=in_k, other=0).to(ACC)
    k = tl.load(p_k + key * K + o_k, mask=in_k, other=0).to(ACC)
    w = tl.load(p_v + head * V + o_v, mask=in_v, other=0).to(ACC)
    if UNIT:
        q /= tl.sqrt(tl.sum(q * q, 0) + 1e-6)
        k /= tl.sqrt(tl.sum(k * k, 0) + 1e-6)

    retained = 1
    if p_g is not None:
        if CHANNEL:
            retained = tl.exp(tl.load(p_g + head * K + o_k, mask=in_k, other=0).to(ACC))[:, None]
        else:
            retained = tl.exp(tl.load(p_g + head).to(ACC))
    if not PREVIOUS:
        S = S * retained
    if p_beta is not None:
        x = k
        if p_lam is not None:
            x = k + tl.load(p_lam + head).to(ACC) * q
        w = tl.load(p_beta + head).to(ACC) * (w - tl.sum(S * x[:, None], 0))
    if p_erase is not None:
        x = tl.load(p_erase + head * K + o_k, mask=in_k, other=0).to(ACC)
        if not GIVEN:
            x = x * k
        w = w * tl.load(p_write + head * V + o_v, mask=in_v, other=0).to(ACC) - tl.sum(S * x[:, None], 0)
    if PREVIOUS:
        S = S * retained
    S = S + k[:, None] * w[None, :]
    tl.store(p_tile, S, mask=in_tile)

    if p_read is not None:
        q = tl.load(p_read + (row * HR + h // (HV // HR)) * K + o_k, mask=in_k, other=0).to(ACC)
    tl.store(p_o + head * V + o_v, scale * tl.sum(S * q[:, None], 0), mask=in_v)


@step_operator("state")
def delta_step(
    inputs: DeltaInputs, state: Tensor, slots: Tensor | None, scale: float, prediction: str, l2norm: bool
) -> Tensor:  # fmt: skip
    """o [B HV V]."""
    q, g, q_read, (B, H, K), (HV, V) = inputs.q, inputs.g, inputs.q_read, inputs.q.shape, inputs.v.shape[1:]
    if not state[:1].is_contiguous():
        raise ValueError(f"state: a slot [HV K V] must be contiguous, got strides {state.stride()}")
    o = q.new_empty(inputs.v.shape)
    *tokens, _, _ = (None if x is None else x.contiguous() for x in inputs)
    launch = launch_config(ENGINE, q.device, q.dtype, K, V).launch["step"]
    constants = _constants(launch, K, V)
    with torch.cuda.device_of(q):
        delta_step_kernel[(B * HV * cdiv(V, constants["BV"]),)](
            *tokens,
            state,
            slots,
            o,
            state.stride(0),
            scale=scale,
            H=H,
            HV=HV,
            HR=H if q_read is None else q_read.shape[1],
            CHANNEL=g is not None and g.dim() == 3,
            PREVIOUS=prediction != "decayed",
            GIVEN=prediction == "given",
            UNIT=l2norm,
            ACC=TYPES[accumulator(q.dtype)],
            **constants,
        )
    return o


@fake(delta_step)
def _(inputs: DeltaInputs, *_):
    return inputs.q.new_empty(inputs.v.shape)


def step(
    inputs: DeltaInputs,
    state: Tensor,
    slots: Tensor | None,
    *,
    scale: float,
    prediction: Prediction = "decayed",
    l2norm: bool = False,
) -> Tensor:
    """`step_delta` and `step_qdelta` on arguments that they have checked: o [B HV V] in q's dtype, without gradients."""
    return delta_step(*inputs, state=state, slots=slots, scale=scale, prediction=prediction, l2norm=l2norm)


def _constants(launch: Mapping[str, int], K: int, V: int) -> dict[str, int]:
    BV = min(launch["BV"], next_power_of_2(V))
    return {**launch, "K": K, "V": V, "BK": next_power_of_2(K), "BV": BV}


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    half = f"*{NAMES[dtype]}"
    launch, options = split(config.launch["step"])
    always = {"p_q": half, "p_k": half, "p_v": half, "p_state": "*fp32", "p_slots": "*i64", "p_o": half, "slot_stride": "i64"}
    optional = {name: "*fp32" for name in ("p_g", "p_beta", "p_lam", "p_erase", "p_write")} | {"p_read": half}
    rules = {
        "gated": ("p_g", "p_beta"),
        "qdelta": ("p_g", "p_beta", "p_lam", "p_read"),
        "channel": ("p_g", "p_beta"),
        "gdn2": ("p_g", "p_erase", "p_write", "p_read"),
        "given": ("p_g", "p_erase", "p_write"),
    }
    cases = []
    for rule, given in rules.items():
        sizes = {"H": 2, "HV": 2, "HR": 2, **_constants(launch, K, V)}
        flags = {
            "CHANNEL": rule in ("channel", "gdn2", "given"),
            "PREVIOUS": rule == "given",
            "GIVEN": rule == "given",
            "UNIT": rule == "qdelta",
            "ACC": tl.float32,
            "scale": K**-0.5,
        }
        absent = {name: None for name in optional if name not in given}
        signature = always | {name: optional[name] for name in given}
        cases.append(Case(delta_step_kernel, signature, sizes | flags | absent, options))
    return cases
