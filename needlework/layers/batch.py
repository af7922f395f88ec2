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
        D = self.decodes

        def packed(**rows: Tensor | None) -> Any:
            line = {name: None if x is None else x[None] for name, x in rows.items()}
            found = chunk(**line, slots=self.slots[D:], fresh=self.fresh[D:], cu_seqlens=self.cu_seqlens)
            return _each(lambda x: x[0], found)

        return self._both(lambda **rows: step(**rows, slots=self.slots[:D]), packed, tokens)

    def on_pages(self, op: Callable[..., Any], window: int | None, **tokens: Tensor | None) -> Any:
        """`op(…, block_table=, length=, cu_seqlens=)` on the decoding rows, without cu_seqlens, and on the others of every tensor [T …]."""
        D, table = self.decodes, self.pages[window].block_table
        one = lambda **rows: op(**rows, block_table=table[:D], length=self.length[:D], cu_seqlens=None)
        many = lambda **rows: op(**rows, block_table=table[D:], length=self.length[D:], cu_seqlens=self.cu_seqlens)
        return self._both(one, many, tokens)

    def on_slots_and_pages(self, op: Callable[..., Any], window: int | None, **tokens: Tensor | None) -> Any:
        """The same for an op that takes the sequences' slots too, `op(…, slots=, block_table=, length=, cu_seqlens=)`."""
        D, table = self.decodes, self.pages[window].block_table
        of = lambda n: {"slots": self.slots[n], "block_table": table[n], "length": self.length[n]}
        one = lambda **rows: op(**rows, **of(slice(0, D)), cu_seqlens=None)
        many = lambda **rows: op(**rows, **of(slice(D, None)), cu_seqlens=self.cu_seqlens)
        return self._both(one, many, tokens)

    def _both(self, decode: Callable[..., Any], packed: Callable[..., Any], tokens: Mapping[str, Tensor | None]) -> Any:
        D, T = self.decodes, len(self.positions)
        found = []
        for form, rows in ((decode, slice(0, D)), (packed, slice(D, T))):
            if rows.start < rows.stop:
                found.append(form(**{name: None if x is None else x[rows] for name, x in tokens.items()}))
        return found[0] if len(found) == 1 else _each(lambda *x: torch.cat(x), *found)


def _each(function: Callable[..., Tensor], *found: Any) -> Any:
    """`function` of tensors, or of each place of tuples of them."""
    if isinstance(found[0], Tensor):
        return function(*found)
    return tuple(function(*x) for x in zip(*found, strict=True))
