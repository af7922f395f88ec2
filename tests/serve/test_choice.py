"""An answer's text from the engine's events: what is given out and when, where it ends, its logprobs."""

import pytest

from needlework.serve.choice import Choice
from needlework.serve.refused import RefusedError
from needlework.serve.request import Event, Request, Sampling

from .texts import END, byte_text


def choice(stops=(), **sampling):
    request = Request(id="x", prompt=(97,), max_tokens=16, sampling=Sampling(**sampling), stop_tokens=frozenset({END}))
    return Choice(byte_text(), request, stops)


def events(text, finish=None):
    said = [Event(token=token, logprob=-0.5, top=((token, -0.5), (65, -2.0))) for token in text.encode()]
    return [*said[:-1], Event(token=said[-1].token, finish=finish, logprob=-0.5)] if finish else said


def test_an_answer_ends_by_its_length_with_what_was_held_back():
    one = choice(("xyz",))
    assert one.push(events("ab x")).text == "ab " and one.finish is None
    last = one.push(events("xy", "length"))
    assert (last.text, last.finish, one.tokens) == ("xxy", "length", 6)


def test_the_token_that_ends_a_text_is_no_text_but_is_counted():
    one = choice()
    delta = one.push([*events("hi"), Event(token=END, finish="stop")])
    assert (delta.text, delta.finish, one.tokens) == ("hi", "stop", 3)
    assert choice().push(events("hi", "stop")).text == "hi"  # a grammar's end is text


def test_what_comes_behind_a_stop_string_is_neither_given_nor_counted():
    one = choice((", ",))
    delta = one.push(events("one, two", "length"))
    assert (delta.text, delta.finish, one.tokens) == ("one", "stop", 5)


def test_a_character_that_never_came_whole_is_given_at_the_end():
    one = choice()
    assert one.push([Event(token=0xE4), Event(token=0xB8)]).text == ""
    assert one.push([Event(token=0xF0, finish="length")]).text == "\ufffd\ufffd"


def test_logprobs_are_of_the_tokens_that_were_given():
    one = choice(logprobs=2)
    scored = one.push([*events("hé"), Event(token=END, finish="stop", logprob=-1.0)]).scored
    assert [s.piece.bytes for s in scored] == [(104,), (0xC3,), (0xA9,)] and [s.at for s in scored] == [0, 1, 1]
    assert [piece.text for piece, _ in scored[0].top] == ["h", "A"]


@pytest.mark.parametrize("finish", ("error", "cancelled"))
def test_an_answer_that_the_engine_failed_is_refused(finish):
    one = choice()
    with pytest.raises(RefusedError) as caught:
        one.push([Event(token=65), Event(finish=finish, error="out of memory" if finish == "error" else None)])
    assert caught.value.status == 503 and ("out of memory" in str(caught.value)) == (finish == "error")
