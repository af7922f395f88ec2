"""Between the engine's process and the front's: a message a step, nothing lost at either end."""

import asyncio
import multiprocessing
import pickle
import queue
import threading
from dataclasses import replace

import pytest

from needlework.serve.bell import Bell
from needlework.serve.courier import Courier
from needlework.serve.interface import DrainingError, GrammarError, QueueFullError
from needlework.serve.messages import Add, Cancel, Count, Order, Ready, Reply
from needlework.serve.remote import GONE, RemoteEngine
from needlework.serve.request import Event, Request

from .engine import FakeEngine

ASKED = Request(id="a", prompt=(1,), max_tokens=9)


class Line:
    """A connection of which a test is the other end. sent: messages, and the thread that sent each."""

    def __init__(self):
        self.sent, self.inbox = queue.SimpleQueue(), queue.SimpleQueue()

    def send(self, message):
        self.sent.put((pickle.loads(pickle.dumps(message)), threading.get_ident()))

    def recv(self):
        if (message := self.inbox.get()) is None:
            raise EOFError
        return message

    def said(self):
        return self.sent.get(timeout=30)[0]


@pytest.fixture
def line():
    return Line()


@pytest.fixture
def engine(line):
    """With a courier on the line. It answers nothing by itself."""
    engine = FakeEngine(lambda request: None)
    courier = Courier(engine, line)
    yield engine
    line.inbox.put(None)
    courier.close()


def test_the_events_of_a_step_are_one_message_in_which_tokens_are_integers(line, engine):
    line.inbox.put(Add((7,), (ASKED,)))
    assert line.said() == Reply(7, None)
    rich = (Event(2, logprob=-1.0, top=((3, -2.0),)), Event(finish="stop"), Event(4, finish="length"))
    engine.streams[0].put(Event(1), *rich)
    assert line.said() == [(7, 1), *((7, event) for event in rich)]
    engine.streams[0].put(Event(5))
    assert line.said() == [(7, 5)]


def test_the_engines_thread_does_not_send(line, engine):
    line.inbox.put(Add((0,), (ASKED,)))
    line.said()
    engine.streams[0].put(Event(1))
    assert line.sent.get(timeout=30)[1] != threading.get_ident()


def test_requests_without_a_grammar_are_added_while_one_is_compiled(line, engine):
    over = threading.Event()
    engine.answer = lambda request: over.wait(30) and None if request.grammar else None
    line.inbox.put(Add((0, 1), (replace(ASKED, id="b"), replace(ASKED, id="c", grammar="x"))))
    line.inbox.put(Add((2,), (ASKED,)))
    assert line.said() == Reply(2, None) and len(engine.streams) == 3
    over.set()
    assert line.said() == Reply(0, None)


REFUSALS = (QueueFullError(3, 2.5), DrainingError("ends"), GrammarError("wrong"), ValueError("odd"), RuntimeError("failed"))


@pytest.mark.parametrize("error", REFUSALS)
def test_a_refusal_comes_as_what_it_is(line, engine, error):
    def refuse(request):
        raise error

    engine.answer = refuse
    line.inbox.put(Add((0,), (ASKED,)))
    found = line.said().value
    assert type(found) is type(error) and str(found) == str(error) and vars(found) == vars(error)


class Panic(BaseException):
    """As PyO3 raises where Rust panics."""


class Odd(ValueError):
    """Which pickle writes and cannot read."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(
    "mistake", (ZeroDivisionError("odd"), Panic("odd"), Odd("odd", "even")), ids=lambda one: type(one).__name__
)
@pytest.mark.parametrize("grammar", (None, "x"))
def test_a_mistake_of_ours_comes_with_its_traceback_whatever_it_is(line, engine, mistake, grammar):
    def fail(request):
        raise mistake

    engine.answer = fail
    line.inbox.put(Add((0,), (replace(ASKED, grammar=grammar),)))
    found = line.said().value
    assert type(found) is Exception and type(mistake).__name__ in str(found) and "test_courier.py" in str(found)


def test_numbers_that_are_not_given_are_a_reply_and_not_the_last(line, engine, monkeypatch):
    def fail():
        raise RuntimeError("failed")

    monkeypatch.setattr(engine, "stats", fail)
    for number in range(2):
        line.inbox.put(Count(number))
        assert str(line.said().value) == "failed"


def test_cancel_count_and_orders(line, engine):
    line.inbox.put(Add((0,), (ASKED,)))
    line.said()
    line.inbox.put(Count(1))
    assert line.said() == Reply(1, engine.stats())
    line.inbox.put(Cancel("a"))
    assert line.said() == [(0, Event(finish="cancelled"))] and engine.streams[0].cancelled.is_set()


def remotely(test):
    """Runs a test's coroutine on a remote engine that listens, the other end of its connection and the orders that it obeyed."""

    async def run():
        ours, theirs = multiprocessing.Pipe()
        orders, remote = [], RemoteEngine(theirs, 256, 300)
        remote.listen(orders.append)
        assert ours.recv() == Ready()
        await test(remote, ours, orders)

    asyncio.run(asyncio.wait_for(run(), 60))


async def until(holds):
    while not holds():
        await asyncio.sleep(0)


def test_events_that_come_before_the_reply_are_there_and_an_end_is_remembered_nowhere():
    async def test(remote, ours, orders):
        adding = asyncio.create_task(asyncio.to_thread(remote.add_all, [ASKED]))
        asked = await asyncio.to_thread(ours.recv)
        assert asked.requests == (ASKED,)
        for message in (
            [(asked.number, 5)],
            Reply(asked.number, None),
            [(asked.number, Event(6, finish="length"))],
            Order.DRAIN,
        ):
            ours.send(message)
        (stream,), heard = await adding, []
        stream.listen(Bell(), lambda: heard.append(True))
        await until(lambda: orders)
        assert stream.take() == [Event(5), Event(6, finish="length")] and heard == [True]
        assert orders == [Order.DRAIN] and not remote._streams and not remote._asked and not remote.lost

    remotely(test)


def test_a_refused_request_has_no_stream():
    async def test(remote, ours, orders):
        adding = asyncio.create_task(asyncio.to_thread(remote.add_all, [ASKED]))
        ours.send(Reply((await asyncio.to_thread(ours.recv)).number, QueueFullError(3, 2.5)))
        with pytest.raises(QueueFullError, match=r"3 requests wait already, as many as may; try again in 2\.5 s"):
            await adding
        assert not remote._streams

    remotely(test)


def test_whoever_waits_for_an_engine_that_is_gone_hears_of_it():
    async def test(remote, ours, orders):
        adding = asyncio.create_task(asyncio.to_thread(remote.add_all, [ASKED]))
        ours.send(Reply((await asyncio.to_thread(ours.recv)).number, None))
        (stream,) = await adding
        counting = asyncio.create_task(asyncio.to_thread(remote.stats))
        await asyncio.to_thread(ours.recv)
        ours.close()
        with pytest.raises(RuntimeError, match=GONE):
            await counting
        assert stream.take() == [Event(finish="error", error=GONE)]
        await until(lambda: orders)
        assert orders == [Order.END] and remote.lost
        with pytest.raises(RuntimeError, match=GONE):
            remote.add_all([ASKED])
        stream.cancel()

    remotely(test)
