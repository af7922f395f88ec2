"""Linear maps: several of one input as one product, and those with a role, so that initialisation can tell them apart.

One product reads x once and gives one gradient of x where several write one each, to be added. Its own gradient is that of its parts,
one beside the other: free where a kernel writes it whole (a convolution of q, k and v) or where parts are narrow. Not where a wide
part's gradient is computed element by element, as a gate's or a rotated query's is: torch.compile then computes every part's formula
at every column and keeps one. With gradients SwiGLU, output gates and attention's q, k and v are therefore products of their own
(`wide_maps`).

A product of few rows takes as long as reading its weights, and a launch: one that copied them side by side first would read them
twice. A server therefore lays them side by side once (`laying`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from needlework.layers.norm import Later
from needlework.ops.linear.arguments import GateActivation, NormedHeads
from needlework.ops.linear.op import Activation, few, glu, linear, normed_heads_linear

ALIGNED = 8  # columns: 16 bytes of a half-precision row, without which products take slower kernels

Map = nn.Module | tuple[nn.Linear, ...]  # a tuple's maps are computed as one, their columns side by side

_LAYING: ContextVar[bool] = ContextVar("laying", default=False)


def side_by_side(x: Tensor | Later, *maps: Map) -> list[Tensor]:
    """Each map of x [… D]: an nn.Linear, a tuple of them, or an nn.Sequential that begins with one; those are one product.
    Any other module is called."""
    first = [_first(m) for one in maps for m in _each(one)]
    weights = _weights(first, x)
    if weights is None:
        return [mapped(x, m) for m in maps]
    y, sizes = x.linear(*weights) if isinstance(x, Later) else linear(x, *weights), [_columns(one) for one in maps]
    columns = y.split([*sizes, y.shape[-1] - sum(sizes)], -1)
    return [m[1:](part) if isinstance(m, nn.Sequential) else part for m, part in zip(maps, columns, strict=False)]


def wide_maps(x: Tensor | Later, *maps: Map) -> list[Tensor]:
    """`side_by_side` of wide maps: with gradients a product each."""
    return [mapped(x, m) for m in maps] if torch.is_grad_enabled() else side_by_side(x, *maps)


def gated(x: Tensor | Later, gate: nn.Module, up: nn.Module) -> Tensor:
    """silu(gate(x)) ⊙ up(x); of one row without gradients by one kernel."""
    if one_row(x) and plain(gate) and plain(up):
        return glu_of(x, (gate.weight, gate.bias), (up.weight, up.bias))
    a, b = wide_maps(x, gate, up)
    return F.silu(a) * b


def of_one_row_of_heads(m: nn.Module, heads: NormedHeads, activation: GateActivation, dtype: torch.dtype) -> Tensor | None:
    """m(heads.made(activation)) by one kernel, of one row in `dtype` without gradients; None of others."""
    if heads.x.dtype != dtype or not one_row(heads.x.flatten(-2)) or not plain(m):
        return None
    return normed_heads_linear(heads, m.weight, m.bias, activation=activation)


Weights = tuple[Tensor, Tensor | None]  # and bias


def glu_of(x: Tensor | Later, gate: Weights, up: Weights, activation: Activation = "silu") -> Tensor:
    """`ops.linear.glu`, of a norm that is not made yet too."""
    given = gate[0], up[0], gate[1], up[1]
    return x.glu(*given, activation) if isinstance(x, Later) else glu(x, *given, activation=activation)


def one_row(x: Tensor | Later) -> bool:
    """Whether x [.. D] has one row, and no gradient is asked for."""
    return not torch.is_grad_enabled() and (x.few if isinstance(x, Later) else few(x))


@contextmanager
def laying() -> Iterator[None]:
    """Inside, without gradients, the weights of maps that are asked for together move into one piece of memory, and stay there.

    Later products of these maps copy nothing. A model that is moved or cast afterwards has its weights apart again.
    """
    before = _LAYING.set(True)
    try:
        yield
    finally:
        _LAYING.reset(before)


class _Laid(NamedTuple):
    """Maps whose weights are rows of `weight` [Σ D], and biases of `bias` [Σ], as long as they are still at these addresses."""

    maps: tuple[nn.Linear, ...]
    addresses: tuple[int, ...]
    weight: Tensor
    bias: Tensor | None


def _each(one: Map) -> tuple[nn.Module, ...]:
    return one if isinstance(one, tuple) else (one,)


def _first(m: nn.Module) -> nn.Module:
    return m[0] if isinstance(m, nn.Sequential) else m


def _columns(one: Map) -> int:
    return sum(m.out_features for m in map(_first, _each(one)) if isinstance(m, nn.Linear))


def mapped(x: Tensor | Later, m: Map) -> Tensor:
    """m(x), of a tuple its maps' beside one another. A norm that is not made yet is made by a plain linear map, or before the call."""
    if isinstance(m, tuple):
        return torch.cat([mapped(x, one) for one in m], -1)
    if isinstance(x, Later):
        return x.linear(m.weight, m.bias) if plain(m) else m(x.tensor)
    return m(x)


