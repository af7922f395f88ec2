"""A slot has one owner, a page as many as were counted; what is given back is free again."""

import pytest

from needlework.serve.pools import PagePool, Slots, most_pages


def test_slots_are_given_once_and_taken_back_once():
    slots = Slots(3)
    given = [slots.acquire() for _ in range(3)]
    assert sorted(given) == [0, 1, 2] and slots.free == 0
    slots.release(given[1])
    assert slots.free == 1 and slots.acquire() == given[1]
    slots.release(given[0])
    with pytest.raises(KeyError):
        slots.release(given[0])


def test_a_page_is_free_when_its_last_owner_lets_it_go():
    pool = PagePool(4)
    a, b = pool.acquire(2)
    pool.retain([a, -1])
    pool.release([-1, a, b])
    assert pool.free == 3 and pool.owners[a] == 1 and a not in pool.acquire(3)
    pool.release([a])
    assert pool.acquire(1) == [a]
    with pytest.raises(AssertionError, match="1 pages wanted, 0 are free"):
        pool.acquire(1)


@pytest.mark.parametrize("window", [1, 5, 16, 20, 64])
@pytest.mark.parametrize("chunk", [1, 7, 16, 40])
def test_a_sequence_never_holds_more_pages_than_the_most_and_somewhere_as_many(window, chunk):
    page, length = 16, 400
    held = []
    for first in range(chunk):  # tokens of the first chunk, so that chunks begin anywhere in a page
        for start in [0, *range(first, length - chunk, chunk)]:
            held.append((start + chunk - 1) // page - max(0, start - window) // page + 1)
    assert max(held) == most_pages(length, window, page, chunk)
    assert most_pages(30, window, page, chunk) <= 2 and most_pages(length, None, page, chunk) == 25
