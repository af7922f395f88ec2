"""A stream's events reach its one reader in order, whichever comes first; the reader is woken once until it takes."""

from needlework.serve.request import Event
from needlework.serve.stream import Stream


class Added(list):
    """A bell of which a test sees what is added."""

    def add(self, heard):
        self.append(heard)


def stream():
    return Stream("a", lambda id: None)


def test_what_came_before_anybody_listened_is_told_at_once():
    one, told = stream(), []
    assert one.put(Event(1)) is None and one.put(Event(2)) is None
    one.listen(Added(), lambda: told.append(True))
    assert told == [True] and [event.token for event in one.take()] == [1, 2] and one.take() == []
    other = stream()
    other.listen(Added(), lambda: told.append(False))
    assert told == [True]


def test_a_reader_is_told_once_until_it_takes():
    one, bell = stream(), Added()
    heard = lambda: None
    one.listen(bell, heard)
    assert one.put(Event(1)) is bell and one.put(Event(2)) is None and bell == [heard]
    assert [event.token for event in one.take()] == [1, 2]
    assert one.put(Event(3)) is bell and bell == [heard, heard]
    assert [event.token for event in one.take()] == [3]


def test_a_thread_reads_to_the_last_event():
    one = stream()
    for event in (Event(1), Event(2), Event(3, finish="stop"), Event(4)):
        one.put(event)
    assert [event.token for event in one] == [1, 2, 3]


def test_whoever_asked_may_cancel():
    gone = []
    Stream("mine", gone.append).cancel()
    assert gone == ["mine"]
