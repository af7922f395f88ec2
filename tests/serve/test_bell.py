"""The bell: one wake-up for all that came, nothing lost while it is silent, a rest after long work."""

import asyncio
import threading

import pytest

from needlework.serve import bell as module
from needlework.serve.bell import LONGEST, REST, SHORT, Bell


class Loop:
    """A loop that a test turns by hand."""

    def __init__(self):
        self.threadsafe, self.ready, self.later = [], [], []

    def call_soon_threadsafe(self, call, *args):
        self.threadsafe.append((call, args))

    def call_soon(self, call, *args):
        self.ready.append((call, args))

    def call_later(self, seconds, call):
        self.later.append((seconds, call))

    def run(self, calls):
        taken = calls.copy()
        calls.clear()
        for call, args in taken:
            call(*args)


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "thread_time", lambda: now[0])
    return now


@pytest.fixture
def rung(monkeypatch):
    loop = Loop()
    monkeypatch.setattr(module.asyncio, "get_running_loop", lambda: loop)
    return Bell(), loop


def test_all_that_was_added_is_heard_in_order_by_one_call(rung, clock):
    bell, loop = rung
    heard = []
    for i in range(3):
        bell.add(lambda i=i: heard.append(i))
    assert not loop.threadsafe
    bell.ring(), bell.ring()
    assert len(loop.threadsafe) == 1
    loop.run(loop.threadsafe)
    assert heard == [0, 1, 2]


def test_after_its_work_it_rests_and_then_rings_for_what_came(rung, clock):
    bell, loop = rung
    heard = []
    bell.add(lambda: heard.append("first"))
    bell.ring()
    loop.run(loop.threadsafe)
    bell.add(lambda: heard.append("second"))
    bell.ring()
    clock[0] += 3 * SHORT  # of the tasks that were woken
    loop.run(loop.ready)
    ((seconds, call),) = loop.later
    assert seconds == REST * 3 * SHORT and heard == ["first"] and not loop.threadsafe
    call()
    loop.run(loop.threadsafe)
    assert heard == ["first", "second"]


def test_the_longest_rest_is_short_and_a_mistake_does_not_silence_the_bell(rung, clock):
    bell, loop = rung
    heard = []
    bell.add(lambda: 1 / 0)
    bell.add(lambda: heard.append("behind"))
    bell.ring()
    with pytest.raises(ZeroDivisionError):
        loop.run(loop.threadsafe)
    clock[0] += 10.0
    loop.run(loop.ready)
    ((seconds, call),) = loop.later
    assert seconds == LONGEST
    call()
    loop.run(loop.threadsafe)
    assert heard == ["behind"]


def test_short_work_needs_no_rest(rung, clock):
    bell, loop = rung
    bell.ring()
    loop.run(loop.threadsafe)
    clock[0] += SHORT / 2
    loop.run(loop.ready)
    bell.ring()
    assert not loop.later and len(loop.threadsafe) == 1


def test_tasks_hear_another_thread_and_a_closed_loop_does_not_mind():
    async def listen():
        bell, there = Bell(), asyncio.Event()

        def say():
            bell.add(there.set)
            bell.ring()

        thread = threading.Thread(target=say)
        thread.start()
        await there.wait()
        thread.join()
        return bell

    bell = asyncio.run(listen())
    bell._rung = False
    bell.ring()
