"""A snapshot is found by exactly its tokens, the longest first, and goes out when it was used least recently."""

import random
from array import array

import pytest

from needlework.serve.prefix import Prefix, Snapshot

TOKENS = random.Random(0).sample(range(1000), 40)


def snapshot(length, slot=0):
    return Snapshot(length, slot, {None: array("i", range(length // 4))})


def test_a_chain_covers_whole_blocks_and_leaves_a_token():
    prefix = Prefix(8)
    assert [len(prefix.chain(TOKENS[:n])) for n in (1, 8, 9, 16, 17, 40)] == [0, 0, 1, 1, 2, 4]


def test_the_longest_snapshot_is_found():
    prefix = Prefix(8)
    chain = prefix.chain(TOKENS)
    for n in (8, 24):
        prefix.put(chain[n // 8 - 1], snapshot(n))
    assert prefix.find(chain).length == 24
    assert prefix.find(prefix.chain(TOKENS[:24])).length == 8  # its last token is to be computed
    assert prefix.find(prefix.chain(TOKENS[:25] + [0])).length == 24


@pytest.mark.parametrize("i", range(24))
def test_another_token_anywhere_is_another_beginning(i):
    prefix = Prefix(8)
    prefix.put(prefix.chain(TOKENS)[2], snapshot(24))
    other = list(TOKENS)
    other[i] += 1
    assert prefix.find(prefix.chain(other)) is None
    assert prefix.find(prefix.chain(TOKENS[8:])) is None  # the same blocks at another place


def test_the_least_recently_used_goes_first():
    prefix = Prefix(8)
    chains = [prefix.chain([i] * 9) for i in range(3)]
    for slot, chain in enumerate(chains):
        prefix.put(chain[0], snapshot(8, slot))
    prefix.find(chains[0])
    assert [prefix.pop().slot for _ in range(3)] == [1, 2, 0]
    assert prefix.pop() is None and prefix.pop(chains[0][0]) is None


def test_a_prompt_parts_from_those_before_it_where_their_blocks_end():
    prefix = Prefix(8)
    assert prefix.parting(prefix.chain(TOKENS)) == 0
    assert prefix.parting(prefix.chain(TOKENS[:20] + [0] * 20)) == 16
    assert prefix.parting(prefix.chain(TOKENS)) == 32
    assert prefix.parting(prefix.chain([0] * 40)) == 0


def test_the_oldest_beginnings_are_forgotten_from_their_ends(monkeypatch):
    monkeypatch.setattr("needlework.serve.prefix.SEEN", 4)
    prefix = Prefix(8)
    prefix.parting(prefix.chain(TOKENS[:25]))  # three blocks
    prefix.parting(prefix.chain([0] * 17))  # two more
    assert prefix.parting(prefix.chain(TOKENS)) == 16
