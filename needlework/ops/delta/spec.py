"""What the battery needs to know of the delta family: the rules of the table, grouped values, and what collapses to what."""

from functools import partial

import torch
from torch import Tensor

from needlework.ops.api import Limit, OpSpec
from needlework.ops.common.operands import Operand, identity
from needlework.ops.common.samples import decay, keys, normal, uniform, unit
from needlework.ops.delta import reference
from needlework.ops.delta.arguments import Prediction, checked, checked_state
from needlework.ops.delta.inputs import DeltaInputs
from needlework.ops.delta.op import chunk_delta, step_delta
from needlework.ops.delta.recurrent import DeltaOutput, recurrent_delta

H, K, V = 2, 16, 12


def sample(
    generator: torch.Generator, B: int, T: int, style: str, *, HV: int = H, gate: str = "none", beta: bool = True
) -> dict[str, Tensor]:
    """gate: "none", "scalar" or "channel". "strong": 30 % of the gates at −30 among gates of −1e-3."""
    inputs = {
        "q": unit(normal(generator, B, T, H, K)),
        "k": keys(generator, B, T, H, K, style),
        "v": normal(generator, B, T, HV, V),
    }
    if gate != "none":
        inputs["g"] = decay(generator, B, T, HV, *([K] if gate == "channel" else []), style=style)
    if beta:
        inputs["beta"] = uniform(generator, 0.1, 1.0, B, T, HV)
    return inputs


def sample_gdn2(generator: torch.Generator, B: int, T: int, style: str) -> dict[str, Tensor]:
    """With a read query of its own."""
    inputs = sample(generator, B, T, style, gate="channel", beta=False)
    gates = {"erase": uniform(generator, 0, 1, B, T, H, K), "write": uniform(generator, 0, 1, B, T, H, V)}
    return {**inputs, **gates, "q_read": unit(normal(generator, B, T, H, K))}


def sample_given(generator: torch.Generator, B: int, T: int, style: str) -> dict[str, Tensor]:
    """As RWKV-7 has it: e is a unit vector, and a share of each of its channels is written along."""
    inputs = sample(generator, B, T, style, gate="channel", beta=False)
    direction = inputs["k"]
    share = uniform(generator, 0, 1, B, T, H, K)
    return inputs | {"k": share * direction, "erase": direction, "write": uniform(generator, 0, 1, B, T, H, V)}


def literal(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None, *, erase: Tensor | None = None,
    write: Tensor | None = None, prediction: Prediction = "decayed", q_read: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    chunk_size: int = 64, operand: Operand = identity,
) -> DeltaOutput:  # fmt: skip
    """The chunk form as the spec page prints it, with the op's arguments."""
    rule = checked(DeltaInputs(q, k, v, g, beta, erase=erase, write=write, q_read=q_read), prediction)
    o, state = reference.literal(
        *rule,
        prediction=prediction,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        initial_state=checked_state(initial_state, rule.k, rule.v, cu_seqlens),
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        operand=operand,
    )
    return DeltaOutput(o, state if output_final_state else None)


def _spec(
    name: str, inputs=sample, *, HV: int = H, tokens: tuple[str, ...], styles=("random",), limits=(), **settings
) -> OpSpec:
    return OpSpec(
        name=name,
        chunk=partial(chunk_delta, **settings),
        recurrent=partial(recurrent_delta, **settings),
        literal=partial(literal, **settings),
        step=partial(step_delta, **settings),
        inputs=inputs,
        tokens=tokens,
        half=("q", "k", "v", "q_read"),
        table=lambda B: torch.zeros(B, HV, K, V, dtype=torch.float64),
        styles=styles,
        limits=limits,
    )


