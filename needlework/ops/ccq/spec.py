"""What the battery needs to know of CCQ: plain, decay-aligned, and with two value heads on each key head."""

from collections.abc import Callable

import torch
from torch import Tensor

from needlework.ops.api import Limit, OpSpec
from needlework.ops.ccq.op import chunk_ccq, step_ccq
from needlework.ops.ccq.reference import literal_ccq, recurrent_ccq
from needlework.ops.ccq.state import CcqOutput, empty_state
from needlework.ops.common.samples import decay, keys, normal, uniform

H, K = 2, 16
run: Callable[..., CcqOutput] = chunk_ccq


def sample(generator: torch.Generator, B: int, T: int, style: str, *, HV: int = H, aligned: bool = False) -> dict[str, Tensor]:
    inputs = {
        "q": normal(generator, B, T, H, K),
        "k": keys(generator, B, T, H, K, style),
        "eta": uniform(generator, 0.02, 0.98, B, T, HV),
    }
    if aligned:
        inputs["g"] = decay(generator, B, T, H, style=style)
    return inputs


def spread(x: Tensor, eta: Tensor) -> Tensor:
    """One copy of each key head for each of its value heads."""
    return x.repeat_interleave(eta.shape[2] // x.shape[2], 2)


def unchanged(q: Tensor, eta: Tensor, **_: Tensor) -> Tensor:
    return spread(q, eta)


def still(**inputs: Tensor) -> dict[str, Tensor]:
    """One key, repeated."""
    return inputs | {"k": inputs["k"][:, :1].expand_as(inputs["k"])}


NO_LAMBDA = Limit(
    name="λ = 0 is the identity",
    left=lambda eta, **x: chunk_ccq(eta=0 * eta, **x).q,
    right=unchanged,
    exact=True,
)
ONE_KEY = Limit(name="keys that do not vary leave the query", left=lambda **x: run(**still(**x)).q, right=unchanged)
NO_DECAY = Limit(
    name="g = 0 is plain CCQ",
    left=lambda g, **x: chunk_ccq(g=0 * g, output_final_state=True, **x),
    right=lambda g, **x: chunk_ccq(output_final_state=True, **x),
    exact=True,
)
FORGOTTEN = Limit(name="g → −∞ is the identity", left=lambda g, **x: chunk_ccq(g=g - 1e4, **x).q, right=unchanged, exact=True)
GROUPED = Limit(
    name="value heads of a group share the statistics",
    left=lambda **x: chunk_ccq(**x).q,
    right=lambda **x: run(**{name: spread(t, x["eta"]) for name, t in x.items()}).q,
)


TWO_KEYS = Limit(
    name="a key and its opposite in turn: after each pair the query loses the share λ of what lies along the key",
    left=lambda k, **x: chunk_ccq(k=_in_turn(k), **x).q[:, 1::2],
    right=lambda q, k, eta: _cleaned_along(k[:, :1], q, eta)[:, 1::2],
)


def _in_turn(k: Tensor) -> Tensor:
    """k_0, −k_0, k_0, …: after an even number of tokens μ = 0 and Σ = k_0 k_0ᵀ."""
    sign = 1 - 2 * (torch.arange(k.shape[1]) % 2)
    return k[:, :1] * sign[:, None, None]


def _cleaned_along(k: Tensor, q: Tensor, eta: Tensor) -> Tensor:
    return q - eta[..., None] * (q * k).sum(-1, keepdim=True) * k


def _spec(name: str, styles: tuple[str, ...], limits: tuple[Limit, ...], *, HV: int = H, aligned: bool = False) -> OpSpec:
    return OpSpec(
        name=name,
        chunk=chunk_ccq,
        recurrent=recurrent_ccq,
        literal=literal_ccq,
        step=step_ccq,
        inputs=lambda generator, B, T, style: sample(generator, B, T, style, HV=HV, aligned=aligned),
        tokens=("q", "k", "eta", "g") if aligned else ("q", "k", "eta"),
        half=("q", "k"),
        table=lambda B: empty_state(B, H, K, dtype=torch.float64),
        styles=styles,
        limits=limits,
    )


SPECS = (
    _spec("ccq", ("random", "clustered"), (NO_LAMBDA, ONE_KEY, TWO_KEYS)),
    _spec("ccq/aligned", ("random", "clustered", "strong"), (NO_LAMBDA, ONE_KEY, NO_DECAY, FORGOTTEN), aligned=True),
    _spec("ccq/grouped", ("random",), (NO_LAMBDA, GROUPED), HV=2 * H, aligned=True),
)
