"""What the battery needs to know of Mamba-3: one row a token with grouped values, and two rows (MIMO) with the other pairs."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from needlework.ops.api import Limit, OpSpec
from needlework.ops.common.operands import Operand, identity
from needlework.ops.common.samples import decay, keys, normal, uniform
from needlework.ops.delta import chunk_delta
from needlework.ops.mamba3 import reference
from needlework.ops.mamba3.arguments import Mamba3Inputs, Pairs, checked, checked_state
from needlework.ops.mamba3.op import chunk_mamba3, recurrent_mamba3, step_mamba3
from needlework.ops.mamba3.state import Mamba3Output, Mamba3State, empty_state

H, HV, K, V, M = 1, 2, 12, 6, 4  # some pairs turn, some do not


def sample(generator: torch.Generator, B: int, T: int, style: str, *, R: int | None = None) -> dict[str, Tensor]:
    """R None: no axis of rows. Steps of up to 0.5 and angles of any sign: some tokens turn by more than a radian."""
    row = [] if R is None else [R]
    k = keys(generator, B, T * (R or 1), H, K, style)
    inputs = {
        "q": normal(generator, B, T, H, *row, K),
        "k": k if R is None else k.view(B, T, R, H, K).transpose(2, 3).contiguous(),
        "v": normal(generator, B, T, HV, V),
        "g": decay(generator, B, T, HV, style=style),
        "dt": uniform(generator, 0.05, 0.5, B, T, HV),
        "lam": uniform(generator, 0, 1, B, T, HV),
        "angle": normal(generator, B, T, M),
        "q_bias": 1 + 0.3 * normal(generator, HV, *row, K),
        "k_bias": 1 + 0.3 * normal(generator, HV, *row, K),
    }
    return inputs if R is None else inputs | {"mimo_x": 1 / R + 0.3 * normal(generator, HV, R, V)}


def literal(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, dt: Tensor, lam: Tensor, angle: Tensor, q_bias: Tensor | None = None,
    k_bias: Tensor | None = None, mimo_x: Tensor | None = None, *, pairs: Pairs = "even", initial_state: Mamba3State | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, chunk_size: int = 64, operand: Operand = identity,
) -> Mamba3Output:  # fmt: skip
    """The blocked form as the spec page prints it, with the op's arguments; chunk_size rows a block."""
    rule = checked(Mamba3Inputs(q, k, v, g, dt, lam, angle, q_bias, k_bias, mimo_x), pairs)
    start = checked_state(initial_state, q, v, angle, cu_seqlens)
    tokens = max(chunk_size // rule.q.shape[3], 1)
    o, state = reference.literal(rule, start, cu_seqlens, pairs=pairs, chunk_size=tokens, operand=operand)
    return Mamba3Output((o if q.dim() == 5 else o.squeeze(3)).to(q.dtype), state if output_final_state else None)


run: Callable[..., Mamba3Output] = partial(chunk_mamba3, output_final_state=True)


def o_and_S(out: Mamba3Output) -> tuple[Tensor, Tensor]:
    assert out.state is not None  # asked for
    return out.o, out.state.S


def as_mamba2(q: Tensor, k: Tensor, v: Tensor, g: Tensor, dt: Tensor, q_bias: Tensor, k_bias: Tensor, **_: Tensor) -> tuple:
    q, k = (x.repeat_interleave(HV // H, 2) + bias for x, bias in ((q, q_bias), (k, k_bias)))
    return tuple(chunk_delta(q, k, dt[..., None] * v, g, scale=1.0, output_final_state=True))


def turned_start(v: Tensor, angle: Tensor) -> Mamba3State:
    """Nothing seen, at an angle."""
    empty = empty_state(len(v), HV, K, V, M, dtype=v.dtype)
    return empty._replace(angle=torch.linspace(-9, 9, empty.angle.numel(), dtype=v.dtype).view(empty.angle.shape))


def equal_rows(**x: Tensor) -> Tensor:
    """Three equal rows a token; X is 1."""
    rows = {name: x[name].unsqueeze(-2).repeat_interleave(3, -2) for name in ("q", "k", "q_bias", "k_bias")}
    return run(**x | rows).o


ONE_ROW = (
    Limit(
        name="λ = 1 and a = 0 is Mamba-2's recurrence on (B + b, C + b)",
        left=lambda lam, angle, **x: o_and_S(run(lam=torch.ones_like(lam), angle=0 * angle, **x)),
        right=as_mamba2,
    ),
    Limit(
        name="λ = 0 reads nothing at token 1",
        left=lambda lam, **x: run(lam=0 * lam, **x).o[:, 0],
        right=lambda v, **x: torch.zeros_like(v[:, 0]),
        exact=True,
    ),
    Limit(
        name="the angle at the start is free",
        left=lambda **x: run(**x, initial_state=turned_start(x["v"], x["angle"])).o,
        right=lambda **x: run(**x).o,
    ),
    Limit(
        name="R equal rows are R times one row",
        left=equal_rows,
        right=lambda **x: 3 * run(**x).o[..., None, :].expand(-1, -1, -1, 3, -1),
    ),
)  # fmt: skip


def _spec(name: str, R: int | None, styles: tuple[str, ...], limits: tuple[Limit, ...], **settings) -> OpSpec:
    return OpSpec(
        name=name,
        chunk=partial(chunk_mamba3, **settings),
        recurrent=partial(recurrent_mamba3, **settings),
        literal=partial(literal, **settings),
        step=partial(step_mamba3, **settings),
        inputs=partial(sample, R=R),
        tokens=("q", "k", "v", "g", "dt", "lam", "angle"),
        half=("q", "k", "v"),
        table=lambda B: empty_state(B, HV, K, V, M, R or 1, dtype=torch.float64),
        styles=styles,
        limits=limits,
    )


SPECS = (_spec("mamba3", None, ("random", "strong"), ONE_ROW), _spec("mamba3/mimo", 2, ("random",), (), pairs="halves"))
