"""Who holds each slot: what its request asks for, and its pages, as columns of numbers by slot on the host.

A request's numbers are written when it gets its slot, a line of pages when it is another than before. A step names its rows' slots and
lengths; all else that the device takes of a row is read from here, one index a column. The columns' last line is that of a padded row,
whose slot is −1.
"""

from collections.abc import Mapping
from itertools import accumulate

import numpy as np

from needlework.serve.batch import Inputs
from needlework.serve.request import Request
from needlework.serve.step import Prefill, Step, Window
from needlework.serve.way import Way, penalties, wanted


class Holders:
    """slots: how many there are. pages: of a line, by window. page: rows of one. vocabulary: what top_k is without a limit."""

    def __init__(self, slots: int, pages: Mapping[Window, int], page: int, vocabulary: int):
        self._page, self._vocabulary = page, vocabulary
        column = lambda value, dtype: np.full(slots + 1, value, dtype)
        self._columns = {name: column(0, np.float32) for name in ("temperature", "min_p", "presence", "frequency")}
        self._columns |= {name: column(1, np.float32) for name in ("top_p", "repetition")}
        self._columns |= {"seed": column(0, np.int64), "top_k": column(vocabulary, np.int64)}
        self._prompt = column(-1, np.int64)  # tokens; a padded row has −1 and has sampled none
        self._wanted = column(0, np.uint8)
        self._lines = {window: np.full((slots + 1, width), -1, np.int32) for window, width in pages.items()}

    def hear(self, step: Step, seeds: Mapping[str, int]) -> None:
        """What is new in a step. seeds: by request."""
        for one in step.admitted:
            self._admit(one.request, one.slot, seeds[one.request.id])
        for row in (*step.paged, *step.prefills):
            for window, line in row.pages.items():
                own = self._lines[window][row.slot]
                own[: len(line)], own[len(line) :] = line, -1

    def _admit(self, request: Request, slot: int, seed: int) -> None:
        asked, V = request.sampling, self._vocabulary
        new = {
            "seed": seed - (seed >> 63 << 64),  # the same 64 bits, signed
            "top_k": min(asked.top_k or V, V),
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "min_p": asked.min_p,
            "presence": asked.presence_penalty,
            "frequency": asked.frequency_penalty,
            "repetition": asked.repetition_penalty,
        }
        for name, value in new.items():
            self._columns[name][slot] = value
        self._prompt[slot], self._wanted[slot] = len(request.prompt), wanted(asked)

    def way(self, step: Step, grammar: bool) -> Way:
        """What the sampled rows of a step that was heard want; penalties are those also of who has come in it, and is sampled later."""
        slots = [one.slot for one in step.decodes] + [own.slot for one in step.prefills for own in one.owners]
        bits = int(np.bitwise_or.reduce(self._wanted[np.array(slots, np.int64)], initial=0))
        counted = any(penalties(one.request.sampling) for one in step.admitted)
        way = Way.of(bits, grammar)
        return way._replace(penalties=True) if counted else way

    def fill(self, host: Inputs, step: Step) -> None:
        """The host's numbers of a step, all of whose slots were heard. A prefill of slot −1 is padding too, of length −1."""
        named, D, n = host.arrays, host.shape.decodes, len(step.decodes)
        slots, length, ids, positions = (named[name] for name in ("slots", "length", "ids", "positions"))
        slots[:n], slots[n:D], slots[D:] = [one.slot for one in step.decodes], -1, [one.slot for one in step.prefills]
        length[:n], length[n:D], length[D:] = [one.length for one in step.decodes], -1, [one.length for one in step.prefills]
        ids[:n], ids[n:D] = [-1 if one.token is None else one.token for one in step.decodes], 0
        np.maximum(length[:D] - 1, 0, out=positions[:D])
        ends = [*accumulate((len(one.tokens) for one in step.prefills), initial=0)]
        for one, begin, end in zip(step.prefills, ends, ends[1:], strict=False):
            ids[D + begin : D + end], positions[D + begin : D + end] = one.tokens, np.arange(one.start, one.length)
        named["cu_seqlens"][:] = ends
        named["fresh"][:D], named["fresh"][D:] = False, [one.fresh for one in step.prefills]
        self._sample(
            named, D, [(own.slot, one, end) for one, end in zip(step.prefills, ends[1:], strict=False) for own in one.owners]
        )
        owner = np.repeat(np.arange(len(slots)), [1] * D + [len(one.tokens) for one in step.prefills])
        nobody = slots[owner] < 0
        page, row = np.divmod(np.where(nobody, 0, positions), self._page)
        for window, lines in self._lines.items():
            table, rows = named[f"block_table of {window}"], named[f"rows of {window}"]
            np.take(lines, slots, axis=0, out=table, mode="wrap")
            rows[:] = np.where(nobody, -1, table[owner, page] * np.int64(self._page) + row)

    def _sample(self, named: Mapping[str, np.ndarray], D: int, last: list[tuple[int, Prefill, int]]) -> None:
        """The columns of the rows of which a token is sampled: all that decode, and the ends of prefills, each for its slots."""
        rows, owners, counter = named["rows"], named["owners"], named["counter"]
        rows[:D], rows[D:] = np.arange(D), [D + end - 1 for _, _, end in last]
        owners[:D], owners[D:] = named["slots"][:D], [slot for slot, _, _ in last]
        counter[:D], counter[D:] = named["length"][:D], [one.length for _, one, _ in last]
        counter -= self._prompt[owners]
        for name, column in self._columns.items():
            named[name][:] = column[owners]
