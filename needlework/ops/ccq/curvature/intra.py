"""What CCQ's walk needs, for all chunks at once: each chunk's sums, the means before every chunk, centred keys and scores.

Chunks of C tokens are numbered through all batch rows, NCB a row. Tensors of the caller lie as [B T H K], numbers of a token as
[chunks H ROWS C], of a chunk as [chunks H ...]. G, the gates summed from a chunk's start in log2, is a pair of numbers: their
differences are then as accurate as the difference, whatever the sums.

A chunk's keys are centred between the mean μ₀ before it and its own mean c = μ₀ + d, such that their products alone merge two
centred sums (Chan's rule, without its rank-one term): with n decayed to the chunk's end and m = Σ_s ω_Cs,

    k*_s = k_s − z,   z = μ₀ + (1 − β) d,   β = √(n/(n+m)):     C ← e^{G_C} C + Σ_s ω_Cs k*_s k*_sᵀ
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton import JITFunction

from needlework.ops.common.kernels.tile import capped, load_tile, store_tile
from needlework.ops.runtime.launch_configs import OPTIONS, Case, Constants, LaunchConfig, absent, split
from needlework.ops.runtime.triton_types import TYPES, padded
from needlework.ops.slots.rows import OF_TABLE

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
ROWS: tl.constexpr = tl.constexpr(7)  # of numbers of a token: `tokens`
INTEGERS = dict.fromkeys(("p_fill", "p_cum", "p_split", "p_flag"), "*i32") | dict.fromkeys(("T", "NCB", "N", "NR"), "i32")
INTEGERS |= OF_TABLE
# flag -> arguments that kernels read with it alone
ONLY_WITH = {
    "GATED": ("p_g", "p_G", "x_C0_kv", "x_N_kv", "p_reach", "p_grown", "p_z"),
    "PACKED": ("p_fill",),
    "INIT": ("p_initial_mean", "p_initial_n", "p_initial_C", "p_N_out", "p_r_out", "p_z_out"),
    "SEED": ("p_N_in", "p_r_in", "p_z_in"),
    "SAVE": ("x_Sq_v",),
    "SCALED": ("p_scale",),
}
OPERANDS = ("p_q", "p_k", "p_kc", "p_P", "p_dout", "p_eta", "p_Sq", "p_y", "p_Py", "p_C0", "p_N0")


@triton.jit
def numbers(p, o_row, i_d, K: tl.constexpr, BD: tl.constexpr):
    """[BD] of row o_row of [rows K], zeros past K."""
    o_d = i_d + tl.arange(0, BD)
    return tl.load(p + o_row * K + o_d, mask=o_d < K, other=0.0)


@triton.jit
def tokens(p_E, o_ih, row: tl.constexpr, C: tl.constexpr):
    """[C] pointers to a row of a chunk's numbers. Forward: 0 what C₀ weighs, 1 1/n_t, 2 what d weighs, 3 q·(μ_t − μ₀), 4 q·(μ_t − z),
    5 ω_Cs, 6 e^{G_t}. Backward: 0 and 2 likewise, 1 the factor of y, 3 and 4 (gated) of dg what readers change within the chunk, 5 and 6
    the same."""
    return p_E + (o_ih * ROWS + row) * C + tl.arange(0, C)


@triton.jit
def real_tokens(p_fill, i, i_t, T, C: tl.constexpr, PACKED: tl.constexpr):
    """How many of the chunk's tokens are of its sequence."""
    if PACKED:
        fill = tl.load(p_fill + i)
    else:
        fill = tl.minimum(T - i_t, C)
    return fill


@triton.jit
def decay(G, rest):
    """2^{G + rest}, of a pair of numbers. At a G of tens its last digit in float32 is several of its power's."""
    return tl.exp2(G) * tl.exp2(rest)


@triton.jit
def whole_of(p_G, o_ih, C: tl.constexpr, GATED: tl.constexpr):
    """e^{G_C}: what the chunk's end sees of its start."""
    a = 1.0
    if GATED:
        a = decay(tl.load(p_G + 2 * o_ih * C + C - 1), tl.load(p_G + 2 * o_ih * C + 2 * C - 1))
    return a


