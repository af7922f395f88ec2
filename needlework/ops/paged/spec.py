"""Attention over pages in the list that checks, doctor and docs iterate over: as functions of dense tensors, which pages serve.

Every sequence lies on pages in shuffled order, in views of one buffer, among rows that hold NaN; block tables name no page before the
window. It comes in three calls: the prefill of a first third, the prefill of the rest but the newest token, and the decode of that, beside
a padded row; once whole and once behind a window.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from needlework.ops.api import Impl, Limit, OpSpec
from needlework.ops.common.packing import sequences
from needlework.ops.common.samples import keys, normal, uniform
from needlework.ops.paged.op import paged_attention, paged_differential, paged_polar, write_pages
from needlework.ops.paged.reference import differential, literal_attention, recurrent_attention
from needlework.ops.polar.reference import literal_polar, recurrent_polar
from needlework.ops.polar.spec import POLAR

WINDOW = 21


class Read(NamedTuple):
    o: Tensor  # [B T Hq V]
    windowed: Tensor
    state: None = None


class ReadPolar(NamedTuple):
    direction: Tensor  # [B T Hq V]
    magnitude: Tensor  # [B T Hq]
    windowed_direction: Tensor
    windowed_magnitude: Tensor
    state: None = None


def served(
    attend: Callable[..., Tensor | tuple[Tensor, ...]], q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None, *,
    cu_seqlens: Tensor | None = None, chunk_size: int = 16, impl: Impl = "auto", output_final_state: bool = False, window: int = WINDOW, **settings: Any,
) -> list[Tensor]:  # fmt: skip
    """The outputs of `attend` over pages of chunk_size rows, and those behind the window."""
    PG, device = chunk_size, q.device
    ends = _ends(q, cu_seqlens)
    q, k, v, shape = *(x.flatten(0, 1) for x in (q, k, v)), q.shape[:2]
    length = ends.diff()
    N, NB = len(length), max(1, -(-int(length.max()) // PG))
    token = torch.arange(len(q), device=device)
    n = torch.searchsorted(ends, token, right=True) - 1
    at = token - ends[n]
    table = torch.randperm(N * NB, generator=torch.Generator().manual_seed(0)).view(N, NB).to(device)
    pages = [torch.full((N * NB, 2, PG, *x.shape[1:]), torch.nan, dtype=x.dtype, device=device)[:, 1] for x in (k, v)]
    decays = {}
    if decay is not None:
        decay = decay.flatten(0, 1).double()
        held = decay.new_full((N * NB, 2, PG, decay.shape[1]), torch.nan)[:, 1]
        decays = {"decay": decay, "decay_pages": held}
    write_pages(k, v, pages[0], pages[1], table[n, at // PG] * PG + at % PG, **decays, impl=impl)
    table = torch.cat((table, table[:1]))  # of a padded row, which comes with every call
    third, one = length // 3, length.clamp(max=1)
    early, newest = at < third[n], at == length[n] - 1

    def call(W: int | None, tokens: Tensor, new: Tensor, held: Tensor, **packing: Tensor) -> list[Tensor]:
        """The outputs of q[tokens], `new` of each sequence, which then holds `held`; those of the padded row are zeros."""
        freed = (torch.arange(NB, device=device) + 1) * PG <= (held - new + 1 - (W or NB * PG))[:, None]
        freed = torch.cat((freed, freed[:1] | True))
        held = torch.cat((held, held.new_tensor([-1])))
        where = {"block_table": torch.where(freed, -1, table).to(torch.int32), "length": held.to(torch.int32)}
        added = {} if decay is None else decays | {"decay": decay[tokens]}
        found = attend(q[tokens], *pages, **where, **packing, **added, window=W, impl=impl, **settings)
        return list(found) if isinstance(found, tuple) else [found]

    def read(W: int | None) -> list[Tensor]:
        parts = []
        for asks, new, held in ((early, third, third), (~early & ~newest, length - third - one, length - one)):
            cu_seqlens = torch.cat((new[:1] * 0, new.cumsum(0), new.sum()[None]))
            parts.append(call(W, asks.nonzero()[:, 0], new, held, cu_seqlens=cu_seqlens))
        if len(q):
            # a sequence without tokens asks with another's query, and its answer is dropped
            last = call(W, torch.cat((ends[1:] - 1, ends[:1])).clamp(min=0), one, length)
            assert not any(x[N].any() for x in last), "a padded row is not zero"
            parts.append([x[:N][length > 0] for x in last])
        order = torch.cat([asks.nonzero()[:, 0] for asks in (early, ~early & ~newest, newest)]).argsort()
        return [torch.cat(column)[order].unflatten(0, shape) for column in zip(*parts, strict=True)]

    return [*read(None), *read(window)]


@torch.no_grad()
def by_tokens(
    form: Callable[..., Tensor | tuple[Tensor, ...]], *, output_final_state: bool = False, window: int = WINDOW, **inputs: Any
) -> list[Tensor]:  # fmt: skip
    """The same of a form that sees all tokens, without a gradient too; Polar's returns a state after its two outputs."""
    found = (form(window=W, **inputs) for W in (None, window))
    return [x for outputs in found for x in ((outputs,) if isinstance(outputs, Tensor) else outputs[:2])]


