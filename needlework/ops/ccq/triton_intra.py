"""What lies under CCQ's kernels: tiles, gates, and the two passes over tokens that no chunk waits for: sums, fold.

Chunks of C tokens are numbered through all batch rows, NCB a row. Tensors of the caller lie as [B T H K], numbers of a token as
[chunks H C], of a chunk as [chunks H ...]. G, the gates summed from a chunk's start in log2 units, is a pair of numbers: their
differences are then as accurate as the difference, whatever the sums.
"""

import torch
import triton
import triton.language as tl

from needlework.ops.common.launch import Case, Plan
from needlework.ops.common.triton_tile import load_tile, store_tile

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
POINTS = {"p_fill": "*i32", "p_cum": "*i32", "T": "i32", "NCB": "i32"}
OPERANDS = ("p_k", "p_dout", "p_eta", "p_Sq", "p_y", "p_yd")
OPTIONS = ("num_warps", "num_stages", "maxnreg")


@triton.jit
def numbers(p, o_row, i_d, K: tl.constexpr, BD: tl.constexpr):
    """[BD] of row o_row of [rows K], zeros past K."""
    o_d = i_d + tl.arange(0, BD)
    return tl.load(p + o_row * K + o_d, mask=o_d < K, other=0.0)


@triton.jit
def real_tokens(p_fill, i, i_t, T, C: tl.constexpr, PACKED: tl.constexpr):
    """How many of the chunk's tokens are of its sequence."""
    if PACKED:
        fill = tl.load(p_fill + i)
    else:
        fill = tl.minimum(T - i_t, C)
    return fill


@triton.jit
def decay_of(p_G, o_ih, o_c, C: tl.constexpr, GATED: tl.constexpr, ACC: tl.constexpr):
    """e^{G_t}: what the tokens o_c still see of the chunk's start."""
    decay = tl.full(o_c.shape, 1.0, ACC)
    if GATED:
        decay = tl.exp2(tl.load(p_G + 2 * o_ih * C + o_c))
    return decay


@triton.jit
def left_of(p_G, o_ih, o_c, C: tl.constexpr, GATED: tl.constexpr, ACC: tl.constexpr):
    """ω_Cs: what the chunk's end sees of the tokens o_c."""
    left = tl.full(o_c.shape, 1.0, ACC)
    if GATED:
        p = p_G + 2 * o_ih * C
        left = tl.exp2(tl.load(p + C - 1) - tl.load(p + o_c) + (tl.load(p + 2 * C - 1) - tl.load(p + C + o_c)))
    return left


@triton.jit
def whole_of(p_G, o_ih, C: tl.constexpr, GATED: tl.constexpr):
    """e^{G_C}: what the chunk's end sees of its start."""
    a = 1.0
    if GATED:
        a = tl.exp2(tl.load(p_G + 2 * o_ih * C + C - 1))
    return a


@triton.jit
def weights(p_G, o_ih, fill, C: tl.constexpr, GATED: tl.constexpr, SEEN_FIRST: tl.constexpr, ACC: tl.constexpr):
    """ω_ts [t s], 0 for s > t and for tokens that are not real; [s t] where SEEN_FIRST."""
    o_c = tl.arange(0, C)
    if SEEN_FIRST:
        seen = (o_c[:, None] <= o_c[None, :]) & (o_c < fill)[:, None]
    else:
        seen = (o_c[:, None] >= o_c[None, :]) & (o_c < fill)[None, :]
    if GATED:
        G = tl.load(p_G + 2 * o_ih * C + o_c)
        rest = tl.load(p_G + 2 * o_ih * C + C + o_c)
        span = (G[:, None] - G[None, :]) + (rest[:, None] - rest[None, :])
        if SEEN_FIRST:
            span = -span
        w = tl.where(seen, tl.exp2(tl.where(seen, span, 0.0)), 0.0)
    else:
        w = tl.where(seen, 1.0, 0.0).to(ACC)
    return w


