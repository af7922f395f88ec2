"""What the front asks of an engine, and why an engine takes no request."""

from collections.abc import Callable, Iterator
from typing import Protocol

from needlework.serve.bell import Bell
from needlework.serve.request import Event, Request


class QueueFullError(Exception):
    """As many requests wait as may. retry_after: seconds."""

    def __init__(self, waiting: int, retry_after: float = 1.0):
        super().__init__(f"{waiting} requests wait already, as many as may; try again in {retry_after:g} s")
        self.retry_after = retry_after


class DrainingError(Exception):
    """The engine takes no more requests: it is ending."""


class Stream(Protocol):
    """The events of one request; the last has `finish`. listen: `heard` is called in the bell's loop when there is something to take."""

    def cancel(self) -> None: ...

    def listen(self, bell: Bell, heard: Callable[[], None]) -> None: ...

    def take(self) -> list[Event]: ...

    def __iter__(self) -> Iterator[Event]: ...


class Engine(Protocol):
    """What serves the requests. add: raises QueueFullError, DrainingError, ValueError for what does not fit, RuntimeError once it has
    failed. drain: no new requests; returns when the running ones are over."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def length(self) -> int: ...

    def add(self, request: Request) -> Stream: ...

    def drain(self) -> None: ...

    def stats(self) -> object: ...