def _one(outputs: Callable[..., list[Tensor]], **inputs: Any) -> Read:
    o, windowed = outputs(**inputs)
    return Read(o, windowed)


def _two(outputs: Callable[..., list[Tensor]], **inputs: Any) -> ReadPolar:
    direction, magnitude, windowed_direction, windowed_magnitude = outputs(**inputs)
    return ReadPolar(direction, magnitude, windowed_direction, windowed_magnitude)


def _ends(q: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    sequences(cu_seqlens, len(q))
    return torch.arange(len(q) + 1, device=q.device) * q.shape[1] if cu_seqlens is None else cu_seqlens


def inputs(
    generator: torch.Generator, B: int, T: int, style: str, *, Hq: int = 4, Hkv: int = 2, d: int = 16, V: int = 24
) -> dict[str, Tensor]:
    """q, k of norm √d, two query heads a group."""
    q, k = (d**0.5 * keys(generator, B, T, H, d, style) for H in (Hq, Hkv))
    return {"q": q, "k": k, "v": normal(generator, B, T, Hkv, V)}


def _with_lam(*given, **sizes: int) -> dict[str, Tensor]:
    x = inputs(*given, **sizes)
    return x | {"lam": torch.linspace(0.2, 0.9, x["q"].shape[2], dtype=x["q"].dtype)}


def _forgetting(generator: torch.Generator, *given, **sizes: int) -> dict[str, Tensor]:
    """A slope a head, and decays of which some are steep after a long past: only their differences count."""
    x = inputs(generator, *given, **sizes)
    B, T, Hq = x["q"].shape[:3]
    decay = -uniform(generator, 0, 1, B, T, Hq).pow(4).mul(3).cumsum(1) - 1e4
    return x | {"slopes": torch.linspace(0.05, 0.5, Hq, dtype=decay.dtype), "decay": decay}


def _dense(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """PyTorch's attention."""
    lag = torch.arange(q.shape[1], device=q.device)[:, None] - torch.arange(q.shape[1], device=q.device)
    seen = (lag >= 0) & (lag < (window or q.shape[1]))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)


def _halves(q: Tensor, k: Tensor, v: Tensor, **_) -> Tensor:
    return _dense(q.chunk(2, -1)[0], k.chunk(2, -1)[0], v)


def _falling(decay: Tensor, slopes: Tensor) -> Tensor:
    """G_t = −m t, from any number on."""
    return 7 - slopes * torch.arange(decay.shape[1], dtype=decay.dtype)[:, None].expand_as(decay)


def _expanded(v: Tensor, Hq: int) -> Tensor:
    return v.repeat_interleave(Hq // v.shape[2], 2)


SOFTMAX, DIFFERENTIAL = (partial(_one, partial(served, attend)) for attend in (paged_attention, paged_differential))
POLAR_PAGED = partial(_two, partial(served, paged_polar))
SKIP = {
    "split_then_resume": "the past lies in the pages: a call of the dense form is two prefills and a decode",
    "step_is_prefill": "decode is the step, and the dense form ends with it",
    "gradients": "serving has no backward",
    "custom_ops_pass_opcheck": "serving has no backward; the operators' own test is in tests/ops/test_triton_paged.py",
    "compiles_without_a_graph_break": "the dense form lays pages out, which reads lengths; tests/ops/test_triton_paged.py compiles a call",
    "no_tokens": "there is no state to return",
}  # fmt: skip


def _spec(
    name: str, read: Callable, chunk: Callable, recurrent: Callable, literal: Callable, half: tuple[str, ...],
    tokens: tuple[str, ...] = ("q", "k", "v"), **more: Any,
) -> OpSpec:  # fmt: skip
    return OpSpec(
        name=f"paged/{name}",
        chunk=chunk,
        recurrent=partial(read, partial(by_tokens, recurrent)),
        literal=partial(read, partial(by_tokens, literal)),
        step=None,
        table=None,
        tokens=tokens,
        half=half,
        chunk_sizes=(16, 32, 48),  # of a page
        skip=SKIP,
        **more,
    )


SPECS: tuple[OpSpec, ...] = (
    _spec(
        "softmax", _one, SOFTMAX, recurrent_attention, literal_attention, ("q", "k", "v"),
        inputs=inputs, styles=("random", "clustered"),
        limits=(
            Limit(
                name="read whole and behind a window it is PyTorch's attention on dense tensors",
                left=lambda **x: SOFTMAX(**x)[:2],
                right=lambda **x: (_dense(**x), _dense(**x, window=WINDOW)),
            ),
            Limit(
                name="a window of one shows each query its own key alone",
                left=lambda **x: SOFTMAX(**x, window=1).windowed,
                right=lambda q, v, **_: _expanded(v, q.shape[2]),
            ),
        ),
    ),
    _spec(
        "forgetting", _one, SOFTMAX, recurrent_attention, literal_attention, ("q", "k", "v"),
        inputs=_forgetting, styles=("random",), tokens=("q", "k", "v", "decay"),
        limits=(
            Limit(
                name="decays that fall by a slope a token are that slope",
                left=lambda q, k, v, slopes, decay: SOFTMAX(q=q, k=k, v=v, slopes=slopes)[:2],
                right=lambda q, k, v, slopes, decay: SOFTMAX(q=q, k=k, v=v, decay=_falling(decay, slopes))[:2],
            ),
            Limit(
                name="without slopes and decays it is softmax attention",
                left=lambda q, k, v, slopes, decay: SOFTMAX(q=q, k=k, v=v, slopes=0 * slopes, decay=torch.ones_like(decay))[:2],
                right=lambda q, k, v, slopes, decay: SOFTMAX(q=q, k=k, v=v)[:2],
            ),
        ),
    ),
    _spec(
        "differential", _one, DIFFERENTIAL, partial(differential, recurrent_attention), partial(differential, literal_attention),
        ("q", "k", "v"), inputs=_with_lam, styles=("random", "clustered"),
        limits=(
            Limit(
                name="λ = 0 leaves the first softmax",
                left=lambda lam, **x: DIFFERENTIAL(**x, lam=0 * lam).o,
                right=_halves,
            ),
            Limit(
                name="equal halves leave 1 − λ of a softmax",
                left=lambda q, k, v, lam: DIFFERENTIAL(q=torch.cat((q, q), -1), k=torch.cat((k, k), -1), v=v, lam=lam).o,
                right=lambda q, k, v, lam: (1 - lam)[:, None] * _dense(q, k, v),
            ),
        ),
    ),
    _spec(
        "polar", _two, POLAR_PAGED, recurrent_polar, literal_polar, POLAR.half,
        inputs=partial(POLAR.inputs, Hq=4), styles=POLAR.styles,
        limits=(
            Limit(
                name="over pages it is Polar attention on dense tensors",
                left=lambda **x: POLAR_PAGED(**x)[:4],
                right=lambda **x: tuple(by_tokens(POLAR.chunk, **x)),
            ),
        ),
    ),
)  # fmt: skip