@triton.jit
def merge_of(p_n, p_mass, o_ih, a):
    """β, 1 − β and m/(n + m) of a chunk, n decayed to its end by a."""
    n = tl.load(p_n + o_ih) * a
    m = tl.load(p_mass + o_ih)
    total = tl.maximum(n + m, 1.0)
    beta = tl.sqrt(n / total)
    share = m / total
    return beta, share / (1.0 + beta), share


@triton.jit
def weights(p_G, o_ih, fill, C: tl.constexpr, GATED: tl.constexpr, ACC: tl.constexpr):
    """ω_ts [t s], 0 for s > t and for tokens that are not real."""
    o_c = tl.arange(0, C)
    seen = (o_c[:, None] >= o_c[None, :]) & (o_c < fill)[None, :]
    if GATED:
        G = tl.load(p_G + 2 * o_ih * C + o_c)
        rest = tl.load(p_G + 2 * o_ih * C + C + o_c)
        span = (G[:, None] - G[None, :]) + (rest[:, None] - rest[None, :])
        w = tl.where(seen, tl.exp2(tl.where(seen, span, 0.0)), 0.0)
    else:
        w = tl.where(seen, 1.0, 0.0).to(ACC)
    return w


@triton.jit
def add_product(M, b_l, b_r, ACC: tl.constexpr, APART: tl.constexpr):
    """M + l r. APART, in float32: a product is a chain of sums, each rounded at the size that it has come to, and one that begins at M
    at M's. The fma is a sum that the compiler does not take for such a chain."""
    if APART:
        M = tl.fma(M, tl.full(M.shape, 1.0, ACC), tl.dot(b_l, b_r, input_precision="ieee", out_dtype=ACC))
    else:
        M = tl.dot(b_l, b_r, M, input_precision="ieee", out_dtype=ACC)
    return M


@triton.jit
def store_pairs(p_P, b, o_ih, C: tl.constexpr):
    """b [C C] of a chunk."""
    o_c = tl.arange(0, C)
    tl.store(p_P + o_ih * (C * C) + o_c[:, None] * C + o_c[None, :], b)


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
        b_g = capped(tl.load(p_g + o_g, mask=o_t < T, other=0.0)).to(tl.float64) * LOG2E
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


@triton.jit
def then(a, x, b, y):
    """The map a · + x, and after it b · + y."""
    return a * b, b * x + y


