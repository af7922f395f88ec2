"""Polar attention's entry in the list that checks, benchmarks and docs iterate over."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from needlework.ops.api import Limit, OpSpec
from needlework.ops.common.samples import keys, normal
from needlework.ops.polar.op import chunk_polar, step_polar
from needlework.ops.polar.reference import literal_polar, recurrent_polar
from needlework.ops.polar.state import PolarOutput, PolarState

CAPACITY = 64  # rows of the slot table
run: Callable[..., PolarOutput] = chunk_polar


def inputs(
    generator: torch.Generator, B: int, T: int, style: str, *, Hq: int = 2, Hkv: int = 2, d: int = 16, V: int = 24
) -> dict[str, Tensor]:
    """q, k of norm √d, parameters around their starts; "null": a sink that takes all but e^-10 of the weight and more."""
    q, k = (d**0.5 * keys(generator, B, T, H, d, style) for H in (Hq, Hkv))
    start = {"alpha": -1.0, "beta": -1.5, "gamma": 0.5, "null_base": 12.0 if style == "null" else 2.0}
    return {
        "q": q,
        "k": k,
        "v": normal(generator, B, T, Hkv, V),
        **{name: at + 0.3 * normal(generator, Hq) for name, at in start.items()},
        "v_null": 0.3 * normal(generator, Hq, V),
    }


def table(B: int, *, Hkv: int = 2, d: int = 16, V: int = 24, rows: int = CAPACITY) -> PolarState:
    page = lambda width: torch.zeros(B, rows, Hkv, width, dtype=torch.float64)
    return PolarState(page(d), page(V), torch.zeros(B, dtype=torch.int64))


def _softmax_direction(q: Tensor, k: Tensor, v: Tensor, **_) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.normalize(F.scaled_dot_product_attention(q, k, v, is_causal=True), dim=-1).transpose(1, 2)


def _with(**numbers: float) -> Callable[..., PolarOutput]:
    """chunk_polar with some tensors filled with one number."""
    return lambda **x: run(**x | {n: torch.full_like(x[n], at) for n, at in numbers.items()})


def _expanded(**inputs: Tensor) -> PolarOutput:
    G = inputs["q"].shape[2] // inputs["k"].shape[2]
    return run(**{n: x.repeat_interleave(G, 2) if n in ("k", "v") else x for n, x in inputs.items()})


def _even_magnitude(q: Tensor, beta: Tensor, alpha: Tensor, gamma: Tensor, null_base: float, **_) -> Tensor:
    """Magnitude where all n visible keys have score 0: n_eff = n, whatever the null takes."""
    n = torch.arange(1, q.shape[1] + 1, dtype=q.dtype)[:, None]
    temp, null = 1 + F.softplus(alpha) * n.log(), null_base + F.softplus(gamma) * (n + 1).log().sqrt()
    m_eff = n * torch.sigmoid(n.log() - temp * null)
    return torch.tanh(F.softplus(beta) * torch.log1p(m_eff)).expand(q.shape[:3])


LIMITS = (
    Limit(
        name="without temperature and null the direction is softmax attention's",
        left=lambda **x: _with(alpha=-200.0, null_base=-1e6)(**x).direction,
        right=_softmax_direction,
    ),
    Limit(
        name="a null that takes all leaves its own direction and no magnitude",
        left=lambda **x: _with(null_base=1e6)(**x)[:2],
        right=lambda q, v_null, **_: (F.normalize(v_null, dim=-1).expand(*q.shape[:3], -1), q.new_zeros(q.shape[:3])),
    ),
    Limit(
        name="with queries of zero every key counts: n_eff = n",
        left=lambda **x: _with(q=0.0, null_base=-1e6)(**x).magnitude,
        right=lambda **x: _even_magnitude(**x | {"null_base": -1e6}),
    ),
    Limit(
        name="also under a null that takes nearly all: n_eff = n, m_eff = n (1 − w_N)",
        left=lambda **x: _with(q=0.0, null_base=12.0)(**x).magnitude,
        right=lambda **x: _even_magnitude(**x | {"null_base": 12.0}),
    ),
    Limit(
        name="a window as long as the sequence is none",
        left=lambda **x: run(**x, window=x["q"].shape[1])[:2],
        right=lambda **x: run(**x)[:2],
        exact=True,
    ),
    Limit(
        name="a window of one shows each query its own key alone",
        left=lambda **x: _with(null_base=-1e6)(**x, window=1).direction,
        right=lambda v, **_: F.normalize(v, dim=-1),
    ),
)

POLAR = OpSpec(
    name="polar",
    chunk=chunk_polar,
    recurrent=recurrent_polar,
    literal=literal_polar,
    step=step_polar,
    inputs=inputs,
    tokens=("q", "k", "v"),
    half=("q", "k", "v"),
    table=table,
    styles=("random", "clustered", "null"),
    limits=LIMITS,
)


def _variant(name: str, Hkv: int, window: int | None, limits: tuple[Limit, ...]) -> OpSpec:
    """4 query heads over Hkv key-value heads, behind a window."""
    return OpSpec(
        name=f"polar/{name}",
        chunk=partial(chunk_polar, window=window),
        recurrent=partial(recurrent_polar, window=window),
        literal=partial(literal_polar, window=window),
        step=partial(step_polar, window=window),
        inputs=partial(inputs, Hq=4, Hkv=Hkv),
        tokens=POLAR.tokens,
        half=POLAR.half,
        table=partial(table, Hkv=Hkv, rows=window or CAPACITY),
        limits=limits,
    )


SPECS: tuple[OpSpec, ...] = (
    POLAR,
    _variant(
        "grouped",
        1,
        None,
        (
            Limit(
                name="grouped heads are expanded heads",
                left=lambda **x: run(**x)[:2],
                right=lambda **x: _expanded(**x)[:2],
            ),
        ),
    ),
    _variant("window", 2, 21, ()),
)
