"""What a call of Mamba-3's kernels launches, forward and backward, around the additive engine's."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from needlework.ops.common.kernels.groups import of_groups
from needlework.ops.common.shapes import behind
from needlework.ops.delta.inputs import DeltaInputs
from needlework.ops.mamba3.siso.angles import angles_bwd_kernel, starts_kernel, totals_kernel
from needlework.ops.mamba3.siso.gates_bwd import gates_bwd_kernel
from needlework.ops.mamba3.siso.rows import rows_kernel
from needlework.ops.mamba3.siso.rows_bwd import rows_bwd_kernel
from needlework.ops.mamba3.siso.tiles import ENGINE, OF_TILES, Tiles, arguments, sizes
from needlework.ops.mamba3.siso.values import add_own_kernel, values_bwd_kernel, values_kernel
from needlework.ops.mamba3.state import Mamba3State
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig, split
from needlework.ops.runtime.precompile import kind, meta, precompile, run
from needlework.ops.runtime.triton_types import NAMES, accumulator, cdiv

NO_STATE = None, None, None, None


class Inputs(NamedTuple):
    """Tensors of a call, contiguous. Their gradients come back as `Inputs` too."""

    q: Tensor  # [B T H K]
    k: Tensor  # [B T H K]
    v: Tensor  # [B T HV V]
    g: Tensor  # [B T HV], as the next three float32 or float64
    dt: Tensor  # [B T HV]
    lam: Tensor  # [B T HV]
    rate: Tensor  # [B T m] tanh(a)
    q_bias: Tensor | None  # [HV K]
    k_bias: Tensor | None  # [HV K]

    def contiguous(self) -> "Inputs":
        return Inputs(*each(Tensor.contiguous, *self))

    def widened(self, K: int, V: int) -> "Inputs":
        """With zeros behind the numbers of each head, which no angle of neighbours turns."""
        q, k, q_bias, k_bias = each(lambda x: behind(x, K), self.q, self.k, self.q_bias, self.k_bias)
        return self._replace(q=q, k=k, v=behind(self.v, V), q_bias=q_bias, k_bias=k_bias)

    def like(self, inputs: "Inputs") -> "Inputs":
        """Gradients in the dtypes and shapes of `inputs`; None for what was not given."""
        pairs = zip(inputs, self, strict=True)
        found = [None if x is None or dx is None else dx.to(x.dtype).view(x.shape) for x, dx in pairs]
        q, k, v, g, dt, lam, rate, *others = found
        assert q is not None and k is not None and v is not None
        assert g is not None and dt is not None and lam is not None and rate is not None
        return Inputs(q, k, v, g, dt, lam, rate, *others)

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory, of what is computed in where no dtype is given."""
        return self.v.new_empty(shape, dtype=accumulator(self.q.dtype) if dtype is None else dtype)

    def constants(self, tiles: Tiles, kernel: str, halves: bool) -> Constants:
        (H, K), (HV, V) = self.q.shape[2:], self.v.shape[2:]
        return sizes(tiles.config, kernel, self.q.dtype, H, HV, K, V, self.rate.shape[-1], tiles.F, halves)

    def launch(self, kernel: triton.JITFunction, name: str, tiles: Tiles, halves: bool, *tensors: Tensor | None) -> None:
        """A program for every tile and as many heads, or pairs of a token and a head, as the config says."""
        constants, HV = self.constants(tiles, name, halves), self.v.shape[2]
        programs = HV // constants["HB"] if "HB" in constants else cdiv(constants["BT"] * HV, constants["R"])
        run(kernel, (tiles.count * programs,), *tensors, *tiles.arguments(), **arguments(kernel, constants))


class Kept(NamedTuple):
    """What the forward leaves for the backward."""

    start: Tensor  # [tiles HV m] float64: half-turns before each tile
    same: Tensor  # [B T HV] (q + b_q)ᵀ(k + b_k)
    q: Tensor  # rows: [B T+F HV ·] or [1 T+NF HV ·]
    k: Tensor
    u: Tensor
    g: Tensor | None  # [B T+F HV]; None where there are no more rows than tokens
    power: Tensor | None  # [3 B HV] float32: a, b and c; None where nothing is divided

    def of_engine(self, given: Inputs, initial_state: Tensor | None) -> DeltaInputs:
        """What the engine's operators are given."""
        return DeltaInputs(self.q, self.k, self.u, given.g if self.g is None else self.g, initial_state=initial_state)


