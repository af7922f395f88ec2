"""What a call launches, forward and backward: the order of the kernels, and what they are given. Tokens are aligned."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from needlework.ops.common.kernels.parts import parts_of
from needlework.ops.common.kernels.tile import token_tile
from needlework.ops.polar.arguments import Parameters, Tokens
from needlework.ops.polar.attention.backward import keys, prepare, queries, totals
from needlework.ops.polar.attention.forward import attend
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig, absent, split
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import NAMES, TYPES, accumulator, cdiv, padded

ENGINE = "polar/attention"
KERNELS = {kernel.__name__: kernel for kernel in (attend, prepare, queries, keys, totals)}
# flag -> arguments that kernels read with it alone
ONLY_WITH = {"PACKED": ("p_spans",), "SAVE": ("x_mean", "p_stats"), "SCALED": ("p_power", "p_ref")}
STEPS = 32767  # of an int16: the row's largest number
FEW = 264  # programs, two for each of Hopper's multiprocessors, up to which a kernel's smaller tiles are taken


class Saved(NamedTuple):
    """What the forward keeps for the backward, over aligned tokens."""

    mean: Tensor  # [B T Hq V] the keys' mean, in steps of the row's largest number where that is int16
    stats: Tensor  # [B Hq 3 rows] lse, n_eff and the mean's step


class Walk(NamedTuple):
    """What every launch is given: sizes, the config, and the sequences as runs of whole chunks."""

    config: LaunchConfig
    dtype: torch.dtype
    B: int
    T: int
    H: int
    HK: int
    K: int
    V: int
    window: int | None
    spans: Tensor | None  # [chunks 3] int32 of a chunk's sequence: its first token, the first chunk that asks, its end
    numbers: int  # of a key as the caller has it: scores are divided by their root

    @property
    def wide(self) -> torch.dtype:
        return accumulator(self.dtype)

    @property
    def mean(self) -> torch.dtype:
        return torch.int16 if self.dtype.itemsize == 2 else self.dtype

    @property
    def rows(self) -> int:
        """Tokens of a batch row, up to whole chunks."""
        C = self.config.launch["shared"]["C"]
        return cdiv(self.T, C) * C

    def own(self, kernel: JITFunction) -> Mapping[str, int]:
        """A kernel's constants: of smaller tiles, where the config has them, for calls whose queries are few."""
        launch, name = self.config.launch, kernel.__name__
        few = launch.get(f"{name}_few")
        return launch[name] if few is None or self.B * self.H * (self.rows // launch[name]["BM"]) > FEW else few

    def tile(self, x: Tensor, rows: int, columns: int) -> Tensor | TensorDescriptor:
        return token_tile(x, rows, columns) if self.config.tma else x

    def launch(self, kernel: JITFunction, grid: tuple[int, int], *arguments: object, **flags: int) -> None:
        """Of a kernel over tiles, whose last arguments are the spans, T, rows and the window."""
        ends = self.spans, *((1.0,) if kernel is queries else ()), self.T, self.rows, self.window or 0
        run(kernel, grid, *arguments, *ends, **self.constants(kernel, **flags))

    def constants(self, kernel: JITFunction, **flags: int) -> Constants:
        packed = self.spans is not None
        facts = self.dtype, self.H, self.HK, self.K, self.V, self.numbers, packed, self.window
        return constants(self.config, kernel, self.own(kernel), *facts, **flags)


def constants(
    config: LaunchConfig, kernel: JITFunction, own: Mapping[str, int], dtype: torch.dtype, H: int, HK: int, K: int, V: int, numbers: int,
    packed: bool, window: int | None, **flags: int,
) -> Constants:  # fmt: skip
    """All that a kernel is compiled for; what it does not take is left out."""
    half = dtype.itemsize == 2
    (BK, NK), (BV, NV) = tiles_of(kernel, K, V)
    known = dict(
        H=H, HK=HK, K=K, V=V, C=config.launch["shared"]["C"], BK=BK, NK=NK, BV=BV, NV=NV, TMA=int(config.tma),
        ACC=TYPES[accumulator(dtype)], OT=TYPES[dtype], ST=TYPES[dtype],
        MT=tl.int16 if half else TYPES[dtype], STEPS=STEPS if half else 1, SCALE=numbers**-0.5,
        SCALED=int(dtype == torch.float16), PACKED=int(packed), WINDOW=int(window is not None), **flags,
    )  # fmt: skip
    return {name: x for name, x in known.items() if name in kernel.arg_names} | dict(own)


def tiles_of(kernel: JITFunction, K: int, V: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Columns of a tile and tiles of a row, of keys and of values: those whose products are taken may come in parts."""
    return (parts_of(K), parts_of(V)) if kernel in (attend, queries, keys) else ((padded(K), 1), (padded(V), 1))


def forward(walk: Walk, tokens: Tokens, parameters: Parameters, save: bool) -> tuple[Tensor, Tensor, Saved | None]:
    """direction, magnitude and, with `save`, what the backward needs of q, k, v."""
    q, k, v = tokens
    B, T, H, V = walk.B, walk.T, walk.H, walk.V
    own = walk.own(attend)
    direction = q.new_empty(B, T, H, V)
    magnitude = q.new_empty(B, T, H, dtype=walk.wide)
    saved = None
    if save:
        saved = Saved(q.new_empty(B, T, H, V, dtype=walk.mean), q.new_empty(B, H, 3, walk.rows, dtype=walk.wide))
    if direction.numel():
        BM, BN = own["BM"], own["BN"]
        (BK, _), (BV, _) = tiles_of(attend, walk.K, V)
        x_mean, stats = (None, None) if saved is None else (walk.tile(saved.mean, BM, BV), saved.stats)
        walk.launch(
            attend, (B * H, walk.rows // BM),
            walk.tile(q, BM, BK), walk.tile(k, BN, BK), walk.tile(v, BN, BV), walk.tile(direction, BM, BV), x_mean,
            *parameters, magnitude, stats, SAVE=int(save),
        )  # fmt: skip
    return direction, magnitude, saved


def backward(
    walk: Walk, ddirection: Tensor, dmagnitude: Tensor, saved: Saved, tokens: Tokens, parameters: Parameters
) -> tuple[Tokens, Parameters]:
    """Gradients of q, k, v and of the parameters."""
    q, k, v = tokens
    mean, stats = saved
    B, H, HK, V, rows = walk.B, walk.H, walk.HK, walk.V, walk.rows
    dtokens, dparameters = Tokens(*each(torch.empty_like, *tokens)), parameters.map(torch.empty_like)
    if not ddirection.numel():
        return Tokens(*each(Tensor.zero_, *dtokens)), dparameters.map(Tensor.zero_)
    dq, dk, dv = dtokens
    number = lambda *sizes: q.new_empty(*sizes, dtype=walk.wide)

    e, numbers = torch.empty_like(ddirection), number(B, H, 2, rows, 2)
    scaled = walk.dtype == torch.float16
    power = number(B, H, rows) if scaled else None
    BM, BV = walk.own(prepare)["BM"], padded(V)
    tiles = B * (rows // BM)
    sums, dnull = number(H, 4, tiles), number(H, tiles, V)
    walk.launch(
        prepare, (B * H, rows // BM), *(walk.tile(x, BM, BV) for x in (mean, ddirection, e)),
        *parameters, dmagnitude, stats, numbers, power, sums, dnull,
    )  # fmt: skip

    (BK, _), (BV, _) = tiles_of(queries, walk.K, V)
    BM, BN = (walk.own(queries)[name] for name in ("BM", "BN"))
    tiles_q = B * (rows // BM)
    dtemp = number(H, tiles_q)
    walk.launch(
        queries, (B * H, rows // BM), walk.tile(q, BM, BK), walk.tile(k, BN, BK), walk.tile(v, BN, BV), walk.tile(e, BM, BV),
        walk.tile(dq, BM, BK), stats, numbers, power, dtemp,
    )  # fmt: skip
    totals_constants = walk.constants(totals)
    alpha, beta, gamma, *_ = parameters
    run(totals, (H,), alpha, beta, gamma, sums, dtemp, dnull, *dparameters, tiles, tiles_q, **totals_constants)

    BM, BN = (walk.own(keys)[name] for name in ("BM", "BN"))
    walk.launch(
        keys, (B * HK, rows // BN), walk.tile(q, BM, BK), walk.tile(k, BN, BK), walk.tile(v, BN, BV), walk.tile(e, BM, BV),
        walk.tile(dk, BN, BK), walk.tile(dv, BN, BV), numbers, power,
        None if power is None else power.amax().reshape(1),
    )  # fmt: skip
    return dtokens, dparameters


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Every kernel as a training step over grouped heads launches it, without a window and with one over packed sequences."""
    own = NAMES[dtype]
    number = "*fp64" if dtype == torch.float64 else "*fp32"
    saved = "i16" if dtype.itemsize == 2 else own
    cases = []
    for packed, window in ((False, None), (True, 1)):
        for name, tiles in config.launch.items():
            if name == "shared":
                continue
            kernel = KERNELS[name.removesuffix("_few")]
            flags = {"SAVE": 1} if kernel is attend else {}
            known = constants(config, kernel, tiles, dtype, 8, 2, K, V, K, packed, window, **flags)
            known, options = split(known)
            known |= absent(kernel, known, ONLY_WITH)
            BM, BN = known.get("BM"), known.get("BN")
            (BK, _), (BV, _) = tiles_of(kernel, K, V)
            x = lambda element, rows, columns: (
                f"tensordesc<{element}[1, 1, {rows}, {columns}]>" if config.tma else f"*{element}"
            )
            types = {"p_spans": "*i32", "one": "fp32"}
            types |= dict.fromkeys(("T", "NR", "W", "tiles", "tiles_q"), "i32")
            types |= {"x_q": x(own, BM, BK), "x_dq": x(own, BM, BK), "x_k": x(own, BN, BK), "x_dk": x(own, BN, BK)}
            types |= {name: x(own, BM, BV) for name in ("x_o", "x_dc", "x_e")} | {"x_mean": x(saved, BM, BV)}
            types |= {"x_v": x(own, BN, BV), "x_dv": x(own, BN, BV)}
            signature = {name: types.get(name, number) for name in kernel.arg_names if name not in known}
            cases.append(Case(kernel, signature, known, options))
    return cases
