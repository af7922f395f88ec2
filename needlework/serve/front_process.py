"""The front's process, for the process of the engine that starts it: its beginning, its orders, its end.

Python's threads take turns. In one process the front's work for each token would be taken from the engine's steps.
"""

import multiprocessing
import signal
import socket
import threading
from multiprocessing import connection
from multiprocessing.context import ForkServerContext, SpawnContext
from types import FrameType

from needlework.serve import http
from needlework.serve.courier import Courier
from needlework.serve.http import LAST_BYTES, Settings
from needlework.serve.interface import OwnEngine
from needlework.serve.messages import Order, Ready
from needlework.serve.process import ENDS, deaf

SPARE = 5  # seconds beyond the clients' last ones that a front has to end by itself
HEARS = 0.5  # seconds after which the main thread hears a signal that came just before it began to wait, or to another thread
Context = ForkServerContext | SpawnContext


class FrontProcess:
    """Answers at `bound`, which it takes over, from the beginning of the context to its end.

    context: how it is started. By default it is spawned: a fork of this process would have its GPU and its threads' locks.
    Raises ChildProcessError where it ends before it is ready.
    """

    def __init__(self, engine: OwnEngine, bound: socket.socket, settings: Settings, context: Context | None = None):
        made = context or multiprocessing.get_context("spawn")
        self._engine = engine
        self._error: RuntimeError | None = None
        self._signals = 0
        self._connection, theirs = made.Pipe()
        arguments = theirs, bound, engine.length, engine.vocabulary, settings
        self._process = made.Process(target=http.main, args=arguments, name="needlework front")
        with deaf():
            self._process.start()
        theirs.close()
        bound.close()

    def __enter__(self) -> "FrontProcess":
        try:
            ready = self._connection.recv()
        except EOFError:
            self._process.join()
            raise self._died() from None
        except BaseException:
            self._process.kill()
            raise
        assert isinstance(ready, Ready)
        self._courier = Courier(self._engine, self._connection)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._process.join()
        self._courier.close()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None, "it has been started"
        return pid

    def wait(self) -> None:
        """In the main thread, until a signal has ended it and the running answers are over. A second signal ends those too. The engine is then
        closed.

        Raises RuntimeError where the engine has failed, which ends the server, and ChildProcessError where the front has ended by itself.
        """
        before = {sign: signal.signal(sign, self._hear) for sign in ENDS}
        watch = threading.Thread(target=self._watch, name="needlework watch", daemon=True)
        watch.start()
        try:
            while self._process.is_alive():
                self._process.join(HEARS)
        finally:
            self._engine.close()
            watch.join()
            for sign, handler in before.items():
                signal.signal(sign, handler)
        if self._error is not None:
            raise self._error
        if not self._signals or (self._signals == 1 and self._process.exitcode):
            raise self._died()

    def _hear(self, sign: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            self._process.kill()
            return
        self._courier.order(Order.DRAIN)
        self._engine.drain()

    def _watch(self) -> None:
        try:
            self._engine.wait()
        except RuntimeError as error:
            self._error = error
        self._end()

    def _end(self) -> None:
        """It is to end by itself, and has to by and by."""
        self._courier.order(Order.END)
        if not connection.wait([self._process.sentinel], LAST_BYTES + SPARE):
            self._process.kill()

    def _died(self) -> ChildProcessError:
        status = self._process.exitcode
        how = f"by signal {-status}" if status is not None and status < 0 else f"with status {status}"
        return ChildProcessError(f"the front's process has ended {how}; what it said is above")
