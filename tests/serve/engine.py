"""An engine of which a test says what it answers: no model, no clock."""

import threading
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace

from needlework.serve.interface import DrainingError, QueueFullError, Sink
from needlework.serve.request import Event, Request
from needlework.serve.stream import Stream

SAID = "to be, or not"


def says(text: str, finish: str = "length") -> list[Event]:
    """A text's bytes as events, the last with `finish`."""
    tokens = text.encode()
    top = ((65, -1.0), (66, -2.0), (67, -3.0))
    return [
        Event(token=token, logprob=-0.25, top=top, finish=finish if i == len(tokens) - 1 else None)
        for i, token in enumerate(tokens)
    ]


def echo(request: Request) -> list[Event]:
    """The prompt again, and nothing of its own: each client can see that the answer is its own."""
    top = request.sampling.logprobs
    said = bytes(token for token in request.prompt if token < 256)[-request.max_tokens :].decode(errors="replace")
    return says(said) if top is not None else [Event(token=e.token, finish=e.finish) for e in says(said)]


class FakeStream:
    """One request's way to its reader. Its events are put by a test, from any thread."""

    def __init__(self, engine: "FakeEngine", request: Request, sink: Sink):
        self._engine, self._sink, self.request = engine, sink, request
        self.cancelled, self.over = threading.Event(), False

    def put(self, *events: Event) -> None:
        """As the events of one step."""
        with self._engine.step:
            for bell in {self._sink.put(event) for event in events} - {None}:
                bell.ring()
        if events and events[-1].finish is not None:
            self._engine.ended(self)

    def cancel(self) -> None:
        self.cancelled.set()
        if not self.over:
            self.put(Event(finish="cancelled"))


class FakeEngine:
    """answer: the events of a request, given at once; None: nothing until the test puts it. most: requests that may be there."""

    vocabulary, length = 300, 256

    def __init__(self, answer: Callable[[Request], Iterable[Event] | None] = echo, most: int = 1000):
        self.answer, self.most, self.draining, self.broken = answer, most, False, None
        self.streams: list[FakeStream] = []
        self.step = threading.Lock()  # an engine has one thread
        self._running: set[FakeStream] = set()
        self._changed = threading.Condition()
        self.watched = threading.Event()

    def add_all(self, requests: Sequence[Request]) -> list[Stream]:
        streams = [Stream(request.id, self.cancel) for request in requests]
        self.begin(requests, streams)
        return streams

    def begin(self, requests: Sequence[Request], sinks: Sequence[Sink]) -> None:
        with self._changed:
            if self.broken is not None:
                raise RuntimeError(self.broken)
            if self.draining:
                raise DrainingError("the server is ending and takes no more requests")
            if len(self._running) + len(requests) > self.most:
                raise QueueFullError(self.most, 2.5)
            streams = [FakeStream(self, request, sink) for request, sink in zip(requests, sinks, strict=True)]
            self.streams += streams
            self._running |= {*streams}
            self._changed.notify_all()
        for stream in streams:
            stream.put(*(self.answer(stream.request) or ()))

    def cancel(self, id: str) -> None:
        for stream in self.streams:
            if stream.request.id == id:
                stream.cancel()

    def ended(self, stream: FakeStream) -> None:
        with self._changed:
            stream.over = True
            self._running.discard(stream)
            self._changed.notify_all()

    def until(self, holds: Callable[["FakeEngine"], bool]) -> None:
        """Waits for what a client or the server does; a test that waits in vain has failed."""
        with self._changed:
            assert self._changed.wait_for(lambda: holds(self), timeout=30)

    @property
    def running(self) -> int:
        return len(self._running)

    def drain(self) -> None:
        with self._changed:
            self.draining = True
            self._changed.notify_all()

    def fail(self, why: str) -> None:
        """As an engine's thread that dies."""
        self.broken = why
        for stream in [*self._running]:
            stream.put(Event(finish="error", error=why))
        self.drain()

    def wait(self) -> None:
        self.watched.set()
        with self._changed:
            self._changed.wait_for(lambda: self.draining and not self._running)
        if self.broken is not None:
            raise RuntimeError(self.broken)

    def close(self) -> None:
        self.drain()
        for stream in [*self._running]:
            stream.cancel()

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(
            running=self.running,
            waiting=0,
            slots_free=3,
            pages_free=((None, 7), (64, 5)),
            prompt_tokens=1,
            prefix_tokens=2,
            tokens=11,
            steps=4,
        )
