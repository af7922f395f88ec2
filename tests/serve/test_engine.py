"""The engine: what a request is answered is what `generate` gives, whatever else is served, parked, cancelled or shared meanwhile."""

import asyncio
import multiprocessing
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import pytest
import torch

from needlework.layers import Attention, Path
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM
from needlework.serve.bell import Bell
from needlework.serve.courier import Courier
from needlework.serve.interface import DrainingError, GrammarError, QueueFullError
from needlework.serve.messages import Add
from needlework.serve.request import Event, Request, Sampling
from needlework.testing.rows import covering
from tests.models.test_table_cache import MIXERS, V

from .serving import GREEDY, HARDLY_ANY, Serving, generated, requests


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = NeedleworkConfig(vocab_size=V, hidden_size=32, layout="".join(MIXERS), mixers=MIXERS)
    return NeedleworkForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def rewriting():
    """A model whose pages are written again, all of a sequence's once in 64 tokens."""
    mixers = {
        "H": Attention(heads=4, kv_heads=2, head_dim=8, attend=Path(rank=4)),
        "W": Attention(heads=2, head_dim=8, attend=Path(rank=None, conv=None, window=24)),
    }
    torch.manual_seed(0)
    config = NeedleworkConfig(vocab_size=V, hidden_size=32, layout="".join(mixers), mixers=mixers)
    return NeedleworkForCausalLM(config).double().eval()


def test_many_requests_are_answered_as_by_generate(model):
    asked = requests(10)  # six at once
    with Serving(model) as serving:
        found = serving.answers(asked)
        assert serving.engine.stats().tokens >= sum(map(len, found))
    assert found == generated(model, asked)


@pytest.mark.parametrize("left_out", ("M", ""))
def test_padded_rows_on_buffers_of_their_own_answer_as_generate(left_out):
    """As in CUDA graphs: rows that decode, and a sequence that is prefilled alone where every layer can be captured; Mamba-3's MIMO
    cannot."""
    torch.manual_seed(0)
    kinds = {letter: mixer for letter, mixer in MIXERS.items() if letter not in left_out}
    model = NeedleworkForCausalLM(NeedleworkConfig(vocab_size=V, hidden_size=32, layout="".join(kinds), mixers=kinds))
    asked = [*requests(8, seed=6), *requests(2, seed=7, lengths=(1, 4))]
    with Serving(model.double().eval()) as serving:
        serving.runner.graph = lambda call: call
        found = serving.answers(asked)
        assert serving.runner._decoding and bool(serving.runner._prefilling) == bool(left_out)
        alone = [serving.answers([one])[0] for one in several(3, 8, 20)]
        assert [[event.token for event in stream] for stream in serving.engine.add_all(several(3, 8, 20))] == alone
    assert found == generated(model, asked)


async def heard(stream, bell):
    """A task that listens: the events of its stream."""
    there, events = asyncio.Event(), []
    stream.listen(bell, there.set)
    while not events or events[-1].finish is None:
        await asyncio.wait_for(there.wait(), 30)
        there.clear()
        events += stream.take()
    return events


def test_tasks_hear_the_events_of_a_step_by_one_wake_up_at_most(model):
    asked = requests(6, lengths=(17, 70), answers=(20,))

    async def listen(engine):
        loop, bell, woken = asyncio.get_running_loop(), Bell(), []
        call = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: (woken.append(args), call(*args))
        return await asyncio.gather(*(heard(engine.add(request), bell) for request in asked)), len(woken)

    with Serving(model) as serving:
        found, woken = asyncio.run(listen(serving.engine))
        assert 0 < woken <= serving.engine.stats().steps
    assert [[event.token for event in own] for own in found] == generated(model, asked)


def test_another_process_hears_the_same_by_a_message_a_step(model):
    asked, (ours, theirs) = requests(6, lengths=(17, 70), answers=(20,)), multiprocessing.Pipe()
    with Serving(model) as serving:
        courier = Courier(serving.engine, ours)
        for number, request in enumerate(asked):
            theirs.send(Add((number,), (request,)))
        found, steps = [[] for _ in asked], 0
        while any(len(own) < 20 for own in found):
            message = theirs.recv()
            steps += isinstance(message, list)
            for number, what in message if isinstance(message, list) else ():
                found[number].append(what.token if isinstance(what, Event) else what)
        theirs.close()
        courier.close()
        assert 20 <= steps <= serving.engine.stats().steps
    assert found == generated(model, asked)


