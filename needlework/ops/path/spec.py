"""PaTH attention's entries in the list that checks, benchmarks and docs iterate over."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from needlework.ops.api import Limit, OpSpec
from needlework.ops.common.samples import keys, normal, uniform, unit
from needlework.ops.delta.custom_op import delta_fwd
from needlework.ops.delta.op import chunk_delta
from needlework.ops.lucid.op import chunk_lucid
from needlework.ops.path.op import chunk_path
from needlework.ops.path.reference import literal_path, recurrent_path
from needlework.ops.path.solve.op import chunk_lucid_path, step_lucid_path
from needlework.ops.path.solve.reference import literal_lucid_path, recurrent_lucid_path
from needlework.ops.path.solve.state import LucidPathState
from needlework.ops.path.state import BLOCK, PathOutput, PathState
from needlework.ops.path.step import step_path
from needlework.ops.runtime.each import each

K, V, CAPACITY, WINDOW = 16, 24, 64, 21
run: Callable[..., PathOutput] = chunk_path


def inputs(
    generator: torch.Generator, B: int, T: int, style: str, *, Hq: int = 2, Hkv: int = 2, K: int = K, V: int = V
) -> dict[str, Tensor]:
    """q, k of norm √K; "clustered" keys and reflections come from eight clusters each."""
    q, k = (K**0.5 * keys(generator, B, T, H, K, style) for H in (Hq, Hkv))
    return {
        "q": q,
        "k": k,
        "v": normal(generator, B, T, Hkv, V),
        "beta": uniform(generator, 0, 2, B, T, Hkv),
        "w": keys(generator, B, T, Hkv, K, style),
    }


def forgetting(generator: torch.Generator, B: int, T: int, style: str, *, Hq: int = 2, **sizes: int) -> dict[str, Tensor]:
    """The same with gates, most of which forget little and some nearly all."""
    x = inputs(generator, B, T, style, Hq=Hq, **sizes)
    return x | {"g": -3 * uniform(generator, 0, 1, B, T, Hq).pow(4)}


def table(B: int, *, Hkv: int = 2, rows: int = CAPACITY, gates: int | None = None) -> PathState:
    """gates: query heads whose gates are summed."""
    zeros = lambda *shape: torch.zeros(B, *shape, dtype=torch.float64)
    pages = zeros(rows, Hkv, K), zeros(rows, Hkv, V)
    decay = None if gates is None else zeros(rows, gates)
    return PathState(*pages, zeros(BLOCK, Hkv, K), zeros(BLOCK, Hkv), torch.zeros(B, dtype=torch.int64), decay)


def _softmax(q: Tensor, k: Tensor, v: Tensor, **_) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _forgetting_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **_) -> Tensor:
    G = q.shape[2] // k.shape[2]
    q, k, v, sums = (x.transpose(1, 2) for x in (q, k.repeat_interleave(G, 2), v.repeat_interleave(G, 2), g.cumsum(1)))
    bias = (sums[..., :, None] - sums[..., None, :]).masked_fill(torch.ones(q.shape[2], q.shape[2]).triu(1).bool(), -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


def _scores(q: Tensor, k: Tensor, v: Tensor, **rule: Tensor) -> Tensor:
    """A [B T H T], zeros above the diagonal, from what the op returns for one-hot values: ln P_ij − ln P_ii + A_ii."""
    T = q.shape[1]
    one_hot = torch.eye(T, dtype=v.dtype)[:, None].expand(len(q), T, k.shape[2], T)
    log_p = run(q, k, one_hot, **rule).o.log()
    own = (q * k).sum(-1) * K**-0.5
    diagonal = log_p.diagonal(dim1=1, dim2=3).transpose(1, 2)  # [B T H]
    past = torch.ones(T, T, dtype=torch.bool).tril()[:, None]
    return torch.where(past, log_p + (own - diagonal)[..., None], 0)


def _linear_read(k: Tensor, beta: Tensor, w: Tensor, v: Tensor, **x: Tensor) -> Tensor:
    A = _scores(k=beta[..., None] * w, beta=beta, w=w, v=v, **x)
    return torch.einsum("bihj,bjhv->bihv", A, v)


def _two_rows(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, w: Tensor) -> Tensor:
    """The delta engine's read of one-hot values, with two rows a token: (w, u = 0, e = βw) and (k, u = v, e = 0)."""
    T = q.shape[1]
    u = torch.eye(T, dtype=v.dtype)[:, None].expand(len(q), T, k.shape[2], T)
    rows = lambda first, second: torch.stack([first, second], 3)
    nothing = torch.zeros_like
    written = rows(w, k), rows(nothing(u), u), rows(beta[..., None] * w, nothing(k))
    start = q.new_zeros(len(q), k.shape[2], K, T)
    return delta_fwd(q, *written, nothing(beta)[..., None], start, None, K**-0.5, "previous", 64)[0]


def _by_steps(q: Tensor, **x: Tensor) -> Tensor:
    """Token by token, more of them than a block has."""
    B, T = q.shape[:2]
    state = table(B, Hkv=x["k"].shape[2], rows=T)
    steps = (each(lambda y, t=t: y[:, t], q, x["k"], x["v"], x["beta"], x["w"]) for t in range(T))
    return torch.stack([step_path(*token, state=state) for token in steps], 1)


