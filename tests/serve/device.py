"""A device without a model: states are digests of all tokens so far, in real Tables, so that whatever runs on a wrong one is seen.

It keeps the contract of a runner: moves before, rows, moves after; what it sampled last in each slot; a step that fails leaves anything.
"""

import numpy as np
import torch

from needlework.layers.state import Held, Part
from needlework.serve.capacity import Pool, SchedulerConfig
from needlework.serve.pools import most_pages
from needlework.serve.tables import Tables, page_lines, slot_line

VOCABULARY = 50
HELD = [
    Held({"S": Part((), torch.int64)}, {}),
    Held({}, {"k": Part((1,), torch.int64)}),
    Held({"conv": Part((2, 3), torch.bfloat16)}, {"k": Part((), torch.int64), "v": Part((3,), torch.int16)}, 20),
]


def config(held=HELD, requests=2, **options):
    """As planned for tiny requests; pages for `requests` of full length in each window."""
    given = {"length": 120, "batch": 4, "slots": 6, "page": 16, "align": 32, "budget": 64} | options
    lines = page_lines(held, given["page"])
    pools = tuple(
        Pool(window, int(requests * most_pages(given["length"], window, given["page"], given["budget"])), line.nbytes)
        for window, line in lines.items()
    )
    return SchedulerConfig(slot_bytes=slot_line(held).nbytes, pools=pools, **given)


def digests(tokens, state=0):
    """The state after each token."""
    found = []
    for token in tokens:
        state = hash((state, token))
        found.append(state)
    return found


def answer(request):
    """What a request is answered with when nothing goes wrong."""
    tokens = list(request.prompt)
    while len(tokens) < len(request.prompt) + request.max_tokens:
        tokens.append(digests(tokens)[-1] % VOCABULARY)
        if tokens[-1] in request.stop_tokens:
            break
    return tokens[len(request.prompt) :]


class Device:
    """Runs steps on tables; `tokens` is the prompt and the answer of each request."""

    def __init__(self, config, held=HELD):
        self.config = config
        self.tables = Tables(held, config, "cpu")
        for table in (self.tables.slots, *self.tables.pages.values()):
            table.fill_(0x7B)
        arrays = [{name: x.numpy() for name, x in own.items() if x.dtype == torch.int64} for own in self.tables.layers]
        self.S = arrays[0]["S"]
        self.k = {layer.window: own["k"] for layer, own in zip(held, arrays, strict=True) if layer.rows}
        self.last = [-1] * config.slots
        self.tokens = {}
        self.owner = {}  # by slot, as steps say

    def run(self, step):
        """The tokens that it samples, by id."""
        self.tables.move(step.before)
        for request, slot, answer, _ in step.admitted:
            self.owner[slot] = request
            known = self.tokens.setdefault(request.id, list(request.prompt))
            assert known == [*request.prompt, *answer], "an answer so far that is not the answer"
        sampled = {}
        for row in step.decodes:
            token = self.last[row.slot] if row.token is None else row.token
            sampled[row.request.id] = self._row(row, row.length - 1, (token,), False)
        for row in step.prefills:
            token = self._row(row, row.start, row.tokens, row.fresh)
            if row.last:
                sampled[row.request.id] = token
            for request, slot in row.forks:
                assert row.last and request.prompt == row.request.prompt and self.owner[slot] is request
                self.last[slot] = sampled[request.id] = token
                known = self.tokens[request.id]
                known[row.length :] = known[row.length :] or [token]
        self.tables.move(step.after)
        return sampled

    def _row(self, row, start, new, fresh):
        tokens = self.tokens[row.request.id]
        assert self.owner[row.slot] is row.request, "a slot that the request was not admitted to"
        assert tuple(tokens[start : row.length]) == tuple(new), "other tokens than those of the request"
        before = digests(tokens[:start])
        assert fresh or self.S[row.slot] == before[-1], f"{row.request.id} runs on another state"
        after = digests(new, before[-1] if before else 0)
        rows = np.array(before + after)
        for window, k in self.k.items():
            pages, at = np.array(row.pages[window]), np.arange(len(rows))
            assert len(pages) == -(-len(rows) // self.config.page)
            passed = 0 if window is None else max(0, start - window) // self.config.page
            assert (pages[:passed] == -1).all() and (pages[passed:] >= 0).all()
            k.reshape(*k.shape[:2])[pages[at[start:] // self.config.page], at[start:] % self.config.page] = rows[start:]
            at = at[0 if window is None else max(0, start + 1 - window) :]
            seen = k.reshape(*k.shape[:2])[pages[at // self.config.page], at % self.config.page]
            assert (seen == rows[at]).all(), f"{row.request.id} reads other rows in window {window}"
        self.S[row.slot] = after[-1]
        self.last[row.slot] = after[-1] % VOCABULARY
        tokens[row.length :] = tokens[row.length :] or [self.last[row.slot]]
        return self.last[row.slot]

    def fail(self, step, moves):
        """Runs out of memory after so many moves, with some layers advanced."""
        self.tables.move(step.before[:moves])
        for row in (*step.decodes, *step.prefills):
            self.S[row.slot] = -1
