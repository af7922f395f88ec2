"""Which requests run in the next step, on which slots and pages. Pure Python; the tensors follow the Step (`tables.py`).

The life of a request, and what it owns:

    waiting     nothing
    parked      bytes of host memory; it waits with the others, by arrival
    prefilling  a slot, and the pages of its tokens so far
    decoding    the same; one token a step
    over        nothing: finished, cancelled or failed

- Decodes come first, then prefills by arrival within a budget of tokens. A prefill is cut at multiples of `align` only.
- The first of those that wait is admitted once there is a slot, and the pages of its next chunk; beyond these, a page stays free for
  each sequence that runs, so that what was just admitted is not parked in the next step. Nobody overtakes it.
- A sequence short of pages takes those of snapshots, then those of the youngest one that runs, which is parked, or computed again from
  its tokens once the host's memory is full. The youngest itself waits. A prefill takes nothing from a decode of the same step.
- Steps may be planned ahead of their tokens. A sequence whose newest token the host has not heard is not parked: it is left out of
  steps until the token has come.
"""

from array import array
from bisect import insort
from collections import deque
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from needlework.fields import Count, Natural, fit
from needlework.serve.pools import PagePool, Slots, most_pages, pages_for
from needlework.serve.prefix import Prefix, Snapshot
from needlework.serve.request import Request
from needlework.serve.step import Admitted, CopyPage, CopySlot, Decode, Drop, Move, Park, Prefill, Step, Unpark, Window


