"""What the columns give for a step is what its rows say one by one, whoever had the slots and pages before."""

import pytest
import torch

from needlework.serve.batch import Inputs, Shape
from needlework.serve.graphs import alone
from needlework.serve.holders import Holders
from needlework.serve.pools import most_pages
from needlework.serve.request import Sampling
from needlework.serve.staging import Staging
from needlework.serve.way import Way, filters, penalties, wanted

from . import test_random_plans
from .device import VOCABULARY, Device
from .literal import literal

ASKED = (
    Sampling(),
    Sampling(temperature=0.0, presence_penalty=0.5),
    Sampling(top_k=3, min_p=0.1, logprobs=2),
    Sampling(top_p=0.5, frequency_penalty=-1.0, repetition_penalty=1.5, top_k=999),
)


class Filled(Device):
    """Each step is filled and compared before it runs; four rows a graph, so that some are padded."""

    def __init__(self, config, held):
        super().__init__(config, held)
        self.pages = {window: most_pages(config.length, None, config.page, config.budget) for window, *_ in config.pools}
        self.holders = Holders(config.slots, self.pages, config.page, VOCABULARY)
        self.staging, self.seeds = Staging(pinned=False), {}

    def run(self, step):
        rows = (*step.decodes, *step.prefills)
        coming = [row.request for row in rows] + step.sampled
        self.seeds |= {one.id: (int(one.id.replace("-", "")) << 62) % (1 << 64) for one in coming}
        self.holders.hear(step, self.seeds)
        self.check(step, Shape.of(step, -(-len(step.decodes) // 4) * 4, self.pages))
        for one in step.prefills[:1]:
            self.check(alone(one, 80), Shape(0, 2, 80, 1 + len(one.forks), tuple(self.pages.items())))
        asked = [one.sampling for one in step.sampled]
        come = [one.request.sampling for one in step.admitted]
        assert self.holders.way(step, True) == Way(
            any(one.temperature > 0 for one in asked),
            any(map(filters, asked)),
            any(map(penalties, asked + come)),
            any(one.logprobs is not None for one in asked),
            True,
        )
        return super().run(step)

    def check(self, step, shape):
        host = self.staging.take(shape)
        self.holders.fill(host, step)
        for name, values in literal(step, shape, self.seeds, self.config.page, VOCABULARY).named.items():
            assert torch.equal(host.named[name], values), name


@pytest.mark.parametrize("case", ["tight", "pages-cut-inside", "no-host-memory"])
def test_columns_give_what_the_rows_say(case, monkeypatch):
    asked = iter(ASKED * 1000)
    made = test_random_plans.Request
    monkeypatch.setattr(test_random_plans, "Request", lambda **fields: made(**fields, sampling=next(asked)))
    monkeypatch.setattr(test_random_plans, "Device", Filled)
    test_random_plans.play(11, case, n=30)


def test_what_a_request_wants_of_sampling():
    assert [wanted(one) for one in ASKED] == [1, 4, 1 | 2 | 8, 1 | 2 | 4]
    assert Way.of(1 | 4, False) == Way(True, False, True, False, False)


def test_no_step_is_written_where_the_one_before_may_still_be_read():
    staging, shape, other = Staging(pinned=False), Shape(4, 0, 0, 0, ()), Shape(8, 0, 0, 0, ())
    first, second = staging.take(shape), staging.take(shape)
    assert first is not second and staging.take(shape) is first and staging.take(other) is not second
    assert staging.take(shape) is second and isinstance(second, Inputs)
