"""The tensors of all sequences: slots of fixed states, pages of rows, and what is parked in host memory.

A slot is one line of bytes with the fixed states of every layer, a page one line with PG rows of every layer of its window. Layers get
views of these lines, and whatever moves a slot or a page moves one line.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from needlework.layers.state import Held, Part
from needlework.serve.capacity import SchedulerConfig
from needlework.serve.pools import pages_for
from needlework.serve.step import CopyPage, CopySlot, Drop, Move, Park, Unpark, Window

ALIGN = 128  # bytes: where a tensor begins in its line; a line of the GPU's cache, and what its loads ask for at most


class Place(NamedTuple):
    """Where a tensor of a layer lies in its line."""

    layer: int
    name: str
    part: Part
    offset: int


class Line(NamedTuple):
    """A slot or a page."""

    places: tuple[Place, ...]
    nbytes: int

    def spread(self, table: Tensor, layers: Sequence[dict[str, Tensor]]) -> None:
        """Puts the tensors of `table`'s lines [n, bytes] uint8 among those of their layers, by name."""
        for layer, name, part, offset in self.places:
            own = table[:, offset : offset + part.nbytes].view(part.dtype).view(len(table), *part.shape)
            # torch.compile takes tensors of one storage for aliases, and refuses to change them: these have one each, of the same memory
            layers[layer][name] = own if own.is_meta else torch.from_dlpack(own)


def slot_line(held: Sequence[Held]) -> Line:
    return line((i, name, part) for i, layer in enumerate(held) for name, part in layer.fixed.items())


def page_lines(held: Sequence[Held], page: int) -> dict[Window, Line]:
    """The line of a page of each window that has rows."""
    windows = dict.fromkeys(layer.window for layer in held if layer.rows)
    paged = [{name: Part((page, *part.shape), part.dtype) for name, part in layer.rows.items()} for layer in held]
    return {
        window: line(
            (i, name, part)
            for i, (layer, rows) in enumerate(zip(held, paged, strict=True))
            if layer.window == window
            for name, part in rows.items()
        )
        for window in windows
    }


def line(parts: Iterable[tuple[int, str, Part]]) -> Line:
    """These tensors one after another: (layer, name, part)."""
    places, end = [], 0
    for layer, name, part in parts:
        places.append(Place(layer, name, part, end))
        end = pages_for(end + part.nbytes, ALIGN) * ALIGN
    return Line(tuple(places), end)


class Parked(NamedTuple):
    """A sequence in host memory, pinned where there is a GPU."""

    slot: Tensor  # [slot bytes] uint8
    pages: Mapping[Window, Tensor]  # [pages, page bytes] uint8


class Tables:
    """All tensors of `config`'s slots and pages, not initialised. `layers`: for each layer its tensors by the names of `held`.

    Raises ValueError for a config whose sequences share pages, where a layer changes rows that were written: a page of two sequences
    would be changed by one under the other.
    PyTorch rounds pinned memory up to a power of two and keeps it for the next use, so parking may hold up to twice its bytes.
    """

    def __init__(self, held: Sequence[Held], config: SchedulerConfig, device: torch.device | str):
        def lines(count: int, one: Line) -> Tensor:
            table = torch.empty(count, one.nbytes, dtype=torch.uint8, device=device)
            one.spread(table, self.layers)
            return table

        if (config.prefix or config.shared) and (rewriting := [i for i, layer in enumerate(held) if layer.rewritten]):
            field, hint = ("prefix", " (snapshots = 0)") if config.prefix else ("shared", "")
            raise ValueError(
                f"scheduler: {field} is True, expected False{hint}: layers {', '.join(map(str, rewriting))} write their pages "
                "again as tokens come, so that no two sequences may share one"
            )
        self.layers: list[dict[str, Tensor]] = [{} for _ in held]
        pages = page_lines(held, config.page)
        self.slots = lines(config.slots, slot_line(held))
        self.pages = {window: lines(count, pages[window]) for window, count, _ in config.pools}
        self._parked: dict[str, Parked] = {}

    @property
    def bytes(self) -> int:
        return sum(table.numel() for table in (self.slots, *self.pages.values()))

    def move(self, moves: Iterable[Move]) -> None:
        """One after another, in the order of the device's stream; nothing waits for it."""
        for move in moves:
            match move:
                case CopySlot(source, target):
                    self.copy(source, target)
                case CopyPage(window, source, target):
                    self.copy_page(window, source, target)
                case Park(id, slot, pages):
                    self._parked[id] = self.park(slot, pages)
                case Unpark(id, slot, pages):
                    self.unpark(self._parked.pop(id), slot, pages)
                case Drop(id):
                    self._parked.pop(id, None)

    def copy(self, source: int, target: int) -> None:
        self.slots[target].copy_(self.slots[source])

    def copy_page(self, window: Window, source: int, target: int) -> None:
        self.pages[window][target].copy_(self.pages[window][source])

    def park(self, slot: int, pages: Mapping[Window, Sequence[int]]) -> Parked:
        """Copies of a slot and of pages in host memory."""
        host = {window: _host(table, len(pages[window])) for window, table in self.pages.items()}
        parked = Parked(_host(self.slots, 1)[0], host)
        for line, kept in self._lines(parked, slot, pages):
            kept.copy_(line, non_blocking=True)
        return parked

    def unpark(self, parked: Parked, slot: int, pages: Mapping[Window, Sequence[int]]) -> None:
        """Into this slot and these pages, as many as there were."""
        for line, kept in self._lines(parked, slot, pages):
            line.copy_(kept, non_blocking=True)

    def _lines(self, parked: Parked, slot: int, pages: Mapping[Window, Sequence[int]]) -> Iterator[tuple[Tensor, Tensor]]:
        yield self.slots[slot], parked.slot
        for window, table in self.pages.items():
            for page, kept in zip(pages[window], parked.pages[window], strict=True):
                yield table[page], kept


def _host(table: Tensor, count: int) -> Tensor:
    return torch.empty(count, table.shape[1], dtype=torch.uint8, pin_memory=table.is_cuda)
