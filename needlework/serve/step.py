"""What the scheduler plans: a Step for the device, with the moves between slots, pages and host memory around it.

Order: the moves of `before` one after another, then the rows, then the moves of `after`, of which none reads what another wrote. Steps run
in the order in which they were planned; so a slot or page may have a new owner while the step of its last one is still in flight.

`pages` of a row are the scheduler's own lines, by window: a sequence's pages in order, −1 for those before the window. The runner of a
step copies them before it calls the scheduler again, and keeps no view of their memory.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from needlework.serve.request import Request

Window = int | None  # of the layers that a pool of pages serves; None: they see every token


class CopySlot(NamedTuple):
    source: int
    target: int


class CopyPage(NamedTuple):
    window: Window
    source: int
    target: int


class Park(NamedTuple):
    """Keep a slot and pages in host memory, under the request's id."""

    id: str
    slot: int
    pages: Mapping[Window, tuple[int, ...]]


class Unpark(NamedTuple):
    """Put back what was parked, in the order of the pages then, and forget it."""

    id: str
    slot: int
    pages: Mapping[Window, tuple[int, ...]]


class Drop(NamedTuple):
    """Forget what was parked, if it is."""

    id: str


Copy = CopySlot | CopyPage
Move = Copy | Park | Unpark | Drop


class Owner(NamedTuple):
    """Of a slot: the next token of its sequence is sampled."""

    request: Request
    slot: int


class Decode(NamedTuple):
    """One token of a sequence that was prefilled; the next one is sampled.

    length: its tokens, this one included. token: None where an earlier step has sampled it and the host does not have it yet: it is the
    newest token of this slot on the device.
    """

    request: Request
    slot: int
    length: int
    token: int | None
    pages: Mapping[Window, array]

    @property
    def sampled(self) -> int:
        """Tokens sampled before this step's: the counter of the request's random numbers."""
        return self.length - len(self.request.prompt)


class Prefill(NamedTuple):
    """A sequence's tokens from `start` on. last: the next token is sampled; none is after another chunk.

    A request that is computed again has its prompt and its answer so far as tokens. forks: other answers to this prompt, which begin with
    the state at its end; the first token of each is sampled from the same logits.
    """

    request: Request
    slot: int
    start: int
    tokens: tuple[int, ...]
    last: bool
    pages: Mapping[Window, array]
    forks: tuple[Owner, ...] = ()

    @property
    def owners(self) -> tuple[Owner, ...]:
        """Whose next tokens its last row gives."""
        return (Owner(self.request, self.slot), *self.forks) if self.last else ()

    @property
    def length(self) -> int:
        """Tokens of the sequence, these included."""
        return self.start + len(self.tokens)

    @property
    def fresh(self) -> bool:
        """Whether the slot's state starts from zeros."""
        return self.start == 0

    @property
    def sampled(self) -> int:
        """As of a decode; of the last chunk only."""
        return self.length - len(self.request.prompt)


class Admitted(NamedTuple):
    """A request whose slot is in use since this step: fresh, from a snapshot, as a fork, unparked, or to be computed again.

    answer: its tokens so far behind the prompt, all of which the host has. borrowed: tokens whose states a snapshot or another answer gave.
    """

    request: Request
    slot: int
    answer: tuple[int, ...]
    borrowed: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """Rows, the moves around them, and the requests whose slot is new: what else is kept by slot begins anew for these.

    paged: those of the decodes whose pages are others than in the last step that had them.
    """

    decodes: tuple[Decode, ...]
    prefills: tuple[Prefill, ...]
    before: tuple[Move, ...]
    after: tuple[Copy, ...]
    admitted: tuple[Admitted, ...] = ()
    paged: tuple[Decode, ...] = ()

    @property
    def sampled(self) -> list[Request]:
        """Whose next tokens it samples, in the order of its rows."""
        return [row.request for row in self.decodes] + [one.request for row in self.prefills for one in row.owners]
