"""Snapshots of beginnings on the scheduler's slots and pages: who borrows one, when one is taken, and which makes way."""

from collections.abc import Mapping

from needlework.serve.capacity import SchedulerConfig
from needlework.serve.pools import PagePool, Slots, live
from needlework.serve.prefix import Prefix, Snapshot
from needlework.serve.sequence import Sequence, no_pages
from needlework.serve.step import CopySlot, Window


class Snapshots:
    """On slots and pages that sequences own too; the first to go where these run short."""

    def __init__(self, config: SchedulerConfig, slots: Slots, pages: Mapping[Window, PagePool]):
        self.config, self.slots, self.pages = config, slots, pages
        self.prefix = Prefix(config.align)

    def borrow(self, seq: Sequence) -> Snapshot | None:
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

    def give_back(self, seq: Sequence) -> None:
        """What it borrowed."""
        for window, pages in seq.pages.items():
            self.pages[window].release(pages)
        seq.pages = no_pages(self.pages)
        seq.computed, seq.borrowed = 0, False

    def take(self, seq: Sequence) -> tuple[bytes, CopySlot] | None:
        """What it has computed becomes a snapshot, if it is worth one and there is a slot; older ones make way."""
        if seq.computed not in seq.marks or seq.chain is None:
            return None
        digest = seq.chain[seq.computed // self.config.align - 1]
        if digest in self.prefix:
            return None
        while not self.slots.free:
            if not self.evict():
                return None
        pages = {window: live(line, seq.computed, window, self.config.page) for window, line in seq.pages.items()}
        for window, line in pages.items():
            self.pages[window].retain(line)
        snapshot = Snapshot(seq.computed, self.slots.acquire(), pages)
        self.prefix.put(digest, snapshot)
        return digest, CopySlot(seq.slot, snapshot.slot)

    def evict(self, digest: bytes | None = None) -> bool:
        """Whether there was one to take out: this one, or the least recently used."""
        snapshot = self.prefix.pop(digest)
        if snapshot is None:
            return False
        self.slots.release(snapshot.slot)
        for window, pages in snapshot.pages.items():
            self.pages[window].release(pages)
        return True
