"""LUCID on pages behind a block table, as a form that can be judged beside `chunk_lucid`: prefill in two calls, then a token.

Sequences lie on pages in shuffled order, which are parted from one another, among rows that hold NaN and behind table entries that are
no pages. A padded row comes with every call.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from needlework.ops.api import Impl, OpSpec
from needlework.ops.lucid.arguments import Solve, solve_window
from needlework.ops.lucid.op import chunk_lucid
from needlework.ops.lucid.paged import solve_pages
from needlework.ops.lucid.reference import literal_lucid, recurrent_lucid
from needlework.ops.lucid.spec import inputs as sample

PAGE, WINDOW = 16, 21
NOWHERE = 10**6  # an entry of a block table that is not to be read


class Tokens(NamedTuple):
    k: Tensor  # [T Hkv d]
    v: Tensor
    beta: Tensor | None

    def map(self, f: Callable[[Tensor], Tensor]) -> "Tokens":
        return Tokens(f(self.k), f(self.v), None if self.beta is None else f(self.beta))


class Pages(NamedTuple):
    """N sequences of whole length `total` on shuffled pages; nothing is written yet."""

    k: Tensor  # [n PG Hkv d], NaN, parted from one another
    y: Tensor
    table: Tensor  # [N NB] int32
    total: Tensor  # [N]

    @classmethod
    def of(cls, k: Tensor, v: Tensor, total: Tensor, PG: int = PAGE, seed: int = 0) -> "Pages":
        N, NB = len(total), -(-int(total.max()) // PG) + 1
        table = torch.randperm(N * NB + 3, generator=torch.Generator().manual_seed(seed))[: N * NB].view(N, NB)
        apart = lambda x: x.new_full((N * NB + 3, PG + 1, *x.shape[-2:]), float("nan"))[:, :PG]
        return cls(apart(k), apart(v), table.to(k.device, torch.int32), total)

    def rows(self, n: Tensor, t: Tensor) -> Tensor:
        """Where tokens t of sequences n lie."""
        PG = self.k.shape[1]
        return self.table[n, t // PG].long() * PG + t % PG

    def seen(self, first: Tensor, total: Tensor) -> Tensor:
        """The table for calls that read tokens from `first` on: other entries are no pages."""
        entry = torch.arange(self.table.shape[1], device=self.table.device) * self.k.shape[1]
        read = (entry < total[:, None]) & (entry + self.k.shape[1] > first[:, None])
        return torch.where(read, self.table, NOWHERE)


class Solved(NamedTuple):
    """y of all tokens as prefill and, of each sequence's last token, decoding gives it; the pages' rows."""

    y: Tensor  # [B T Hkv V]
    newest: Tensor  # [N Hkv V] again, without sequences of no token
    rows_k: Tensor  # [B T Hkv d]
    rows_y: Tensor
    state: None = None


def served(
    k: Tensor, v: Tensor, beta: Tensor | None = None, *, impl: Impl = "torch", cu_seqlens: Tensor | None = None,
    output_final_state: bool = False, **settings: Any,
) -> Solved:  # fmt: skip
    """Under impl="triton" by `solve_pages`, else as `chunk_lucid` has it."""
    if impl != "triton":
        return by_tokens(partial(chunk_lucid, impl=impl), k, v, beta, cu_seqlens=cu_seqlens, **settings)
    ends = ends_of(k, cu_seqlens)
    flat = Tokens(k, v, beta).map(lambda x: x.flatten(0, 1))
    found = in_calls(flat, ends, Pages.of(k, v, ends.diff()), impl=impl, **settings)
    y, rows_k, rows_y = (x.unflatten(0, k.shape[:2]) for x in (found.y, found.rows_k, found.rows_y))
    return Solved(y, found.newest, rows_k, rows_y)


def in_calls(
    tokens: Tokens, ends: Tensor, pages: Pages, *, window: int | None = None, solve: Solve = "window", **settings: Any
) -> Solved:  # fmt: skip
    """A prefill of each sequence's first third, one of what follows but for the last token, and that token decoded. A prefill has a
    padded row with tokens, and tokens of no sequence; sequences of no token are the decoding's padded rows."""
    length = ends.diff()
    token = torch.arange(len(tokens.k), device=ends.device)
    n = torch.searchsorted(ends, token, right=True) - 1
    at = token - ends[n]
    y = torch.zeros_like(tokens.v)
    W = solve_window(window, solve)
    first_seen = lambda past: past * 0 if W is None else (past + 1 - W).clamp(min=0)

    def call(own: Tokens, before: Tensor, **where: Tensor) -> Tensor:
        hidden = at < first_seen(before)[n]
        return _call(own, pages, pages.rows(n[hidden], at[hidden]), window=window, solve=solve, **where, **settings)

    last = (length - 1).clamp(min=0)
    for before, held in ((length * 0, length // 3), (length // 3, last)):
        new = ((at >= before[n]) & (at < held[n])).nonzero()[:, 0]
        count = (held - before).cumsum(0)
        own = tokens.map(lambda x, new=new: torch.cat([x[new], x.new_full((5, *x.shape[1:]), float("nan"))]))
        found = call(
            own,
            before,
            block_table=torch.cat([pages.seen(first_seen(before), held), pages.table[:1] * 0 + NOWHERE]),
            length=torch.cat([held, held[:1] * 0 - 1]).int(),
            rows=torch.cat([pages.rows(n[new], at[new]), new.new_full((5,), -1)]),
            cu_seqlens=torch.cat([count[:1] * 0, count, count[-1:] + 2]).int(),
        )
        assert not found[len(new) :].any(), "tokens of no sequence are not zero"
        y[new] = found[: len(new)]
    some = (length > 0).nonzero()[:, 0]
    new = _newest(ends)
    spread = lambda x, padding: x.new_full((len(length), *x.shape[1:]), padding).index_copy(0, some, x)
    newest = call(
        tokens.map(lambda x: spread(x[new], float("nan"))),
        last,
        block_table=pages.seen(first_seen(last), length),
        length=torch.where(length > 0, length, -1),
        rows=spread(pages.rows(n[new], at[new]), -1),
    )
    assert not newest[length == 0].any(), "a padded row is not zero"
    y[new] = newest[some]
    rows = pages.rows(n, at)
    held_k, held_y = (x.flatten(0, 1)[rows] for x in (pages.k, pages.y))
    return Solved(y, newest[some], held_k, held_y)


def _call(tokens: Tokens, pages: Pages, hidden: Tensor, *, rows: Tensor, **settings: Any) -> Tensor:
    """`solve_pages`, with NaN in `hidden` rows. The pages' rows that no token goes to stay as they are, to the bit."""
    PG = pages.k.shape[1]
    place = hidden // PG, hidden % PG
    kept = [x[place] for x in (pages.k, pages.y)]
    pages.k[place] = pages.y[place] = float("nan")
    before = pages.k.clone(), pages.y.clone()
    y = solve_pages(*tokens, k_pages=pages.k, y_pages=pages.y, rows=rows, **settings)
    written = torch.zeros(pages.k.shape[:2], dtype=torch.bool, device=rows.device)
    written.view(-1)[rows[rows >= 0]] = True
    for now, earlier in zip((pages.k, pages.y), before, strict=True):
        assert torch.equal(_bits(now[~written]), _bits(earlier[~written])), "rows that no new token has are changed"
    pages.k[place], pages.y[place] = kept
    return y


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def by_tokens(
    form: Callable[..., Any], k: Tensor, v: Tensor, beta: Tensor | None = None, *, cu_seqlens: Tensor | None = None,
    output_final_state: bool = False, **settings: Any,
) -> Solved:  # fmt: skip
    """The same of a form that sees all tokens."""
    y = form(k, v, beta, cu_seqlens=cu_seqlens, **settings).y
    return Solved(y, y.flatten(0, 1)[_newest(ends_of(k, cu_seqlens))], k, y)


def _newest(ends: Tensor) -> Tensor:
    """The last token of each sequence that has any."""
    return (ends[1:] - 1)[ends.diff() > 0]


def ends_of(k: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return torch.arange(len(k) + 1, device=k.device) * k.shape[1] if cu_seqlens is None else cu_seqlens


def _spec(name: str, precondition: str, window: int | None = None) -> OpSpec:
    bound = {"precondition": precondition, "window": window}
    return OpSpec(
        name=name,
        chunk=partial(served, **bound),
        recurrent=partial(by_tokens, recurrent_lucid, **bound),
        literal=partial(by_tokens, literal_lucid, **bound),
        step=None,
        table=None,
        inputs=partial(sample, beta=precondition == "beta"),
        tokens=("k", "v", "beta") if precondition == "beta" else ("k", "v"),
        half=("k", "v"),
        styles=("random", "clustered"),
        skip={"gradients": "serving has no backward"},
    )


LUCID_PAGES = (
    _spec("lucid/pages", "beta"),
    _spec("lucid/window-pages", "key", WINDOW),
    _spec("lucid/rowmax-pages", "rowmax"),
)
