"""A conversation from the side that asks: an engine in this process and a server's address answer alike."""

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

from needlework.serve.conversation import Asking, Local, Remote
from needlework.serve.refused import RefusedError
from needlework.serve.request import Event

from .engine import FakeEngine, says
from .test_http import served
from .texts import END, byte_text

HELLO = [{"role": "user", "content": "hé 👍"}]


@pytest.fixture(params=("local", "remote"))
def partner(request):
    """Makes what answers from an engine and an Asking."""
    if request.param == "local":
        yield lambda engine, asking: Local(engine, byte_text(), asking)
        return
    held = []

    def remote(engine, asking):
        server = served(engine, key="k")
        held.append(server)
        return Remote(server.__enter__(), asking, key="k")

    yield remote
    for server in held:
        server.__exit__(None, None, None)


def test_an_answer_comes_in_whole_characters_and_is_drawn_as_asked(partner):
    engine = FakeEngine()
    assert "".join(partner(engine, Asking(0.5)).answer(HELLO)) == "user: hé 👍\n"
    (stream,) = engine.streams
    assert stream.request.sampling.temperature == 0.5 and stream.request.stop_tokens == {END}
    assert stream.request.max_tokens == engine.length - len(stream.request.prompt)


def test_an_answer_has_no_more_tokens_than_asked(partner):
    engine = FakeEngine()
    "".join(partner(engine, Asking(most=3)).answer(HELLO))
    assert engine.streams[0].request.max_tokens == 3


def test_what_the_engine_fails_is_an_error(partner):
    answers = partner(FakeEngine(lambda request: [*says("ab")[:1], Event(finish="error", error="out of memory")]), Asking())
    with pytest.raises((RefusedError, ValueError), match="out of memory"):
        list(answers.answer(HELLO))


def test_a_conversation_that_is_too_long_is_an_error(partner):
    answers = partner(FakeEngine(), Asking())
    with pytest.raises(ValueError, match="tokens"):
        list(answers.answer([{"role": "user", "content": "x" * 300}]))


def test_whoever_stops_reading_cancels(partner):
    engine = FakeEngine(lambda request: says("ab")[:1])
    answer = partner(engine, Asking()).answer(HELLO)
    assert "".join(next(answer) for _ in range(1)) in ("a", "")
    answer.close()
    engine.until(lambda e: e.running == 0)


def test_a_server_that_is_not_there_or_of_another_kind_is_named():
    with pytest.raises(OSError, match=r"http://127\.0\.0\.1:9/v1: "):
        Remote("http://127.0.0.1:9", Asking())
    with served(FakeEngine(), key="k") as url, pytest.raises(ValueError, match=f"{url}/v1: the API key"):
        Remote(f"{url}/v1/", Asking())
