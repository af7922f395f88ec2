"""A Step as the device takes it: all that the host knows of it in one buffer and one copy, and the layers' Batch in views of that.

T tokens of N sequences; of R rows the next token is sampled. A padded row decodes with slot −1 and length −1; its sample is dropped.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from needlework.layers.batch import Batch, Pages
from needlework.serve.sampling import Controls
from needlework.serve.step import Step, Window

LINE = 16  # bytes at whose multiples a tensor begins


class Shape(NamedTuple):
    """The sizes of a step: rows that decode, padded ones among them; prefilled sequences and their tokens; how many tokens are sampled
    behind these; pages a sequence, by window."""

    decodes: int
    prefills: int
    tokens: int
    sampled: int
    pages: tuple[tuple[Window, int], ...]

    @classmethod
    def of(cls, step: Step, decodes: int, pages: Mapping[Window, int]) -> "Shape":
        """Of a step whose decoding rows are padded to `decodes`."""
        packed = sum(len(one.tokens) for one in step.prefills)
        sampled = sum(len(one.owners) for one in step.prefills)
        return cls(decodes, len(step.prefills), packed, sampled, tuple(pages.items()))


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
    their slots. read: of pinned memory, that a copy of it is done.
    """

    shape: Shape
    buffer: Tensor  # [bytes] uint8
    named: Mapping[str, Tensor]
    read: torch.cuda.Event | None

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
        return cls(shape, buffer, views, torch.cuda.Event() if options.get("pin_memory") else None)

    def copy_(self, other: "Inputs") -> None:
        """Another step of this shape in this one's place, by one copy that nothing waits for."""
        self.buffer.copy_(other.buffer, non_blocking=True)
        if other.read is not None:
            other.read.record()

    def wait(self) -> None:
        """Until the copies that were made of it are done, and it may be written."""
        if self.read is not None:
            self.read.synchronize()

    @cached_property
    def arrays(self) -> Mapping[str, np.ndarray]:
        """The same memory of a host for NumPy, whose small operations cost less and keep the interpreter's lock."""
        return {name: tensor.numpy() for name, tensor in self.named.items()}

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
