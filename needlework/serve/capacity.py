"""What a scheduler shares out: slots, pages by window, and host memory."""

from dataclasses import dataclass
from typing import NamedTuple

from needlework.fields import Count, Natural, fit
from needlework.serve.pools import most_pages
from needlework.serve.step import Window

NEWEST = 8  # bytes of the newest token, of each slot and of the padded rows together


class Pool(NamedTuple):
    """Pages of one window, and the bytes of a page in all its layers."""

    window: Window
    pages: int
    page_bytes: int


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What there is to share out; `planner.plan` makes one that fits the memory.

    length: tokens of the longest request, its answer included. batch: sequences that run at once. slots: for them and for snapshots.
    slot_bytes: of a slot's states; count_bytes: of what its penalties count.
    page: rows of a page. align: a prefill is cut, and a snapshot taken, at its multiples only. budget: tokens of prefill in a step.
    prefix: whether prompts share snapshots. shared: whether a page may be two sequences': not where a layer writes its pages again.
    host_bytes: for parked requests.
    Raises ValueError for a field out of range, and where one request of `length` tokens does not fit.

    >>> from needlework.serve import Request, Scheduler, SchedulerConfig
    >>> from needlework.serve.capacity import Pool
    >>> pool = Pool(window=None, pages=40, page_bytes=4096)
    >>> config = SchedulerConfig(length=1024, batch=4, slots=6, slot_bytes=1 << 16, pools=(pool,))
    >>> scheduler = Scheduler(config)
    >>> scheduler.add(Request(id="a", prompt=(5, 7, 11), max_tokens=16))
    >>> len(scheduler)
    1
    """

    length: Count
    batch: Count
    slots: Count
    slot_bytes: Natural
    pools: tuple[Pool, ...]
    count_bytes: Natural = 0
    page: Count = 64
    align: Count = 64
    budget: Count = 2048
    prefix: bool = True
    shared: bool = True
    host_bytes: Natural = 0

    @property
    def nbytes(self) -> int:
        """Of all that is held for sequences on the device, whether they run or not."""
        pages = sum(pages * page_bytes for _, pages, page_bytes in self.pools)
        return self.slots * (self.slot_bytes + self.count_bytes + NEWEST) + NEWEST + pages

    def __post_init__(self):
        fit("scheduler", self)
        if self.page % 16:
            raise ValueError(f"scheduler: page is {self.page}, expected a multiple of 16")
        if self.budget < self.align:
            raise ValueError(f"scheduler: budget is {self.budget}, expected at least align = {self.align}")
        if self.slots < self.batch:
            raise ValueError(f"scheduler: slots is {self.slots}, expected at least batch = {self.batch}")
        for window, pages, _ in self.pools:
            if pages < (most := most_pages(self.length, window, self.page, self.budget)):
                raise ValueError(
                    f"scheduler: window {window} has {pages} pages, a request of {self.length} tokens needs {most}"
                )
