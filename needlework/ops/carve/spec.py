"""What the battery needs to know of CARVE: both predictions, rank 4, content chunks of other lengths than the kernel's."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import softplus

from needlework.ops.api import Limit, OpSpec
from needlework.ops.carve import reference
from needlework.ops.carve.arguments import CarveInputs, Prediction, begun, biased, checked
from needlework.ops.carve.op import chunk_carve, recurrent_carve, step_carve
from needlework.ops.carve.state import CarveOutput, CarveState, empty_state
from needlework.ops.common.operands import Operand, identity
from needlework.ops.common.samples import keys, normal, uniform, unit
from needlework.ops.delta import chunk_delta

H, K, V, r = 2, 16, 12, 4


def sample(generator: torch.Generator, B: int, T: int, style: str, *, R: int = 1) -> dict[str, Tensor]:
    """W₂ well away from zero. "strong": 30 % of the channels' gates at −30 among gates of −1e-3."""
    k = keys(generator, B, T * R, H, K, style).view(B, T, R, H, K).transpose(2, 3)
    v = normal(generator, B, T, H, R, V)
    f = uniform(generator, -4, 0, B, T, H, K)
    if style == "strong":
        f = torch.where(uniform(generator, 0, 1, B, T, H, K) < 0.3, 30.0, -7.0).to(f)
    return {
        "q": unit(normal(generator, B, T, H, K)),
        "k": k.contiguous() if R > 1 else k.squeeze(3),
        "v": v if R > 1 else v.squeeze(3),
        "f": f,
        "b": normal(generator, B, T, H, K),
        "w": uniform(generator, -2, 2, B, T, H) if R == 1 else uniform(generator, -3, -0.5, B, T, H),  # σ(w) < 2/R
        "A_log": uniform(generator, -0.5, 0, H, K),
        "dt_bias": 0.1 * normal(generator, H, K),
        "w1": normal(generator, r, V),
        "w2": normal(generator, K, r),
        "b_bias": 0.5 * normal(generator, H, K) - 4,
    }


def literal(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, w: Tensor,
    A_log: Tensor, dt_bias: Tensor, w1: Tensor, w2: Tensor, *,
    b_bias: Tensor | None = None, content_chunk: int = 64, prediction: Prediction = "previous", scale: float | None = None,
    initial_state: CarveState | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    chunk_size: int = 64, operand: Operand = identity,
) -> CarveOutput:  # fmt: skip
    """The chunk form as the spec page prints it, with the op's arguments."""
    tensors = CarveInputs(q, k, v, f, b, w, A_log, dt_bias, w1, w2)
    tensors, settings = checked(tensors, b_bias, content_chunk, prediction, scale, initial_state, cu_seqlens)
    o, state = reference.literal(
        *biased(tensors, b_bias),
        state=begun(initial_state, tensors, cu_seqlens),
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        operand=operand,
        **settings._asdict(),
    )
    return CarveOutput(o, state if output_final_state else None)


def blind(**inputs: Tensor) -> dict[str, Tensor]:
    return {**inputs, "w2": torch.zeros_like(inputs["w2"])}


def without_content(
    *, content_chunk: int, prediction: Prediction = "previous", chunk_size: int = 64
) -> Callable[..., CarveOutput]:
    settings = {"content_chunk": content_chunk, "prediction": prediction, "chunk_size": chunk_size}
    run: Callable[..., CarveOutput] = partial(chunk_carve, output_final_state=True, **settings)
    return lambda **x: run(**blind(**x))


def memory(run: Callable[..., CarveOutput]) -> Callable[..., tuple[Tensor, Tensor]]:
    """o and S: all that a memory-blind layer has."""

    def parts(**x: Tensor) -> tuple[Tensor, Tensor]:
        o, state = run(**x)
        assert state is not None  # asked for
        return o, state.S

    return parts


def gates_given(prediction: Prediction) -> Callable[..., tuple]:
    """The delta family with g = l and beta = w, l from the page's own words: −exp(A) softplus(f + τ) + log(1 − b)."""

    def run(*, q, k, v, f, b, w, A_log, dt_bias, w1, w2, b_bias) -> tuple:
        l = -A_log.exp() * softplus(f + dt_bias) + torch.log1p(-torch.sigmoid(b + b_bias))
        return chunk_delta(q, k, v, l, torch.sigmoid(w), prediction=prediction, output_final_state=True)

    return run


LIMITS = (
    Limit(
        name="W₂ = 0 is the memory-blind layer, whatever the content chunk",
        left=memory(without_content(content_chunk=64, chunk_size=32)),
        right=memory(without_content(content_chunk=10**6, chunk_size=32)),
        exact=True,
    ),
    Limit(
        name="W₂ = 0 is the delta rule with gates given that predicts from S_{t-1}",
        left=memory(without_content(content_chunk=16)),
        right=gates_given("previous"),
    ),
    Limit(
        name="W₂ = 0, decayed, is Kimi Delta Attention with g = l and beta = w",
        left=memory(without_content(content_chunk=16, prediction="decayed")),
        right=gates_given("decayed"),
    ),
)


def _spec(name: str, *, R: int = 1, styles: tuple[str, ...] = ("random",), limits=(), **settings) -> OpSpec:
    return OpSpec(
        name=name,
        chunk=partial(chunk_carve, **settings),
        recurrent=partial(recurrent_carve, **settings),
        literal=partial(literal, **settings),
        step=partial(step_carve, **settings),
        inputs=partial(sample, R=R),
        tokens=("q", "k", "v", "f", "b", "w"),
        half=("q", "k", "v", "f", "b"),
        table=lambda B: empty_state(B, H, K, V, dtype=torch.float64),
        styles=styles,
        limits=limits,
    )


SPECS = (
    _spec("carve", styles=("random", "identical", "strong"), limits=LIMITS, content_chunk=16),
    _spec("carve/decayed", content_chunk=24, prediction="decayed"),
    _spec("carve/rank4", R=4, content_chunk=40),
)
