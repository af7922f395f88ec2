"""What the front asks of an engine, and why an engine takes no request."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from needlework.serve.bell import Bell
from needlework.serve.request import Event, Request


class QueueFullError(Exception):
    """As many requests wait as may. retry_after: seconds."""

    def __init__(self, waiting: int, retry_after: float = 1.0):
        super().__init__(f"{waiting} requests wait already, as many as may; try again in {retry_after:g} s")
        self.waiting, self.retry_after = waiting, retry_after

    def __reduce__(self):  # as it is pickled on its way to the front's process
        return type(self), (self.waiting, self.retry_after)


class DrainingError(Exception):
    """The engine takes no more requests: it is ending."""


class GrammarError(ValueError):
    """What is no grammar, or is beyond the limits within which one is compiled."""


class Ringing(Protocol):
    """What wakes readers."""

    def ring(self) -> None: ...


class Sink(Protocol):
    """Where the events of a request go. put: the bell to ring once those of the step are there; None: none."""

    def put(self, event: Event) -> Ringing | None: ...


class Stream(Protocol):
    """The events of one request; the last has `finish`. listen: `heard` is called in the bell's loop when there is something to take."""

    def cancel(self) -> None: ...

    def listen(self, bell: Bell, heard: Callable[[], None]) -> None: ...

    def take(self) -> list[Event]: ...

    def __iter__(self) -> Iterator[Event]: ...


class Engine(Protocol):
    """What serves the requests. add_all: takes all or none, and reads a prompt that several have one after another once; raises
    QueueFullError, DrainingError, GrammarError, ValueError for what does not fit, RuntimeError once it has failed."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def length(self) -> int: ...

    def add_all(self, requests: Sequence[Request]) -> Sequence[Stream]: ...

    def stats(self) -> object: ...


class OwnEngine(Engine, Protocol):
    """One of this process. begin: `add_all` for readers elsewhere. drain: no new requests from now on. wait: until it has drained and the
    running ones are over; RuntimeError where it has failed. close: cancels the running ones and ends it; once more does nothing."""

    def begin(self, requests: Sequence[Request], sinks: Sequence[Sink]) -> None: ...

    def cancel(self, id: str) -> None: ...

    def drain(self) -> None: ...

    def wait(self) -> None: ...

    def close(self) -> None: ...
