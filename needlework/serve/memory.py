"""What sequences own of slots, pages and host memory, and the moves by which it changes hands. Pure Python: indices and counts."""

from array import array
from collections.abc import Iterator

from needlework.serve.capacity import SchedulerConfig
from needlework.serve.pools import PagePool, Slots, live, pages_for, passed
from needlework.serve.sequence import Sequence, no_pages
from needlework.serve.snapshots import Snapshots
from needlework.serve.step import Copy, CopyPage, CopySlot, Drop, Move, Park, Unpark, Window


class Memory:
    """slots, pages: what is free of what the config gave. host_bytes: of those parked. moves: of the next step, in order."""

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.slots = Slots(config.slots)
        self.pages = {window: PagePool(pages) for window, pages, _ in config.pools}
        self.snapshots = Snapshots(config, self.slots, self.pages)
        self.host_bytes = 0
        self.moves: list[Move] = []

    def need(self, seq: Sequence, end: int) -> dict[Window, int]:
        """Pages that it must acquire to hold `end` tokens; to go on behind a prompt that another prefills for it."""
        if seq.leader is not None:
            return {window: 1 if self.config.shared else self._live(seq.goal, window) for window in self.pages}
        need = {}
        for window, pool in self.pages.items():
            pages = seq.pages[window]
            need[window] = pages_for(end, self.config.page) - len(pages)
            if seq.parked:
                need[window] += sum(page >= 0 for page in pages)
            elif seq.borrowed and pool.owners[pages[-1]] > 1:
                need[window] += 1
        return need

    def room(self, seq: Sequence, end: int, slots: int = 0, spare: int = 0) -> bool:
        """Whether the pools hold what it needs, `spare` pages beside it, once snapshots have made way."""
        while True:
            need = self.need(seq, end).items()  # less once a snapshot goes that shares its last page
            if self.slots.free >= slots and all(not n or self.pages[window].free >= n + spare for window, n in need):
                return True
            if not self.snapshots.evict():
                return False

    def give(self, seq: Sequence, end: int) -> None:
        """The pages that it needs; a last page that others share becomes its own by copy."""
        for window, pool in self.pages.items():
            pages = seq.pages[window]
            if seq.borrowed and pool.owners[pages[-1]] > 1:
                (own,) = pool.acquire(1)
                self.moves.append(CopyPage(window, pages[-1], own))
                pool.release(pages[-1:])
                pages[-1] = own
            pages.extend(pool.acquire(pages_for(end, self.config.page) - len(pages)))
        seq.borrowed, seq.paged, seq.holds = False, True, pages_for(end, self.config.page) * self.config.page

    def follow(self, seq: Sequence) -> None:
        """A slot, and pages for copies of its leader's where no page may be two sequences'."""
        seq.slot = self.slots.acquire()
        if not self.config.shared:
            for window, pool in self.pages.items():
                gone = passed(seq.goal, window, self.config.page)
                seq.pages[window] = array("i", [-1] * gone + pool.acquire(self._live(seq.goal, window)))

    def fork(self, seq: Sequence) -> list[Copy]:
        """The copies, behind a step that ends its leader's prompt, by which it is where the leader is.

        It shares the leader's pages, and who writes behind the prompt copies the last one, if that is not full.
        """
        leader, P, config = seq.leader, seq.goal, self.config
        assert leader is not None and not seq.computed, "it has waited for its leader"
        copies: list[Copy] = [CopySlot(leader.slot, seq.slot)]
        for window, pool in self.pages.items():
            theirs, own = live(leader.pages[window], P, window, config.page), seq.pages[window]
            if config.shared:
                seq.pages[window] = theirs
                pool.retain(theirs)
            else:
                copies += [CopyPage(window, *pair) for pair in zip(theirs, own, strict=True) if pair[1] >= 0]
        seq.leader, seq.computed, seq.paged, seq.holds = None, P, True, pages_for(P, config.page) * config.page
        if config.shared and P % config.page:
            for one in (leader, seq):
                one.borrowed, one.holds, one.steady = True, 0, 0
        return copies

    def _live(self, tokens: int, window: Window) -> int:
        """Pages that are read or written again behind so many tokens."""
        return pages_for(tokens, self.config.page) - passed(tokens, window, self.config.page)

    def free_passed(self, seq: Sequence) -> None:
        """Frees the pages that lie wholly before the window of its next token."""
        for window, pages in seq.pages.items():
            if window is None:
                continue
            i = max(0, seq.computed - window) // self.config.page - 1
            while i >= 0 and pages[i] >= 0:
                self.pages[window].release(pages[i : i + 1])
                pages[i], seq.paged = -1, True
                i -= 1

    def passing(self, seq: Sequence) -> Iterator[int]:
        """Of each window, the tokens that are computed when it passes its next page."""
        for window in seq.pages:
            if window is not None:
                yield window + (max(0, seq.computed - window) // self.config.page + 1) * self.config.page

    def enter(self, seq: Sequence, source: int | None) -> None:
        """A slot, with what was parked, or with the state in slot `source`."""
        seq.slot = self.slots.acquire()
        if seq.parked:
            self._unpark(seq)
        elif source is not None and source != seq.slot:
            self.moves.append(CopySlot(source, seq.slot))

    def release(self, seq: Sequence) -> None:
        """Its slot and pages go back."""
        self.slots.release(seq.slot)
        seq.slot, seq.steady = -1, 0
        for window, pages in seq.pages.items():
            self.pages[window].release(pages)

    def park(self, seq: Sequence) -> None:
        """Slot and pages to host memory, or, where that is full, back: it begins anew."""
        self.free_passed(seq)
        live = {window: tuple(page for page in pages if page >= 0) for window, pages in seq.pages.items()}
        size = self.config.slot_bytes + sum(len(live[window]) * page_bytes for window, _, page_bytes in self.config.pools)
        slot = seq.slot
        self.release(seq)
        if self.host_bytes + size <= self.config.host_bytes:
            self.moves.append(Park(seq.request.id, slot, live))
            seq.parked = size
            self.host_bytes += size
        else:
            self.restart(seq)

    def _unpark(self, seq: Sequence) -> None:
        new = {}
        for window, pages in seq.pages.items():
            live = [i for i, page in enumerate(pages) if page >= 0]
            new[window] = tuple(self.pages[window].acquire(len(live)))
            for i, page in zip(live, new[window], strict=True):
                pages[i] = page
        self.moves.append(Unpark(seq.request.id, seq.slot, new))
        self.host_bytes -= seq.parked
        seq.parked = 0

    def restart(self, seq: Sequence) -> None:
        """It owns nothing and begins anew, its answer so far now part of what is prefilled."""
        self.host_bytes -= seq.parked
        seq.parked, seq.borrowed = 0, False
        seq.pages = no_pages(self.pages)
        seq.goal, seq.computed, seq.chain = len(seq.tokens), 0, None

    def drop(self, seq: Sequence) -> None:
        """What is parked of it, once it is over."""
        if seq.parked:
            self.host_bytes -= seq.parked
            self.moves.append(Drop(seq.request.id))
