"""What `needlework doctor` judges, in one place: a new rule is a line of RULES, a new launch table a line of ENGINES."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from needlework.ops.api import Impl, OpSpec
from needlework.ops.common.samples import decay, keys, normal, uniform, unit
from needlework.ops.conv import causal_conv, causal_conv_slots, step_conv
from needlework.ops.linear import Normed, glu, linear, normed_glu, normed_linear
from needlework.ops.runtime.denylist import denied
from needlework.ops.runtime.launch_configs import LaunchConfig, rows
from needlework.ops.specs import specs
from needlework.ops.unit.reference import unit_rows
from needlework.testing.lucid_decode import LUCID_DECODE
from needlework.testing.lucid_pages import LUCID_PAGES
from needlework.testing.path_pages import PATH_PAGES

# launch table -> the files that hold its kernels
ENGINES = {
    "delta/scalar": ("delta.scalar.forward", "delta.scalar.backward", "delta.scalar.transitions", "delta.segments"),
    "delta/channel": (
        "delta.channel.intra",
        "delta.channel.scan",
        "delta.channel.backward",
        "slots.kernels",
        "slots.rows",
        "carve.feedback.forward",
        "carve.feedback.backward",
    ),
    "delta/step": ("delta.step",),
    "ccq/curvature": ("ccq.curvature.intra", "ccq.curvature.scan", "ccq.curvature.intra_bwd", "ccq.curvature.scan_bwd"),
    "ccq/step": ("ccq.step",),
    "carve/step": ("carve.step",),
    "unit/rows": ("unit.rows",),
    "conv/depthwise": ("conv.depthwise.op",),
    "linear/few_rows": ("linear.few_rows",),
    "lucid/solve": ("lucid.solve.launches",),
    "lucid/step": ("lucid.step",),
    "lucid/pages": ("lucid.solve.by_table",),
    "lucid/decode": ("lucid.decode.op",),
    "polar/attention": ("polar.attention.launches",),
    "path/engine": ("path.engine.op", "path.engine.pages", "path.solve.engine.op", "path.solve.engine.pages"),
    "path/step": ("path.engine.decode",),
    "paged/paged": ("paged.engine.op",),
    "mamba3/siso": ("mamba3.siso.launches",),
    "mamba3/step": ("mamba3.step",),
}


class Rule(NamedTuple):
    """A spec, and the launch tables of its chunk form and of its step, None for none. `covers`: its calls launch every kernel that a
    rule of the same tables does, with the most arguments. `keys_alone`: it has no values, and sizes K = V. `several`: its step takes
    a few tokens too. `grows`: its step may make a state longer. `long`, `wide`: tokens of the one long sequence, and of each of 48."""

    spec: str
    chunk: str
    step: str | None
    covers: bool = False
    keys_alone: bool = False
    several: bool = False
    grows: bool = False
    long: int = 3000
    wide: int = 75


# attention's printed forms take a pair of blocks at a time: as many as make a chain, and as more blocks than programs
_pairs = partial(Rule, long=1000, wide=300)

RULES = (
    Rule("qdelta", "delta/scalar", "delta/step", covers=True, grows=True),
    Rule("qdelta/grouped", "delta/scalar", "delta/step"),
    Rule("delta/gated", "delta/scalar", "delta/step"),
    Rule("delta/gdn2", "delta/channel", "delta/step", covers=True),
    Rule("delta/kda", "delta/channel", "delta/step"),
    Rule("delta/previous", "delta/channel", "delta/step"),
    Rule("delta/given", "delta/channel", "delta/step"),
    Rule("delta/gla", "delta/channel", "delta/step"),
    Rule("carve", "delta/channel", "carve/step", covers=True, long=1000),  # nothing of it is cut into segments
    Rule("carve/rank4", "delta/channel", "carve/step"),
    Rule("ccq/aligned", "ccq/curvature", "ccq/step", covers=True, keys_alone=True),
    Rule("ccq", "ccq/curvature", "ccq/step", keys_alone=True),
    Rule("l2norm", "unit/rows", None, covers=True, keys_alone=True),
    Rule("conv", "conv/depthwise", None, covers=True, keys_alone=True),
    Rule("conv/slots", "conv/depthwise", None, covers=True, keys_alone=True),
    Rule("linear", "linear/few_rows", None, covers=True, keys_alone=True),
    _pairs("lucid", "lucid/solve", "lucid/step", covers=True, several=True),
    _pairs("lucid/beta", "lucid/solve", "lucid/step", several=True),
    _pairs("lucid/rowmax-window", "lucid/solve", "lucid/step", several=True),
    _pairs("lucid/pages", "lucid/pages", None, covers=True),
    _pairs("lucid/window-pages", "lucid/pages", None),
    _pairs("lucid/rowmax-pages", "lucid/pages", None),
    Rule("lucid/decode", "lucid/decode", None, covers=True, long=300, wide=40),  # every token is a sequence and a block
    Rule("lucid/window-decode", "lucid/decode", None, long=300, wide=40),
    Rule("lucid/rowmax-decode", "lucid/decode", None, long=300, wide=40),
    _pairs("polar", "polar/attention", "paged/paged", covers=True),
    _pairs("polar/window", "polar/attention", "paged/paged"),
    Rule("path", "path/engine", "path/step", covers=True, long=1100, wide=300),  # three superblocks, the last one cut
    Rule("path/window", "path/engine", "path/step", long=1100, wide=300),
    Rule("path/fox", "path/engine", "path/step", covers=True, long=1100, wide=300),
    Rule("path/lucid", "path/engine", None, covers=True, long=1100, wide=300),
    Rule("path/lucid-window", "path/engine", None, long=1100, wide=300),
    Rule("path/pages", "path/engine", None, covers=True, long=1100, wide=300),
    Rule("path/window-pages", "path/engine", None, long=1100, wide=300),
    Rule("path/fox-pages", "path/engine", None, covers=True, long=1100, wide=300),
    Rule("path/lucid-pages", "path/engine", None, covers=True, long=1100, wide=300),
    Rule("path/lucid-window-pages", "path/engine", None, long=1100, wide=300),
    Rule("path/lucid-read-pages", "path/engine", None, covers=True, long=1100, wide=300),
    Rule("path/lucid-window-read-pages", "path/engine", None, long=1100, wide=300),
    _pairs("paged/softmax", "paged/paged", None, covers=True),
    _pairs("paged/forgetting", "paged/paged", None, covers=True),
    _pairs("paged/differential", "paged/paged", None, covers=True),
    _pairs("paged/polar", "paged/paged", None, covers=True),
    Rule("mamba3", "mamba3/siso", "mamba3/step", covers=True),
)


class Rows(NamedTuple):
    y: Tensor


def l2norm(x: Tensor, impl: Impl = "torch", **_: object) -> Rows:
    """Rows of unit norm; every form of it is the same, and no sequence is anything to it."""
    from needlework.ops.unit.rows import l2_rows

    return Rows((l2_rows if impl == "triton" else unit_rows)(x))


# no op of its own, but kernels: no step, no table
L2NORM = OpSpec(
    name="l2norm", chunk=l2norm, recurrent=l2norm, literal=l2norm, step=None, table=None, tokens=("x",), half=("x",),
    inputs=lambda generator, B, T, style: {"x": normal(generator, B, T, 1, 16)},
)  # fmt: skip


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, impl: Impl = "torch", cu_seqlens: Tensor | None = None, **_: object
) -> Rows:  # fmt: skip
    """The short convolution with its SiLU; no operand of its sums is rounded."""
    y = causal_conv(x.flatten(2), weight.flatten(0, 1), None, cu_seqlens, **_short(x, impl), bias=_flat(bias))[0]
    return Rows(torch.cat(y, -1).view_as(x))


def conv_in_two(
    x: Tensor, weight: Tensor, bias: Tensor, impl: Impl = "torch", cu_seqlens: Tensor | None = None, **_: object
) -> Rows:  # fmt: skip
    """The same, the second half of every row from the state that the first one left."""
    if cu_seqlens is not None:
        return conv(x, weight, bias, impl, cu_seqlens)
    line, weight, half = x.flatten(2), weight.flatten(0, 1), x.shape[1] // 2
    given = _short(x, impl) | {"bias": _flat(bias)}
    first, state = causal_conv(line[:, :half], weight, **given)
    second = causal_conv(line[:, half:], weight, state, **given)[0]
    return Rows(torch.cat([torch.cat(first, -1), torch.cat(second, -1)], 1).view_as(x))


def conv_on_slots(x: Tensor, weight: Tensor, impl: Impl = "torch", cu_seqlens: Tensor | None = None, **_: object) -> Rows:
    """The same on a table that held NaN: two calls and, at the end of every row, two steps."""
    if impl != "triton":  # steps have the environment alone to choose by
        return conv(x, weight, None, impl, cu_seqlens)
    line, weight, given = x.flatten(2), weight.flatten(0, 1), _short(x, impl)
    T, N = line.shape[1], len(x) if cu_seqlens is None else len(cu_seqlens) - 1
    table = {
        "state": line.new_full((2 * N, 3, line.shape[2]), torch.nan),
        "slots": torch.arange(2 * N - 1, 0, -2, device=x.device),
    }
    fresh = torch.ones(N, dtype=torch.bool, device=x.device)
    if cu_seqlens is not None:
        return Rows(torch.cat(causal_conv_slots(line, weight, cu_seqlens, **table, fresh=fresh, **given), -1).view_as(x))
    cut, last = T // 2, T - 2
    y = [causal_conv_slots(line[:, :cut], weight, **table, fresh=fresh, **given)]
    y.append(causal_conv_slots(line[:, cut:last], weight, **table, **given))
    del given["impl"]
    y += [[part[:, None] for part in step_conv(line[:, t], weight, **table, **given)] for t in range(last, T)]
    return Rows(torch.cat([torch.cat(parts, -1) for parts in y], 1).view_as(x))


def _short(x: Tensor, impl: Impl) -> dict[str, Any]:
    return {"parts": [x[0, 0].numel() // 2] * 2, "after": "silu", "impl": impl}


def _flat(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.flatten()


def _line(generator: torch.Generator, B: int, T: int, style: str) -> dict[str, Tensor]:
    return {"x": normal(generator, B, T, 1, 16), "weight": normal(generator, 1, 16, 4)}


CONV = replace(
    L2NORM, name="conv", chunk=conv_in_two, recurrent=conv, literal=conv,
    inputs=lambda generator, *sizes: _line(generator, *sizes) | {"bias": normal(generator, 1, 16)},
)  # fmt: skip
CONV_SLOTS = replace(
    CONV, name="conv/slots", chunk=conv_on_slots, inputs=_line, skip={"gradients": "a table has none"}
)  # fmt: skip
CONVOLUTIONS = CONV, CONV_SLOTS


def maps(x: Tensor, more: Tensor, norm: Tensor, gate: Tensor, up: Tensor, impl: Impl = "torch", **_: object) -> Rows:
    """A map of the norm of a sum, a gated one of its own, and the sum: every form that the kernel of few rows has."""
    flat = lambda one: one.flatten(-2)
    given, weights = Normed(flat(x), flat(more), flat(norm), 1e-6), (flat(gate), flat(up))
    y, whole = normed_linear(given, weights[0], impl=impl)
    parts = [
        y,
        normed_glu(Normed(whole, None, flat(norm), 1e-6), *weights, gate[:, 0, 0], activation="relu2", impl=impl)[0],
        glu(whole, *weights, impl=impl),
        linear(whole, weights[1], up[:, 0, 0], impl=impl),
        whole,
    ]
    return Rows(torch.cat(parts, -1).unflatten(-1, (-1, x.shape[-1])))


LINEAR = replace(
    L2NORM, name="linear", chunk=maps, recurrent=maps, literal=maps, tokens=("x", "more"), half=("x", "more", "norm", "gate", "up"),
    inputs=lambda generator, B, T, style: {
        "x": normal(generator, B, T, 1, 16), "more": normal(generator, B, T, 1, 16), "norm": normal(generator, 1, 16),
        "gate": normal(generator, 80, 1, 16), "up": normal(generator, 80, 1, 16),
    },
    skip={"gradients": "serving has none"},
)  # fmt: skip

STYLES = ("random", "identical", "strong")
SIZES = ((16, 16), (32, 32), (100, 60), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512))  # K, V


def taken(row: LaunchConfig, arch: tuple[int, int], dtype: str, keys_alone: bool = False) -> list[tuple[int, int]]:
    """Sizes at which the row is taken here, smallest first: every earlier row that fits is on the denylist."""
    earlier = [x for x in takewhile(lambda x: x.name != row.name, rows(row.engine)) if not denied(x.engine, x.name, dtype)]
    fits = [size for size in SIZES if row.misfit(arch, dtype, *size) is None]
    return _square([size for size in fits if all(other.misfit(arch, dtype, *size) for other in earlier)], keys_alone)


def sizes(row: LaunchConfig, arch: tuple[int, int], dtype: str, keys_alone: bool = False) -> list[tuple[int, int]]:
    """Those at which the row is taken, or, if there is none, may be where earlier ones are on the denylist."""
    fits = [size for size in SIZES if row.misfit(arch, dtype, *size) is None]
    return taken(row, arch, dtype, keys_alone) or _square(fits, keys_alone)


def _square(chosen: list[tuple[int, int]], keys_alone: bool) -> list[tuple[int, int]]:
    return [(K, K) for K in dict.fromkeys(K for K, _ in chosen)] if keys_alone else chosen


def spec_of(rule: str) -> OpSpec:
    return next(
        spec
        for spec in (*specs(), L2NORM, *CONVOLUTIONS, LINEAR, *LUCID_PAGES, *LUCID_DECODE, *PATH_PAGES)
        if spec.name == rule
    )


def sample(rule: str, generator: torch.Generator, B: int, T: int, style: str, K: int, V: int) -> dict[str, Tensor]:
    """The rule's inputs at these sizes: one key head, and two value heads where its values may be grouped. Attention has two
    key-value heads, and where it has queries two query heads for each.

    Its spec says which arguments there are, and how many axes each has; their names say what they hold.
    """
    if rule.startswith("lucid"):
        return spec_of(rule).inputs(generator, B, T, style, H=2, K=K, V=V)
    if rule.startswith(("polar", "paged")):
        return spec_of(rule).inputs(generator, B, T, style, Hq=4, Hkv=2, d=K, V=V)
    if rule.startswith("path"):
        return spec_of(rule).inputs(generator, B, T, style, Hq=4, Hkv=2, K=K, V=V)
    given = spec_of(rule).inputs(torch.Generator().manual_seed(0), 1, 1, style)
    HV = 1 if "f" in given else 2
    R = given["k"].shape[3] if "k" in given and given["k"].dim() == 5 else 1
    channel = given["g"].dim() == 4 if "g" in given else False
    rank = given["w1"].shape[0] if "w1" in given else 0
    gate = 1 if rule.startswith("ccq") else HV  # CCQ's statistics are of a key head

    def k() -> Tensor:
        rows = keys(generator, B, T * R, 1, K, "clustered" if style == "hard" else style)
        return rows.view(B, T, R, 1, K).transpose(2, 3).contiguous() if R > 1 else rows

    makers: dict[str, Callable[[], Tensor]] = {
        "q": lambda: unit(normal(generator, B, T, 1, K)),
        "k": k,
        "v": lambda: normal(generator, B, T, HV, *([R] if R > 1 else []), V),
        "g": lambda: decay(generator, B, T, gate, *([K] if channel else []), style=style),
        "beta": lambda: uniform(generator, 0.1, 1, B, T, HV),
        "lam": lambda: uniform(generator, 0, 1, B, T, HV),
        "erase": lambda: uniform(generator, 0, 1, B, T, HV, K),
        "write": lambda: uniform(generator, 0, 1, B, T, HV, V),
        "q_read": lambda: unit(normal(generator, B, T, 1, K)),
        "eta": lambda: uniform(generator, 0.02, 0.98, B, T, HV),
        "f": lambda: _preactivation(uniform(generator, -4, 0, B, T, HV, K), generator, style),
        "b": lambda: normal(generator, B, T, HV, K),
        "w": lambda: uniform(generator, -2, 2, B, T, HV) if R == 1 else uniform(generator, -3, -0.5, B, T, HV),
        "A_log": lambda: uniform(generator, -0.5, 0, HV, K),
        "dt_bias": lambda: 0.1 * normal(generator, HV, K),
        "b_bias": lambda: 0.5 * normal(generator, HV, K) - 4,
        "w1": lambda: normal(generator, rank, V),
        "w2": lambda: normal(generator, K, rank),
        "weight": lambda: normal(generator, 2, K, 4),
        "bias": lambda: normal(generator, 2, K),
        "x": lambda: normal(generator, B, T, 2, K) * (1e-3 if style == "strong" else 1),  # so small that 1e-6 counts
        "more": lambda: normal(generator, B, T, 2, K),
        "norm": lambda: 1 + 0.3 * normal(generator, 2, K),
        "gate": lambda: normal(generator, 5 * K, 2, K) / (2 * K) ** 0.5,
        "up": lambda: normal(generator, 5 * K, 2, K) / (2 * K) ** 0.5,
        "dt": lambda: uniform(generator, 0.001, 0.1, B, T, HV),
        "angle": lambda: normal(generator, B, T, K // 4),
        "q_bias": lambda: 1 + 0.3 * normal(generator, HV, K),
        "k_bias": lambda: 1 + 0.3 * normal(generator, HV, K),
    }
    inputs = {name: makers[name]() for name in given}
    if rule == "delta/given":  # the direction is a unit vector, and a share of each of its channels is written along
        direction = inputs["k"]
        share = uniform(generator, 0, 1, *direction.shape)
        inputs |= {"k": share * direction, "erase": direction.repeat_interleave(HV, 2)}
    if style == "hard":
        one = torch.ones_like(inputs["beta"])
        inputs |= {"q": inputs["k"], "g": 0 * one, "beta": one, "lam": one}
    return inputs


def _preactivation(f: Tensor, generator: torch.Generator, style: str) -> Tensor:
    """ "strong": 30 % of the channels' gates near −30 among gates near −1e-3."""
    if style != "strong":
        return f
    return torch.where(uniform(generator, 0, 1, *f.shape) < 0.3, 30.0, -7.0).to(f)


def styles(spec: OpSpec) -> tuple[str, ...]:
    """Those under which every rule is hard to compute, and the spec's own."""
    return tuple(dict.fromkeys((*STYLES, *spec.styles)))