@pytest.mark.slow
def test_with_hardly_any_memory_requests_wait_and_are_parked(model):
    asked = requests(4, seed=1, lengths=(50,), answers=(80,))
    with Serving(model, **HARDLY_ANY) as serving:
        found = serving.answers(asked)
        assert serving.scheduler.parked and serving.scheduler.parked == serving.scheduler.unparked
    assert found == generated(model, asked)


@pytest.mark.slow
def test_without_room_in_host_memory_they_are_computed_again(model):
    asked = requests(4, seed=1, lengths=(50,), answers=(80,))
    with Serving(model, **HARDLY_ANY | {"host_bytes": 0}) as serving:
        found = serving.answers(asked)
        assert not serving.scheduler.parked
    assert found == generated(model, asked)


def test_a_prefix_that_was_seen_gives_the_same_answer(model):
    rng = random.Random(5)
    head = tuple(rng.randrange(V) for _ in range(70))
    asked = [
        Request(id=str(i), prompt=(*head, *(rng.randrange(V) for _ in range(20))), max_tokens=8, sampling=GREEDY)
        for i in range(6)
    ]
    with Serving(model) as serving:
        found = [serving.answers([request])[0] for request in asked]
    assert found == generated(model, asked)


WARM = Sampling(temperature=1.5, top_p=0.9, frequency_penalty=0.5, repetition_penalty=1.3)


def several(n, seed, prompt, answer=12, sampling=WARM):
    """Answers to one prompt, each with a seed of its own."""
    (one,) = requests(1, seed=seed, lengths=(prompt,), answers=(answer,))
    return [replace(one, id=f"{seed}-{i}", sampling=replace(sampling, seed=100 * seed + i)) for i in range(n)]


@cache
def separately(model, asked):
    """The answers of requests that come one after another."""
    with Serving(model, snapshots=0, budget=64) as serving:
        return [serving.answers([one])[0] for one in asked]


class Prefilled:
    """What a runner prefills: tokens, and how often more than one answer is sampled from them."""

    def __init__(self, serving, monkeypatch):
        self.tokens, self.forks, self._run = 0, 0, serving.runner.run
        monkeypatch.setattr(serving.runner, "run", self.run)

    def run(self, step, bits=None):
        self.tokens += sum(len(row.tokens) for row in step.prefills)
        self.forks += sum(len(row.forks) for row in step.prefills)
        return self._run(step, bits)


@pytest.mark.parametrize("kind, prompt", covering(("model", "rewriting"), (1, 64, 70, 100), pairs=False))
def test_answers_to_one_prompt_are_those_of_separate_requests(kind, prompt, request, monkeypatch):
    model, asked = request.getfixturevalue(kind), several(4, prompt, prompt)
    options = {"memory": 3_000_000, "snapshots": 0, "budget": 64}
    alone = separately(model, tuple(asked))
    with Serving(model, **options) as serving:
        seen = Prefilled(serving, monkeypatch)
        streams = serving.engine.add_all(asked)
        together = [[event.token for event in stream] for stream in streams]
        assert serving.engine.stats().prefix_tokens == 3 * prompt
        assert serving.all_is_back() and (seen.tokens, seen.forks) == (prompt, 3)
    assert together == alone and len({*map(tuple, together)}) == 4


@pytest.mark.parametrize("kind", ("model", "rewriting"))
def test_a_fork_starts_from_the_state_of_its_own_prompt_bit_for_bit(kind, request, monkeypatch):
    """Slot and pages after the step that ends the prompt, and the step of one that was asked for alone."""
    asked, kept = several(3, 9, 70, sampling=GREEDY), []
    for group in (asked[:1], asked):
        with Serving(request.getfixturevalue(kind), snapshots=0, budget=64) as serving:

            def step(plan=serving.scheduler.step, serving=serving):
                """What is owned once the step before has run."""
                ready = [one for one in serving.scheduler.running if one.computed == 70]
                kept.extend(
                    [
                        serving.runner.tables.slots[one.slot].clone(),
                        *(
                            table[[page for page in one.pages[window] if page >= 0][-2:]].clone()
                            for window, table in serving.runner.tables.pages.items()
                        ),
                    ]
                    for one in ready
                )
                return plan()

            monkeypatch.setattr(serving.scheduler, "step", step)
            for stream in serving.engine.add_all(group):
                list(stream)
    assert len(kept) == 4
    for own in kept[1:]:
        assert len(own) == len(kept[0]) > 1 and all(map(torch.equal, own, kept[0]))


