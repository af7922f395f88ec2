"""What the battery needs to know of Q-Delta: grouped values, a read query, and the authors' kernels' variant."""

import math
from functools import partial

import torch
from torch import Tensor

from needlework.ops.api import Limit, OpSpec
from needlework.ops.common.operands import Operand, identity
from needlework.ops.common.samples import decay, keys, normal, uniform, unit
from needlework.ops.delta import chunk_delta
from needlework.ops.delta.arguments import checked_state
from needlework.ops.qdelta import reference
from needlework.ops.qdelta.arguments import Coupling, checked
from needlework.ops.qdelta.op import QDeltaOutput, chunk_qdelta, recurrent_qdelta, step_qdelta

H, HV, K, V = 2, 4, 16, 12


def sample(generator: torch.Generator, B: int, T: int, style: str, *, HV: int = HV, q_read: bool = False) -> dict[str, Tensor]:
    """Unit q and k. "strong": 30 % of the gates at −30 among gates of −1e-3. "hard": clustered keys, q = k, β = λ = 1, g = 0."""
    inputs = {
        "q": unit(normal(generator, B, T, H, K)),
        "k": keys(generator, B, T, H, K, "clustered" if style == "hard" else style),
        "v": normal(generator, B, T, HV, V),
        "g": decay(generator, B, T, HV, style=style),
        "beta": uniform(generator, 0, 1, B, T, HV),
        "lam": uniform(generator, 0, 1, B, T, HV),
    }
    if style == "hard":
        one = torch.ones_like(inputs["g"])
        inputs |= {"q": inputs["k"], "g": 0 * one, "beta": one, "lam": one}
    return inputs | ({"q_read": unit(normal(generator, B, T, H, K))} if q_read else {})


def growing(
    generator: torch.Generator, B: int, T: int, style: str = "random", *, H: int = 1, HV: int = 2, K: int = K, V: int = V
) -> dict[str, Tensor]:
    """q turns by 45° a token and k ⟂ q, λ = β = 1: a state in their plane grows by √2 e^−0.22 = 1.13 a token. "cut": one gate of −30."""
    plane = torch.linalg.qr(normal(generator, B, H, K, 2))[0].mT[:, None]  # [B 1 H 2 K]
    angle = (torch.arange(T, dtype=torch.float64) * -math.pi / 4)[:, None, None]
    one = torch.ones(B, T, HV, dtype=torch.float64)
    inputs = {
        "q": angle.cos() * plane[..., 0, :] + angle.sin() * plane[..., 1, :],
        "k": -angle.sin() * plane[..., 0, :] + angle.cos() * plane[..., 1, :],
        "v": normal(generator, B, T, HV, V),
        "g": -0.22 * one,
        "beta": one,
        "lam": one.clone(),
    }
    if style == "cut":
        inputs["g"][:, T // 2] = -30.0  # what has grown is gone at once
    return inputs


def literal(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, lam: Tensor, *, coupling: Coupling = "recurrent",
    q_read: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, chunk_size: int = 64, operand: Operand = identity,
) -> QDeltaOutput:  # fmt: skip
    """The chunk form as the spec page prints it, with the op's arguments."""
    rule = checked(q, k, v, g, beta, lam, coupling, q_read)
    o, state = reference.literal(
        *rule,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        initial_state=checked_state(initial_state, rule.k, rule.v, cu_seqlens),
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        transposed=coupling == "transposed",
        operand=operand,
    )
    return QDeltaOutput(o, state if output_final_state else None)


run = partial(chunk_qdelta, output_final_state=True)
LIMITS = (
    Limit(
        name="GDN-2 whose erase gate is β (1 + λ q/k), channel by channel",
        left=lambda **x: tuple(run(**x)),
        right=lambda **x: _gdn2(**x),
    ),
    Limit(
        name="λ = 0 is Gated DeltaNet",
        left=lambda q, k, v, g, beta, lam: tuple(run(q, k, v, g, beta, 0 * lam)),
        right=lambda q, k, v, g, beta, lam: tuple(chunk_delta(q, k, v, g, beta, output_final_state=True)),
        exact=True,
    ),
    Limit(
        name="λ = 0 and g = 0 is DeltaNet",
        left=lambda q, k, v, g, beta, lam: tuple(run(q, k, v, 0 * g, beta, 0 * lam)),
        right=lambda q, k, v, g, beta, lam: tuple(chunk_delta(q, k, v, None, beta, output_final_state=True)),
        exact=True,
    ),
    Limit(
        name="β = 0 is pure decay",
        left=lambda q, k, v, g, beta, lam: run(q, k, v, g, 0 * beta, lam, initial_state=_ones(v)).state,
        right=lambda q, k, v, g, beta, lam: g.sum(1).exp()[..., None, None] * _ones(v),
    ),
)
TRANSPOSED_LIMITS = (
    Limit(
        name="λ = 0 makes the transposed coupling the rule",
        left=lambda q, k, v, g, beta, lam: run(q, k, v, g, beta, 0 * lam, coupling="transposed"),
        right=lambda q, k, v, g, beta, lam: run(q, k, v, g, beta, 0 * lam),
    ),
)
_CHUNK = "chunks of 64 from the sequence's start are part of the definition"
_PLAIN = "plain PyTorch under autograd, for published checkpoints: nothing is registered"


def _gdn2(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
    """A sibling's op computes the rule: b ⊙ k = β (k + λq)."""
    erase, write = beta[..., None] * (1 + lam[..., None] * q / k), beta[..., None].expand_as(v)
    o, state = chunk_delta(q, k, v, g, erase=erase, write=write, output_final_state=True)
    assert state is not None  # asked for
    return o, state


def _ones(v: Tensor) -> Tensor:
    return torch.ones(v.shape[0], v.shape[2], K, V, dtype=v.dtype)


def _spec(
    name: str, *, HV: int = HV, q_read: bool = False, styles=("random",), coupling: Coupling = "recurrent", **more
) -> OpSpec:
    return OpSpec(
        name=name,
        chunk=partial(chunk_qdelta, coupling=coupling),
        recurrent=partial(recurrent_qdelta, coupling=coupling),
        literal=partial(literal, coupling=coupling),
        step=partial(step_qdelta, coupling=coupling),
        inputs=partial(sample, HV=HV, q_read=q_read),
        tokens=("q", "k", "v", "g", "beta", "lam", *(["q_read"] if q_read else [])),
        half=("q", "k", "v", "q_read"),
        table=lambda B: torch.zeros(B, HV, K, V, dtype=torch.float64),
        styles=styles,
        **more,
    )


SPECS = (
    _spec("qdelta", HV=H, styles=("random", "identical", "hard", "strong"), limits=LIMITS),
    _spec("qdelta/grouped", q_read=True),
    _spec(
        "qdelta/transposed",
        HV=H,
        coupling="transposed",
        chunk_sizes=(64,),
        limits=TRANSPOSED_LIMITS,
        skip={
            "chunk_size_is_invisible": _CHUNK,
            "split_then_resume": _CHUNK,
            "step_is_prefill": _CHUNK,
            "compiles_without_a_graph_break": _PLAIN,
            "custom_ops_pass_opcheck": _PLAIN,
        },
    ),
)
