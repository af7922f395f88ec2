"""A Step as the device takes it: all that the host knows of it in one buffer and one copy, and the layers' Batch in views of that.

T tokens of N sequences; of R rows the next token is sampled. A padded row decodes with slot −1 and length −1, and is sampled for nobody.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from needlework.layers.batch import Batch, Pages
from needlework.serve.sampling import Controls
from needlework.serve.step import Decode, Prefill, Step, Window

LINE = 16  # bytes at whose multiples a tensor begins


class Shape(NamedTuple):
    """The sizes of a step: rows that decode, padded ones among them; prefilled sequences and their tokens; how many of them are
    sampled; pages a sequence, by window."""

    decodes: int
    prefills: int
    tokens: int
    sampled: int
    pages: tuple[tuple[Window, int], ...]

    @classmethod
    def of(cls, step: Step, decodes: int, pages: Mapping[Window, int]) -> "Shape":
        """Of a step whose decoding rows are padded to `decodes`."""
        packed = sum(len(one.tokens) for one in step.prefills)
        return cls(decodes, len(step.prefills), packed, sum(one.last for one in step.prefills), tuple(pages.items()))


class Field(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def fields(shape: Shape) -> dict[str, Field]:
    """What the buffer of a step of these sizes holds, by name; `of None` is of the layers without a window."""
    N, T, R = shape.decodes + shape.prefills, shape.decodes + shape.tokens, shape.decodes + shape.sampled
    long, short, real = torch.int64, torch.int32, torch.float32
    found = {name: Field(long, (T,)) for name in ("ids", "positions")}
    found |= {"slots": Field(long, (N,)), "cu_seqlens": Field(long, (shape.prefills + 1,))}
    found |= {"length": Field(short, (N,)), "fresh": Field(torch.bool, (N,)), "rows": Field(long, (R,))}
    found |= {name: Field(long, (R,)) for name in ("owners", "seed", "counter", "top_k")}
    found |= {name: Field(real, (R,)) for name in ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")}
    for window, pages in shape.pages:
        found |= {f"block_table of {window}": Field(short, (N, pages)), f"rows of {window}": Field(long, (T,))}
    return found


@dataclass(frozen=True, eq=False)
class Inputs:
    """A step of one shape, in a buffer of bytes on the host or on the device.

    ids [T]: −1 where the newest token of the row's slot is meant, of decoding rows alone. rows [R]: which of T are sampled; owners [R]:
    their slots.
    """

    shape: Shape
    buffer: Tensor  # [bytes] uint8
    named: Mapping[str, Tensor]

    @classmethod
    def empty(cls, shape: Shape, **options: Any) -> "Inputs":
        """options: of the buffer, as torch.empty takes them."""
        parts = fields(shape)
        sizes = [-(-field.nbytes // LINE) * LINE for field in parts.values()]
        buffer = torch.zeros(sum(sizes), dtype=torch.uint8, **options)
        begins = accumulate(sizes, initial=0)
        lines = zip(parts.items(), begins, strict=False)
        views = {
            name: buffer[begin : begin + field.nbytes].view(field.dtype).view(field.shape) for (name, field), begin in lines
        }
        return cls(shape, buffer, views)

    def copy_(self, other: "Inputs") -> None:
        """Another step of this shape in this one's place, by one copy that nothing waits for."""
        self.buffer.copy_(other.buffer, non_blocking=True)

    @property
    def batch(self) -> Batch:
        pages = {
            window: Pages(self.named[f"block_table of {window}"], self.named[f"rows of {window}"])
            for window, _ in self.shape.pages
        }
        own = {name: self.named[name] for name in ("slots", "fresh", "cu_seqlens", "length", "positions")}
        return Batch(decodes=self.shape.decodes, pages=pages, **own)

    @property
    def controls(self) -> Controls:
        return Controls(**{name: self.named[name] for name in Controls._fields if name != "slots"}, slots=self.named["owners"])

    def fill(self, step: Step, seeds: Mapping[str, int], page: int, vocabulary: int) -> None:
        """The host's numbers of a step. seeds: by request; page: rows of one; vocabulary: what top_k is without a limit."""
        padded = [None] * (self.shape.decodes - len(step.decodes))
        decodes: list[Decode | Prefill | None] = [*step.decodes, *padded]
        every = [*decodes, *step.prefills]
        ends = [*accumulate((len(one.tokens) for one in step.prefills), initial=0)]
        last = [self.shape.decodes + end - 1 for one, end in zip(step.prefills, ends[1:], strict=True) if one.last]
        owners = [*decodes, *(one for one in step.prefills if one.last)]
        self._put("ids", [token for one in every for token in _tokens(one)])
        self._put("positions", [t for one in every for t in _positions(one)])
        self._put("slots", [-1 if one is None else one.slot for one in every])
        self._put("cu_seqlens", ends)
        self._put("length", [-1 if one is None else one.length for one in every])
        self._put("fresh", [isinstance(one, Prefill) and one.fresh for one in every])
        self._put("rows", [*range(self.shape.decodes), *last])
        self._put("owners", [-1 if one is None else one.slot for one in owners])
        self._put("seed", [0 if one is None else seeds[one.request.id] for one in owners])
        self._put("counter", [0 if one is None else one.sampled for one in owners])
        asked = [None if one is None else one.request.sampling for one in owners]
        self._put("top_k", [min(one.top_k or vocabulary, vocabulary) if one else vocabulary for one in asked])
        self._put("temperature", [one.temperature if one else 0 for one in asked])
        self._put("top_p", [one.top_p if one else 1 for one in asked])
        self._put("min_p", [one.min_p if one else 0 for one in asked])
        self._put("presence", [one.presence_penalty if one else 0 for one in asked])
        self._put("frequency", [one.frequency_penalty if one else 0 for one in asked])
        self._put("repetition", [one.repetition_penalty if one else 1 for one in asked])
        for window, _ in self.shape.pages:
            lines = [() if one is None else one.pages[window] for one in every]
            row = lambda line, t: line[t // page] * page + t % page if line else -1
            self._put(
                f"rows of {window}", [row(line, t) for one, line in zip(every, lines, strict=True) for t in _positions(one)]
            )
            table = self.named[f"block_table of {window}"].fill_(-1)
            for own, line in zip(table, lines, strict=True):
                own[: len(line)] = torch.tensor(line, dtype=torch.int32)

    def _put(self, name: str, values: list[Any]) -> None:
        self.named[name].copy_(torch.tensor(values, dtype=self.named[name].dtype))


def _tokens(one: Decode | Prefill | None) -> tuple[int, ...]:
    if isinstance(one, Prefill):
        return one.tokens
    return (0,) if one is None else (-1 if one.token is None else one.token,)


def _positions(one: Decode | Prefill | None) -> range:
    if one is None:
        return range(1)
    return range(one.start, one.length) if isinstance(one, Prefill) else range(one.length - 1, one.length)
