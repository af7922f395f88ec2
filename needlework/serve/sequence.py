"""A request on its way: its tokens, how far they are computed, and what it owns. Who runs when is `scheduler.py`'s."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from needlework.serve.request import Request
from needlework.serve.step import Window


def no_pages(windows: Iterable[Window]) -> dict[Window, array]:
    """Of a sequence that owns none."""
    return {window: array("i") for window in windows}


@dataclass(eq=False)
class Sequence:
    """A request on its way. `pages` of a parked one are those that it had; −1 for those that its window has passed."""

    request: Request
    arrival: int
    pages: dict[Window, array]
    tokens: array  # the prompt, and the answer as far as the host has it
    goal: int  # tokens to prefill
    computed: int = 0  # tokens in slot and pages once the steps planned so far have run
    holds: int = 0  # tokens for which it has pages, while it runs
    slot: int = -1
    parked: int = 0  # bytes
    borrowed: bool = (
        False  # its last page is a snapshot's or another answer's too, and others may write behind the rows that they share
    )
    paged: bool = False  # its pages are others than in the last step that had it
    steady: int = 0  # while it has computed fewer tokens, its pages stay as they are
    group: int | None = None  # of answers to one prompt that came together (`groups.py`)
    leader: "Sequence | None" = None  # while it follows one
    chain: list[bytes] | None = None
    marks: set[int] = field(default_factory=set)  # lengths at which a snapshot is worth its slot
    last: int = field(init=False)  # tokens computed when the last one of its answer is sampled

    def __post_init__(self):
        self.last = len(self.request.prompt) + self.request.max_tokens - 1

    @property
    def decoding(self) -> bool:
        return self.computed >= self.goal

    @property
    def unheard(self) -> bool:
        """Whether a token was sampled that the host does not know."""
        return self.computed >= len(self.tokens)
