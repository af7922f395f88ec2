"""Specs of what has kernels and is no op of its own: rows of unit norm, the convolution, maps of few rows. No step, no table."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from needlework.ops.api import Impl, OpSpec
from needlework.ops.common.samples import normal
from needlework.ops.conv import causal_conv, causal_conv_slots, step_conv
from needlework.ops.linear import Normed, glu, linear, normed_glu, normed_linear
from needlework.ops.unit.reference import unit_rows


class Rows(NamedTuple):
    y: Tensor


def l2norm(x: Tensor, impl: Impl = "torch", **_: object) -> Rows:
    """Rows of unit norm; every form of it is the same, and sequences do not matter to it."""
    from needlework.ops.unit.rows import l2_rows

    return Rows((l2_rows if impl == "triton" else unit_rows)(x))


L2NORM = OpSpec(
    name="l2norm", chunk=l2norm, recurrent=l2norm, literal=l2norm, step=None, table=None, tokens=("x",), half=("x",),
    inputs=lambda generator, B, T, style: {"x": normal(generator, B, T, 1, 16)},
)  # fmt: skip


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, impl: Impl = "torch", cu_seqlens: Tensor | None = None,
    unit: bool = False, **_: object,
) -> Rows:  # fmt: skip
    """The short convolution with its SiLU; no operand of its sums is rounded. unit: the first half of its channels is
    a head of unit norm."""
    given = _short(x, impl) | {"bias": _flat(bias)} | _unit(x, unit)
    return Rows(torch.cat(causal_conv(x.flatten(2), weight.flatten(0, 1), None, cu_seqlens, **given)[0], -1).view_as(x))


def conv_in_two(
    x: Tensor, weight: Tensor, bias: Tensor, impl: Impl = "torch", cu_seqlens: Tensor | None = None,
    unit: bool = False, **_: object,
) -> Rows:  # fmt: skip
    """The same, the second half of every row from the state that the first one left."""
    if cu_seqlens is not None:
        return conv(x, weight, bias, impl, cu_seqlens, unit)
    line, weight, half = x.flatten(2), weight.flatten(0, 1), x.shape[1] // 2
    given = _short(x, impl) | {"bias": _flat(bias)} | _unit(x, unit)
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


def _half(x: Tensor) -> int:
    return x[0, 0].numel() // 2


def _short(x: Tensor, impl: Impl) -> dict[str, Any]:
    return {"parts": [_half(x)] * 2, "after": "silu", "impl": impl}


def _unit(x: Tensor, unit: bool) -> dict[str, Any]:
    return {"unit": (_half(x), 0) if unit else None}


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
CONV_UNIT = replace(
    CONV, name="conv/unit", chunk=partial(conv_in_two, unit=True), recurrent=partial(conv, unit=True), literal=partial(conv, unit=True)
)  # fmt: skip
CONVOLUTIONS = CONV, CONV_UNIT, CONV_SLOTS


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
PIECES = L2NORM, *CONVOLUTIONS, LINEAR
