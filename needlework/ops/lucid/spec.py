"""LUCID's entries in the list that checks, benchmarks and docs iterate over."""

from functools import partial

import torch
from torch import Tensor

from needlework.ops.api import Limit, OpSpec
from needlework.ops.common.samples import keys, normal, uniform
from needlework.ops.lucid.arguments import Precondition
from needlework.ops.lucid.op import chunk_lucid, step_lucid
from needlework.ops.lucid.reference import literal_lucid, recurrent_lucid
from needlework.ops.lucid.state import LucidState

H, K, V, CAPACITY, WINDOW = 2, 16, 24, 64, 21


def inputs(
    generator: torch.Generator, B: int, T: int, style: str, *, beta: bool = False, H: int = H, K: int = K, V: int = V
) -> dict[str, Tensor]:
    """Keys of norm √K/4 to 3√K/4: with one norm for all, the maximum of a "rowmax" row would always be its own key's."""
    tensors = {
        "k": keys(generator, B, T, H, K, style) * uniform(generator, 1, 3, B, T, H, 1) * (K / 16) ** 0.5,
        "v": normal(generator, B, T, H, V),
    }
    return tensors | {"beta": uniform(generator, 0, 2, B, T, H)} if beta else tensors


def table(B: int, *, rows: int = CAPACITY) -> LucidState:
    page = lambda width: torch.zeros(B, rows, H, width, dtype=torch.float64)
    return LucidState(page(K), page(V), torch.zeros(B, dtype=torch.int64))


def _unit(k: Tensor) -> Tensor:
    return k / k.norm(dim=-1, keepdim=True)


LIMITS = (
    Limit(
        name="qk solves as key does",
        left=lambda **x: chunk_lucid(**x, precondition="qk"),
        right=lambda **x: chunk_lucid(**x),
        exact=True,
    ),
    Limit(
        name="the norm of a key does not matter",
        left=lambda k, v: chunk_lucid(_unit(k), v),
        right=lambda **x: chunk_lucid(**x),
    ),
    Limit(
        name="a window as long as the sequence is none",
        left=lambda **x: chunk_lucid(**x, window=x["k"].shape[1]),
        right=lambda **x: chunk_lucid(**x),
    ),
    Limit(
        name="a global solve ignores the window",
        left=lambda **x: chunk_lucid(**x, window=WINDOW, solve="global"),
        right=lambda **x: chunk_lucid(**x),
        exact=True,
    ),
    Limit(
        name="a window of one leaves the values as they are",
        left=lambda **x: chunk_lucid(**x, window=1).y,
        right=lambda v, **_: v,
        exact=True,
    ),
    Limit(
        name="one key all along leaves the newest value and subtracts the one before",
        left=lambda k, v: chunk_lucid(k[:, :1].expand_as(k), v).y,
        right=lambda v, **_: torch.cat([v[:, :1], v[:, 1:] - v[:, :-1]], 1),
    ),
)

ROWMAX_LIMITS = (
    Limit(
        name="with keys of norm √d the maximum is the row's own, and rowmax is key",
        left=lambda k, v: chunk_lucid(K**0.5 * _unit(k), v, precondition="rowmax"),
        right=lambda k, v: chunk_lucid(k, v),
    ),
)

BETA_LIMITS = (
    Limit(
        name="beta = 1 is key",
        left=lambda k, v, beta: chunk_lucid(k, v, torch.ones_like(beta), precondition="beta"),
        right=lambda k, v, beta: chunk_lucid(k, v),
        exact=True,
    ),
    Limit(
        name="beta = 0 writes nothing",
        left=lambda k, v, beta: chunk_lucid(k, v, torch.zeros_like(beta), precondition="beta").y,
        right=lambda k, v, beta: torch.zeros_like(v),
        exact=True,
    ),
)


def _spec(name: str, limits: tuple[Limit, ...], *, precondition: Precondition = "key", window: int | None = None) -> OpSpec:
    with_beta = precondition == "beta"
    return OpSpec(
        name=name,
        chunk=partial(chunk_lucid, precondition=precondition, window=window),
        recurrent=partial(recurrent_lucid, precondition=precondition, window=window),
        literal=partial(literal_lucid, precondition=precondition, window=window),
        step=partial(step_lucid, precondition=precondition, window=window),
        inputs=partial(inputs, beta=with_beta),
        tokens=("k", "v", "beta") if with_beta else ("k", "v"),
        half=("k", "v"),
        table=partial(table, rows=window or CAPACITY),
        styles=("random", "clustered"),
        limits=limits,
    )


SPECS: tuple[OpSpec, ...] = (
    _spec("lucid", LIMITS),
    _spec("lucid/rowmax", ROWMAX_LIMITS, precondition="rowmax"),
    _spec("lucid/beta", BETA_LIMITS, precondition="beta"),
    _spec("lucid/window", (), window=WINDOW),
    _spec("lucid/rowmax-window", (), precondition="rowmax", window=WINDOW),
)
