"""PaTH and LUCID-PaTH on pages behind a block table, as forms that can be judged beside those that see all tokens: prefill in two
calls, then two tokens one by one.

Pages lie in shuffled order, parted from one another, and hold NaN until they are written, as slots do. A padded row comes with every call.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from needlework.ops.api import Impl, OpSpec
from needlework.ops.common.shapes import width
from needlework.ops.path import (
    BLOCK,
    chunk_lucid_path,
    chunk_path,
    paged_lucid_path,
    paged_path,
    recurrent_lucid_path,
    recurrent_path,
    solve_path_pages,
)
from needlework.ops.path.reference import literal_path
from needlework.ops.path.solve.reference import literal_lucid_path
from needlework.ops.path.spec import forgetting, inputs, solve_inputs

PAGE, WINDOW, NOWHERE, DECODED = 16, 90, 10**6, 2
Tokens = Mapping[str, Tensor]  # q where there is one, k, v, beta and w, g where there is a forget gate, [T ...]


class Memory(NamedTuple):
    """Of N sequences of `length` tokens in the end; nothing is written yet."""

    pages: dict[str, Tensor]  # of keys, norms, values and sums of gates
    open_block: dict[str, Tensor]
    table: Tensor  # [N NB] int32
    slots: Tensor  # [N]

    @classmethod
    def of(cls, tokens: Tokens, length: Tensor) -> "Memory":
        k, v, N = tokens["k"], tokens["v"], len(length)
        NB, g = -(-int(length.max()) // PAGE) + 1, torch.Generator().manual_seed(0)
        table = torch.randperm(N * NB + 3, generator=g)[: N * NB].view(N, NB)
        nothing = lambda dtype, *shape: torch.full(shape, torch.nan, dtype=dtype, device=k.device)
        page = lambda dtype, *row: nothing(dtype, N * NB + 3, PAGE + 1, k.shape[1], *row)[:, :PAGE]
        wide, K, V = width(k), k.shape[2], v.shape[2]
        pages = {"k_pages": page(wide, K), "norm_pages": page(wide), "y_pages": page(v.dtype, V)}
        if "g" in tokens:
            shape = N * NB + 3, PAGE + 1, tokens["g"].shape[1]
            pages["decay_pages"] = nothing(torch.float64, *shape)[:, :PAGE]
        block = {"w_slots": nothing(k.dtype, N + 2, BLOCK, k.shape[1], K)}
        block["beta_slots"] = nothing(wide, N + 2, BLOCK, k.shape[1])
        return cls(pages, block, table.to(k.device, torch.int32), torch.randperm(N + 2, generator=g)[:N].to(k.device))

    def rows(self, n: Tensor, t: Tensor) -> Tensor:
        """Where tokens t of sequences n lie."""
        return self.table[n, t // PAGE].long() * PAGE + t % PAGE


class Served(NamedTuple):
    """What a call returns of all tokens; the keys that the pages hold in the end follow from what later calls read."""

    o: Tensor  # [B T H V]
    state: None = None


def in_calls(tokens: Tokens, ends: Tensor, *, window: int | None, impl: Impl, solve: bool = False) -> tuple[Tensor, Memory]:
    """A prefill of two thirds of each sequence, one of what follows but for the last two tokens, and those decoded; of o, or of y where
    there is no q. Tokens of nobody come with a prefill; sequences that have too few tokens are the decoding's padded rows.

    solve: q reads values that are solved in the same call."""
    length, k = ends.diff(), tokens["k"]
    memory = Memory.of(tokens, length)
    token = torch.arange(len(k), device=k.device)
    n = torch.searchsorted(ends, token, right=True) - 1
    at = token - ends[n]
    o = k.new_zeros(len(k), tokens.get("q", k).shape[1], tokens["v"].shape[2])
    last = (length - DECODED).clamp(min=0)
    for before, held in ((length * 0, torch.minimum(2 * length // 3, last)), (torch.minimum(2 * length // 3, last), last)):
        new = ((at >= before[n]) & (at < held[n])).nonzero()[:, 0]
        count = (held - before).cumsum(0)
        own = {name: torch.cat([x[new], x.new_zeros(5, *x.shape[1:])]) for name, x in tokens.items()}
        found = _call(
            own, memory, solve, window=window, impl=impl,
            slots=torch.cat([memory.slots, memory.slots[:1] * 0 - 1]),
            block_table=torch.cat([memory.table, memory.table[:1] * 0 + NOWHERE]),
            length=torch.cat([held, held[:1] * 0 - 1]).int(),
            rows=torch.cat([memory.rows(n[new], at[new]), new.new_full((5,), -1)]),
            cu_seqlens=torch.cat([count[:1] * 0, count, count[-1:] + 2]).int(),
        )  # fmt: skip
        assert not found[len(new) :].any(), "tokens of nobody are not zero"
        o[new] = found[: len(new)]
    for left in range(DECODED - 1, -1, -1):
        some = length > left
        new, row = (ends[1:] - 1 - left)[some], some.nonzero()[:, 0]
        spread = lambda x, padding, row=row: x.new_full((len(length), *x.shape[1:]), padding).index_copy(0, row, x)
        found = _call(
            {name: spread(x[new], 0) for name, x in tokens.items()}, memory, solve, window=window, impl=impl,
            slots=torch.where(some, memory.slots, -1), block_table=memory.table, length=torch.where(some, length - left, -1).int(),
            rows=spread(memory.rows(n[new], at[new]), -1),
        )  # fmt: skip
        assert not found[~some].any(), "a padded row is not zero"
        o[new] = found[some]
    return o, memory


def _call(tokens: Tokens, memory: Memory, solve: bool, **where: Any) -> Tensor:
    k_pages, norm_pages, y_pages, *decay_pages = memory.pages.values()
    where |= {**memory.open_block, "k_pages": k_pages}
    k, v, beta, w = (tokens[name] for name in ("k", "v", "beta", "w"))
    if solve:
        return paged_lucid_path(tokens["q"], k, v, beta, w, norm_pages=norm_pages, y_pages=y_pages, **where)
    if "q" in tokens:
        where |= {"g": tokens["g"], "decay_pages": decay_pages[0]} if decay_pages else {}
        return paged_path(tokens["q"], k, v, beta, w, v_pages=y_pages, **where)
    y = solve_path_pages(k, v, beta, w, norm_pages=norm_pages, y_pages=y_pages, **where)
    paged_path(k, k, y, beta, w, v_pages=y_pages, **where)
    return y


def served(
    chunk: Callable[..., Any], *, impl: Impl = "torch", cu_seqlens: Tensor | None = None, output_final_state: bool = False,
    window: int | None = None, chunk_size: int = 64, solve: bool = False, **tokens: Tensor,
) -> Served:  # fmt: skip
    """Under impl="triton" through pages, else as `chunk` has it."""
    if impl != "triton":
        return Served(chunk(**tokens, impl=impl, cu_seqlens=cu_seqlens, window=window, chunk_size=chunk_size)[0])
    B, T = tokens["k"].shape[:2]
    ends = torch.arange(B + 1, device=tokens["k"].device) * T if cu_seqlens is None else cu_seqlens.long()
    o, _ = in_calls({name: x.flatten(0, 1) for name, x in tokens.items()}, ends, window=window, impl=impl, solve=solve)
    return Served(o.unflatten(0, (B, T)))


def by_tokens(form: Callable[..., Any], *, output_final_state: bool = False, **given: Any) -> Served:
    """The same of a form that sees all tokens."""
    return Served(form(**given)[0])


def _spec(
    name: str, forms: tuple[Callable[..., Any], ...], sample: Callable[..., Any], tokens: str, window: int | None, solve: bool = False
) -> OpSpec:  # fmt: skip
    chunk, recurrent, literal = forms
    names = tuple(tokens.split())
    return OpSpec(
        name=name,
        chunk=partial(served, chunk, window=window, solve=solve),
        recurrent=partial(by_tokens, recurrent, window=window),
        literal=partial(by_tokens, literal, window=window),
        step=None,
        table=None,
        inputs=sample,
        tokens=names,
        half=tuple(name for name in names if name not in ("beta", "g")),
        styles=("random", "clustered"),
        skip={"gradients": "serving has no backward"},
    )


def read(solve: Callable[..., Any], attend: Callable[..., Any]) -> Callable[..., Any]:
    """LUCID-PaTH's o, of forms of both."""

    def form(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, w: Tensor, **settings: Any) -> Any:
        return attend(q, k, solve(k, v, beta, w, **settings).y, beta, w, **settings)

    return form


_PATH = (chunk_path, recurrent_path, literal_path), inputs, "q k v beta w"
_FOX = (chunk_path, recurrent_path, literal_path), forgetting, "q k v beta w g"
_SOLVE = (chunk_lucid_path, recurrent_lucid_path, literal_lucid_path), solve_inputs, "k v beta w"
_BOTH = tuple(map(read, _SOLVE[0], _PATH[0])), inputs, "q k v beta w"
PATH_PAGES = (
    _spec("path/pages", *_PATH, None),
    _spec("path/window-pages", *_PATH, WINDOW),
    _spec("path/fox-pages", *_FOX, None),
    _spec("path/lucid-pages", *_SOLVE, None),
    _spec("path/lucid-window-pages", *_SOLVE, WINDOW),
    _spec("path/lucid-read-pages", *_BOTH, None, True),
    _spec("path/lucid-window-read-pages", *_BOTH, WINDOW, True),
)
