"""A thousand mixed requests through the engine and a model: each is answered as if it had been alone.

The plans are drawn by a seed, not by `hypothesis`: the engine's thread hears of a request when it does, so a plan that fails need not fail
again, and there would be nothing to shrink. Where a plan alone decides what happens it is `test_random_plans.py`'s.
"""

import random
import threading
from dataclasses import replace

import pytest
import torch

from needlework.models import NeedleworkConfig, NeedleworkForCausalLM
from needlework.serve.request import Request, Sampling
from tests.models.test_table_cache import MIXERS, V

from .serving import GREEDY, Serving, generated

ANSWERS = (1, 20, 60, 60)  # tokens
WARM = Sampling(temperature=1.5, top_p=0.9, frequency_penalty=0.5, repetition_penalty=1.3)
ROOM = {"batch": 8, "snapshots": 4, "budget": 128, "full": 1.3, "host_bytes": 60_000}  # which is not all that make way


def mixed(rng, n):
    """Groups of requests: of a few lengths, some that begin alike, several answers to one prompt, stop tokens, seeds."""
    heads = [tuple(rng.randrange(V) for _ in range(length)) for length in (64, 64)]
    made, count = [], 0
    while count < n:
        head = rng.choice([(), (), *heads])
        own = tuple(rng.randrange(V) for _ in range(rng.choice([1, 6])))
        sampling = replace(WARM, seed=count) if rng.random() < 0.2 else GREEDY
        stop = frozenset(rng.sample(range(V), rng.choice([0, 0, 0, 4])))
        one = Request(id=str(count), prompt=head + own, max_tokens=rng.choice(ANSWERS), sampling=sampling, stop_tokens=stop)
        group = [replace(one, id=f"{count}-{i}") for i in range(min(rng.choice([1, 1, 1, 3]), n - count))]
        made.append(group)
        count += len(group)
    return made


def ended(request, tokens):
    """Up to its stop token."""
    stops = [at + 1 for at, token in enumerate(tokens) if token in request.stop_tokens]
    return tokens[: stops[0]] if stops else tokens


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    # a window's pages, pages of every token, and a memory's slot
    kinds = {letter: mixer for letter, mixer in MIXERS.items() if letter in "SP"}
    config = NeedleworkConfig(vocab_size=V, hidden_size=32, layout="".join(kinds), mixers=kinds, initializer_range=0.2)
    return NeedleworkForCausalLM(config).double().eval()


@pytest.mark.parametrize("n", (30, pytest.param(1000, marks=pytest.mark.slow)))
def test_mixed_requests_are_answered_as_by_generate_and_nothing_leaks(model, n):
    rng = random.Random(n)
    groups, here, gone = mixed(rng, n), threading.Event(), set()
    with Serving(model, **ROOM) as serving:
        serving.engine._inbox.append(here.wait)  # all have come when the first is admitted
        streams = {one: stream for group in groups for one, stream in zip(group, serving.engine.add_all(group), strict=True)}
        here.set()
        found = {}
        for one, stream in streams.items():
            if rng.random() < 0.1:
                left = rng.choice([each for each in streams if each not in found])
                streams[left].cancel()
                gone.add(left)
            found[one] = [event.token for event in stream if event.token is not None]
        scheduler = serving.scheduler
        assert 0 < scheduler.unparked < scheduler.resumed and serving.engine.stats().prefix_tokens
        assert serving.all_is_back()
    greedy = [one for one in found if one.sampling is GREEDY and one not in gone]
    assert [found[one] for one in greedy] == [ended(*pair) for pair in zip(greedy, generated(model, greedy), strict=True)]
    for group in groups:  # of one seed
        assert len({tuple(found[one]) for one in group if one not in gone}) <= 1