@triton.jit(do_not_specialize=["T", "NCB"])
def sums(
    p_k, p_g, p_fill, p_sum, p_mass, p_G, T, NCB,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Σ_s ω_Cs k_s and Σ_s ω_Cs of a chunk, and its G, [2 C] a chunk and head."""
    TILES: tl.constexpr = (K + BD - 1) // BD
    i_d = (tl.program_id(0) % TILES) * BD
    o_ih = tl.cast(tl.program_id(0) // TILES, tl.int64)
    i = (tl.program_id(0) // TILES) // H
    i_h = (tl.program_id(0) // TILES) % H
    i_b = i // NCB
    i_t = (i - i_b * NCB) * C
    o_c = tl.arange(0, C)
    b_left = tl.full([C], 1.0, ACC)
    if GATED:
        o_t = i_t + o_c
        o_g = (tl.cast(i_b, tl.int64) * T + o_t) * H + i_h
        b_g = tl.load(p_g + o_g, mask=o_t < T, other=0.0).to(tl.float64) * LOG2E
        b_G = tl.cumsum(b_g, 0)
        b_left = tl.exp2((tl.sum(b_g, 0) - b_G).to(ACC))
        if i_d == 0:
            tl.store(p_G + 2 * o_ih * C + o_c, b_G.to(ACC))
            tl.store(p_G + 2 * o_ih * C + C + o_c, (b_G - b_G.to(ACC).to(tl.float64)).to(ACC))
    b_left = tl.where(o_c < real_tokens(p_fill, i, i_t, T, C, PACKED), b_left, 0.0)
    b_k = load_tile(p_k, i_b, i_t, i_h, i_d, T, H, K, C, BD, 0).to(ACC)
    o_d = i_d + tl.arange(0, BD)
    tl.store(p_sum + o_ih * K + o_d, tl.sum(b_left[:, None] * b_k, 0), mask=o_d < K)
    if i_d == 0:
        tl.store(p_mass + o_ih, tl.sum(b_left, 0))


@triton.jit(do_not_specialize=["T", "NCB"])
def fold(
    p_dout, p_eta, p_Sq, p_G, p_inv, p_scale, p_y, p_yd, p_ysq, p_deta, T, NCB,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr,
    GATED: tl.constexpr, SCALED: tl.constexpr, ACC: tl.constexpr, OT: tl.constexpr,
):  # fmt: skip
    """ŷ_t = scale n_t⁻¹ Σ_j λ_tj dq̃_tj over the value heads of a key head, gated also e^{G_t} ŷ_t, dλ, and ŷ·Σq, of BT tokens."""
    GROUP: tl.constexpr = HV // H
    PARTS: tl.constexpr = C // BT
    i_h = tl.program_id(0) % H
    i = tl.program_id(0) // (H * PARTS)
    i_c = ((tl.program_id(0) // H) % PARTS) * BT
    i_b = i // NCB
    i_t = (i - i_b * NCB) * C + i_c
    o_t = i_t + tl.arange(0, BT)
    o_token = (tl.cast(i, tl.int64) * H + i_h) * C + i_c + tl.arange(0, BT)
    b_Sq = load_tile(p_Sq, i_b, i_t, i_h, 0, T, H, K, BT, BK, 0).to(ACC)
    b_y = tl.zeros([BT, BK], ACC)
    for j in tl.static_range(GROUP):
        o_eta = (tl.cast(i_b, tl.int64) * T + o_t) * HV + i_h * GROUP + j
        b_eta = tl.load(p_eta + o_eta, mask=o_t < T, other=0.0).to(ACC)
        b_do = load_tile(p_dout, i_b, i_t, i_h * GROUP + j, 0, T, HV, K, BT, BK, 0).to(ACC)
        b_y += b_eta[:, None] * b_do
        tl.store(p_deta + o_eta, -tl.sum(b_do * b_Sq, 1), mask=o_t < T)
    b_factor = tl.load(p_inv + o_token)
    if SCALED:
        b_factor *= tl.load(p_scale)
    b_y *= b_factor[:, None]
    tl.store(p_ysq + o_token, tl.sum(b_y * b_Sq, 1))
    store_tile(p_y, b_y.to(OT), i_b, i_t, i_h, 0, T, H, K, BT, BK, 0)
    if GATED:
        b_decay = decay_of(p_G, tl.cast(i, tl.int64) * H + i_h, i_c + tl.arange(0, BT), C, GATED, ACC)
        store_tile(p_yd, (b_decay[:, None] * b_y).to(OT), i_b, i_t, i_h, 0, T, H, K, BT, BK, 0)


def padded(K: int) -> int:
    return max(16, triton.next_power_of_2(K))


def constants(plan: Plan, name: str, dtype: torch.dtype, H: int, HV: int, K: int, **flags: bool) -> dict[str, object]:
    """Every constexpr and option of a launch of `name`; a kernel takes those that it names."""
    own = {key: min(x, padded(K)) if key in ("BD", "BV") else x for key, x in plan.launch[name].items()}
    wide = torch.promote_types(dtype, torch.float32)
    sizes = {"H": H, "HV": HV, "K": K, "C": plan.launch["shared"]["C"], "BK": padded(K)}
    return sizes | {"TMA": int(plan.tma), "ACC": TYPES[wide], "OT": TYPES[dtype]} | flags | own


def arguments(kernel, given: dict[str, object]) -> dict[str, object]:
    """Of `constants`, what `kernel` names and its options."""
    return {name: x for name, x in given.items() if name in kernel.arg_names or name in OPTIONS}


def case(kernel, name: str, plan: Plan, dtype: torch.dtype, K: int, **flags: bool) -> Case:
    """One launch of `kernel` under the row `name` of a plan, with one head and the flags given."""
    operand, wide = str(TYPES[dtype]), str(TYPES[torch.promote_types(dtype, torch.float32)])
    values = arguments(kernel, constants(plan, name, dtype, 1, 1, K, **flags))
    options = {key: values.pop(key) for key in OPTIONS if key in values}
    rows = {"": values["C"], "t": values.get("BT"), "s": values.get("BK")}
    columns = {"k": values.get("BK"), "v": values.get("BV"), "d": values.get("BD")}
    signature = {}
    for argument in kernel.arg_names:
        if argument in values:
            signature[argument] = "constexpr"
        elif argument.startswith("x_") and plan.tma:
            # x_<name>_<columns><rows>
            kind = argument.rsplit("_", 1)[1]
            signature[argument] = f"tensordesc<{operand}[1, 1, {rows[kind[1:]]}, {columns[kind[0]]}]>"
        else:
            narrow = argument.startswith("x_") or argument in OPERANDS
            signature[argument] = POINTS.get(argument, f"*{operand if narrow else wide}")
    return Case(kernel, signature, values, options)


def compile_cases(plan: Plan, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    scaled = dtype == torch.float16
    return [
        *(case(sums, "sums", plan, dtype, K, GATED=gated, PACKED=False) for gated in (False, True)),
        *(case(fold, "fold", plan, dtype, K, GATED=gated, SCALED=scaled) for gated in (False, True)),
    ]