@pytest.mark.parametrize("heard, gone", [(0, 0), (1, 0), (1, 2), (5, 0)])
def test_one_of_several_answers_is_cancelled_and_the_others_go_on(model, heard, gone):
    asked, others = several(4, 11, 100), requests(2, seed=12, lengths=(17,), answers=(12,))
    alone = separately(model, tuple(asked))
    with Serving(model, snapshots=0, budget=64) as serving:
        streams = [*serving.engine.add_all(asked), *map(serving.engine.add, others)]
        left = iter(streams[gone])
        for _ in range(heard):
            next(left)
        streams[gone].cancel()
        *_, last = left
        found = [[event.token for event in stream] for stream in streams if stream is not streams[gone]]
        assert last.finish == "cancelled" and serving.all_is_back()
    assert found == [answer for i, answer in enumerate(alone) if i != gone] + generated(model, others)


@pytest.mark.parametrize(
    "kind, prompt, answer, options",
    [
        pytest.param("model", 20, 130, HARDLY_ANY, marks=pytest.mark.slow),
        ("rewriting", 32, 60, {"memory": 220_000, "snapshots": 0, "budget": 64, "length": 100}),
    ],
)
def test_several_answers_with_hardly_any_memory_are_parked_and_restored(kind, prompt, answer, options, request):
    model, asked = request.getfixturevalue(kind), several(4, 13, prompt, answer)
    with Serving(model, **options) as serving:
        found = [[event.token for event in stream] for stream in serving.engine.add_all(asked)]
        assert serving.scheduler.parked and serving.all_is_back()
    assert found[2:] == separately(model, tuple(asked[2:]))  # the youngest make way


def test_several_answers_whose_step_is_out_of_memory_are_computed_again(model, monkeypatch):
    asked = several(3, 11, 100)
    alone = separately(model, tuple(asked))
    with Serving(model, snapshots=0) as serving:
        run, first = serving.runner.run, iter((True,))

        def short(step, bits=None):
            if any(row.forks for row in step.prefills) and next(first, False):
                raise torch.OutOfMemoryError("as a test")
            return run(step, bits)

        monkeypatch.setattr(serving.runner, "run", short)
        streams = serving.engine.add_all(asked)
        failed, *found = ([*stream] for stream in streams)
        assert failed[-1].finish == "error" and serving.all_is_back()
    assert [[event.token for event in own] for own in found] == alone[1:]


def test_all_of_several_requests_are_taken_or_none(model):
    asked = several(3, 15, 17)
    with Serving(model, waiting=2) as serving:
        with pytest.raises(ValueError, match="requests: 3 at once, expected at most 2, as many as may wait"):
            serving.engine.add_all(asked)
        with pytest.raises(ValueError, match="'15-0' is there already"):
            serving.engine.add_all([asked[0], asked[0]])
        with pytest.raises(ValueError, match="below 67"):
            serving.engine.add_all([asked[0], replace(asked[1], prompt=(V,))])
        serving.engine._arriving = 1  # as where another has come, of which the thread has not heard
        with pytest.raises(QueueFullError, match="1 requests wait already"):
            serving.engine.add_all(asked[:2])
        assert not serving.engine._answers and serving.all_is_back()


def test_sequences_that_write_their_pages_again_do_not_meet(rewriting):
    """Prompts that begin alike, answers that end a block of keys, and too few pages: some are parked."""
    rng = random.Random(5)
    head = tuple(rng.randrange(V) for _ in range(30))
    asked = [
        Request(id=str(i), prompt=(*head, *(rng.randrange(V) for _ in range(2))), max_tokens=60, sampling=GREEDY)
        for i in range(4)
    ]
    with Serving(rewriting, memory=220_000, snapshots=0, budget=64, length=100) as serving:
        found = serving.answers(asked)
        assert serving.scheduler.parked
    prompts = torch.tensor([request.prompt for request in asked])
    assert found == rewriting.generate(prompts, max_new_tokens=60, do_sample=False)[:, 32:].tolist()


def test_pages_that_are_written_again_are_shared_by_no_two_sequences(rewriting):
    with pytest.raises(
        ValueError, match=r"scheduler: prefix is True, expected False .snapshots = 0.: layers 0, 1 write their pages"
    ):
        Serving(rewriting)


def test_a_seed_gives_the_same_tokens_alone_and_among_others(model):
    sampling = Sampling(temperature=1.5, seed=7, top_p=0.9, frequency_penalty=0.5, repetition_penalty=1.3)
    mine = Request(id="mine", prompt=(1, 2, 3, 4), max_tokens=20, sampling=sampling)
    with Serving(model) as serving:
        (alone,) = serving.answers([mine])
        others = requests(8, seed=3, answers=(20,), sampling=Sampling(temperature=1.0))
        among = serving.answers([*others[:4], mine, *others[4:]])[4]
    assert alone == among and len(set(alone)) > 3