def _expanded(**x: Tensor) -> Tensor:
    G = x["q"].shape[2] // x["k"].shape[2]
    return run(**{n: y if n == "q" else y.repeat_interleave(G, 2) for n, y in x.items()}, window=WINDOW).o


def _key_norms(beta: Tensor, **x: Tensor) -> Tensor:
    """Of the keys that the state keeps, some of which were carried on."""
    state = run(**x, beta=2 * torch.ones_like(beta), output_final_state=True).state
    assert state is not None  # asked for
    return state.k.norm(dim=-1)


LIMITS = (
    Limit(
        name="beta = 0 is softmax attention without positions",
        left=lambda beta, **x: run(**x, beta=torch.zeros_like(beta)).o,
        right=_softmax,
    ),
    Limit(name="beta = 2 keeps the norm of every carried key", left=_key_norms, right=lambda k, **_: k.norm(dim=-1)),
    Limit(
        name="a linear read with k = beta w is DeltaNet",
        left=_linear_read,
        right=lambda q, k, v, beta, w: chunk_delta(q, w, v, beta=beta).o,
    ),
    Limit(name="the scores are the delta engine's with two rows a token", left=_scores, right=_two_rows),
    Limit(
        name="reading pages that are carried once a block is carrying every key at every token",
        left=_by_steps,
        right=lambda **x: recurrent_path(**x).o,
    ),
    Limit(
        name="a window as long as the sequence is none",
        left=lambda **x: run(**x, window=x["q"].shape[1]).o,
        right=lambda **x: run(**x).o,
        exact=True,
    ),
    Limit(
        name="a window of one reads the token's own value",
        left=lambda **x: run(**x, window=1).o,
        right=lambda v, **_: v,
    ),
)

GROUPED = (Limit(name="grouped heads are expanded heads", left=lambda **x: run(**x, window=WINDOW).o, right=_expanded),)

FORGETTING = (
    Limit(
        name="with beta = 0 and gates it is forgetting attention",
        left=lambda beta, **x: run(**x, beta=torch.zeros_like(beta)).o,
        right=_forgetting_attention,
    ),
    Limit(
        name="gates that forget nothing are none",
        left=lambda g, **x: run(**x, g=torch.zeros_like(g)).o,
        right=lambda g, **x: run(**x).o,
        exact=True,
    ),
)


def _spec(name: str, limits: tuple[Limit, ...], *, Hq: int = 2, window: int | None = None, gates: bool = False) -> OpSpec:
    return OpSpec(
        name=name,
        chunk=partial(chunk_path, window=window),
        recurrent=partial(recurrent_path, window=window),
        literal=partial(literal_path, window=window),
        step=partial(step_path, window=window),
        inputs=partial(forgetting if gates else inputs, Hq=Hq),
        tokens=("q", "k", "v", "beta", "w", *(("g",) if gates else ())),
        half=("q", "k", "v", "w"),
        table=partial(table, rows=window or CAPACITY, gates=Hq if gates else None),
        styles=("random", "clustered"),
        limits=limits,
    )


def solve_table(B: int, *, rows: int = CAPACITY) -> LucidPathState:
    page_k, page_y, *rest, _ = table(B, rows=rows)
    return LucidPathState(page_k, page_k[..., 0].clone(), page_y, *rest)


def solve_inputs(
    generator: torch.Generator, B: int, T: int, style: str, *, Hkv: int = 2, K: int = K, V: int = V, **_: int
) -> dict[str, Tensor]:
    """Keys of norm √K/4 to 3√K/4; there are no queries."""
    x = inputs(generator, B, T, style, Hkv=Hkv, K=K, V=V)
    del x["q"]
    return x | {"k": x["k"] * uniform(generator, 0.25, 0.75, B, T, Hkv, 1)}


SOLVE_LIMITS = (
    Limit(
        name="with beta = 0 the solve is LUCID's without positions",
        left=lambda beta, **x: chunk_lucid_path(**x, beta=torch.zeros_like(beta)).y,
        right=lambda k, v, **_: chunk_lucid(k, v).y,
    ),
    Limit(
        name="the norm of a key does not matter to the solve",
        left=lambda k, **x: chunk_lucid_path(k=unit(k), **x).y,
        right=lambda **x: chunk_lucid_path(**x).y,
    ),
    Limit(
        name="a window of one leaves the values as they are",
        left=lambda **x: chunk_lucid_path(**x, window=1).y,
        right=lambda v, **_: v,
        exact=True,
    ),
)


def _solve(name: str, limits: tuple[Limit, ...], window: int | None = None) -> OpSpec:
    return OpSpec(
        name=name,
        chunk=partial(chunk_lucid_path, window=window),
        recurrent=partial(recurrent_lucid_path, window=window),
        literal=partial(literal_lucid_path, window=window),
        step=partial(step_lucid_path, window=window),
        inputs=solve_inputs,
        tokens=("k", "v", "beta", "w"),
        half=("k", "v", "w"),
        table=partial(solve_table, rows=window or CAPACITY),
        styles=("random", "clustered"),
        limits=limits,
    )


SPECS: tuple[OpSpec, ...] = (
    _spec("path", LIMITS),
    _spec("path/window", GROUPED, Hq=4, window=WINDOW),
    _spec("path/fox", FORGETTING, Hq=4, gates=True),
    _solve("path/lucid", SOLVE_LIMITS),
    _solve("path/lucid-window", (), WINDOW),
)
