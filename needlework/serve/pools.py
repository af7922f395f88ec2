"""Who owns which slot and which page: indices and reference counts. The tensors lie in `tables.py`."""

from array import array
from collections.abc import Iterable


def pages_for(tokens: int, page: int) -> int:
    """Pages of `page` rows that hold so many tokens."""
    return -(-tokens // page)


def most_pages(length: int, window: int | None, page: int, chunk: int) -> int:
    """Most pages that a sequence of `length` tokens holds at once, computed in chunks of at most `chunk` tokens.

    A window needs its own rows before the chunk and the chunk's: W + chunk rows in a line, which begin anywhere in a page.
    """
    whole = pages_for(length, page)
    return whole if window is None else min(whole, (window + chunk - 2) // page + 2)


def passed(tokens: int, window: int | None, page: int) -> int:
    """Pages that lie wholly before the window once so many tokens are computed."""
    return 0 if window is None else max(0, tokens - window) // page


def live(pages: array, tokens: int, window: int | None, page: int) -> array:
    """A copy of a line of pages, −1 for those that its window has passed."""
    n = passed(tokens, window, page)
    return array("i", [-1] * n) + pages[n:]


class Slots:
    """Slots 0 … count − 1; each has one owner or none."""

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def acquire(self) -> int:
        slot = self._free.pop()
        self._held.add(slot)
        return slot

    def release(self, slot: int) -> None:
        self._held.remove(slot)
        self._free.append(slot)


class PagePool:
    """Pages 0 … count − 1 of one window, each with the number of its owners. −1 in a line of pages is no page."""

    def __init__(self, count: int):
        self.count = count
        self.owners = [0] * count
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def acquire(self, n: int) -> list[int]:
        """n free pages, now with one owner each."""
        assert n <= self.free, f"{n} pages wanted, {self.free} are free"
        pages = [self._free.pop() for _ in range(n)]
        self.retain(pages)
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """One owner more of each."""
        for page in pages:
            if page >= 0:
                self.owners[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One owner less of each; those without any are free."""
        for page in pages:
            if page >= 0:
                self.owners[page] -= 1
                assert self.owners[page] >= 0, f"page {page} has no owner"
                if not self.owners[page]:
                    self._free.append(page)
