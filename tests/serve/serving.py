"""A real engine for tests: a small model on tables full of NaN, a scheduler that poisons what nobody owns and counts what it moves."""

import random
from dataclasses import replace

import torch

from needlework.serve.engine import Engine
from needlework.serve.planner import plan
from needlework.serve.pools import most_pages
from needlework.serve.request import Request, Sampling
from needlework.serve.runner import Runner
from needlework.serve.scheduler import Scheduler
from needlework.serve.step import Park, Unpark
from needlework.serve.tables import Tables
from tests.models.test_table_cache import V

GREEDY = Sampling(temperature=0.0)
LENGTH = 160
HARDLY_ANY = {"memory": 650_000, "budget": 64, "snapshots": 0}  # four slots, and pages for two full requests


class Watched(Scheduler):
    """What nobody owns is poisoned after every step, and what was moved is counted. resumed: answers that went on in another slot."""

    def __init__(self, config, tables):
        super().__init__(config)
        self.tables, self.parked, self.unparked, self.resumed = tables, 0, 0, 0

    def step(self):
        step = super().step()
        if step is not None:
            self.parked += sum(isinstance(move, Park) for move in step.before)
            self.unparked += sum(isinstance(move, Unpark) for move in step.before)
            self.resumed += sum(bool(one.answer) for one in step.admitted)
        return step

    def done(self, *heard):
        super().done(*heard)
        if not self.memory.moves:  # of what is planned next
            self.tables.slots[self.memory.slots._free] = 0xFF
            for window, pool in self.memory.pages.items():
                self.tables.pages[window][pool._free] = 0xFF


class Serving:
    """A model that is served. full: pages of layers that see every token, for so many requests of full length; None: what `memory` gives."""

    def __init__(self, model, memory=3_000_000, full=None, **options):
        held = model.model.held()
        given = {"length": LENGTH, "batch": 6, "snapshots": 2, "page": 16, "budget": 128, "host_bytes": 1 << 20} | options
        engine = {name: given.pop(name) for name in ("waiting", "grammar") if name in given}
        self.config = plan(held, vocabulary=model.config.vocab_size, memory=memory, weights=0, peak=0, graphs=0, **given)
        if full is not None:
            pages = int(full * most_pages(self.config.length, None, self.config.page, self.config.budget))
            pools = (pool._replace(pages=pages) if pool.window is None else pool for pool in self.config.pools)
            self.config = replace(self.config, pools=tuple(pools))
        tables = Tables(held, self.config, "cpu")
        for table in (tables.slots, *tables.pages.values()):
            table.fill_(0xFF)
        self.runner, self.scheduler = Runner(model, tables, self.config), Watched(self.config, tables)
        self.engine = Engine(self.runner, self.scheduler, **engine)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.close()

    def answers(self, requests):
        streams = [self.engine.add(request) for request in requests]
        return [[event.token for event in stream] for stream in streams]

    def all_is_back(self):
        """Once the last step has been heard and the snapshots are gone: every slot and page is free."""
        self.engine.drain()
        self.engine.wait()
        self.engine.close()
        while self.scheduler.memory.snapshots.evict():
            pass
        pools = (self.scheduler.memory.slots, *self.scheduler.memory.pages.values())
        return not len(self.scheduler) and all(pool.free == pool.count for pool in pools)


def requests(n, seed=0, lengths=(1, 5, 17, 64, 70, 100), answers=(1, 5, 20), **options):
    rng = random.Random(seed)
    return [
        Request(
            id=f"{seed}-{i}",
            prompt=tuple(rng.randrange(V) for _ in range(rng.choice(lengths))),
            max_tokens=rng.choice(answers),
            **{"sampling": GREEDY} | options,
        )
        for i in range(n)
    ]


def generated(model, requests):
    """What `generate` continues each prompt with: all at once, padded on the left."""
    longest = max(len(request.prompt) for request in requests)
    left = lambda row: [0] * (longest - len(row)) + row
    prompts = torch.tensor([left([*request.prompt]) for request in requests])
    mask = torch.tensor([left([1] * len(request.prompt)) for request in requests])
    most = max(request.max_tokens for request in requests)
    found = model.generate(prompts, attention_mask=mask, max_new_tokens=most, do_sample=False)[:, longest:].tolist()
    return [row[: request.max_tokens] for row, request in zip(found, requests, strict=True)]