@pytest.mark.slow
def test_a_seed_gives_the_same_tokens_to_one_that_was_parked(model):
    sampling = Sampling(temperature=1.5, seed=7, top_p=0.9, frequency_penalty=0.5, repetition_penalty=1.3)
    mine = Request(id="mine", prompt=(1, 2, 3, 4), max_tokens=20, sampling=sampling)
    with Serving(model) as serving:
        (alone,) = serving.answers([mine])
    with Serving(model, **HARDLY_ANY) as crowded:
        *_, parked = crowded.answers([*requests(3, seed=4, lengths=(50,), answers=(80,)), mine])
        assert crowded.scheduler.parked
    assert alone == parked


@pytest.mark.slow
def test_penalties_count_what_was_drawn_also_after_it_is_computed_again(model):
    sampling = Sampling(temperature=0.0, presence_penalty=2.0, repetition_penalty=1.5)
    asked = requests(4, seed=1, lengths=(50,), answers=(80,), sampling=sampling)
    with Serving(model) as serving:
        wide = serving.answers(asked)
    with Serving(model, **HARDLY_ANY | {"host_bytes": 0}) as serving:
        narrow = serving.answers(asked)
    different = lambda answer: len(set(answer))
    assert wide == narrow and all(
        different(answer) > different(own) for answer, own in zip(wide, generated(model, asked), strict=True)
    )


def test_logprobs_are_of_the_token_and_of_the_likeliest(model):
    request = Request(id="a", prompt=(5, 6, 7), max_tokens=4, sampling=Sampling(temperature=0.0, logprobs=3))
    with Serving(model) as serving:
        events = list(serving.engine.add(request))
    with torch.no_grad():
        logits = model(torch.tensor([[*request.prompt, *(event.token for event in events)]])).logits[0].log_softmax(-1)
    for i, event in enumerate(events):
        expected = logits[2 + i].topk(3)
        assert [token for token, _ in event.top] == expected.indices.tolist() and event.top[0][0] == event.token
        assert event.logprob == pytest.approx(float(expected.values[0]), rel=1e-5)


def test_stop_tokens_end_an_answer(model):
    (plain,) = generated(model, requests(1, seed=9, lengths=(17,), answers=(20,)))
    stop = plain[4]
    request = requests(1, seed=9, lengths=(17,), answers=(20,), stop_tokens=frozenset({stop}))[0]
    with Serving(model) as serving:
        events = list(serving.engine.add(request))
    assert [event.token for event in events] == plain[: plain.index(stop) + 1] and events[-1].finish == "stop"


@pytest.mark.parametrize("heard", [0, 1, 7])
def test_a_cancelled_request_ends_and_the_others_do_not_notice(model, heard):
    asked = requests(8, seed=2, lengths=(17, 70), answers=(12,))
    with Serving(model) as serving:
        streams = [serving.engine.add(request) for request in asked]
        gone = iter(streams[3])
        for _ in range(heard):
            next(gone)
        streams[3].cancel()
        *_, last = gone
        found = [[event.token for event in stream] for stream in streams if stream is not streams[3]]
        assert last.finish == "cancelled" and serving.all_is_back()
    assert found == generated(model, asked[:3] + asked[4:])


def test_a_step_out_of_memory_fails_its_newest_prefill_alone(model, monkeypatch):
    asked = requests(6, seed=6, lengths=(17, 70), answers=(12,))
    with Serving(model) as serving:
        run, steps = serving.runner.run, iter(range(1000))

        def short(step, bits=None):
            if next(steps) == 2:
                raise torch.OutOfMemoryError("as a test")
            return run(step, bits)

        monkeypatch.setattr(serving.runner, "run", short)
        streams = [serving.engine.add(request) for request in asked]
        events = [list(stream) for stream in streams]
        assert serving.all_is_back()
    failed = [i for i, own in enumerate(events) if own[-1].finish == "error"]
    assert len(failed) == 1 and "out of memory" in events[failed[0]][-1].error
    answered = [[event.token for event in own] for i, own in enumerate(events) if i not in failed]
    assert answered == generated(model, [one for i, one in enumerate(asked) if i not in failed])