@triton.jit
def means(
    p_sum, p_mass, p_G, p_initial_mean, p_initial_n, p_mean, p_step, p_n, p_final_mean, p_final_n, p_cum,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, GATED: tl.constexpr, INIT: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """μ₀, d = c − μ₀ and n before each chunk, μ and n after the last: a program for BD columns of a sequence and key head.

    Chunks are taken BT at once, each with what the chunk before it adds; one more than there are gives the end.
    """
    TILES: tl.constexpr = (K + BD - 1) // BD
    i_d = (tl.program_id(0) % TILES) * BD
    i_h = (tl.program_id(0) // TILES) % H
    i_n = tl.program_id(0) // (TILES * H)
    o_nh = tl.cast(i_n, tl.int64) * H + i_h
    o_d = i_d + tl.arange(0, BD)
    start, end = tl.load(p_cum + i_n), tl.load(p_cum + i_n + 1)
    b_total = tl.zeros([BD], ACC)
    b_given = tl.zeros([BD], ACC)
    n = tl.sum(tl.zeros([BD], ACC), 0)
    if INIT:
        n += tl.load(p_initial_n + o_nh).to(ACC)
        b_given += numbers(p_initial_mean, o_nh, i_d, K, BD).to(ACC)
        b_total += b_given * n
    for j in range(start, end + 1, BT):
        o_i = j + tl.arange(0, BT)
        o_ih = tl.cast(o_i, tl.int64) * H + i_h
        # block after block: the first row of one starts from the last row of the block before, with the chunk between
        prior = (o_i > start) & (o_i <= end)
        b_sum = tl.load(p_sum + (o_ih - H)[:, None] * K + o_d[None, :], mask=prior[:, None] & (o_d < K)[None, :], other=0.0)
        b_mass = tl.load(p_mass + o_ih - H, mask=prior, other=0.0)
        if GATED:
            p_end = p_G + 2 * (o_ih - H) * C + C - 1
            b_a = decay(tl.load(p_end, mask=prior, other=0.0), tl.load(p_end + C, mask=prior, other=0.0))
            b_since, b_n = tl.associative_scan((b_a, b_mass), 0, then)
            _, b_S = tl.associative_scan((b_a[:, None] + tl.zeros([BT, BD], ACC), b_sum), 0, then)
            b_n += b_since * n
            b_S += b_since[:, None] * b_total[None, :]
        else:
            b_n = tl.cumsum(b_mass, 0) + n
            b_S = tl.cumsum(b_sum, 0) + b_total[None, :]
        live = o_i < end
        o = o_ih[:, None] * K + o_d[None, :]
        inside = live[:, None] & (o_d < K)[None, :]
        b_m = tl.load(p_mass + o_ih, mask=live, other=1.0)
        b_c = tl.load(p_sum + o, mask=inside, other=0.0) / tl.maximum(b_m, 1.0)[:, None]
        # before the first token the mean has no mass: the chunk's own is then a better place to centre at
        b_mean = tl.where((b_n > 0)[:, None], b_S / tl.maximum(b_n, 1.0)[:, None], b_c)
        tl.store(p_mean + o, b_mean, mask=inside)
        tl.store(p_step + o, b_c - b_mean, mask=inside)
        if i_d == 0:
            tl.store(p_n + o_ih, b_n, mask=live)
        last = tl.arange(0, BT) == tl.minimum(end - j, BT - 1)
        b_total = tl.sum(tl.where(last[:, None], b_S, 0.0), 0)
        n = tl.sum(tl.where(last, b_n, 0.0), 0)
    b_mean = tl.where(start < end, b_total / tl.maximum(n, 1.0), b_given)
    tl.store(p_final_mean + o_nh * K + o_d, b_mean, mask=o_d < K)
    if i_d == 0:
        tl.store(p_final_n + o_nh, n)


@triton.jit(do_not_specialize=["T", "NCB"])
def intra(
    p_q, p_k, p_eta, p_G, p_fill, p_mean, p_step, p_n, p_mass, p_kc, p_P, p_E, p_eta_chunks, T, NCB,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr,
    SCALED: tl.constexpr, ACC: tl.constexpr, OT: tl.constexpr,
):  # fmt: skip
    """k* of a chunk and key head, P_ts = ω_ts q_t·(k_s − μ_t), the rows of `tokens`, and λ in such rows, one a value head."""
    GROUP: tl.constexpr = HV // H
    i = tl.program_id(0) // H
    i_h = tl.program_id(0) % H
    o_ih = tl.cast(i, tl.int64) * H + i_h
    i_b = i // NCB
    i_t = (i - i_b * NCB) * C
    o_c = tl.arange(0, C)
    fill = real_tokens(p_fill, i, i_t, T, C, PACKED)
    if fill == 0:
        return  # of no sequence
    a = whole_of(p_G, o_ih, C, GATED)
    _, near, _ = merge_of(p_n, p_mass, o_ih, a)
    S = tl.zeros([C, C], ACC)
    b_at0 = tl.zeros([C], ACC)
    for i_d in range(0, K, BD):
        b_q = load_tile(p_q, i_b, i_t, i_h, i_d, T, H, K, C, BD, 0)
        b_k = load_tile(p_k, i_b, i_t, i_h, i_d, T, H, K, C, BD, 0).to(ACC)
        b_d = near * numbers(p_step, o_ih, i_d, K, BD)
        b_z = numbers(p_mean, o_ih, i_d, K, BD) + b_d
        b_kc = tl.where((o_c < fill)[:, None], b_k - b_z[None, :], 0.0).to(OT)
        store_tile(p_kc, b_kc, i_b, i_t, i_h, i_d, T, H, K, C, BD, 0)
        S = add_product(S, b_q, tl.trans(b_kc), ACC, OT == ACC)
        b_at0 -= tl.sum(b_q.to(ACC) * b_d[None, :], 1)

    n = tl.load(p_n + o_ih)
    b_decay = tl.full([C], 1.0, ACC)
    if GATED:
        G = p_G + 2 * o_ih * C
        b_decay = decay(tl.load(G + o_c), tl.load(G + C + o_c))
        b_left = tl.exp2(tl.load(G + C - 1) - tl.load(G + o_c) + (tl.load(G + 2 * C - 1) - tl.load(G + C + o_c)))
        tl.store(tokens(p_E, o_ih, 5, C), tl.where(o_c < fill, b_left, 0.0))
        tl.store(tokens(p_E, o_ih, 6, C), b_decay)
    b_w = weights(p_G, o_ih, fill, C, GATED, ACC)
    b_inv = 1.0 / tl.maximum(b_decay * n + tl.sum(b_w, 1), 1.0)
    b_bar = (b_decay * n * b_at0 + tl.sum(b_w * S, 1)) * b_inv
    b_rel = b_bar - b_at0
    store_pairs(p_P, (b_w * (S - b_bar[:, None])).to(OT), o_ih, C)
    b_carry = b_decay
    if SCALED:
        b_carry *= tl.maximum(n, 1.0)
    tl.store(tokens(p_E, o_ih, 0, C), b_carry)
    tl.store(tokens(p_E, o_ih, 1, C), b_inv)
    tl.store(tokens(p_E, o_ih, 2, C), b_decay * n * b_rel * near)
    tl.store(tokens(p_E, o_ih, 3, C), b_rel)
    tl.store(tokens(p_E, o_ih, 4, C), b_bar)
    o_t = i_t + o_c
    for j in tl.static_range(GROUP):
        o_eta = (tl.cast(i_b, tl.int64) * T + o_t) * HV + i_h * GROUP + j
        b_eta = tl.load(p_eta + o_eta, mask=o_t < T, other=0.0).to(ACC)
        tl.store(p_eta_chunks + (o_ih * GROUP + j) * C + o_c, b_eta)


@cache
def constants(config: LaunchConfig, name: str, dtype: torch.dtype, H: int, HV: int, K: int, **flags: int | None) -> Constants:
    """Every constexpr and option of a launch of `name`; a kernel takes those that it names."""
    own = {key: min(x, padded(K)) if key in ("BD", "BV") else x for key, x in config.launch[name].items()}
    KB = min(padded(K), 128)
    sizes = {"H": H, "HV": HV, "K": K, "C": config.launch["shared"]["C"], "BK": padded(K), "KB": KB, "NK": -(-K // KB)}
    sizes |= {"TMA": int(config.tma), "ACC": TYPES[torch.promote_types(dtype, torch.float32)], "OT": TYPES[dtype]}
    return sizes | {"HALF": dtype.itemsize == 2, "SCALED": dtype == torch.float16} | flags | own


def arguments(kernel: JITFunction, given: Constants) -> Constants:
    """Of `constants`, what `kernel` names and its options."""
    return {name: x for name, x in given.items() if name in kernel.arg_names or name in OPTIONS}


def case(
    kernel: JITFunction, name: str, config: LaunchConfig, dtype: torch.dtype, K: int, none: tuple[str, ...] = (), HV: int = 1,
    **flags: int | None,
) -> Case:  # fmt: skip
    """One launch of `kernel` under the row `name` of a config, with HV value heads of one key head and the flags given; the arguments
    `none` are None too."""
    operand, wide = str(TYPES[dtype]), str(TYPES[torch.promote_types(dtype, torch.float32)])
    values, options = split(arguments(kernel, constants(config, name, dtype, 1, HV, K, **flags)))
    values |= absent(kernel, values, ONLY_WITH) | dict.fromkeys(none)
    rows = {"": values["C"], "v": values.get("BV")}
    columns = {"k": values.get("KB"), "v": values.get("BV"), "c": values["C"]}
    signature = {}
    for argument in kernel.arg_names:
        if argument in values:
            continue
        if argument.startswith("x_") and config.tma:
            # x_<name>_<columns><rows>
            kind = argument.rsplit("_", 1)[1]
            signature[argument] = f"tensordesc<{operand}[1, 1, {rows[kind[1:]]}, {columns[kind[0]]}]>"
        else:
            summed = argument == "x_base_v" and HV > 1  # by `fold`
            narrow = (argument.startswith("x_") or argument in OPERANDS) and not summed
            signature[argument] = INTEGERS.get(argument, f"*{operand if narrow else wide}")
    return Case(kernel, signature, values, options)


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    cases = []
    for gated in (False, True):
        cases.append(case(sums, "sums", config, dtype, K, GATED=gated, PACKED=False))
        cases.append(case(means, "means", config, dtype, K, GATED=gated, INIT=True))
        cases.append(case(intra, "intra", config, dtype, K, GATED=gated, PACKED=True))
    return cases
