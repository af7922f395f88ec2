"""Polar on pages behind a block table, as a form that can be judged beside `chunk_polar`: prefill in two calls, then decode.

Sequences lie on pages in shuffled order, among rows that hold NaN; each is read whole and behind a window. A padded row comes with
the decode, and a sequence of no tokens is a row without keys, whose direction is the null's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from needlework.ops.api import Impl, OpSpec
from needlework.ops.polar.op import chunk_polar
from needlework.ops.polar.paged import decode_polar, prefill_polar
from needlework.ops.polar.reference import literal_polar, recurrent_polar
from needlework.ops.polar.spec import POLAR

PAGE, WINDOW = 16, 21


class Read(NamedTuple):
    """What queries read, [B T Hq ·], and the newest of each sequence, [N Hq ·]."""

    direction: Tensor
    magnitude: Tensor
    newest_direction: Tensor
    newest_magnitude: Tensor


class Served(NamedTuple):
    whole: Read
    windowed: Read
    state: None = None


def served(
    q: Tensor, k: Tensor, v: Tensor, *, impl: Impl = "torch", cu_seqlens: Tensor | None = None, output_final_state: bool = False,
    **parameters: Any,
) -> Served:  # fmt: skip
    """Under impl="triton" by the kernels of `ops/polar/paged.py`, else as `chunk_polar` has it."""
    if impl != "triton":
        return by_tokens(partial(chunk_polar, impl=impl), q, k, v, cu_seqlens=cu_seqlens, **parameters)
    ends = _ends(q, cu_seqlens)
    length = ends.diff()
    N, NB = len(length), -(-int(length.max()) // PAGE)
    token = torch.arange(q.shape[0] * q.shape[1], device=q.device)
    n = torch.searchsorted(ends, token, right=True) - 1
    at = token - ends[n]
    table = torch.randperm(N * NB, generator=torch.Generator().manual_seed(0)).view(N, NB).to(q.device)

    def laid(x: Tensor) -> Tensor:
        pages = x.new_full((N * NB, PAGE, *x.shape[2:]), float("nan"))
        pages[table[n, at // PAGE], at % PAGE] = x.flatten(0, 1)
        return pages

    settings = {"k": laid(k), "v": laid(v), "impl": "triton", **parameters}
    early = at < (length // 3)[n]
    whole, windowed = (_read(q, table.to(torch.int32), ends, early, **settings, window=window) for window in (None, WINDOW))
    return Served(whole, windowed)


def _read(q: Tensor, table: Tensor, ends: Tensor, early: Tensor, **settings) -> Read:
    """A first prefill of the `early` tokens, one of the rest, and the newest again by itself."""
    length, flat, found = ends.diff(), q.flatten(0, 1), []
    third = length // 3
    for tokens, new, held in ((early, third, third), (~early, length - third, length)):
        cu_seqlens = torch.cat((new[:1] * 0, new.cumsum(0)))
        where = {"block_table": table, "length": held.to(torch.int32), "cu_seqlens": cu_seqlens}
        found.append(prefill_polar(flat[tokens][None], **where, **settings))
    order = torch.cat((early.nonzero(), (~early).nonzero()))[:, 0].argsort()
    direction, magnitude = (torch.cat(parts, 1)[0, order].unflatten(0, q.shape[:2]) for parts in zip(*found, strict=True))
    newest = flat[(ends[1:] - 1).clamp(min=0)]
    padded = lambda x, row: torch.cat((x, row[None]))
    where = {"block_table": padded(table, table[0]), "length": padded(length, length.new_tensor(-1)).to(torch.int32)}
    last = decode_polar(padded(newest, newest[0]), **where, **settings)
    assert not any(x[-1].any() for x in last), "a padded row is not zero"
    return Read(direction, magnitude, *(x[:-1] for x in last))


def by_tokens(
    form: Callable[..., tuple], q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor | None = None,
    output_final_state: bool = False, **settings: Any,
) -> Served:  # fmt: skip
    """The same of a form that sees all tokens."""
    ends = _ends(q, cu_seqlens)
    some = ends.diff() > 0
    null = normalize(settings["v_null"], dim=-1, eps=1e-6)

    def read(window: int | None) -> Read:
        found = form(q, k, v, cu_seqlens=cu_seqlens, window=window, **settings)[:2]
        direction, magnitude = (x.flatten(0, 1)[(ends[1:] - 1).clamp(min=0)] for x in found)
        every = found[0], found[1]
        return Read(*every, torch.where(some[:, None, None], direction, null), torch.where(some[:, None], magnitude, 0))

    return Served(read(None), read(WINDOW))


def _ends(q: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return torch.arange(len(q) + 1, device=q.device) * q.shape[1] if cu_seqlens is None else cu_seqlens


PAGES = OpSpec(
    name="polar/pages",
    chunk=served,
    recurrent=partial(by_tokens, recurrent_polar),
    literal=partial(by_tokens, literal_polar),
    step=None,
    table=None,
    inputs=POLAR.inputs,
    tokens=POLAR.tokens,
    half=POLAR.half,
    styles=POLAR.styles,
    skip={"gradients": "serving has no backward"},
)