class Pool(NamedTuple):
    """Pages of one window, and the bytes of a page in all its layers."""

    window: Window
    pages: int
    page_bytes: int


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What there is to share out; `planner.plan` makes one that fits the memory.

    length: tokens of the longest request, its answer included. batch: sequences that run at once. slots: for them and for snapshots.
    page: rows of a page. align: a prefill is cut, and a snapshot taken, at its multiples only. budget: tokens of prefill in a step.
    prefix: whether prompts share snapshots. host_bytes: for parked requests.
    Raises ValueError for a field out of range, and where one request of `length` tokens does not fit.
    """

    length: Count
    batch: Count
    slots: Count
    slot_bytes: Natural
    pools: tuple[Pool, ...]
    page: Count = 64
    align: Count = 64
    budget: Count = 2048
    prefix: bool = True
    host_bytes: Natural = 0

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


@dataclass(eq=False)
class Sequence:
    """A request on its way. `pages` of a parked one are those that it had; −1 for those that its window has passed."""

    request: Request
    arrival: int
    pages: dict[Window, array]
    tokens: array  # the prompt, and the answer as far as the host has heard
    goal: int  # tokens to prefill
    computed: int = 0  # tokens in slot and pages once the steps planned so far have run
    holds: int = 0  # tokens for which it has pages, while it runs
    slot: int = -1
    parked: int = 0  # bytes
    borrowed: bool = False  # its last page is a snapshot's, and other sequences may write behind the snapshot's rows
    paged: bool = False  # its pages are others than in the last step that had it
    steady: int = 0  # while it has computed fewer tokens, its pages stay as they are
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


class _Flight(NamedTuple):
    """A step, whose sequences it is, in the order of its rows, and the snapshots that it takes."""

    step: Step
    decodes: list[Sequence]
    prefills: list[Sequence]
    digests: list[bytes]


class _Plan:
    """A step in the making."""

    def __init__(self, budget: int):
        self.left = budget
        self.ends: dict[Sequence, int] = {}  # tokens computed after the step
        self.admitted: list[Admitted] = []
        self.held_back: set[Sequence] = set()  # others wait for their pages: they do not run, and nobody is admitted

    def add(self, seq: Sequence, end: int) -> None:
        self.ends[seq] = end
        if not seq.decoding:
            self.left -= end - seq.computed


_by_arrival = lambda seq: seq.arrival


class Scheduler:
    """`add` and `cancel` requests; run what `step` plans, in order, and tell it by `done` or `failed`.

    waiting, running: sequences by arrival. slots, pages: what is free of what the config gave.
    """

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.slots = Slots(config.slots)
        self.pages = {window: PagePool(pages) for window, pages, _ in config.pools}
        self.prefix = Prefix(config.align)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.host_bytes = 0
        self._known: dict[str, Sequence] = {}
        self._moves: list[Move] = []  # of the next step
        self._flights: deque[_Flight] = deque()
        self._arrivals = count()

    def __len__(self) -> int:
        """Requests that are not over."""
        return len(self._known)

    def add(self, request: Request) -> None:
        """ValueError for an id that is in use, and for a request longer than the longest."""
        tokens = len(request.prompt) + request.max_tokens
        if request.id in self._known:
            raise ValueError(f"request {request.id!r} is there already")
        if tokens > self.config.length:
            raise ValueError(
                f"request {request.id!r}: prompt and max_tokens are {len(request.prompt)} + {request.max_tokens} tokens, expected "
                f"at most {self.config.length}"
            )
        pages = {window: array("i") for window in self.pages}
        seq = Sequence(request, next(self._arrivals), pages, array("q", request.prompt), len(request.prompt))
        self._known[request.id] = seq
        self.waiting.append(seq)

    def cancel(self, id: str) -> None:
        """At any stage; nothing for a request that is over."""
        if id in self._known:
            self._forget(self._known[id])

    def tokens(self, id: str) -> list[int]:
        """Prompt and answer so far of a request that is not over."""
        return list(self._known[id].tokens)

    def step(self) -> Step | None:
        """The next step. None: nothing can run before a step in flight is done, or before a request comes."""
        plan = _Plan(self.config.budget)
        for seq in list(self.running):
            computed = seq.computed
            if seq.slot < 0 or not seq.goal <= computed < seq.last or seq in plan.held_back:
                continue
            if computed < seq.steady:  # as most are: what every row costs in every step bounds the tokens a second
                plan.ends[seq] = computed + 1
            else:
                self._extend(seq, computed + 1, plan)
        for seq in list(self.running):
            if seq.slot >= 0 and not seq.decoding:
                self._extend(seq, self._cut(seq, plan.left), plan)
        while self.waiting and not plan.held_back and self._admit(self.waiting[0], plan):
            pass
        return self._emit(plan) if plan.ends else None

    def done(self, step: Step, tokens: Mapping[str, int], finished: Set[str] = frozenset()) -> None:
        """The oldest step in flight has run: its sampled tokens, and the requests that they end; max_tokens ends one anyway."""
        flight = self._flights.popleft()
        assert flight.step is step, "steps are done in the order in which they were planned"
        last = [seq for seq, row in zip(flight.prefills, step.prefills, strict=True) if row.last]
        for seq in (*flight.decodes, *last):
            id = seq.request.id
            if self._known.get(id) is seq:
                seq.tokens.append(tokens[id])
                if len(seq.tokens) > seq.last or id in finished:
                    self._forget(seq)

    def failed(self, step: Step) -> Request | None:
        """The only step in flight ran out of memory: its newest prefill, or without one its newest decode, is over and returned.

        Some layers may have advanced and others not, and moves may not have been made. So every other request of the step, those
        parked before it included, is computed again from its tokens.
        """
        (flight,) = self._flights
        assert flight.step is step
        self._flights.clear()
        for digest in flight.digests:
            self._give_back(self.prefix.pop(digest))
        rows = list(filter(self._lives, flight.prefills)) or list(filter(self._lives, flight.decodes))
        newest = max(rows, key=_by_arrival, default=None)
        if newest is not None:
            self._forget(newest)
        for seq in filter(self._lives, [*flight.decodes, *flight.prefills]):
            self._release(seq)
            self._restart(seq)
            insort(self.waiting, seq, key=_by_arrival)
        for move in step.before:
            if isinstance(move, Park | Unpark | Drop):
                self._moves.append(Drop(move.id))
                seq = self._known.get(move.id)
                if seq is not None and seq.parked:
                    self._restart(seq)
        return None if newest is None else newest.request

    def _lives(self, seq: Sequence) -> bool:
        return self._known.get(seq.request.id) is seq

    def _cut(self, seq: Sequence, left: int) -> int:
        """Where its next chunk ends; where it is now if the budget does not reach the next multiple of align."""
        end = min(seq.goal, seq.computed + left)
        if end < seq.goal:
            end = max(seq.computed, end // self.config.align * self.config.align)
        return min((mark for mark in seq.marks if seq.computed < mark < end), default=end)

    def _extend(self, seq: Sequence, end: int, plan: _Plan) -> None:
        """A sequence that runs joins the plan, if there are the pages; the youngest ones make way."""
        if end == seq.computed:
            return
        self._pass(seq)
        while end > seq.holds and not self._room(seq, end):
            victim = self.running[-1]
            if victim is seq or victim in plan.ends or victim.unheard:
                plan.held_back.add(victim)
                return
            self._park(victim)
        if end > seq.holds:
            self._give(seq, end)
        seq.steady = min([seq.holds, *self._passes(seq)])
        plan.add(seq, end)

    def _admit(self, seq: Sequence, plan: _Plan) -> bool:
        """Whether it runs now."""
        if len(self.running) == self.config.batch:
            return False
        snapshot = None if seq.parked else self._borrow(seq)
        end = seq.computed + 1 if seq.decoding else self._cut(seq, plan.left)
        if end == seq.computed or not self._room(seq, end, slots=1, spare=len(self.running)):
            if snapshot is not None:
                self._return(seq)
            return False
        seq.slot = self.slots.acquire()
        if seq.parked:
            self._unpark(seq)
        elif snapshot is not None and snapshot.slot != seq.slot:
            self._moves.append(CopySlot(snapshot.slot, seq.slot))
        self._give(seq, end)
        self.waiting.pop(0)
        insort(self.running, seq, key=_by_arrival)
        answer = tuple(seq.tokens[len(seq.request.prompt) :])
        plan.admitted.append(Admitted(seq.request, seq.slot, answer, snapshot.length if snapshot is not None else 0))
        plan.add(seq, end)
        return True

    def _need(self, seq: Sequence, end: int) -> dict[Window, int]:
        """Pages that it must acquire to hold `end` tokens."""
        need = {}
        for window, pool in self.pages.items():
            pages = seq.pages[window]
            need[window] = pages_for(end, self.config.page) - len(pages)
            if seq.parked:
                need[window] += sum(page >= 0 for page in pages)
            elif seq.borrowed and pool.owners[pages[-1]] > 1:
                need[window] += 1
        return need

    def _room(self, seq: Sequence, end: int, slots: int = 0, spare: int = 0) -> bool:
        """Whether the pools hold what it needs, `spare` pages beside it, once snapshots have made way."""
        while True:
            need = self._need(seq, end).items()  # less once a snapshot goes that shares its last page
            if self.slots.free >= slots and all(not n or self.pages[window].free >= n + spare for window, n in need):
                return True
            if not self._evict():
                return False

    def _give(self, seq: Sequence, end: int) -> None:
        """The pages that it needs; a last page that a snapshot shares becomes its own by copy."""
        for window, pool in self.pages.items():
            pages = seq.pages[window]
            if seq.borrowed and pool.owners[pages[-1]] > 1:
                (own,) = pool.acquire(1)
                self._moves.append(CopyPage(window, pages[-1], own))
                pool.release(pages[-1:])
                pages[-1] = own
            pages.extend(pool.acquire(pages_for(end, self.config.page) - len(pages)))
        seq.borrowed, seq.paged, seq.holds = False, True, pages_for(end, self.config.page) * self.config.page

    def _pass(self, seq: Sequence) -> None:
        """Frees the pages that lie wholly before the window of its next token."""
        for window, pages in seq.pages.items():
            if window is None:
                continue
            i = max(0, seq.computed - window) // self.config.page - 1
            while i >= 0 and pages[i] >= 0:
                self.pages[window].release(pages[i : i + 1])
                pages[i], seq.paged = -1, True
                i -= 1

    def _passes(self, seq: Sequence) -> Iterator[int]:
        """Of each window, the tokens that are computed when it passes its next page."""
        for window in seq.pages:
            if window is not None:
                yield window + (max(0, seq.computed - window) // self.config.page + 1) * self.config.page

    def _park(self, seq: Sequence) -> None:
        self._pass(seq)
        live = {window: tuple(page for page in pages if page >= 0) for window, pages in seq.pages.items()}
        size = self.config.slot_bytes + sum(len(live[window]) * page_bytes for window, _, page_bytes in self.config.pools)
        slot = seq.slot
        self._release(seq)
        if self.host_bytes + size <= self.config.host_bytes:
            self._moves.append(Park(seq.request.id, slot, live))
            seq.parked = size
            self.host_bytes += size
        else:
            self._restart(seq)
        insort(self.waiting, seq, key=_by_arrival)

    def _unpark(self, seq: Sequence) -> None:
        new = {}
        for window, pages in seq.pages.items():
            live = [i for i, page in enumerate(pages) if page >= 0]
            new[window] = tuple(self.pages[window].acquire(len(live)))
            for i, page in zip(live, new[window], strict=True):
                pages[i] = page
        self._moves.append(Unpark(seq.request.id, seq.slot, new))
        self.host_bytes -= seq.parked
        seq.parked = 0

    def _restart(self, seq: Sequence) -> None:
        """It owns nothing and begins anew, its answer so far now part of what is prefilled."""
        self.host_bytes -= seq.parked
        seq.parked = 0
        seq.pages = {window: array("i") for window in self.pages}
        seq.goal, seq.computed, seq.chain = len(seq.tokens), 0, None

    def _release(self, seq: Sequence) -> None:
        """Its slot and pages go back, and it runs no longer."""
        self.running.remove(seq)
        self.slots.release(seq.slot)
        seq.slot, seq.steady = -1, 0
        for window, pages in seq.pages.items():
            self.pages[window].release(pages)

    def _forget(self, seq: Sequence) -> None:
        """It is over and gives all back."""
        del self._known[seq.request.id]
        if seq.slot >= 0:
            self._release(seq)
            return
        self.waiting.remove(seq)
        if seq.parked:
            self.host_bytes -= seq.parked
            self._moves.append(Drop(seq.request.id))

    def _borrow(self, seq: Sequence) -> Snapshot | None:
        """The longest snapshot of its beginning, whose pages it now shares."""
        if not self.config.prefix:
            return None
        if seq.chain is None:
            seq.chain = self.prefix.chain(seq.tokens)
            seq.marks = {self.prefix.parting(seq.chain), len(seq.chain) * self.config.align}
        snapshot = self.prefix.find(seq.chain)
        if snapshot is not None:
            seq.computed = snapshot.length
            seq.pages = {window: pages[:] for window, pages in snapshot.pages.items()}
            seq.borrowed = snapshot.length % self.config.page > 0
            for window, pages in seq.pages.items():
                self.pages[window].retain(pages)
        return snapshot

    def _return(self, seq: Sequence) -> None:
        """What it borrowed."""
        for window, pages in seq.pages.items():
            self.pages[window].release(pages)
        seq.pages = {window: array("i") for window in self.pages}
        seq.computed, seq.borrowed = 0, False

    def _snapshot(self, seq: Sequence) -> tuple[bytes, CopySlot] | None:
        """What it has computed becomes a snapshot, if it is worth one and there is a slot; older ones make way."""
        if seq.computed not in seq.marks or seq.chain is None:
            return None
        digest = seq.chain[seq.computed // self.config.align - 1]
        if digest in self.prefix:
            return None
        while not self.slots.free:
            if not self._evict():
                return None
        pages = {window: pages[:] for window, pages in seq.pages.items()}
        for window, line in pages.items():
            if window is not None:
                passed = max(0, seq.computed - window) // self.config.page
                line[:passed] = array("i", [-1] * passed)
            self.pages[window].retain(line)
        snapshot = Snapshot(seq.computed, self.slots.acquire(), pages)
        self.prefix.put(digest, snapshot)
        return digest, CopySlot(seq.slot, snapshot.slot)

    def _evict(self) -> bool:
        """Whether there was a snapshot to take out."""
        snapshot = self.prefix.pop()
        self._give_back(snapshot)
        return snapshot is not None

    def _give_back(self, snapshot: Snapshot | None) -> None:
        if snapshot is not None:
            self.slots.release(snapshot.slot)
            for window, pages in snapshot.pages.items():
                self.pages[window].release(pages)

    def _emit(self, plan: _Plan) -> Step:
        decodes, prefills, paged, rows = [], [], [], ([], [])
        for seq, end in plan.ends.items():
            known, computed = seq.tokens, seq.computed
            if computed >= seq.goal:
                token = known[computed] if computed < len(known) else None
                row = Decode(seq.request, seq.slot, end, token, seq.pages)
                decodes.append(row)
                rows[0].append(seq)
                if seq.paged:
                    paged.append(row)
            else:
                tokens = tuple(known[computed:end])
                prefills.append(Prefill(seq.request, seq.slot, computed, tokens, end == seq.goal, seq.pages))
                rows[1].append(seq)
            seq.computed, seq.paged = end, False
        taken = list(filter(None, map(self._snapshot, rows[1])))
        before, self._moves = tuple(self._moves), []
        step = Step(
            decodes=tuple(decodes),
            prefills=tuple(prefills),
            before=before,
            after=tuple(copy for _, copy in taken),
            admitted=tuple(plan.admitted),
            paged=tuple(paged),
        )
        self._flights.append(_Flight(step, *rows, [digest for digest, _ in taken]))
        return step
