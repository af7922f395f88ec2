"""Answers to one prompt that came together: one of them prefills it, and the others start from its state at the prompt's end.

    leads       the first of a group that is admitted, while it prefills
    follows     has a slot and nothing in it, and waits for its leader; the scheduler runs it in no step. Where no page may be two
                sequences', it has pages too, and makes way like others
    forks       in the step that ends the prompt: it has the leader's state by copy, and its pages

Where a leader ends or makes way before that, its followers wait for slots again with the others. The next one that is admitted leads.
"""

from bisect import insort

from needlework.serve.memory import Memory
from needlework.serve.sequence import Sequence, no_pages
from needlework.serve.step import Copy

by_arrival = lambda seq: seq.arrival


class Groups:
    """Over the scheduler's own lists of sequences and their memory."""

    def __init__(self, memory: Memory, waiting: list[Sequence], running: list[Sequence]):
        self.memory, self.waiting, self.running = memory, waiting, running
        self._leaders: dict[int | None, Sequence] = {}  # by group

    def leader(self, seq: Sequence) -> Sequence | None:
        """Who prefills its prompt now, if it has computed nothing of its own."""
        return self._leaders.get(seq.group) if _at_its_prompt(seq) and not seq.parked else None

    def lead(self, seq: Sequence) -> None:
        """It is admitted; the others of its group may follow."""
        if _at_its_prompt(seq):
            self._leaders.setdefault(seq.group, seq)

    def follow(self, seq: Sequence, leader: Sequence) -> bool:
        """Whether it has a slot now."""
        seq.leader = leader
        if not self.memory.room(seq, 0, slots=1, spare=len(self.running)):
            seq.leader = None
            return False
        self.memory.follow(seq)
        self.waiting.remove(seq)
        insort(self.running, seq, key=by_arrival)
        return True

    def fork(self, leader: Sequence) -> tuple[list[Sequence], list[Copy]]:
        """At the end of its prompt: those that start from there, and the copies that this takes."""
        forks = self._dismissed(leader)
        return forks, [copy for seq in forks for copy in self.memory.fork(seq)]

    def stop(self, seq: Sequence) -> None:
        """It runs no more."""
        self.running.remove(seq)
        seq.leader = None
        for one in self._dismissed(seq):
            self.wait_again(one)

    def wait_again(self, follower: Sequence) -> None:
        self.running.remove(follower)
        self.memory.release(follower)
        follower.leader, follower.pages = None, no_pages(self.memory.pages)
        insort(self.waiting, follower, key=by_arrival)

    def _dismissed(self, leader: Sequence) -> list[Sequence]:
        """Its followers; it leads no more."""
        if self._leaders.get(leader.group) is not leader:
            return []
        del self._leaders[leader.group]
        return [seq for seq in self.running if seq.leader is leader]


def _at_its_prompt(seq: Sequence) -> bool:
    return seq.group is not None and not seq.decoding and len(seq.tokens) == len(seq.request.prompt)