run = partial(chunk_delta, output_final_state=True)
ADDITIVE = (
    Limit(
        name="linear attention is GLA with g = 0",
        left=lambda q, k, v, g: run(q, k, v),
        right=lambda q, k, v, g: run(q, k, v, torch.zeros_like(g)),
    ),
    Limit(
        name="without decay the read is causal attention without softmax",
        left=lambda q, k, v, g: run(q, k, v, scale=1.0).o,
        right=lambda q, k, v, g: torch.einsum(
            "bhts,bshv->bthv", torch.einsum("bthk,bshk->bhts", q, k).tril(), v
        ),
    ),
    Limit(
        name="a scalar gate is a channel gate with equal channels",
        left=lambda q, k, v, g: run(q, k, v, g[..., 0]),
        right=lambda q, k, v, g: run(q, k, v, g[..., :1].expand_as(g)),
    ),
)  # fmt: skip
GROUPED = (
    Limit(
        name="value heads that share a key are heads of that key",
        left=lambda q, k, v, g: run(q, k, v, g),
        right=lambda q, k, v, g: run(_each_head(q, v), _each_head(k, v), v, g),
    ),
)
GATED = (
    Limit(
        name="DeltaNet is Gated DeltaNet with g = 0",
        left=lambda q, k, v, g, beta: run(q, k, v, None, beta),
        right=lambda q, k, v, g, beta: run(q, k, v, torch.zeros_like(g), beta),
        exact=True,
    ),
    Limit(
        name="beta = 0 is pure decay",
        left=lambda q, k, v, g, beta: run(q, k, v, g, 0 * beta, initial_state=_one_state(v)).state,
        right=lambda q, k, v, g, beta: g.sum(1).exp()[..., None, None] * _one_state(v),
    ),
)
CHANNEL = (
    Limit(
        name="KDA with equal channels is Gated DeltaNet",
        left=lambda q, k, v, g, beta: run(q, k, v, g[..., :1].expand_as(g), beta),
        right=lambda q, k, v, g, beta: run(q, k, v, g[..., 0], beta),
    ),
    Limit(
        name="\"previous\" is \"decayed\" with g = 0",
        left=lambda q, k, v, g, beta: run(q, k, v, None, beta, prediction="previous"),
        right=lambda q, k, v, g, beta: run(q, k, v, None, beta),
    ),
)  # fmt: skip
GDN2 = (
    Limit(
        name="GDN-2 with all gates at beta is KDA",
        left=lambda q, k, v, g, erase, write, q_read: run(
            q, k, v, g, erase=erase[..., :1].expand_as(erase), write=erase[..., :1].expand_as(write)
        ),
        right=lambda q, k, v, g, erase, write, q_read: run(q, k, v, g, erase[..., 0]),
    ),
    Limit(
        name="GDN-2 with erase = 0 and write = 1 is GLA",
        left=lambda q, k, v, g, erase, write, q_read: run(q, k, v, g, erase=0 * erase, write=torch.ones_like(write)),
        right=lambda q, k, v, g, erase, write, q_read: run(q, k, v, g),
    ),
)


GIVEN = (
    Limit(
        name='a direction that is given as erase ⊙ k is "previous"',
        left=lambda q, k, v, g, erase, write: run(q, k, v, g, erase=erase * k, write=write, prediction="given"),
        right=lambda q, k, v, g, erase, write: run(q, k, v, g, erase=erase, write=write, prediction="previous"),
    ),
)


def _each_head(x: Tensor, v: Tensor) -> Tensor:
    return x.repeat_interleave(v.shape[2] // x.shape[2], 2)


def _one_state(v: Tensor) -> Tensor:
    return torch.ones(v.shape[0], v.shape[2], K, V, dtype=v.dtype)


SPECS = (
    _spec("delta/gla", partial(sample, gate="channel", beta=False), tokens=("q", "k", "v", "g"), limits=ADDITIVE),
    _spec(
        "delta/grouped",
        partial(sample, gate="scalar", HV=2 * H, beta=False),
        HV=2 * H,
        tokens=("q", "k", "v", "g"),
        styles=("random", "strong"),
        limits=GROUPED,
    ),
    _spec(
        "delta/gated",
        partial(sample, gate="scalar", HV=2 * H),
        HV=2 * H,
        tokens=("q", "k", "v", "g", "beta"),
        styles=("random", "strong"),
        limits=GATED,
    ),
    _spec(
        "delta/kda",
        partial(sample, gate="channel"),
        tokens=("q", "k", "v", "g", "beta"),
        styles=("clustered", "identical", "strong"),
        limits=CHANNEL,
    ),
    _spec(
        "delta/gdn2",
        sample_gdn2,
        tokens=("q", "k", "v", "g", "erase", "write", "q_read"),
        limits=GDN2,
    ),
    _spec(
        "delta/previous",
        partial(sample, gate="channel"),
        tokens=("q", "k", "v", "g", "beta"),
        prediction="previous",
    ),
    _spec(
        "delta/given",
        sample_given,
        tokens=("q", "k", "v", "g", "erase", "write"),
        limits=GIVEN,
        prediction="given",
    ),
)
