"""What the front's process and the engine's say to each other, pickled, over one connection.

front to engine     Ready once, then Add, Count and Cancel
engine to front     Reply to each Add and Count; Said, the events since the last one, a step's or of several; Order
"""

from enum import Enum
from typing import NamedTuple

from needlework.serve.request import Event, Request

# Events in order, each with the number of its stream. A token and nothing else is an integer, which pickle is quick with.
Said = list[tuple[int, int | Event]]


class Ready(NamedTuple):
    """The front answers."""


class Add(NamedTuple):
    """Requests, whose streams have these numbers. The reply, to the first: None, or why they were refused."""

    numbers: tuple[int, ...]
    requests: tuple[Request, ...]

    @property
    def number(self) -> int:
        return self.numbers[0]


class Count(NamedTuple):
    """The reply: the engine's stats."""

    number: int


class Cancel(NamedTuple):
    id: str


class Reply(NamedTuple):
    """value: an exception is raised."""

    number: int
    value: object


class Order(Enum):
    """DRAIN: new requests are refused. END: the front's process is to end once its clients have their answers."""

    DRAIN = "drain"
    END = "end"
