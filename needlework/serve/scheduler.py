"""Which requests run in the next step, on which slots and pages. Pure Python; the tensors follow the Step (`tables.py`).

The life of a request, and what it owns:

    waiting     nothing
    parked      bytes of host memory; it waits with the others, by arrival
    prefilling  a slot, and the pages of its tokens so far
    decoding    the same; one token a step
    over        nothing: finished, cancelled or failed

- Decodes come first, then prefills by arrival within a budget of tokens. A prefill is cut at multiples of `align` only.
- The first of those that wait is admitted once there is a slot, and the pages of its next chunk; beyond these, a page stays free for
  each sequence that runs, so that what was just admitted is not parked in the next step. No request overtakes it.
- A sequence short of pages takes those of snapshots, then those of the youngest one that runs, which is parked, or computed again from
  its tokens once the host's memory is full. The youngest itself waits. A prefill takes nothing from a decode of the same step.
- Requests that come together with one prompt are prefilled once (`groups.py`).
- Steps may be planned ahead of their tokens. A sequence whose newest token the host does not have is not parked: it is left out of
  steps until the token has come.
"""

from array import array
from bisect import insort
from collections import deque
from collections.abc import Mapping, Set
from itertools import count, groupby
from typing import NamedTuple

from needlework.serve.capacity import SchedulerConfig
from needlework.serve.groups import Groups, by_arrival
from needlework.serve.memory import Memory
from needlework.serve.request import Request
from needlework.serve.sequence import Sequence, no_pages
from needlework.serve.step import Admitted, Decode, Drop, Owner, Park, Prefill, Step, Unpark


class _Flight(NamedTuple):
    """A step, whose sequences it is, in the order of its rows, those that fork in it, and the snapshots that it takes."""

    step: Step
    decodes: list[Sequence]
    prefills: list[Sequence]
    forks: list[Sequence]
    digests: list[bytes]


class _Plan:
    """A step in the making."""

    def __init__(self, budget: int):
        self.left = budget
        self.ends: dict[Sequence, int] = {}  # tokens computed after the step
        self.admitted: list[Admitted] = []
        self.held_back: set[Sequence] = set()  # others wait for their pages: they do not run, and no request is admitted

    def add(self, seq: Sequence, end: int) -> None:
        self.ends[seq] = end
        if not seq.decoding:
            self.left -= end - seq.computed


