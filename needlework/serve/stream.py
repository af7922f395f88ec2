"""The way of a request's events from the engine's thread to the client that asked."""

import queue
from collections.abc import Callable, Iterator

from needlework.serve.bell import Bell
from needlework.serve.request import Event


class Stream:
    """The events of one request, for one reader: a thread that iterates, or a task that listens and takes. The last has `finish`."""

    def __init__(self, id: str, cancel: Callable[[str], None]):
        self.id, self._cancel = id, cancel
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._bell: Bell | None = None
        self._heard: Callable[[], None] = lambda: None
        self._told = False  # the reader, who has not taken yet

    def put(self, event: Event) -> Bell | None:
        """The bell to ring then; None: none."""
        self._events.put(event)
        bell = self._bell
        if bell is None or self._told:
            return None
        self._told = True
        bell.add(self._heard)
        return bell

    def cancel(self) -> None:
        """The request ends within a step; its last event says so."""
        self._cancel(self.id)

    def listen(self, bell: Bell, heard: Callable[[], None]) -> None:
        """In the bell's loop: `heard` is called there when there are events, once until they are taken."""
        self._heard, self._bell = heard, bell
        if not self._events.empty():
            heard()

    def take(self) -> list[Event]:
        """What has come."""
        self._told = False  # before the events: one that comes meanwhile is taken now or announced again
        return [self._events.get_nowait() for _ in range(self._events.qsize())]

    def __iter__(self) -> Iterator[Event]:
        while True:
            event = self._events.get()
            yield event
            if event.finish is not None:
                return
