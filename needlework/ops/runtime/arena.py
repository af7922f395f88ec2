"""What a recorded call makes for its own launches, in one piece of memory: PyTorch is asked once in place of twenty times, and launches look
up fewer addresses."""

from itertools import accumulate
from typing import NamedTuple

import torch

from needlework.ops.runtime.recording import Allocation, Call, Chain, Launch, Register, Step

LARGEST = 2**26  # bytes in all: what would be more stays apart, for results get what is free by then
UNIT = 512  # bytes that PyTorch's allocator begins at a multiple of


class Span(NamedTuple):
    """Of an allocation: the steps from the one that makes it to the last one that uses it, and how many bytes it takes."""

    made: Register
    first: int
    last: int
    size: int

    def beside(self, other: "Span") -> bool:
        """Whether both are there at one time."""
        return self.first <= other.last and other.first <= self.last


def in_one_piece(steps: list[Step], results: set[Register], arena: Register) -> list[Step]:
    """The same steps with memory that launches alone see as parts of `arena`, the smallest of it."""
    spans = _small(_spans(steps, results))
    if len(spans) < 2:
        return steps
    places, size = _placed(spans)
    empty = next(step.empty for step in steps if isinstance(step, Allocation) and step.made in places)
    whole = Allocation(arena, (size,), (1,), torch.uint8, empty)
    there = {made: (arena, offset) for made, offset in places.items()}
    others = [step for step in steps if not (isinstance(step, Allocation) and step.made in places)]
    return [whole, *(step.elsewhere(there) if isinstance(step, Launch | Chain) else step for step in others)]


def _spans(steps: list[Step], results: set[Register]) -> list[Span]:
    """Of what is made empty, is no result, and which no call of PyTorch takes."""
    last = {register: i for i, step in enumerate(steps) for register in step.uses()}
    seen = results | {register for step in steps if isinstance(step, Call) for register in step.uses()}
    return [
        Span(step.made, i, last[step.made], step.bytes)
        for i, step in enumerate(steps)
        if isinstance(step, Allocation) and step.made not in seen
    ]


def _small(spans: list[Span]) -> list[Span]:
    """The smallest, no more than LARGEST."""
    ordered = sorted(spans, key=lambda span: span.size)
    return [span for span, size in zip(ordered, accumulate(span.size for span in ordered), strict=True) if size <= LARGEST]


def _placed(spans: list[Span]) -> tuple[dict[Register, int], int]:
    """Where each begins, and where all end: the largest first, each at the lowest place where nothing lies that is there at the same time."""
    places: dict[Register, int] = {}
    laid: list[Span] = []
    for span in sorted(spans, key=lambda span: -span.size):
        begin = 0
        for low, size in sorted((places[other.made], other.size) for other in laid if span.beside(other)):
            if begin + span.size <= low:
                break
            begin = max(begin, -(-(low + size) // UNIT) * UNIT)
        places[span.made] = begin
        laid.append(span)
    return places, max(places[span.made] + span.size for span in spans)