class Scheduler:
    """`add` and `cancel` requests; run what `step` plans, in order, and tell it by `done` or `failed`.

    waiting, running: sequences by arrival. memory: what they own, and what is free.
    """

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.memory = Memory(config)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._known: dict[str, Sequence] = {}
        self._groups = Groups(self.memory, self.waiting, self.running)
        self._flights: deque[_Flight] = deque()
        self._arrivals = count()

    def __len__(self) -> int:
        """Requests that are not over."""
        return len(self._known)

    def add(self, *requests: Request) -> None:
        """A prompt that several of them have, one after another, is prefilled once. ValueError for an id that is in use, and for a request
        longer than the longest."""
        for request in requests:
            tokens = len(request.prompt) + request.max_tokens
            if request.id in self._known:
                raise ValueError(f"request {request.id!r} is there already")
            if tokens > self.config.length:
                raise ValueError(
                    f"request {request.id!r}: prompt and max_tokens are {len(request.prompt)} + {request.max_tokens} tokens, expected "
                    f"at most {self.config.length}"
                )
        for _, group in groupby(requests, key=lambda request: request.prompt):
            self._add(list(group))

    def _add(self, requests: list[Request]) -> None:
        group = None
        for request in requests:
            pages, arrival = no_pages(self.memory.pages), next(self._arrivals)
            group = arrival if group is None and len(requests) > 1 else group
            seq = Sequence(request, arrival, pages, array("q", request.prompt), len(request.prompt), group=group)
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
            if seq.slot >= 0 and not seq.decoding and seq.leader is None:
                self._extend(seq, self._cut(seq, plan.left), plan)
        while self.waiting and not plan.held_back and self._admit(self.waiting[0], plan):
            pass
        return self._emit(plan) if plan.ends else None

    def done(self, step: Step, tokens: Mapping[str, int], finished: Set[str] = frozenset()) -> None:
        """The oldest step in flight has run: its sampled tokens, and the requests that they end; max_tokens ends one anyway."""
        flight = self._flights.popleft()
        assert flight.step is step, "steps are done in the order in which they were planned"
        last = [seq for seq, row in zip(flight.prefills, step.prefills, strict=True) if row.last]
        for seq in (*flight.decodes, *last, *flight.forks):
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
            self.memory.snapshots.evict(digest)
        rows = list(filter(self._lives, flight.prefills)) or list(filter(self._lives, flight.decodes))
        newest = max(rows, key=by_arrival, default=None)
        if newest is not None:
            self._forget(newest)
        for seq in filter(self._lives, [*flight.decodes, *flight.prefills, *flight.forks]):
            self._groups.stop(seq)
            self.memory.release(seq)
            self.memory.restart(seq)
            insort(self.waiting, seq, key=by_arrival)
        for move in step.before:
            if isinstance(move, Park | Unpark | Drop):
                self.memory.moves.append(Drop(move.id))
                seq = self._known.get(move.id)
                if seq is not None and seq.parked:
                    self.memory.restart(seq)
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
        memory = self.memory
        memory.free_passed(seq)
        while end > seq.holds and not memory.room(seq, end):
            victim = next(one for one in reversed(self.running) if one.leader is None or any(one.pages.values()))
            if victim.leader is not None:
                self._groups.wait_again(victim)
                continue
            if victim is seq or victim in plan.ends or victim.unheard:
                plan.held_back.add(victim)
                return
            self._groups.stop(victim)
            memory.park(victim)
            insort(self.waiting, victim, key=by_arrival)
        if end > seq.holds:
            memory.give(seq, end)
        seq.steady = min([seq.holds, *memory.passing(seq)])
        plan.add(seq, end)

    def _admit(self, seq: Sequence, plan: _Plan) -> bool:
        """Whether it runs now."""
        if len(self.running) == self.config.batch:
            return False
        if (leader := self._groups.leader(seq)) is not None:
            return self._groups.follow(seq, leader)
        memory = self.memory
        snapshot = None if seq.parked else memory.snapshots.borrow(seq)
        end = seq.computed + 1 if seq.decoding else self._cut(seq, plan.left)
        if end == seq.computed or not memory.room(seq, end, slots=1, spare=len(self.running)):
            if snapshot is not None:
                memory.snapshots.give_back(seq)
            return False
        memory.enter(seq, None if snapshot is None else snapshot.slot)
        memory.give(seq, end)
        self.waiting.pop(0)
        insort(self.running, seq, key=by_arrival)
        self._groups.lead(seq)
        answer = tuple(seq.tokens[len(seq.request.prompt) :])
        plan.admitted.append(Admitted(seq.request, seq.slot, answer, snapshot.length if snapshot is not None else 0))
        plan.add(seq, end)
        return True

    def _forget(self, seq: Sequence) -> None:
        """It is over and gives all back."""
        del self._known[seq.request.id]
        if seq.slot >= 0:
            self._groups.stop(seq)
            self.memory.release(seq)
        else:
            self.waiting.remove(seq)
            self.memory.drop(seq)

    def _emit(self, plan: _Plan) -> Step:
        decodes, prefills, paged, rows, copies = [], [], [], ([], [], []), []
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
                tokens, last = tuple(known[computed:end]), end == seq.goal
                forks, own = self._groups.fork(seq) if last else ([], [])
                owners = tuple(Owner(one.request, one.slot) for one in forks)
                prefills.append(Prefill(seq.request, seq.slot, computed, tokens, last, seq.pages, owners))
                plan.admitted += [Admitted(*owner, answer=(), borrowed=end) for owner in owners]
                rows[1].append(seq)
                rows[2].extend(forks)
                copies += own
            seq.computed, seq.paged = end, False
        taken = list(filter(None, map(self.memory.snapshots.take, rows[1])))
        before, self.memory.moves = tuple(self.memory.moves), []
        step = Step(
            decodes=tuple(decodes),
            prefills=tuple(prefills),
            before=before,
            after=(*copies, *(copy for _, copy in taken)),
            admitted=tuple(plan.admitted),
            paged=tuple(paged),
        )
        self._flights.append(_Flight(step, *rows, [digest for digest, _ in taken]))
        return step
