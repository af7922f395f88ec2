"""The engine of the process that started this one, as the front asks it: by messages over a connection."""

import asyncio
import threading
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection

from needlework.serve.bell import Bell
from needlework.serve.messages import Add, Cancel, Count, Order, Ready, Reply, Said
from needlework.serve.request import Event, Request
from needlework.serve.stream import Stream

GONE = "the process of the engine has ended"


class RemoteEngine:
    """length, vocabulary: the engine's own. lost: whether its process has ended without an order.

    `listen` in the loop that answers; `add_all` and `stats` wait for a message that this loop receives, in other threads than its own.
    """

    def __init__(self, connection: Connection, length: int, vocabulary: int):
        self.length, self.vocabulary, self.lost = length, vocabulary, False
        self._connection = connection
        self._numbers = count()
        self._streams: dict[int, Stream] = {}
        self._asked: dict[int, Future[object]] = {}
        self._one = threading.Lock()  # sends at a time
        self._obey: Callable[[Order], None] = lambda order: None

    def listen(self, obey: Callable[[Order], None]) -> None:
        """From now on the running loop receives the engine's messages, and obeys its orders. An engine that is gone is an END."""
        self._obey = obey
        asyncio.get_running_loop().add_reader(self._connection.fileno(), self._hear)
        self._send(Ready())

    def add_all(self, requests: Sequence[Request]) -> list[Stream]:
        """As an engine's own."""
        streams = {next(self._numbers): Stream(request.id, self._cancel) for request in requests}
        self._streams |= streams  # their events may come before the reply
        try:
            self._ask(Add(tuple(streams), tuple(requests)))
        except Exception:
            for number in streams:
                self._streams.pop(number, None)
            raise
        return [*streams.values()]

    def stats(self) -> object:
        """RuntimeError once the engine's process has ended."""
        return self._ask(Count(next(self._numbers)))

    def _cancel(self, id: str) -> None:
        with suppress(RuntimeError):  # where the engine is gone, so is the request
            self._send(Cancel(id))

    def _ask(self, message: Add | Count) -> object:
        reply = self._asked[message.number] = Future()
        try:
            self._send(message)
        except RuntimeError:
            self._asked.pop(message.number, None)
            raise
        return reply.result()

    def _send(self, message: Ready | Add | Count | Cancel) -> None:
        with self._one:
            if self.lost:
                raise RuntimeError(GONE)
            try:
                self._connection.send(message)
            except OSError:
                raise RuntimeError(GONE) from None

    def _hear(self) -> None:
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            self._lose()
            return
        match message:
            case Reply(number, value):
                reply = self._asked.pop(number)
                reply.set_exception(value) if isinstance(value, Exception) else reply.set_result(value)
            case Order():
                self._obey(message)
            case list():
                self._give(message)

    def _give(self, said: Said) -> None:
        """Events to their streams, and one wake-up for all of them."""
        bells: set[Bell | None] = set()
        for number, what in said:
            event = Event(what) if isinstance(what, int) else what
            bells.add(self._streams[number].put(event))
            if event.finish is not None:
                del self._streams[number]
        _ring(bells)

    def _lose(self) -> None:
        """Every client that waits for the engine gets the news that it is gone."""
        asyncio.get_running_loop().remove_reader(self._connection.fileno())
        with self._one:
            self.lost = True
        left = [self._streams.pop(number, None) for number in [*self._streams]]  # `add_all` may take out its own meanwhile
        _ring({stream.put(Event(finish="error", error=GONE)) for stream in left if stream is not None})
        for reply in [*self._asked.values()]:
            reply.set_exception(RuntimeError(GONE))
        self._obey(Order.END)


def _ring(bells: Set[Bell | None]) -> None:
    for bell in bells:
        if bell is not None:
            bell.ring()