def made(
    given: Inputs, initial_state: Mamba3State | None, tiles: Tiles, power: Tensor | None, halves: bool
) -> tuple[Kept, Tensor, Tensor]:
    """What the engine is given, and the final k and angle."""
    key = (
        ENGINE,
        tiles.config.name,
        kind(*given, *(initial_state or NO_STATE)),
        tiles.cu_seqlens is not None,
        tiles.F,
        power is not None,
        halves,
    )
    precompile(given.q.device, key, lambda: _launches(given, initial_state, tiles, power, halves))
    return _rows(given, initial_state, tiles, power, halves)


def _launches(
    given: Inputs, initial_state: Mamba3State | None, tiles: Tiles, power: Tensor | None, halves: bool
) -> None:  # fmt: skip
    """What a call and its backward launch, on meta tensors; the engine sees to its own."""
    given, (power,) = Inputs(*meta(*given)), meta(power)
    initial_state = None if initial_state is None else Mamba3State(*meta(*initial_state))
    kept, k_end, angle_end = _rows(given, initial_state, tiles, power, halves)
    do = with_own(kept.u, given, kept, tiles)
    g = kept.same if kept.g is None else kept.g
    ends = (k_end, angle_end) if tiles.F else (None, None)
    gradients(do, (kept.q, kept.k, kept.u, g), *ends, given, initial_state, kept, tiles, halves)


def _rows(
    given: Inputs, initial_state: Mamba3State | None, tiles: Tiles, power: Tensor | None, halves: bool
) -> tuple[Kept, Tensor, Tensor]:
    _, k0, v0, angle0 = initial_state or NO_STATE
    (B, T, HV, V), K, m = given.v.shape, given.q.shape[-1], given.rate.shape[-1]
    rows = tiles.rows(B)
    total, start = (given.new(tiles.count, HV, m, dtype=torch.float64) for _ in range(2))
    angle_end, k_end = given.new(tiles.N, HV, m), given.new(*((tiles.N, HV, 1, K) if tiles.F else (0,)))
    given.launch(totals_kernel, "totals", tiles, halves, given.rate, given.dt, total)
    _starts(total, angle0, start, angle_end, given, tiles, halves, reverse=False)
    q, k, u = (given.new(*rows, HV, D, dtype=given.q.dtype) for D in (K, K, V))
    same, g = given.new(B, T, HV), given.new(*rows, HV) if tiles.F else None
    given.launch(
        rows_kernel, "rows", tiles, halves,
        given.q, given.k, given.dt, given.rate, given.q_bias, given.k_bias, start, k0, power, q, k, same, k_end if tiles.F else None,
    )  # fmt: skip
    given.launch(values_kernel, "values", tiles, halves, given.v, given.g, given.dt, given.lam, v0, power, u, g)
    return Kept(start, same, q, k, u, g, power), k_end, angle_end


def _starts(
    total: Tensor, at_first: Tensor | None, start: Tensor, end: Tensor, given: Inputs, tiles: Tiles, halves: bool, *, reverse: bool
) -> None:  # fmt: skip
    constants = given.constants(tiles, "starts", halves) | {"REVERSE": int(reverse)}
    programs = (tiles.N * given.v.shape[2] * cdiv(constants["M"], constants["BS"]),)
    run(starts_kernel, programs, total, at_first, start, end, *tiles.arguments(), **arguments(starts_kernel, constants))


def with_own(read: Tensor, given: Inputs, kept: Kept, tiles: Tiles) -> Tensor:
    o = torch.empty_like(given.v)
    given.launch(add_own_kernel, "own", tiles, False, read, given.v, given.dt, given.lam, kept.same, kept.power, o)
    return o