def _weights(maps: Sequence[nn.Module], x: Tensor | Later) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of one product of the maps; None where it is not worth its copy of the weights.

    Without gradients it is where they are laid already, or x is more than they; with them whatever x is, so that ranks with fewer
    tokens round as one does.
    """
    every = [m for m in maps if plain(m)]
    if len(maps) < 2 or len(every) < len(maps):
        return None
    if torch.is_grad_enabled():
        return _beside(every)
    if (laid := _laid(every)) is not None:
        return laid
    if not torch.compiler.is_compiling() and _LAYING.get():
        return _lay(every)
    return _beside(every) if x.shape.numel() >= sum(m.weight.numel() for m in every) else None


def read_by_maps(x: Tensor) -> Tensor:
    """x rounded as linear maps round what they read under autocast; as it is without."""
    kind = x.device.type
    rounded = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if rounded else x


def plain(m: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether m(x) is x Wᵀ + b and nothing else: no adapter, no quantised weight, no hook."""
    return (
        type(m) in (Projection, OutProjection, ZeroProjection, nn.Linear)
        and type(m.weight) in (Tensor, nn.Parameter)
        and not m._forward_hooks
        and not m._forward_pre_hooks
    )


def _beside(maps: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Their weights and biases in copies, with as many rows more as make columns aligned."""
    weight, bias = torch.cat([m.weight for m in maps]), None
    if any(m.bias is not None for m in maps):
        bias = torch.cat([m.weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in maps])
    more = -len(weight) % ALIGNED
    if more:
        weight, bias = F.pad(weight, (0, 0, 0, more)), bias if bias is None else F.pad(bias, (0, more))
    return weight, bias


def _lay(maps: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    weight, bias = _beside(maps)
    at = 0
    for m in maps:
        m.weight.data = weight[at : at + m.out_features]
        if m.bias is not None and bias is not None:
            m.bias.data = bias[at : at + m.out_features]
        at += m.out_features
    maps[0].__dict__["laid"] = _Laid(tuple(maps), tuple(m.weight.data_ptr() for m in maps), weight, bias)
    return weight, bias


def _laid(maps: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None] | None:
    """What `_lay` gave for these maps."""
    laid: _Laid | None = maps[0].__dict__.get("laid")
    if laid is None or len(laid.maps) != len(maps) or any(a is not b for a, b in zip(laid.maps, maps, strict=True)):
        return None
    if not torch.compiler.is_compiling() and any(m.weight.data_ptr() != at for m, at in zip(maps, laid.addresses, strict=True)):
        return None
    return laid.weight, laid.bias


class Projection(nn.Linear):
    """torch.nn.Linear that maps one row without gradients by a kernel of its own (`ops.linear`)."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class OutProjection(Projection):
    """The map back into the residual stream. A model may start all of these at zero."""


class ZeroProjection(Projection):
    """A map that always starts at zero, weight and bias: its branch is a no-op at first."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
