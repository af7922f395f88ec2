"""News for tasks of an event loop, from another thread or from the engine's process: one wake-up for all that came, and a rest after it.

A wake-up a token, of the loop and of its task, costs ten times as much as the token, and so does a piece of its own. In the rest tokens
gather, and they go out together: about 50 ms of them to each of 256 clients, one at a time to a few. Meanwhile the loop is free for new
requests.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

SHORT = 1e-3  # seconds: the least that a loop sleeps; work that is shorter needs no rest
REST = 3  # times the work
LONGEST = 0.05  # seconds of rest: work may be other work than ours, as of many clients that come at once


class Bell:
    """Of the running loop."""

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self._news: deque[Callable[[], None]] = deque()
        self._rung = False

    def add(self, heard: Callable[[], None]) -> None:
        """From any thread: the loop is to call it. Nothing is woken before the next `ring`."""
        self._news.append(heard)

    def ring(self) -> None:
        """From any thread: the loop calls what was added."""
        if not self._rung:
            self._rung = True
            with suppress(RuntimeError):  # the listener is gone, and its loop is closed
                self._loop.call_soon_threadsafe(self._hear)

    def _hear(self) -> None:
        began = time.thread_time()
        try:
            while self._news:
                self._news.popleft()()
        finally:
            self._loop.call_soon(self._rest, began)  # behind the tasks that were woken

    def _rest(self, began: float) -> None:
        took = time.thread_time() - began
        if took < SHORT:
            self._open()
        else:
            self._loop.call_later(min(REST * took, LONGEST), self._open)

    def _open(self) -> None:
        self._rung = False
        if self._news:  # it came while the bell was silent
            self.ring()