def gradients(
    do: Tensor, of_rows: tuple[Tensor, Tensor, Tensor, Tensor], dk_end: Tensor | None, dangle_end: Tensor | None,
    given: Inputs, initial_state: Mamba3State | None, kept: Kept, tiles: Tiles, halves: bool,
) -> tuple[Inputs, tuple[Tensor, Tensor, Tensor] | None]:  # fmt: skip
    """From those of o, of the rows (q, k, u, g) that the engine was given, and of the final k and angle; and of the initial ones, v too."""
    _, k0, v0, _ = initial_state or NO_STATE
    (B, T, HV, _), (H, K), m, wide = given.v.shape, given.q.shape[2:], given.rate.shape[-1], kept.same.dtype
    dv, dc, down = torch.empty_like(given.v), given.new(*tiles.rows(B), HV), given.new(B, T, HV)
    dk0, dv0 = each(torch.zeros_like, k0, v0)
    given.launch(
        values_bwd_kernel, "values_bwd", tiles, halves,
        do, of_rows[2], given.v, given.g, given.dt, given.lam, v0, kept.power, kept.same, dv, dc, down, dv0,
    )  # fmt: skip
    groups = HV // given.constants(tiles, "rows_bwd", halves)["HB"]
    dq, dk = (given.new(B, T, groups, K, dtype=given.q.dtype if groups == H else wide) for _ in range(2))
    dangle, total = given.new(B, T, HV, m), given.new(tiles.count, HV, m, dtype=torch.float64)
    # of packed sequences fewer tiles may be there than programs
    new = given.v.new_empty if tiles.cu_seqlens is None else given.v.new_zeros
    sums = [None if x is None else new(tiles.count, HV, K, dtype=wide) for x in (given.q_bias, given.k_bias)]
    given.launch(
        rows_bwd_kernel, "rows_bwd", tiles, halves,
        *of_rows[:2], dk_end, given.q, given.k, given.dt, given.lam, given.rate, given.q_bias, given.k_bias, kept.start, kept.power,
        down, dq, dk, dangle, total, *sums, dk0,
    )  # fmt: skip
    after, dangle0 = torch.empty_like(total), given.new(tiles.N, HV, m)
    _starts(total, dangle_end, after, dangle0, given, tiles, halves, reverse=True)
    groups = HV // given.constants(tiles, "angles_bwd", halves)["HB"]
    dg, ddt, dlam, drate = *(torch.empty_like(x) for x in (given.g, given.dt, given.lam)), given.new(B, T, groups, m)
    given.launch(angles_bwd_kernel, "angles_bwd", tiles, halves, given.dt, given.rate, dangle, after, ddt, drate)
    given.launch(
        gates_bwd_kernel, "gates_bwd", tiles, halves,
        given.g, given.dt, given.lam, kept.same, dc, down, of_rows[3], kept.power, dg, ddt, dlam,
    )  # fmt: skip
    drate = of_groups(drate, 1, wide)
    dq, dk = (of_groups(x, H, given.q.dtype) for x in (dq, dk))
    dq_bias, dk_bias = (None if x is None else x.sum(0) for x in sums)
    found = Inputs(dq, dk, dv, dg, ddt, dlam, drate, dq_bias, dk_bias)
    return found, None if dk0 is None or dv0 is None else (dk0, dv0, dangle0)


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Every kernel on packed sequences with a state to start from, one to leave, biases and powers of two; half of the pairs "even" and
    all of them "halves"."""
    own, wide = f"*{NAMES[dtype]}", f"*{NAMES[accumulator(dtype)]}"
    in_own = "q k v q_rows k_rows u o do dq_rows dk_rows du dq dk dv rows".split()
    types = {f"p_{name}": own for name in in_own} | {"p_power": "*fp32"} | OF_TILES
    types |= {f"p_{name}": "*fp64" for name in ("total", "start", "after", "dangle_total")}
    cases = []
    for kernel, name, flags in (
        (rows_kernel, "rows", (False, True)),
        (rows_bwd_kernel, "rows_bwd", (False, True)),
        (totals_kernel, "totals", (True,)),
        (starts_kernel, "starts", (False, True)),
        (values_kernel, "values", (True,)),
        (add_own_kernel, "own", (True,)),
        (values_bwd_kernel, "values_bwd", (True,)),
        (angles_bwd_kernel, "angles_bwd", (True,)),
        (gates_bwd_kernel, "gates_bwd", (True,)),
    ):
        for flag in flags:
            given = sizes(config, name, dtype, 1, 2, K, V, K // 2 if flag else K // 4, 1, flag) | {"REVERSE": int(flag)}
            constants, options = split(arguments(kernel, given))
            names = [n for n in kernel.arg_names if n not in constants]
            cases.append(Case(kernel, {n: types.get(n, wide) for n in names}, constants, options))
    return cases
