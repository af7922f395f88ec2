"""LUCID's decoding as a form that can be judged beside its definition: every token decodes, as a sequence of its own.

The pages are filled by one prefill. Then all tokens of all sequences are new tokens of one call, each behind the earlier rows of its
sequence, and each with a row of its own elsewhere that takes its k and y.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from needlework.ops.api import Impl, OpSpec
from needlework.ops.lucid.arguments import Solve, solve_window
from needlework.ops.lucid.paged import paged_lucid, solve_pages
from needlework.ops.lucid.reference import literal_lucid, recurrent_lucid
from needlework.ops.lucid.spec import inputs as sample
from needlework.ops.paged.reference import literal_attention, recurrent_attention
from needlework.testing.lucid_pages import PAGE, Pages, Tokens, ends_of

WINDOW, GROUP = 21, 2


class Decoded(NamedTuple):
    """Of all tokens: what was read, and the rows that took k and the solved value."""

    o: Tensor  # [B T Hq V]
    rows_k: Tensor  # [B T Hkv d]
    rows_y: Tensor
    state: None = None


def served(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None, *, impl: Impl = "torch", cu_seqlens: Tensor | None = None,
    output_final_state: bool = False, window: int | None = None, solve: Solve = "window", chunk_size: int = PAGE, **settings: Any,
) -> Decoded:  # fmt: skip
    """By `paged_lucid`, on pages of chunk_size rows."""
    ends, PG, shape, device = ends_of(k, cu_seqlens), chunk_size, k.shape[:2], k.device
    flat, q = Tokens(k, v, beta).map(lambda x: x.flatten(0, 1)), q.flatten(0, 1)
    T, total = len(q), ends.diff()
    token = torch.arange(T, device=device)
    n = torch.searchsorted(ends, token, right=True) - 1
    at = token - ends[n]
    pages = Pages.of(k, v, total, PG)
    more = -(-T // PG)
    grown = lambda x: torch.cat((x, x.new_full((more, *x.shape[1:]), torch.nan)))
    held = {"k_pages": grown(pages.k), "y_pages": grown(pages.y)}
    settings |= {"window": window, "solve": solve, "impl": impl}
    prefill = {"block_table": pages.table, "length": total, "rows": pages.rows(n, at), "cu_seqlens": ends}
    solve_pages(*flat, **held, **prefill, **settings)
    W = solve_window(window, solve)
    oldest = at * 0 if W is None else (at + 1 - W).clamp(min=0)
    own = pages._replace(table=pages.table[n]).seen(oldest, at + 1)
    rows = len(pages.k) * PG + token
    o = paged_lucid(q, *flat, **held, block_table=own, length=at + 1, rows=rows, **settings)
    rows_k, rows_y = (x.flatten(0, 1)[rows].unflatten(0, shape) for x in held.values())
    return Decoded(o.unflatten(0, shape), rows_k, rows_y)


def by_tokens(
    solve: Callable[..., Any], attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None, *,
    precondition: str, window: int | None, output_final_state: bool = False, **settings: Any,
) -> Decoded:  # fmt: skip
    """The same of forms that see all tokens."""
    y = solve(k, v, beta, precondition=precondition, window=window, **settings).y
    return Decoded(attend(q, k, y, window=window, **settings), k, y)


def by_blocks(*tokens: Tensor, chunk_size: int = 64, **settings: Any) -> Decoded:
    """The blocked forms: a token that decodes is a block of its own to the solve, and chunk_size keys are one to the read."""
    solve, attend = partial(literal_lucid, chunk_size=1), partial(literal_attention, chunk_size=chunk_size)
    return by_tokens(solve, attend, *tokens, **settings)


def inputs(generator: torch.Generator, *sizes: Any, beta: bool = False, **widths: int) -> dict[str, Tensor]:
    """`lucid`'s, with queries of the size of keys, two a key-value head."""
    x = sample(generator, *sizes, beta=beta, **widths)
    draw = lambda: torch.randn(x["k"].shape, generator=generator, dtype=x["k"].dtype)
    return {"q": torch.cat([draw() for _ in range(GROUP)], 2)} | x


def _spec(name: str, precondition: str, window: int | None = None) -> OpSpec:
    bound, beta = {"precondition": precondition, "window": window}, precondition == "beta"
    return OpSpec(
        name=name,
        chunk=partial(served, **bound),
        recurrent=partial(by_tokens, recurrent_lucid, recurrent_attention, **bound),
        literal=partial(by_blocks, **bound),
        step=None,
        table=None,
        inputs=partial(inputs, beta=beta),
        tokens=("q", "k", "v", "beta") if beta else ("q", "k", "v"),
        half=("q", "k", "v"),
        styles=("random", "clustered"),
        chunk_sizes=(16, 32, 48),  # of a page
        skip={"gradients": "serving has no backward"},
    )


LUCID_DECODE = (
    _spec("lucid/decode", "beta"),
    _spec("lucid/window-decode", "key", WINDOW),
    _spec("lucid/rowmax-decode", "rowmax"),
)
