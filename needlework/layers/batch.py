"""One step of serving: the new tokens of many sequences in one row, and where each sequence's states lie.

A layer holds no state while it serves. Its tables come from outside, so that an engine of any make owns the memory: a slot a sequence
for what is fixed in size, pages of rows for what grows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Pages(NamedTuple):
    """Where the rows of N sequences lie, PG of them a page.

    block_table [N NB] int32: a sequence's pages in order; what lies wholly before a window is never read. rows [T] int64: the row
    page · PG + offset that each new token gets; −1: none.
    """

    block_table: Tensor
    rows: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """T new tokens of N sequences: one token each of the first D, which decode, then the others' tokens, packed.

    decodes: D, a number of the host's: it and T alone decide which kernels run.
    slots [N] int64: the slot of each sequence; −1: a padded one, which reads and writes nothing.
    fresh [N] bool: a packed sequence that starts from zeros, whatever lies in its slot. A decoding one never is.
    cu_seqlens [N − D + 1]: where the packed sequences begin, counted from token D.
    length [N] int32: tokens of each sequence, the new ones included; −1 for a padded one.
    positions [T] int64: of each token in its sequence, from 0.
    pages: by the window of the layers that they serve, None for layers that see every token.
    """

    decodes: int
    slots: Tensor
    fresh: Tensor
    cu_seqlens: Tensor
    length: Tensor
    positions: Tensor
    pages: Mapping[int | None, Pages]

    def on_slots(self, step: Callable[..., Any], chunk: Callable[..., Any], **tokens: Tensor | None) -> Any:
        """`step(…, slots=)` on the decoding rows [D …] and `chunk(…, slots=, fresh=, cu_seqlens=)` on the others [1 T − D …] of every
        tensor [T …]; what they return, [T …]."""

        def packed(rows: Tokens, slots: Tensor, fresh: Tensor) -> Any:
            line = {name: None if x is None else x[None] for name, x in rows.items()}
            return _each(lambda x: x[0], chunk(**line, slots=slots, fresh=fresh, cu_seqlens=self.cu_seqlens))

        return self._both(lambda rows, slots, _: step(**rows, slots=slots), packed, tokens, self.slots, self.fresh)

    def on_pages(self, op: Callable[..., Any], window: int | None, **tokens: Tensor | None) -> Any:
        """`op(…, block_table=, length=, cu_seqlens=)` on the decoding rows, without cu_seqlens, and on the others of every tensor [T …]."""
        return self._by_table(op, window, tokens, {"length": self.length})

    def on_slots_and_pages(self, op: Callable[..., Any], window: int | None, **tokens: Tensor | None) -> Any:
        """The same for an op that takes the sequences' slots too, `op(…, slots=, block_table=, length=, cu_seqlens=)`."""
        return self._by_table(op, window, tokens, {"length": self.length, "slots": self.slots})

    def _by_table(
        self, op: Callable[..., Any], window: int | None, tokens: "Tokens", sequences: Mapping[str, Tensor]
    ) -> Any:  # fmt: skip
        given = {"block_table": self.pages[window].block_table, **sequences}

        def of(cu_seqlens: Tensor | None) -> Callable[..., Any]:
            return lambda rows, *own: op(**rows, **dict(zip(given, own, strict=True)), cu_seqlens=cu_seqlens)

        return self._both(of(None), of(self.cu_seqlens), tokens, *given.values())

    def _both(self, decode: Callable[..., Any], packed: Callable[..., Any], tokens: "Tokens", *sequences: Tensor) -> Any:
        """decode and packed of their tokens and sequences [N …]. Where all decode nothing is cut, so that torch.compile makes one graph for
        every number of rows."""
        if len(self.cu_seqlens) == 1:
            return decode(tokens, *sequences)
        if not self.decodes:
            return packed(tokens, *sequences)
        cut = lambda rows: ({name: None if x is None else x[rows] for name, x in tokens.items()}, *(x[rows] for x in sequences))
        first, rest = slice(self.decodes), slice(self.decodes, None)
        return _each(lambda *x: torch.cat(x), decode(*cut(first)), packed(*cut(rest)))


Tokens = Mapping[str, Tensor | None]


def _each(function: Callable[..., Tensor], *found: Any) -> Any:
    """`function` of tensors, or of each place of tuples of them."""
    if isinstance(found[0], Tensor):
        return function(*found)
    return tuple(function(*x) for x in zip(*found, strict=True))
