"""What the front's process asks goes to the engine, and the events of its streams go there, a message a step."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from traceback import format_exception

from needlework.serve.interface import DrainingError, GrammarError, OwnEngine, QueueFullError
from needlework.serve.messages import Add, Cancel, Count, Order, Reply, Said
from needlework.serve.request import Event

COMPILERS = 4  # grammars that are compiled at once


class Courier:
    """Over a connection whose other end is a `RemoteEngine`'s. It is the bell of the streams that the front has asked for.

    A thread of its own sends: the engine's never waits for a front that is slow. `close` it: its threads hold the engine, and a thread that
    frees a tensor while Python ends aborts the process.
    """

    def __init__(self, engine: OwnEngine, connection: Connection):
        self._engine, self._connection = engine, connection
        self._said: Said = []
        self._out: queue.SimpleQueue[Said | Reply | Order | None] = queue.SimpleQueue()  # None: the end
        self._compiling = ThreadPoolExecutor(COMPILERS, thread_name_prefix="needlework grammar")
        runs = self._send, self._hear
        self._threads = [threading.Thread(target=run, name="needlework courier", daemon=True) for run in runs]
        for thread in self._threads:
            thread.start()

    def order(self, order: Order) -> None:
        self._out.put(order)

    def close(self) -> None:
        """Once the other end is closed. Its threads have ended when it returns."""
        self._out.put(None)
        for thread in self._threads:
            thread.join()
        self._compiling.shutdown(cancel_futures=True)

    def tell(self, number: int, event: Event) -> None:
        """In the engine's thread. It goes with the next `ring`."""
        token, logprob, _, finish, _ = event
        self._said.append((number, token if token is not None and logprob is None and finish is None else event))

    def ring(self) -> None:
        """In the engine's thread."""
        said, self._said = self._said, []
        self._out.put(said)

    def _send(self) -> None:
        with suppress(OSError):  # the front's process has ended: the process that started it sees that
            while (message := self._out.get()) is not None:
                self._connection.send(message)

    def _hear(self) -> None:
        with suppress(EOFError, OSError):  # as above
            while True:
                match self._connection.recv():
                    case Add() as asked if any(request.grammar is not None for request in asked.requests):
                        self._compiling.submit(self._add, asked)  # others are added meanwhile
                    case Add() as asked:
                        self._add(asked)
                    case Cancel(id):
                        self._engine.cancel(id)
                    case Count(number):
                        self._reply(number, self._engine.stats)

    def _add(self, asked: Add) -> None:
        sinks = [_Told(self, number) for number in asked.numbers]
        self._reply(asked.number, lambda: self._engine.begin(asked.requests, sinks))

    def _reply(self, number: int, ask: Callable[[], object]) -> None:
        """Whatever is raised is the reply, or a client would wait for ever. A panic in llguidance is no Exception."""
        try:
            reply = ask()
        except BaseException as error:
            reply = _told(error)
        self._out.put(Reply(number, reply))


def _told(error: BaseException) -> Exception:
    """As it crosses the connection: what the front knows as it is, and a mistake of ours, of whose kind it may know nothing, in words."""
    if type(error) in (QueueFullError, DrainingError, GrammarError, ValueError, RuntimeError):
        assert isinstance(error, Exception)
        return error
    return Exception("".join(format_exception(error)))


class _Told:
    """A stream in the front's process, by its number."""

    __slots__ = "_courier", "_number"

    def __init__(self, courier: Courier, number: int):
        self._courier, self._number = courier, number

    def put(self, event: Event) -> Courier:
        self._courier.tell(self._number, event)
        return self._courier
