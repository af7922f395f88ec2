"""Snapshots of prompts' beginnings, found by their tokens; the least recently used goes first.

A snapshot is a slot with the fixed state after so many tokens, and references to the pages of these tokens. A chain of SHA-256 digests
names a beginning: digest i covers digest i − 1 and block i, so equal digests mean equal tokens from the first on.

Snapshots are worth their slots at two places of a prompt only: at its last block, for the same conversation's next turn, and where it
parts from a prompt seen before, for the others that begin alike.
"""

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import takewhile
from typing import NamedTuple

from needlework.serve.step import Window

SEEN = 1 << 16  # digests that are remembered without a snapshot, about 10 MB


class Snapshot(NamedTuple):
    """State after `length` tokens. pages: in order, −1 for those that its windows have passed."""

    length: int
    slot: int
    pages: Mapping[Window, array]


class Prefix:
    """Snapshots by digest, at multiples of `block` tokens. The caller that takes one out gives its slot and pages back."""

    def __init__(self, block: int):
        self.block = block
        self._snapshots: OrderedDict[bytes, Snapshot] = OrderedDict()
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._snapshots)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._snapshots

    def chain(self, tokens: Sequence[int]) -> list[bytes]:
        """Digests of the whole blocks of tokens, but for the last token, whose logits no snapshot holds."""
        digests, digest = [], b""
        for i in range(0, (len(tokens) - 1) // self.block * self.block, self.block):
            digest = sha256(digest + array("q", tokens[i : i + self.block]).tobytes()).digest()
            digests.append(digest)
        return digests

    def parting(self, chain: Sequence[bytes]) -> int:
        """Tokens that the chain shares with those given before; from now on it is one of them."""
        shared = len(list(takewhile(self._seen.__contains__, chain)))
        for digest in reversed(chain):  # the first blocks last: they go out after those that follow them
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        while len(self._seen) > SEEN:
            self._seen.popitem(last=False)
        return shared * self.block

    def find(self, chain: Sequence[bytes]) -> Snapshot | None:
        """The longest snapshot on the chain; it is now the most recently used."""
        for digest in reversed(chain):
            if digest in self._snapshots:
                self._snapshots.move_to_end(digest)
                return self._snapshots[digest]
        return None

    def put(self, digest: bytes, snapshot: Snapshot) -> None:
        self._snapshots[digest] = snapshot

    def pop(self, digest: bytes | None = None) -> Snapshot | None:
        """Takes out this snapshot, or the least recently used; None where there is none."""
        if digest is not None:
            return self._snapshots.pop(digest, None)
        return self._snapshots.popitem(last=False)[1] if self._snapshots else None