def test_an_engine_that_fails_says_so_to_everybody(model, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with Serving(model) as serving:
        monkeypatch.setattr(serving.runner, "run", lambda *_: 1 / 0)
        streams = [serving.engine.add(request) for request in requests(2)]
        assert all(list(stream)[-1].finish == "error" for stream in streams[1:])

        async def listen():
            return await heard(streams[0], Bell())

        assert asyncio.run(listen())[-1].finish == "error"
        with pytest.raises(RuntimeError, match="has failed: division by zero"):
            serving.engine.add(requests(1, seed=8)[0])
        with pytest.raises(RuntimeError, match="has failed: division by zero"):
            serving.engine.wait()
    with Serving(model) as serving:
        serving.engine.close()
        serving.engine.wait()


def test_what_does_not_fit_is_refused(model):
    with Serving(model, waiting=2) as serving:
        held = threading.Event()
        serving.engine._inbox.append(held.wait)  # the thread waits: nobody is admitted
        for request in requests(1):
            with pytest.raises(ValueError, match="at most 160"):
                serving.engine.add(Request(id="long", prompt=(1,) * 150, max_tokens=11))
            with pytest.raises(ValueError, match="below 67"):
                serving.engine.add(Request(id="odd", prompt=(67,), max_tokens=1))
            with pytest.raises(ValueError, match="without one"):
                serving.engine.add(Request(id="strict", prompt=(1,), max_tokens=1, grammar="x"))
            streams = [serving.engine.add(request)]
            with pytest.raises(ValueError, match="there already"):
                serving.engine.add(request)
        with pytest.raises(QueueFullError):
            for more in requests(3, seed=1):
                streams.append(serving.engine.add(more))
        held.set()
        for stream in streams:
            list(stream)
        serving.engine.drain()
        with pytest.raises(DrainingError):
            serving.engine.add(requests(1, seed=2)[0])


class Alternates:
    """A grammar: an even token, then an odd one, four in all."""

    def __init__(self):
        self.taken = []

    def copy(self):
        return type(self)()

    def bits(self):
        allowed = [token for token in range(V) if token % 2 == len(self.taken) % 2]
        mask = torch.zeros(-(-V // 32), dtype=torch.int64)
        for token in allowed:
            mask[token // 32] |= 1 << token % 32
        return mask.to(torch.int32)

    def take(self, token):
        self.taken.append(token)
        return len(self.taken) == 4


def test_a_grammar_holds_for_its_own_request(model):
    strict = Request(id="strict", prompt=(3, 4), max_tokens=20, sampling=GREEDY, grammar="alternates")
    others = requests(3, seed=3, answers=(12,))
    with Serving(model, grammar=lambda _: Alternates()) as serving:
        found = serving.answers([others[0], strict, *others[1:]])
    assert [token % 2 for token in found[1]] == [0, 1, 0, 1]
    assert [found[0], *found[2:]] == generated(model, others)


class Fails(Alternates):
    def take(self, token):
        if len(self.taken) == 2:
            raise GrammarError("grammar: too deep")
        return super().take(token)


def test_each_of_several_answers_has_its_own_way_through_a_grammar(model):
    made = []
    asked = [replace(one, grammar="alternates") for one in several(3, 16, 17)]
    with Serving(model, grammar=lambda text: made.append(text) or Alternates()) as serving:
        found = [[event.token % 2 for event in stream] for stream in serving.engine.add_all(asked)]
    assert found == [[0, 1, 0, 1]] * 3 and made == ["alternates"]


def test_a_grammar_is_compiled_where_it_is_asked_for_and_others_are_served_meanwhile(model):
    asked, over, begun = several(2, 17, 17), threading.Event(), threading.Event()

    def slow(text):
        begun.set()
        assert over.wait(30)
        return Alternates()

    with Serving(model, grammar=slow) as serving, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(serving.engine.add, replace(asked[0], grammar="slow"))
        assert begun.wait(30)
        (found,) = serving.answers(asked[1:])
        assert len(found) == 12 and not waiting.done() and serving.engine.stats().waiting == 0
        over.set()
        assert len(list(waiting.result())) == 4


def test_a_grammar_that_cannot_go_on_fails_its_own_request(model):
    strict = Request(id="strict", prompt=(3, 4), max_tokens=20, sampling=GREEDY, grammar="fails")
    (other,) = requests(1, seed=3, answers=(12,))
    with Serving(model, grammar=lambda _: Fails()) as serving:
        streams = [serving.engine.add(request) for request in (strict, other)]
        failed, found = (list(stream) for stream in streams)
        assert serving.all_is_back()
    assert len(failed) == 3 and failed[-1] == Event(finish="refused", error="grammar: too deep")
    assert [event.token for event in found] == generated(model, [other])[0]
